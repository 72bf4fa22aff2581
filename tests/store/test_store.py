"""Writing results and reading them back."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError
from store_samples import (
    CHAIN,
    DEVICE,
    EAGER,
    FUSED,
    NEW,
    NORM,
    OLD,
    OTHER_DEVICE,
    PARTS,
    SILU,
    SPLIT,
    SPLIT_BACK,
    begin,
    fill,
    of_config,
    of_schedule,
    schedule,
    workload,
)  # fmt: skip

from autofuse.errors import InputError, StoreError
from autofuse.store.engine import writing
from autofuse.store.records import BestRecord, TrialRecord
from autofuse.store.store import Store


def test_trials_come_back_as_they_went_in(store: Store) -> None:
    run = begin(store)
    measured = of_schedule(
        schedule(NORM, 8, block_rows=2, note="x"), 7.25, chain=NORM, source_hash="abc", p20_us=7.0, p80_us=8.0,
        samples=30, max_error=1e-3, eager_error=2e-3, compile_s=0.5, registers=40, spills=0, shared_bytes=1024,
    )  # fmt: skip
    failed = of_schedule(schedule(NORM, 16), None, "compile_error", chain=NORM, message="line 3: no")
    whole = of_config(SPLIT, 12.5, samples=5)
    turned = of_config(SPLIT_BACK, 13.0)
    eager = of_config(EAGER, 20.0)
    ids = [store.add_trial(run, one) for one in (measured, failed, whole, turned, eager)]
    assert ids == [1, 2, 3, 4, 5]
    place = (DEVICE.uid, OLD.uid)
    assert store.segment_trials(*place, workload(chain=NORM).uid, "cold") == [measured, failed]
    assert store.config_trials(*place, workload().uid, "cold") == [whole, turned, eager]
    assert store.segment_trials(*place, workload().uid, "cold") == []
    assert store.config_trials(*place, workload().uid, "graph") == []
    assert store.config_trials(DEVICE.uid, NEW.uid, workload().uid, "cold") == []
    assert store.config_trials(OTHER_DEVICE.uid, OLD.uid, workload().uid, "cold") == []


def test_numbers_count_up_in_each_run(store: Store) -> None:
    first, second = begin(store), begin(store)
    for run in (first, second, first, first):
        store.add_trial(run, of_config(FUSED, 10.0))
    rows = store.query("SELECT run_id, number FROM trial ORDER BY id")[1]
    assert rows == [(first, 0), (second, 0), (first, 1), (first, 2)]


def test_facts_are_stored_once_and_by_column(store: Store) -> None:
    fill(store)
    fill(store)
    assert store.query("SELECT count(*) FROM schedule")[1] == [(3,)]
    assert store.query("SELECT count(*) FROM config_schedule")[1] == [(3,)]
    assert store.query("SELECT count(*) FROM workload")[1] == [(3,)]
    names, rows = store.query("SELECT rows, cols, d0, d1, d2, dtypes, flops FROM workload ORDER BY id LIMIT 1")
    assert dict(zip(names, rows[0], strict=True)) == {
        "rows": 1024, "cols": 4096, "d0": 64, "d1": 4096, "d2": None, "dtypes": '["float16","float16"]',
        "flops": 8 * 1024 * 4096,
    }  # fmt: skip
    sql = "SELECT num_warps, block_cols, block_rows, form, math FROM schedule WHERE block_cols IS NOT NULL"
    assert store.query(sql)[1] == [(4, 2048, None, "looped", None)]
    assert store.query("SELECT part, segment_id FROM chain_segment ORDER BY part")[1] == [
        ("0", 2),
        ("0+1", 1),
        ("1", 3),
    ]


def test_a_segment_is_named_when_it_is_tuned_itself_and_ceilings_are_renewed(store: Store) -> None:
    begin(store)
    better = replace(DEVICE, peak_bandwidth_gbs=4200.0, peak_tflops={"float16": 700.0})
    options: dict[str, Any] = {"protocol": "cold", "sampler": "tpe", "seed": 0}
    options |= {"trials_budget": 1, "seconds_budget": 1.0}
    store.begin_run(better, OLD, replace(NORM, name="rms_norm"), workload(chain=NORM), **options)
    store.begin_run(replace(DEVICE, peak_bandwidth_gbs=None), OLD, replace(CHAIN, name="later"), workload(), **options)
    assert store.query("SELECT uid, name FROM chain ORDER BY id")[1] == [
        (CHAIN.key, "norm_silu"), (NORM.key, "rms_norm"), (SILU.key, ""),
    ]  # fmt: skip
    assert store.query("SELECT peak_bandwidth_gbs FROM device")[1] == [(4200.0,)]


def test_runs_start_and_end(store: Store) -> None:
    run = begin(store)
    sql = "SELECT state, reason, eager_us, unfused_us, roofline_us, budget_s, seed, ended IS NULL FROM run"
    assert store.query(sql)[1] == [("running", "", None, None, 5.0, 60.0, 7, True)]
    trial = store.add_trial(run, of_config(EAGER, 21.0))
    store.add_trial(run, of_config(EAGER, 20.0))
    store.add_trial(run, of_config(FUSED, 10.0))
    store.finish_run(run, "interrupted", reason="Ctrl-C", unfused_us=18.0)
    assert store.query(sql)[1] == [("interrupted", "Ctrl-C", 20.0, 18.0, 5.0, 60.0, 7, False)]
    shown = store.show_trial(trial)["run"]
    for time in (shown["started"], shown["ended"]):
        assert time.tzinfo is UTC
        assert abs(datetime.now(UTC) - time) < timedelta(minutes=1)
    with pytest.raises(InputError, match="'over'"):
        store.finish_run(run, "over")
    with pytest.raises(StoreError, match="no run 99"):
        store.finish_run(99, "done")


def test_records_that_break_their_rules_are_refused(store: Store) -> None:
    run = begin(store)
    for bad, match in (
        (of_config(FUSED, None), "if and only if"),
        (of_config(FUSED, 3.0, "crashed"), "if and only if"),
        (of_config(FUSED, None, "odd"), "'odd'"),
        (TrialRecord(workload(), "crashed"), "exactly one"),
        (TrialRecord(workload(), "crashed", schedule=schedule(), config=FUSED), "exactly one"),
    ):
        with pytest.raises(InputError, match=match):
            store.add_trial(run, bad)
    for us in (float("inf"), float("nan"), 0.0, -1.0):
        with pytest.raises(StoreError, match="breaks a rule"):
            store.add_trial(run, of_config(FUSED, us))
    with pytest.raises(StoreError, match="no run 99"):
        store.add_trial(99, of_config(FUSED, 3.0))
    unknown = replace(NORM, key="f" * 64)
    with pytest.raises(StoreError, match="add_chain_segments"):
        store.add_trial(run, of_schedule(schedule(unknown), 3.0, chain=unknown))
    assert store.query("SELECT count(*) FROM trial")[1] == [(0,)]
    assert store.query("SELECT count(*) FROM config")[1] == [(0,)]  # rolled back with the trial


TRIAL = (
    "INSERT INTO trial (uid, run_id, number, workload_id, schedule_id, config_id, source_hash, status, median_us,"
    " samples, message, created) VALUES ('u', {run}, {number}, 1, {schedule}, {config}, '', '{status}', {us}, 0, '',"
    " '2025-01-01 00:00:00')"
)
GOOD = {"run": 1, "number": 9, "schedule": "NULL", "config": 1, "status": "ok", "us": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"us": "NULL"}, {"status": "crashed"}, {"status": "great"}, {"schedule": 1}, {"config": "NULL"}, {"number": 0},
        {"run": 77}, {"config": 77}, {"us": -1}, {"us": "1e300"},
    ],
)  # fmt: skip
def test_the_database_itself_refuses_bad_trials(store: Store, change: dict[str, Any]) -> None:
    fill(store)
    with store.engine.connect() as connection, pytest.raises(IntegrityError):
        connection.execute(text(TRIAL.format(**GOOD | change)))
    with writing(store.engine) as connection:
        connection.execute(text(TRIAL.format(**GOOD)))


def test_the_database_itself_refuses_a_run_that_is_over_without_an_end(store: Store) -> None:
    fill(store)
    for change in ("state = 'done', ended = NULL", "state = 'running'", "state = 'odd'"):
        with store.engine.connect() as connection, pytest.raises(IntegrityError):
            connection.execute(text(f"UPDATE run SET {change}"))


def test_a_failed_write_leaves_nothing(store: Store) -> None:
    def write_then_fail(connection: Connection) -> None:
        connection.execute(text("UPDATE run SET reason = 'half done'"))
        raise KeyboardInterrupt

    fill(store)
    with pytest.raises(KeyboardInterrupt), writing(store.engine) as connection:
        write_then_fail(connection)
    assert store.query("SELECT reason FROM run")[1] == [("budget",)]


def test_neighbours_are_the_best_of_each_workload(store: Store) -> None:
    here, there = begin(store), begin(store, device=OTHER_DEVICE)
    slow, fast, other = schedule(NORM, 2), schedule(NORM, 4), schedule(NORM, 8)
    for rows, one, us in ((512, slow, 9.0), (512, fast, 5.0), (2048, slow, 20.0), (2048, other, 30.0)):
        store.add_trial(here, of_schedule(one, us, rows=rows, chain=NORM))
    store.add_trial(here, of_schedule(other, None, "timeout", rows=4096, chain=NORM))
    store.add_trial(here, of_schedule(schedule(SILU), 1.0, rows=512, chain=SILU))
    store.add_trial(there, of_schedule(other, 100.0, rows=512, chain=NORM))
    small, large = workload(512, NORM), workload(2048, NORM)
    assert store.neighbours(NORM.key, DEVICE.uid, 10) == [(large, slow, 20.0), (small, fast, 5.0)]
    assert store.neighbours(NORM.key, DEVICE.uid, 1) == [(large, slow, 20.0)]
    assert store.neighbours(NORM.key, None, 10) == [(small, other, 100.0), (large, slow, 20.0), (small, fast, 5.0)]
    assert store.neighbours("f" * 64, None, 10) == []


def test_set_best_replaces_the_winner_of_its_place_only(store: Store) -> None:
    old, new = begin(store), begin(store, environment=NEW)
    store.set_best(old, workload(), FUSED, 10.0, True)
    store.set_best(new, workload(), FUSED, 9.0, True)
    store.set_best(old, workload(), SPLIT, 11.0, False)
    family, device = workload().family, DEVICE.uid
    assert store.best_records(family, device) == [
        BestRecord(1024, FUSED.plan, FUSED.schedules, 9.0, True, NEW, FUSED.uid, "cold", DEVICE.uid, DEVICE.name),
        BestRecord(1024, SPLIT.plan, SPLIT.schedules, 11.0, False, OLD, SPLIT.uid, "cold", DEVICE.uid, DEVICE.name),
    ]
    assert store.best_records(family, OTHER_DEVICE.uid) == []
    assert [(row["torch"], row["plan"]) for row in store.best(CHAIN.key)] == [("2.10.0", "[0+1]"), ("2.9.0", "[0][1]")]
    assert [row["verified"] for row in store.best()] == [True, False]
    assert store.best(NORM.key) == []


def winners(store: Store) -> list[tuple[Any, ...]]:
    sql = "SELECT rows, torch, protocol, plan, median_us, CASE WHEN verified THEN 1 ELSE 0 END FROM v_best"
    return store.query(f"{sql} ORDER BY rows, torch DESC, protocol")[1]


def test_rebuild_best(store: Store) -> None:
    run = begin(store)
    for us in (10.0, 14.0, 11.0):  # measured three times: 11, not 10, and verified
        store.add_trial(run, of_config(SPLIT, us))
    store.add_trial(run, of_config(SPLIT_BACK, 9.0))  # once: not believed
    for us in (8.0, 8.5):
        store.add_trial(run, of_config(FUSED, us))
    store.add_trial(run, of_config(FUSED, None, "incorrect"))  # wrong once: never
    store.add_trial(run, of_config(SPLIT_BACK, None, "timeout", rows=64))
    store.add_trial(run, of_config(SPLIT_BACK, 3.0, rows=128))
    newer = begin(store, environment=NEW)
    store.add_trial(newer, of_config(FUSED, 12.0))
    store.add_trial(newer, of_config(SPLIT, 12.0))  # a tie goes to the simpler
    graph = begin(store, protocol="graph")
    store.add_trial(graph, of_config(FUSED, 4.0))
    store.add_trial(graph, of_schedule(schedule(), 1.0))  # of a segment: no config
    store.set_best(graph, workload(4), FUSED, 1.0, True)  # nothing stands behind it
    expected = [
        (128, "2.9.0", "cold", "[1][0]", 3.0, 0),
        (1024, "2.9.0", "cold", "[0][1]", 11.0, 1),
        (1024, "2.9.0", "graph", "[0+1]", 4.0, 0),
        (1024, "2.10.0", "cold", "[0+1]", 12.0, 0),
    ]
    for _ in range(2):
        assert store.rebuild_best() == 4
        assert winners(store) == expected


def test_history_by_name_id_and_key(store: Store) -> None:
    run = fill(store)
    rows = store.history()
    assert [(r["trial_id"], r["number"], r["measured"], r["status"], r["median_us"]) for r in rows] == [
        (3, 2, "config", "incorrect", None), (2, 1, "config", "ok", 12.0), (1, 0, "segment", "ok", 7.0),
    ]  # fmt: skip
    assert [row["trial_id"] for row in store.history(limit=2)] == [3, 2]
    for chain in ("norm_silu", "1", "cccc", CHAIN.key):
        assert [row["trial_id"] for row in store.history(chain)] == [3, 2, 1]
    assert [row["trial_id"] for row in store.history("aaaa")] == [1]  # as a segment
    assert store.history("bbbb") == []
    assert abs(datetime.now(UTC) - rows[0]["created"]) < timedelta(minutes=1)
    assert (rows[2]["knobs"], rows[0]["knobs"]) == ({"num_warps": 8, "form": "looped"}, None)
    for unknown in ("", "c_", "nothing", "123456789012345"):
        with pytest.raises(InputError, match="No chain"):
            store.history(unknown)
    assert rows[0]["run_id"] == run


def test_show_trial(store: Store) -> None:
    fill(store)
    segment, config = store.show_trial(1), store.show_trial(2)
    assert (segment["knobs"], segment["measured_key"]) == ({"num_warps": 8, "form": "looped"}, NORM.key)
    assert [s["uid"] for s in segment["schedules"]] == [schedule(NORM, 8).uid]
    assert (config["plan"], config["num_segments"], config["median_us"], config["knobs"]) == ("[0][1]", 2, 12.0, None)
    assert [(s["chain_key"], s["knobs"]["num_warps"]) for s in config["schedules"]] == [(NORM.key, 8), (SILU.key, 2)]
    assert (config["run"]["eager_us"], config["run"]["sampler"], config["torch"]) == (24.0, "tpe", "2.9.0")
    with pytest.raises(InputError, match="no trial 99"):
        store.show_trial(99)


def write_trials(number: int, url: str, run: int, count: int) -> list[int]:
    with Store.open(url) as store:
        one = [store.add_trial(run, of_config(FUSED, 1.0 + number, message=f"{number}/{i}")) for i in range(count)]
        return one + [store.add_trial(run, of_schedule(schedule(NORM, 2**i, own=number), 2.0, chain=NORM)) for i in range(3)]


def test_sixteen_writers_lose_nothing(url: str, together: Callable[..., list[Any]]) -> None:
    with Store.open(url) as store:
        run = begin(store)
        ids = together(16, write_trials, url, run, 20)
        assert len({i for one in ids for i in one}) == 16 * 23
        rows = store.query("SELECT number, message FROM trial ORDER BY number")[1]
        assert [number for number, _ in rows] == list(range(16 * 23))
        assert sorted(m for _, m in rows if m) == sorted(f"{n}/{i}" for n in range(16) for i in range(20))
        assert store.query("SELECT count(*) FROM config")[1] == [(1,)]
        assert store.query("SELECT count(*) FROM schedule")[1] == [(1 + 48,)]


def write_for_ever(url: str, run: int, told: Any) -> None:
    with Store.open(url) as store:
        while True:
            told.send(store.add_trial(run, of_config(FUSED, 3.0)))


def test_kill_9_loses_no_committed_trial(url: str) -> None:
    with Store.open(url) as store:
        run = begin(store)
        ids: list[int] = []
        for _ in range(3):
            context = multiprocessing.get_context("fork")
            heard, told = context.Pipe(duplex=False)
            writer = context.Process(target=write_for_ever, args=(url, run, told))
            writer.start()
            told.close()
            ids += [heard.recv() for _ in range(15)]
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            try:
                while True:
                    ids.append(heard.recv())
            except EOFError:
                pass
        kept = {row[0] for row in store.query("SELECT id FROM trial")[1]}
        assert set(ids) <= kept
        assert len(kept) - len(ids) <= 3  # at most the one that each was about to tell of
        store.add_trial(run, of_config(FUSED, 3.0))


def test_a_store_works_on_both_sides_of_a_fork(store: Store, together: Callable[..., list[Any]]) -> None:
    run = begin(store)
    store.add_trial(run, of_config(FUSED, 1.0))

    def in_child(number: int) -> int:
        # SQLite mostly bears a shared connection, so see that the child took none over.
        assert parent_pool is not store.engine.pool
        return store.add_trial(run, of_config(FUSED, 2.0 + number))

    parent_pool = store.engine.pool
    assert len(set(together(2, in_child))) == 2
    assert parent_pool is store.engine.pool
    store.add_trial(run, of_config(FUSED, 9.0))
    assert store.query("SELECT median_us FROM trial ORDER BY median_us")[1] == [(1.0,), (2.0,), (3.0,), (9.0,)]


def test_threads_share_a_store(store: Store) -> None:
    run = begin(store)
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda i: store.add_trial(run, of_config(FUSED, 1.0 + i)), range(40)))
    assert len(set(ids)) == 40
    assert store.query("SELECT sum(number), sum(median_us) FROM trial")[1] == [(sum(range(40)), sum(range(40)) + 40.0)]


def test_nothing_is_held_between_calls(store: Store, url: str) -> None:
    fill(store)
    with Store.open(url) as other:
        run = begin(other)
        store.add_chain_segments(CHAIN, PARTS)
        assert other.add_trial(run, of_config(FUSED, 1.0)) > 0


def test_the_file_has_no_broken_references(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        fill(store)
        store.rebuild_best()
        assert store.query("PRAGMA foreign_key_check") == (["table", "rowid", "parent", "fkid"], [])
        assert store.query("PRAGMA integrity_check")[1] == [("ok",)]
