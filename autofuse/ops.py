"""The one table of operations: name, how its arguments are promoted, what it computes, what it costs.

An operation is named as in ATen, without namespace and overload. Its reference is ATen itself (`reference.py` calls it),
its dtype rule is ATen's too (the trace records it). `lower` gives its meaning for one point as an expression; a
composite that is not here (gelu, mish, layer_norm, ...) is lowered through PyTorch's own decomposition into these.
A new operation is one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import UnsupportedOp

if TYPE_CHECKING:
    from .kernels.expr import Builder, Expr

STORAGE: dict[torch.dtype, str] = {
    torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2", torch.int8: "int8", torch.uint8: "uint8",
    torch.int16: "int16", torch.int32: "int32", torch.int64: "int64", torch.bool: "bool",
}  # fmt: skip
TORCH: dict[str, torch.dtype] = {name: dtype for dtype, name in STORAGE.items()}
HALVES = ("bfloat16", "float16")
ITEMSIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in TORCH.items()}

Lower = Callable[..., "Expr"]


@dataclass(frozen=True)
class Op:
    """One operation.

    kind    pointwise, reduction (over the last axes), view (an index map), factory (no tensor argument)
    lower   pointwise: (builder, *arguments, **keywords) -> Expr; the others are lowered in kernels/lower.py
    args    how tensor arguments are prepared: "result" (cast to the result's compute dtype), "common" (to the common
            dtype of the arguments), "own" (as they are), "cond" (the first is bool, the rest as the result)
    rounds  eager rounds the argument before a discontinuity (comparison, rounding, sign), so the kernel does too
    flops   per element
    """

    name: str
    kind: str
    lower: Lower | None = None
    args: str = "result"
    rounds: bool = False
    flops: float = 1.0


OPS: dict[str, Op] = {}


def _op(
    names: str,
    kind: str = "pointwise",
    lower: Lower | None = None,
    args: str = "result",
    rounds: bool = False,
    flops: float = 1.0,
) -> None:
    for name in names.split():
        OPS[name] = Op(name, kind, lower, args, rounds, flops)


def _same(op: str) -> Lower:
    return lambda b, *args: b(op, *args)


def _scaled(b: Builder, y: Expr, alpha: Expr | None) -> Expr:
    return y if alpha is None else b("mul", y, alpha)


def _one(b: Builder, x: Expr, value: float = 1.0) -> Expr:
    return b.const(value, x.dtype)


def _divisor(b: Builder, x: Expr, y: Expr) -> None:
    """An integer divisor must be a number other than 0 and -1: by 0 eager raises, and a kernel would end the process."""
    if x.dtype.startswith("int") and b.number(y) in (None, 0, -1):
        raise UnsupportedOp("integer division by a tensor, by 0 or by -1 has no kernel: divide floats, or by a number")


def _fmod(b: Builder, x: Expr, y: Expr) -> Expr:
    _divisor(b, x, y)
    return b("fmod", x, y)


def _adjusts(b: Builder, r: Expr, y: Expr) -> Expr:
    """Where a truncated remainder has the other sign than the divisor, so that the floored one differs."""
    zero = _one(b, r, 0)
    return b("and", b("ne", r, zero), b("ne", b("lt", r, zero), b("lt", y, zero)))


def _remainder(b: Builder, x: Expr, y: Expr) -> Expr:
    r = _fmod(b, x, y)
    return b("where", _adjusts(b, r, y), b("add", r, y), r)


def _div(b: Builder, x: Expr, y: Expr, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return b("div", x, y)
    if x.dtype.startswith("int"):
        _divisor(b, x, y)
        return b("div", x, y) if rounding_mode == "trunc" else b("div", b("sub", x, _remainder(b, x, y)), y)
    if rounding_mode == "trunc":
        return b("trunc", b("div", x, y))
    # as eager: the quotient without the remainder, one less where signs differ, then put on a whole number
    r = b("fmod", x, y)
    q = b("div", b("sub", x, r), y)
    q = b("where", _adjusts(b, r, y), b("sub", q, _one(b, q)), q)
    whole = b("floor", q)
    whole = b("where", b("lt", _one(b, q, 0.5), b("sub", q, whole)), b("add", whole, _one(b, q)), whole)
    exact = b("div", x, y)
    whole = b("where", b("eq", q, _one(b, q, 0)), _copysign(b, _one(b, q, 0), exact), whole)
    return b("where", b("eq", y, _one(b, y, 0)), exact, whole)


def _power(b: Builder, x: Expr, n: int) -> Expr:
    """x to a whole power of at least 1, by squaring."""
    made, power = None, x
    while n:
        if n & 1:
            made = power if made is None else b("mul", made, power)
        power, n = b("mul", power, power), n >> 1
    assert made is not None
    return made


def _pow(b: Builder, x: Expr, y: Expr) -> Expr:
    n = b.number(y)
    if x.dtype.startswith("int"):
        if n is None or n < 0 or n > 64:
            raise UnsupportedOp("an integer power by a tensor, or by less than 0 or more than 64, has no kernel: cast to a float")
        return _power(b, x, int(n)) if n else _one(b, x)
    if n is not None and not isinstance(n, bool):
        if n == 0.5:
            return b("sqrt", x)
        if n == -0.5:
            return b("rsqrt", x)
        if math.isfinite(n) and n == int(n) and 1 <= abs(n) <= 8:
            made = _power(b, x, int(abs(n)))
            return made if n > 0 else b("div", _one(b, x), made)
        if n == 0:
            return _one(b, x)
    return b("pow", x, y)


def _clamp(b: Builder, x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    if low is not None:
        x = b("max", x, low)
    return x if high is None else b("min", x, high)


def _sign(b: Builder, x: Expr) -> Expr:
    zero, one = _one(b, x, 0), _one(b, x)
    return b("where", b("lt", zero, x), one, b("where", b("lt", x, zero), _one(b, x, -1), zero))


def _isinf(b: Builder, x: Expr) -> Expr:
    if x.dtype not in ("float32", "float64"):
        return b.const(False, "bool")
    return b("eq", b("abs", x), _one(b, x, math.inf))


def _isfinite(b: Builder, x: Expr) -> Expr:
    if x.dtype not in ("float32", "float64"):
        return b.const(True, "bool")
    return b("lt", b("abs", x), _one(b, x, math.inf))


def _nonan(op: str) -> Lower:
    def lower(b: Builder, x: Expr, y: Expr) -> Expr:
        return b("where", b("isnan", x), y, b("where", b("isnan", y), x, b(op, x, y)))

    return lower


def _half_exp(b: Builder, a: Expr) -> Expr:
    """exp(a) / 2, which is finite for a little longer than exp(a)."""
    e = b("exp", b("mul", a, _one(b, a, 0.5)))
    return b("mul", b("mul", e, _one(b, a, 0.5)), e)


def _sinh(b: Builder, x: Expr) -> Expr:
    a = b("abs", x)
    t = b("expm1", a)
    half = b("mul", b("add", t, b("div", t, b("add", t, _one(b, x)))), _one(b, x, 0.5))
    half = b("where", b("lt", a, _one(b, x, 80)), half, _half_exp(b, a))
    return b("where", b("lt", x, _one(b, x, 0)), b("neg", half), half)


def _cosh(b: Builder, x: Expr) -> Expr:
    a = b("abs", x)
    e = b("exp", a)
    half = b("mul", b("add", e, b("div", _one(b, x), e)), _one(b, x, 0.5))
    return b("where", b("lt", a, _one(b, x, 80)), half, _half_exp(b, a))


def _log10(b: Builder, x: Expr) -> Expr:
    return b("mul", b("log", x), _one(b, x, 1 / math.log(10)))


def _lerp(b: Builder, x: Expr, y: Expr, w: Expr) -> Expr:
    one = _one(b, x)
    d = b("sub", y, x)
    near = b("add", x, b("mul", w, d))
    far = b("sub", y, b("mul", d, b("sub", one, w)))
    return b("where", b("lt", b("abs", w), _one(b, x, 0.5)), near, far)


def _addcmul(op: str) -> Lower:
    def lower(b: Builder, x: Expr, y: Expr, z: Expr, value: Expr | None = None) -> Expr:
        return b("add", x, _scaled(b, b(op, y, z), value))

    return lower


def _copysign(b: Builder, x: Expr, y: Expr) -> Expr:
    negative = b("lt", b.bits(y), b.const(0, b.bits(y).dtype))
    return b("where", negative, b("neg", b("abs", x)), b("abs", x))


def _nan_to_num(b: Builder, x: Expr, nan: Expr | None = None, posinf: Expr | None = None, neginf: Expr | None = None) -> Expr:
    top = float(torch.finfo(TORCH[x.dtype]).max) if x.dtype.startswith("float") else 0.0
    if not x.dtype.startswith("float"):
        return x
    inf = _one(b, x, math.inf)
    x = b("where", b("isnan", x), nan or _one(b, x, 0), x)
    x = b("where", b("eq", x, inf), posinf or _one(b, x, top), x)
    return b("where", b("eq", x, b("neg", inf)), neginf or _one(b, x, -top), x)


# arithmetic
_op("add", lower=lambda b, x, y, alpha=None: b("or", x, y) if x.dtype == "bool" else b("add", x, _scaled(b, y, alpha)))
_op("sub", lower=lambda b, x, y, alpha=None: b("sub", x, _scaled(b, y, alpha)))
_op("rsub", lower=lambda b, x, y, alpha=None: b("sub", y, _scaled(b, x, alpha)))
_op("mul multiply", lower=lambda b, x, y: b("and", x, y) if x.dtype == "bool" else b("mul", x, y))
_op("div true_divide divide", lower=_div)
_op("floor_divide", lower=lambda b, x, y: _div(b, x, y, "floor"), rounds=True)
_op("remainder", lower=_remainder, rounds=True, flops=8)
_op("fmod", lower=_fmod, rounds=True, flops=8)
_op("neg negative", lower=_same("neg"))
_op("abs absolute", lower=_same("abs"))
_op("reciprocal", lower=lambda b, x: b("div", _one(b, x), x))
_op("square", lower=lambda b, x: b("mul", x, x))
_op("sqrt", lower=_same("sqrt"), flops=4)
_op("rsqrt", lower=_same("rsqrt"), flops=4)
_op("pow", lower=_pow, flops=20)
_op("addcmul", lower=_addcmul("mul"), flops=3)
_op("addcdiv", lower=_addcmul("div"), flops=3)
_op("lerp", lower=_lerp, flops=3)
# transcendental
_op("exp", lower=_same("exp"), flops=8)
_op("exp2", lower=_same("exp2"), flops=8)
_op("expm1", lower=_same("expm1"), flops=12)
_op("log", lower=_same("log"), flops=10)
_op("log2", lower=_same("log2"), flops=10)
_op("log10", lower=_log10, flops=10)
_op("log1p", lower=_same("log1p"), flops=14)
_op("sin", lower=_same("sin"), flops=16)
_op("cos", lower=_same("cos"), flops=16)
_op("tan", lower=lambda b, x: b("div", b("sin", x), b("cos", x)), flops=34)
_op("sinh", lower=_sinh, flops=16)
_op("cosh", lower=_cosh, flops=16)
_op("tanh", lower=_same("tanh"), flops=16)
_op("sigmoid", lower=_same("sigmoid"), flops=10)
_op("silu", lower=lambda b, x: b("mul", x, b("sigmoid", x)), flops=11)
_op("erf", lower=_same("erf"), flops=20)
# rounding and sign: discontinuous, so eager's rounding of the argument is kept
_op("floor", lower=_same("floor"), rounds=True)
_op("ceil", lower=_same("ceil"), rounds=True)
_op("trunc fix", lower=_same("trunc"), rounds=True)
_op("round", lower=lambda b, x: b("round_even", x), rounds=True)
_op("frac", lower=lambda b, x: b("sub", x, b("trunc", x)), rounds=True)
_op("sign sgn", lower=_sign, rounds=True)
_op("copysign", lower=_copysign, rounds=True)
# extremes: NaN propagates through maximum, minimum and clamp
_op("maximum", lower=_same("max"))
_op("minimum", lower=_same("min"))
_op("fmax", lower=_nonan("max"))
_op("fmin", lower=_nonan("min"))
_op("clamp clip", lower=_clamp, flops=2)
_op("clamp_min", lower=_clamp)
_op("clamp_max", lower=lambda b, x, high: b("min", x, high))
_op("relu", lower=lambda b, x: b("max", x, _one(b, x, 0)))
_op("nan_to_num", lower=_nan_to_num, flops=3)
# comparison, logic
for _name, _prim in (("eq", "eq"), ("ne", "ne"), ("lt", "lt"), ("le", "le"), ("gt", "gt"), ("ge", "ge")):
    _op(_name, lower=_same(_prim), args="common", rounds=True)
_op("not_equal", lower=_same("ne"), args="common", rounds=True)
_op("greater", lower=_same("gt"), args="common", rounds=True)
_op("greater_equal", lower=_same("ge"), args="common", rounds=True)
_op("less", lower=_same("lt"), args="common", rounds=True)
_op("less_equal", lower=_same("le"), args="common", rounds=True)
_op("isnan", lower=_same("isnan"), args="common")
_op("isinf", lower=_isinf, args="common", rounds=True)
_op("isfinite", lower=_isfinite, args="common", rounds=True)
_op("logical_and", lower=lambda b, x, y: b("and", b.cast(x, "bool"), b.cast(y, "bool")), args="own", rounds=True)
_op("logical_or", lower=lambda b, x, y: b("or", b.cast(x, "bool"), b.cast(y, "bool")), args="own", rounds=True)
_op("logical_xor", lower=lambda b, x, y: b("ne", b.cast(x, "bool"), b.cast(y, "bool")), args="own", rounds=True)
_op("logical_not", lower=lambda b, x: b("not", b.cast(x, "bool")), args="own", rounds=True)
_op("bitwise_and __and__", lower=_same("and"))
_op("bitwise_or __or__", lower=_same("or"))
_op("bitwise_xor __xor__", lower=lambda b, x, y: b("ne", x, y) if x.dtype == "bool" else b("xor", x, y))
_op("bitwise_not", lower=_same("not"))
_op("where", lower=lambda b, c, x, y: b("where", c, x, y), args="cond")
_op("masked_fill", lower=lambda b, c, x, y: b("where", c, y, x), args="cond")
# casts and copies
_op("to", lower=lambda b, x: x, args="own")
_op("clone", lower=lambda b, x: x, flops=0)
# constants
_op("full_like zeros_like ones_like new_full new_zeros new_ones full zeros ones scalar_tensor arange", kind="factory", flops=0)
# autofuse's own (random.py): by the element's number, so it is lowered where indices are
_op("uniform", flops=24)
# reductions over the last axes
_op("sum mean amax amin prod any all argmax argmin", kind="reduction")
_op("var std linalg_vector_norm norm", kind="reduction", flops=3)
_op("softmax _softmax log_softmax _log_softmax logsumexp", kind="reduction", flops=12)
# composites that stay whole in a chain and are decomposed by kernels; listed for their cost
_op("rms_norm layer_norm native_layer_norm group_norm", kind="composite", flops=8)
_op("gelu mish softplus elu selu celu", kind="composite", flops=25)
_op("tril triu", kind="composite", flops=2)
# index maps
_op("reshape permute slice select expand contiguous cat gather", kind="view", flops=0)


def flops_per_element(name: str) -> float:
    """The cost of an operation in floating-point operations per element of its largest operand."""
    found = OPS.get(name)
    return found.flops if found else 10.0


def reads_shape_only(name: str) -> bool:
    """Whether an operation reads of its first argument only how long its axes are."""
    found = OPS.get(name)
    return found is not None and (found.kind == "factory" or name == "uniform")


def is_free(name: str) -> bool:
    """Whether an operation is no kernel of its own: an index map or a constant."""
    found = OPS.get(name)
    return found is not None and (found.kind == "factory" or (found.kind == "view" and name not in ("cat", "gather")))


def common_dtype(dtypes: Sequence[tuple[str, int]], scalars: Sequence[Any]) -> str:
    """torch's promotion of tensors, given as (dtype, number of axes), and Python scalars."""
    metas: list[Any] = [torch.empty((1,) * n, dtype=TORCH[d], device="meta") for d, n in dtypes]
    every = [*metas[1:], *scalars]
    if not every:
        return dtypes[0][0]
    # result_type takes pairs; categories compose by folding over a tensor of the running type
    best = max((n for _, n in dtypes), default=0)
    kind = torch.result_type(metas[0], every[0])
    for other in every[1:]:
        kind = torch.result_type(torch.empty((1,) * best, dtype=kind, device="meta"), other)
    return STORAGE[kind]
