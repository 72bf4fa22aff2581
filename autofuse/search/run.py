"""One search over one workload: where the next trial goes, and what it ends with.

A segment is tuned once, by its own study; the fusion boundaries are the shortest path over segment times. The next trial
goes to a segment on the optimistic shortest path: the one that may still gain most. At the end the best plans are measured
whole, interleaved with eager, unfused and the incumbent, and that decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import cost
from ..chain import Chain
from ..device import limits
from ..errors import Infeasible
from ..fusion import EAGER, Fusion, Part, Plan
from ..kernels.registry import kind_of
from ..program import Layouts
from ..result import Progress, ProgressCallback
from ..store.records import ChainRecord, ConfigRecord, ScheduleRecord, TrialRecord, WorkloadRecord
from ..store.store import Store
from ..traced import Traced
from ..workload import describe as describe_workload
from ..workload import layout_class, layouts_of, workload_of
from .client import Worker
from .measure import ceilings, choose_protocol
from .study import Proposal, SegmentStudy, optimistic, shortest

ENOUGH = 0.97  # share of the roofline at which a search has nothing left to win
FINALISTS = 3
SEGMENT_TIMEOUT_S = 60.0
AHEAD = 4  # schedules asked for and built at once
AHEAD_TIMEOUT_S = 30.0
SPILLS = 8  # registers: a kernel that spills more, and more than twice what the fastest one does, is not measured
TIE = 0.02  # two times closer than this are a tie, and a tie goes to the simpler config


@dataclass
class _Part:
    """One edge between cuts: a segment with its study, and its time as PyTorch's own operations."""

    nodes: tuple[int, ...]
    start: int
    end: int
    bound_us: float
    workload: WorkloadRecord
    chain: Chain
    study: SegmentStudy | None
    eager_us: float = math.inf
    eager_tried: bool = False
    gave_up: bool = False
    waiting: list[Proposal] = field(default_factory=list)  # asked for and built, but not measured
    spills: int | None = None  # registers that its fastest kernel so far spills

    @property
    def best_us(self) -> float:
        kernel = self.study.best_us if self.study else math.inf
        return min(kernel, self.eager_us)

    @property
    def best_kind(self) -> str:
        if self.study is not None and self.study.best_us <= self.eager_us:
            return self.study.kind.name
        return EAGER

    @property
    def open(self) -> bool:
        """Whether a trial of this segment can still bring something."""
        return self.study is not None and not self.gave_up and (bool(self.waiting) or not self.study.spent)

    def seen(self, us: float | None, spills: int | None) -> None:
        """A kernel of it has been timed."""
        if us is not None and self.study is not None and us < self.study.best_us:
            self.spills = spills or 0

    def optimistic_us(self) -> float:
        if not self.open:
            return self.best_us
        assert self.study is not None
        return min(self.eager_us, optimistic(self.study.best_us, self.study.trials, self.bound_us))


