"""The winners with all that a kernel is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from .facts import WORKLOAD_COLUMNS, configs_by_id, workload_record
from .models import Best, Chain, Device, Workload
from .records import ConfigRecord, DeviceRecord, WorkloadRecord


@dataclass(frozen=True)
class TunedRecord:
    """A winner: its chain's name and structure (JSON), its workload and config, and what its device allows."""

    name: str
    graph: str
    workload: WorkloadRecord
    config: ConfigRecord
    device: DeviceRecord


def tuned(connection: Connection, arch: str, device_uid: str | None, chains: Sequence[str] = ()) -> list[TunedRecord]:
    """The winners on devices of an architecture, or on one device, of these chains (keys; all without any), by name and rows.

    A config that won in several environments or protocols comes once.
    """
    columns = (Device.uid, Device.vendor, Device.name, Device.arch, Device.sm_count, Device.shared_per_block_bytes)
    query = (
        select(*WORKLOAD_COLUMNS, Chain.uid.label("chain_key"), Chain.name.label("chain"), Chain.graph, Best.config_id)
        .add_columns(*(c.label(f"device_{c.key}") for c in columns))
        .select_from(Best)
        .join(Workload, Workload.id == Best.workload_id)
        .join(Chain, Chain.id == Workload.chain_id)
        .join(Device, Device.id == Best.device_id)
        .where(Device.arch == arch)
        .order_by(Chain.name, Workload.rows, Best.id)
    )
    if device_uid is not None:
        query = query.where(Device.uid == device_uid)
    if chains:
        query = query.where(Chain.uid.in_(chains))
    rows = connection.execute(query).all()
    configs = configs_by_id(connection, {r.config_id for r in rows})
    found = {
        (r.device_uid, r.config_id, workload_record(r, r.chain_key).uid): TunedRecord(
            r.chain, r.graph, workload_record(r, r.chain_key), configs[r.config_id],
            DeviceRecord(
                r.device_uid, r.device_vendor, r.device_name, r.device_arch, r.device_sm_count,
                shared_per_block_bytes=r.device_shared_per_block_bytes,
            ),
        )
        for r in rows
    }  # fmt: skip
    return list(found.values())
