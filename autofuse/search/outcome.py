"""What became of a candidate: the status of an exception, and the resources that a compiled kernel takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import AutofuseError, BuildError, Infeasible
from ..kernels.launch import Kernel
from ..program import Program

_LOST = (
    "illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure",
    "illegal instruction", "an illegal address", "hardware stack error", "launch timed out", "uncorrectable ecc",
)  # fmt: skip


def one_line(error: BaseException) -> str:
    """An exception as one line of text, whatever it is."""
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:
        lines = []
    if (type(error).__module__ or "").startswith("triton") and len(lines) > 1:
        lines[0] = f"{lines[0]} {lines[-1]}"  # between place and reason it quotes the source
    text = lines[0] if lines else ""
    if not isinstance(error, AutofuseError) or not text:
        text = f"{type(error).__name__}: {text}"
    return text.rstrip(": ")[:500]


def failure(error: BaseException) -> dict[str, Any]:
    """The answer that an exception means."""
    try:
        text = str(error).lower()
    except Exception:
        text = ""
    module = type(error).__module__ or ""
    if any(t in text for t in _LOST):
        status = "crashed"
    elif isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in text or "can't allocate memory" in text:
        status = "out_of_memory"
    elif isinstance(error, Infeasible) or type(error).__name__ == "OutOfResources":
        status = "pruned"  # more shared memory, registers or threads than the device has: known only after the build
    elif isinstance(error, BuildError) or (module.startswith("triton") and type(error).__name__ != "InterpreterError"):
        status = "compile_error"
    else:
        status = "launch_error"
    return {"status": status, "message": one_line(error)}


def compile_triton(
    kernel: Kernel, reads: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Compile for these arguments without launching. Raises what Triton raises."""
    if not all(t.numel() for t in outputs):
        return {}
    return facts([part.binary for part in kernel.compile(reads, outputs, sizes) if part.binary is not None])


def facts(compiled: Sequence[Any]) -> dict[str, Any]:
    registers: list[int] = []
    spills: list[int] = []
    shared: list[int] = []
    for c in compiled:
        handles = getattr(c, "_init_handles", None)
        if handles is not None:
            handles()  # loads the module: registers are known only then, and OutOfResources is raised here
        if getattr(c, "n_regs", None) is not None:
            registers.append(int(c.n_regs))
            spills.append(int(c.n_spills))
        found = getattr(getattr(c, "metadata", None), "shared", None)
        if found is not None:
            shared.append(int(found))
    names = (("registers", registers), ("spills", spills), ("shared_bytes", shared))
    return {name: max(values) for name, values in names if values}


def resources(program: Program) -> dict[str, Any]:
    """The largest of each resource over a config's kernels; nothing on a CPU."""
    compiled: list[Any] = []
    for step in program.steps:
        if step.kernel is None or not isinstance(step.kernel.loaded, tuple):
            continue
        source = step.kernel.source
        for launch, jit in zip(source.launches, step.kernel.loaded, strict=True):
            told = launch.options(source.fuse_products)
            for cache in (getattr(jit, "device_caches", None) or {}).values():
                # one text is compiled for several schedules: those of this one's warps and registers
                compiled += [c for c in cache[0].values() if all(getattr(c.metadata, n, v) == v for n, v in told.items())]
    return facts(compiled)
