"""A loaded program on tensors: scalar arguments, grids, workspaces, stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .. import flat, ops
from ..chain import Chain
from ..errors import LaunchError
from . import build
from .artifact import Artifact
from .base import Launch, Source
from .cuda import launcher
from .layout import Layout, Operand, bind
from .lower import Lowered

Run = Callable[..., None]  # of the inputs and outputs, one after the other


def _nothing(*tensors: torch.Tensor) -> None:
    """The launch of a kernel that has no element to write."""


class _Process:
    forked = False  # OpenMP's threads do not survive a fork: a parallel region in the child can hang


def _note_fork() -> None:
    _Process.forked = True


os.register_at_fork(after_in_child=_note_fork)


def operand_of(tensor: torch.Tensor) -> Operand:
    """Sizes and strides of a tensor."""
    return Operand(tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True)
class Compiled:
    """A Triton launch with its grid, scalar arguments and compiler options, and the kernel compiled for them: None in the
    interpreter."""

    launch: Launch
    jit: Any
    grid: tuple[int, ...]
    scalars: list[int]
    options: Mapping[str, int | bool]
    binary: Any


class Kernel:
    """One segment's generated program, ready to run on any row count of its layout."""

    def __init__(self, low: Lowered, layout: Layout, source: Source, cache: Path, artifact: Artifact | None = None) -> None:
        """Raises BuildError where the source is not built ahead of time and a compiler refuses it."""
        self.low, self.layout, self.source, self.cache, self.artifact = low, layout, source, cache, artifact
        self.chain: Chain = low.chain
        if artifact is None:
            self.loaded  # noqa: B018 - built now, not at the first call

    @cached_property
    def loaded(self) -> Any:
        """What the compiler makes of the source. Raises BuildError."""
        return build.load(self.source, self.cache)

    def arguments(
        self, launch: Launch, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[int]:
        """The scalar arguments of a launch for these tensors."""
        operands = [operand_of(t) for t in (*inputs, *outputs)]
        return bind(launch.args, self.layout, self.low, operands, sizes)

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Run on the current stream (or this thread), writing `outputs`. Raises LaunchError where the launch fails."""
        self.bind(inputs, outputs, sizes)(*inputs, *outputs)

    def bind(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Run:
        """A run for tensors of exactly these sizes and strides: what can be computed once is computed here."""
        if all(t.numel() == 0 for t in outputs):
            return _nothing
        if self.low.folds and not bind((("reds",),), self.layout, self.low, (), sizes)[0] and self.low.extremes_of_rows:
            raise LaunchError("the largest or smallest over no rows has no value")
        if self.source.target == "cpu":
            (launch,) = self.source.launches
            return self._bind_c(len(inputs), len(outputs), self.arguments(launch, inputs, outputs, sizes))
        return self._bind_artifact(inputs, outputs, sizes) or self._bind_triton(inputs, outputs, sizes)

    def _bind_c(self, inputs: int, outputs: int, scalars: Sequence[int]) -> Run:
        pointers = [f"t{k}.data_ptr()" for k in range(inputs + outputs)]
        text = (
            f"def run({', '.join(f't{k}' for k in range(inputs + outputs))}):\n"
            f"    kernel(ins({', '.join(pointers[:inputs])}), outs({', '.join(pointers[inputs:])}), numbers,\n"
            "        1 if process.forked else threads)\n"
        )
        return flat.function(
            text,
            {
                "kernel": self.loaded,
                "ins": ctypes.c_void_p * max(1, inputs),
                "outs": ctypes.c_void_p * outputs,
                "numbers": (ctypes.c_int64 * max(1, len(scalars)))(*scalars),
                "process": _Process,
                "threads": self.source.threads,
            },
        )

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

    def compile(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[Compiled]:
        """Each Triton launch that has a program to run at these sizes, compiled for tensors like these and not launched.
        Raises what Triton raises."""
        work = [torch.empty(n, dtype=dtype, device=outputs[0].device) for n, dtype in self.workspaces(sizes)]
        made = []
        for launch, jit in zip(self.source.launches, self.loaded, strict=True):
            grid = self.grid(launch, outputs, sizes)
            if not all(grid):
                continue
            options = launch.options(self.source.fuse_products)
            scalars = self.arguments(launch, inputs, outputs, sizes)
            binary = None
            if hasattr(jit, "device_caches"):  # the interpreter's functions have none
                given = [inputs[k] for k in launch.inputs] + [outputs[k] for k in launch.outputs]
                binary = jit.warmup(*given, *(work[k] for k in launch.workspaces), *scalars, grid=grid, **options)
            made.append(Compiled(launch, jit, grid, scalars, options, binary))
        return made

    def _bind_triton(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Run:
        """Each launch compiled for tensors like these, and launched on the stream that is current at the call."""
        count, device = len(inputs), outputs[0].device
        work = self.workspaces(sizes)
        names: dict[str, Any] = {"index": device.index}
        lines = []
        for number, part in enumerate(self.compile(inputs, outputs, sizes)):
            launch, scalars = part.launch, part.scalars
            taken = [
                *(f"t{k}" for k in launch.inputs), *(f"t{count + k}" for k in launch.outputs),
                *(f"w{k}" for k in launch.workspaces), *(f"n{number}_{k}" for k in range(len(scalars))),
            ]  # fmt: skip
            names |= {f"n{number}_{k}": n for k, n in enumerate(scalars)}
            if part.binary is None:
                names |= {f"run{number}": part.jit[part.grid], f"options{number}": part.options}
                lines.append(f"run{number}({', '.join(taken)}, **options{number})")
                continue
            binary = part.binary
            names["stream_of"] = torch._C._cuda_getCurrentRawStream
            names |= {f"g{number}_{k}": n for k, n in enumerate((*part.grid, 1, 1)[:3])}
            # `run` loads the module, on the current device
            names |= {f"run{number}": binary.run, f"f{number}": binary.function, f"m{number}": binary.packed_metadata}
            place = ", ".join(f"g{number}_{k}" for k in range(3))
            lines.append(f"run{number}({place}, stream_of(index), f{number}, m{number}, None, None, None, {', '.join(taken)})")
        return self._run(lines, names, count + len(outputs), work, device)

    def _bind_artifact(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> Run | None:
        """Each launch of the binaries; None where there are none for such tensors."""
        if self.artifact is None or any(t.data_ptr() % 16 for t in (*inputs, *outputs)):
            return None
        count, index = len(inputs), outputs[0].device.index
        work = self.workspaces(sizes)
        names: dict[str, Any] = {"index": index, "stream_of": torch._C._cuda_getCurrentRawStream}
        lines = []
        for number, (launch, entry, module) in enumerate(
            zip(self.source.launches, self.artifact.entries, self.artifact.modules, strict=True)
        ):
            grid, scalars = self.grid(launch, outputs, sizes), self.arguments(launch, inputs, outputs, sizes)
            if any(not -(2**31) <= n < 2**31 for n in scalars):
                return None
            if not all(grid):
                continue
            taken = [
                *(f"t{k}" for k in launch.inputs), *(f"t{count + k}" for k in launch.outputs),
                *(f"w{k}" for k in launch.workspaces),
            ]  # fmt: skip
            names[f"run{number}"] = launcher(
                module.function(index), grid, entry.threads, entry.shared, entry.overlaps, len(taken), scalars, entry.trailing
            )
            lines.append(f"run{number}(stream_of(index), {', '.join(f'{t}.data_ptr()' for t in taken)})")
        return self._run(lines, names, count + len(outputs), work, outputs[0].device)

    def _run(
        self, lines: list[str], names: dict[str, Any], tensors: int, work: Sequence[tuple[int, torch.dtype]],
        device: torch.device,
    ) -> Run:  # fmt: skip
        """A function of the tensors that launches line by line, with the workspaces that the lines name."""
        if not lines:
            return _nothing
        if work:
            names["workspaces"] = self._workspaces(work, device)
            lines = [f"{', '.join(f'w{k}' for k in range(len(work)))}, = workspaces()", *lines]
        arguments = ", ".join(f"t{k}" for k in range(tensors))
        return flat.function(f"def run({arguments}):\n" + "".join(f"    {line}\n" for line in lines), names)

    def _workspaces(self, work: Sequence[tuple[int, torch.dtype]], device: torch.device) -> Callable[[], list[torch.Tensor]]:
        """What gives a call its workspaces: fresh memory, or what the last call on this stream left."""
        kept: dict[int, dict[int, torch.Tensor]] = {}  # by stream: calls on one stream follow each other

        def cleared() -> dict[int, torch.Tensor]:
            return {k: torch.zeros(work[k][0], dtype=work[k][1], device=device) for k in self.source.kept}

        def workspaces() -> list[torch.Tensor]:
            held: dict[int, torch.Tensor] = {}
            if self.source.kept:
                stream = torch.cuda.current_stream(device).cuda_stream
                if torch.cuda.is_current_stream_capturing():  # two graphs may run beside each other: each clears its own
                    held = cleared()
                else:
                    held = kept.get(stream) or kept.setdefault(stream, cleared())
            return [held[k] if k in held else torch.empty(n, dtype=dtype, device=device) for k, (n, dtype) in enumerate(work)]

        return workspaces
