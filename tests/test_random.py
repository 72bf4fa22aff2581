"""Random numbers by an element's own number: the same from eager and every kernel, and good ones."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autofuse
from autofuse import cost, dispatch, random
from autofuse.chain import Chain
from autofuse.errors import InputError, UnsupportedOp
from autofuse.fusion import check
from autofuse.program import Layouts, Program
from autofuse.settings import read
from autofuse.trace import trace
from autofuse.traced import sizes_of
from tests.kernel_cases import LAYOUTS, LIMITS, NAN, data, run
from tests.test_kernels import FEW_FORMS, TILES

SEED, OFFSET = torch.tensor(-123456789012345), torch.tensor(7)
N = 1 << 20
TARGETS = ["cpu", pytest.param("cuda", marks=pytest.mark.interpret)]


def drawn(count: int, seed: int = 0, offset: int = 0) -> Tensor:
    return autofuse.uniform(torch.empty(count), seed, offset).double()


def correlation(x: Tensor, y: Tensor) -> float:
    return float(((x - 0.5) * (y - 0.5)).mean() * 12)


# ---- the numbers: fixed seeds, so that a bound of four standard deviations holds or does not


def flatness(x: Tensor, bins: int = 256) -> float:
    """Standard deviations that chi-square over equal bins lies from its mean."""
    counts = torch.bincount((x.flatten() * bins).long(), minlength=bins).double()
    expected = x.numel() / bins
    return float((((counts - expected) ** 2).sum() / expected - (bins - 1)) / math.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (1, 0), (0, 1), (2**40, 3), (-1, 2**33), (12345, 10**12)])
def test_moments(seed: int, offset: int) -> None:
    x = drawn(N, seed, offset)
    assert float(x.min()) >= 0 and float(x.max()) < 1
    assert torch.equal(x * 2**24, (x * 2**24).round())
    assert abs(float(x.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / N)
    assert abs(float(x.var()) - 1 / 12) < 4 * math.sqrt((1 / 80 - 1 / 144) / N)
    assert abs(flatness(x)) < 4
    assert abs(flatness(x * 256 % 1)) < 4  # the next eight bits
    assert abs(flatness(x * 65536 % 1)) < 4  # and the last


@pytest.mark.parametrize("apart", [1, 2, 16, 1024, 4096, 2**16])
def test_neighbours(apart: int) -> None:
    """Elements beside each other, or in rows of a power of two beside each other, know nothing of each other."""
    x = drawn(N, 3)
    left, right = x[:-apart], x[apart:]
    assert abs(correlation(left, right)) < 4 / math.sqrt(N)
    pairs = ((left * 16).floor() * 16 + (right * 16).floor()) / 256
    assert abs(flatness(pairs)) < 4


@pytest.mark.parametrize(
    ("one", "other"), [((0, 0), (1, 0)), ((0, 0), (0, 1)), ((5, 1), (1, 5)), ((0, 0), (2**32, 0)), ((9, 0), (9, 2**32))]
)
def test_streams(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Two seeds, or two offsets: not the same numbers, nor the same a little further on or in another order."""
    x, y = drawn(N, *one), drawn(N, *other)
    for apart in (0, 1, 2, 4096):
        assert abs(correlation(x[: N - apart], y[apart:])) < 4 / math.sqrt(N)
    index = torch.arange(N)
    for flipped in (1, 5, 2**10):
        assert abs(correlation(x, y[index ^ flipped])) < 4 / math.sqrt(N)
    assert float((x == y).double().mean()) < 1e-5


