"""A database for shipping: the winners and what the runtime needs of them, in one file that is only read from then on."""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, select

from ..errors import InputError, StoreError
from . import queries
from .engine import database_path, reading, where, writing
from .models import (
    Base,
    Best,
    Chain,
    ChainSegment,
    Config,
    ConfigSchedule,
    Device,
    Environment,
    Schedule,
    Workload,
)  # fmt: skip
from .store import Store

BATCH = 500
"""Ids in one statement: SQLite before 3.32 takes 999 values."""


def export(store: Store, target: Path, chains: Iterable[str] = (), *, force: bool = False) -> int:
    """Write the winners of `chains` (names, ids or the start of keys; all chains without any) into a new SQLite file, with
    their configs, schedules, workloads, devices and environments; returns how many winners. No runs and no trials.

    The file appears whole or not at all: it is written beside `target` and renamed. It is in DELETE mode, so that it can be
    read in a folder that nobody may write. Raises InputError where there is nothing to export or `target` is there already
    and not `force`; StoreError where it cannot be written.
    """
    target = target.absolute()
    source = database_path(store.engine)
    if source is not None and target.exists() and source.samefile(target):
        raise InputError(f"{target} is the database itself: export into another file")
    if target.exists() and not force:
        raise InputError(f"{target} is there already: name another file, or use --force")
    if target.exists() and not target.is_file():
        raise InputError(f"{target} is no file: name one")
    for log in ("-wal", "-journal"):
        beside = target.with_name(target.name + log)
        if beside.exists() and beside.stat().st_size > 0:
            raise InputError(f"{target} is in use ({beside.name} lies beside it): close what uses it, or name another file")
    rows = _collect(store, chains)
    count = len(rows[Best.__tablename__])
    if not count:
        raise InputError(f"{where(store.engine)} has no winners to export: run `autofuse tune` first")
    made = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with Store.open(f"sqlite:///{made}") as copy, writing(copy.engine) as connection:
            for table in Base.metadata.sorted_tables:
                if rows.get(table.name):
                    connection.execute(insert(table), rows[table.name])
        _seal(made)
        os.replace(made, target)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{target} cannot be written ({error}): name a file in a folder that you may write") from error
    finally:
        for log in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                made.with_name(made.name + log).unlink()
    return count


def _seal(path: Path) -> None:
    """Put all into the one file: no log beside it, and none needed to read it."""
    raw = sqlite3.connect(path, isolation_level=None)
    try:
        mode = raw.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
        if mode != "delete":
            raise sqlite3.OperationalError(f"its journal mode stays {mode}")
        raw.execute("VACUUM")
    finally:
        raw.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _collect(store: Store, chains: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table, ids and all: the new file has no others that they could collide with."""
    with reading(store.engine) as connection:
        ids = None
        if chains := list(chains):
            keys = {key for chain in chains for key in queries.chain_keys(connection, chain)}
            ids = set(connection.scalars(select(Chain.id).where(Chain.uid.in_(keys))))

        def fetch(model: type[Base], column: str, wanted: Iterable[Any]) -> list[dict[str, Any]]:
            table = model.__table__
            assert isinstance(table, Table)
            return _fetch(connection, table, column, wanted)

        if ids is None:
            ids = set(connection.scalars(select(Workload.chain_id).join(Best, Best.workload_id == Workload.id)))
        workloads = fetch(Workload, "chain_id", ids)
        best = fetch(Best, "workload_id", _ids(workloads))
        workloads = fetch(Workload, "id", _ids(best, "workload_id"))
        configs = fetch(Config, "id", _ids(best, "config_id"))
        steps = fetch(ConfigSchedule, "config_id", _ids(configs))
        schedules = fetch(Schedule, "id", _ids(steps, "schedule_id"))
        owners = _ids(workloads, "chain_id") | _ids(configs, "chain_id")
        segments = fetch(ChainSegment, "chain_id", owners)
        known = owners | _ids(schedules, "chain_id") | _ids(segments, "segment_id")
        made = {
            Best: best, Workload: workloads, Config: configs, ConfigSchedule: steps, Schedule: schedules,
            ChainSegment: segments, Chain: fetch(Chain, "id", known), Device: fetch(Device, "id", _ids(best, "device_id")),
            Environment: fetch(Environment, "id", _ids(best, "environment_id")),
        }  # fmt: skip
        return {model.__tablename__: rows for model, rows in made.items()}


def _ids(rows: Iterable[dict[str, Any]], column: str = "id") -> set[int]:
    return {row[column] for row in rows}


def _fetch(connection: Connection, table: Table, column: str, wanted: Iterable[Any]) -> list[dict[str, Any]]:
    ids = sorted(wanted)
    found: list[dict[str, Any]] = []
    for start in range(0, len(ids), BATCH):
        query = select(table).where(table.c[column].in_(ids[start : start + BATCH])).order_by(*table.primary_key.columns)
        found += [dict(row) for row in connection.execute(query).mappings()]
    return found
