"""Demand: calls that no config was tuned for, counted as they run and written to the store in the background.

A counted call runs through one more function, which takes a number from an `itertools.count`: 35 ns. Tuned calls have no
such function. Once a minute, and at exit, what was counted goes to a process of its own, `python -m autofuse.demand`: a
thread that imports SQLAlchemy held up the caller's thread for up to 84 ms at a time, 0.2 s in all; starting a process, for 2 ms.

seconds = calls x the time of one, which is measured when the call is first prepared: the quickest of up to three runs on a
CPU; between two events on a GPU, launch included, which are read once they have passed, so that nothing waits for the device.
Lost is what these seconds are over the time of as many calls at the device's bandwidth (the view `v_demand`).

Nothing here raises into a call, and a store that cannot be written costs the counters and one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from .errors import AutofuseError

if TYPE_CHECKING:
    import torch

    from .dispatch import _Call

INTERVAL_S = 60.0
EXIT_S = 1.0  # the most that the end of a process waits for its writer, which goes on without it
WRITER_S = 90.0  # a writer waits 30 s for a lock, for each of a few transactions
MAX_COUNTERS = 16384  # workloads a process: row counts of a server's life fit, a leak does not
BLOCK = 200  # rows a transaction: other writers wait for no more
QUICK_S = 1e-3  # a call that takes less is timed up to three times

ROOT = Path(__file__).resolve().parents[1]


class Counter:
    """The calls of one workload on one device that one tier served. `tick()` counts one, from any thread."""

    def __init__(self, head: Mapping[str, Any], graph: Callable[[], str]) -> None:
        self.head, self._graph = dict(head), graph
        self.tick = itertools.count().__next__
        self.call_s: float | None = None
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._reads = self._taken = 0

    def take(self) -> int:
        """The calls since it was last asked. Not from two threads at once."""
        calls = self.tick() - self._reads  # a count is read by counting
        self._reads += 1
        new, self._taken = calls - self._taken, calls
        return new

    def time(self, run: Callable[..., Any], inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        """Measure a call, whose kernels have run before; on a GPU only begin to."""
        if device.type == "cuda":
            import torch

            with torch.cuda.device(device):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                run(*inputs)
                end.record()
            self.events = start, end
            return
        taken: list[float] = []
        while len(taken) < 3 and sum(taken) < QUICK_S:
            start_s = perf_counter()
            run(*inputs)
            taken.append(perf_counter() - start_s)
        self.call_s = min(taken)

    def settle(self) -> None:
        """Read the events, where they have passed."""
        if self.events is not None and self.events[1].query():
            self.call_s, self.events = self.events[0].elapsed_time(self.events[1]) / 1e3, None

    def row(self, calls: int) -> dict[str, Any]:
        """What is written of these calls; JSON."""
        self.head["chain"].setdefault("graph", self._graph())
        return {**self.head, "calls": calls, "seconds": calls * (self.call_s or 0.0)}


_counters: dict[tuple[str, ...], Counter] = {}
_abandoned: list[Any] = []  # a parent's GPU events, which its child may not destroy
_lock = threading.Lock()  # of `_counters`, and of taking what they counted
_stop = threading.Event()
_thread: threading.Thread | None = None


def watch(call: _Call, name: str, url: str, inputs: Sequence[torch.Tensor]) -> None:
    """Count this call, which has just run for the first time, and from now on each that is the same."""
    try:
        counter = _counter(call, name, url, inputs)
    except Exception as error:
        _warn(f"calls of {name} are not counted: {error}")
        return
    if counter is None:
        return
    counter.tick()
    call.tick = counter.tick
    if call.bound is not None:
        call.bound = counted(call.bound, len(inputs), counter.tick)
    _start()


def counted(run: Callable[..., Any], inputs: int, tick: Callable[[], int]) -> Callable[..., Any]:
    """A bound run that counts its calls."""
    from . import flat

    taken = ", ".join(f"v{k}" for k in range(inputs))
    return flat.function(f"def run({taken}):\n    tick()\n    return bound({taken})\n", {"tick": tick, "bound": run})


def _counter(call: _Call, name: str, url: str, inputs: Sequence[torch.Tensor]) -> Counter | None:
    from .device import describe
    from .reference import evaluate

    work, chain, sizes = call.workload, call.traced.chain, dict(call.sizes)
    assert work is not None
    device = inputs[0].device if call.program is None else call.program.device
    key = (url, work.uid, str(device), call.choice.tier)
    with _lock:
        found = _counters.get(key)
        if found is not None:
            return found
        if len(_counters) >= MAX_COUNTERS:
            _warn(f"calls of more than {MAX_COUNTERS} workloads are not counted: tune what `autofuse demand` lists")
            return None
    head = {
        "device": asdict(describe(str(device))), "chain": {"key": chain.key, "name": name}, "workload": asdict(work),
        "tier": call.choice.tier, "sizes": sizes,
    }  # fmt: skip
    made = Counter(head, lambda: chain.graph)
    with contextlib.suppress(Exception):  # out of memory: the calls count without a time
        # The chain and not the function: that may do what must not happen twice.
        made.time(call.bound or (lambda *given: evaluate(chain, given, sizes)), inputs, device)
    with _lock:
        return _counters.setdefault(key, made)


def flush(wait_s: float = WRITER_S, last: bool = False) -> None:
    """Write what was counted. Calls whose time is not known yet wait for the next time, but for the `last`."""
    rows: dict[str, list[dict[str, Any]]] = {}
    ends = monotonic() + wait_s
    with _lock:
        looks = last or (any(c.events for c in _counters.values()) and _may_look())
        for (url, *_), counter in list(_counters.items()):
            if looks:
                with contextlib.suppress(Exception):  # a GPU that has failed
                    counter.settle()
            if counter.events is None or last:
                calls = counter.take()
                if calls:
                    rows.setdefault(url, []).append(counter.row(calls))
    for url, missed in rows.items():
        _write(url, missed, max(0.0, ends - monotonic()), last)


def _write(url: str, missed: Sequence[Mapping[str, Any]], wait_s: float, last: bool) -> None:
    """Have a process of its own write rows. Files in place of pipes: nothing blocks, and it needs its parent no more."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    try:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as told:
            given.write(json.dumps({"url": url, "missed": missed}).encode())
            given.seek(0)
            writer = subprocess.Popen(
                [sys.executable, "-P", "-m", "autofuse.demand"], stdin=given, stdout=subprocess.DEVNULL, stderr=told,
                env=env, start_new_session=True,
            )  # fmt: skip
            try:
                code = writer.wait(wait_s)
            except subprocess.TimeoutExpired:
                if last:
                    writer.returncode = 0  # it goes on alone: nothing is left to wait for, nor to warn of
                    return
                writer.kill()
                code = writer.wait()
            if code:
                told.seek(0)
                lines = told.read().decode(errors="replace").strip().splitlines()
                _warn(f"what calls missed is not written: {lines[-1] if lines else f'the writer ended with {code}'}")
    except OSError as error:
        _warn(f"what calls missed is not written: {error}")


