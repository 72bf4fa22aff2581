"""The tuning job on the CPU: what it stores, how it ends, and that a killed one goes on where it was."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse.errors import InputError, TraceError
from autofuse.search.study import SegmentStudy, optimistic, shortest

SCRIPT = """
import sys, torch, torch.nn.functional as F, autofuse

def chain(x, r, w):
    h = x + r
    return F.gelu(F.layer_norm(h, (h.shape[-1],), w))

torch.manual_seed(0)
args = (torch.randn(96, 512), torch.randn(96, 512), torch.randn(512))
result = autofuse.tune(chain, [args], store=sys.argv[1], trials=int(sys.argv[2]), seconds=60)
print(result.rows[0].state, result.rows[0].trials)
"""


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(path)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def start(tmp_path: Path, trials: int) -> subprocess.Popen[str]:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)  # a plain script, with no main guard
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "store.db"), str(trials)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=env,
    )  # fmt: skip


def wait_for(path: Path, count: int, seconds: float = 60, where: str = "true") -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists():
            try:
                if rows(path, f"SELECT count(*) FROM trial WHERE {where}")[0][0] >= count:
                    return
            except sqlite3.OperationalError:
                pass  # not made yet
        time.sleep(0.05)
    raise AssertionError(f"no {count} trials within {seconds} s")


def measured(path: Path) -> list[tuple[Any, ...]]:
    """Every measurement of one segment's schedule."""
    return rows(path, "SELECT workload_id, schedule_id FROM trial WHERE schedule_id IS NOT NULL ORDER BY id")


def test_a_killed_job_loses_and_repeats_no_trial(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    first = start(tmp_path, 60)
    wait_for(path, 4, where="schedule_id IS NOT NULL")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = measured(path)
    assert len(before) >= 4
    second = start(tmp_path, 14)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert out.startswith("done")
    after = measured(path)
    assert after[: len(before)] == before
    assert len(set(after)) == len(after)
    assert rows(path, "PRAGMA integrity_check") == [("ok",)] and not rows(path, "PRAGMA foreign_key_check")
    assert [r[0] for r in rows(path, "SELECT state FROM run ORDER BY id")] == ["running", "done"]


def test_ctrl_c_ends_with_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    job = start(tmp_path, 500)
    wait_for(path, 6)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=30)
    assert job.returncode == 0 and out.startswith("interrupted"), err
    assert rows(path, "SELECT state FROM run") == [("interrupted",)]
    assert rows(path, "SELECT count(*) FROM best") == [(1,)]
    workers = subprocess.run(["pgrep", "-f", f"worker.*{job.pid}"], capture_output=True, text=True, check=False)
    assert not workers.stdout


