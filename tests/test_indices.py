"""Where an element stands, as a value: row numbers, causal masks by index, the numbers of merged axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.errors import TraceError
from autofuse.fusion import check
from autofuse.kernels.expr import Access, walk
from autofuse.kernels.layout import INDEX, Addressing, Operand, bind, layout_of
from autofuse.kernels.lower import lower
from autofuse.trace import trace
from tests.kernel_cases import INF, NAN, Knobs, data, run, sliced, transposed
from tests.test_kernels import FEW_FORMS, TILES

Fn = Callable[..., Any]


def causal(s: Tensor) -> Tensor:
    q = torch.arange(s.shape[-2], device=s.device)[:, None]
    k = torch.arange(s.shape[-1], device=s.device)
    return F.softmax(torch.where(k <= q, s * 0.5, -INF), -1)


def causal_filled(s: Tensor) -> Tensor:
    q = torch.arange(s.shape[-2], device=s.device)[:, None]
    k = torch.arange(s.shape[-1], device=s.device)
    return F.softmax((s * 0.5).masked_fill(k > q, -INF), -1)


def causal_by_tril(s: Tensor) -> Tensor:
    keep = torch.ones(s.shape[-2], s.shape[-1], dtype=torch.bool, device=s.device).tril()
    return F.softmax(s.masked_fill(~keep, -INF), -1)


def window(s: Tensor) -> Tensor:
    keep = torch.ones_like(s, dtype=torch.bool).tril(1).triu(-2)
    return F.softmax(torch.where(keep, s, -1e9), -1)


def alibi(s: Tensor) -> Tensor:
    """A slope a head, times how far away the key is: two row axes' numbers at once."""
    head = torch.arange(s.shape[1], device=s.device)[:, None, None]
    far = torch.arange(s.shape[-1], device=s.device) - torch.arange(s.shape[-2], device=s.device)[:, None]
    return F.softmax(s + far * (0.5 / (head + 1)), -1)


REDUCED: dict[str, Fn] = {
    "causal": causal, "causal_filled": causal_filled, "causal_by_tril": causal_by_tril, "window": window, "alibi": alibi,
    "first_row": lambda s: torch.where(torch.arange(s.shape[0])[:, None, None, None] == 0, s, s.amax(-1, keepdim=True)),
}  # fmt: skip
POINTWISE: dict[str, Fn] = {
    "rows": lambda s: s * torch.arange(s.shape[0])[:, None, None, None],
    "inner_rows": lambda s: (s + torch.arange(s.shape[2])[:, None], torch.arange(s.shape[1])[:, None, None] - s),
    "merged": lambda s: s + torch.arange(s.shape[1] * s.shape[2]).view(s.shape[1], s.shape[2], 1) / 16,
    "everything": lambda s: s * torch.arange(s.numel()).view(s.shape) / 64,
    "small": lambda s: (s > 0) ^ (torch.arange(s.shape[2], dtype=torch.int32)[:, None] % 2 == 0),
    "tril": lambda s: (s.tril(), s.triu(1), (s * 2).tril(-1) + 1),
    "stepped": lambda s: s + torch.arange(3, 3 + 2 * s.shape[-1], 2) - torch.arange(s.shape[2], dtype=s.dtype)[:, None],
}
SHAPES = [(2, 3, 5, 8), (1, 3, 7, 33), (3, 1, 1, 6), (1, 1, 40, 17)]
LAYOUTS: dict[str, Fn] = {
    "plain": lambda x: x, "transposed": transposed, "sliced": sliced,
    "heads_inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every_other": lambda x: x[:, ::2], "expanded": lambda x: x[:1].expand(x.shape),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*REDUCED, *POINTWISE])
def test_c(name: str, shape: tuple[int, ...]) -> None:
    for groups in ("fused", "unfused"):
        assert run({**REDUCED, **POINTWISE}[name], (data(*shape),), groups=groups).message == ""


def test_square_masks() -> None:
    """A mask of the last axis' length both ways, or cut from a longer one: queries are then static too."""
    longest = torch.ones(16, 16, dtype=torch.bool).tril()
    s = data(2, 3, 9, 9)
    for fn in (
        lambda s: s.masked_fill(~torch.ones(s.shape[-1], s.shape[-1], dtype=torch.bool).tril(), -INF).softmax(-1),
        lambda s: torch.where(longest[: s.shape[-2], : s.shape[-1]], s, -INF).softmax(-1),
    ):
        for given in (s, s[:1], s[:, :1]):
            assert run(fn, (given,)).message == ""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*REDUCED, *POINTWISE])