@dataclass
class Run:
    """One search over one workload."""

    name: str
    traced: Traced
    fusion: Fusion
    inputs: list[torch.Tensor]
    sizes: dict[str, int]
    device: str
    trials_budget: int
    seconds_budget: float
    seed: int
    store: Store
    progress: ProgressCallback | None
    pins: dict[str, int | str] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)
    done: int = 0
    run_id: int = 0
    clock: Callable[[], float] = time.monotonic  # seconds of which the budget is spent

    def __post_init__(self) -> None:
        self.chain = self.traced.chain
        self.layouts = Layouts(self.fusion, self.inputs, self.sizes)
        self.limits = limits(self.device)
        self.workload = workload_of(self.chain, layouts_of(self.chain, self.inputs), self.sizes)
        self.ceilings = ceilings(self.device, self.workload.bytes_min)
        self.protocol = choose_protocol(self.workload.bytes_min, self.device)
        self.roofline_us = cost.roofline_us(self.chain, self.sizes, self.ceilings)
        self.configs: dict[str, tuple[ConfigRecord, float]] = {}
        self.eager_us: float | None = None
        self.unfused_us: float | None = None
        self.unfused_plan = ""
        self.shown_us = math.inf
        self.started = self.clock()
        self.reason = ""

    # ---- the parts

    def make_parts(self) -> None:
        """Every legal segment between two cuts; single operations are always there, as eager if as nothing else."""
        for start, end, nodes in self.fusion.edges():
            segment = self.fusion.segment(nodes)
            study = None
            if self.fusion.legal(nodes) is None:
                try:
                    task = self.layouts.task(nodes, self.limits)
                    study = SegmentStudy(task, kind_of(task), self.seed, self.pins)
                except Infeasible:
                    study = None
            if study is None and len(nodes) > 1:
                continue
            sizes = segment.sizes(self.sizes)
            layouts = tuple(_layout_text(self.layouts, segment.reads, v, segment.chain, k) for k, v in enumerate(segment.reads))
            work = workload_of(segment.chain, layouts, sizes)
            bound = cost.roofline_us(segment.chain, sizes, self.ceilings)
            self.parts.append(_Part(nodes, start, end, bound, work, segment.chain, study))
        self.store.add_chain_segments(
            ChainRecord(self.chain.key, self.name, self.chain.graph),
            [
                (
                    ",".join(map(str, p.nodes)),
                    ChainRecord(p.chain.key, f"{self.name}[{','.join(map(str, p.nodes))}]", p.chain.graph),
                )
                for p in self.parts
            ],
        )

    def resume(self, environment_uid: str, device_uid: str) -> None:
        """Trials of equal segments, of this or any other chain and run, measured here and with this software."""
        for part in self.parts:
            if part.study is None:
                continue
            for t in self.store.segment_trials(device_uid, environment_uid, part.workload.uid, self.protocol):
                if t.schedule is None:
                    continue
                if t.schedule.kind == EAGER:
                    part.eager_tried = True
                    part.eager_us = min(part.eager_us, t.median_us or math.inf)
                elif t.schedule.kind == part.study.kind.name and t.schedule.space_version == part.study.space.version:
                    part.study.remember(t.schedule.knobs, t.source_hash, t.median_us)

    def transfer(self, device_uid: str) -> None:
        """The winners of near workloads of the same segment are tried first, then what usually beats a seed."""
        for part in self.parts:
            if part.study is None:
                continue
            if not part.study.trials:
                near = self.store.neighbours(part.chain.key, None, 8)
                rows = math.log2(max(1, part.workload.rows))
                near.sort(key=lambda n: abs(math.log2(max(1, n[0].rows)) - rows))
                for _, schedule, _ in near[:3]:
                    if schedule.kind == part.study.kind.name and schedule.space_version == part.study.space.version:
                        part.study.enqueue(schedule.knobs)
            part.study.enqueue_variants()

    # ---- time

    def left_s(self) -> float:
        return self.seconds_budget - (self.clock() - self.started)

    def spent(self) -> bool:
        if self.done >= self.trials_budget:
            self.reason = f"{self.trials_budget} trials"
            return True
        if self.left_s() <= 0:
            self.reason = f"{self.seconds_budget:g} seconds"
            return True
        return False

    def best_us(self) -> float:
        """The best time known: of a whole config, else the shortest path over segment times."""
        whole = min((us for _, us in self.configs.values()), default=math.inf)
        return whole if math.isfinite(whole) else self.path()[0]

    def report(self, message: str = "") -> None:
        if self.progress is not None:
            best = self.shown_us = min(self.shown_us, self.best_us())
            self.progress(
                Progress(
                    f"{self.name} {describe_workload(self.chain, self.sizes)}", self.done, self.trials_budget,
                    best if math.isfinite(best) else None, self.eager_us, self.roofline_us, max(0.0, self.left_s()), message,
                )
            )  # fmt: skip

    def refute(self, us: float, bound_us: float) -> None:
        """A time under its bound refutes the ceilings (another process ran while they were measured): all bounds shrink."""
        if us >= bound_us:
            return
        factor = 0.9 * us / bound_us
        self.roofline_us *= factor
        for part in self.parts:
            part.bound_us *= factor

    # ---- trials

    def trial(self, record: TrialRecord) -> None:
        """Commit a trial, and count it if it ran; finalists are measured again beyond the budget's count."""
        self.store.add_trial(self.run_id, record)
        if record.status != "pruned":
            self.done = min(self.done + 1, self.trials_budget)
        self.report(f"{record.status}: {record.message}" if record.status != "ok" else "")

    def try_segment(self, worker: Worker, part: _Part, knobs: Mapping[str, int | str], source_hash: str, kind: str) -> float | None:
        """Check and time one schedule of one segment; its time, or None where it has none."""
        request = {
            "op": "segment",
            "nodes": list(part.nodes),
            "kind": kind,
            "knobs": dict(knobs),
            "check": True,
            "budget_s": self.sample_s(),
            "most_spills": None if part.spills is None else max(SPILLS, 2 * part.spills),
        }
        answer = worker.request(request, SEGMENT_TIMEOUT_S)
        version = part.study.space.version if part.study is not None and kind != EAGER else 1
        schedule = ScheduleRecord(part.chain.key, kind, version, dict(knobs))
        self.trial(_record(answer, part.workload, schedule=schedule, source_hash=source_hash))
        if answer["status"] == "incorrect" and part.study is not None:
            part.study.wrong(knobs)
        us = answer.get("median_us") if answer["status"] == "ok" else None
        if us is not None:
            self.refute(us, part.bound_us)
            part.seen(us if kind != EAGER else None, answer.get("spills"))
        return us

    def sample_s(self) -> float:
        """Seconds of timing a trial gets: little, since finalists are measured again."""
        if self.protocol != "loop":
            return 0.03  # a GPU's times vary little: a hundred calls
        return max(0.02, min(0.25, self.seconds_budget / max(1, self.trials_budget) / 3))

    def race_s(self, configs: int) -> float:
        """Seconds of timing the finalists get together."""
        if self.protocol != "loop":
            return 0.06 * configs
        return min(3.0, max(0.4, self.seconds_budget / 8))

    def try_config(self, worker: Worker, plan: Plan, schedules: Sequence[Mapping[str, int | str]]) -> float | None:
        """Check and time a whole config; its time, or None."""
        record = self.config_record(plan, schedules)
        request = {
            "op": "config",
            "plan": str(plan),
            "schedules": [dict(s) for s in schedules],
            "check": True,
            "budget_s": 2 * self.sample_s(),
        }
        answer = worker.request(request, 2 * SEGMENT_TIMEOUT_S)
        self.trial(_record(answer, self.workload, config=record, source_hash=str(answer.get("source_hash", ""))))
        us = answer.get("median_us") if answer["status"] == "ok" else None
        if us is not None:
            self.refute(us, self.roofline_us)
            self.configs[record.uid] = (record, float(us))
            part = self.part(plan.parts[0].nodes) if len(plan.parts) == 1 and plan.parts[0].kind != EAGER else None
            if part is not None:
                part.seen(us, answer.get("spills"))
        return us

    def config_record(self, plan: Plan, schedules: Sequence[Mapping[str, int | str]]) -> ConfigRecord:
        made = []
        for part, knobs in zip(plan.parts, schedules, strict=True):
            segment = self.fusion.segment(part.nodes)
            version = 1
            for p in self.parts:
                if p.nodes == part.nodes and p.study is not None:
                    version = p.study.space.version
            made.append(ScheduleRecord(segment.chain.key, part.kind, version, dict(knobs)))
        return ConfigRecord(self.chain.key, str(plan), tuple(made))

    # ---- the search

    def seeds(self, worker: Worker) -> None:
        """The baselines: the function itself, each operation alone, all in as few kernels as there can be."""
        self.eager_us = self.try_config(worker, Plan(()), ())
        groups = [self.fusion.fused()]
        if len(self.fusion.nodes) > 1:
            groups.append(self.fusion.unfused())
        for group in groups:
            plan, schedules = self.layouts.plan(group, self.limits, self.pins)
            us = self.try_config(worker, plan, schedules)
            if group == self.fusion.unfused():
                self.unfused_us, self.unfused_plan = us, str(plan)
            if us is not None and len(plan.parts) == 1 and plan.parts[0].kind != EAGER:
                part = self.part(plan.parts[0].nodes)
                if part is not None and part.study is not None and part.study.best_knobs is None:
                    part.study.remember(schedules[0], part.study.hash_of(schedules[0]), us)

    def part(self, nodes: tuple[int, ...]) -> _Part | None:
        return next((p for p in self.parts if p.nodes == nodes), None)

    def path(self, *, hopeful: bool = False) -> tuple[float, list[int]]:
        """The shortest path over segment times; over what they may still reach, where `hopeful`."""
        edges = [(p.start, p.end, k, p.optimistic_us() if hopeful else p.best_us) for k, p in enumerate(self.parts)]
        return shortest([e for e in edges if math.isfinite(e[3])], len(self.fusion.cuts) - 1)

    def next_part(self) -> _Part | None:
        """The segment on the optimistic path that may still gain most; None where no path can beat the best."""
        total, names = self.path(hopeful=True)
        if not names:
            return None
        best = self.best_us()
        if math.isfinite(best) and total >= best * 0.995:
            return None
        mine = [self.parts[k] for k in names]
        usable = [p for p in mine if p.open or not (p.eager_tried or math.isfinite(p.best_us))]
        if not usable:
            return None
        return max(usable, key=lambda p: (p.best_us - p.optimistic_us()) if math.isfinite(p.best_us) else math.inf)

    def search(self, worker: Worker) -> None:
        """Spend the budget."""
        while not self.spent():
            if ENOUGH <= self.roofline_us / self.best_us() < 1.1:  # far above 1 the ceiling was measured badly
                self.reason = f"{100 * self.roofline_us / self.best_us():.0f}% of the roofline is reached"
                return
            part = self.next_part()
            if part is None:
                self.reason = "nothing left to gain"
                return
            self.step(worker, part)

    def step(self, worker: Worker, part: _Part) -> None:
        """One trial of one segment: its heuristic schedule first, then PyTorch's own operations, then the study's."""
        study = part.study
        if study is None:
            part.eager_tried = True
            part.eager_us = self.try_segment(worker, part, {}, "", EAGER) or math.inf
            part.gave_up = True
            return
        if not study.trials:
            seed = {**study.kind.seed(study.task), **study.pins}
            try:
                seed_hash = study.hash_of(seed)
            except Infeasible:
                seed_hash = ""
            if seed_hash and seed_hash not in study.seen:
                study.remember(seed, seed_hash, self.try_segment(worker, part, seed, seed_hash, study.kind.name))
                return
        if len(part.nodes) == 1 and not part.eager_tried:
            part.eager_tried = True
            part.eager_us = self.try_segment(worker, part, {}, "", EAGER) or math.inf
            return
        if not part.waiting:
            part.waiting = self.ask_ahead(worker, part)
        if not part.waiting:
            return
        proposal = part.waiting.pop(0)
        study.tell(proposal, self.try_segment(worker, part, proposal.knobs, proposal.source_hash, study.kind.name))
        if math.isinf(study.best_us) and study.trials >= 12:
            part.gave_up = True  # a dozen failures in a row: this segment does not build here

    def ask_ahead(self, worker: Worker, part: _Part) -> list[Proposal]:
        """The next schedules of a segment, built side by side before the first of them is measured."""
        study, made = part.study, list[Proposal]()
        assert study is not None
        while len(made) < min(AHEAD, self.trials_budget - self.done):
            proposal = study.ask()
            if proposal is None:
                break
            made.append(proposal)
        if len(made) > 1:
            # what does not build, or never ends, is found again when its turn comes
            worker.request(
                {"op": "ahead", "nodes": list(part.nodes), "kind": study.kind.name, "knobs": [p.knobs for p in made]},
                AHEAD_TIMEOUT_S,
            )
        return made

    # ---- the end

    def finalists(self) -> list[tuple[Plan, list[dict[str, int | str]]]]:
        """The best plans over segment times, and for the first the runners-up of its costliest segment."""
        total, names = self.path()
        if not math.isfinite(total):
            return []
        made = [self.assemble(names)]
        mine = [self.parts[k] for k in names]
        widest = max((p for p in mine if p.study is not None and p.best_kind != EAGER), key=lambda p: p.best_us, default=None)
        if widest is not None and widest.study is not None:
            for other in widest.study.top(FINALISTS)[1:]:
                made.append(self.assemble(names, {widest.nodes: other}))
        for _, names2 in self.other_paths(names):
            made.append(self.assemble(names2))
        return made[: FINALISTS + 2]

    def other_paths(self, names: Sequence[int]) -> list[tuple[float, list[int]]]:
        """The shortest path that avoids the first one's longest part, where it is not far behind."""
        if not names:
            return []
        longest = max(names, key=lambda k: len(self.parts[k].nodes))
        edges = [(p.start, p.end, k, p.best_us) for k, p in enumerate(self.parts) if k != longest and math.isfinite(p.best_us)]
        found = shortest(edges, len(self.fusion.cuts) - 1)
        total = self.path()[0]
        return [found] if math.isfinite(found[0]) and found[0] < 1.3 * total else []

    def assemble(
        self, names: Sequence[int], swap: Mapping[tuple[int, ...], dict[str, int | str]] | None = None
    ) -> tuple[Plan, list[dict[str, int | str]]]:
        parts, schedules = [], []
        for k in names:
            p = self.parts[k]
            parts.append(Part(p.best_kind, p.nodes))
            knobs = p.study.best_knobs if p.study is not None and p.best_kind != EAGER else {}
            schedules.append(dict((swap or {}).get(p.nodes, knobs or {})))
        return Plan(tuple(parts)), schedules

    def finish(self, worker: Worker, incumbent: tuple[ConfigRecord, float] | None) -> tuple[ConfigRecord, float] | None:
        """Measure the finalists whole and interleaved with eager, unfused and the incumbent; the winner and its time."""
        for plan, schedules in self.finalists():
            record = self.config_record(plan, schedules)
            if record.uid in self.configs:
                continue
            part = self.part(plan.parts[0].nodes) if len(plan.parts) == 1 else None
            known = part.study.time_of(schedules[0]) if part is not None and part.study is not None else None
            if known is not None:  # one kernel is the whole: it was checked and timed as a segment
                self.configs[record.uid] = (record, known)
            else:
                self.try_config(worker, plan, schedules)
        if incumbent is not None and incumbent[0].uid not in self.configs:
            self.try_config(worker, Plan.parse(incumbent[0].plan), [dict(s.knobs) for s in incumbent[0].schedules])
        ranked = sorted(self.configs.values(), key=lambda c: c[1])
        baselines = {EAGER, self.unfused_plan, incumbent[0].plan if incumbent is not None else EAGER}
        keep = ranked[: FINALISTS + 1] + [c for c in ranked[FINALISTS + 1 :] if c[0].plan in baselines]
        if not keep:
            return None
        if len(keep) == 1:
            return keep[0]
        answers = worker.request(
            {"op": "race", "configs": [{"plan": c.plan, "schedules": [dict(s.knobs) for s in c.schedules]} for c, _ in keep],
             "budget_s": self.race_s(len(keep))},
            4 * SEGMENT_TIMEOUT_S,
        ).get("results", [])  # fmt: skip
        timed: list[tuple[ConfigRecord, float]] = []
        spills: dict[str, bool] = {}
        for (config, _), answer in zip(keep, answers, strict=False):
            self.store.add_trial(
                self.run_id,
                _record(answer, self.workload, config=config, source_hash=str(answer.get("source_hash", ""))),
            )
            if answer["status"] == "ok":
                timed.append((config, float(answer["median_us"])))
                spills[config.uid] = bool(answer.get("spills"))
                self.configs[config.uid] = timed[-1]
                if config.plan == EAGER:
                    self.eager_us = timed[-1][1]
                if config.plan == self.unfused_plan:
                    self.unfused_us = timed[-1][1]
        if not timed:
            return keep[0]
        fastest = min(us for _, us in timed)
        tied = [t for t in timed if t[1] <= fastest * (1 + TIE)]
        return min(tied, key=lambda t: ((t[0].plan != EAGER and len(t[0].schedules)) or 0, spills[t[0].uid], t[1]))


def _layout_text(layouts: Layouts, reads: Sequence[int], value: int, chain: Chain, k: int) -> str:
    """The layout class of a segment's input: as the call's tensor lies, or as eager lays out an intermediate value."""
    return layout_class(chain.inputs[k], layouts.operands[value], True)


def _record(
    answer: Mapping[str, Any],
    workload: WorkloadRecord,
    *,
    schedule: ScheduleRecord | None = None,
    config: ConfigRecord | None = None,
    source_hash: str = "",
) -> TrialRecord:
    names = (
        "median_us",
        "p20_us",
        "p80_us",
        "max_error",
        "eager_error",
        "compile_s",
        "registers",
        "spills",
        "shared_bytes",
    )
    status = str(answer["status"])
    known: dict[str, Any] = {n: answer.get(n) for n in names}
    if status != "ok":
        known |= {"median_us": None, "p20_us": None, "p80_us": None}
    for n in ("max_error", "eager_error"):
        if known[n] is not None and not math.isfinite(known[n]):
            known[n] = None
    return TrialRecord(
        workload, status, schedule=schedule, config=config, source_hash=source_hash, samples=int(answer.get("samples") or 0),
        message=str(answer.get("message") or "")[:2000], **known,
    )  # fmt: skip
