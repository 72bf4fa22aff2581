"""Demand: what is counted, what a counted call runs through, and that nothing which goes wrong reaches a call."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse import demand
from autofuse.store.store import Store

pytestmark = pytest.mark.usefixtures("own_store", "counting")


def norm_act(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.silu(F.rms_norm(x, (x.shape[-1],), weight, 1e-6))


def make(*sizes: int, cols: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(*sizes, cols), torch.randn(cols)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls are counted, from none, and only `flush` writes them."""
    monkeypatch.setenv("AUTOFUSE_DEMAND", "1")
    monkeypatch.setattr(demand, "_counters", {})
    monkeypatch.setattr(demand, "_start", lambda: None)
    yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where `own_store` lies."""
    return f"sqlite:///{tmp_path / 'store.db'}"


def listed(url: str) -> list[dict[str, Any]]:
    with Store.open(url, read_only=True) as store:
        return store.demand()


def seen(url: str) -> set[tuple[Any, ...]]:
    return {(r["chain"], r["rows"], r["tier"], r["calls"]) for r in listed(url)}


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, with every warning shown."""
    command = [sys.executable, "-X", "dev", "-W", "default", "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


# ---- what is counted


def test_every_call_is_counted_by_workload_and_written_once(url: str) -> None:
    fused = autofuse.fuse(norm_act, name="norm_act")
    few, many, weight = make(4)[0], make(2, 5)[0], make(4)[1]
    for _ in range(7):
        torch.testing.assert_close(fused(few, weight), norm_act(few, weight))
    for _ in range(3):
        torch.testing.assert_close(fused(many, weight), norm_act(many, weight))
    demand.flush()
    assert seen(url) == {("norm_act", 4, "heuristic", 7), ("norm_act", 10, "heuristic", 3)}
    assert {r["rows"]: r["sizes"] for r in listed(url)} == {4: {"s0": 4}, 10: {"s0": 2, "s1": 5}}
    fused(few, weight)
    demand.flush()
    demand.flush()
    assert seen(url) == {("norm_act", 4, "heuristic", 8), ("norm_act", 10, "heuristic", 3)}


def test_functions_that_are_one_workload_are_counted_together(url: str) -> None:
    one, two = autofuse.fuse(norm_act), autofuse.fuse(norm_act)
    for fused in (one, two, one, two, two):
        fused(*make(4))
    demand.flush()
    assert seen(url) == {("norm_act", 4, "heuristic", 5)}


def test_eager_calls_are_counted_and_the_function_runs_no_more_often(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = itertools.count()

    def noisy(x: torch.Tensor) -> torch.Tensor:
        next(ran)
        return x * 2 + 1

    monkeypatch.setenv("AUTOFUSE_ON_MISS", "eager")
    fused = autofuse.fuse(noisy)
    x = make(4)[0]
    fused(x)
    traced = next(ran)  # by the trace and the first call
    for _ in range(6):
        assert torch.equal(fused(x), x * 2 + 1)
    assert next(ran) == traced + 7
    [call] = fused._calls.values()
    assert call.program is None
    monkeypatch.setattr(demand, "_counters", {})
    fused._calls.clear()
    fused(x)  # prepared anew, from the trace that is there
    assert next(ran) == traced + 9  # the time of a call is that of the chain
    for _ in range(4):
        fused(x)
    demand.flush()
    assert seen(url) == {("noisy", 4, "eager", 5)}
    [counter] = demand._counters.values()
    assert counter.call_s


def test_misaligned_calls_which_no_guard_finds_are_counted(url: str) -> None:
    fused = autofuse.fuse(norm_act)
    buffer = torch.randn(4 * 96 + 1)
    x, weight = buffer[1:].view(4, 96), make(4)[1]
    for _ in range(5):
        fused(x, weight)
    demand.flush()
    assert seen(url) == {("norm_act", 4, "heuristic", 5)}


def test_tuned_calls_run_as_they_are_and_near_ones_are_counted(url: str) -> None:
    args, near = make(256, cols=2048), make(250, cols=2048)  # where a kernel surely wins
    assert autofuse.tune(norm_act, [args], trials=3, seconds=20).ok
    fused = autofuse.fuse(norm_act)
    for _ in range(4):
        fused(*args)
        fused(*near)
    exact, counted = fused._calls.values()
    assert exact.tick is None and counted.tick is not None
    names = [call.bound.__code__.co_names for call in (exact, counted) if call.bound is not None]
    assert ["tick" in n for n in names] == [False, True]
    demand.flush()
    assert seen(url) == {("norm_act", 250, "near rows", 4)}


def test_seconds_are_the_measured_time_of_each_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = autofuse.fuse(norm_act)
    for _ in range(8):
        fused(*make(64, cols=4096))
    [counter] = demand._counters.values()
    assert counter.call_s is not None
    start = time.perf_counter()
    for _ in range(20):
        fused(*make(64, cols=4096))
    assert 0 < counter.call_s < time.perf_counter() - start  # the quickest of three cannot take as long as twenty
    demand.flush()
    [row] = listed(url)
    assert row["seconds"] == pytest.approx(28 * counter.call_s) and row["calls"] == 28
    assert row["lost_s"] == pytest.approx(row["seconds"] - 28 * (2 * 64 * 4096 + 4096) * 4 / 500e9)


def test_the_quickest_of_several_runs_is_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4e-4, 1.0, 1.0 + 2e-4, 2.0, 2.0 + 3e-4, 3.0, 5.0])
    monkeypatch.setattr("autofuse.demand.perf_counter", lambda: next(clock))
    counter = demand.Counter({}, str)
    counter.time(lambda: None, (), torch.device("cpu"))
    assert counter.call_s == pytest.approx(2e-4)
    counter.time(lambda: None, (), torch.device("cpu"))  # a slow call is run once
    assert counter.call_s == pytest.approx(2.0)


