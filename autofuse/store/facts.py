"""Records into rows and rows into records. Facts are named by their content, so writing one twice finds the first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from ..errors import StoreError
from .models import (
    KNOB_COLUMNS,
    Chain,
    ChainSegment,
    Config,
    ConfigSchedule,
    Device,
    Environment,
    Schedule,
    Workload,
)  # fmt: skip
from .records import (
    ChainRecord,
    ConfigRecord,
    DeviceRecord,
    EnvironmentRecord,
    ScheduleRecord,
    WorkloadRecord,
    canonical_json,
)  # fmt: skip

Fact = type[Device] | type[Environment] | type[Chain] | type[Workload] | type[Schedule] | type[Config]


def upsert(connection: Connection, model: type[Any]) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT: both databases have it, each in its own dialect."""
    return sqlite.insert(model) if connection.dialect.name == "sqlite" else postgresql.insert(model)


def intern(connection: Connection, model: Fact, uid: str, values: Mapping[str, Any]) -> tuple[int, bool]:
    """The id of the fact `uid`, and whether it is new. Another writer may insert it between the look and the insert."""
    find = select(model.id).where(model.uid == uid)
    found = connection.scalar(find)
    if found is not None:
        return found, False
    insert_new = upsert(connection, model).values(uid=uid, **values).on_conflict_do_nothing(index_elements=["uid"])
    if connection.dialect.name == "sqlite":  # holds the write lock, so nobody was faster; RETURNING needs 3.35
        connection.execute(insert_new)
        return connection.execute(find).scalar_one(), True
    # `rowcount` would not tell whether a row was made: with PostgreSQL it is -1 here.
    made = connection.scalar(insert_new.returning(model.id))
    return (connection.execute(find).scalar_one(), False) if made is None else (made, True)


def device_id(connection: Connection, record: DeviceRecord) -> int:
    """Store a device. Newly measured ceilings take the place of older ones."""
    values = {name: getattr(record, name) for name in record.__dataclass_fields__ if name != "uid"}
    found, new = intern(connection, Device, record.uid, values)
    if not new and (record.peak_bandwidth_gbs is not None or record.peak_tflops):
        measured: dict[str, Any] = {}
        if record.peak_bandwidth_gbs is not None:
            measured["peak_bandwidth_gbs"] = record.peak_bandwidth_gbs
        if record.peak_tflops:
            measured["peak_tflops"] = record.peak_tflops
        connection.execute(update(Device).where(Device.id == found).values(measured))
    return found


def environment_id(connection: Connection, record: EnvironmentRecord) -> int:
    """Store an environment."""
    values = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return intern(connection, Environment, record.uid, values)[0]


def chain_id(connection: Connection, record: ChainRecord) -> int:
    """Store a chain. A segment that had no name gets one when it is tuned as a chain of its own."""
    found, new = intern(connection, Chain, record.key, {"name": record.name, "graph": record.graph})
    if not new and record.name:
        connection.execute(update(Chain).where(Chain.id == found, Chain.name == "").values(name=record.name))
    return found


def known_chain(connection: Connection, key: str) -> int:
    """The id of a chain that must be there. Raises StoreError if it is not."""
    found = connection.scalar(select(Chain.id).where(Chain.uid == key))
    if found is None:
        raise StoreError(f"The chain {key} is not in the database: add it first, with begin_run or add_chain_segments.")
    return found


def segment_row(connection: Connection, chain: int, part: str, segment: int) -> None:
    """Say that the part `part` of a chain is the chain `segment`."""
    insert = upsert(connection, ChainSegment).values(chain_id=chain, part=part, segment_id=segment)
    connection.execute(insert.on_conflict_do_nothing(index_elements=["chain_id", "part"]))


def workload_id(connection: Connection, record: WorkloadRecord) -> int:
    """Store a workload, whose chain must be there."""
    found = connection.scalar(select(Workload.id).where(Workload.uid == record.uid))
    if found is not None:
        return found
    extents = list(record.extents)
    firsts = {f"d{i}": extents[i] if i < len(extents) else None for i in range(4)}
    values = {
        "family": record.family,
        "chain_id": known_chain(connection, record.chain_key),
        "dtypes": canonical_json(list(record.dtypes)),
        "layouts": canonical_json(list(record.layouts)),
        "rows": record.rows,
        "cols": max(extents, default=1),
        "extents": extents,
        "flops": record.flops,
        "bytes_min": record.bytes_min,
    }
    return intern(connection, Workload, record.uid, values | firsts)[0]


