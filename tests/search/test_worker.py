"""Planted faults: each has the right status, and the worker answers rightly afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autofuse.errors import WorkerError
from autofuse.fusion import Fusion, Plan
from autofuse.search.client import ROOT, Worker
from autofuse.store.records import STATUSES
from autofuse.trace import trace

Ask = Callable[..., dict[str, Any]]
Setups = Callable[..., dict[str, Any]]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not alive(pid):
            return True
        time.sleep(0.02)
    return False


def assert_usable(segment: Ask) -> None:
    answer = segment("none")
    assert answer["status"] == "ok" and answer["median_us"] > 0, answer


WRONG = {
    "tail": "values are wrong",
    "nan": "nan where the oracle has",
    "input": "an input was modified",
    "even": "ragged rows",
    "race": "two runs on the same inputs differ",
    "outside": "memory outside an output",
    "wrong": "values are wrong",
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_values_are_incorrect(segment: Ask, worker: Worker, fault: str) -> None:
    answer = segment(fault)
    assert answer["status"] == "incorrect" and WRONG[fault] in answer["message"], answer
    assert "median_us" not in answer
    starts = worker.starts
    assert_usable(segment)
    assert worker.starts == starts, "a wrong kernel is no reason for a new process"


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("refused", "compile_error", "refused"),
        ("memory", "out_of_memory", "out of memory"),
        ("weird", "launch_error", "Weird"),
        ("exit_call", "launch_error", "SystemExit"),
        ("crash_text", "crashed", "illegal memory access"),
        ("segfault", "crashed", "SIGSEGV"),
        ("exit", "crashed", "code 7"),
        ("abort", "crashed", "SIGABRT: the reason"),
    ],
)
def test_exceptions_and_crashes(segment: Ask, fault: str, status: str, message: str) -> None:
    answer = segment(fault)
    assert answer["status"] == status and message in answer["message"], answer
    assert "\n" not in answer["message"]
    assert_usable(segment)


def test_prints_do_not_disturb(segment: Ask) -> None:
    assert segment("noise")["status"] == "ok"


@pytest.mark.parametrize("fault", ["hang", "gil"])
def test_hang_is_a_timeout(segment: Ask, worker: Worker, fault: str) -> None:
    assert_usable(segment)
    pid = worker.pid
    assert pid is not None
    start = time.monotonic()
    answer = segment(fault, 0.7)
    assert answer["status"] == "timeout" and "0.7 s" in answer["message"]
    assert time.monotonic() - start < 3 and not Path(f"/proc/{pid}").exists()
    assert_usable(segment)


def test_build_that_never_ends(setup: dict[str, Any], nodes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, cc = tmp_path / "pid", tmp_path / "slow_cc"
    cc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo slow 1 && exit\necho $$ > {note}.new; mv {note}.new {note}\nexec sleep 1000\n'
    )
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    with Worker({**setup, "cache": str(tmp_path / "empty")}) as worker:
        worker.start()
        request = {"op": "build", "nodes": nodes, "kind": "faulty", "knobs": {"fault": "none"}}
        assert worker.request(request, 1.5)["status"] == "timeout"
        assert gone(int(note.read_text()), 2), "the compiler must not outlive the worker that started it"


def test_killed_from_outside(segment: Ask, worker: Worker) -> None:
    assert_usable(segment)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)  # between requests: nothing is lost
    assert_usable(segment)
    pid = worker.pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    answer = segment("hang")
    assert answer["status"] == "crashed" and "SIGKILL" in answer["message"]
    assert_usable(segment)


def test_interrupt_reaches_the_parent_alone(segment: Ask, worker: Worker) -> None:
    assert_usable(segment)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        segment("hang")
    assert worker.pid is None, "its late answer would meet the next request"
    assert_usable(segment)


def test_unknown_requests(worker: Worker, nodes: list[int]) -> None:
    for request in (
        {"op": "dance"},
        {"op": "segment", "nodes": [99], "kind": "faulty", "knobs": {}},
        {"op": "segment", "nodes": nodes, "kind": "no_such_kind", "knobs": {}},
        {"op": "config", "plan": "faulty(99)", "schedules": [{}]},
        {"op": "config", "plan": "nonsense(", "schedules": []},
    ):
        answer = worker.request(request)
        assert answer["status"] in STATUSES and answer["status"] != "ok" and answer["message"], answer
    assert worker.request({"op": "segment", "nodes": nodes, "kind": "pointwise", "knobs": {}})["status"] != "ok"


# ---- right answers


def test_segment_config_and_race(worker: Worker, nodes: list[int]) -> None:
    plan = f"faulty({','.join(map(str, nodes))})"
    good = {"plan": plan, "schedules": [{"fault": "none"}]}
    bad = {"plan": plan, "schedules": [{"fault": "nan"}]}
    refused = {"plan": plan, "schedules": [{"fault": "refused"}]}
    eager: dict[str, Any] = {"plan": "eager", "schedules": []}
    answer = worker.request({"op": "config", **good, "budget_s": 0.02})
    assert answer["status"] == "ok" and answer["samples"] >= 7 and len(answer["source_hash"]) == 32
    assert 0 < answer["p20_us"] <= answer["median_us"] <= answer["p80_us"]
    assert answer["max_error"] <= 2e-6 and answer["eager_error"] > 0
    assert worker.request({"op": "config", **eager, "budget_s": 0.02})["source_hash"] == ""
    race = worker.request({"op": "race", "configs": [eager, bad, good, refused], "budget_s": 0.05})
    assert [r["status"] for r in race["results"]] == ["ok", "incorrect", "ok", "compile_error"]
    assert all(("median_us" in r) == (r["status"] == "ok") for r in race["results"])
    built = worker.request({"op": "build", "nodes": nodes, "kind": "faulty", "knobs": {"fault": "none"}})
    assert built["status"] == "ok" and built["compile_s"] >= 0 and "median_us" not in built


def norm_split(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.rms_norm(x + bias, (x.shape[-1],), w)
    a, b = y.chunk(2, -1)
    return F.silu(a) * b, y.argmax(-1)


def test_real_kernels_on_strided_inputs(other_setup: Setups) -> None:
    x = torch.randn(12, 2, 200)[:, 1, :].to(torch.bfloat16)
    args = (x, torch.randn(200).to(torch.bfloat16), torch.randn(1, 200).to(torch.bfloat16).expand(12, 200))
    setup = other_setup(norm_split, *args)
    fusion = Fusion(trace(norm_split, args).chain)
    with Worker(setup) as worker:
        for nodes in dict.fromkeys([*fusion.fused(), *fusion.unfused()]):
            answer = worker.request({"op": "segment", "nodes": list(nodes), "kind": "eager", "knobs": {}, "budget_s": 0.01})
            assert answer["status"] == "ok", (nodes, answer)
        answer = worker.request({"op": "config", "plan": str(Plan(())), "schedules": [], "budget_s": 0.01})
        assert answer["status"] == "ok", answer


# ---- life and death


def test_refused_setup(setup: dict[str, Any]) -> None:
    for change, word in (({"chain": "{}"}, "chain"), ({"plugins": ["no_such_module"]}, "no_such_module")):
        with Worker({**setup, **change}) as worker, pytest.raises(WorkerError, match=word):
            worker.request({"op": "dance"})


@pytest.mark.parametrize("dead", [False, True], ids=["soon", "before it is asked"])
def test_python_that_does_not_start(setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    spawn = Worker._spawn

    def spawn_and_wait(self: Worker) -> None:
        spawn(self)
        assert self._process is not None and self._process.wait(30) == 1

    if dead:
        monkeypatch.setattr(Worker, "_spawn", spawn_and_wait)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(WorkerError, match="no torch here"):
        Worker(setup).start()


def test_nothing_leaks(setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = sorted(os.listdir("/proc/self/fd"))
    worker = Worker(setup)
    worker.start()
    pid = worker.pid
    assert pid is not None and os.getpgid(pid) == pid != os.getpgid(0)
    worker.close()
    worker.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not Path(f"/proc/{pid}").exists() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["hang", "gil"])
def test_no_orphan(setup: dict[str, Any], nodes: list[int], fault: str) -> None:
    """A parent without a main guard and without a file is killed while its worker hangs."""
    request = {"op": "segment", "nodes": nodes, "kind": "faulty", "knobs": {"fault": fault}}
    code = textwrap.dedent(f"""
        import json
        from autofuse.search.client import Worker
        w = Worker(json.loads({json.dumps(setup)!r}))
        w.start()
        print(w.pid, flush=True)
        w.request(json.loads({json.dumps(request)!r}), 60)
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(1.0)
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid, 3.0)