def test_layouts_c(name: str, layout: str) -> None:
    x = LAYOUTS[layout](data(2, 4, 5, 12))
    choices: list[Knobs] = [{"keep": "all", "chunk_cols": 8, "row_block": 1}, {"keep": "none", "vector": 512}]
    for knobs in choices:
        assert run({**REDUCED, **POINTWISE}[name], (x.bfloat16() if layout == "plain" else x,), knobs=knobs).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("form", FEW_FORMS)
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_triton(name: str, form: str) -> None:
    for layout, shape in (("plain", (2, 3, 5, 8)), ("transposed", (1, 2, 7, 33)), ("heads_inside", (2, 3, 3, 40))):
        assert run(REDUCED[name], (LAYOUTS[layout](data(*shape)),), "cuda", FEW_FORMS[form]).message == "", layout


@pytest.mark.interpret
@pytest.mark.parametrize("form", TILES)
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_triton(name: str, form: str) -> None:
    for layout, shape in (("plain", (2, 3, 5, 8)), ("every_other", (1, 4, 7, 33)), ("heads_inside", (2, 3, 3, 70))):
        knobs: Knobs = {} if form == "flat" else TILES[form]
        assert run(POINTWISE[name], (LAYOUTS[layout](data(*shape)),), "cuda", knobs).message == "", layout


def flat(x: Tensor) -> Tensor:
    return x * torch.arange(x.numel()).view(x.shape)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.interpret)])
def test_the_flat_form(target: str) -> None:
    """An element's number in the whole is the flat index itself; a row's or column's own number is not."""
    made = run(flat, (data(7, 33),), target, {"form": "flat", "block": 64})
    assert made.message == ""
    assert "numel" in made.sources[0]
    for fn in (lambda x: x * torch.arange(x.shape[0])[:, None], lambda x: x * torch.arange(x.shape[1])):
        made = run(fn, (data(7, 33),), target)
        assert made.message == ""
        assert "numel" not in made.sources[0]


def test_what_is_dropped_may_be_anything() -> None:
    x = data(4, 6, 6)
    x[:, 0, 3:] = NAN
    x[:, 2, 5] = INF
    made = run(lambda x: (x.tril(), x.tril().sum(-1)), (x,))
    assert made.message == ""
    assert bool(made.outputs[0].isfinite().all())


def test_a_row_past_32_bits() -> None:
    """The number of an element past 2^32 (a tensor of this size is not made): the scalars of the launch say it."""
    chain = trace(flat, (data(2, 8),)).chain
    low = lower(chain)
    sizes, cols = {"s0": 2**31 - 1}, 8
    operands = [Operand((2**31 - 1, cols), (cols, 1))] * 2
    layout = layout_of(low, operands, sizes)
    addressing = Addressing(low, layout)
    (index,) = [e for e in walk([s.value for s in low.stores]) if e.op == "index"]
    address = addressing.address(INDEX, Access(INDEX, (index.attr,)))
    (factor,) = bind([addressing.args[arg] for _, arg in address.rows], layout, low, operands, sizes)
    (col,) = address.cols
    assert factor * (2**31 - 2) + col[1] * (cols - 1) + address.const == (2**31 - 1) * cols - 1


def test_a_row_count_as_a_value_is_refused() -> None:
    for fn, match in (
        (lambda x: x * (torch.arange(x.shape[0]) / x.shape[0])[:, None], "row count"),
        (lambda x: x * torch.arange(x.shape[0], 2 * x.shape[0])[:, None], "row count"),
        (lambda x: x * torch.arange(0, x.shape[0] ** 2, x.shape[0])[:, None], "row"),
    ):
        with pytest.raises(TraceError, match=match):
            check(trace(fn, (data(6, 24),)).chain)


def test_a_chain_of_indices_alone() -> None:
    """No element of the input is read, only its shape."""
    assert run(lambda x: torch.ones_like(x).tril() + torch.arange(x.shape[0])[:, None], (data(5, 9),)).message == ""
