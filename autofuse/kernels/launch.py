"""A loaded kernel on tensors: scalar arguments, grid, stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..chain import Chain
from ..errors import LaunchError
from .base import Source
from .layout import Layout, Operand, bind
from .lower import Lowered

_forked = False


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
        if any(t.numel() == 0 for t in outputs):
            if all(t.numel() == 0 for t in outputs):
                return
        scalars = self.arguments(inputs, outputs, sizes)
        if self.source.target == "cpu":
            self._run_c(inputs, outputs, scalars)
        else:
            self._run_triton(inputs, outputs, scalars, sizes)

    def _run_c(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scalars: Sequence[int]) -> None:
        ins = (ctypes.c_void_p * max(1, len(inputs)))(*[t.data_ptr() for t in inputs])
        outs = (ctypes.c_void_p * len(outputs))(*[t.data_ptr() for t in outputs])
        numbers = (ctypes.c_int64 * max(1, len(scalars)))(*scalars)
        self.loaded(ins, outs, numbers, 1 if _forked else self.source.threads)

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

    def _run_triton(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scalars: Sequence[int], sizes: Mapping[str, int]) -> None:
        grid = self.grid(scalars, outputs, sizes)
        if not all(grid):
            return
        tensors = [inputs[k] for k in self.source.inputs]
        self.loaded[grid](*tensors, *outputs, *scalars, num_warps=self.source.num_warps, num_stages=self.source.num_stages)
