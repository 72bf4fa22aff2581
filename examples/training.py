"""Chains of training, as plain PyTorch functions: losses over a vocabulary, and the gradients of norms and activations.

Each gradient takes what the forward pass has kept. Sums are in float32, results in the dtype of what they belong to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import autofuse


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of each row in float32: logits [rows, vocabulary]; target [rows], int64."""
    return F.cross_entropy(logits.float(), target, reduction="none")


def cross_entropy_grad(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the gradient of their sum: softmax minus one-hot."""
    x = logits.float()
    hit = torch.arange(x.shape[-1], device=x.device) == target[:, None]
    return F.cross_entropy(x, target, reduction="none"), (F.softmax(x, dim=-1) - hit.float()).to(logits.dtype)


def dropout_add_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """dropout + add + layer norm, and the sum. The same seed, a 0-d int64, draws the same mask again in a gradient."""
    h = residual + autofuse.dropout(x, 0.1, seed)
    return F.layer_norm(h, (h.shape[-1],), weight, bias, 1e-5), h


def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of softmax over the last axis, from its output."""
    g, p = dy.float(), y.float()
    return (p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of silu(gate) * up by both."""
    g, a, b = dy.float(), gate.float(), up.float()
    s = torch.sigmoid(a)
    return (g * b * s * (1 + a * (1 - s))).to(gate.dtype), (g * a * s).to(up.dtype)


def rmsnorm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of RMS norm by x and weight: dy and x [rows, D]; rstd [rows]."""
    g, r = dy.float(), rstd[:, None]
    normed = x.float() * r
    w = g * weight.float()
    dx = r * (w - normed * (w * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * normed).sum(0).to(weight.dtype)


def layernorm_backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of layer norm by x, weight and bias: dy and x [rows, D]; mean and rstd [rows]."""
    g, r = dy.float(), rstd[:, None]
    normed = (x.float() - mean[:, None]) * r
    w = g * weight.float()
    dx = r * (w - w.mean(-1, keepdim=True) - normed * (w * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * normed).sum(0).to(weight.dtype), g.sum(0).to(weight.dtype)