def test_one_element_over_seeds_and_offsets() -> None:
    zero, many = torch.tensor(0), torch.arange(N)
    for index in (zero, torch.tensor(12345)):
        for seed, offset in ((many, zero), (zero, many), (many << 32, zero), (zero, many << 32)):
            x = random.bits(index, *random.keys(seed, offset)).double() * 2.0**-24
            assert abs(float(x.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / N)
            assert abs(flatness(x)) < 4
            assert abs(correlation(x[:-1], x[1:])) < 4 / math.sqrt(N)


def test_elements_past_32_bits() -> None:
    k = random.keys(torch.tensor(1), torch.tensor(0))
    low, high = torch.arange(N), torch.arange(N) + 2**32
    x, y = (random.bits(i, *k).double() * 2.0**-24 for i in (low, high))
    assert abs(correlation(x, y)) < 4 / math.sqrt(N)
    assert abs(flatness(y)) < 4
    assert [int(b) for b in random.bits(high[:9], *k)] == [random.bits(2**32 + i, *random.keys(1, 0)) for i in range(9)]


def test_the_numbers_stay_what_they_are() -> None:
    """A stored mask's seed must mean the same mask in every version."""
    numbers = (autofuse.uniform(torch.empty(4), 42, 1) * 2**24).long().tolist()
    assert numbers == [random.bits(i, *random.keys(42, 1)) for i in range(4)]
    assert numbers == [7145187, 16161692, 9869975, 5191505]


# ---- eager


def test_eager() -> None:
    x = data(5, 7, 3)
    one = autofuse.uniform(x, 3, 4)
    assert (one.shape, one.dtype, one.is_contiguous()) == (x.shape, torch.float32, True)
    assert torch.equal(one, autofuse.uniform(x.transpose(0, 2).contiguous().transpose(0, 2).bfloat16(), torch.tensor(3), 4))
    assert torch.equal(one.flatten(), autofuse.uniform(torch.empty(105), 3, torch.tensor(4)))
    assert autofuse.uniform(torch.empty(0, 3), 1).shape == (0, 3)
    assert autofuse.uniform(torch.empty(2, device="meta"), torch.tensor(1, device="meta"), 2).shape == (2,)
    y = autofuse.dropout(x, 0.25, 3, 4)
    assert torch.equal(y, torch.where(one >= 0.25, x / 0.75, 0.0)) or torch.allclose(y, torch.where(one >= 0.25, x / 0.75, 0.0))
    z = autofuse.drop_path(data(64, 3, 5), 0.5, 3)
    kept = (z != 0).flatten(1)
    assert torch.equal(kept.all(1), kept.any(1)) and 16 < int(kept.all(1).sum()) < 48
    assert torch.equal(autofuse.dropout(x, 0, 1), x) and torch.equal(autofuse.drop_path(x, 1, 1), torch.zeros_like(x))


def test_rate() -> None:
    for p in (0.1, 0.5, 0.9):
        kept = float((autofuse.dropout(torch.ones(N), p, 5) != 0).double().mean())
        assert abs(kept - (1 - p)) < 4 * math.sqrt(p * (1 - p) / N)


def test_gradient() -> None:
    x = data(6, 24).requires_grad_()
    autofuse.dropout(x, 0.5, 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, autofuse.dropout(torch.ones(6, 24), 0.5, 3))


def test_compiled_by_torch() -> None:
    fn = torch.compile(lambda x, s: autofuse.dropout(x * 2, 0.5, s, 1), backend="aot_eager", fullgraph=True)
    assert torch.equal(fn(data(6, 24), SEED), autofuse.dropout(data(6, 24) * 2, 0.5, SEED, 1))


def test_operator() -> None:
    torch.library.opcheck(torch.ops.autofuse.uniform.default, (data(3, 5), SEED, OFFSET))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: autofuse.dropout(x, 1.5, 1), "p=1.5 is no probability"),
        (lambda x: autofuse.dropout(x, NAN, 1), "p=nan"),
        (lambda x: autofuse.drop_path(x, True, 1), "p=True"),
        (lambda x: autofuse.drop_path(x, torch.tensor(0.5), 1), "no probability"),  # type: ignore[arg-type]
        (lambda x: autofuse.dropout(x, 0.5, 1.5), "seed=1.5 is no 64-bit integer"),  # type: ignore[arg-type]
        (lambda x: autofuse.dropout(x, 0.5, 1, 2**63), "offset=9223372036854775808"),
        (lambda x: autofuse.uniform(x, torch.tensor(1, dtype=torch.int32)), "seed is a torch.int32 tensor of 0 axes on cpu"),
        (lambda x: autofuse.uniform(x, 1, torch.tensor([1])), "offset is a torch.int64 tensor of 1 axes"),
        (lambda x: autofuse.dropout(x.long(), 0.5, 1), "torch.int64, which does not scale"),
        (lambda x: autofuse.drop_path(x[0, 0], 0.5, 1), "no axis"),
    ],
)
def test_bad_arguments(call: Callable[[Tensor], Tensor], match: str) -> None:
    with pytest.raises(InputError, match=match):
        call(data(4, 6))
    with pytest.raises((InputError, UnsupportedOp), match=match):
        trace(call, (data(4, 6),))


