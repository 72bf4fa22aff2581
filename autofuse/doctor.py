"""What this machine can do, and what to do about what it lacks: one check a line."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import settings
from .errors import AutofuseError, InputError
from .version import __version__

KERNEL = """#include <omp.h>
void kernel(long *count) {
  long n = 0;
  #pragma omp parallel reduction(+ : n)
  n += 1;
  *count = n;
}
"""
SQLITE = b"SQLite format 3\0"
"""How a database file begins; an empty file becomes one."""
TARGETS = ("target cpu", "target cuda")


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, whether it is there, what was found, and what to do if it is missing."""

    what: str
    ok: bool
    found: str
    remedy: str = ""


class _Missing(Exception):
    """What was found instead, and what to do."""


def database_url(store: str | None) -> str:
    """The URL of the database that the option or the environment names. Raises InputError for a file of another kind."""
    from .store.sqlite import sqlite_path

    url = settings.store_url(store) if store else settings.read().store
    path = sqlite_path(url)
    if path is not None:
        head = b""
        with suppress(OSError), path.open("rb") as file:  # opening the database says what is wrong with the place
            head = file.read(len(SQLITE))
        if head and head != SQLITE:
            raise InputError(f"{path} is no database: name another file with {'--store' if store else 'AUTOFUSE_STORE'}")
    return url


def examine(store: str | None = None) -> tuple[Check, ...]:
    """All checks, in the order in which they build on each other. `store`: the URL to look at, else the settings'."""
    return tuple(_examine(store))


def usable(checks: tuple[Check, ...]) -> bool:
    """Whether kernels can be made for one target at least."""
    return any(check.ok for check in checks if check.what in TARGETS)


def _check(what: str, look: Callable[[], str]) -> Check:
    try:
        return Check(what, True, look())
    except _Missing as missing:
        return Check(what, False, *missing.args)
    except AutofuseError as error:  # its message says what to do
        found, _, remedy = str(error).partition(": ")
        return Check(what, False, found, remedy)


def _examine(store: str | None) -> Iterator[Check]:
    yield Check("autofuse", True, __version__)
    yield Check("python", True, f"{platform.python_version()} ({sys.executable})")
    torch = _check("torch", _torch)
    yield torch
    compiler = _check("C compiler", _compiler)
    yield compiler
    openmp = _check("OpenMP", _openmp) if compiler.ok and torch.ok else _needs("OpenMP", torch, compiler)
    yield openmp
    triton = _check("triton", _triton)
    yield triton
    gpu = _check("GPU", _gpu) if torch.ok else _needs("GPU", torch)
    yield gpu
    yield _target("target cpu", "C with OpenMP", torch, compiler, openmp)
    yield _target("target cuda", "Triton", torch, compiler, triton, gpu)
    yield _check("store", lambda: _store(store))
    yield _check("kernel cache", _cache)


def _needs(what: str, *parts: Check) -> Check:
    lacking = [part.what for part in parts if not part.ok]
    return Check(what, False, f"needs {' and '.join(lacking)}", "see above")


def _target(what: str, how: str, *parts: Check) -> Check:
    return Check(what, True, f"{how} kernels") if all(part.ok for part in parts) else _needs(what, *parts)


def _torch() -> str:
    try:
        import torch
    except Exception as error:
        raise _Missing(f"does not import: {error}", "pip install torch") from error
    return f"{torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'})"


def _compiler() -> str:
    from .kernels import build

    path, told = build.compiler()
    return f"{path} ({told})"


def _openmp() -> str:
    """A small kernel that is compiled and run as the real ones are."""
    from .device import cpu_threads
    from .kernels.base import Launch, Source
    from .kernels.build import compile_c

    source = Source("cpu", KERNEL, (Launch("kernel", (), ("threads",), (), ()),))
    with tempfile.TemporaryDirectory(prefix="autofuse-doctor-") as folder:
        library = ctypes.CDLL(str(compile_c(source, Path(folder))))
        count = ctypes.c_long(0)
        library.kernel(ctypes.byref(count))
    return f"a kernel was compiled and ran on {count.value} of {cpu_threads()} cores"


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        raise _Missing("not installed", "pip install triton (Linux only; the CPU needs none)")
    try:
        return version("triton")
    except PackageNotFoundError:
        return "of unknown version"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            raise _Missing("torch is a CPU build", "where there is a GPU: install a CUDA build of torch")
        raise _Missing("torch sees no CUDA device", "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES")
    names = []
    for number in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(number)
        names.append(f"cuda:{number} {p.name} (sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB)")
    return "; ".join(names)


def _store(url: str | None) -> str:
    url = database_url(url)
    from .store.engine import database_path, make_engine, where
    from .store.schema import check
    from .store.store import Store

    engine = make_engine(url)  # makes the folder of a SQLite file, but no file
    path = database_path(engine)
    try:
        if path is not None and not path.exists():
            if not os.access(path.parent, os.W_OK):
                raise _Missing(f"{path.parent} cannot be written", "set AUTOFUSE_STORE to a file in a folder that can")
            return f"{path} (not there yet: the first tuning job makes it)"
        if path is not None and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
            raise _Missing(f"{path} cannot be written", "make the file and its folder writable, or set AUTOFUSE_STORE")
        if not check(engine, write=True):
            return f"{where(engine)} (has no tables of this version: the next tuning job makes them)"
    finally:
        engine.dispose()
    with Store.open(url, read_only=True) as store:
        trials = store.query("SELECT count(*) FROM trial")[1][0][0]
        return f"{where(engine)} (schema up to date, {trials} trials)"


def _cache() -> str:
    folder = settings.read().cache
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _Missing(f"{folder} cannot be written ({error.strerror})", "set AUTOFUSE_CACHE to one that can") from error
    return str(folder)
