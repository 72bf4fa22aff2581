"""Every operation of the table, in every dtype it has, by both dialects, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse import ops
from tests.kernel_cases import INF, NAN, data, run

ROWS, COLS = 6, 48
SHORTER = ("float32", "bfloat16", "float16")
REALS = (*SHORTER, "float64")
SIGNED = ("int8", "int32", "int64")
INTS = (*SIGNED, "uint8")
BOTH = (*REALS, *INTS)
EVERY = (*BOTH, "bool")
STORED = (*EVERY, "int16")
LOGIC = (*INTS, "bool")
EIGHTS = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Sample:
    """One use of an operation: what its arguments hold ("real", "positive", ...) and the dtypes that it takes."""

    fn: Callable[..., Any]
    args: tuple[str, ...] = ("real",)
    dtypes: tuple[str, ...] = REALS


def make(kind: str, dtype: str, seed: int) -> torch.Tensor:
    """Rows of several magnitudes, and one of special values, in a dtype."""
    to = ops.TORCH[dtype]
    if kind == "mask":
        return data(ROWS, COLS, seed=seed) > 0.2
    if kind == "index":
        return torch.arange(ROWS * COLS).reshape(ROWS, COLS) * 7 % COLS
    shape = (COLS,) if kind == "row" else (ROWS, COLS)
    x = data(*shape, dtype=torch.float64, seed=seed)
    if dtype == "bool":
        return x > 0
    if not to.is_floating_point:
        made = (x * 20).round()
        if kind in ("positive", "divisor"):
            made = made.abs() + 1 if kind == "positive" or dtype == "uint8" else torch.where(made == 0, 3.0, made)
        if kind == "small":
            made = made.abs() % 4
        return (made.abs() if dtype == "uint8" else made).to(to)
    if kind == "row":
        return x.to(to)
    if kind == "small":
        return x.tanh().to(to)
    x[1] *= 1e-3
    x[2] = (x[2] * 8).round() / 2
    x[3] *= 20
    special = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, -0.5, 2.5, 1e-6, 88.0, -88.0, 3.0, 6.0, 300.0]
    x[4] = torch.tensor(special * 3, dtype=torch.float64).roll(5 * seed)
    if kind == "positive":
        x = x.abs() + 1e-3
    return x.to(to)


def unary(*dtypes: str, kind: str = "real") -> Callable[[Callable[..., Any]], Sample]:
    return lambda fn: Sample(fn, (kind,), dtypes or REALS)


def binary(*dtypes: str, second: str = "real") -> Callable[[Callable[..., Any]], Sample]:
    return lambda fn: Sample(fn, ("real", second), dtypes or REALS)


def reduced(fn: Callable[..., Any], dtypes: tuple[str, ...] = REALS) -> list[Sample]:
    """A reduction with and without keepdim, of a computed value, and over the two last axes."""
    return [
        Sample(lambda x: fn(x, -1, False), ("real",), dtypes),
        Sample(lambda x: fn(x + x, -1, True), ("real",), dtypes),
        Sample(lambda x: x * 2 - fn(x, -1, True), ("small",), tuple(d for d in dtypes if d != "bool")),
        Sample(lambda x: fn(x.unflatten(-1, (4, 12)), -1, False), ("real",), dtypes),
    ]


def alias(fn: Callable[..., Any], args: int = 2) -> list[Sample]:
    """Another name of an operation that has its samples already."""
    return [Sample(fn, ("real",) * args, ("float32",))]


def normed(p: float) -> Sample:
    return Sample(lambda x: torch.linalg.vector_norm(x, p, -1))


SAMPLES: dict[str, list[Sample]] = {
    # arithmetic
    "add": [binary(*EVERY)(torch.add), binary(*BOTH)(lambda x, y: torch.add(x, y, alpha=3)), unary(*BOTH)(lambda x: x + 2)],
    "sub": [binary(*BOTH)(torch.sub), binary(*BOTH)(lambda x, y: torch.sub(x, y, alpha=2)), unary(*BOTH)(lambda x: x - 1)],
    "rsub": [unary(*BOTH)(lambda x: 1 - x), binary(*BOTH)(lambda x, y: torch.rsub(x, y, alpha=2))],
    "mul": [binary(*EVERY)(torch.mul), unary(*BOTH)(lambda x: x * 3), Sample(lambda x, w: x * w, ("real", "row"))],
    "multiply": alias(torch.multiply),
    "div": [
        binary(*EVERY)(torch.div),
        binary(second="divisor")(lambda x, y: torch.div(x, y, rounding_mode="trunc")),
        binary(second="divisor")(lambda x, y: torch.div(x, y, rounding_mode="floor")),
        unary(*BOTH)(lambda x: torch.div(x, 3, rounding_mode="trunc")),
        unary(*BOTH)(lambda x: torch.div(x, -7, rounding_mode="floor")),
        unary(*BOTH)(lambda x: x / 3),
        unary()(lambda x: 2.0 / x),
    ],
    "true_divide": alias(torch.true_divide),
    "divide": alias(torch.divide),
    "floor_divide": [binary(second="divisor")(torch.floor_divide), unary(*BOTH)(lambda x: x // 3)],
    "remainder": [binary(second="divisor")(torch.remainder), unary(*BOTH)(lambda x: x % 3), unary()(lambda x: x % -2.5)],
    "fmod": [binary(second="divisor")(torch.fmod), unary(*BOTH)(lambda x: torch.fmod(x, 3))],
    "neg": [unary(*REALS, *INTS)(torch.neg)],
    "negative": alias(torch.negative, 1),
    "abs": [unary(*BOTH)(torch.abs)],
    "absolute": alias(torch.absolute, 1),
    "reciprocal": [unary(*BOTH)(torch.reciprocal)],
    "square": [unary(*BOTH)(torch.square)],
    "sqrt": [unary(*BOTH, kind="positive")(torch.sqrt), unary()(torch.sqrt)],
    "rsqrt": [unary(*BOTH, kind="positive")(torch.rsqrt), unary()(torch.rsqrt)],
    "pow": [
        *(unary()(lambda x, p=p: torch.pow(x, p)) for p in (0.5, -0.5, 0, 1, 2, 3, 7, -1, -2, 2.5, -1.5, 11)),
        binary()(torch.pow),
        Sample(torch.pow, ("positive", "real")),
        unary()(lambda x: torch.pow(2.0, x)),
        unary(*INTS)(lambda x: torch.pow(x, 2)),
        unary("int32", "int64")(lambda x: torch.pow(x, 3)),
    ],
    "addcmul": [Sample(torch.addcmul, ("real",) * 3), Sample(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), ("real",) * 3)],
    "addcdiv": [Sample(torch.addcdiv, ("real",) * 3), Sample(lambda x, y, z: torch.addcdiv(x, y, z, value=2.0), ("real",) * 3)],
    "lerp": [binary()(lambda x, y: torch.lerp(x, y, 0.3)), Sample(torch.lerp, ("real", "real", "small"))],
    # transcendental
    "exp": [unary(*BOTH, kind="small")(torch.exp), unary()(torch.exp)],
    "exp2": [unary()(torch.exp2)],
    "expm1": [unary()(torch.expm1)],
    "log": [unary()(torch.log), unary(*BOTH, kind="positive")(torch.log)],
    "log2": [unary()(torch.log2), unary(kind="positive")(torch.log2)],
    "log10": [unary()(torch.log10), unary(kind="positive")(torch.log10)],
    "log1p": [unary()(torch.log1p), unary(kind="positive")(torch.log1p)],
    "sin": [unary()(torch.sin), unary("int32")(torch.sin)],
    "cos": [unary()(torch.cos)],
    "tan": [unary(kind="small")(torch.tan)],
    "sinh": [unary()(torch.sinh)],
    "cosh": [unary()(torch.cosh)],
    "tanh": [unary()(torch.tanh)],
    "sigmoid": [unary()(torch.sigmoid)],
    "silu": [unary()(F.silu)],
    "erf": [unary()(torch.erf)],
    # rounding and sign
    "floor": [unary(*BOTH)(torch.floor)],
    "ceil": [unary(*BOTH)(torch.ceil)],
    "trunc": [unary(*BOTH)(torch.trunc)],
    "fix": alias(torch.fix, 1),
    "round": [unary(*BOTH)(torch.round)],
    "frac": [unary()(torch.frac)],
    "sign": [unary(*EVERY)(torch.sign)],
    "sgn": [unary(*BOTH)(torch.sgn)],
    "copysign": [binary()(torch.copysign), unary()(lambda x: torch.copysign(x, -1.0))],
    # extremes
    "maximum": [binary(*EVERY)(torch.maximum)],
    "minimum": [binary(*EVERY)(torch.minimum)],
    "fmax": [binary(*BOTH)(torch.fmax)],
    "fmin": [binary(*BOTH)(torch.fmin)],
    "clamp": [
        unary(*BOTH)(lambda x: torch.clamp(x, 1, 3)), unary()(lambda x: x.clamp(min=-0.5)), unary()(lambda x: x.clamp(max=0.5)),
        Sample(lambda x, y, z: torch.clamp(x, y, z), ("real", "small", "real"), BOTH),
    ],
    "clip": [unary(*BOTH)(lambda x: torch.clip(x, 1, 3))],
    "clamp_min": [unary(*BOTH)(lambda x: torch.clamp_min(x, 1)), binary(*BOTH)(torch.clamp_min)],
    "clamp_max": [unary(*BOTH)(lambda x: torch.clamp_max(x, 1)), binary(*BOTH)(torch.clamp_max)],
    "relu": [unary(*REALS, *SIGNED)(F.relu)],
    "nan_to_num": [unary(*BOTH)(torch.nan_to_num), unary()(lambda x: torch.nan_to_num(x, 1.0, 2.0, -3.0))],
    # comparison and logic
    **{
        name: [
            binary(*EVERY)(fn), unary(*BOTH)(lambda x, fn=fn: fn(x, 1)), unary()(lambda x, fn=fn: fn(x * 1.1, 0.3)),
            Sample(lambda x, c, fn=fn: torch.where(fn(x, 0.5), x, -x), ("real", "mask")),
        ]
        for name, fn in (
            ("eq", torch.eq), ("ne", torch.ne), ("lt", torch.lt), ("le", torch.le), ("gt", torch.gt), ("ge", torch.ge),
        )
    },
    "not_equal": alias(torch.not_equal),
    "greater": alias(torch.greater),
    "greater_equal": alias(torch.greater_equal),
    "less": alias(torch.less),
    "less_equal": alias(torch.less_equal),
    "isnan": [unary(*EVERY)(torch.isnan), unary()(lambda x: torch.isnan(x - x))],
    "isinf": [unary(*EVERY)(torch.isinf), unary()(lambda x: torch.isinf(x * 300))],
    "isfinite": [unary(*EVERY)(torch.isfinite), unary()(lambda x: torch.isfinite(x * 300))],
    "logical_and": [binary(*EVERY)(torch.logical_and)],
    "logical_or": [binary(*EVERY)(torch.logical_or)],
    "logical_xor": [binary(*EVERY)(torch.logical_xor)],
    "logical_not": [unary(*EVERY)(torch.logical_not)],
    "bitwise_and": [binary(*LOGIC)(torch.bitwise_and), unary(*INTS)(lambda x: x & 6)],
    "__and__": [binary(*LOGIC)(lambda x, y: x.__and__(y)), unary(*INTS)(lambda x: torch.ops.aten.__and__(x, 5))],
    "bitwise_or": [binary(*LOGIC)(torch.bitwise_or)],
    "__or__": [unary(*INTS)(lambda x: torch.ops.aten.__or__(x, 5))],
    "bitwise_xor": [binary(*LOGIC)(torch.bitwise_xor)],
    "__xor__": [unary(*INTS)(lambda x: torch.ops.aten.__xor__(x, 5))],
    "bitwise_not": [unary(*LOGIC)(torch.bitwise_not)],
    "where": [
        Sample(torch.where, ("mask", "real", "real"), EVERY), Sample(lambda c, x: torch.where(c, x, 0), ("mask", "real"), BOTH),
        Sample(lambda c, x: torch.where(c, 1.5, x), ("mask", "real")),
    ],
    "masked_fill": [Sample(lambda x, c: x.masked_fill(c, -1), ("real", "mask"), tuple(d for d in BOTH if d != "uint8"))],
    # casts and copies
    "to": [
        unary(*STORED, kind="small")(lambda x: x.to(torch.int32 if x.dtype is torch.float32 else torch.float32)),
        *(unary(*STORED, kind="small")(lambda x, d=d: x.to(ops.TORCH[d])) for d in STORED),
        *(
            unary(*REALS, *EIGHTS)(lambda x, d=d: (x.clamp(-400, 400) if x.dtype.itemsize > 1 else x).to(ops.TORCH[d]))
            for d in (*REALS, *EIGHTS)
        ),
        unary()(lambda x: (x * 1.3).to(torch.bfloat16).float() * 3),
        unary()(lambda x: (x * 1.3).half().float() * 3),
    ],
    "clone": [unary(*EVERY)(lambda x: x.clone()), unary()(lambda x: (x * 2).clone() + 1)],
    # constants
    "full_like": [unary(*BOTH)(lambda x: x + torch.full_like(x, 2))],
    "zeros_like": [unary(*BOTH)(lambda x: x + torch.zeros_like(x))],
    "ones_like": [unary(*BOTH)(lambda x: x + torch.ones_like(x))],
    "new_full": [unary(*BOTH)(lambda x: x + x.new_full((COLS,), 3))],
    "new_zeros": [unary(*BOTH)(lambda x: x + x.new_zeros((COLS,)))],
    "new_ones": [unary(*BOTH)(lambda x: x + x.new_ones((COLS,)))],
    "full": [unary(*BOTH)(lambda x: x + torch.full((COLS,), 3, dtype=x.dtype))],
    "zeros": [unary(*BOTH)(lambda x: x + torch.zeros(COLS, dtype=x.dtype))],
    "ones": [unary(*BOTH)(lambda x: x + torch.ones(COLS, dtype=x.dtype))],
    "scalar_tensor": [unary()(lambda x: x + torch.scalar_tensor(1.1, dtype=x.dtype))],
    "arange": [
        unary(*BOTH)(lambda x: x + torch.arange(COLS, dtype=x.dtype)),
        unary()(lambda x: torch.where(torch.arange(x.shape[-1]) < 20, x, -1.0)),
        unary()(lambda x: x * torch.arange(3, 3 + 2 * COLS, 2)),
    ],
    "uniform": [unary(*EVERY)(lambda x: autofuse.uniform(x, 3)), unary()(lambda x: autofuse.dropout(x, 0.4, 5, -7))],
    # reductions
    "sum": [
        *reduced(torch.sum, (*SHORTER, *INTS, "bool")), unary("float64", kind="positive")(lambda x: x.sum(-1)),
        unary(*SHORTER)(lambda x: x.unflatten(-1, (4, 12)).sum((-1, -2))),
    ],
    "mean": [
        *reduced(torch.mean, SHORTER), unary("float64", kind="positive")(lambda x: x.mean(-1)),
        unary(*SHORTER)(lambda x: x.unflatten(-1, (4, 12)).mean((-2, -1), keepdim=True)),
    ],
    "amax": [*reduced(torch.amax, EVERY), unary()(lambda x: x.max(-1).values)],
    "amin": [*reduced(torch.amin, EVERY), unary()(lambda x: x.min(-1).values)],
    "prod": [Sample(lambda x: x.prod(-1), ("small",)), Sample(lambda x: (x * 1.5).prod(-1, keepdim=True), ("small",)),
             Sample(lambda x: x.prod(-1), ("small",), ("int32", "int64", "bool"))],
    "any": [unary(*EVERY)(lambda x: x.any(-1)), unary()(lambda x: (x > 3).any(-1, keepdim=True))],
    "all": [unary(*EVERY)(lambda x: x.all(-1)), unary()(lambda x: (x > -9).all(-1))],
    "argmax": [unary(*BOTH)(lambda x: x.argmax(-1)), unary()(lambda x: (x * 1.3).argmax(-1, keepdim=True))],
    "argmin": [unary(*BOTH)(lambda x: x.argmin(-1)), unary()(lambda x: (x * 1.3).argmin(-1, keepdim=True))],
    "var": [*reduced(lambda x, d, k: x.var(d, keepdim=k)), unary()(lambda x: x.var(-1, correction=0))],
    "std": [*reduced(lambda x, d, k: x.std(d, keepdim=k)), unary()(lambda x: x.std(-1, correction=0))],
    "linalg_vector_norm": [normed(2), normed(1), normed(INF), normed(-INF), normed(0), normed(3), normed(2.5)],
    "norm": [
        unary()(lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [-1], False)),
        unary()(lambda x: x.norm(dim=-1)), unary()(lambda x: x.norm(p=1, dim=-1, keepdim=True)),
    ],
    "softmax": [
        unary()(lambda x: F.softmax(x, -1)),
        unary("bfloat16", "float16")(lambda x: F.softmax(x, -1, dtype=torch.float32)),
    ],
    "_softmax": [unary()(lambda x: torch._softmax(x, -1, False))],
    "log_softmax": [unary()(lambda x: F.log_softmax(x, -1)), unary()(lambda x: F.log_softmax(x * 1.5, -1) * 2)],
    "_log_softmax": [unary()(lambda x: torch._log_softmax(x, -1, False))],
    "logsumexp": [unary()(lambda x: x.logsumexp(-1)), unary()(lambda x: x - x.logsumexp(-1, keepdim=True))],
    # composites
    "rms_norm": [
        Sample(lambda x, w: F.rms_norm(x, (COLS,), w, 1e-6), ("real", "row")),
        unary()(lambda x: F.rms_norm(x, (COLS,))),
    ],
    "layer_norm": [
        Sample(lambda x, w, b: F.layer_norm(x, (COLS,), w, b), ("real", "row", "row")),
        unary()(lambda x: F.layer_norm(x, (COLS,))),
        unary()(lambda x: F.layer_norm(x + 1, (COLS,), eps=1e-3) * 2),
    ],
    "group_norm": [
        unary()(lambda x: F.group_norm(x.unflatten(-1, (6, 8)), 3)),
        Sample(lambda x, w: F.group_norm(x.unflatten(-1, (6, 8)), 2, w[:6], w[6:12], 1e-3) * 2, ("real", "row")),
    ],
    "gelu": [unary()(F.gelu), unary()(lambda x: F.gelu(x, approximate="tanh"))],
    "mish": [unary()(F.mish)],
    "softplus": [unary()(F.softplus), unary()(lambda x: F.softplus(x, 2.0, 10.0))],
    "elu": [unary()(F.elu)],
    "selu": [unary()(F.selu)],
    "celu": [unary()(F.celu)],
    "tril": [unary(*EVERY)(torch.tril), unary()(lambda x: (x + 1).tril(-2) * 2), unary()(lambda x: x.tril(30))],
    "triu": [unary(*EVERY)(torch.triu), unary()(lambda x: (x + 1).triu(-2) * 2), unary()(lambda x: x.triu(30))],
    # index maps
    "reshape": [unary(*EVERY)(lambda x: x.clone().reshape(-1, 6, 8) == 1)],
    "permute": [unary()(lambda x: x.unflatten(-1, (4, 12)).transpose(-1, -2) * 2)],
    "slice": [unary()(lambda x: x[..., 3:40:5] * 2)],
    "select": [unary()(lambda x: x[..., 7] * 2)],
    "expand": [unary()(lambda x: x[..., :1].expand(-1, 16) * 2)],
    "contiguous": [unary()(lambda x: (x * 2).unflatten(-1, (4, 12)).transpose(-1, -2).contiguous() + 1)],
    "cat": [
        binary(*EVERY)(lambda x, y: torch.cat((x, y), -1)),
        binary()(lambda x, y: torch.cat((x[..., :5], y * 2, x[..., 5:]), -1)),
        binary()(lambda x, y: torch.stack((x, y), -1)), Sample(lambda x, c: torch.cat((x, c), -1), ("real", "mask")),
    ],
    "gather": [Sample(lambda x, i: x.gather(-1, i), ("real", "index"), EVERY)],
}  # fmt: skip

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": lambda x: F.elu(x, 1.3),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(x, -1),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)),
    "relu": F.relu,
    "relu6": F.relu6,
    "rrelu": lambda x: F.rrelu(x, training=False),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softmax": lambda x: F.softmax(x, -1),
    "softmin": lambda x: F.softmin(x, -1),
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
}


def cases() -> list[Any]:
    """Every operation with every dtype that one of its samples takes."""
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype}")
        for name, samples in SAMPLES.items()
        for dtype in dict.fromkeys(d for s in samples for d in s.dtypes)
    ]


def wrong(name: str, dtype: str, target: str) -> list[str]:
    """What is wrong with an operation's samples; those of the same arguments are the outputs of one function."""
    together: dict[tuple[str, ...], list[Sample]] = {}
    for k, sample in enumerate(SAMPLES[name]):
        if dtype in sample.dtypes and not (dtype == "float64" and k and dtype in SAMPLES[name][0].dtypes):
            together.setdefault(sample.args, []).append(sample)
    found = []
    for kinds, samples in together.items():
        args = [make(kind, dtype, seed) for seed, kind in enumerate(kinds)]

        def every(*args: Any, samples: list[Sample] = samples) -> list[Any]:
            return [sample.fn(*args) for sample in samples]

        message = run(every, args, target).message
        if message:
            found.append(f"{', '.join(kinds)}: {message}")
    return found


