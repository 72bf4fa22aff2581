"""Each rule of the comparison, on tensors made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from autofuse.accuracy import Verdict, compare, expect, flipping, ulp
from autofuse.chain import INPUT, Chain, Dtype, Ref, Value
from autofuse.trace import trace

NAN, INF = math.nan, math.inf


def value(
    dtype: str, op: str = "aten.mul.Tensor", args: tuple[object, ...] = (), kwargs: tuple[tuple[str, object], ...] = ()
) -> Value:
    return Value(op, args, kwargs, (4, 64), dtype)


def judge(y: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, flips: bool = False) -> Verdict:
    name = str(y.dtype).removeprefix("torch.")
    return compare(y, oracle, eager, value(name), flips=flips)


def ones(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, oracle and eager that agree: each row 1."""
    x = torch.ones(4, 64, dtype=dtype)
    return x.clone(), x.double(), x.clone()


@pytest.mark.parametrize(
    ("dtype", "at", "unit"),
    [
        (torch.float32, 1.0, 2**-23), (torch.float32, 1.99, 2**-23), (torch.float32, 2.0, 2**-22),
        (torch.bfloat16, 1.0, 2**-7), (torch.float16, 1.0, 2**-10), (torch.float16, 0.0, 2**-24),
        (torch.float8_e4m3fn, 256.0, 32.0), (torch.float8_e5m2, 1.0, 0.25), (torch.float64, 1.0, 2**-52),
    ],
)  # fmt: skip
def test_ulp(dtype: torch.dtype, at: float, unit: float) -> None:
    assert float(ulp(torch.tensor(at, dtype=torch.float64), dtype)) == unit


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float16, 4), (torch.float64, 64)])
def test_units_in_the_last_place(dtype: torch.dtype, units: int) -> None:
    """Four; more in float64, where the oracle is no more exact than eager is."""
    unit = torch.finfo(dtype).eps
    y, o, e = ones(dtype)
    y[2, 5] = 1 + units * unit
    assert judge(y, o, e).ok
    y[2, 5] = 1 + (units + 1) * unit
    bad = judge(y, o, e)
    assert not bad.ok and "[2, 5]" in bad.message and bad.max_error == pytest.approx((units + 1) * unit)


def test_twice_eagers_error_in_the_same_row() -> None:
    y, o, e = ones()
    e[1, 0] = 1.01
    y[1, 7] = 1.02
    assert judge(y, o, e).ok and judge(y, o, e).eager_error == pytest.approx(0.01, rel=1e-3)
    y[1, 7] = 1.021
    assert not judge(y, o, e).ok
    y, o, e = ones()
    e[1, 0], y[2, 7] = 1.01, 1.02
    assert not judge(y, o, e).ok, "eager's error in another row excuses nothing"


def test_the_rows_largest_value_sets_the_unit() -> None:
    y, o, e = ones()
    for t in (y, o, e):
        t[0, 0] = 1024.0
    y[0, 9] = 1 + 4 * 2**-13
    assert judge(y, o, e).ok
    y[1, 9] = 1 + 4 * 2**-13
    assert not judge(y, o, e).ok


def test_short_rows_are_pooled() -> None:
    """One element a row is no sample: eager may be right there by chance."""
    o = torch.ones(64, 1, dtype=torch.float64)
    y, e = o.float(), o.float()
    e[3], y[9] = 1.01, 1.015
    assert judge(y, o, e).ok
    one = compare(y[9:10], o[9:10], o[9:10].float(), value("float32"), floor=0.01)
    assert one.ok and not compare(y[9:10], o[9:10], o[9:10].float(), value("float32")).ok


@pytest.mark.parametrize(
    ("y", "oracle", "eager", "ok"),
    [
        (NAN, NAN, NAN, True), (1.0, NAN, NAN, False), (INF, INF, INF, True), (-INF, INF, INF, False),
        (NAN, INF, INF, False), (1.0, INF, INF, False), (NAN, 1.0, 1.0, False), (INF, 1.0, 1.0, False),
        (INF, 1.0, INF, True), (NAN, 1.0, NAN, True), (1.0, 1.0, INF, True), (NAN, INF, NAN, True),
        (INF, INF, NAN, True), (INF, NAN, 1.0, False), (2.0, 1.0, INF, False), (1.0, NAN, 1.0, True),
    ],
)  # fmt: skip
def test_not_finite(y: float, oracle: float, eager: float, ok: bool) -> None:
    a, o, e = ones()
    a[1, 2], o[1, 2], e[1, 2] = y, oracle, eager
    assert judge(a, o, e).ok is ok
    if not (math.isfinite(y) and math.isfinite(oracle)):
        assert judge(a, o, e, flips=True).ok is ok, "a lost value is no flip"


