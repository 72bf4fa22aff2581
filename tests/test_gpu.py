"""Triton kernels on a real GPU: values at odd shapes, past 2^31 elements, streams, graph capture, tuning."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import autofuse
from autofuse import settings
from autofuse.cli import app
from autofuse.device import limits
from autofuse.fusion import check
from autofuse.kernels import artifact
from autofuse.kernels.mathmode import MODES
from autofuse.program import Layouts, Program
from autofuse.trace import trace
from autofuse.traced import sizes_of
from examples.entries import CATALOGUE, Entry
from tests import test_columns as columns
from tests.kernel_cases import Knobs, data, right, run
from tests.test_kernels import Fn, saturated, sines

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def fresh(own_store: None) -> Iterator[None]:
    """A wrong kernel is an error, not a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs its eager function")
        yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: e.name)
@pytest.mark.parametrize(("rows", "cols"), [(1, 128), (7, 384), (1000, 1024), (2, 69888)])
def test_the_catalogue_with_its_heuristic_schedules(entry: Entry, rows: int, cols: int) -> None:
    for dtype in ("bfloat16", "float32"):
        args = entry.case(rows, cols, dtype, DEVICE)
        fused = autofuse.fuse(entry.fn)
        right(entry.fn, args, fused(*args))
        assert fused.explain(*args).tier == "heuristic"


FORMS: dict[str, Knobs] = {
    "whole in storage": {"form": "whole", "keep": "storage", "num_warps": 8, "rows_per_program": 1},
    "side by side, rounded": {"form": "unrolled", "keep": "rounded", "num_warps": 8, "rows_per_program": 1, "block_cols": 2048},
    "side by side, near": {
        "form": "unrolled",
        "keep": "storage",
        "num_warps": 8,
        "rows_per_program": 1,
        "block_cols": 2048,
        "near": "evict_last",
        "in0": "past",
    },
    "persistent": {"form": "whole", "persistent": 2, "num_warps": 8, "rows_per_program": 2, "in0": "evict_first"},
    "looped": {"form": "looped", "block_cols": 1024, "num_warps": 4, "online": 1, "num_stages": 2, "in0": "reuse"},
    "split": {"form": "split", "pieces": 8, "block_cols": 1024, "num_warps": 4, "online": 0, "num_stages": 1},
    "split online": {"form": "split", "pieces": 4, "block_cols": 512, "num_warps": 4, "online": 1, "num_stages": 1},
}
ROWS = [e for e in CATALOGUE if e.name in ("softmax", "log_softmax", "add_layernorm_gelu", "add_rmsnorm", "rmsnorm_fp8_token")]


@pytest.mark.parametrize("math", MODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ROWS, ids=lambda e: e.name)
def test_forms(entry: Entry, form: str, math: str) -> None:
    """Every form of a row kernel, and each math mode where results are rounded to 16 bits."""
    for rows, cols in ((37, 8192), (300, 4104), (5, 33000)):
        knobs = {**FORMS[form], "math": math}
        if cols > 2**14:
            knobs["rows_per_program"], knobs["num_warps"] = 1, 32
            if knobs["form"] == "unrolled":
                knobs["block_cols"] = 4096
        args = entry.case(rows, cols, "bfloat16", DEVICE)
        assert run(entry.fn, args, "cuda", knobs).message == "", (rows, cols)


LONG = [e for e in CATALOGUE if "long" in e.suites and not e.widths]


@pytest.mark.parametrize("entry", LONG, ids=lambda e: e.name)
def test_long_rows(entry: Entry) -> None:
    for rows, cols in ((4, 32768), (150, 65536), (3, 131072), (2, 262144)):
        args = entry.case(rows, cols, "bfloat16", DEVICE)
        right(entry.fn, args, autofuse.fuse(entry.fn)(*args))


JOINT: Knobs = {
    "form": "joint", "block_cols": 4096, "num_warps": 16, "keep": "storage", "registers": 0, "rows_per_program": 1,
    "persistent": 0, "early": 0,
}  # fmt: skip


