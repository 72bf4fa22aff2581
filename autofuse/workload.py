"""What is tuned: a chain with its extents, dtypes, layouts and row count. The look-up key, one field a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod

import torch

from . import cost
from .chain import Chain, Value
from .kernels.layout import Operand, static_strides
from .store.records import WorkloadRecord

ALIGNMENT = 16  # bytes of the widest load


def rows_of(sizes: Mapping[str, int]) -> int:
    """What "rows" means: the product of the row counts of the leading axes."""
    return prod(sizes.values())


def layout_class(value: Value, operand: Operand, aligned: bool) -> str:
    """One operand's layout as text: how its leading axes run on, its static strides, its alignment.

    "c" leading axes that run on as one, "s" strided ones; then the stride of each static axis ("n" where it is none of
    the usual); then "a" where the base and every row start on 16 bytes, "u" where not.
    """
    leading = [k for k, d in enumerate(value.shape) if not isinstance(d, int)]
    runs = all(
        operand.sizes[i] == 1 or operand.sizes[j] == 1 or operand.strides[i] == operand.sizes[j] * operand.strides[j]
        for i, j in pairwise(leading)
    )
    known = static_strides(value.shape, operand)
    static = ",".join("n" if known[k] is None else str(known[k]) for k in range(len(known)) if k not in leading)
    return f"{'c' if runs else 's'}:{static}:{'a' if aligned else 'u'}"


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the tensor's base and each of its rows start on 16 bytes."""
    size = tensor.element_size()
    if tensor.data_ptr() % ALIGNMENT:
        return False
    return all(n == 1 or (s * size) % ALIGNMENT == 0 or s in (0, 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def layouts_of(chain: Chain, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The layout class of each input."""
    return tuple(
        layout_class(v, Operand(tuple(t.shape), tuple(t.stride())), is_aligned(t))
        for v, t in zip(chain.inputs, tensors, strict=True)
    )


@lru_cache(maxsize=4096)
def _record(chain: Chain, layouts: tuple[str, ...], sizes: tuple[tuple[str, int], ...]) -> WorkloadRecord:
    at = dict(sizes)
    return WorkloadRecord(
        chain_key=chain.key,
        dtypes=chain.dtypes,
        layouts=layouts,
        rows=rows_of(at),
        extents=chain.extents,
        flops=cost.flops(chain, at),
        bytes_min=cost.bytes_min(chain, at),
    )


def workload_of(chain: Chain, layouts: tuple[str, ...], sizes: Mapping[str, int]) -> WorkloadRecord:
    """The workload of a chain at these layouts and row counts."""
    return _record(chain, layouts, tuple(sorted(sizes.items())))


def describe(chain: Chain, sizes: Mapping[str, int]) -> str:
    """A workload for people: the widest input, such as "16x4096 bfloat16"."""
    widest = max(chain.inputs, key=lambda v: cost.numel(v.shape, sizes), default=None)
    if widest is None:
        return "no inputs"
    shape = "x".join(str(cost.numel((d,), sizes)) for d in widest.shape) or "scalar"
    return f"{shape} {widest.dtype}"