def test_fp8_overflow_saturates() -> None:
    o = torch.full((4, 64), 1000.0, dtype=torch.float64)
    y = torch.full((4, 64), 448.0).to(torch.float8_e4m3fn)
    nan = torch.full((4, 64), NAN).to(torch.float8_e4m3fn)
    assert judge(y, o, nan).ok and judge(y, o, y.clone()).ok
    assert not judge(nan, o, y).ok
    assert not judge(torch.ones(4, 64).to(torch.float8_e4m3fn), o, nan).ok
    assert judge(nan, torch.full((4, 64), NAN, dtype=torch.float64), nan).ok


def test_integers() -> None:
    o = torch.arange(256).reshape(4, 64)
    y = o.clone()
    assert judge(y, o, o).ok
    y[0, 0] += 1
    assert not judge(y, o, o).ok and judge(y, o, o, flips=True).ok
    y[0, 0] += 1
    assert not judge(y, o, o, flips=True).ok
    e = o.clone()
    e[0, 5] += 1
    assert judge(y, o, e, flips=True).ok


def test_bools() -> None:
    o = torch.zeros(64, 64, dtype=torch.bool)
    y = o.clone()
    y[0, :4] = True
    assert not judge(y, o, o).ok and judge(y, o, o, flips=True).ok
    y[0, 4] = True
    assert not judge(y, o, o, flips=True).ok
    e = o.clone()
    e[1, 0] = True
    assert judge(y, o, e, flips=True).ok
    raw = torch.full((64, 64), 0xFF, dtype=torch.uint8).view(torch.bool)
    assert not judge(raw, torch.ones(64, 64, dtype=torch.bool), torch.ones(64, 64, dtype=torch.bool)).ok


def test_flips_of_floats() -> None:
    """A value behind a rounding may be a whole step off, at a few places."""
    o = torch.ones(64, 64, dtype=torch.float64)
    y, e = o.float(), o.float()
    y[5, :4] = 2.0
    assert judge(y, o, e, flips=True).ok and not judge(y, o, e).ok
    y[6, 0] = 2.0
    assert not judge(y, o, e, flips=True).ok
    e[40, :2] = 2.0
    e[41:, 0] = 1.0
    assert judge(y, o, e, flips=True).ok, "where eager flips too, twice as many may"
    small = torch.ones(1, 8, dtype=torch.float64)
    z = small.float()
    z[0, :2] = 2.0
    assert not judge(z, small, small.float(), flips=True).ok, "a small output has few flips"


def test_argmax_by_the_chosen_values() -> None:
    source = torch.tensor([[1.0, 5.0, 5.0, 2.0], [NAN, 1.0, NAN, 2.0]], dtype=torch.float64)
    o = torch.tensor([1, 0])
    for op, kw in (("aten.argmax.default", ()), ("aten.argmax.default", (("dim", -1),))):
        v = value("int64", op, (Ref(0), -1, False) if not kw else (Ref(0),), kw)

        def verdict(a: int, b: int, v: Value = v) -> bool:
            return compare(torch.tensor([a, b]), o, o, v, source=source, source_dtype=torch.float32).ok

        assert verdict(1, 0) and verdict(2, 2)
        assert not verdict(3, 0) and not verdict(1, 1) and not verdict(4, 0) and not verdict(-1, 0)
    whole = value("int64", "aten.argmax.default", (Ref(0),))
    flat = torch.tensor([3.0, 7.0, 7.0], dtype=torch.float64)
    assert compare(torch.tensor(2), torch.tensor(1), torch.tensor(1), whole, source=flat).ok
    keep = value("int64", "aten.argmax.default", (Ref(0), 1, True))
    assert compare(torch.tensor([[2], [2]]), o[:, None], o[:, None], keep, source=source).ok


def test_shape_and_dtype() -> None:
    y, o, e = ones()
    assert "eager gives" in judge(y[:3], o, e).message
    assert not compare(y.double(), o, e, value("float32")).ok
    empty = torch.empty(0, 64)
    assert judge(empty, empty.double(), empty).ok


