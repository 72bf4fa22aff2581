"""A loaded program on tensors: scalar arguments, grids, workspaces, stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import ops
from ..chain import Chain
from ..errors import LaunchError
from .base import Launch, Source
from .layout import Layout, Operand, bind
from .lower import Lowered

Run = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
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
    """One segment's generated program, ready to run on any row count of its layout."""

    def __init__(self, low: Lowered, layout: Layout, source: Source, loaded: Any) -> None:
        self.low, self.layout, self.source, self.loaded = low, layout, source, loaded
        self.chain: Chain = low.chain

    def arguments(
        self, launch: Launch, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[int]:
        """The scalar arguments of a launch for these tensors."""
        operands = [operand_of(t) for t in (*inputs, *outputs)]
        return bind(launch.args, self.layout, self.low, operands, sizes)

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Run on the current stream (or this thread), writing `outputs`. Raises LaunchError where the launch fails."""
        self.bind(inputs, outputs, sizes)(inputs, outputs)

    def bind(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Run:
        """A run for tensors of exactly these sizes and strides: what can be computed once is computed here."""
        if all(t.numel() == 0 for t in outputs):
            return _nothing
        if self.low.folds and not bind((("reds",),), self.layout, self.low, (), sizes)[0] and self.low.extremes_of_rows:
            raise LaunchError("the largest or smallest over no rows has no value")
        if self.source.target == "cpu":
            (launch,) = self.source.launches
            return self._bind_c(len(inputs), len(outputs), self.arguments(launch, inputs, outputs, sizes))
        return self._bind_triton(inputs, outputs, sizes)

    def _bind_c(self, inputs: int, outputs: int, scalars: Sequence[int]) -> Run:
        ins_type, outs_type = ctypes.c_void_p * max(1, inputs), ctypes.c_void_p * outputs
        numbers = (ctypes.c_int64 * max(1, len(scalars)))(*scalars)
        loaded, threads = self.loaded, self.source.threads

        def launch(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
            loaded(
                ins_type(*[t.data_ptr() for t in ins]), outs_type(*[t.data_ptr() for t in outs]), numbers,
                1 if _forked else threads,
            )  # fmt: skip

        return launch

    def grid(self, launch: Launch, outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The number of programs along each axis of a launch's grid."""
        kind = launch.grid
        if kind[0] == "flat":
            return (-(-outputs[0].numel() // int(str(kind[1]))),)
        rows = self._rows(sizes)
        if rows >= 2**31:
            raise LaunchError(f"{rows} rows are more than one launch takes: split the call")
        if kind[0] == "units":
            return (rows * int(str(kind[1])), int(str(kind[2])))
        programs = -(-rows // int(str(kind[1])))
        if kind[0] == "blocks":
            programs *= int(str(kind[2]))
            if programs >= 2**31:
                raise LaunchError(f"{programs} programs are more than one launch takes: split the call")
            return (programs, 1)
        return (min(programs, int(str(kind[2]))),) if kind[0] == "persistent" else (programs, int(str(kind[2])))

    def _rows(self, sizes: Mapping[str, int]) -> int:
        return bind((("rows",),), self.layout, self.low, (), sizes)[0]

    def workspaces(self, sizes: Mapping[str, int]) -> list[tuple[int, torch.dtype]]:
        """Elements and dtype of each workspace at these row counts."""
        rows = self._rows(sizes)
        return [(rows * n, ops.TORCH[dtype]) for dtype, n in self.source.workspaces]

    def _bind_triton(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Run:
        device = outputs[0].device
        work = self.workspaces(sizes)
        parts = []
        for launch, jit in zip(self.source.launches, self.loaded, strict=True):
            grid = self.grid(launch, outputs, sizes)
            if not all(grid):
                continue
            options = launch.options(self.source.fuse_products)
            parts.append((jit[grid], launch, self.arguments(launch, inputs, outputs, sizes), options))
        if len(parts) == 1 and not work and parts[0][1].outputs == tuple(range(len(outputs))):
            jit, launch, scalars, options = parts[0]
            reads = launch.inputs

            def run(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
                jit(*[ins[k] for k in reads], *outs, *scalars, **options)

            return run

        passing = [(k, n, dtype) for k, (n, dtype) in enumerate(work) if k not in self.source.kept]
        kept: dict[int, dict[int, torch.Tensor]] = {}  # by stream: calls on one stream follow each other

        def cleared() -> dict[int, torch.Tensor]:
            return {k: torch.zeros(work[k][0], dtype=work[k][1], device=device) for k in self.source.kept}

        def workspaces() -> dict[int, torch.Tensor]:
            held = {k: torch.empty(n, dtype=dtype, device=device) for k, n, dtype in passing}
            if self.source.kept:
                stream = torch.cuda.current_stream(device).cuda_stream
                if torch.cuda.is_current_stream_capturing():  # two graphs may run beside each other: each clears its own
                    held |= cleared()
                else:
                    held |= kept.get(stream) or kept.setdefault(stream, cleared())
            return held

        def run_all(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
            held = workspaces()
            for jit, launch, scalars, options in parts:
                tensors = [*(ins[k] for k in launch.inputs), *(outs[k] for k in launch.outputs)]
                jit(*tensors, *(held[k] for k in launch.workspaces), *scalars, **options)

        return run_all
