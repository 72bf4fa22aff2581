"""A loaded kernel on tensors: scalar arguments, grid, stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..chain import Chain
from ..errors import LaunchError
from .base import Source
from .layout import Layout, Operand, bind
from .lower import Lowered

Launch = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
_forked = False


def _nothing(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """The launch of a kernel that has no element to write."""


def _note_fork() -> None:
    global _forked
    _forked = True  # OpenMP's threads do not survive a fork: a parallel region in the child can hang


os.register_at_fork(after_in_child=_note_fork)


def operand_of(tensor: torch.Tensor) -> Operand:
    """Sizes and strides of a tensor."""
    return Operand(tuple(tensor.shape), tuple(tensor.stride()))


class Kernel:
    """One generated kernel, ready to run on any row count of its layout."""

    def __init__(self, low: Lowered, layout: Layout, source: Source, loaded: Any) -> None:
        self.low, self.layout, self.source, self.loaded = low, layout, source, loaded
        self.chain: Chain = low.chain

    def arguments(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[int]:
        """The scalar arguments for these tensors."""
        operands = [operand_of(t) for t in (*inputs, *outputs)]
        return bind(self.source.args, self.layout, self.low.extents, operands, sizes)

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Run on the current stream (or this thread), writing `outputs`. Raises LaunchError where the launch fails."""
        self.bind(inputs, outputs, sizes)(inputs, outputs)

    def bind(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Launch:
        """A launch for tensors of exactly these sizes and strides: what can be computed once is computed here."""
        if all(t.numel() == 0 for t in outputs):
            return _nothing
        scalars = self.arguments(inputs, outputs, sizes)
        if self.source.target == "cpu":
            return self._bind_c(len(inputs), len(outputs), scalars)
        return self._bind_triton(scalars, outputs, sizes)

    def _bind_c(self, inputs: int, outputs: int, scalars: Sequence[int]) -> Launch:
        ins_type, outs_type = ctypes.c_void_p * max(1, inputs), ctypes.c_void_p * outputs
        numbers = (ctypes.c_int64 * max(1, len(scalars)))(*scalars)
        loaded, threads = self.loaded, self.source.threads

        def launch(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
            loaded(
                ins_type(*[t.data_ptr() for t in ins]), outs_type(*[t.data_ptr() for t in outs]), numbers,
                1 if _forked else threads,
            )  # fmt: skip

        return launch

    def grid(self, scalars: Sequence[int], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The number of programs along each axis of the grid."""
        kind = self.source.grid
        if kind[0] == "flat":
            return (-(-outputs[0].numel() // int(str(kind[1]))),)
        rows = bind((("rows",),), self.layout, self.low.extents, (), sizes)[0]
        if rows >= 2**31:
            raise LaunchError(f"{rows} rows are more than one launch takes: split the call")
        programs = -(-rows // int(str(kind[1])))
        return (programs, int(str(kind[2])))

    def _bind_triton(self, scalars: Sequence[int], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Launch:
        grid = self.grid(scalars, outputs, sizes)
        if not all(grid):
            return _nothing
        jit, reads = self.loaded[grid], self.source.inputs
        options = {
            "num_warps": self.source.num_warps, "num_stages": self.source.num_stages,
            "enable_fp_fusion": self.source.fuse_products,
        }  # fmt: skip

        def launch(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
            jit(*[ins[k] for k in reads], *outs, *scalars, **options)

        return launch