def test_which_values_may_flip() -> None:
    x = torch.randn(4, 64)

    def last(fn: object) -> bool:
        chain = trace(fn, (x,)).chain  # type: ignore[arg-type]
        return chain.outputs[-1] in flipping(chain)

    assert not last(lambda x: x * 2 + 1)
    assert not last(lambda x: torch.where(x > 0, x, x * 0.1)), "a comparison of an input is exact"
    assert last(lambda x: torch.where(x * 0.3 > 0.1, x, -x))
    assert last(lambda x: (x * 0.3).round() * 2)
    assert last(lambda x: (x * 0.3).to(torch.int8))
    assert last(lambda x: (x * 0.3).to(torch.bfloat16).float() * 2)
    assert not last(lambda x: (x * 0.3).to(torch.bfloat16))


def test_expect_runs_oracle_and_eager() -> None:
    x = torch.randn(8, 64)
    chain = trace(lambda x: (torch.softmax(x, -1), x.argmax(-1)), (x,)).chain
    made = expect(chain, [x], {"s0": 8})
    assert [e.verdict(y).ok for e, y in zip(made, (torch.softmax(x, -1), x.argmax(-1)), strict=True)] == [True, True]
    assert not made[0].verdict(torch.softmax(x, -1) * 1.001).ok


def test_casts_in_a_chain_made_by_hand() -> None:
    values = [
        Value(INPUT, (), (), ("s0", 64), "float32"),
        Value("aten.exp.default", (Ref(0),), (), ("s0", 64), "float32"),
        Value("aten.to.dtype", (Ref(1), Dtype("float8_e4m3fn")), (), ("s0", 64), "float8_e4m3fn"),
    ]
    chain = Chain.build(values, [2])
    x = torch.full((2, 64), 10.0)  # exp(10) is past fp8's range
    (e,) = expect(chain, [x], {"s0": 2})
    assert e.verdict(torch.full((2, 64), 448.0).to(torch.float8_e4m3fn)).ok


def test_the_usual_error_of_eager_counts_for_a_row_in_which_it_was_lucky() -> None:
    torch.manual_seed(0)
    o = torch.rand(100, 64, dtype=torch.float64) + 1
    e = (o * (1 + 1e-5)).float()
    e[7] = o[7].float()
    y = o.float()
    y[7] = (o[7] * (1 + 1.5e-5)).float()
    assert judge(y, o, e).ok
    y[7] = (o[7] * (1 + 5e-5)).float()
    assert not judge(y, o, e).ok


def test_a_sum_that_cancels_is_known_to_a_last_bit_of_its_terms() -> None:
    """Softmax's backward: where the row's sum is near 0, another order of summing moves every element."""

    def backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * (dy - (dy * y).sum(-1, keepdim=True))

    g = torch.Generator().manual_seed(7)
    dy, y = torch.randn(2000, 1024, generator=g), torch.randn(2000, 1024, generator=g)
    chain = trace(backward, (dy, y)).chain
    (expected,) = expect(chain, [dy, y], dict.fromkeys(chain.symbols, 2000))

    def summed(lanes: int) -> torch.Tensor:
        """The row's sum by so many accumulators, which are then joined in pairs."""
        terms, total = (dy * y).view(2000, -1, lanes), torch.zeros(2000, lanes)
        for k in range(terms.shape[1]):
            total = total + terms[:, k]
        while total.shape[1] > 1:
            total = total[:, ::2] + total[:, 1::2]
        return y * (dy - total)

    assert expected.verdict(summed(32)).ok
    assert not expected.verdict(summed(1)).ok


def test_inputs_that_move_across_a_step_say_nothing_of_its_error() -> None:
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * 4).round() / 4
    for fn in (torch.floor, lambda x: torch.where(x >= 0.5, x * 100, 0.0), lambda x: x % 1.0):
        chain = trace(fn, (x,)).chain
        (expected,) = expect(chain, [x], dict.fromkeys(chain.symbols, 8))
        y = fn(x)
        assert expected.verdict(y).ok
        y[3] += 0.9
        assert not expected.verdict(y).ok


def test_rows_that_cancel_to_nothing_do_not_widen_those_of_others() -> None:
    torch.manual_seed(0)
    o = torch.rand(100, 64, dtype=torch.float64) + 1
    o[:15] = 1e-16
    e = (o + 1e-7).float()
    y = e.clone()
    assert judge(y, o, e).ok
    y[50] *= 1.5
    assert not judge(y, o, e).ok


def test_what_fell_on_the_other_side_of_a_step_is_still_of_its_rows_size() -> None:
    y, o, e = ones()
    e[1, 3] = 2.0  # eager's own
    y[2, 5] = 2.0
    assert judge(y, o, e, flips=True).ok
    y[2, 5] = 1e6
    assert not judge(y, o, e, flips=True).ok
