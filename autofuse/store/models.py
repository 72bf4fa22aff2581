"""The tables, as SQLAlchemy 2 models. Whatever a user would filter, join or sort by is a column; JSON is for the open
rest.

Integer keys are local to one database. `uid` is global: a content hash for facts (device, environment, chain, workload,
schedule, config), a UUIDv7 for events (run, trial); databases are merged by it. Measured columns end in their unit,
times are UTC. A change here, or of a view, needs a revision in `migrations/versions` (a test compares the two).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)  # fmt: skip
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from .records import STATUSES

RUN_STATES = ("running", "done", "interrupted", "failed")

KNOB_COLUMNS = (
    "num_warps", "num_stages", "block_rows", "block_cols", "rows_per_program", "form", "math", "threads",
)  # fmt: skip
"""The knobs that have a column of their own in `schedule`; `knobs` holds these and all others."""

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC. SQLite keeps no zone, so a naive value could be any: it is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone: use datetime.now(UTC)")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Root of the models; `Base.metadata` is what the migrations must produce."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        str: Text,
        float: Double,
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        list[int]: JSON,
    }


def _uid() -> Mapped[str]:
    return mapped_column(String(36), unique=True)


def _listed(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(v) for v in values)})"


class Device(Base):
    """The silicon: identity, limits, and the ceilings that were measured on it."""

    __tablename__ = "device"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = _uid()
    vendor: Mapped[str]
    name: Mapped[str]
    arch: Mapped[str]
    sm_count: Mapped[int]
    shared_per_sm_bytes: Mapped[int | None]
    shared_per_block_bytes: Mapped[int | None]
    registers_per_sm: Mapped[int | None]
    l2_bytes: Mapped[int | None] = mapped_column(BigInteger)
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    partition: Mapped[str]
    peak_bandwidth_gbs: Mapped[float | None]
    peak_tflops: Mapped[dict[str, Any]]


class Environment(Base):
    """The software that something was measured with: part of a row, never of the key that finds it."""

    __tablename__ = "environment"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = _uid()
    driver: Mapped[str]
    cuda: Mapped[str]
    torch: Mapped[str]
    triton: Mapped[str]
    compiler: Mapped[str]
    python: Mapped[str]
    autofuse: Mapped[str]
    kernel_source_hash: Mapped[str]


class Chain(Base):
    """A chain, or a segment of one, which is a chain like any other. `uid` is the chain's key."""

    __tablename__ = "chain"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(index=True)
    graph: Mapped[str]


class ChainSegment(Base):
    """`segment_id` is what the part named `part` of chain `chain_id` looks like as a chain of its own."""

    __tablename__ = "chain_segment"

    chain_id: Mapped[int] = mapped_column(ForeignKey("chain.id"), primary_key=True)
    part: Mapped[str] = mapped_column(primary_key=True)
    segment_id: Mapped[int] = mapped_column(ForeignKey("chain.id"), index=True)


class Workload(Base):
    """A chain with its extents, dtypes and layouts. `family` is the workload without its row count.

    `extents` (JSON) holds every trailing extent; `d0` to `d3` are its first four, and `cols` is its largest (1 if there
    are none), which is what one thinks of as the width. `dtypes` and `layouts` are canonical JSON lists as text, so
    that they compare with `=` on every database.
    """

    __tablename__ = "workload"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = _uid()
    family: Mapped[str] = mapped_column(String(36), index=True)
    chain_id: Mapped[int] = mapped_column(ForeignKey("chain.id"), index=True)
    dtypes: Mapped[str]
    layouts: Mapped[str]
    rows: Mapped[int] = mapped_column(BigInteger)
    cols: Mapped[int] = mapped_column(BigInteger)
    d0: Mapped[int | None] = mapped_column(BigInteger)
    d1: Mapped[int | None] = mapped_column(BigInteger)
    d2: Mapped[int | None] = mapped_column(BigInteger)
    d3: Mapped[int | None] = mapped_column(BigInteger)
    extents: Mapped[list[int]]
    flops: Mapped[int] = mapped_column(BigInteger)
    bytes_min: Mapped[int] = mapped_column(BigInteger)


class Schedule(Base):
    """The knobs of one segment's kernel. `knobs` holds all of them by name; the common ones are columns as well."""

    __tablename__ = "schedule"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = _uid()
    chain_id: Mapped[int] = mapped_column(ForeignKey("chain.id"), index=True)
    kind: Mapped[str]
    space_version: Mapped[int]
    num_warps: Mapped[int | None]
    num_stages: Mapped[int | None]
    block_rows: Mapped[int | None]
    block_cols: Mapped[int | None]
    rows_per_program: Mapped[int | None]
    form: Mapped[str | None]
    math: Mapped[str | None]
    threads: Mapped[int | None]
    knobs: Mapped[dict[str, Any]]


