"""Timings on a CPU: their order, their size, their budget."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from autofuse.errors import LaunchError
from autofuse.search.measure import (
    MIN_SAMPLES,
    Sampler,
    Timing,
    ceilings,
    choose_protocol,
    input_sets,
    interleave,
    time_runs,
)


def sleeper(seconds: float) -> Any:
    return lambda _: time.sleep(seconds)


def test_times_are_right_and_ordered() -> None:
    slow, fast = time_runs([sleeper(2e-3), sleeper(5e-4)], "cpu", budget_s=0.05, protocol="loop")
    assert 2e3 <= slow.median_us < 4e3 and 5e2 <= fast.median_us < 1.5e3
    assert slow.p20_us <= slow.median_us <= slow.p80_us and slow.samples == fast.samples >= MIN_SAMPLES


def test_short_calls_are_timed_in_bursts() -> None:
    calls: list[int] = []
    (t,) = time_runs([calls.append], "cpu", budget_s=0.005, protocol="loop", rotate=3)
    assert 0 < t.median_us < 10 and len(calls) > 100 * t.samples
    assert set(calls) == {0, 1, 2}, "calls rotate over the input sets"


class Recorder:
    def __init__(self, name: str, log: list[str], takes: float = 0.0) -> None:
        self.name, self.log, self.takes = name, log, takes

    def sample(self) -> float:
        self.log.append(self.name)
        time.sleep(self.takes)
        return 1.0

    def close(self) -> None:
        pass


def test_rounds_are_interleaved_and_rotate() -> None:
    log: list[str] = []
    samplers: list[Sampler] = [Recorder(n, log) for n in "abc"]
    interleave(samplers, "cpu", 0.0)
    assert "".join(log[:9]) == "abcbcacab"
    assert len(log) == 3 * len(samplers) or len(log) == MIN_SAMPLES * len(samplers)


def test_budget() -> None:
    log: list[str] = []
    interleave([Recorder("a", log, 0.02)], "cpu", 0.01)
    assert len(log) == 3, "where one round takes the whole budget three samples do"
    log.clear()
    interleave([Recorder("a", log, 0.002)], "cpu", 0.004)
    assert len(log) == MIN_SAMPLES
    assert interleave([], "cpu", 1.0) == []


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, math.nan], [math.inf], [-1.0]])
def test_impossible_times_are_errors(bad: list[float]) -> None:
    with pytest.raises(LaunchError):
        Timing.of(bad)


def test_quantiles() -> None:
    t = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert (t.median_us, t.p20_us, t.p80_us, t.samples) == (3.5, 2.0, 5.0, 6)


def test_protocols() -> None:
    assert choose_protocol(10, "cpu") == choose_protocol(2**40, torch.device("cpu")) == "loop"
    assert choose_protocol(32 * 2**20, "cuda") == "graph" and choose_protocol(32 * 2**20 + 1, "cuda:0") == "cold"
    assert input_sets(1000, "cpu", "loop") == 1


def test_ceilings_are_bounds() -> None:
    large, small = ceilings("cpu"), ceilings("cpu", 2**17)
    assert 1e9 < large.bandwidth < 2e12 and small.bandwidth > 0 and large.launch_s == 1e-6
    x = torch.randn(256, 256)
    (t,) = time_runs([lambda _: x @ x], "cpu", budget_s=0.05, protocol="loop")
    assert large.flops > 2 * 256**3 / (t.p20_us * 1e-6), "no program may beat the ceiling"
    assert ceilings("cpu") is large
