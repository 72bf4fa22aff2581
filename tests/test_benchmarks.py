"""The benchmark without measuring: which shapes a suite has, what its bars say, how runs are split and merged."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import chains, peers, report
from benchmarks.report import BARS, Bar, Row, geomean, merge
from benchmarks.suites import HIDDEN, MAX_ROWS, MIB, SUITES, at_shapes, bytes_of, part, rows_for, workloads
from examples.entries import CATALOGUE, Entry

EVERY = {e.name: e for e in CATALOGUE}


def shapes(suite: str, name: str) -> list[tuple[int | None, int]]:
    return [(w.rows, w.cols) for w in workloads(suite, [EVERY[name]], ["bfloat16"])]


def test_shapes_of_suites() -> None:
    assert shapes("large", "softmax") == [(None, n) for n in HIDDEN]
    assert shapes("large", "rope") == [(None, n) for n in HIDDEN if n != 2880]  # no multiple of 128
    assert shapes("large", "cross_entropy") == [(None, 32000)]
    assert shapes("long", "cross_entropy") == [(None, 50257), (None, 128256), (None, 256000)]
    assert shapes("long", "softmax") == [(None, n) for n in (32768, 65536, 131072, 262144)]
    assert shapes("long", "relu2") == []
    assert shapes("decode", "rmsnorm") == [(rows, 4096) for rows in (1, 16, 64, 256)]
    assert sorted(n for rows, n in shapes("odd", "rmsnorm") if rows is None) == [4088, 4094, 4095, 4096, 4097, 4098, 4104]
    assert [(rows, n) for rows, n in shapes("odd", "rmsnorm") if rows] == [(1, 4096), (3, 4096), (1000, 4096)]
    assert shapes("odd", "rmsnorm_fp8_block") == [(None, 4096), (1, 4096), (3, 4096), (1000, 4096)]
    assert {w.protocol for w in workloads("decode", EVERY.values(), ["bfloat16"])} == {"graph"}
    assert len(workloads("decode", [EVERY["softmax"]], ["bfloat16", "float16"])) == 8
    given = at_shapes([(64, 1000), (3, 1024)], [EVERY["softmax"], EVERY["rope"]], ["float32"])
    assert [(w.entry.name, w.rows, w.cols) for w in given] == [("softmax", 64, 1000), ("softmax", 3, 1024), ("rope", 3, 1024)]


@pytest.mark.parametrize("name", ["softmax", "swiglu", "add_rmsnorm", "rope", "adaln_modulate", "rmsnorm_fp8_block"])
def test_rows_fill_the_traffic(name: str) -> None:
    w = workloads("large", [EVERY[name]], ["bfloat16"])[0]
    rows = w.filled()
    assert rows % 16 == 0
    nbytes = bytes_of(w.entry, rows // 16, w.cols, w.dtype) * 16
    assert abs(nbytes / (256 * MIB) - 1) < 0.01 or (rows == MAX_ROWS and nbytes < 256 * MIB)


def test_row_counts() -> None:
    assert rows_for(4 * 4096, 256 * MIB) == 16384
    assert rows_for(1, 256 * MIB) == MAX_ROWS
    assert rows_for(10 * MIB, 128 * MIB) == 12
    assert rows_for(512 * MIB, 128 * MIB) == 1


def test_parts_are_every_workload_once() -> None:
    every = workloads("odd", [EVERY["softmax"]], ["bfloat16"])
    parts = [part(f"{i}/3", every) for i in (1, 2, 3)]
    assert sorted(str(w) for some in parts for w in some) == sorted(map(str, every))
    assert parts[1] == every[1::3]
    for text in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(ValueError, match="is no part: write i/n"):
            part(text, every)


def row(chain: str = "softmax", rows: int = 16384, cols: int = 4096, suite: str = "large", **times: float) -> Row:
    found: dict[str, Any] = {n: {"median_us": t, "p20_us": t, "p80_us": t, "samples": 9} for n, t in times.items()}
    return {
        "suite": suite, "chain": chain, "rows": rows, "asked_rows": rows, "cols": cols, "dtype": "bfloat16", "ops": 3,
        "bytes": 4 * rows * cols, "floor_us": 1.0, "times": found, "left_out": {}, "plan": "p", "schedules": [], "spills": 0,
    }  # fmt: skip


def verdicts(suite: str, *rows: Row) -> list[str]:
    return [bar.verdict(rows) for bar in BARS[suite]]


def test_bars_of_large() -> None:
    good = row(copy=100, ours=104, compile=200, compile_max=150, liger=103, eager=300)
    assert [v.split()[0] for v in verdicts("large", good)] == ["met"] * 4
    slow = row("mish_add", copy=100, ours=130, compile=131, eager=500)
    mean, each, faster, peer = verdicts("large", good, slow)
    assert mean.startswith("missed by 10.7% ") and "geometric mean of 2: 1.163 (at most 1.05)" in mean
    assert each.startswith("missed by 8.3% ") and each.endswith("1 beyond: mish_add 16384x4096 bfloat16 1.300")
    assert faster.startswith("missed by 13.9%") and "1.206 (at least 1.40)" in faster
    assert peer.startswith("met") and "1.010 at softmax" in peer
    assert [v.split()[0] for v in verdicts("large", row(ours=1))] == ["unknown"] * 4


def test_bars_of_the_other_suites() -> None:
    assert verdicts("long", row(copy=100, ours=131))[0].startswith("missed by 0.8%")
    peer, compiled = verdicts("decode", row(ours=2.05, compile=2.0, liger=2.0))
    assert peer.startswith("met") and compiled.startswith("missed by 2.5%")
    even, few = row(cols=4096, ours=100, eager=101), row(rows=3, cols=4096, ours=1, eager=2)
    near, odd = row(cols=4104, ours=130, eager=120), row(cols=4097, ours=90, eager=91)
    time_a_byte, best_peer = verdicts("odd", even, few, near, odd)
    assert time_a_byte.startswith("missed by 3.8%") and "each of 1: 1.297 at softmax 16384x4104" in time_a_byte
    assert best_peer.startswith("met") and "each of 3: 0.990" in best_peer
    assert verdicts("odd", near)[0].startswith("unknown")


def test_a_bar_on_its_limit_is_met() -> None:
    assert Bar("x", 1.5, report.to_copy).verdict([row(copy=2, ours=3)]).startswith("met")
    assert Bar("x", 1.5, report.over_compile, least=True).verdict([row(compile=3, ours=2)]).startswith("met")


def test_report() -> None:
    spilled = {**row(copy=100, ours=104, eager=300, quack=99), "spills": 12, "left_out": {"liger": "output 0 differs"}}
    failed = {k: v for k, v in row("rope").items() if k not in ("times", "left_out")} | {"error": "TraceError: no"}
    text = report.report([spilled, failed, row(suite="long", copy=1, ours=1)])
    assert "suite large" in text and "suite long" in text
    assert "spills           softmax 16384x4096 bfloat16: 12 in p []" in text
    assert "left out         softmax 16384x4096 bfloat16: liger: output 0 differs" in text
    assert "failed           rope 16384x4096 bfloat16: TraceError: no" in text
    assert "quack" in text and "1.04x" in text
    assert "eager / ours, chains of three or more operations: geometric mean 2.885" in text


def test_merge(tmp_path: Path) -> None:
    old, new = row(ours=5), row(ours=4)
    failed = {**row(), "error": "out of memory"}
    other = row(cols=8192, ours=1)
    report.write(str(tmp_path / "a.json"), [old, other])
    report.write(str(tmp_path / "b.json"), [new])
    a, b = (report.read(str(tmp_path / name)) for name in ("a.json", "b.json"))
    assert merge([a, b]) == [new, other]
    assert merge([[failed], b]) == [new]
    assert merge([b, [failed]]) == [new]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_geometric_mean() -> None:
    assert geomean([2.0, 8.0]) == pytest.approx(4)
    assert geomean([]) != geomean([])


def test_peers_are_compared_with_eager() -> None:
    expected = [torch.linspace(-1, 1, 64).bfloat16(), torch.arange(3)]
    assert peers.differs((expected[0].float() * 1.01, expected[1]), expected, torch.float32) == ""
    assert peers.differs((expected[0] * 1.1, expected[1]), expected, torch.float32).startswith(
        "output 0 differs from eager's by 0.1"
    )
    assert peers.differs(expected[0], expected, torch.float32) == "1 outputs, not 2"
    assert peers.differs((expected[0][:5], expected[1]), expected, torch.float32) == "output 0 is torch.Size([5]), not (64,)"
    assert "differs" in peers.differs((expected[0] * torch.nan, expected[1]), expected, torch.float32)


def test_in_place_peers_leave_the_arguments_alone() -> None:
    x = torch.ones(4)
    call = peers.in_place(lambda x: x.add_(1))(x)
    assert call().tolist() == [2] * 4 and call().tolist() == [3] * 4 and x.tolist() == [1] * 4


def test_a_library_that_is_not_there_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent() -> dict[str, peers.Bind]:
        raise ImportError("no module of that name")

    known = {"swiglu": peers.plain(abs), "swiglu_inplace": peers.in_place(abs)}
    monkeypatch.setattr(peers, "LIBRARIES", {"one": absent, "two": lambda: known})
    peers.library.cache_clear()
    for _ in range(2):
        assert list(peers.libraries("swiglu", "cuda:0")) == ["two", "two_inplace"]
    assert peers.libraries("swiglu", "cpu") == {}
    assert capsys.readouterr().err == "no one here: ImportError: no module of that name\n"
    peers.library.cache_clear()


def test_a_peer_that_fails_or_differs_is_left_out() -> None:
    from benchmarks.chains import measure

    entry: Entry = EVERY["softmax"]
    binds = {
        "copy": peers.copy_of(1024, "cpu"), "eager": peers.plain(entry.fn), "ours": peers.plain(partial(torch.softmax, dim=-1)),
        "wrong": peers.plain(torch.sigmoid), "broken": peers.plain(lambda x: x.no_such_thing),
    }  # fmt: skip
    timings, left_out = measure(binds, [entry.case(4, 64), entry.case(4, 64, seed=1)], torch.float32, "cpu", "loop", 0.01)
    assert list(timings) == ["copy", "eager", "ours"] and all(t.median_us > 0 for t in timings.values())
    assert left_out["wrong"].startswith("output 0 differs")
    assert left_out["broken"] == "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"


def test_every_suite_has_bars_and_workloads() -> None:
    assert set(SUITES) == set(BARS)
    for name in SUITES:
        assert workloads(name, EVERY.values(), ["bfloat16"])


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    for name in ("a.json", "a.json.gz"):
        report.write(str(tmp_path / name), [row(ours=1.0)])
        assert report.read(str(tmp_path / name)) == [row(ours=1.0)]
    bad = {"empty.json": b"", "other.json": b"{}", "no.json.gz": b"x", "cut.json.gz": (tmp_path / "a.json.gz").read_bytes()[:30]}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(name)):
            report.read(str(tmp_path / name))


def test_what_earlier_results_have_is_left_out(tmp_path: Path) -> None:
    done = tmp_path / "done.json"
    report.write(str(done), [{**chains.head(w), "times": {}} for w in workloads("decode", [EVERY["softmax"]], ["bfloat16"])[:3]])
    wanted = argparse.Namespace(
        chain=["softmax"], device="cuda:0", suite="decode", dtype=None, cols=None, part=None, lacking=[str(done)], shape=None
    )
    assert [w.rows for w in chains.planned(wanted)] == [256]
