"""What a call should run: the stores' configs in order of trust, then a heuristic schedule, then eager.

A database is never an error here: one that cannot be read is a miss with one warning, and what it holds is data that is
checked again (legality at the real shape, knobs against their space) before a kernel is made from it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from . import settings
from .device import describe, environment, limits
from .errors import BuildError, Infeasible, InputError, MissError
from .fusion import EAGER, Fusion, Plan
from .miss import NEAR_ROWS_LOG2, Miss, nearest, rows_apart
from .program import Layouts, Program
from .store.layers import Layers
from .store.records import BestRecord, EnvironmentRecord, GraphRecord, WorkloadRecord
from .tally import TIERS

SEED_LOG2 = 5.0  # one heuristic schedule serves row counts within a factor of 32, so that most new counts are no new build
TUNED = TIERS[:3]  # what a store has
_warned: set[str] = set()


def warn_once(key: str, text: str) -> None:
    """One warning a process for one cause."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True)
class Choice:
    """A config for a call, and how it was found. `checked`: a search has checked these very kernels on this device.
    `miss`: where no store had one, and somebody asked why, what is nearest to the call."""

    tier: str
    note: str
    plan: Plan
    schedules: tuple[dict[str, int | str], ...] = ()
    best: BestRecord | None = None
    checked: bool = False
    miss: Miss | None = None


class _Where:
    """A call to choose for; how its values lie in memory is worked out only where it must be."""

    def __init__(
        self, fusion: Fusion, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], work: WorkloadRecord,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.fusion, self.inputs, self.sizes, self.work, self.device = fusion, inputs, sizes, work, device

    @cached_property
    def layouts(self) -> Layouts:
        """The layout of every value at this call."""
        return Layouts(self.fusion, self.inputs, self.sizes)

    @cached_property
    def fast_key(self) -> tuple[Any, ...] | None:
        """What decides the layout where every input is contiguous: then row counts do not matter, but for those of 0 and
        1. None where strides must be looked at: rows that run on among themselves may still lie apart from their columns."""
        if not all(t.is_contiguous() for t in self.inputs):
            return None
        return self.work.family, self._few, str(self.device)

    @property
    def _few(self) -> tuple[int, ...]:
        return tuple(min(n, 2) for _, n in sorted(self.sizes.items()))

    @property
    def seed_key(self) -> tuple[Any, ...]:
        """What a heuristic schedule is made for: a layout, and the magnitude of the row count."""
        strides = () if self.fast_key is not None else tuple(t.stride() for t in self.inputs)
        return self.work.family, self._few, str(self.device), strides, math.ceil(math.log2(max(1, self.work.rows)) / SEED_LOG2)