def test_every_operation_has_a_sample() -> None:
    several = {"native_layer_norm"}  # gives three tensors: only layer_norm, which hides it, is traced
    assert set(SAMPLES) == set(ops.OPS) - several


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_uses_its_operation(name: str) -> None:
    sample = SAMPLES[name][0]
    made = run(sample.fn, [make(kind, sample.dtypes[0], seed) for seed, kind in enumerate(sample.args)])
    assert name in {v.name for v in made.chain.values}


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_c(name: str, dtype: str) -> None:
    assert wrong(name, dtype, "cpu") == []


@pytest.mark.interpret
@pytest.mark.parametrize(("name", "dtype"), cases())
def test_triton(name: str, dtype: str) -> None:
    if (name, dtype) == ("pow", "float64"):
        pytest.skip("PyTorch runs it: there is no accurate form")
    assert wrong(name, dtype, "cuda") == []


def activated(name: str, dtype: str, math: str, target: str) -> str:
    return run(ACTIVATIONS[name], [make("real", dtype, 0)], target, {"math": math}).message


MODES = [("float32", "exact"), ("bfloat16", "exact"), ("bfloat16", "fast"), ("float16", "exact"), ("float16", "fast")]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "math"), MODES)
def test_activation_c(name: str, dtype: str, math: str) -> None:
    assert activated(name, dtype, math, "cpu") == ""


@pytest.mark.interpret
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "math"), MODES)
def test_activation_triton(name: str, dtype: str, math: str) -> None:
    assert activated(name, dtype, math, "cuda") == ""
