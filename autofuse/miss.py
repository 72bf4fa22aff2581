"""Why a look-up found nothing: the tuned entry that is nearest to the call, and how it differs, field by field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .store.records import EntryRecord, EnvironmentRecord, WorkloadRecord

NEAR_ROWS_LOG2 = 6.0  # a config tuned at up to 64 times fewer or more rows may serve
ENVIRONMENT_FIELDS = ("driver", "cuda", "torch", "triton", "compiler", "kernel_source_hash")
"""What a kernel, or how it is judged, depends on."""


@dataclass(frozen=True)
class Miss:
    """The nearest entry, in words, and a line for each field that differs: the field, what it is here, what there."""

    nearest: str
    differs: tuple[str, ...]

    def __str__(self) -> str:
        return f"the nearest is {self.nearest}; {'; '.join(self.differs)}"


def rows_apart(one: int, other: int) -> float:
    """How far apart two row counts are, in powers of two."""
    return abs(math.log2(max(1, one)) - math.log2(max(1, other)))


def nearest(
    entries: Iterable[EntryRecord], work: WorkloadRecord, device_uid: str, arch: str, here: EnvironmentRecord
) -> Miss | None:
    """The nearest entry: of this chain before one of its name, on this architecture before another, with as few fields as
    may be that differ, and near in extents and rows. None where there is none."""

    def distance(entry: EntryRecord) -> tuple[float, ...]:
        there = entry.workload
        fields = sum((there.dtypes != work.dtypes, there.layouts != work.layouts, there.extents != work.extents))
        extents = math.inf
        if len(there.extents) == len(work.extents):
            extents = sum(rows_apart(a, b) for a, b in zip(there.extents, work.extents, strict=True))
        other = there.chain_key != work.chain_key, entry.arch != arch
        return (*other, fields, extents, rows_apart(there.rows, work.rows), entry.device_uid != device_uid)

    entry = min(entries, key=distance, default=None)
    if entry is None:
        return None
    there = entry.workload
    extents = "x".join(map(str, there.extents)) or "scalar"
    told = f"{entry.name}: rows {there.rows}, extents {extents}, {', '.join(there.dtypes)}, on {entry.device_name}"
    return Miss(told, tuple(_differences(entry, work, device_uid, arch, here)))


def _differences(entry: EntryRecord, work: WorkloadRecord, device_uid: str, arch: str, here: EnvironmentRecord) -> Iterable[str]:
    there = entry.workload
    if there.chain_key != work.chain_key:
        yield f"chain: {work.chain_key} here, {there.chain_key} there, another function of this name"
    if there.rows != work.rows:
        far = f", more than {2**NEAR_ROWS_LOG2:.0f} times apart" if rows_apart(there.rows, work.rows) > NEAR_ROWS_LOG2 else ""
        yield f"rows: {work.rows} here, {there.rows} there{far}"
    yield from _field("extents", work.extents, there.extents)
    yield from _field("dtypes", work.dtypes, there.dtypes)
    if len(work.layouts) != len(there.layouts):
        yield f"inputs: {len(work.layouts)} here, {len(there.layouts)} there"
    else:
        for k, (ours, theirs) in enumerate(zip(work.layouts, there.layouts, strict=True)):
            yield from _layout(f"input {k}", ours, theirs)
    if entry.arch != arch:
        yield f"device: {arch} here, {entry.arch} there"
    elif entry.device_uid != device_uid:
        yield f"device: another of {arch} there, {entry.device_name}"
    for name in ENVIRONMENT_FIELDS:
        if entry.arch == arch or name in ("torch", "kernel_source_hash"):
            yield from _field(f"environment, {name}", [getattr(here, name)], [getattr(entry.environment, name)])


def _field(name: str, here: Sequence[object], there: Sequence[object]) -> Iterable[str]:
    if list(here) != list(there):
        yield f"{name}: {', '.join(map(str, here)) or 'none'} here, {', '.join(map(str, there)) or 'none'} there"


def _layout(name: str, here: str, there: str) -> Iterable[str]:
    """How two layout classes (`workload.layout_class`) differ, in words."""
    if here == there:
        return
    ours, theirs = here.split(":"), there.split(":")
    if len(ours) != 3 or len(theirs) != 3:
        yield from _field(name, [here], [there])
        return
    leading = {"c": "leading axes run on", "s": "leading axes lie apart"}
    aligned = {"a": "aligned to 16 bytes", "u": "misaligned"}
    for words, a, b in ((leading, ours[0], theirs[0]), (aligned, ours[2], theirs[2])):
        yield from _field(name, [words.get(a, a)], [words.get(b, b)]) if a != b else ()
    if ours[1] != theirs[1]:
        yield f"{name}: strides ({ours[1]}) here, ({theirs[1]}) there"
