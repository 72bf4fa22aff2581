"""The commands about demand: what is listed, what is tuned, and how that ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from store_samples import OTHER_DEVICE, missed
from typer.testing import CliRunner, Result

from autofuse import cli
from autofuse.device import describe
from autofuse.result import Tuned, TuneResult
from autofuse.search.tuner import Tuner
from autofuse.store.records import ChainRecord, DemandRecord
from autofuse.store.store import Store
from autofuse.trace import trace
from autofuse.workload import layouts_of, workload_of

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "results.db"))

    def invoke(*words: str) -> Result:
        return CliRunner().invoke(cli.app, words, prog_name="autofuse")

    return invoke


def store(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path / 'results.db'}")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def here(rows: int, seconds: float, **sizes: int) -> DemandRecord:
    """Calls of `double` on this machine's CPU."""
    args = (torch.randn(rows, 8),)
    chain = trace(double, args).chain
    work = workload_of(chain, layouts_of(chain, args), {"s0": rows})
    record = ChainRecord(chain.key, "double", chain.graph)
    return DemandRecord(describe("cpu"), record, work, "heuristic", 7, seconds, sizes or {"s0": rows})


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the search was asked for; it finds a time for all but 3 rows."""
    calls: list[dict[str, Any]] = []

    def tune(self: Tuner, fn: Any, cases: Any, **given: Any) -> TuneResult:
        [(x,)] = cases
        calls.append({"shape": tuple(x.shape), "url": self.url, "y": fn(x), "x": x, **given})
        best = None if len(x) == 3 else 1.0
        return TuneResult((Tuned(given["name"], "w", "cpu", 2.0, 2.0, best, 0.5, "plan", 1, "done", ""),))

    monkeypatch.setattr(Tuner, "tune", tune)
    return calls


def test_demand_is_listed_by_time_lost(run: Run, tmp_path: Path) -> None:
    with store(tmp_path) as opened:
        opened.add_demand([missed(16, seconds=1.0), missed(64, "near rows", seconds=9.0), missed(32, "eager", 3, 2.0)])
        opened.add_demand([missed(8, device=OTHER_DEVICE)])
    head, *lines = run("demand").stdout.splitlines()
    names = ["function", "rows", "extents", "dtypes", "device", "tier", "calls", "seconds", "lost", "s"]
    assert head.split() == names
    assert [line.split()[1] for line in lines] == ["32", "16", "8", "64"]
    words = ["norm_silu", "32", "64x4096", "float16,", "float16", "H200", "eager", "3", "2", "2"]
    assert lines[0].split() == words
    assert len(run("demand", "--limit", "2").stdout.splitlines()) == 3
    assert run("demand", "--device", "cpu").stdout.split() == names  # not of this CPU
    told = json.loads(run("demand", "--json").stdout)
    assert [(r["chain"], r["rows"], r["tier"], r["calls"], r["sizes"]) for r in told[:2]] == [
        ("norm_silu", 32, "eager", 3, {"s0": 8, "s1": 4}), ("norm_silu", 16, "heuristic", 10, {"s0": 4, "s1": 4}),
    ]  # fmt: skip
    assert "graph" not in told[0] and told[0]["first_seen"].endswith("+00:00")


def test_only_the_demand_of_a_device(run: Run, tmp_path: Path) -> None:
    with store(tmp_path) as opened:
        opened.add_demand([here(4, 1.0), missed()])
    [told] = json.loads(run("demand", "--device", "cpu", "--json").stdout)
    assert (told["chain"], told["rows"]) == ("double", 4)


def test_tune_from_demand(run: Run, tmp_path: Path, tuned: list[dict[str, Any]]) -> None:
    with store(tmp_path) as opened:
        opened.add_demand([here(4, 1.0), here(5, 3.0), here(6, 2.0), missed(seconds=99.0)])
    done = run("tune", "--from-demand", "--device", "cpu", "--limit", "2", "--trials", "7", "--math", "exact", "--seed", "3")
    assert done.exit_code == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["function", "double", "double"]
    assert [call["shape"] for call in tuned] == [(5, 8), (6, 8)]
    assert all(torch.equal(call["y"], call["x"] * 2) for call in tuned)
    given = {"trials": 7, "seconds": 30.0, "seed": 3, "math": "exact", "name": "double", "device": "cpu"}
    assert all(given.items() <= call.items() for call in tuned)


def test_how_tune_from_demand_ends(run: Run, tmp_path: Path, tuned: list[dict[str, Any]]) -> None:
    done = run("tune", "--from-demand", "--device", "cpu")
    assert (done.exit_code, tuned) == (0, []) and "nothing was missed on this device" in done.stderr
    with store(tmp_path) as opened:
        opened.add_demand([here(4, 2.0), here(3, 1.0)])
    assert run("tune", "--from-demand", "--device", "cpu").exit_code == 1  # nothing valid at 3 rows
    with store(tmp_path) as opened:
        opened.add_demand([here(5, 9.0, none=1), here(6, 8.0)])
    done = run("tune", "--from-demand", "--device", "cpu", "--limit", "2", "--json")
    assert done.exit_code == 2 and "double at rows 5" in done.stderr and "is left out" in done.stderr
    assert [r["name"] for r in json.loads(done.stdout)] == ["double"]
