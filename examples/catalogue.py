"""Chains that language models are made of, as plain PyTorch functions. The tests and the benchmarks use them too.

autofuse tune examples/catalogue.py:add_norm_act --arg x=rows,4096 --arg residual=rows,4096 --arg weight=4096 \\
    --axis rows=16,2048 --dtype bfloat16
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse import inputs

EPS = 1e-6
FP8_MAX = 448.0  # the largest finite float8_e4m3fn


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The start of a transformer block: the normed sum, and the sum as the next residual."""
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, EPS), h


def add_norm_act(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """add + RMS norm + SiLU."""
    h = x + residual
    return F.silu(F.rms_norm(h, (h.shape[-1],), weight, EPS))


def add_layernorm_gelu(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """add + layer norm + tanh GELU."""
    h = x + residual
    return F.gelu(F.layer_norm(h, (h.shape[-1],), weight, bias, 1e-5), approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the left half times the right half of the last axis."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """GELU of the left half times the right half of the last axis."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU."""
    return torch.square(F.relu(x))


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """bias + GELU by erf."""
    return F.gelu(x + bias)


def mish_add(x: Tensor, y: Tensor) -> Tensor:
    """mish(x) + y."""
    return F.mish(x) + y


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis."""
    return F.softmax(x, dim=-1)


def softmax_scale_mask(x: Tensor, mask: Tensor, scale: float = 0.125) -> Tensor:
    """Softmax of scaled scores with an additive mask."""
    return F.softmax(x * scale + mask, dim=-1)


def _quantize(y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.float()
    scale = (y.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return (y / scale).to(torch.float8_e4m3fn), scale


def rmsnorm_fp8_token(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm to fp8 e4m3 with a scale for each row."""
    return _quantize(F.rms_norm(x, (x.shape[-1],), weight, EPS))


def rmsnorm_fp8_block(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm to fp8 e4m3 with a scale for each 128 columns of each row."""
    quantized, scale = _quantize(torch.unflatten(F.rms_norm(x, (x.shape[-1],), weight, EPS), -1, (-1, 128)))
    return quantized.flatten(-2), scale.squeeze(-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as in GPT-NeoX: x [..., heads, D]; cos and sin [..., D/2], the same for all heads."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def ripple(x: Tensor, gain: Tensor) -> Tensor:
    """An activation that nobody has named: a gated line with a ripple near 0."""
    return x * torch.sigmoid(gain * x) + 0.1 * torch.sin(3.0 * x) * torch.exp(-x * x)


@dataclass(frozen=True)
class Entry:
    """A chain of the catalogue. `args` are written as for `autofuse tune --arg`, with the axes rows and cols.

    num_ops: operations that read and write memory in eager mode, composites of PyTorch counted as one.
    """

    name: str
    fn: Callable[..., Any]
    args: dict[str, str]
    num_ops: int

    def case(self, rows: int, cols: int, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
        """Arguments of one workload; `cols` is the last axis of the output."""
        specs = tuple(inputs.parse_arg(text) for text in self.args.values())
        return inputs.CaseSpec(specs, (("rows", rows), ("cols", cols)), dtype).make(device, seed)


X = "rows,cols"
CATALOGUE: list[Entry] = [
    Entry("add_rmsnorm", add_rmsnorm, {"x": X, "residual": X, "weight": "cols"}, 2),
    Entry("add_norm_act", add_norm_act, {"x": X, "residual": X, "weight": "cols"}, 3),
    Entry("add_layernorm_gelu", add_layernorm_gelu, {"x": X, "residual": X, "weight": "cols", "bias": "cols"}, 3),
    Entry("swiglu", swiglu, {"x": "rows,2*cols"}, 2),
    Entry("geglu", geglu, {"x": "rows,2*cols"}, 2),
    Entry("relu2", relu2, {"x": X}, 2),
    Entry("bias_gelu", bias_gelu, {"x": X, "bias": "cols"}, 2),
    Entry("mish_add", mish_add, {"x": X, "y": X}, 2),
    Entry("softmax", softmax, {"x": X}, 1),
    Entry("softmax_scale_mask", softmax_scale_mask, {"x": X, "mask": X}, 3),
    Entry("rmsnorm_fp8_token", rmsnorm_fp8_token, {"x": X, "weight": "cols"}, 7),
    Entry("rmsnorm_fp8_block", rmsnorm_fp8_block, {"x": X, "weight": "cols"}, 7),
    Entry("rope", rope, {"x": "rows,cols/128,128", "cos": "rows,64", "sin": "rows,64"}, 7),
    Entry("ripple", ripple, {"x": X, "gain": "cols"}, 10),
]
