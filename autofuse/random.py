"""Random numbers that a kernel makes again instead of storing: a function of (seed, offset, element's number) alone.

The value of element i, its row-major number in the logical shape (64-bit), depends neither on strides nor on where the
chain is cut nor on the target, so that a backward pass draws its forward pass's mask again from the same two integers.

    F(h):  h ^= h >> 16;  h *= 0x85ebca6b;  h ^= h >> 13;  h *= 0xc2b2ae35;  h ^= h >> 16          (32-bit, wrapping)
    a  = F(low(seed) ^ 0x9e3779b9)              k0 = F(F(a ^ high(seed)) ^ low(offset))
    k1 = F(k0 ^ a ^ high(offset))               u_i = (F(F(low(i) ^ k0) ^ k1 ^ high(i)) >> 8) * 2^-24

F is the 32-bit finaliser of MurmurHash3 (Austin Appleby, public domain); it is a bijection, so that (seed, offset) pairs
that differ in either have different keys (k0, k1) where the other is the same. Two rounds of it cost a fifth of the
Philox 4x32-10 that torch draws from, whose numbers these are not: autofuse.dropout is not torch's dropout bit for bit.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from .errors import InputError

MASK = 0xFFFFFFFF
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
GOLDEN = 0x9E3779B9

Number = TypeVar("Number", int, torch.Tensor)


def mixed(h: Number) -> Number:
    """F of the module's text: of Python ints or int64 tensors that hold 32 bits."""
    h = h ^ (h >> 16)
    h = (h * MULTIPLIERS[0]) & MASK
    h = h ^ (h >> 13)
    h = (h * MULTIPLIERS[1]) & MASK
    return h ^ (h >> 16)


def keys(seed: Number, offset: Number) -> tuple[Number, Number]:
    """(k0, k1) of the module's text; seed and offset are 64-bit, signed."""
    a = mixed((seed & MASK) ^ GOLDEN)
    k0 = mixed(mixed(a ^ ((seed >> 32) & MASK)) ^ (offset & MASK))
    return k0, mixed(k0 ^ a ^ ((offset >> 32) & MASK))


def bits(i: Number, k0: Number, k1: Number) -> Number:
    """The 24 random bits of element `i` (64-bit)."""
    return mixed(mixed((i & MASK) ^ k0) ^ k1 ^ ((i >> 32) & MASK)) >> 8


@torch.library.custom_op("autofuse::uniform", mutates_args=())
def _uniform(like: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    index = torch.arange(like.numel(), dtype=torch.int64, device=like.device).view(like.shape)
    return bits(index, *keys(seed, offset)).to(torch.float32) * 2.0**-24


@_uniform.register_fake
def _(like: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return like.new_empty(like.shape, dtype=torch.float32)


def _whole(value: int | torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dim() or value.dtype != torch.int64 or value.device != device:
            raise InputError(
                f"{name} is a {value.dtype} tensor of {value.dim()} axes on {value.device}: pass a 0-d int64 tensor on {device}, "
                "or an int"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InputError(f"{name}={value!r} is no 64-bit integer: pass an int, or a 0-d int64 tensor where it varies")
    return torch.full((), value, dtype=torch.int64, device=device)


def uniform(like: torch.Tensor, seed: int | torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """float32 numbers in [0, 1) of `like`'s shape, on its device, contiguous: multiples of 2^-24.

    Element i depends only on (seed, offset, i), i its row-major number: see the module's text. `like`'s values are not
    read. seed and offset are 0-d int64 tensors on its device, so that they vary without a new trace, or Python ints,
    which are structure. Raises InputError for anything else.
    """
    made: torch.Tensor = _uniform(like.detach(), _whole(seed, "seed", like.device), _whole(offset, "offset", like.device))
    return made


def _probability(p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise InputError(f"p={p!r} is no probability: pass a Python number from 0 to 1")
    return float(p)


def _dropped(x: torch.Tensor, like: torch.Tensor, p: float, seed: int | torch.Tensor, offset: int | torch.Tensor) -> torch.Tensor:
    p = _probability(p)
    if not x.is_floating_point():
        raise InputError(f"x is a tensor of {x.dtype}, which does not scale by 1 / (1 - p): pass a floating one")
    if p == 0:
        return x.clone()
    if p == 1:
        return torch.zeros_like(x)
    return torch.where(uniform(like, seed, offset) >= p, x * (1 / (1 - p)), 0.0)


def dropout(x: torch.Tensor, p: float, seed: int | torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """`x` with each element 0 with probability `p` and else scaled by 1 / (1 - p); shape and dtype are `x`'s.

    The mask is `uniform(x, seed, offset) >= p`: the same call on the gradient is the backward pass. A dropped NaN or
    infinity is 0. Raises InputError for a p that is no number from 0 to 1, and as `uniform` does.
    """
    return _dropped(x, x, p, seed, offset)


def drop_path(x: torch.Tensor, p: float, seed: int | torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """As `dropout`, of whole entries of the leading axis: one number a sample, that of its place in the batch."""
    if not x.dim():
        raise InputError("x has no axis: drop_path drops entries of the leading one")
    like = torch.zeros((x.shape[0], *(1 for _ in x.shape[1:])), device=x.device)
    return _dropped(x, like, p, seed, offset)