class Lookup:
    """The configs of one function's calls, and the programs made of them."""

    def __init__(self, name: str, store: str | None, read: settings.Settings) -> None:
        self.name, self.settings = name, read
        self.url = settings.store_url(store) if store else read.store
        self._layers = Layers((self.url, *read.layers), warn_once, bool(store) or read.named)
        self._programs: dict[Any, Program] = {}
        self._ready: dict[Any, Program] = {}
        self._heuristic: dict[tuple[Any, ...], Choice] = {}
        self._bad: dict[tuple[str, str, str], str] = {}

    def graphs(self) -> list[GraphRecord]:
        """The tuned chains of this name."""
        return self._layers.graphs(self.name)

    def distrust(self, choice: Choice, family: str, device: str, why: str) -> None:
        """Use this config for this workload family no more, or no heuristic schedule: its kernel was wrong."""
        self._bad[family, device, _config(choice)] = why

    def choose(
        self, fusion: Fusion, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], work: WorkloadRecord,
        device: torch.device, why: bool = False,
    ) -> tuple[Choice, Program | None]:  # fmt: skip
        """The best choice that can be built, and its program; None for the eager function.

        `why`: say of a miss what comes nearest to it, which takes a query over all that is tuned of the chain.
        Raises MissError where the store has nothing and AUTOFUSE_ON_MISS is "error".
        """
        name = str(device)
        where = _Where(fusion, inputs, sizes, work, device)
        reasons: list[str] = []
        miss = None
        try:
            candidates = self._candidates(work, name, reasons)
            if not candidates and not reasons and (why or self.settings.on_miss == "error"):
                miss = self._nearest(work, name)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as e:
            candidates = []
            reasons.append(f"a row of the store is not what autofuse writes ({e})")
        for choice in candidates:
            bad = self._bad.get((work.family, name, _config(choice)))
            if bad is not None:
                reasons.append(f"{choice.tier}: its kernel failed: {bad}")
                continue
            try:
                return choice, self._program(where, choice)
            except (Infeasible, BuildError, InputError) as e:
                reasons.append(f"{choice.tier}: {e}")
            except (TypeError, ValueError, LookupError, AssertionError, AttributeError) as e:  # a row that no autofuse wrote
                reasons.append(f"{choice.tier}: a row of the store is not what autofuse writes ({type(e).__name__}: {e})")
        note = "; ".join(reasons) or "the store has nothing near it"
        if miss is not None:
            note += f": the nearest differs in {', '.join(dict.fromkeys(d.partition(':')[0] for d in miss.differs))}"
        if self.settings.on_miss == "error":
            raise MissError(
                f"{self.name} has no tuned kernel for rows {work.rows}, extents {work.extents} ({miss or note}): run "
                "`autofuse tune` for it, or set AUTOFUSE_ON_MISS to heuristic or eager"
            )
        if (work.family, name, "") in self._bad:
            return Choice("eager", f"its heuristic kernel failed: {self._bad[work.family, name, '']}", Plan(()), miss=miss), None
        if self.settings.on_miss == "heuristic":
            try:
                first = self._heuristic.get(where.seed_key)
                if first is None:
                    plan, schedules = where.layouts.plan(fusion.fused(), limits(name))
                    first = self._heuristic[where.seed_key] = Choice("heuristic", note, plan, tuple(schedules))
                choice = replace(first, note=note, miss=miss)
                return choice, self._program(where, choice)
            except (Infeasible, BuildError) as e:
                warn_once(f"build {self.name}", f"{self.name} runs its eager function: {e}")
                note = str(e)
        return Choice("eager", note, Plan(()), miss=miss), None

    def _candidates(self, work: WorkloadRecord, device: str, reasons: list[str]) -> list[Choice]:
        """Tuned configs, best first: by tier, environment, verified, nearness of rows, layer and time. Rows that are not
        what autofuse writes are told in `reasons`."""
        here, silicon = environment(device), describe(device)
        ranked = []
        for layer, best in self._layers.best(work.family, silicon.uid, silicon.arch):
            distance = rows_apart(best.rows, work.rows)
            if distance > NEAR_ROWS_LOG2:
                continue
            tier = 2 if best.device_uid != silicon.uid else int(best.rows != work.rows)
            rank, note = environment_rank(best.environment, here)
            ranked.append(((tier, rank, not best.verified, distance, layer, best.median_us), best, note))
        made = []
        for (tier, rank, *_), best, note in sorted(ranked, key=lambda r: r[0]):
            at = "" if tier == 0 else f"tuned at rows {best.rows}{f' on {best.device_name}' if tier == 2 else ''}"
            try:
                plan = Plan.parse(best.plan)
            except InputError as e:
                reasons.append(f"{TUNED[tier]}: a row of the store is not what autofuse writes ({e})")
                continue
            schedules = tuple(dict(s.knobs) for s in best.schedules)
            text = "; ".join(x for x in (at, note) if x)
            made.append(Choice(TUNED[tier], text, plan, schedules, best, rank < 2 and tier < 2))
        return made

    def _nearest(self, work: WorkloadRecord, device: str) -> Miss | None:
        """What of all that is tuned comes nearest to a call that found nothing."""
        silicon = describe(device)
        known = self._layers.entries(work.chain_key, self.name, work.family, silicon.arch)
        return nearest(known, work, silicon.uid, silicon.arch, environment(device))

    def _program(self, where: _Where, choice: Choice) -> Program | None:
        if choice.plan.is_eager:
            return None
        ready = (*where.fast_key, str(choice.plan), repr(choice.schedules)) if where.fast_key is not None else None
        if ready is not None and ready in self._ready:
            return self._ready[ready]
        layouts, work, device = where.layouts, where.work, where.device
        cap = limits(str(device))
        parts = [p.nodes for p in choice.plan.parts if p.kind != EAGER]
        shapes = tuple(layouts.task(nodes, cap).layout for nodes in parts)
        orders = tuple(sorted(layouts.orders.items()))
        key = (work.family, str(choice.plan), repr(choice.schedules), shapes, orders, device)
        found = self._programs.get(key)
        if found is None:
            read = self.settings
            found = Program(layouts, choice.plan, choice.schedules, cap, read.cache, device, read.artifacts)
            self._programs[key] = found
        if ready is not None:
            self._ready[ready] = found
        return found


def _config(choice: Choice) -> str:
    return choice.best.config_uid if choice.best is not None else ""


def environment_rank(then: EnvironmentRecord, here: EnvironmentRecord) -> tuple[int, str]:
    """0 the same environment; 1 the same kernels from a compiler of the same minor version; 2 a candidate."""
    if then.uid == here.uid:
        return 0, ""

    def minor(version: str) -> str:
        return ".".join(version.split(".")[:2])

    same = minor(then.triton) == minor(here.triton) and then.compiler == here.compiler
    if same and then.kernel_source_hash == here.kernel_source_hash:
        return 1, ""
    return 2, "tuned in another environment: tune again to confirm"