class Config(Base):
    """A plan in canonical text with a schedule for each of its segments: what a winner is."""

    __tablename__ = "config"

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = _uid()
    chain_id: Mapped[int] = mapped_column(ForeignKey("chain.id"), index=True)
    plan: Mapped[str]
    num_segments: Mapped[int]


class ConfigSchedule(Base):
    """The schedule at `position` (from 0) of a config."""

    __tablename__ = "config_schedule"

    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    schedule_id: Mapped[int] = mapped_column(ForeignKey("schedule.id"), index=True)


class Run(Base):
    """One search over one workload on one device in one environment."""

    __tablename__ = "run"
    __table_args__ = (
        CheckConstraint(_listed("state", RUN_STATES), name="state"),
        CheckConstraint("(state = 'running') = (ended IS NULL)", name="ended"),
        Index(None, "workload_id", "device_id", "environment_id", "protocol"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = _uid()
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"), index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), index=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workload.id"))
    protocol: Mapped[str]
    sampler: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    trials_budget: Mapped[int]
    budget_s: Mapped[float]
    state: Mapped[str]
    reason: Mapped[str]
    started: Mapped[datetime]
    ended: Mapped[datetime | None]
    eager_us: Mapped[float | None]
    unfused_us: Mapped[float | None]
    roofline_us: Mapped[float | None]


class Trial(Base):
    """One schedule of one segment, or one whole config: checked and measured, or the reason why it could not be.

    `workload_id` is of what was measured: the segment's own workload, or the run's.
    """

    __tablename__ = "trial"
    __table_args__ = (
        UniqueConstraint("run_id", "number"),
        CheckConstraint(_listed("status", STATUSES), name="status"),
        CheckConstraint("(status = 'ok') = (median_us IS NOT NULL)", name="ok_has_time"),
        # Neither Inf nor NaN is a time. PostgreSQL sorts NaN above Inf; SQLite turns it into NULL, refused above.
        CheckConstraint("median_us IS NULL OR (median_us > 0 AND median_us < 1e15)", name="finite_time"),
        CheckConstraint("(schedule_id IS NULL) <> (config_id IS NULL)", name="schedule_or_config"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = _uid()
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    number: Mapped[int]
    workload_id: Mapped[int] = mapped_column(ForeignKey("workload.id"), index=True)
    schedule_id: Mapped[int | None] = mapped_column(ForeignKey("schedule.id"), index=True)
    config_id: Mapped[int | None] = mapped_column(ForeignKey("config.id"), index=True)
    source_hash: Mapped[str]
    status: Mapped[str]
    median_us: Mapped[float | None]
    p20_us: Mapped[float | None]
    p80_us: Mapped[float | None]
    samples: Mapped[int]
    max_error: Mapped[float | None]
    eager_error: Mapped[float | None]
    compile_s: Mapped[float | None]
    registers: Mapped[int | None]
    spills: Mapped[int | None]
    shared_bytes: Mapped[int | None]
    message: Mapped[str]
    created: Mapped[datetime]


class Best(Base):
    """The winner of a workload on a device in an environment: derived from the trials, and can be rebuilt from them."""

    __tablename__ = "best"
    __table_args__ = (UniqueConstraint("device_id", "environment_id", "protocol", "workload_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), index=True)
    protocol: Mapped[str]
    workload_id: Mapped[int] = mapped_column(ForeignKey("workload.id"), index=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("config.id"), index=True)
    median_us: Mapped[float]
    verified: Mapped[bool] = mapped_column(Boolean)


class Demand(Base):
    """Calls that the dispatcher served with less than a config tuned for them, by the tier that served them.

    `seconds` is the time spent in these calls: their number times the measured time of one. `sizes` (JSON) holds the
    extent of each row axis, of which `rows` is the product.
    """

    __tablename__ = "demand"
    __table_args__ = (UniqueConstraint("workload_id", "device_id", "tier"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workload.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"), index=True)
    tier: Mapped[str]
    calls: Mapped[int] = mapped_column(BigInteger)
    seconds: Mapped[float]
    sizes: Mapped[dict[str, Any]]
    first_seen: Mapped[datetime]
    last_seen: Mapped[datetime]


class Meta(Base):
    """Facts about the database itself: `schema`, `oldest_reader` and `oldest_writer` are numbers as text."""

    __tablename__ = "meta"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