def schedule_id(connection: Connection, record: ScheduleRecord) -> int:
    """Store a schedule, whose chain (the segment's) must be there."""
    found = connection.scalar(select(Schedule.id).where(Schedule.uid == record.uid))
    if found is not None:
        return found
    values: dict[str, Any] = {
        "chain_id": known_chain(connection, record.chain_key),
        "kind": record.kind,
        "space_version": record.space_version,
        "knobs": dict(record.knobs),
    }
    for name in KNOB_COLUMNS:
        knob = record.knobs.get(name)
        wanted = str if name in ("form", "math") else int
        values[name] = knob if isinstance(knob, wanted) and not isinstance(knob, bool) else None
    return intern(connection, Schedule, record.uid, values)[0]


def config_id(connection: Connection, record: ConfigRecord) -> int:
    """Store a config and its schedules."""
    found = connection.scalar(select(Config.id).where(Config.uid == record.uid))
    if found is not None:
        return found
    # In the order of their uids: two writers that insert the same two in different orders would wait for each other.
    ids = {s.uid: schedule_id(connection, s) for s in sorted(record.schedules, key=lambda s: s.uid)}
    values = {
        "chain_id": known_chain(connection, record.chain_key),
        "plan": record.plan,
        "num_segments": max(1, len(record.schedules)),
    }
    found, new = intern(connection, Config, record.uid, values)
    if new and record.schedules:
        rows = [
            {"config_id": found, "position": position, "schedule_id": ids[s.uid]} for position, s in enumerate(record.schedules)
        ]
        connection.execute(insert(ConfigSchedule), rows)
    return found


WORKLOAD_COLUMNS = (
    Workload.dtypes, Workload.layouts, Workload.rows, Workload.extents, Workload.flops, Workload.bytes_min,
)  # fmt: skip


def workload_record(row: Row[Any], chain_key: str) -> WorkloadRecord:
    """The record of a row that has WORKLOAD_COLUMNS."""
    return WorkloadRecord(
        chain_key=chain_key,
        dtypes=tuple(json.loads(row.dtypes)),
        layouts=tuple(json.loads(row.layouts)),
        rows=row.rows,
        extents=tuple(row.extents),
        flops=row.flops,
        bytes_min=row.bytes_min,
    )


def schedules_by_id(connection: Connection, ids: Iterable[int]) -> dict[int, ScheduleRecord]:
    """The schedules with these ids."""
    query = select(Schedule.id, Chain.uid, Schedule.kind, Schedule.space_version, Schedule.knobs).join(
        Chain, Chain.id == Schedule.chain_id
    )
    found = {}
    for block in _blocks(ids):
        for row in connection.execute(query.where(Schedule.id.in_(block))):
            found[row.id] = ScheduleRecord(row.uid, row.kind, row.space_version, row.knobs)
    return found


def configs_by_id(connection: Connection, ids: Iterable[int]) -> dict[int, ConfigRecord]:
    """The configs with these ids, each with its schedules in order."""
    wanted = sorted(set(ids))
    parts: dict[int, list[int]] = {key: [] for key in wanted}
    heads: dict[int, tuple[str, str]] = {}
    for block in _blocks(wanted):
        order = select(ConfigSchedule).where(ConfigSchedule.config_id.in_(block)).order_by(ConfigSchedule.position)
        for row in connection.execute(order.with_only_columns(ConfigSchedule.config_id, ConfigSchedule.schedule_id)):
            parts[row.config_id].append(row.schedule_id)
        head = select(Config.id, Chain.uid, Config.plan).join(Chain, Chain.id == Config.chain_id)
        for one in connection.execute(head.where(Config.id.in_(block))):
            heads[one.id] = (one.uid, one.plan)
    schedules = schedules_by_id(connection, {s for part in parts.values() for s in part})
    return {key: ConfigRecord(chain, plan, tuple(schedules[s] for s in parts[key])) for key, (chain, plan) in heads.items()}


def _blocks(ids: Iterable[int], size: int = 500) -> list[list[int]]:
    """In pieces: databases limit the number of bound values of a statement."""
    ordered = sorted(set(ids))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]
