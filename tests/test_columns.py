"""Reductions over rows, alone and beside what is computed a row at a time, in both dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autofuse.errors import Infeasible, LaunchError, UnsupportedOp
from autofuse.fusion import Fusion, check
from autofuse.kernels.launch import Kernel
from autofuse.kernels.layout import Operand, layout_of
from autofuse.kernels.registry import kind_of
from autofuse.program import Layouts
from autofuse.settings import read
from autofuse.trace import trace
from autofuse.traced import sizes_of
from tests.kernel_cases import LAYOUTS, LIMITS, Knobs, data, floats, run

Fn = Callable[..., Any]


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def bias_grad(g: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient passed on, and the bias's: one reads the other's input."""
    return g * 2, g.float().sum(0).to(g.dtype)


def extremes(x: Tensor) -> tuple[Tensor, ...]:
    return x.amax(0), x.amin(0), (x > 1).any(0), (x > -9).all(0), x.mean(0)


def total(x: Tensor) -> Tensor:
    return (x * x).sum()


def mean_loss(x: Tensor) -> Tensor:
    return torch.logsumexp(x.float(), -1).mean()


def pooled(x: Tensor) -> Tensor:
    """Over one of two leading axes."""
    return x.mean(1)


def pooled_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    return y.to(x.dtype), y.sum(-2)