def test_what_a_run_stores(tmp_path: Path) -> None:
    def act(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(x + b) * 2

    store = str(tmp_path / "store.db")
    args = (torch.randn(128, 512), torch.randn(512))
    seen: list[autofuse.Progress] = []
    result = autofuse.tune(act, [args, (args[0][:7], args[1])], store=store, trials=8, seconds=30, progress=seen.append)
    assert result.ok and [r.workload for r in result.rows] == ["128x512 float32", "7x512 float32"]
    assert len(result.rows) == 2 and "act" in str(result) and "128x512" in str(result)
    first = result.rows[0]
    assert first.eager_us and first.best_us and first.unfused_us
    assert first.speedup == pytest.approx(first.eager_us / first.best_us)
    assert [p.trial for p in seen[: first.trials]] == list(range(1, first.trials + 1))
    path = Path(store)
    plans = {r[0] for r in rows(path, "SELECT plan FROM config")}
    assert "eager" in plans and any(p.count("|") == 2 for p in plans) and any("|" not in p and "(" in p for p in plans)
    assert rows(path, "SELECT count(*) FROM run WHERE eager_us > 0 AND unfused_us > 0") == [(2,)]
    (bad,) = rows(path, "SELECT count(*) FROM trial WHERE (status = 'ok') <> (median_us IS NOT NULL)")
    assert bad == (0,)
    names = {r[0] for r in rows(path, "SELECT name FROM chain")}
    assert "act" in names and len(names) > 2
    again = autofuse.tune(act, [args], store=store, trials=4, seconds=30)
    duplicates = rows(
        path, "SELECT workload_id, schedule_id FROM trial WHERE schedule_id IS NOT NULL GROUP BY 1, 2 HAVING count(*) > 1"
    )
    assert again.ok and not duplicates


def test_a_function_that_is_no_chain_or_a_case_that_is_none(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    x = torch.randn(4, 8)
    with pytest.raises(TraceError, match="cumsum"):
        autofuse.tune(lambda x: x.cumsum(-1), [(x,)], store=store)
    with pytest.raises(InputError, match="both must be positive"):
        autofuse.tune(torch.relu, [(x,)], store=store, trials=0)
    with pytest.raises(InputError, match="sequence of argument tuples"):
        autofuse.tune(lambda x: x * 2, x, store=store)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no elements"):
        autofuse.tune(lambda x: x * 2, [(x[:0],)], store=store)


def test_a_name_and_a_fused_function(tmp_path: Path) -> None:
    fused = autofuse.fuse(lambda x: torch.tanh(x) + 1, store=str(tmp_path / "own.db"), name="my tanh")
    x = torch.randn(64, 256)
    result = autofuse.tune(fused, [(x,)], trials=3, seconds=20)
    assert result.rows[0].name == "my tanh"
    assert rows(tmp_path / "own.db", "SELECT count(*) FROM chain WHERE name = 'my tanh'") == [(1,)]
    assert fused.explain(x).tier == "exact"


def test_shortest_path_over_cuts() -> None:
    edges = [(0, 1, 0, 3.0), (1, 2, 1, 3.0), (0, 2, 2, 5.0), (2, 3, 3, 1.0), (1, 3, 4, 2.5)]
    assert shortest(edges, 3) == (5.5, [0, 4])
    assert shortest(edges[:2], 3)[0] == float("inf")


def test_hope_shrinks_with_trials_and_never_passes_the_bound() -> None:
    hopes = [optimistic(100.0, n, 20.0) for n in (1, 5, 20, 200)]
    assert hopes == sorted(hopes) and hopes[0] == 20.0 and hopes[-1] > 95
    assert optimistic(float("inf"), 0, 20.0) == 20.0


def test_a_study_skips_what_was_measured() -> None:
    from autofuse.fusion import Fusion
    from autofuse.kernels.base import Limits
    from autofuse.kernels.registry import kind_of
    from autofuse.program import Layouts
    from autofuse.trace import trace
    from autofuse.traced import sizes_of

    args = (torch.randn(8, 256),)
    traced = trace(lambda x: torch.softmax(x, -1), args)
    sizes = sizes_of(traced, args)
    assert sizes is not None
    task = Layouts(Fusion(traced.chain), args, sizes).task((1,), Limits("cpu", "x", threads=2))
    study = SegmentStudy(task, kind_of(task), 0)
    seen = set()
    while (proposal := study.ask()) is not None:
        assert proposal.source_hash not in seen
        seen.add(proposal.source_hash)
        study.tell(proposal, 10.0 + len(seen))
    assert study.spent and len(seen) > 10 and study.best_us == 11.0
    other = SegmentStudy(task, kind_of(task), 1)
    for k, knobs in enumerate(study.top(5)):
        other.remember(knobs, other.hash_of(knobs), 5.0 + k)
    assert other.best_us == 5.0 and other.trials == 5
    fresh = other.ask()
    assert fresh is not None and fresh.source_hash not in {other.hash_of(k) for k in study.top(5)}


def test_a_case_that_is_no_call(tmp_path: Path) -> None:
    def act(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x + b

    with pytest.raises(InputError, match=r"act: missing a required argument: 'b'; a case is a tuple of all its arguments"):
        autofuse.tune(act, [(torch.randn(4, 8),)], store=str(tmp_path / "store.db"))
