"""`autofuse build`: the winners' kernels made ahead of time, also for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import ops
from .chain import dim_value, instantiate
from .device import limits_of
from .errors import AutofuseError, BuildError, Infeasible, InputError
from .fusion import EAGER, Plan, check
from .kernels import artifact, build
from .kernels.base import Limits, Task
from .kernels.registry import BY_NAME
from .program import Layouts
from .search.demanded import strides_of
from .store.store import Store
from .store.tuned import TunedRecord


def build_winners(
    store: Store, folder: Path, arch: str, device_uid: str | None, chains: Sequence[str], note: Callable[[str], None]
) -> tuple[int, int]:
    """Build every kernel of the winners on devices of an architecture (or on one device) into `folder`; returns how many
    winners are built and how many are not, each for a reason that went to `note`.

    Raises InputError where the store has no such winner.
    """
    found = store.tuned(arch, device_uid, chains)
    if not found:
        raise InputError(f"the store has no winners for {arch}: run `autofuse tune` on such a device, or name another --arch")
    failed = 0
    for record in found:
        try:
            _build(record, folder)
        except (AutofuseError, ValueError, LookupError, TypeError) as error:
            failed += 1
            note(f"autofuse: {record.name} at rows {record.workload.rows} is not built: {error}")
    return len(found) - failed, failed


def _build(record: TunedRecord, folder: Path) -> None:
    limits = limits_of(record.device)
    for part, knobs, task in _tasks(record, limits):
        kind = BY_NAME.get(part)
        if kind is None or not kind.match(task):
            raise Infeasible(f"{part} does not make a segment of its plan")
        source = kind.emit(task, knobs)
        if limits.target == "cpu":
            build.compile_c(source, folder)
        else:
            artifact.write(source, task.low, limits.arch, folder)


def _tasks(record: TunedRecord, limits: Limits) -> list[tuple[str, dict[str, int | str], Task]]:
    """The kind, knobs and task of each kernel of a winner, from tensors without data that lie as its workload's do."""
    work = record.workload
    chain = instantiate(record.graph, work.extents, work.dtypes)
    sizes = dict.fromkeys(chain.symbols, 1)
    if chain.symbols:
        sizes[chain.symbols[-1]] = work.rows
    inputs = []
    for k, (value, layout) in enumerate(zip(chain.inputs, work.layouts, strict=True)):
        extents = tuple(dim_value(d, sizes) for d in value.shape)
        laid = strides_of(value, extents, layout)
        if laid is None:
            raise BuildError(f"no tensor of {'x'.join(map(str, extents))} has the layout {layout!r} of its input {k}")
        if laid[1] and limits.target == "cuda":
            raise BuildError(f"its input {k} is misaligned: such calls are compiled at the first one")
        inputs.append(torch.empty_strided(extents, laid[0], dtype=ops.TORCH[value.dtype], device="meta"))
    layouts, plan = Layouts(check(chain), inputs, sizes), Plan.parse(record.config.plan)
    parts = zip(plan.parts, record.config.schedules, strict=True) if not plan.is_eager else ()
    return [(p.kind, dict(s.knobs), layouts.task(p.nodes, limits)) for p, s in parts if p.kind != EAGER]
