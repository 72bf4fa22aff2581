"""How long programs take: warmed, interleaved, by one of three protocols, and the ceilings of the device.

loop    CPU: wall time of a few calls in a row, outputs allocated in the call and dropped
cold    CUDA, large: events around one call, the L2 cache flushed before each
graph   CUDA, small: events around one CUDA graph of GRAPH_CALLS calls over rotating inputs, since one launch at a time
        would measure the gaps between launches

Times of different protocols do not compare.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ..cost import Ceilings
from ..errors import LaunchError

Run = Callable[[int], Any]
"""One call on the k-th set of inputs. It allocates its outputs; what it returns is dropped."""

GRAPH_CALLS = 20
GRAPH_BYTES = 32 * 2**20  # workloads above it are timed cold
MIN_SAMPLES = 7
MAX_SAMPLES = 1000
SAMPLE_S = 100e-6  # the clock is too coarse for less
WARM_CLOCK_S = 0.05
IDLE_S = 0.1  # a GPU that has done nothing for so long lowers its clocks


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 20th and 80th percentile over `samples`."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int

    @staticmethod
    def of(samples_us: Sequence[float]) -> Timing:
        """The timing of these samples. Raises LaunchError where one is no positive, finite time."""
        if not samples_us or not all(math.isfinite(t) and t > 0 for t in samples_us):
            raise LaunchError("the clock gave a time that is not finite and positive")
        ordered = sorted(samples_us)
        return Timing(statistics.median(ordered), _quantile(ordered, 0.2), _quantile(ordered, 0.8), len(ordered))


def _quantile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def choose_protocol(bytes_min: int, device: torch.device | str) -> str:
    """The protocol for a workload that moves `bytes_min` bytes."""
    if torch.device(device).type == "cpu":
        return "loop"
    return "cold" if bytes_min > GRAPH_BYTES else "graph"


def input_sets(bytes_min: int, device: torch.device | str, protocol: str) -> int:
    """How many sets of inputs calls rotate over: enough that a graph's calls find theirs out of the L2 cache."""
    if protocol != "graph":
        return 1
    return max(2, min(GRAPH_CALLS, math.ceil(2 * l2_bytes(torch.device(device)) / max(1, bytes_min))))


@lru_cache
def l2_bytes(device: torch.device) -> int:
    """Size of a CUDA device's L2 cache."""
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 64 * 2**20


@contextlib.contextmanager
def turn(device: torch.device | str, folder: Path) -> Iterator[None]:
    """Processes that use `folder` time programs on one GPU one after the other: waits until no other one does. The
    operating system ends the turn of a process that dies. On a CPU nobody waits."""
    device = torch.device(device)
    if device.type == "cpu":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"measuring-{torch.cuda.get_device_properties(device).uuid}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_last_timed: dict[torch.device, float] = {}  # when each GPU was timed last by this process


# ---- one program under one protocol


class Sampler(Protocol):
    """A program made ready to be timed."""

    def sample(self) -> float:
        """Microseconds of one call."""
        ...

    def close(self) -> None:
        """Drop what it holds."""
        ...


class _Loop:
    def __init__(self, run: Run, rotate: int) -> None:
        self.run, self.rotate = run, rotate
        run(0)  # builds what is built lazily
        start = time.perf_counter()
        run(0)
        once = max(time.perf_counter() - start, 1e-7)
        self.calls = 1
        while self.calls * once < SAMPLE_S:  # the first estimate is cold: correct it
            self.calls = max(self.calls + 1, min(2 * self.calls, math.ceil(SAMPLE_S / once)))
            start = time.perf_counter()
            self._burst()
            once = max((time.perf_counter() - start) / self.calls, 1e-7)

    def _burst(self) -> None:
        run, rotate = self.run, self.rotate
        for k in range(self.calls):
            run(k % rotate)

    def sample(self) -> float:
        start = time.perf_counter()
        self._burst()
        return 1e6 * (time.perf_counter() - start) / self.calls

    def close(self) -> None:
        pass


class _Cold:
    def __init__(self, run: Run, rotate: int, device: torch.device) -> None:
        self.run, self.rotate, self.device, self.turn = run, rotate, device, 0
        self.flush = _flush_buffer(device)
        self.start, self.stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run(0)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run(0)
        host = time.perf_counter() - start
        torch.cuda.synchronize(device)
        # the GPU waits while the host enqueues, so that the events see the program and not the host
        self.cycles = int(2e9 * min(2 * host + 60e-6, 5e-3))

    def sample(self) -> float:
        self.turn = (self.turn + 1) % self.rotate
        torch.cuda._sleep(self.cycles)
        self.flush.zero_()
        self.start.record()
        self.run(self.turn)
        self.stop.record()
        self.stop.synchronize()
        return 1e3 * float(self.start.elapsed_time(self.stop))

    def close(self) -> None:
        del self.run


