"""The catalogue's functions against other formulas, and PyTorch's own gradients, in float64; and what its table says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autofuse
from autofuse.fusion import check
from autofuse.program import Layouts
from autofuse.trace import trace
from autofuse.traced import sizes_of
from examples import catalogue, training
from examples.entries import CATALOGUE, ROWWISE, Entry

EPS = catalogue.EPS
Fn = Callable[..., Any]
FP8_RANGE = 448


def dropped(x: Tensor, r: Tensor, w: Tensor, b: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    h = r + torch.where(autofuse.uniform(x, seed) < 0.1, 0, x / 0.9)
    centred = h - h.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * w + b, h


def rms(x: Tensor, w: Tensor | float = 1.0) -> Tensor:
    return w * x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS)


def layer(x: Tensor, eps: float = 1e-5) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + eps)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def soft(x: Tensor) -> Tensor:
    e = torch.exp(x - x.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def halves(fn: Fn, x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.as_tensor(fn(x[..., :n]) * x[..., n:])


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (k, k + D/2) as complex numbers, turned."""
    n = x.shape[-1] // 2
    turned = torch.complex(x[..., :n], x[..., n:]) * torch.complex(cos, sin)[..., None, :]
    return torch.cat((turned.real, turned.imag), -1)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[..., None, :]).flatten(-2)


def scaled(y: Tensor, width: int | None = None, top: float = FP8_RANGE) -> tuple[Tensor, Tensor]:
    """Quotients before they are rounded, and their scales."""
    parts = y.reshape(*y.shape[:-1], -1, width or y.shape[-1])
    scale = parts.abs().max(-1, keepdim=True).values / top
    return (parts / scale).reshape(y.shape), scale.squeeze(-1)


def static(y: Tensor, scale: Tensor) -> Tensor:
    return torch.clip(y / scale, -FP8_RANGE, FP8_RANGE)


