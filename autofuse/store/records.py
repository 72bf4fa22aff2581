"""What goes into the store and comes out of it, as plain frozen values. No torch and no SQLAlchemy here: the search
makes these, the store keeps them, the runtime's reader gives them back."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

STATUSES = (
    "ok", "pruned", "invalid", "compile_error", "launch_error", "timeout", "out_of_memory", "incorrect", "crashed",
)  # fmt: skip


def canonical_json(value: Any) -> str:
    """JSON with one spelling a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_uid(*parts: Any) -> str:
    """The global name of a fact: 32 hex digits of a SHA-256 over its canonical JSON."""
    return hashlib.sha256(canonical_json(list(parts)).encode()).hexdigest()[:32]


def event_uid() -> str:
    """The global name of an event: a UUIDv7 (RFC 9562, section 5.7), so that uids sort by time."""

    import uuid

    millis = time.time_ns() // 1_000_000
    raw = bytearray(millis.to_bytes(6, "big") + os.urandom(10))
    raw[6] = (raw[6] & 0x0F) | 0x70
    raw[8] = (raw[8] & 0x3F) | 0x80
    return str(uuid.UUID(bytes=bytes(raw)))


@dataclass(frozen=True)
class DeviceRecord:
    """The silicon that a result belongs to. `uid` covers identity and limits, not the measured ceilings."""

    uid: str
    vendor: str
    name: str
    arch: str
    sm_count: int
    shared_per_sm_bytes: int | None = None
    shared_per_block_bytes: int | None = None
    registers_per_sm: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    partition: str = ""
    peak_bandwidth_gbs: float | None = None
    peak_tflops: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvironmentRecord:
    """The software that a result was measured with; part of the row, never of the key."""

    driver: str
    cuda: str
    torch: str
    triton: str
    compiler: str
    python: str
    autofuse: str
    kernel_source_hash: str

    @property
    def uid(self) -> str:
        return content_uid(
            self.driver, self.cuda, self.torch, self.triton, self.compiler, self.python, self.autofuse,
            self.kernel_source_hash,
        )  # fmt: skip


@dataclass(frozen=True)
class ChainRecord:
    """A chain's structure: `key` is its uid, `graph` its canonical JSON, `parts` the keys of its known segments."""

    key: str
    name: str
    graph: str


@dataclass(frozen=True)
class WorkloadRecord:
    """What is tuned. `family` names the workload without its row count: (chain, extents, dtypes, layouts)."""

    chain_key: str
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    rows: int
    extents: tuple[int, ...]
    flops: int = 0
    bytes_min: int = 0

    @property
    def family(self) -> str:
        return content_uid(self.chain_key, list(self.extents), list(self.dtypes), list(self.layouts))

    @property
    def uid(self) -> str:
        return content_uid(self.family, self.rows)


@dataclass(frozen=True)
class ScheduleRecord:
    """The knobs of one segment's kernel, named values only. `chain_key` is the segment's."""

    chain_key: str
    kind: str
    space_version: int
    knobs: dict[str, int | str]

    @property
    def uid(self) -> str:
        return content_uid(self.chain_key, self.kind, self.space_version, self.knobs)


@dataclass(frozen=True)
class ConfigRecord:
    """What a winner is: a plan in canonical text, with a schedule for each segment, in order."""

    chain_key: str
    plan: str
    schedules: tuple[ScheduleRecord, ...]

    @property
    def uid(self) -> str:
        return content_uid(self.chain_key, self.plan, [s.uid for s in self.schedules])


@dataclass(frozen=True)
class TrialRecord:
    """One schedule of one segment, or one whole config: checked and measured, or the reason why it could not be.

    Exactly one of `schedule` and `config` is set. `status` is "ok" if and only if `median_us` is set.
    """

    workload: WorkloadRecord
    status: str
    schedule: ScheduleRecord | None = None
    config: ConfigRecord | None = None
    source_hash: str = ""
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    max_error: float | None = None
    eager_error: float | None = None
    compile_s: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    message: str = ""


@dataclass(frozen=True)
class DemandRecord:
    """Calls of a workload on a device that `tier` served, for want of a config tuned for it.

    `seconds` is the time spent in them, `sizes` the extent of each row symbol of the chain.
    """

    device: DeviceRecord
    chain: ChainRecord
    workload: WorkloadRecord
    tier: str
    calls: int
    seconds: float
    sizes: dict[str, int]


@dataclass(frozen=True)
class BestRecord:
    """A tuned config as the runtime finds it. `rows` is the row count that it was tuned at, `protocol` how it was
    timed: times of different protocols do not compare."""

    rows: int
    plan: str
    schedules: tuple[ScheduleRecord, ...]
    median_us: float
    verified: bool
    environment: EnvironmentRecord
    config_uid: str
    protocol: str = ""
    device_uid: str = ""
    device_name: str = ""


@dataclass(frozen=True)
class EntryRecord:
    """What a best row was tuned for: enough to say how a call that found nothing differs from it. `name`: the chain's."""

    name: str
    workload: WorkloadRecord
    device_uid: str
    device_name: str
    arch: str
    environment: EnvironmentRecord


@dataclass(frozen=True)
class GraphRecord:
    """A tuned chain's structure (JSON), static extents and dtypes: the chain as it is computed."""

    graph: str
    extents: tuple[int, ...]
    dtypes: tuple[str, ...]


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(json.loads(value) if isinstance(value, str) else value)


def graphs(rows: Iterable[Sequence[Any]]) -> list[GraphRecord]:
    """GraphRecords from the rows of the statement, in order, each once."""
    return list(dict.fromkeys(GraphRecord(graph, _listed(extents), _listed(dtypes)) for graph, extents, dtypes in rows))


def entries(rows: Iterable[Sequence[Any]]) -> list[EntryRecord]:
    """EntryRecords from the rows of the statement, in order."""
    return [
        EntryRecord(
            name=row[0],
            workload=WorkloadRecord(row[1], _listed(row[2]), _listed(row[3]), row[4], _listed(row[5])),
            device_uid=row[6],
            device_name=row[7],
            arch=row[8],
            environment=EnvironmentRecord(*row[9:17]),
        )
        for row in rows
    ]


def gather(rows: Iterable[Sequence[Any]]) -> list[BestRecord]:
    """BestRecords from the rows of the statement: one row for each schedule of each best, in order."""
    schedules: dict[int, list[ScheduleRecord]] = {}
    heads: dict[int, Sequence[Any]] = {}
    for row in rows:
        heads.setdefault(row[0], row)
        chain_key, kind, space_version, knobs = row[15:19]
        found = schedules.setdefault(row[0], [])
        if kind is not None:
            knobs = json.loads(knobs) if isinstance(knobs, str) else knobs
            found.append(ScheduleRecord(chain_key, kind, space_version, knobs))
    return [
        BestRecord(
            rows=head[1],
            plan=head[2],
            schedules=tuple(schedules[key]),
            median_us=head[3],
            verified=bool(head[4]),
            environment=EnvironmentRecord(*head[7:15]),
            config_uid=head[6],
            protocol=head[5],
            device_uid=head[19],
            device_name=head[20],
        )
        for key, head in heads.items()
    ]
