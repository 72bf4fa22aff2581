"""Recipes of input tensors: enough to make tensors like them in another process, without their data.

A recipe keeps what a kernel's speed and correctness can depend on: sizes, strides, alignment, which inputs are one
tensor, and coarse statistics of the values (a mask keeps its zeros and -inf, labels their range).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import ops
from ..chain import Dim, dim_value
from ..errors import InputError

SAMPLE = 2**20  # elements that the statistics look at
ALIGNMENT = 16  # bytes: the widest load
_POISON = 0xFF  # NaN in every float dtype: a kernel that reads the padding between rows shows it
_INDEX = ("int32", "int64")


@dataclass(frozen=True)
class Recipe:
    """One input tensor without its data.

    sizes, strides   in elements
    dtype            as in the chain ("bfloat16")
    misalignment     bytes of the base past a 16-byte boundary
    alias            number of an earlier input that is the same memory, or None
    mean, std        of the finite, non-zero values of floats; of bools `mean` is the fraction of true
    low, high        least and largest finite value; integers are drawn from [low, high]
    zeros, neg_inf   fractions of the values
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    misalignment: int = 0
    alias: int | None = None
    mean: float = 0.0
    std: float = 1.0
    low: float = -8.0
    high: float = 8.0
    zeros: float = 0.0
    neg_inf: float = 0.0

    @property
    def nonneg(self) -> bool:
        """Whether no finite value is negative."""
        return self.low >= 0

    @staticmethod
    def of(tensor: torch.Tensor, alias: int | None = None) -> Recipe:
        """The recipe of a tensor. Looks at no more than SAMPLE of its elements."""
        dtype = ops.STORAGE.get(tensor.dtype)
        if dtype is None:
            raise InputError(f"dtype {tensor.dtype} is not supported: pass one of {', '.join(ops.TORCH)}")
        head = (tuple(tensor.shape), tuple(tensor.stride()), dtype, tensor.data_ptr() % ALIGNMENT, alias)
        sample = _sample(tensor.detach())
        if not sample.numel():
            return Recipe(*head)
        if tensor.dtype is torch.bool:
            return Recipe(*head, mean=float(sample.float().mean()), std=0.0, low=0, high=1)
        if not tensor.dtype.is_floating_point:
            return Recipe(*head, low=int(sample.min()), high=int(sample.max()))
        x = sample.to(torch.float64)
        finite = x[x.isfinite()]
        zeros, neg_inf = float((x == 0).double().mean()), float((x == -torch.inf).double().mean())
        if not finite.numel():
            return Recipe(*head, zeros=zeros, neg_inf=neg_inf)
        rest = finite[finite != 0]
        mean, std = (float(rest.mean()), float(rest.std(correction=0))) if rest.numel() else (0.0, 0.0)
        return Recipe(*head, mean, std, float(finite.min()), float(finite.max()), zeros, neg_inf)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Recipe:
        """The recipe of `to_json`. Raises InputError for anything else."""
        try:
            return Recipe(**{**data, "sizes": tuple(data["sizes"]), "strides": tuple(data["strides"])})
        except (KeyError, TypeError) as e:
            raise InputError(f"this is no recipe of an input: {e}") from e


def recipes_of(tensors: Sequence[torch.Tensor]) -> tuple[Recipe, ...]:
    """The recipes of a call's inputs; inputs that are one tensor stay one."""
    seen: dict[tuple[Any, ...], int] = {}
    made = []
    for k, t in enumerate(tensors):
        place = (t.data_ptr(), t.device, t.dtype, tuple(t.shape), tuple(t.stride()))
        alias = seen.get(place) if t.numel() else None
        seen.setdefault(place, k)
        made.append(Recipe.of(t, alias))
    return tuple(made)


def _sample(t: torch.Tensor) -> torch.Tensor:
    count = t.numel()
    if count <= SAMPLE:
        return t.reshape(-1)
    # one element of each stretch, at a place that varies, so that a stretch of one row does not give one column
    step = count // SAMPLE
    k = torch.arange(SAMPLE, device=t.device)
    at = k * step + (k * 2654435761) % step
    index: list[torch.Tensor] = []
    for n in reversed(t.shape):
        index.insert(0, at % n)
        at = at // n
    bits = t.view(torch.uint8) if t.element_size() == 1 else t  # fp8 has no indexing everywhere
    return bits[tuple(index)].view(t.dtype)