class _Graph:
    def __init__(self, run: Run, rotate: int, device: torch.device) -> None:
        self.device = device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for k in range(min(3, rotate)):
                run(k)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for k in range(GRAPH_CALLS):
                run(k % rotate)
        self.start, self.stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        torch.cuda.synchronize(device)

    def sample(self) -> float:
        self.start.record()
        self.graph.replay()
        self.stop.record()
        self.stop.synchronize()
        return 1e3 * float(self.start.elapsed_time(self.stop)) / GRAPH_CALLS

    def close(self) -> None:
        self.graph.reset()


@lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(2 * l2_bytes(device), dtype=torch.uint8, device=device)


def prepare(run: Run, device: torch.device | str, protocol: str, rotate: int = 1) -> Sampler:
    """A program warmed up and made ready to be timed. What it raises passes through."""
    device = torch.device(device)
    if protocol == "loop":
        return _Loop(run, rotate)
    with torch.cuda.device(device):
        return _Cold(run, rotate, device) if protocol == "cold" else _Graph(run, rotate, device)


def interleave(samplers: Sequence[Sampler], device: torch.device | str, budget_s: float) -> list[Timing]:
    """Timings of these programs: round after round each is sampled once, in an order that rotates, so that drifting
    clocks meet all of them alike. At least MIN_SAMPLES each (3 where one round takes the whole budget)."""
    device = torch.device(device)
    if not samplers:
        return []
    samples: list[list[float]] = [[] for _ in samplers]
    enabled = gc.isenabled()
    gc.disable()
    try:
        if device.type == "cuda" and time.perf_counter() - _last_timed.get(device, -math.inf) > IDLE_S:
            _warm_clocks(device)
        start = time.perf_counter()
        rounds = 0
        while rounds < MAX_SAMPLES:
            for k in range(len(samplers)):
                at = (k + rounds) % len(samplers)
                samples[at].append(samplers[at].sample())
            rounds += 1
            spent = time.perf_counter() - start
            least = 3 if spent / rounds > budget_s else MIN_SAMPLES
            if spent >= budget_s and rounds >= least:
                break
        _last_timed[device] = time.perf_counter()
    finally:
        if enabled:
            gc.enable()
    return [Timing.of(s) for s in samples]


def time_runs(
    runs: Sequence[Run], device: torch.device | str, *, budget_s: float, protocol: str, rotate: int = 1,
) -> list[Timing]:  # fmt: skip
    """Interleaved timings of these programs. `rotate` is the number of input sets; a run is told which to use."""
    samplers = []
    try:
        for run in runs:
            samplers.append(prepare(run, device, protocol, rotate))
        return interleave(samplers, device, budget_s)
    finally:
        for s in samplers:
            s.close()


def _warm_clocks(device: torch.device) -> None:
    x = torch.empty(16 * 2**20, device=device)
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_CLOCK_S:
        for _ in range(20):
            x.add_(1.0)
        torch.cuda.synchronize(device)


# ---- ceilings


@lru_cache
def ceilings(device: torch.device | str, working_set: int | None = None) -> Ceilings:
    """What the device reaches at best, measured once a process.

    `working_set` (bytes that a workload moves): on a CPU a small one stays in cache, whose bandwidth is the bound then.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return Ceilings(_cpu_bandwidth(_size_class(working_set)), _cpu_flops(), 1e-6)
    return Ceilings(_cuda_bandwidth(device), _cuda_flops(device), 1.5e-6)


def _size_class(working_set: int | None) -> int:
    """Bytes of a copy's source: the power of two that is nearest below half the working set, 128 MiB where unknown."""
    largest = 128 * 2**20
    if working_set is None:
        return largest
    return min(largest, max(2**14, 1 << max(1, working_set // 2).bit_length() - 1))


@lru_cache
def _cpu_bandwidth(size: int) -> float:
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    run = _Loop(lambda _: target.copy_(source), 1)
    # one thread alone as well: where another process holds a core, a parallel copy waits for it, 8 ms at a time
    at, to = source.data_ptr(), target.data_ptr()
    alone = _Loop(lambda _: ctypes.memmove(to, at, size), 1)
    times = [f() for _ in range(10) for f in (run.sample, alone.sample)]
    return 2e6 * size / min(times)  # the best one: a bound must not be too low


def _cpu_flops() -> float:
    # what no core reaches: two 512-bit fused multiply-adds a cycle at 5 GHz. A measured product was beaten by half on a
    # busy machine, and a bound that is too low prunes what is best
    return torch.get_num_threads() * 64 * 5e9


def _cuda_bandwidth(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    size = min(2**30, free // 4)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    (timing,) = time_runs([lambda _: target.copy_(source)], device, budget_s=0.05, protocol="cold")
    return 2e6 * size / timing.median_us


def _cuda_flops(device: torch.device) -> float:
    p = torch.cuda.get_device_properties(device)
    clock_hz = 1e3 * float(getattr(p, "clock_rate", 0) or 2.0e6)
    return float(p.multi_processor_count) * 128 * 2 * clock_hz  # fp32 fused multiply-adds: 128 lanes an SM
