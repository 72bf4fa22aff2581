"""The views over a small database whose numbers are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from store_samples import (
    CHAIN,
    EAGER,
    FUSED,
    NEW,
    NORM,
    OTHER_DEVICE,
    SILU,
    SPLIT,
    SPLIT_BACK,
    begin,
    of_config,
    of_schedule,
    schedule,
    workload,
)  # fmt: skip

from autofuse.store.engine import writing
from autofuse.store.store import Store


def look(store: Store, view: str, columns: str, order: str = "1, 2, 3") -> list[tuple[Any, ...]]:
    return store.query(f"SELECT {columns} FROM {view} ORDER BY {order}")[1]


def test_best_and_speedup(store: Store) -> None:
    first, second = begin(store), begin(store)
    store.set_best(first, workload(), FUSED, 8.0, True)
    store.set_best(first, workload(16), FUSED, 2.0, False)
    store.finish_run(first, "done", eager_us=24.0, unfused_us=18.0)
    store.finish_run(second, "done", eager_us=32.0)  # newer, without unfused
    names = "chain, rows, cols, device, protocol, plan, num_segments, median_us, torch"
    assert look(store, "v_best", names) == [
        ("norm_silu", 16, 4096, "H200", "cold", "[0+1]", 1, 2.0, "2.9.0"),
        ("norm_silu", 1024, 4096, "H200", "cold", "[0+1]", 1, 8.0, "2.9.0"),
    ]
    names = "rows, eager_us, unfused_us, speedup_vs_eager, speedup_vs_unfused"
    assert look(store, "v_speedup", names) == [(16, None, None, None, None), (1024, 32.0, 18.0, 4.0, 2.25)]


def test_history_names_everything(store: Store) -> None:
    run = begin(store)
    store.add_trial(run, of_schedule(schedule(NORM, 8, block_rows=2), 7.0, chain=NORM))
    store.add_trial(run, of_config(SPLIT, None, "crashed", message="signal 11"))
    names = "number, chain, measured, measured_key, kind, num_warps, block_rows, plan, num_segments, status, message"
    assert look(store, "v_history", names) == [
        (0, "norm_silu", "segment", NORM.key, "rowreduce", 8, 2, None, None, "ok", ""),
        (1, "norm_silu", "config", CHAIN.key, None, None, None, "[0][1]", 2, "crashed", "signal 11"),
    ]


def test_segment_best(store: Store) -> None:
    run = begin(store)
    for warps, us in ((2, 9.0), (4, 6.0), (8, 7.0)):
        store.add_trial(run, of_schedule(schedule(NORM, warps), us, chain=NORM))
    store.add_trial(run, of_schedule(schedule(NORM, 16), None, "launch_error", chain=NORM))
    store.add_trial(run, of_schedule(schedule(SILU, 1), 3.0, chain=SILU))
    store.add_trial(run, of_config(SPLIT, 1.0))
    store.add_trial(begin(store, environment=NEW), of_schedule(schedule(NORM, 8), 5.0, chain=NORM))
    store.add_chain_segments(NORM, [("0", NORM)])
    names = "segment_key, torch, num_warps, median_us, num_chains"
    assert look(store, "v_segment_best", names) == [
        (NORM.key, "2.10.0", 8, 5.0, 2), (NORM.key, "2.9.0", 4, 6.0, 2), (SILU.key, "2.9.0", 1, 3.0, 1),
    ]  # fmt: skip


def test_roofline(store: Store) -> None:
    run = begin(store, roofline_us=5.0)
    store.set_best(run, workload(), FUSED, 8.0, True)
    unknown = begin(store, device=OTHER_DEVICE, roofline_us=None)
    store.set_best(unknown, workload(), FUSED, 80.0, True)
    gbs = 4 * 1024 * 4096 / 8.0 / 1e3  # bytes per µs are MB/s
    names = "device, roofline_us, roofline_share, achieved_gbs, bandwidth_share, achieved_tflops"
    rows = look(store, "v_roofline", names)
    assert rows[0] == pytest.approx(("H200", 5.0, 0.625, gbs, gbs / 4000.0, 8 * 1024 * 4096 / 8.0 / 1e6))
    assert rows[1] == (
        "some CPU",
        None,
        None,
        pytest.approx(gbs / 10),
        None,
        pytest.approx(8 * 1024 * 4096 / 80.0 / 1e6),
    )


def test_fusion(store: Store) -> None:
    run = begin(store)
    for rows, config, us in (
        (16, FUSED, 2.0), (16, FUSED, 2.5), (16, SPLIT, 4.0), (16, EAGER, 1.0), (4096, FUSED, 50.0),
        (4096, SPLIT, 45.0),
        (4096, SPLIT_BACK, 40.0), (64, FUSED, 3.0),
    ):  # fmt: skip
        store.add_trial(run, of_config(config, us, rows=rows))
    store.add_trial(run, of_config(SPLIT, None, "timeout", rows=64))
    names = "rows, fused_us, split_us, eager_us, split_speedup, winner"
    assert look(store, "v_fusion", names) == [
        (16, 2.0, 4.0, 1.0, 0.5, "fused"), (64, 3.0, None, None, None, None), (4096, 50.0, 40.0, None, 1.25, "split"),
    ]  # fmt: skip


def test_invalid(store: Store) -> None:
    run = begin(store)
    for status, message in (("timeout", "b"), ("timeout", "a"), ("compile_error", "c")):
        store.add_trial(run, of_schedule(schedule(NORM, 2), None, status, chain=NORM, message=message))
    store.add_trial(run, of_schedule(schedule(NORM, 4), 1.0, chain=NORM))
    store.add_trial(run, of_config(FUSED, None, "incorrect", message="off"))
    names = "chain_key, kind, status, trials, all_trials, share, example_message"
    assert look(store, "v_invalid", names) == [
        (NORM.key, "rowreduce", "compile_error", 1, 4, 0.25, "c"), (NORM.key, "rowreduce", "timeout", 2, 4, 0.5, "a"),
        (CHAIN.key, "config", "incorrect", 1, 1, 1.0, "off"),
    ]  # fmt: skip


def test_regression(store: Store) -> None:
    old, new = begin(store), begin(store, environment=NEW)
    rows = [
        (old, FUSED, 10.0, 9.5, 10.5), (old, FUSED, 11.0, 10.5, 11.5), (new, FUSED, 14.0, 13.0, 15.0),  # slower
        (old, SPLIT, 10.0, 9.0, 11.0), (new, SPLIT, 11.5, 10.9, 12.0),  # intervals touch
        (old, EAGER, 20.0, 19.0, 21.0), (new, EAGER, 10.0, 9.0, 11.0),  # faster
        (old, SPLIT_BACK, 5.0, None, None),  # in one environment only
    ]  # fmt: skip
    for run, config, us, p20, p80 in rows:
        store.add_trial(run, of_config(config, us, p20_us=p20, p80_us=p80))
    names = "plan, previous_us, median_us, change, verdict, previous_torch, torch"
    assert look(store, "v_regression", names) == [
        ("[0+1]", 10.5, 14.0, pytest.approx(4 / 3), "slower", "2.9.0", "2.10.0"),
        ("eager", 20.0, 10.0, 0.5, "faster", "2.9.0", "2.10.0"),
    ]


def test_coverage(store: Store) -> None:
    one, two, three = begin(store, 16), begin(store, 1024), begin(store, 1024)
    begin(store, 8, device=OTHER_DEVICE)
    for run in (one, two, two, three):
        store.add_trial(run, of_config(FUSED, 1.0))
    store.set_best(two, workload(1024), FUSED, 1.0, True)
    for run, state in ((one, "failed"), (two, "done"), (three, "done")):
        store.finish_run(run, state)
    names = "device, workloads, tuned_workloads, min_rows, max_rows, runs, done_runs, trials"
    assert look(store, "v_coverage", names) == [("H200", 2, 1, 16, 1024, 3, 2, 4), ("some CPU", 1, 0, 8, 8, 1, 0, 0)]


def test_every_view_gives_real_numbers_and_no_decimals(store: Store) -> None:
    """PostgreSQL's numeric would come out as Decimal, which JSON and arithmetic with floats refuse."""
    run = begin(store)
    for config in (FUSED, SPLIT, EAGER):
        store.add_trial(run, of_config(config, 3.0))
    store.add_trial(run, of_config(FUSED, None, "timeout"))
    store.rebuild_best()
    for view in ("v_speedup", "v_roofline", "v_fusion", "v_invalid", "v_coverage", "v_history", "v_segment_best"):
        kinds = {type(value).__name__ for row in store.query(f"SELECT * FROM {view}")[1] for value in row}
        assert kinds <= {"int", "float", "str", "NoneType", "datetime", "dict", "bool"}, view


def test_views_are_remade_only_with_the_schema(store: Store) -> None:
    with writing(store.engine) as connection:
        connection.execute(text("DROP VIEW v_best"))
        connection.execute(text("CREATE VIEW v_best AS SELECT 1 AS mine"))
    with Store.open(store.engine.url.render_as_string(hide_password=False)) as again:
        assert again.query("SELECT * FROM v_best") == (["mine"], [(1,)])
