"""Kernels built ahead of time: binaries in a file, for a GPU that need not be there, loaded without Triton.

A file is one line of JSON, with a digest of what follows, and the binaries. Its name holds what the binaries depend on:
source, launches, architecture, and Triton's version. They are for pointers on 16 bytes and 32-bit numbers; other calls
are compiled. Binaries are code: they live in the user's own cache, or in a folder that the user names, and no database
holds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..files import publish
from ..version import triton_version
from .base import Source
from .cuda import Module
from .lower import Lowered

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One launch's binary. trailing: unused pointers after its arguments; size: its bytes in the file."""

    name: str
    threads: int
    shared: int
    overlaps: bool
    arguments: int
    trailing: int
    size: int


@dataclass(frozen=True)
class Artifact:
    """A source's binaries, in the order of its launches."""

    entries: tuple[Entry, ...]
    modules: tuple[Module, ...]


def file_of(source: Source, arch: str, cache: Path) -> Path:
    """Where a source's binaries for an architecture (sm_90) lie."""
    told = repr((FORMAT, source.text, source.launches, source.workspaces, source.fuse_products, arch, triton_version()))
    return cache / "cuda" / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.bin"


def write(source: Source, low: Lowered, arch: str, cache: Path) -> Path:
    """Compile a source for an architecture, if its file is not there. Raises BuildError where Triton refuses it."""
    path = file_of(source, arch, cache)
    if read(path) is not None:
        return path
    from .resources import compile_for

    entries, images = [], []
    for launch, compiled in zip(source.launches, compile_for(source, low, int(arch.removeprefix("sm_")), cache), strict=True):
        meta, image = compiled.metadata, compiled.asm["cubin"]
        if getattr(meta, "global_scratch_size", 0) or getattr(meta, "profile_scratch_size", 0):
            raise BuildError(f"{launch.entry} wants memory of its own from Triton's launcher: it is compiled at its first call")
        parameters = _parameters(compiled.asm["ptx"], meta.name)
        arguments = len(launch.inputs) + len(launch.outputs) + len(launch.workspaces) + len(launch.args)
        entries.append(
            Entry(
                meta.name, 32 * meta.num_warps, meta.shared, bool(getattr(meta, "launch_pdl", False)), arguments,
                parameters - arguments, len(image),
            )
        )  # fmt: skip
        images.append(image)
    body = b"".join(images)
    head = {"format": FORMAT, "digest": hashlib.sha256(body).hexdigest(), "entries": [asdict(e) for e in entries]}
    data = json.dumps(head, sort_keys=True).encode() + b"\n" + body
    try:
        publish(path, lambda p: _write(p, data))
    except OSError as e:
        raise BuildError(f"the kernel cache {cache} cannot be written ({e}): set AUTOFUSE_CACHE to a folder that can") from e
    return path


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _parameters(ptx: str, name: str) -> int:
    """How many parameters a kernel has in PTX."""
    found = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", ptx, re.DOTALL)
    if found is None:
        raise BuildError(f"Triton's PTX has no entry {name}")
    return len(re.findall(r"\.param\b", found.group(1)))


def read(path: Path) -> Artifact | None:
    """The binaries of a file; None where it is not there, or not whole."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        head, body = path.read_bytes().split(b"\n", 1)
        told: dict[str, Any] = json.loads(head)
        if told["format"] != FORMAT or told["digest"] != hashlib.sha256(body).hexdigest():
            return None
        entries = tuple(Entry(**e) for e in told["entries"])
        modules, at = [], 0
        for e in entries:
            modules.append(Module(body[at : at + e.size], e.name, e.shared))
            at += e.size
        return Artifact(entries, tuple(modules)) if at == len(body) else None
    return None


def find(source: Source, arch: str, folders: Sequence[Path]) -> Artifact | None:
    """A source's binaries for an architecture, from the first folder that has them; None where none does."""
    for folder in folders:
        found = read(file_of(source, arch, folder))
        if found is not None:
            return found
    return None
