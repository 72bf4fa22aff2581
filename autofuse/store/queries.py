"""What is asked of the database. Each function takes a connection inside a short read transaction."""

from __future__ import annotations

from statistics import median
from typing import Any

from sqlalchemy import JSON, Boolean, Connection, Integer, Select, func, literal_column, select, text
from sqlalchemy.types import TypeEngine

from ..errors import InputError
from .facts import WORKLOAD_COLUMNS, configs_by_id, schedules_by_id, workload_record
from .models import (
    Best,
    Chain,
    Config,
    ConfigSchedule,
    Device,
    Environment,
    Run,
    Schedule,
    Trial,
    UtcDateTime,
    Workload,
)  # fmt: skip
from .records import ScheduleRecord, TrialRecord, WorkloadRecord

MEASURED = (
    "source_hash", "median_us", "p20_us", "p80_us", "samples", "max_error", "eager_error", "compile_s", "registers",
    "spills", "shared_bytes", "message",
)  # fmt: skip
"""The fields of a TrialRecord that are columns of `trial` under the same name."""


HISTORY_TYPES: dict[str, TypeEngine[Any]] = {"created": UtcDateTime(), "knobs": JSON()}


ENVIRONMENT_COLUMNS = (
    Environment.driver, Environment.cuda, Environment.torch, Environment.triton, Environment.compiler,
    Environment.python, Environment.autofuse, Environment.kernel_source_hash,
)  # fmt: skip
"""The fields of an EnvironmentRecord, in order."""

MOST_ENTRIES = 200
"""Of these the nearest is chosen: a miss need not read all that a large database has of a chain."""


def best_statement(family_uid: str, device_uid: str, arch: str | None) -> Select[*tuple[Any, ...]]:
    """What the runtime looks up; `reader.BEST_SQL` is this, compiled for SQLite. Without `arch`: on the device alone."""
    return (
        select(
            Best.id, Workload.rows, Config.plan, Best.median_us, Best.verified, Best.protocol, Config.uid, *ENVIRONMENT_COLUMNS,
            Chain.uid, Schedule.kind, Schedule.space_version, Schedule.knobs, Device.uid, Device.name,
        )
        .select_from(Best)
        .join(Workload, Workload.id == Best.workload_id)
        .join(Device, Device.id == Best.device_id)
        .join(Environment, Environment.id == Best.environment_id)
        .join(Config, Config.id == Best.config_id)
        .outerjoin(ConfigSchedule, ConfigSchedule.config_id == Config.id)
        .outerjoin(Schedule, Schedule.id == ConfigSchedule.schedule_id)
        .outerjoin(Chain, Chain.id == Schedule.chain_id)
        .where(Workload.family == family_uid, (Device.uid == device_uid) | (Device.arch == arch))
        .order_by(
            (Device.uid == device_uid).desc(), Workload.rows, Best.verified.desc(), Best.median_us, Best.id,
            ConfigSchedule.position,
        )
    )  # fmt: skip


def entries_statement(chain_key: str, name: str, family_uid: str, arch: str) -> Select[*tuple[Any, ...]]:
    """What is tuned of a chain, or of chains of its name: the likeliest to be near a call first, then the newest.

    `reader.ENTRIES_SQL` is this, compiled for SQLite.
    """
    return (
        select(
            Chain.name, Chain.uid, Workload.dtypes, Workload.layouts, Workload.rows, Workload.extents, Device.uid, Device.name,
            Device.arch, *ENVIRONMENT_COLUMNS,
        )
        .select_from(Best)
        .join(Workload, Workload.id == Best.workload_id)
        .join(Chain, Chain.id == Workload.chain_id)
        .join(Device, Device.id == Best.device_id)
        .join(Environment, Environment.id == Best.environment_id)
        .where((Chain.uid == chain_key) | (Chain.name == name))
        .order_by(
            (Workload.family == family_uid).desc(), (Chain.uid == chain_key).desc(), (Device.arch == arch).desc(), Best.id.desc(),
        )
        .limit(literal_column(str(MOST_ENTRIES), Integer))
        .offset(literal_column("0", Integer))  # SQLite's would be bound
    )  # fmt: skip


