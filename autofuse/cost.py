"""The roofline bound of a segment or chain: bytes that must cross memory, operations, and what one launch costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from . import ops
from .chain import Chain, Dim, dim_value


@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes a second of a large copy (read + written), floating-point operations a second, seconds a launch."""

    bandwidth: float
    flops: float
    launch_s: float


def numel(shape: Sequence[Dim], sizes: Mapping[str, int]) -> int:
    """Elements of a shape at these row counts."""
    return prod(dim_value(d, sizes) for d in shape)


def bytes_min(chain: Chain, sizes: Mapping[str, int]) -> int:
    """Bytes that must cross device memory: each input whose values count read once, each computed output written once."""
    total = 0
    for i in range(chain.num_inputs):
        v = chain.values[i]
        if not all(ops.reads_shape_only(chain.values[u].name) and chain.values[u].refs[0] == i for u in chain.users[i]):
            total += numel(v.shape, sizes) * ops.ITEMSIZE[v.dtype]
    for o in set(chain.outputs):
        v = chain.values[o]
        if o >= chain.num_inputs:
            total += numel(v.shape, sizes) * ops.ITEMSIZE[v.dtype]
    return total


def flops(chain: Chain, sizes: Mapping[str, int]) -> int:
    """Floating-point operations, by the table's cost of each operation."""
    total = 0.0
    for i in chain.nodes:
        v = chain.values[i]
        widest = max([numel(v.shape, sizes), *(numel(chain.values[r].shape, sizes) for r in v.refs)])
        total += ops.flops_per_element(v.name) * widest
    return int(total)


def roofline_us(chain: Chain, sizes: Mapping[str, int], ceilings: Ceilings, launches: int = 1) -> float:
    """The least time of a chain in microseconds, whatever kernel computes it."""
    move = bytes_min(chain, sizes) / ceilings.bandwidth
    work = flops(chain, sizes) / ceilings.flops
    return 1e6 * max(move, work, launches * ceilings.launch_s)
