"""What a Triton kernel takes of a GPU, found by compiling it, with no GPU needed: registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError
from . import build
from .base import Launch, Source
from .lower import Lowered

TRITON_TYPES = {
    "float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5", "int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64", "bool": "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """Registers a thread, bytes of stack a thread (spills), bytes of shared memory a program."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_for(source: Source, low: Lowered, arch: int, cache: Path, aligned: bool = True) -> list[Any]:
    """Each launch compiled for sm_<arch>; `aligned`: pointers divide by 16, as those of ordinary tensors.

    Raises BuildError where Triton refuses the source.
    """
    return [
        _compile(source, launch, function, low, arch, aligned)
        for launch, function in zip(source.launches, build.load(source, cache), strict=True)
    ]


def _compile(source: Source, launch: Launch, function: Any, low: Lowered, arch: int, aligned: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(function.arg_names)
    signature, attrs = {}, {}
    for k, name in enumerate(names):
        if name.startswith("in") and name[2:].isdigit():
            signature[name] = "*" + TRITON_TYPES[low.values[int(name[2:])].dtype]
        elif name.startswith("out") and name[3:].isdigit():
            signature[name] = "*" + TRITON_TYPES[low.chain.values[low.chain.outputs[int(name[3:])]].dtype]
        elif name.startswith("ws") and name[2:].isdigit():
            signature[name] = "*" + TRITON_TYPES[source.workspaces[int(name[2:])][0]]
        else:
            signature[name] = "i32"
        if aligned and signature[name] != "i32":
            attrs[(k,)] = [["tt.divisibility", 16]]
    try:
        return triton.compile(
            ASTSource(function, signature, {}, attrs), target=GPUTarget("cuda", arch, 32),
            options=launch.options(source.fuse_products),
        )  # fmt: skip
    except Exception as e:
        raise BuildError(
            f"triton refused the kernel for sm_{arch}: {type(e).__name__}: {str(e).splitlines()[-1] if str(e) else ''}"
        ) from e


def resources(source: Source, low: Lowered, arch: int, cache: Path) -> Resources:
    """The most that any launch takes on sm_<arch>, read from the binaries. Raises BuildError."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    registers = stack = shared = 0
    for compiled in compile_for(source, low, arch, cache):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(compiled.asm["cubin"])
            f.flush()
            done = subprocess.run([str(tool), "-res-usage", f.name], capture_output=True, text=True, check=False)
        found = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED):(\d+)", done.stdout + done.stderr)}
        if "REG" not in found:
            raise BuildError(f"{tool} told no resources: {(done.stderr or done.stdout).strip()[:200]}")
        registers, stack = max(registers, found["REG"]), max(stack, found["STACK"])
        shared = max(shared, compiled.metadata.shared, 0)
    return Resources(registers, stack, shared)