@pytest.mark.parametrize("pieces", [2, 4, 16, 32])
@pytest.mark.parametrize("entry", LONG, ids=lambda e: e.name)
def test_rows_of_several_programs_that_wait(entry: Entry, pieces: int) -> None:
    """More rows than there is room for at once, and a few."""
    for rows, cols in ((1, 33024), (700, 40064), (33, 131072), (3, 262144)):
        if -(-cols // pieces) > 65536:
            continue
        args = entry.case(rows, cols, "bfloat16", DEVICE)
        for keep, early, together in (("storage", 0, 1), ("wide", 2, 1), ("rounded", 0, 1), ("storage", 0, 2)):
            knobs: Knobs = {**JOINT, "pieces": pieces, "keep": keep, "early": early, "rows_per_program": together}
            assert run(entry.fn, args, "cuda", knobs).message == "", (rows, cols)


@pytest.mark.parametrize("math", MODES)
@pytest.mark.parametrize(("pieces", "together"), [(4, 1), (16, 1), (16, 2), (32, 4)])
def test_hard_values_in_pieces(pieces: int, together: int, math: str) -> None:
    """What belongs to one piece of a row alone reaches all of it; one is all padding."""
    x = torch.randn(9, 40000, device=DEVICE)
    x[1] = -torch.inf
    x[2, 100:39000] = -torch.inf
    x[3, 5] = torch.nan
    x[4, 7] = torch.inf
    x[5] *= 1e4
    x[6, 20000:] += 1e4
    knobs: Knobs = {**JOINT, "pieces": pieces, "math": math, "rows_per_program": together}
    for dtype in (torch.float32, torch.bfloat16):
        for fn in (soft, log_soft):
            assert run(fn, (x.to(dtype),), "cuda", knobs).message == ""
        y = torch.randn(4, 40000, device=DEVICE) + torch.tensor([[0.0], [1e4], [-3e2], [1.0]], device=DEVICE)
        y[3, 30000:] *= 1e3
        assert run(normed, (y.to(dtype),), "cuda", knobs).message == ""


COLUMNS: dict[str, Knobs] = {
    "seed": {},
    "one chunk": {"chunks": 1},
    "many chunks": {"chunks": 264, "block_rows": 2, "block_cols": 64, "num_warps": 2},
}


@pytest.mark.parametrize("knobs", COLUMNS)
@pytest.mark.parametrize("shape", [(1, 4096), (3000, 1000), (70000, 96), (513, 16384)], ids=str)
def test_over_rows(shape: tuple[int, int], knobs: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for fn in columns.TWO.values():
            assert run(fn, (data(*shape, dtype=dtype).to(DEVICE),), "cuda", COLUMNS[knobs]).message == ""
        given = tuple(t.to(DEVICE) for t in columns.norm_inputs(*shape, dtype))
        assert run(columns.norm_backward, given, "cuda", COLUMNS[knobs] if shape[1] <= 4096 else {}).message == ""


def test_sums_over_rows_past_two_to_the_31_elements() -> None:
    x = torch.ones(2**19 + 3, 4096, dtype=torch.bfloat16, device=DEVICE)
    y = autofuse.fuse(lambda x: x.float().sum(0))(x)
    assert torch.equal(y, torch.full((4096,), 2.0**19 + 3, device=DEVICE))


def softplus_gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.5 * x) + F.softplus(x)


def test_layouts_and_row_counts() -> None:
    fused = autofuse.fuse(softplus_gate)
    base = torch.randn(40, 64, device=DEVICE)
    raw = torch.randn(40 * 64 + 1, device=DEVICE)
    for x in (
        base.t(), base[::2], base[:, 8:40], base[:, ::2], base[3:4].expand(9, 64), raw[1:].view(40, 64),
        base.view(2, 20, 64).transpose(0, 1), base.view(5, 8, 64)[:, 1:7], base[0], base[0, 0], base[:0],
    ):  # fmt: skip
        right(softplus_gate, (x,), fused(x))


def soft(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def log_soft(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def rms_silu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(F.rms_norm(x, (x.shape[-1],), w, 1e-6))


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],))


def test_hard_values() -> None:
    x = torch.randn(8, 1000, device=DEVICE)
    x[1] = -torch.inf
    x[2, ::3] = -torch.inf
    x[3, 5] = torch.nan
    x[4, 7] = torch.inf
    x[5] *= 1e4
    for dtype in (torch.float32, torch.bfloat16):
        right(soft, (x.to(dtype),), autofuse.fuse(soft)(x.to(dtype)))
    y = torch.randn(8, 4096, device=DEVICE) + 1e4
    right(normed, (y,), autofuse.fuse(normed)(y))
    wide = torch.randn(2, 70000, device=DEVICE)
    wide[1, :60000] = -torch.inf
    right(soft, (wide,), autofuse.fuse(soft)(wide))


@pytest.mark.parametrize("math", MODES)
@pytest.mark.parametrize("fn", [torch.sin, torch.cos])
def test_sines(fn: Fn, math: str) -> None:
    sines(fn, math, DEVICE)


def test_fp8_saturates() -> None:
    saturated(DEVICE)


