"""The result database as the rest of autofuse sees it. Each method is one short transaction, or none: nothing is held
open while a caller builds or measures a kernel. Errors of the database come out as StoreError."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, CursorResult, Engine, delete, func, insert, select, update

from ..errors import InputError, StoreError
from . import demands, facts, queries, schema
from .engine import make_engine, reading, writing
from .models import RUN_STATES, Best, Config, Run, Trial
from .records import (
    STATUSES,
    BestRecord,
    ChainRecord,
    ConfigRecord,
    DemandRecord,
    DeviceRecord,
    EntryRecord,
    EnvironmentRecord,
    GraphRecord,
    ScheduleRecord,
    TrialRecord,
    WorkloadRecord,
    entries,
    event_uid,
    gather,
    graphs,
)  # fmt: skip
from .sql import run_query
from .tuned import TunedRecord, tuned

BEST_KEY = ("device_id", "environment_id", "protocol", "workload_id")


class Store:
    """A database of results. Make one with `Store.open`; it is a context manager, and safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def open(cls, url: str, *, read_only: bool = False) -> Store:
        """Open a database by URL; create or upgrade it unless `read_only`.

        Raises StoreError, StoreNewer or StoreCorrupt if it cannot be used.
        """
        engine = make_engine(url, read_only=read_only)
        try:
            (schema.require if read_only else schema.upgrade)(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        self.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Writing

    def begin_run(
        self,
        device: DeviceRecord,
        environment: EnvironmentRecord,
        chain: ChainRecord,
        workload: WorkloadRecord,
        *,
        protocol: str,
        sampler: str,
        seed: int,
        trials_budget: int,
        seconds_budget: float,
        roofline_us: float | None = None,
    ) -> int:
        """Start a run, in state "running", and return its id."""
        with writing(self.engine) as connection:
            facts.chain_id(connection, chain)
            values = {
                "uid": event_uid(),
                "device_id": facts.device_id(connection, device),
                "environment_id": facts.environment_id(connection, environment),
                "workload_id": facts.workload_id(connection, workload),
                "protocol": protocol,
                "sampler": sampler,
                "seed": seed,
                "trials_budget": trials_budget,
                "budget_s": seconds_budget,
                "state": "running",
                "reason": "",
                "started": datetime.now(UTC),
                "roofline_us": roofline_us,
            }
            return _new_id(connection.execute(insert(Run).values(values)))

    def add_chain_segments(self, chain: ChainRecord, parts: list[tuple[str, ChainRecord]]) -> None:
        """Store what the parts of a chain are as chains of their own; needed before their trials. Doing it twice is
        fine."""
        with writing(self.engine) as connection:
            chain_id = facts.chain_id(connection, chain)
            ids = {segment.key: facts.chain_id(connection, segment) for _, segment in sorted(parts, key=lambda p: p[1].key)}
            for part, segment in sorted(parts, key=lambda p: p[0]):
                facts.segment_row(connection, chain_id, part, ids[segment.key])

    def add_trial(self, run_id: int, trial: TrialRecord) -> int:
        """Store a trial as the next of its run, and return its id. It is committed when this returns.

        Raises InputError for a record that breaks its own rules, StoreError for a run or chain that is not there.
        """
        if trial.status not in STATUSES:
            raise InputError(f"A trial's status is {trial.status!r}: it may be {', '.join(STATUSES)}")
        if (trial.schedule is None) == (trial.config is None):
            raise InputError("A trial is of a schedule or of a config: set exactly one of the two")
        if (trial.status == "ok") != (trial.median_us is not None):
            raise InputError(f"A trial has a time if and only if it is ok: {trial.status!r} has {trial.median_us}")
        with writing(self.engine) as connection:
            _lock_run(connection, run_id)
            values: dict[str, Any] = {name: getattr(trial, name) for name in queries.MEASURED}
            values |= {
                "uid": event_uid(),
                "run_id": run_id,
                "status": trial.status,
                "workload_id": facts.workload_id(connection, trial.workload),
                "schedule_id": facts.schedule_id(connection, trial.schedule) if trial.schedule else None,
                "config_id": facts.config_id(connection, trial.config) if trial.config else None,
                "created": datetime.now(UTC),
            }
            last = connection.scalar(select(func.max(Trial.number)).where(Trial.run_id == run_id))
            values["number"] = 0 if last is None else last + 1
            return _new_id(connection.execute(insert(Trial).values(values)))

    def finish_run(
        self,
        run_id: int,
        state: str,
        *,
        reason: str = "",
        eager_us: float | None = None,
        unfused_us: float | None = None,
        roofline_us: float | None = None,
    ) -> None:
        """End a run with what was learnt of its baselines, and of its bound where a measurement has refuted it.

        Without `eager_us`, the fastest ok trial of the run's config whose plan is "eager" stands for it. `unfused_us`
        is the time with every op in a kernel of its own; only the caller knows which plan that is.
        """
        if state not in RUN_STATES or state == "running":
            raise InputError(f"A run's last state is {state!r}: it may be {', '.join(RUN_STATES[1:])}")
        with writing(self.engine) as connection:
            _lock_run(connection, run_id)
            if eager_us is None:
                eager_us = connection.scalar(
                    select(func.min(Trial.median_us))
                    .join(Config, Config.id == Trial.config_id)
                    .where(Trial.run_id == run_id, Trial.status == "ok", Config.plan == "eager")
                )
            values = {
                "state": state, "reason": reason, "ended": datetime.now(UTC), "eager_us": eager_us,
                "unfused_us": unfused_us,
            }  # fmt: skip
            if roofline_us is not None:
                values["roofline_us"] = roofline_us
            connection.execute(update(Run).where(Run.id == run_id).values(values))

    def set_best(self, run_id: int, workload: WorkloadRecord, config: ConfigRecord, median_us: float, verified: bool) -> None:
        """Make a config the winner of a workload in the run's place (device, environment, protocol).

        Takes the place of an older winner whatever its time was: the caller has measured it against that one. The demand
        for the workload there is met by it, and forgotten.
        """
        with writing(self.engine) as connection:
            run = _lock_run(connection, run_id)
            values = {
                "device_id": run.device_id,
                "environment_id": run.environment_id,
                "protocol": run.protocol,
                "workload_id": facts.workload_id(connection, workload),
                "config_id": facts.config_id(connection, config),
                "median_us": median_us,
                "verified": verified,
            }
            changed = {name: values[name] for name in ("config_id", "median_us", "verified")}
            connection.execute(
                facts.upsert(connection, Best).values(values).on_conflict_do_update(index_elements=list(BEST_KEY), set_=changed)
            )
            demands.forget(connection, values["workload_id"], run.device_id)

    def rebuild_best(self) -> int:
        """Derive `best` anew from the trials, by the rule of `queries.winners`, and return its number of rows."""
        with writing(self.engine) as connection:
            if connection.dialect.name == "postgresql":
                # A trial or winner that is committed between the reading and the writing would be lost from `best`.
                connection.exec_driver_sql("LOCK TABLE trial, best IN SHARE ROW EXCLUSIVE MODE")
            rows = queries.winners(connection)
            connection.execute(delete(Best))
            if rows:
                connection.execute(insert(Best), rows)
            return len(rows)

    def add_demand(self, missed: Sequence[DemandRecord]) -> None:
        """Add calls to what is counted as demand. A workload that has a winner on its device is left out."""
        with writing(self.engine) as connection:
            for record in missed:
                demands.add(connection, record)

    # Reading

    def demand(self, device_uid: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        """What was called without being tuned: rows of v_demand with `graph` (the chain's), by the time lost, calls that
        something tuned nearby served last."""
        with reading(self.engine) as connection:
            return demands.rows(connection, device_uid, limit)

    def segment_trials(self, device_uid: str, environment_uid: str, workload_uid: str, protocol: str) -> list[TrialRecord]:
        """All trials of a segment's workload in one place, of any status and run, oldest first. A schedule may
        recur."""
        with reading(self.engine) as connection:
            return queries.trials(connection, device_uid, environment_uid, workload_uid, protocol, segments=True)

    def config_trials(self, device_uid: str, environment_uid: str, workload_uid: str, protocol: str) -> list[TrialRecord]:
        """All trials of whole configs of a workload in one place, of any status and run, oldest first."""
        with reading(self.engine) as connection:
            return queries.trials(connection, device_uid, environment_uid, workload_uid, protocol, segments=False)

    def neighbours(self, chain_key: str, device_uid: str | None, limit: int) -> list[tuple[WorkloadRecord, ScheduleRecord, float]]:
        """The fastest schedule of each workload of a segment chain with its time in µs, the newest first.

        The asker's own workload is among them if it has trials. Without a device: one a workload and device.
        """
        with reading(self.engine) as connection:
            return queries.neighbours(connection, chain_key, device_uid, limit)

    def best_records(self, family_uid: str, device_uid: str, arch: str | None = None) -> list[BestRecord]:
        """What `reader.Reader.best` returns, over SQLAlchemy."""
        with reading(self.engine) as connection:
            return gather(connection.execute(queries.best_statement(family_uid, device_uid, arch)))

    def entry_records(self, chain_key: str, name: str, family_uid: str, arch: str) -> list[EntryRecord]:
        """What `reader.Reader.entries` returns, over SQLAlchemy."""
        with reading(self.engine) as connection:
            return entries(connection.execute(queries.entries_statement(chain_key, name, family_uid, arch)))

    def tuned(self, arch: str, device_uid: str | None, chains: Sequence[str] = ()) -> list[TunedRecord]:
        """The winners on devices of an architecture, or on one, with all that their kernels are made from. Raises
        InputError for a chain that is not there."""
        with reading(self.engine) as connection:
            keys = [key for chain in chains for key in queries.chain_keys(connection, chain)]
            return tuned(connection, arch, device_uid, keys)

    def graph_records(self, name: str) -> list[GraphRecord]:
        """What `reader.Reader.graphs` returns, over SQLAlchemy."""
        with reading(self.engine) as connection:
            return graphs(connection.execute(queries.graphs_statement(name)))

    def best(self, chain_key: str | None = None) -> list[dict[str, Any]]:
        """The winners of a chain, or of all: rows of v_best."""
        with reading(self.engine) as connection:
            return queries.best_rows(connection, chain_key)

    def history(self, chain: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """The newest trials, newest first: rows of v_history. `chain` is a chain's name, id or the start of its key.

        Raises InputError if there is no such chain.
        """
        with reading(self.engine) as connection:
            return queries.history_rows(connection, chain, limit)

    def show_trial(self, trial_id: int) -> dict[str, Any]:
        """All about one trial: its row of v_history, with `run` (its run) and `schedules` (knobs, in the plan's order).

        Raises InputError if there is no such trial.
        """
        with reading(self.engine) as connection:
            return queries.trial_details(connection, trial_id)

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a user's own SELECT. Raises InputError for SQL that is wrong, writes, or is
        several."""
        return run_query(self.engine, sql)


def _new_id(result: CursorResult[Any]) -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


def _lock_run(connection: Connection, run_id: int) -> Any:
    """The run's row, held against other writers until the transaction ends (on SQLite the whole database is held)."""
    query = select(Run.device_id, Run.environment_id, Run.protocol).where(Run.id == run_id).with_for_update()
    row = connection.execute(query).one_or_none()
    if row is None:
        raise StoreError(f"There is no run {run_id} in this database: begin one first.")
    return row
