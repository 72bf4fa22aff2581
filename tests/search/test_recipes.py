"""Recipes: tensors like the ones they were taken from, at the same and at other row counts."""

from __future__ import annotations

import json
from math import gcd
from typing import Any

import pytest
import torch

from autofuse.chain import Dim
from autofuse.kernels.layout import MAX_STEP
from autofuse.search import recipes
from autofuse.search.recipes import Recipe, make, recipes_of, strides_at

BASE = torch.randn(8, 6, 64)


def padded() -> torch.Tensor:
    return torch.randn(8, 80)[:, :64]


def misaligned() -> torch.Tensor:
    return torch.randn(8 * 64 + 1)[1:].view(8, 64)


LAYOUTS: dict[str, tuple[torch.Tensor, tuple[Dim, ...], dict[str, int], tuple[int, ...]]] = {
    # tensor, shape with row symbols, other sizes, the strides there
    "contiguous": (BASE, ("s0", "s1", 64), {"s0": 3, "s1": 2}, (128, 64, 1)),
    "transposed rows": (BASE.transpose(0, 1), ("s1", "s0", 64), {"s0": 3, "s1": 2}, (64, 128, 1)),
    "transposed columns": (torch.randn(64, 8).t(), ("s0", 64), {"s0": 3}, (1, 3)),
    "static rows inside": (BASE.permute(2, 0, 1), (64, "s0", 6), {"s0": 3}, (1, 384, 64)),
    "padded rows": (padded(), ("s0", 64), {"s0": 3}, (80, 1)),
    "expanded": (torch.randn(1, 64).expand(8, 64), ("s0", 64), {"s0": 3}, (0, 1)),
    "expanded columns": (torch.randn(8, 1).expand(8, 64), ("s0", 64), {"s0": 3}, (1, 0)),
    "every second column": (torch.randn(8, 128)[:, ::2], ("s0", 64), {"s0": 3}, (128, 2)),
    "a slice of rows": (torch.randn(8, 12, 64)[:, :6], ("s0", "s1", 64), {"s0": 3, "s1": 2}, (256, 64, 1)),
    "one row": (torch.randn(1, 64), ("s0", 64), {"s0": 5}, (64, 1)),
    "one row of odd stride": (
        torch.empty_strided((1, 6, 64), (7, 64, 1)),
        ("s0", "s1", 64),
        {"s0": 3, "s1": 2},
        (128, 64, 1),
    ),
    "window": (torch.randn(80).unfold(0, 64, 2), ("s0", 64), {"s0": 3}, (2, 1)),
    "misaligned": (misaligned(), ("s0", 64), {"s0": 3}, (64, 1)),
    "scalar": (torch.tensor(3.0), (), {}, ()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_kept(name: str) -> None:
    tensor, shape, other, strides = LAYOUTS[name]
    r = Recipe.of(tensor)
    own = {d: n for d, n in zip(shape, tensor.shape, strict=True) if isinstance(d, str)}
    (same,) = make([r], [shape], own, "cpu", 0)
    assert same.shape == tensor.shape and same.stride() == tensor.stride() and same.dtype == tensor.dtype
    assert same.data_ptr() % 16 == tensor.data_ptr() % 16
    assert bool(same.isfinite().all()), "every element that the tensor shows has a value"
    (small,) = make([r], [shape], other, "cpu", 0)
    assert small.stride() == strides and small.data_ptr() % 16 == tensor.data_ptr() % 16
    assert [d if isinstance(d, int) else other[d] for d in shape] == list(small.shape)
    assert bool(small.isfinite().all())


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_divides_the_strides_of_rows_does_so_at_other_counts(name: str) -> None:
    """A kernel is told the power of two by which rows are apart (layout.Layout.steps), and is checked at other row counts."""
    tensor, shape, _, strides = LAYOUTS[name]

    def of_rows(every: tuple[int, ...]) -> list[int]:
        return [s for d, s in zip(shape, every, strict=True) if isinstance(d, str)]

    step = gcd(MAX_STEP, *of_rows(tensor.stride()))
    assert all(s % step == 0 for s in of_rows(strides))


def test_padding_is_poisoned() -> None:
    (made,) = make([Recipe.of(padded())], [("s0", 64)], {"s0": 8}, "cpu", 0)
    assert made.as_strided((7, 16), (80, 1), 64).isnan().all(), "a kernel that reads padding must show it"


def test_json_round_trip() -> None:
    for tensor, *_ in LAYOUTS.values():
        r = Recipe.of(tensor)
        assert Recipe.from_json(json.loads(json.dumps(r.to_json(), allow_nan=False))) == r


def test_aliases_stay_one_tensor() -> None:
    x = torch.randn(8, 64)
    rs = recipes_of([x, x.clone(), x, x.t()])
    assert [r.alias for r in rs] == [None, None, 0, None]
    made = make(rs, [("s0", 64), ("s0", 64), ("s0", 64), (64, "s0")], {"s0": 3}, "cpu", 0)
    assert made[2] is made[0] and made[1] is not made[0] and not torch.equal(made[0], made[1])


def test_seeds() -> None:
    r = [Recipe.of(torch.randn(8, 64))]
    a, b, c = (make(r, [("s0", 64)], {"s0": 8}, "cpu", seed)[0] for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def remade(t: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return make([Recipe.of(t)], [tuple(t.shape)], {}, "cpu", seed)[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_float_values(dtype: torch.dtype) -> None:
    y = remade((torch.randn(64, 256) * 3 + 10).to(dtype)).double()
    assert 9.5 < y.mean() < 10.5 and 2.5 < y.std() < 3.5
    assert (remade(torch.rand(64, 256).to(dtype)).double() >= 0).all(), "values that were never negative stay so"


def test_masks_labels_and_bools() -> None:
    mask = torch.zeros(64, 256).masked_fill_(torch.rand(64, 256) < 0.25, -torch.inf)
    y = remade(mask)
    assert 0.2 < float((y == -torch.inf).float().mean()) < 0.3 and bool(((y == 0) | (y == -torch.inf)).all())
    labels = torch.randint(5, 900, (4096,))
    z = remade(labels)
    assert z.dtype is torch.int64 and z.min() >= labels.min() and z.max() <= labels.max() and z.unique().numel() > 400
    assert 0.15 < float(remade(torch.rand(4096) < 0.2).float().mean()) < 0.25
    assert bool(remade(torch.full((64,), -torch.inf)).eq(-torch.inf).all())
    assert bool(remade(torch.zeros(64)).eq(0).all())
    assert remade(torch.tensor([2**63 - 1, -(2**63)])).dtype is torch.int64
    assert remade(torch.full((8,), torch.nan)).isfinite().all()


def test_indices_stay_below_fewer_rows() -> None:
    r = recipes_of([torch.arange(16), torch.randn(16, 4)])
    shapes: list[tuple[Dim, ...]] = [("s0",), ("s0", 4)]
    assert make(r, shapes, {"s0": 3}, "cpu", 0)[0].max() < 3
    assert make(r, shapes, {"s0": 16}, "cpu", 0)[0].max() > 3


def test_large_tensors_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "SAMPLE", 1024)
    x = torch.ones(512, 128)
    x[:, 0] = 0.0  # every 64th element is the first or the middle of its row: a regular sample would see half zeros
    r = Recipe.of(x)
    assert 0 < r.zeros < 0.05 and r.low == 0 and r.high == 1
    assert Recipe.of(x.to(torch.float8_e4m3fn)).high == 1
    assert Recipe.of(x.t()).sizes == (128, 512)


def test_empty() -> None:
    (made,) = make([Recipe.of(torch.empty(0, 64))], [("s0", 64)], {"s0": 0}, "cpu", 0)
    assert made.shape == (0, 64)
    (made,) = make([Recipe.of(torch.empty(0, 64))], [("s0", 64)], {"s0": 3}, "cpu", 0)
    assert made.shape == (3, 64) and made.isfinite().all()


def test_refused() -> None:
    from autofuse.errors import InputError

    bad: Any = {"sizes": [1]}
    with pytest.raises(InputError):
        Recipe.from_json(bad)
    with pytest.raises(InputError):
        Recipe.of(torch.zeros(2, dtype=torch.complex64))
    assert strides_at(Recipe.of(torch.randn(4, 4)), (4, 4)) == (4, 1)