def graphs_statement(name: str) -> Select[*tuple[Any, ...]]:
    """The tuned chains of a name, the newest first: structure, extents and dtypes, in which workloads of one family are alike.

    `reader.GRAPHS_SQL` is this, compiled for SQLite.
    """
    firsts = (
        select(func.min(Workload.id))
        .select_from(Best)
        .join(Workload, Workload.id == Best.workload_id)
        .join(Chain, Chain.id == Workload.chain_id)
        .where(Chain.name == name)
        .group_by(Workload.family)
    )
    return (
        select(Chain.graph, Workload.extents, Workload.dtypes)
        .join(Chain, Chain.id == Workload.chain_id)
        .where(Workload.id.in_(firsts))
        .order_by(Workload.id.desc())
    )


def trials(
    connection: Connection, device_uid: str, environment_uid: str, workload_uid: str, protocol: str, *, segments: bool
) -> list[TrialRecord]:
    """All trials of a workload in one place, oldest first: of schedules of a segment, or of whole configs."""
    query = (
        select(*WORKLOAD_COLUMNS, Chain.uid.label("chain_key"), Trial.schedule_id, Trial.config_id, Trial.status)
        .add_columns(*(getattr(Trial, name) for name in MEASURED))
        .join(Run, Run.id == Trial.run_id)
        .join(Device, Device.id == Run.device_id)
        .join(Environment, Environment.id == Run.environment_id)
        .join(Workload, Workload.id == Trial.workload_id)
        .join(Chain, Chain.id == Workload.chain_id)
        .where(
            Device.uid == device_uid, Environment.uid == environment_uid, Workload.uid == workload_uid,
            Run.protocol == protocol, (Trial.schedule_id if segments else Trial.config_id).is_not(None),
        )
        .order_by(Trial.id)
    )  # fmt: skip
    rows = connection.execute(query).all()
    schedules = schedules_by_id(connection, {r.schedule_id for r in rows if r.schedule_id is not None})
    configs = configs_by_id(connection, {r.config_id for r in rows if r.config_id is not None})
    return [
        TrialRecord(
            workload=workload_record(row, row.chain_key),
            status=row.status,
            schedule=schedules.get(row.schedule_id),
            config=configs.get(row.config_id),
            **{name: getattr(row, name) for name in MEASURED},
        )
        for row in rows
    ]


def neighbours(
    connection: Connection, chain_key: str, device_uid: str | None, limit: int
) -> list[tuple[WorkloadRecord, ScheduleRecord, float]]:
    """The fastest schedule of each workload of a segment chain, on one device or on each; the newest first."""
    place = func.row_number().over(
        partition_by=(Trial.workload_id, Run.device_id), order_by=(Trial.median_us, Trial.id)
    )  # fmt: skip
    ranked = (
        select(Trial.id, Trial.workload_id, Trial.schedule_id, Trial.median_us, place.label("place"))
        .join(Run, Run.id == Trial.run_id)
        .join(Workload, Workload.id == Trial.workload_id)
        .join(Chain, Chain.id == Workload.chain_id)
        .where(Chain.uid == chain_key, Trial.status == "ok", Trial.schedule_id.is_not(None))
    )
    if device_uid is not None:
        ranked = ranked.join(Device, Device.id == Run.device_id).where(Device.uid == device_uid)
    inner = ranked.subquery()
    query = (
        select(*WORKLOAD_COLUMNS, inner.c.schedule_id, inner.c.median_us)
        .join(inner, inner.c.workload_id == Workload.id)
        .where(inner.c.place == 1)
        .order_by(inner.c.id.desc())
        .limit(limit)
    )
    rows = connection.execute(query).all()
    schedules = schedules_by_id(connection, {row.schedule_id for row in rows})
    return [(workload_record(row, chain_key), schedules[row.schedule_id], row.median_us) for row in rows]


def chain_keys(connection: Connection, chain: str) -> list[str]:
    """The keys of the chains that a user may mean: those of that name, else that id, else that prefix of the key.

    Raises InputError if there is none.
    """
    conditions = [Chain.name == chain]
    if chain.isdecimal() and len(chain) < 10:
        conditions.append(Chain.id == int(chain))
    conditions.append(Chain.uid.startswith(chain, autoescape=True))
    for condition in conditions:
        found = list(connection.scalars(select(Chain.uid).where(condition).order_by(Chain.id))) if chain else []
        if found:
            return found
    raise InputError(f"No chain in the database has the name, id or key prefix {chain!r}: `autofuse best` lists them.")