# ---- kernels


def every(x: Tensor, seed: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
    return (
        autofuse.uniform(x, seed, offset), autofuse.uniform(x * 2, 5), autofuse.dropout(x * 1.5, 0.3, seed, 2**40 + 1) + 1,
        autofuse.drop_path(x, 0.5, 2**63 - 1, offset), autofuse.uniform(x[..., :1], offset, seed) + 0 * x,
    )  # fmt: skip


def reduced(x: Tensor, seed: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
    h = F.layer_norm(autofuse.dropout(F.gelu(x), 0.2, seed, offset) + x, (x.shape[-1],))
    return h, autofuse.dropout(F.softmax(x, -1), 0.4, seed, 2)


def turned(x: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Numbered in another order than the output: along a static axis, an element's number strides over rows."""
    return autofuse.uniform(x.transpose(-1, -2), seed, offset).transpose(-1, -2)[..., 1:] + x[..., 1:]


FUNCTIONS: dict[str, Callable[..., Any]] = {"every": every, "reduced": reduced, "turned": turned}
SHAPES = [(1, 1), (7, 33), (0, 8), (3, 5, 40), (2, 3, 4, 24)]


def check_kernels(fn: Callable[..., Any], x: Tensor, target: str, knobs: Any = None, groups: str = "fused") -> None:
    made = run(fn, (x, SEED, OFFSET), target, knobs, groups)
    assert made.message == ""
    told = torch.utils._pytree.tree_leaves(fn(x, SEED, OFFSET))
    for k, (y, e) in enumerate(zip(made.outputs, told, strict=True)):
        if made.chain.values[made.chain.outputs[k]].name == "uniform":
            assert torch.equal(y, e)
        elif fn is not reduced:
            assert torch.equal(y == 0, e == 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_c(name: str, shape: tuple[int, ...]) -> None:
    if name == "reduced" and shape == (1, 1):
        shape = (1, 3)
    for groups in ("fused", "unfused"):
        check_kernels(FUNCTIONS[name], data(*shape), "cpu", groups=groups)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts_c(name: str, layout: str) -> None:
    check_kernels(FUNCTIONS[name], LAYOUTS[layout](data(6, 40)), "cpu")
    check_kernels(FUNCTIONS[name], LAYOUTS[layout](data(6, 40, dtype=torch.bfloat16)), "cpu", {"keep": "all"})


@pytest.mark.interpret
@pytest.mark.parametrize("form", [*FEW_FORMS, *TILES])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_triton(name: str, form: str) -> None:
    if (form in FEW_FORMS) != (name == "reduced"):
        pytest.skip("a form of the other kernel kind")
    for x in (data(7, 33), data(3, 5, 40, dtype=torch.bfloat16), LAYOUTS["transposed"](data(6, 40))):
        check_kernels(FUNCTIONS[name], x, "cuda", {} if form == "flat" else {**FEW_FORMS, **TILES}[form])


@pytest.mark.parametrize("target", TARGETS)
def test_the_flat_form(target: str) -> None:
    made = run(lambda x, s: autofuse.dropout(x, 0.3, s), (data(7, 33), SEED), target, {"form": "flat", "block": 64})
    assert made.message == ""
    assert "numel" in made.sources[0]


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_mask_backwards(target: str) -> None:
    def forward(x: Tensor, w: Tensor, seed: Tensor) -> Tensor:
        return autofuse.dropout(F.layer_norm(x, (x.shape[-1],), w), 0.5, seed, 3)

    def backward(grad: Tensor, seed: Tensor) -> Tensor:
        return autofuse.dropout(grad, 0.5, seed, 3) * 2

    x = data(2, 9, 40)
    y = run(forward, (x, data(40, seed=1), SEED), target).outputs[0]
    grad = run(backward, (LAYOUTS["transposed"](torch.ones_like(x)), SEED), target).outputs[0]
    assert torch.equal(y == 0, grad == 0) and 0.3 < float((y == 0).double().mean()) < 0.7
    other = run(backward, (torch.ones_like(x), SEED + 1), target).outputs[0]
    assert not torch.equal(other, grad)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_past_32_bits(target: str) -> None:
    """Numbers of elements past 2^32, of which only a few are computed: along a column, and along rows."""
    seed = torch.tensor(9)
    cases: list[tuple[tuple[int, int], int]] = [((3, 2**33), 2**32 + 5), ((5, 2**31), 3)]
    for shape, start in cases:
        x = torch.zeros(1, 1).expand(shape)

        def fn(x: Tensor, seed: Tensor, start: int = start) -> Tensor:
            return autofuse.uniform(x, seed)[..., start : start + 40] + 0.0

        traced = trace(fn, (x, seed))
        sizes = sizes_of(traced, (x, seed))
        assert sizes is not None
        layouts = Layouts(check(traced.chain), [x, seed], sizes)
        plan, schedules = layouts.plan(layouts.fusion.fused(), LIMITS[target])
        (made,) = Program(layouts, plan, schedules, LIMITS[target], read().cache, torch.device("cpu"))([x, seed], sizes)
        index = torch.arange(shape[0])[:, None] * shape[1] + torch.arange(start, start + 40)
        wanted = random.bits(index, *random.keys(seed, torch.tensor(0))).float() * 2.0**-24
        assert torch.equal(made, wanted)


def test_a_chain_on_paper() -> None:
    """A chain of random numbers goes through JSON into a process that never imported the generator."""
    traced = trace(lambda x, s: autofuse.uniform(x, s, -(2**63)) * 2, (data(4, 6), SEED))
    assert "autofuse.uniform.default" in traced.chain.to_json()
    assert Chain.from_json(traced.chain.to_json()) == traced.chain
    code = (
        "import sys, torch; from autofuse.chain import Chain; from autofuse.reference import evaluate\n"
        "print(evaluate(Chain.from_json(sys.argv[1]), [torch.zeros(4, 6), torch.tensor(5)], {'s0': 4})[0].sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code, traced.chain.to_json()], capture_output=True, text=True, check=True)
    assert float(done.stdout) == float((autofuse.uniform(data(4, 6), 5, -(2**63)) * 2).sum())


def test_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.db"))
    dispatch.reload()

    def fn(x: Tensor, s: Tensor) -> Tensor:
        return autofuse.dropout(x, 0.5, s)

    fused = autofuse.fuse(fn)
    for seed in range(3):
        s = torch.tensor(seed)
        assert torch.equal(fused(data(6, 24), s), fn(data(6, 24), s))
    assert fused.explain(data(6, 24), SEED).tier == "heuristic"
    assert autofuse.tune(fn, [(data(64, 96), SEED)], trials=4, seconds=20).ok
    assert fused.explain(data(64, 96), SEED).tier == "exact"
    assert torch.equal(fused(data(64, 96), SEED), fn(data(64, 96), SEED))
    dispatch.reload()


def test_another_seed_is_no_new_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.db"))
    dispatch.reload()
    fused = autofuse.fuse(lambda x, s: autofuse.dropout(x, 0.5, s))
    with mock.patch("autofuse.trace.trace", wraps=trace) as traced:
        made = [fused(data(rows, 24), torch.tensor(seed)) for seed in range(3) for rows in (6, 7)]
    assert traced.call_count == 1
    assert not torch.equal(made[0], made[2])
    dispatch.reload()


def test_what_is_read_for_its_shape_costs_nothing() -> None:
    chain = trace(lambda x, s: autofuse.uniform(x, s) > 0.5, (data(4, 6), SEED)).chain
    assert cost.bytes_min(chain, {"s0": 4}) == 8 + 4 * 6
    chain = trace(lambda x, s: autofuse.dropout(x, 0.5, s), (data(4, 6), SEED)).chain
    assert cost.bytes_min(chain, {"s0": 4}) == 8 + 2 * 4 * 6 * 4


def test_exports() -> None:
    assert {"dropout", "drop_path", "uniform"} <= set(autofuse.__all__)
    assert all(getattr(autofuse, name) is not None for name in autofuse.__all__)
