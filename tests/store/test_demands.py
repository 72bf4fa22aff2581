"""Demand: calls that were missed are summed, listed by the time they lost, and forgotten when their workload is tuned."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from store_samples import CHAIN, DEVICE, FUSED, OTHER_DEVICE, begin, missed, workload

from autofuse.store.store import Store

BOUND_S = 4 * 16 * 4096 / 4000e9  # the bytes of one call at 16 rows, at DEVICE's measured bandwidth


def seen(store: Store, **asked: Any) -> list[tuple[Any, ...]]:
    return [(r["rows"], r["device"], r["tier"], r["calls"], r["seconds"]) for r in store.demand(**asked)]


def test_calls_are_summed_by_workload_device_and_tier(store: Store) -> None:
    store.add_demand([missed(calls=3, seconds=0.25, s0=1, s1=16), missed(tier="eager"), missed(device=OTHER_DEVICE)])
    first = store.demand()
    store.add_demand([missed(calls=4, seconds=0.5, s0=2, s1=8), missed(64)])
    assert sorted(seen(store)) == [
        (16, "H200", "eager", 10, 0.5), (16, "H200", "heuristic", 7, 0.75), (16, "some CPU", "heuristic", 10, 0.5),
        (64, "H200", "heuristic", 10, 0.5),
    ]  # fmt: skip
    [row] = [r for r in store.demand() if r["calls"] == 7]
    [old] = [r for r in first if r["calls"] == 3]
    assert row["sizes"] == {"s0": 2, "s1": 8} and old["sizes"] == {"s0": 1, "s1": 16}
    assert row["first_seen"] == old["first_seen"] <= old["last_seen"] < row["last_seen"]
    assert abs(row["last_seen"] - datetime.now(UTC)) < timedelta(minutes=1)
    assert (row["graph"], row["extents"], row["chain"]) == (CHAIN.graph, [64, 4096], "norm_silu")


def test_what_is_lost_is_the_time_over_the_devices_bandwidth(store: Store) -> None:
    store.add_demand([missed(calls=1000, seconds=1.0), missed(64, calls=10, seconds=1e-12), missed(device=OTHER_DEVICE)])
    lost = {(r["rows"], r["device"]): (r["bound_s"], r["lost_s"]) for r in store.demand()}
    assert lost[16, "H200"] == (pytest.approx(1000 * BOUND_S), pytest.approx(1.0 - 1000 * BOUND_S))
    assert lost[64, "H200"] == (pytest.approx(40 * BOUND_S), 0.0)  # less than the bound: nothing was lost
    assert lost[16, "some CPU"][1] == pytest.approx(0.5 - 10 * 4 * 16 * 4096 / 500e9)  # never measured: as the fastest made
    store.add_demand([replace(missed(calls=1, seconds=0.0), device=replace(DEVICE, peak_bandwidth_gbs=2000.0))])
    assert store.demand(device_uid=DEVICE.uid)[0]["bound_s"] == pytest.approx(1001 * BOUND_S * 2)


def test_most_lost_comes_first_and_near_rows_last(store: Store) -> None:
    store.add_demand(
        [missed(16, "near rows", seconds=9.0), missed(32, seconds=1.0), missed(64, "eager", seconds=2.0), missed(8, seconds=0.0)]
    )
    assert [row[0] for row in seen(store)] == [64, 32, 8, 16]
    assert [row[0] for row in seen(store, limit=2)] == [64, 32]
    assert seen(store, device_uid=OTHER_DEVICE.uid) == []


def test_a_workload_that_is_tuned_is_no_demand(store: Store) -> None:
    store.add_demand([missed(16), missed(16, "near rows"), missed(64), missed(16, device=OTHER_DEVICE)])
    store.set_best(begin(store, 16), workload(16), FUSED, 8.0, True)
    assert sorted(seen(store)) == [(16, "some CPU", "heuristic", 10, 0.5), (64, "H200", "heuristic", 10, 0.5)]
    store.add_demand([missed(16), missed(16, device=OTHER_DEVICE), missed(64)])  # from a process that looked before
    assert sorted(seen(store)) == [(16, "some CPU", "heuristic", 20, 1.0), (64, "H200", "heuristic", 20, 1.0)]


def test_the_view(store: Store) -> None:
    store.add_demand([missed()])
    names = "chain, rows, cols, device, tier, calls, seconds, lost_s > 0"
    assert store.query(f"SELECT {names} FROM v_demand")[1] == [("norm_silu", 16, 4096, "H200", "heuristic", 10, 0.5, True)]
    kinds = {type(value).__name__ for value in store.query("SELECT * FROM v_demand")[1][0]}
    assert kinds <= {"int", "float", "str", "NoneType", "datetime", "dict"}
