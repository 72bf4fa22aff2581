"""Chains that language models are made of, as plain PyTorch functions. The tests and the benchmarks use them too.

autofuse tune examples/catalogue.py:add_norm_act --arg x=rows,4096 --arg residual=rows,4096 --arg weight=4096 \\
    --axis rows=16,2048 --dtype bfloat16

Training has its own, in training.py; entries.py says which shapes each takes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
FP8_MAX = 448.0  # the largest finite float8_e4m3fn

# ---- norms


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of each row."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def rmsnorm_gemma(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as in Gemma: scaled by weight + 1 in float32, cast afterwards."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return (y * (1.0 + weight.float())).to(x.dtype)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The start of a transformer block: the normed sum, and the sum as the next residual."""
    h = x + residual
    return rmsnorm(h, weight), h


def add_rmsnorm_gemma(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same as in Gemma."""
    h = x + residual
    return rmsnorm_gemma(h, weight), h


def add_norm_act(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """add + RMS norm + SiLU."""
    return F.silu(rmsnorm(x + residual, weight))


def rmsnorm_gated(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """RMS norm times SiLU of a gate, as in Mamba2."""
    return rmsnorm(x, weight) * F.silu(z)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm of each row."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def add_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The normed sum, and the sum."""
    h = x + residual
    return layernorm(h, weight, bias), h


def add_layernorm_gelu(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """add + layer norm + tanh GELU."""
    return F.gelu(layernorm(x + residual, weight, bias), approximate="tanh")


def adaln_modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Layer norm modulated as in a diffusion transformer: x [B, T, D]; scale and shift [B, 1, D]."""
    return F.layer_norm(x, (x.shape[-1],), eps=EPS) * (1 + scale) + shift


def groupnorm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int = 32) -> Tensor:
    """Group norm + SiLU: x [N, C, L]; weight and bias [C]."""
    return F.silu(F.group_norm(x, groups, weight, bias, EPS))


# ---- activations and residuals


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the left half times the right half of the last axis."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_split(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of one tensor times another."""
    return F.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """GELU of the left half times the right half of the last axis."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def geglu_split(gate: Tensor, up: Tensor) -> Tensor:
    """Tanh GELU of one tensor times another, as in Gemma."""
    return F.gelu(gate, approximate="tanh") * up


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU."""
    return torch.square(F.relu(x))


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """bias + GELU by erf."""
    return F.gelu(x + bias)


def bias_gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    """bias + GELU by tanh."""
    return F.gelu(x + bias, approximate="tanh")


def mish_add(x: Tensor, y: Tensor) -> Tensor:
    """mish(x) + y."""
    return F.mish(x) + y


def softcap(x: Tensor, cap: float = 30.0) -> Tensor:
    """Logits kept within -cap and cap, as in Gemma 2."""
    return cap * torch.tanh(x / cap)


def layer_scale(residual: Tensor, branch: Tensor, gamma: Tensor) -> Tensor:
    """A residual branch with a learned scale for each column."""
    return residual + gamma * branch


def layer_scale_drop_path(residual: Tensor, branch: Tensor, gamma: Tensor, keep: Tensor, rate: float = 0.1) -> Tensor:
    """The same with stochastic depth: `keep` [B, 1, 1] says which samples keep their branch."""
    return residual + gamma * branch * keep / (1 - rate)


def ripple(x: Tensor, gain: Tensor) -> Tensor:
    """An activation that nobody has named: a gated line with a ripple near 0."""
    return x * torch.sigmoid(gain * x) + 0.1 * torch.sin(3.0 * x) * torch.exp(-x * x)


# ---- attention: scores and positions


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis."""
    return F.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    """The logarithm of the softmax over the last axis."""
    return F.log_softmax(x, dim=-1)


def softmax_scale_mask(x: Tensor, mask: Tensor, scale: float = 0.125) -> Tensor:
    """Softmax of scaled scores with an additive mask."""
    return F.softmax(x * scale + mask, dim=-1)


def softmax_causal(x: Tensor, scale: float = 0.125) -> Tensor:
    """Softmax of scaled scores [..., T, S] in which row i sees the columns up to i."""
    row = torch.arange(x.shape[-2], device=x.device)[:, None]
    column = torch.arange(x.shape[-1], device=x.device)
    return F.softmax((x * scale).masked_fill(column > row, -math.inf), dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as in GPT-NeoX: x [..., heads, D]; cos and sin [..., D/2], the same for all heads."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as in GPT-J: columns 2k and 2k + 1 are a pair. Shapes as for `rope`."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rope_partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` of the first half of each head, the rest as it is: cos and sin [..., D/4]."""
    turned, passed = x.chunk(2, dim=-1)
    return torch.cat((rope(turned, cos, sin), passed), dim=-1)


def qk_norm_rope(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """RMS norm of each head of queries and keys, then `rope`, as in Qwen3: [..., heads, D]; weights [D]."""
    return rope(rmsnorm(query, query_weight), cos, sin), rope(rmsnorm(key, key_weight), cos, sin)


# ---- quantization


def _quantize(y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.float()
    scale = (y.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return (y / scale).to(torch.float8_e4m3fn), scale


def _quantize_block(y: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scale = _quantize(torch.unflatten(y, -1, (-1, 128)))
    return quantized.flatten(-2), scale.squeeze(-1)


def _quantize_static(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def rmsnorm_fp8_token(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm to fp8 e4m3 with a scale for each row."""
    return _quantize(rmsnorm(x, weight))


def rmsnorm_fp8_block(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm to fp8 e4m3 with a scale for each 128 columns of each row."""
    return _quantize_block(rmsnorm(x, weight))


def rmsnorm_fp8_static(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """RMS norm to fp8 e4m3 with a scale that is given, a 0-d tensor."""
    return _quantize_static(rmsnorm(x, weight), scale)


def add_rmsnorm_fp8_token(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """add + RMS norm to fp8 with a scale for each row: values, scales, and the sum."""
    h = x + residual
    return *rmsnorm_fp8_token(h, weight), h


def add_rmsnorm_fp8_block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a scale for each 128 columns."""
    h = x + residual
    return *rmsnorm_fp8_block(h, weight), h


def add_rmsnorm_fp8_static(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a scale that is given: values, and the sum."""
    h = x + residual
    return rmsnorm_fp8_static(h, weight, scale), h


def swiglu_fp8_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu` to fp8 e4m3 with a scale for each row."""
    return _quantize(swiglu(x))


def swiglu_fp8_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu` to fp8 e4m3 with a scale for each 128 columns of each row."""
    return _quantize_block(swiglu(x))


def int8_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 with a scale for each row, rounded to nearest, ties to even."""
    y = x.float()
    scale = (y.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-12)
    return torch.round(y / scale).clamp(-128, 127).to(torch.int8), scale
