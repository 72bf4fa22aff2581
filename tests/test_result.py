"""What a job reports: shares, the table's text, JSON."""

from __future__ import annotations

import json

from autofuse.result import Progress, Tuned, TuneResult

DONE = Tuned("f", "16x4096 bf16", "cpu", 30.0, 20.0, 10.0, 5.0, "[0+1]", 12, "done", "budget", ({"math": "fast"},))
FAILED = Tuned("g", "1x1 fp32", "cpu", None, None, None, 5.0, "", 3, "failed", "nothing was correct")


def test_shares() -> None:
    assert (DONE.share, DONE.speedup) == (0.5, 3.0)
    assert (FAILED.share, FAILED.speedup) == (None, None)
    assert Progress("w", 1, 9, 20.0, None, 5.0, 1.0).share == 0.25
    assert Progress("w", 1, 9, None, None, 5.0, 1.0).share is None


def test_ok_means_that_each_workload_has_a_result() -> None:
    assert TuneResult((DONE,)).ok and TuneResult().ok
    assert not TuneResult((DONE, FAILED)).ok


def test_the_table() -> None:
    assert str(TuneResult((DONE, FAILED))).splitlines() == [
        "function  workload      eager µs  unfused µs  best µs  speedup  roofline  plan",
        "f         16x4096 bf16      30.0        20.0     10.0    3.00x       50%  [0+1]",
        "g         1x1 fp32             -           -        -        -         -  failed: nothing was correct",
    ]


def test_json() -> None:
    told = json.loads(json.dumps(TuneResult((DONE, FAILED)).to_json()))
    assert told[0]["best_us"] == 10.0 and told[0]["share"] == 0.5 and told[0]["speedup"] == 3.0
    assert told[0]["schedules"] == [{"math": "fast"}]
    assert told[1]["state"] == "failed" and told[1]["speedup"] is None