def _warn(text: str) -> None:
    from .lookup import warn_once

    with contextlib.suppress(Warning):  # a filter that makes errors of warnings
        warn_once("demand", text)


# ---- the life of the process


def _start() -> None:
    """Start this process's thread, if it has none."""
    global _thread
    with _lock:
        if _thread is None and not _stop.is_set():
            _thread = threading.Thread(target=_loop, name="autofuse-demand", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started: the end of the process writes
                _thread.start()


def _loop() -> None:
    while not _stop.wait(INTERVAL_S):
        try:
            flush()
        except Exception as error:
            _warn(f"what calls missed is not written: {error}")


def _may_look() -> bool:
    """Let this thread look at events while another captures a CUDA graph, which would fail by it; says whether it may."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return True
    import ctypes

    try:
        relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED, of this thread alone
        return int(ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))) == 0
    except (OSError, AttributeError):
        return False


def _at_exit() -> None:
    _stop.set()
    with contextlib.suppress(Exception):
        flush(EXIT_S, last=True)


def _after_fork() -> None:
    """A child counts its own calls: its parent's are the parent's to write."""
    global _lock, _stop, _thread
    _lock, _stop, _thread = threading.Lock(), threading.Event(), None
    for counter in _counters.values():
        counter.take()
        _abandoned.append(counter.events)
        counter.events = None
    if _counters:
        _start()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---- the process that writes


def main() -> int:
    """Add the rows on stdin to the store; 1 with the reason on stderr where that cannot be."""
    given = json.load(sys.stdin.buffer)
    from .store.records import ChainRecord, DemandRecord, DeviceRecord, WorkloadRecord
    from .store.store import Store

    records = []
    for row in given["missed"]:
        work: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row["workload"].items()}
        records.append(
            DemandRecord(
                DeviceRecord(**row["device"]), ChainRecord(**row["chain"]), WorkloadRecord(**work),
                row["tier"], row["calls"], row["seconds"], row["sizes"],
            )
        )  # fmt: skip
    # In one order: on a server two writers that insert the same rows in different orders would wait for each other.
    records.sort(key=lambda r: (r.chain.key, r.workload.uid, r.tier))
    try:
        with Store.open(given["url"]) as store:
            for k in range(0, len(records), BLOCK):
                store.add_demand(records[k : k + BLOCK])
    except AutofuseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