def strides_at(recipe: Recipe, sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of the recipe's pattern at other sizes: order of dimensions, expanded ones and padding stay.

    A dimension that had extent 1 has no pattern: it runs on from the dimension inside it.
    """
    if tuple(sizes) == recipe.sizes:
        return recipe.strides
    dims = range(len(sizes))
    order = sorted((d for d in dims if recipe.sizes[d] != 1), key=lambda d: (recipe.strides[d], -d))
    for d in reversed(dims):
        if recipe.sizes[d] == 1:
            order.insert(order.index(d + 1) + 1 if d + 1 in dims else 0, d)
    made = [0] * len(sizes)
    was = now = 1  # where the next dimension starts when rows run on, then and now
    for d in order:
        old = recipe.strides[d]
        if recipe.sizes[d] == 1:
            made[d] = now
            now *= max(1, sizes[d])
            continue
        if old == 0:
            continue
        if old < was or now == was:  # an overlapping window, or padding behind extents that did not change
            made[d] = old
        elif old % was == 0:  # a slice of something k times as long
            made[d] = old // was * now
        else:
            made[d] = now + old - was
        was, now = max(was, old * recipe.sizes[d]), max(now, made[d] * max(1, sizes[d]))
    return tuple(made)


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if all(sizes) else 0


def _values(r: Recipe, count: int, device: torch.device, seed: int, bound: int | None) -> torch.Tensor:
    """`count` values like the recipe's; `bound` caps indices where row counts differ from the recorded ones."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = ops.TORCH[r.dtype]

    def uniform() -> torch.Tensor:
        return torch.rand(count, device=device, generator=generator)

    if dtype is torch.bool:
        return uniform() < r.mean
    if not dtype.is_floating_point:
        low, high = int(r.low), int(r.high)
        if bound is not None and low >= 0 and r.dtype in _INDEX:
            high = min(high, bound - 1)
            low = min(low, high)
        high = min(high, 2**63 - 2)
        made = torch.randint(low, high + 1, (count,), device=device, generator=generator, dtype=torch.int64)
        return made.to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x = torch.randn(count, device=device, generator=generator, dtype=wide)
    x = x.mul_(r.std).add_(r.mean).clamp_(r.low, r.high)
    if r.zeros:
        x.masked_fill_(uniform() < r.zeros, 0.0)
    if r.neg_inf:
        x.masked_fill_(uniform() < r.neg_inf, -torch.inf)
    return x.to(dtype)


def make(
    recipes: Sequence[Recipe], shapes: Sequence[Sequence[Dim]], sizes: Mapping[str, int],
    device: torch.device | str, seed: int,
) -> list[torch.Tensor]:  # fmt: skip
    """Tensors of these recipes at these row counts. `shapes` are the chain's inputs' shapes, with row symbols.

    Other seeds give other values. Where row counts differ from the recorded ones, indices (int32 and int64 without
    negative values) stay below the least row count, since they may point into rows.
    """
    device = torch.device(device)
    made: list[torch.Tensor] = []
    for k, (r, shape) in enumerate(zip(recipes, shapes, strict=True)):
        if r.alias is not None:
            made.append(made[r.alias])
            continue
        extents = tuple(dim_value(d, sizes) for d in shape)
        bound = None
        if sizes and any(tuple(dim_value(d, sizes) for d in s) != q.sizes for q, s in zip(recipes, shapes, strict=True)):
            bound = max(1, min(sizes.values()))
        strides = strides_at(r, extents)
        dtype = ops.TORCH[r.dtype]
        span = _span(extents, strides)
        offset = r.misalignment // dtype.itemsize
        raw = torch.full(((span + offset) * dtype.itemsize,), _POISON, dtype=torch.uint8, device=device)
        buffer = raw.view(dtype)
        held = tuple(1 if s == 0 else n for n, s in zip(extents, strides, strict=True))
        count = 1
        for n in held:
            count *= n
        if span == 0:
            made.append(torch.empty_strided(extents, strides, dtype=dtype, device=device))
            continue
        if _overlaps(held, strides):
            buffer[offset:].copy_(_values(r, span, device, seed * 1009 + k, bound))
        else:
            base = buffer.as_strided(held, strides, offset)
            base.copy_(_values(r, count, device, seed * 1009 + k, bound).view(held))
        made.append(buffer.as_strided(extents, strides, offset))
    return made


def _overlaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    reach = 1
    for s, n in sorted(zip(strides, sizes, strict=True)):
        if n == 1:
            continue
        if s < reach:
            return True
        reach = s * n
    return False