def causal(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    for i in range(x.shape[-2]):
        made[..., i, : i + 1] = soft(x[..., i, : i + 1] * 0.125)
    return made


def group_norm_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return silu(layer(x.reshape(x.shape[0], 32, -1), EPS).reshape(x.shape) * w[:, None] + b[:, None])


def loss(x: Tensor, target: Tensor) -> Tensor:
    return torch.logsumexp(x, -1) - x[torch.arange(len(x)), target]


def gradients(fn: Fn, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """PyTorch's own, by each input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(fn(*leaves), leaves, dy)


def loss_and_gradient(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    each = F.cross_entropy(x, target, reduction="none")
    return each, *gradients(lambda x: F.cross_entropy(x, target, reduction="none"), torch.ones_like(each), x)


ORACLES: dict[str, Fn] = {
    "rmsnorm": rms,
    "rmsnorm_gemma": lambda x, w: rms(x, 1 + w),
    "add_rmsnorm": lambda x, r, w: (rms(x + r, w), x + r),
    "add_rmsnorm_gemma": lambda x, r, w: (rms(x + r, 1 + w), x + r),
    "add_norm_act": lambda x, r, w: silu(rms(x + r, w)),
    "rmsnorm_gated": lambda x, z, w: rms(x, w) * silu(z),
    "layernorm": lambda x, w, b: layer(x) * w + b,
    "add_layernorm": lambda x, r, w, b: (layer(x + r) * w + b, x + r),
    "add_layernorm_gelu": lambda x, r, w, b: gelu_tanh(layer(x + r) * w + b),
    "adaln_modulate": lambda x, scale, shift: layer(x, EPS) + layer(x, EPS) * scale + shift,
    "groupnorm_silu": group_norm_silu,
    "swiglu": lambda x: halves(silu, x),
    "swiglu_split": lambda g, u: silu(g) * u,
    "geglu": lambda x: halves(gelu_erf, x),
    "geglu_split": lambda g, u: gelu_tanh(g) * u,
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "bias_gelu": lambda x, b: gelu_erf(x + b),
    "bias_gelu_tanh": lambda x, b: gelu_tanh(x + b),
    "mish_add": lambda x, y: x * torch.tanh(torch.log(1 + torch.exp(x))) + y,
    "softcap": lambda x: 30 * (1 - 2 / (torch.exp(x / 15) + 1)),
    "layer_scale": lambda r, x, g: r + x * g,
    "layer_scale_drop_path": lambda r, x, g, keep: torch.where(keep, r + x * g / 0.9, r),
    "ripple": lambda x, g: x / (1 + torch.exp(-g * x)) + torch.sin(3 * x) * torch.exp(-(x**2)) / 10,
    "softmax": soft,
    "log_softmax": lambda x: torch.log(soft(x)),
    "softmax_scale_mask": lambda x, m: soft(x / 8 + m),
    "softmax_causal": causal,
    "rope": turn,
    "rope_interleaved": turn_pairs,
    "rope_partial": lambda x, c, s: torch.cat((turn(x[..., :64], c, s), x[..., 64:]), -1),
    "qk_norm_rope": lambda q, k, qw, kw, c, s: (turn(rms(q, qw), c, s), turn(rms(k, kw), c, s)),
    "rmsnorm_fp8_token": lambda x, w: scaled(rms(x, w)),
    "rmsnorm_fp8_block": lambda x, w: scaled(rms(x, w), 128),
    "rmsnorm_fp8_static": lambda x, w, s: static(rms(x, w), s),
    "add_rmsnorm_fp8_token": lambda x, r, w: (*scaled(rms(x + r, w)), x + r),
    "add_rmsnorm_fp8_block": lambda x, r, w: (*scaled(rms(x + r, w), 128), x + r),
    "add_rmsnorm_fp8_static": lambda x, r, w, s: (static(rms(x + r, w), s), x + r),
    "swiglu_fp8_token": lambda x: scaled(halves(silu, x)),
    "swiglu_fp8_block": lambda x: scaled(halves(silu, x), 128),
    "int8_token": lambda x: scaled(x, top=127),
    "cross_entropy": loss,
    "cross_entropy_grad": loss_and_gradient,
    "dropout_add_layernorm": dropped,
    "softmax_backward": lambda dy, _: gradients(soft, dy, _logits(dy))[0],
    "swiglu_backward": lambda dy, g, u: gradients(lambda g, u: F.silu(g) * u, dy, g, u),
    "rmsnorm_backward": lambda dy, x, w, _: gradients(lambda x, w: F.rms_norm(x, w.shape, w, EPS), dy, x, w),
    "layernorm_backward": lambda dy, x, w, *_: gradients(
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), dy, x, w, torch.zeros_like(w)
    ),
}


def _logits(like: Tensor) -> Tensor:
    return torch.linspace(-3, 3, like.numel(), dtype=torch.float64).sin().reshape(like.shape)


KEPT: dict[str, Fn] = {
    "softmax_backward": lambda dy, _: (dy, soft(_logits(dy))),
    "rmsnorm_backward": lambda dy, x, w, _: (dy, x, w, 1 / torch.sqrt((x * x).mean(-1) + EPS)),
    "layernorm_backward": lambda dy, x, w, *_: (dy, x, w, x.mean(-1), 1 / torch.sqrt(x.var(-1, correction=0) + 1e-5)),
}
"""What a forward pass keeps for the gradient, in place of random values."""

FLOAT64 = {
    "rmsnorm", "add_rmsnorm", "add_norm_act", "rmsnorm_gated", "layernorm", "add_layernorm", "add_layernorm_gelu",
    "adaln_modulate", "groupnorm_silu", "swiglu", "swiglu_split", "geglu", "geglu_split", "relu2", "bias_gelu",
    "bias_gelu_tanh", "mish_add", "softcap", "layer_scale", "layer_scale_drop_path", "ripple", "softmax", "log_softmax",
    "softmax_scale_mask", "softmax_causal", "dropout_add_layernorm", "rope", "rope_interleaved", "rope_partial", "qk_norm_rope",
}  # fmt: skip
"""The chains that compute in the dtype of what they are given; the others cast to float32."""


def near(got: Tensor, exact: Tensor, tolerance: float) -> None:
    """As near as rounding to the dtype allows: fp8 e4m3 has 3 bits and steps of 2^-9 near 0, int8 steps of 1."""
    allowed = tolerance * (1 + exact.abs())
    if got.dtype == torch.float8_e4m3fn:
        allowed = allowed + torch.maximum(exact.abs() / 16, torch.tensor(2.0**-10))
    elif got.dtype == torch.int8:
        allowed = allowed + 0.5
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= allowed).all()


def test_every_chain_has_an_oracle_and_a_name_of_its_own() -> None:
    names = [e.name for e in CATALOGUE]
    assert len(names) == len(set(names))
    assert set(ORACLES) == set(names)
    written = {k for m in (catalogue, training) for k, v in vars(m).items() if callable(v) and v.__module__ == m.__name__}
    assert {k for k in written if not k.startswith("_")} == {e.fn.__name__ for e in CATALOGUE}


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: e.name)
def test_values(entry: Entry) -> None:
    args = [a.double() if a.is_floating_point() else a for a in entry.case(6, 256, "float64", seed=3)]
    if entry.name in KEPT:
        args = list(KEPT[entry.name](*args))
    got, exact = (torch.utils._pytree.tree_leaves(fn(*args)) for fn in (entry.fn, ORACLES[entry.name]))
    assert len(got) == len(exact)
    for y, e in zip(got, exact, strict=True):
        near(y, e, 1e-12 if entry.name in FLOAT64 else 3e-6)


def test_int8_rounds_ties_to_even() -> None:
    quantized, scale = catalogue.int8_token(torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 3.5]]))
    assert scale.item() == 1 and quantized.tolist() == [[127, -127, 0, 2, -2, 4]]


def test_quantization_of_zeros_and_beyond_the_range() -> None:
    for fn in (catalogue.rmsnorm_fp8_token, catalogue.rmsnorm_fp8_block):
        quantized, scale = fn(torch.zeros(2, 128), torch.ones(128))
        assert not quantized.double().any() and (scale > 0).all()
    far = catalogue.rmsnorm_fp8_static(torch.tensor([[1.0, -1.0]]), torch.ones(2), torch.tensor(1e-3))
    assert far.double().tolist() == [[448, -448]]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: e.name)
@pytest.mark.parametrize(("rows", "cols"), [(5, 384), (1, 1024)])
def test_cases(entry: Entry, rows: int, cols: int) -> None:
    """Shapes and dtypes as the table says; values that make sense."""
    assert cols % entry.multiple == 0
    made = dict(zip(entry.args, entry.case(rows, cols, "bfloat16"), strict=True))
    for name, text in entry.args.items():
        dims, dtype, *_ = (*text.split(":"), "bfloat16")
        shape = () if dims == "()" else tuple(eval(d.replace("/", "//"), {"rows": rows, "cols": cols}) for d in dims.split(","))
        assert (tuple(made[name].shape), made[name].dtype) == (shape, getattr(torch, dtype))
    if "target" in made:
        assert (made["target"] >= 0).all() and (made["target"] < cols).all()
    if "cos" in made:
        assert torch.allclose(made["cos"].float() ** 2 + made["sin"].float() ** 2, torch.ones(()), atol=0.02)
    for name in {"rstd"} | ({"scale"} if "static" in entry.name else set()):
        assert name not in made or (made[name] > 0).all()
    first = torch.utils._pytree.tree_leaves(entry.fn(*made.values()))[0]
    if not entry.name.startswith("cross_entropy"):
        assert first.flatten(-2 if "rope" in entry.name else -1).shape[-1] == cols


def test_shapes_of_the_benchmark() -> None:
    for entry in CATALOGUE:
        assert set(entry.suites) <= set(ROWWISE) and "large" in entry.suites
        assert all(n % entry.multiple == 0 for n in entry.widths)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: e.name)
def test_where_nothing_turns_axes_values_lie_as_a_run_without_data_says(entry: Entry) -> None:
    for rows in (0, 1, 7):
        args = entry.case(rows, 512, "float32")
        traced = trace(entry.fn, args)
        inputs = [args[b.position or 0] for b in traced.bindings]
        assert all(b.position is not None for b in traced.bindings)
        layouts = Layouts(check(traced.chain), inputs, sizes_of(traced, args) or {})
        assert layouts.orders == layouts._memory_orders(inputs)