class Event:
    """Stands in for a GPU's event."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Any) -> float:
        assert end.passed
        return 2.5


def test_calls_on_a_gpu_wait_for_their_events(url: str) -> None:
    fused = autofuse.fuse(norm_act)
    for _ in range(4):
        fused(*make(4))
    [counter] = demand._counters.values()
    start, end = Event(), Event()
    counter.events = start, end  # type: ignore[assignment]
    demand.flush()
    assert not Path(url.removeprefix("sqlite:///")).exists()
    end.passed = True
    demand.flush()
    [row] = listed(url)
    assert (row["calls"], row["seconds"]) == (4, pytest.approx(4 * 2.5e-3))


def test_no_tick_of_any_thread_is_lost_or_counted_twice() -> None:
    counter = demand.Counter({}, str)
    taken = []

    def work() -> None:
        for _ in range(20_000):
            counter.tick()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.append(counter.take())
    taken.append(counter.take())
    assert sum(taken) == 80_000 and counter.take() == 0


def test_more_workloads_than_are_kept_are_not_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "MAX_COUNTERS", 1)
    fused = autofuse.fuse(norm_act)
    with pytest.warns(RuntimeWarning, match="calls of more than 1 workloads are not counted"):
        for rows in (4, 5, 4, 5):
            fused(*make(rows))
    demand.flush()
    assert seen(url) == {("norm_act", 4, "heuristic", 2)}


# ---- what goes wrong


def spoil(kind: str, path: Path) -> str:
    """A store that cannot be written; what the warning says of it."""
    if kind == "corrupt":
        path.write_bytes(b"no database at all" * 100)
        return "is damaged or no SQLite database"
    if kind == "folder":
        path.mkdir()
        return "cannot be opened"
    Store.open(f"sqlite:///{path}").close()
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:6000])
        return "is damaged"
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE meta SET value = '9' WHERE key IN ('schema', 'oldest_writer')")
        raw.execute("UPDATE autofuse_alembic_version SET version_num = '0009'")
    return "has schema 9"


@pytest.mark.parametrize("kind", ["corrupt", "folder", "truncated", "newer"])
def test_a_store_that_cannot_be_written_costs_one_warning(url: str, kind: str, tmp_path: Path) -> None:
    told = spoil(kind, tmp_path / "store.db")
    fused = autofuse.fuse(norm_act)
    args = make(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.allclose(fused(*args), norm_act(*args), atol=1e-5)
            demand.flush()
    ours = [str(w.message) for w in caught if "calls missed" in str(w.message)]
    assert len(ours) == 1 and told in ours[0], [str(w.message) for w in caught]


def test_a_warning_that_is_an_error_does_not_fail_a_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(url).close()

    def broken(*_given: Any) -> None:
        raise ValueError("as if")

    monkeypatch.setattr(demand, "_counter", broken)
    fused = autofuse.fuse(norm_act)
    args = make(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fused(*args), norm_act(*args))
    assert fused._calls and next(iter(fused._calls.values())).tick is None


def test_a_call_that_cannot_be_timed_counts_without_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any) -> None:
        raise torch.OutOfMemoryError("as if")

    monkeypatch.setattr(demand.Counter, "time", full)
    fused = autofuse.fuse(norm_act)
    fused(*make(4))
    demand.flush()
    assert [(r["calls"], r["seconds"], r["lost_s"]) for r in listed(url)] == [(1, 0.0, 0.0)]


# ---- processes

PROGRAM = """
import os, sys, time
import torch, autofuse
def double(x): return x * 2 + 1
fused = autofuse.fuse(double)
x = torch.ones(4, 96)
for _ in range(5): fused(x)
"""


def test_what_a_process_counted_is_written_as_it_ends(url: str) -> None:
    Store.open(url).close()
    done = python(PROGRAM + "print([m for m in ('sqlalchemy', 'alembic') if m in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")
    wait_for(url, {("double", 4, "heuristic", 5)})


def test_nothing_is_counted_or_made_unless_asked(tmp_path: Path) -> None:
    code = PROGRAM + "print('autofuse.demand' in sys.modules, fused._calls.popitem()[1].tick)"
    assert python(code, AUTOFUSE_DEMAND="0").stdout == "False None\n"
    assert not (tmp_path / "store.db").exists()


def test_a_thread_writes_while_the_process_runs(url: str) -> None:
    code = PROGRAM + "from autofuse import demand\ntime.sleep(5)\nprint(len(demand._counters))\nos._exit(0)"
    python("import autofuse.demand\nautofuse.demand.INTERVAL_S = 0.2\n" + code)
    assert seen(url) == {("double", 4, "heuristic", 5)}


def test_a_forked_child_counts_its_own_calls(url: str) -> None:
    code = (
        PROGRAM
        + "from autofuse import demand\ndemand.flush()\nfused(x)\n"
        + "if os.fork() == 0:\n    fused(x); fused(x)\n    print(demand._thread.is_alive())\n    sys.exit(0)\nos.wait()\n"
    )
    assert python(code).stdout == "True\n"
    wait_for(url, {("double", 4, "heuristic", 8)})  # 5 and 1 of the parent, 2 of the child


def test_a_store_that_another_process_holds_does_not_hold_up_the_end(url: str, tmp_path: Path) -> None:
    Store.open(url).close()
    with sqlite3.connect(tmp_path / "store.db", isolation_level=None) as raw:
        raw.execute("BEGIN EXCLUSIVE")
        ends = "import atexit\nfrom autofuse import demand\natexit.unregister(demand._at_exit)\n"
        ends += "start = time.time()\ndemand._at_exit()\nprint(time.time() - start < 2.5)"
        done = python(PROGRAM + ends)
        assert (done.stdout, done.stderr) == ("True\n", "")
        raw.execute("ROLLBACK")
    wait_for(url, {("double", 4, "heuristic", 5)})  # the writer waited for the lock, without its parent


def wait_for(url: str, wanted: set[tuple[Any, ...]]) -> None:
    """Until the store has these rows: a writer may outlive its parent."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if Path(url.removeprefix("sqlite:///")).exists():
            try:
                if seen(url) == wanted:
                    return
            except autofuse.StoreError:
                pass  # it is just being made
        time.sleep(0.1)
    assert seen(url) == wanted