def test_more_than_two_to_the_31_elements() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def tops(x: torch.Tensor) -> torch.Tensor:
        return x.amax(-1)

    x = torch.zeros(2**19 + 3, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = torch.arange(4096, device=DEVICE).to(torch.bfloat16) / 64
    y = autofuse.fuse(twice)(x)
    assert torch.equal(y[-1], x[-1] * 2 + 1) and torch.equal(y[-2], torch.ones_like(y[-2]))
    del y
    z = autofuse.fuse(tops)(x)
    assert z[-1] == x[-1].max() and not z[:-1].any()


AHEAD: dict[str, Knobs] = {
    **FORMS,
    "joint": {"form": "joint", "pieces": 8, "num_warps": 8, "rows_per_program": 1},
    "early": {"overlap": 1},
}


@pytest.mark.parametrize("form", AHEAD)
@pytest.mark.parametrize("entry", ROWS, ids=lambda e: e.name)
def test_binaries_built_ahead(entry: Entry, form: str) -> None:
    for rows, cols in ((37, 8192), (300, 4104)):
        assert run(entry.fn, entry.case(rows, cols, "bfloat16", DEVICE), "cuda", AHEAD[form], ahead=True).message == ""


def test_a_binary_in_a_graph_and_on_another_stream() -> None:
    x = data(64, 1000).to(DEVICE)
    traced = trace(soft, (x,))
    layouts = Layouts(check(traced.chain), (x,), sizes_of(traced, (x,)) or {})
    here = limits(DEVICE)
    plan, schedules = layouts.plan(layouts.fusion.fused(), here)
    cache = settings.read().cache
    for kernel in (s.kernel for s in Program(layouts, plan, schedules, here, cache, x.device).steps if s.kernel is not None):
        artifact.write(kernel.source, kernel.low, here.arch, cache)
    program = Program(layouts, plan, schedules, here, cache, x.device, ())
    assert all(s.kernel is not None and s.kernel.artifact is not None for s in program.steps)
    sizes = sizes_of(traced, (x,)) or {}
    right(soft, (x,), program([x], sizes)[0])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = program([x], sizes)[0]
    stream.synchronize()
    right(soft, (x,), out)
    with torch.cuda.graph(graph):
        (held,) = program([x], sizes)
    x.copy_(data(64, 1000, seed=5))
    graph.replay()
    torch.cuda.synchronize()
    right(soft, (x,), held)


COLD = """
import sys, time, torch
x, w = torch.load(sys.argv[1])
torch.cuda.synchronize()
import autofuse
began = time.perf_counter()
y = autofuse.load("cold")(x, w)
torch.cuda.synchronize()
print("load and first call", round(1e3 * (time.perf_counter() - began)), "ms")
torch.save(y, sys.argv[2])
assert not [m for m in ("triton", "sympy", "torch._dynamo", "sqlalchemy") if m in sys.modules]
"""


def test_a_name_is_called_without_triton(tmp_path: Path) -> None:
    x, w = data(64, 4096, dtype=torch.bfloat16).to(DEVICE), data(4096, dtype=torch.bfloat16, seed=1).to(DEVICE)
    assert autofuse.tune(rms_silu, [(x, w)], trials=3, seconds=20, name="cold").ok
    done = CliRunner().invoke(app, ["build"])
    assert done.exit_code == 0 and ": 1" in done.stderr, done.output
    torch.save((x, w), tmp_path / "in.pt")
    for _ in range(2):  # the first one may decompose a norm
        child = [sys.executable, "-c", COLD, str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
        ran = subprocess.run(child, capture_output=True, text=True, check=False, timeout=120)
        print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    right(rms_silu, (x, w), torch.load(tmp_path / "out.pt"))


def test_streams_and_graph_capture() -> None:
    fused = autofuse.fuse(softplus_gate)
    x = torch.randn(512, 1024, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = fused(x)
    side.synchronize()
    right(softplus_gate, (x,), y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused(x)
    x.normal_()
    graph.replay()
    right(softplus_gate, (x,), out)


def test_a_cold_call_inside_a_capture_captures_eager() -> None:
    fused = autofuse.fuse(softplus_gate)
    x = torch.randn(64, 256, device=DEVICE)
    softplus_gate(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="inside a CUDA graph capture"), torch.cuda.graph(graph):
        out = fused(x)
    x.normal_()
    graph.replay()
    assert torch.equal(out, softplus_gate(x))


def test_mixed_devices_raise_what_eager_raises() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    with pytest.raises(RuntimeError, match="same device"):
        autofuse.fuse(add)(torch.randn(4, 8, device=DEVICE), torch.randn(4, 8))
    x = torch.randn(4, 8, device=DEVICE)
    assert torch.equal(autofuse.fuse(add)(x, torch.tensor(2.0)), x + 2)


def test_a_tune_finds_more_than_its_seeds(tmp_path: Path) -> None:
    def chain(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x + r
        return F.silu(F.rms_norm(h, (h.shape[-1],), w, 1e-6))

    args = tuple(torch.randn(*s, device=DEVICE, dtype=torch.bfloat16) for s in ((2048, 4096), (2048, 4096), (4096,)))
    result = autofuse.tune(chain, [args], trials=10, seconds=30)
    row = result.rows[0]
    assert row.state == "done" and row.best_us is not None and row.eager_us is not None
    assert row.best_us <= row.eager_us and row.plan == "rowreduce(3,4,5)"
    fused = autofuse.fuse(chain)
    right(chain, args, fused(*args))
    assert fused.explain(*args).tier == "exact"
