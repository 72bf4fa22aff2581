"""Demand: what the dispatcher missed, counted and asked for. Each function takes a connection inside a short transaction."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, Connection, delete, select, text
from sqlalchemy.types import TypeEngine

from . import facts
from .models import Best, Demand, UtcDateTime
from .records import DemandRecord

UNTUNED = ("heuristic", "eager")
"""The tiers of calls that the store has nothing for; what others lose to a config tuned nearby is less, and listed last."""

TYPES: dict[str, TypeEngine[Any]] = {
    "sizes": JSON(), "extents": JSON(), "first_seen": UtcDateTime(), "last_seen": UtcDateTime(),
}  # fmt: skip


def add(connection: Connection, record: DemandRecord) -> None:
    """Add these calls to those of their workload, device and tier.

    Left out where the workload has a winner there: it was tuned after the calling process had looked.
    """
    facts.chain_id(connection, record.chain)
    workload = facts.workload_id(connection, record.workload)
    device = facts.device_id(connection, record.device)
    if connection.scalar(select(Best.id).where(Best.workload_id == workload, Best.device_id == device).limit(1)) is not None:
        return
    now = datetime.now(UTC)
    values = {
        "workload_id": workload, "device_id": device, "tier": record.tier, "calls": record.calls,
        "seconds": record.seconds, "sizes": record.sizes, "first_seen": now, "last_seen": now,
    }  # fmt: skip
    new = facts.upsert(connection, Demand).values(values)
    sums = {
        "calls": Demand.calls + new.excluded.calls, "seconds": Demand.seconds + new.excluded.seconds,
        "sizes": new.excluded.sizes, "last_seen": new.excluded.last_seen,
    }  # fmt: skip
    connection.execute(new.on_conflict_do_update(index_elements=["workload_id", "device_id", "tier"], set_=sums))


def forget(connection: Connection, workload: int, device: int) -> None:
    """Take a workload (by its id) off what a device lacks, whatever tiers served it."""
    connection.execute(delete(Demand).where(Demand.workload_id == workload, Demand.device_id == device))


def rows(connection: Connection, device_uid: str | None, limit: int | None) -> list[dict[str, Any]]:
    """Rows of v_demand with the chain's graph and the workload's extents, by the time lost; what a config tuned nearby serves
    comes last."""
    values: dict[str, Any] = dict(zip(("none", "least"), UNTUNED, strict=True))
    where = ends = ""
    if device_uid is not None:
        where, values["device"] = "WHERE v.device_uid = :device", device_uid
    if limit is not None:
        ends, values["limit"] = "LIMIT :limit", limit
    query = (
        "SELECT v.*, c.graph, w.extents FROM v_demand v JOIN chain c ON c.uid = v.chain_key "
        f"JOIN workload w ON w.uid = v.workload_uid {where} "
        f"ORDER BY CASE WHEN v.tier IN (:none, :least) THEN 0 ELSE 1 END, v.lost_s DESC, v.calls DESC, v.demand_id {ends}"
    )
    return [dict(row) for row in connection.execute(text(query).columns(**TYPES), values).mappings()]
