"""Small records that the store's tests share: an RMS norm that feeds a SiLU, whole or in two segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autofuse.store.records import (
    ChainRecord,
    ConfigRecord,
    DemandRecord,
    DeviceRecord,
    EnvironmentRecord,
    ScheduleRecord,
    TrialRecord,
    WorkloadRecord,
)  # fmt: skip
from autofuse.store.store import Store

DEVICE = DeviceRecord("d" * 32, "nvidia", "H200", "sm_90", 132, memory_bytes=150_000_000_000, peak_bandwidth_gbs=4000.0)
OTHER_DEVICE = DeviceRecord("e" * 32, "cpu", "some CPU", "x86_64", 2)
OLD = EnvironmentRecord("570", "12.8", "2.9.0", "3.5.0", "gcc 12", "3.11", "0.1", "k1")
NEW = replace(OLD, torch="2.10.0", triton="3.6.0")
CHAIN = ChainRecord("c" * 64, "norm_silu", '{"nodes":["norm","silu"]}')
NORM = ChainRecord("a" * 64, "", '{"nodes":["norm"]}')
SILU = ChainRecord("b" * 64, "", '{"nodes":["silu"]}')
PARTS = [("0", NORM), ("1", SILU), ("0+1", CHAIN)]


def workload(rows: int = 1024, chain: ChainRecord = CHAIN, cols: int = 4096) -> WorkloadRecord:
    return WorkloadRecord(
        chain.key,
        ("float16", "float16"),
        ("row", "row"),
        rows,
        (64, cols),
        flops=8 * rows * cols,
        bytes_min=4 * rows * cols,
    )


def schedule(chain: ChainRecord = CHAIN, num_warps: int = 4, **knobs: int | str) -> ScheduleRecord:
    return ScheduleRecord(chain.key, "rowreduce", 1, {"num_warps": num_warps, "form": "looped", **knobs})


FUSED = ConfigRecord(CHAIN.key, "[0+1]", (schedule(block_cols=2048, cache="evict_first"),))
SPLIT = ConfigRecord(CHAIN.key, "[0][1]", (schedule(NORM, 8), schedule(SILU, 2)))
SPLIT_BACK = ConfigRecord(CHAIN.key, "[1][0]", (schedule(SILU, 2), schedule(NORM, 8)))
EAGER = ConfigRecord(CHAIN.key, "eager", (ScheduleRecord(CHAIN.key, "eager", 1, {}),))


def of_config(config: ConfigRecord, us: float | None, status: str = "ok", rows: int = 1024, **rest: Any) -> TrialRecord:
    return TrialRecord(workload(rows), status, config=config, median_us=us, **rest)


def of_schedule(
    one: ScheduleRecord, us: float | None, status: str = "ok", rows: int = 1024, chain: ChainRecord = CHAIN, **rest: Any
) -> TrialRecord:
    return TrialRecord(workload(rows, chain), status, schedule=one, median_us=us, **rest)


def begin(
    store: Store,
    rows: int = 1024,
    environment: EnvironmentRecord = OLD,
    device: DeviceRecord = DEVICE,
    protocol: str = "cold",
    roofline_us: float | None = 5.0,
) -> int:
    """A run over CHAIN, with its segments known."""
    store.add_chain_segments(CHAIN, PARTS)
    return store.begin_run(
        device, environment, CHAIN, workload(rows), protocol=protocol, sampler="tpe", seed=7, trials_budget=100,
        seconds_budget=60.0, roofline_us=roofline_us,
    )  # fmt: skip


def missed(
    rows: int = 16, tier: str = "heuristic", calls: int = 10, seconds: float = 0.5, device: DeviceRecord = DEVICE, **sizes: int
) -> DemandRecord:
    return DemandRecord(device, CHAIN, workload(rows), tier, calls, seconds, sizes or {"s0": rows // 4, "s1": 4})


def fill(store: Store) -> int:
    """A database with one run, three trials, a winner, and a workload that was missed. Returns the run."""
    run = begin(store)
    store.add_trial(run, of_schedule(schedule(NORM, 8), 7.0, chain=NORM))
    store.add_trial(run, of_config(SPLIT, 12.0))
    store.add_trial(run, of_config(FUSED, None, "incorrect", message="off by 3 ulp"))
    store.set_best(run, workload(), SPLIT, 12.0, True)
    store.finish_run(run, "done", reason="budget", eager_us=24.0, unfused_us=18.0)
    store.add_demand([missed()])
    return run