def norm_backward(dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm's: dx by rows, dw and db over rows."""
    dy, g = dy.float(), dy.float() * w.float()
    hat = (x.float() - mean) * rstd
    dx = (g - hat * (g * hat).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy * hat).sum(0).to(w.dtype), dy.sum(0).to(w.dtype)


def norm_inputs(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = data(rows, cols, dtype=dtype, seed=1)
    return data(rows, cols, dtype=dtype, seed=2), x, data(cols, dtype=dtype), x.float().mean(-1, keepdim=True), data(rows, 1).abs()


TWO: dict[str, Fn] = {f.__name__: f for f in (column_sum, bias_grad, extremes, total, mean_loss)}
THREE: dict[str, Fn] = {f.__name__: f for f in (pooled, pooled_norm, total)}
KNOBS: dict[str, Knobs] = {
    "seed": {},
    "small": {"block_rows": 4, "chunks": 4, "block_cols": 32, "num_warps": 1, "threads": 2, "keep": "none"},
    "one row": {"block_rows": 1, "chunks": 2, "threads": 1, "keep": "all"},
    "in storage": {"block_rows": 4, "chunks": 2, "keep": "storage", "num_warps": 1, "overlap": 1},
    "one chunk": {"block_rows": 8, "chunks": 1, "math": "exact"},
}
TARGETS = [pytest.param("cpu", id="c"), pytest.param("cuda", id="triton", marks=pytest.mark.interpret)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("shape", [(37, 48), (1, 130), (33, 1), (130, 300)], ids=str)
@pytest.mark.parametrize("name", TWO)
def test_over_rows(target: str, name: str, shape: tuple[int, int], knobs: str) -> None:
    for dtype in floats(("float32", "bfloat16")):
        made = run(TWO[name], (data(*shape, dtype=dtype),), target, KNOBS[knobs])
        assert made.message == "", dtype
        assert [p.kind for p in made.plan.parts] == ["colreduce"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("shape", [(37, 48), (1, 130), (130, 300)], ids=str)
def test_norm_backward(target: str, shape: tuple[int, int], knobs: str) -> None:
    for dtype in floats(("float32", "bfloat16")):
        made = run(norm_backward, norm_inputs(*shape, dtype), target, KNOBS[knobs])
        assert made.message == "", dtype
        assert len(made.plan.parts) == 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", THREE)
def test_over_some_of_the_leading_axes(target: str, name: str, turned: bool) -> None:
    x = data(5, 9, 40)
    x = x.transpose(0, 1) if turned else x
    for knobs in KNOBS.values():
        assert run(THREE[name], (x,), target, knobs).message == ""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(target: str, layout: str) -> None:
    x = LAYOUTS[layout](data(12, 40, dtype=torch.bfloat16))
    for fn in (bias_grad, extremes):
        assert run(fn, (x,), target, KNOBS["small"]).message == ""


@pytest.mark.parametrize("target", TARGETS)
def test_nan_and_infinity(target: str) -> None:
    x = data(9, 40)
    x[3, 5], x[4, 6], x[5, 7], x[6, 7] = float("nan"), float("inf"), float("inf"), float("-inf")
    for fn in (column_sum, extremes, total):
        assert run(fn, (x,), target, KNOBS["small"]).message == ""


@pytest.mark.parametrize("target", TARGETS)
def test_no_rows(target: str) -> None:
    x = torch.empty(0, 24)
    for knobs in KNOBS.values():
        made = run(lambda x: (x.sum(0), (x > 0).any(0), (x > 0).all(0), x.mean(0)), (x,), target, knobs)
        assert made.message == ""
        assert made.outputs[0].tolist() == [0.0] * 24 and made.outputs[3].isnan().all()
        assert not made.outputs[1].any() and made.outputs[2].all()


def test_an_extreme_of_no_rows() -> None:
    traced = trace(lambda x: x.amax(0), (data(4, 24),))
    layouts = Layouts(check(traced.chain), (data(4, 24),), {"s0": 4})
    task = layouts.task(layouts.fusion.nodes, LIMITS["cpu"])
    kind = kind_of(task)
    source = kind.emit(task, kind.seed(task))
    kernel = Kernel(task.low, task.layout, source, read().cache)
    with pytest.raises(LaunchError, match="over no rows has no value"):
        kernel.bind([torch.empty(0, 24)], [torch.empty(24)], {"s0": 0})


def test_the_same_however_many_threads() -> None:
    x = data(3000, 64)
    one, two = (run(column_sum, (x,), "cpu", {"threads": n, "chunks": 8}).outputs[0] for n in (1, 2))
    assert torch.equal(one, two)


def test_what_is_no_one_kernel() -> None:
    """Rows that depend on a sum over them, sums over different axes, and a norm of sums end a segment."""
    for fn, count in (
        (lambda x: x - x.mean(0), 2),
        (lambda x: x.sum(0).softmax(-1), 2),
        (lambda x: (x - x.sum(0)).square().sum(0), 2),
    ):
        fusion = check(trace(fn, (data(6, 24),)).chain)
        assert len(fusion.fused()) >= count
        assert run(fn, (data(6, 24),)).message == ""
    fusion = Fusion(trace(lambda x: (x.sum(0), x.sum(1)), (data(6, 5, 24),)).chain)
    assert "different rows" in str(fusion.legal(fusion.nodes))


def test_what_is_refused() -> None:
    for fn, message in (
        (lambda x: x.softmax(0), "reduces a leading axis"),
        (lambda x: x.var(0), "reduces a leading axis"),
        (lambda x: x.argmax(0), "reduces a leading axis"),
    ):
        with pytest.raises(UnsupportedOp, match=message):
            check(trace(fn, (data(6, 24),)).chain)


def test_rows_too_wide_to_keep() -> None:
    args = norm_inputs(2, 40000, torch.bfloat16)
    traced = trace(norm_backward, args)
    layouts = Layouts(check(traced.chain), args, sizes_of(traced, args) or {})
    task = layouts.task(layouts.fusion.nodes, LIMITS["cuda"])
    with pytest.raises(Infeasible, match="too wide to be kept beside sums over rows"):
        kind_of(task).space(task)
    assert layouts.seed(layouts.fusion.nodes, LIMITS["cuda"]) is None


def test_groups_of_rows_keep_their_roles() -> None:
    """Rows that results keep and rows that a sum joins never run on as one, however they lie."""
    traced = trace(pooled, (data(5, 9, 40),))
    low = check(traced.chain).segment(tuple(traced.chain.nodes)).lowered
    assert [low.extents[a] for a in low.rows] == ["s0", "s1"] and len(low.reduced) == 1
    layout = layout_of(low, (Operand.contiguous((5, 9, 40)), Operand.contiguous((5, 40))), {"s0": 5, "s1": 9})
    assert len(layout.groups) == 2