def best_rows(connection: Connection, chain: str | None) -> list[dict[str, Any]]:
    """Rows of v_best, of one chain or of all."""
    where, values = "", {}
    if chain is not None:
        where, values = "WHERE chain_key = :key", {"key": chain}
    sql = f"SELECT * FROM v_best {where} ORDER BY chain, chain_key, cols, rows, dtypes, device, median_us"
    return _dicts(connection, sql, values, verified=Boolean())


def history_rows(connection: Connection, chain: str | None, limit: int) -> list[dict[str, Any]]:
    """The newest rows of v_history, newest first: of runs over a chain, or that measured it as a segment, or all."""
    values: dict[str, Any] = {"limit": limit}
    where = ""
    if chain is not None:
        names = []
        for i, key in enumerate(chain_keys(connection, chain)):
            values[f"k{i}"] = key
            names.append(f":k{i}")
        where = f"WHERE chain_key IN ({', '.join(names)}) OR measured_key IN ({', '.join(names)})"
    sql = f"SELECT * FROM v_history {where} ORDER BY trial_id DESC LIMIT :limit"
    return _dicts(connection, sql, values, **HISTORY_TYPES)


def trial_details(connection: Connection, trial: int) -> dict[str, Any]:
    """All about one trial: the row of v_history, its run, and the knobs of its schedule or of each of its config's."""
    sql = "SELECT * FROM v_history WHERE trial_id = :trial"
    rows = _dicts(connection, sql, {"trial": trial}, **HISTORY_TYPES)
    if not rows:
        raise InputError(f"There is no trial {trial}: `autofuse history` lists them.")
    details = rows[0]
    columns = Trial.__table__.c
    ids = connection.execute(select(columns.schedule_id, columns.config_id, columns.run_id).where(columns.id == trial)).one()
    run = connection.execute(select(Run.__table__).where(Run.__table__.c.id == ids.run_id)).mappings().one()
    details["run"] = {k: v for k, v in run.items() if not k.endswith("id") or k == "uid"}
    if ids.schedule_id is not None:
        schedules: tuple[ScheduleRecord, ...] = (schedules_by_id(connection, [ids.schedule_id])[ids.schedule_id],)
    else:
        schedules = configs_by_id(connection, [ids.config_id])[ids.config_id].schedules
    details["schedules"] = [
        {"chain_key": s.chain_key, "kind": s.kind, "space_version": s.space_version, "knobs": s.knobs, "uid": s.uid}
        for s in schedules
    ]
    return details


def winners(connection: Connection) -> list[dict[str, Any]]:
    """The rows of `best`, derived anew from the trials.

    A config's time is the median over its ok trials. It is verified if it has at least two (finalists are measured
    again). Verified ones come before others, then the faster, then the simpler. A config that was ever found to be
    incorrect in a place cannot win there.
    """
    query = (
        select(
            Run.device_id, Run.environment_id, Run.protocol, Trial.workload_id, Config.id, Config.num_segments,
            Trial.median_us,
        )
        .join(Run, Run.id == Trial.run_id)
        .join(Config, Config.id == Trial.config_id)
        .where(Trial.status.in_(("ok", "incorrect")))
    )  # fmt: skip
    times: dict[tuple[int, int, str, int], dict[tuple[int, int], list[float | None]]] = {}
    for device, environment, protocol, workload, config, segments, time_us in connection.execute(query):
        configs = times.setdefault((device, environment, protocol, workload), {})
        configs.setdefault((segments, config), []).append(time_us)
    rows = []
    for (device, environment, protocol, workload), configs in times.items():
        ranked = sorted(
            (len(found) < 2, median(found), segments, config)
            for (segments, config), samples in configs.items()
            if len(found := [s for s in samples if s is not None]) == len(samples)
        )
        if ranked:
            unverified, time, _segments, config = ranked[0]
            rows.append(
                {
                    "device_id": device, "environment_id": environment, "protocol": protocol, "workload_id": workload,
                    "config_id": config, "median_us": time, "verified": not unverified,
                }
            )  # fmt: skip
    return rows


def _dicts(connection: Connection, sql: str, values: dict[str, Any], **types: TypeEngine[Any]) -> list[dict[str, Any]]:
    """Rows as dictionaries. `types`: columns that SQLite keeps as something simpler than what they are."""
    return [dict(row) for row in connection.execute(text(sql).columns(**types), values).mappings()]
