"""Generated source -> loaded kernel, through a cache in the user's folder.

An object is named by what made it: source, compiler and its version, CPU model or GPU architecture. It is written to a
temporary file and moved into place, so that no process ever loads half of one; an object that does not load is deleted
and built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..files import publish
from .base import Source
from .triton_text import PRELUDE, STAND_INS

_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-w",
    # x * w fused into x * w - max is not the product that the maximum was taken of: a softmax would not reach 1
    "-ffp-contract=off",
    "-fwrapv",  # integers wrap around, as eager's do
)
_loaded: dict[str, Any] = {}
_lock = threading.Lock()
_locks: dict[str, threading.Lock] = {}


@lru_cache
def compiler() -> tuple[str, str]:
    """The C compiler's path and version. Raises BuildError where there is none, or where CC names none that works."""
    named = os.environ.get("CC", "").strip()
    for name in (named,) if named else ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            with contextlib.suppress(OSError):
                # other programs answer --version too: a compiler says that it knows GNU C
                told = subprocess.run(
                    [path, "-dM", "-E", "-x", "c", "-"], input="", capture_output=True, text=True, errors="replace", check=False
                )
                done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False)
                if told.returncode == 0 and "__GNUC__" in told.stdout and done.returncode == 0 and done.stdout:
                    return path, done.stdout.splitlines()[0]
    if named:
        raise BuildError(
            f"CC is {named!r}, which is no C compiler that works here: set it to the path of gcc or clang, without options, or "
            "unset it"
        )
    raise BuildError("no C compiler was found: install gcc or clang, or name one in the environment variable CC")


@lru_cache
def cpu_model() -> str:
    """What -march=native depends on: the CPU's model and feature flags."""
    text = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                text += line
            elif not line.strip():
                break
    return text or platform.processor()


@lru_cache
def _openmp() -> tuple[str, ...]:
    """torch's own OpenMP runtime, where it ships one: with a second one two pools of threads spin against each other."""
    import torch

    for path in glob.glob(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "torch.libs", "libgomp*.so*")):
        return (path, f"-Wl,-rpath,{os.path.dirname(path)}")
    for path in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*")):
        return (path, f"-Wl,-rpath,{os.path.dirname(path)}")
    return ()


def _flags(source: Source) -> tuple[str, ...]:
    machine = platform.machine()
    native = ("-march=native",) if machine in ("x86_64", "AMD64") else ("-mcpu=native",)
    wide = ("-mprefer-vector-width=512",) if "vector=512" in source.text[:64] and "avx512f" in cpu_model() else ()
    return (*_FLAGS, *native, *wide)


def object_name(source: Source) -> str:
    """The cache's name of a compiled C source."""
    told = repr((source.text, compiler()[1], cpu_model(), _flags(source), _openmp()))
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def compile_c(source: Source, cache: Path) -> Path:
    """The shared library of a C source, from the cache or built now. Raises BuildError with the compiler's last line."""
    path = cache / "cpu" / f"{object_name(source)}.so"
    if path.exists():
        return path
    code = path.with_suffix(".c")
    try:
        publish(code, lambda p: _write(p, source.text))

        def make(out: Path) -> None:
            cc = compiler()[0]
            error = ""
            for extra in ((), ("-DAF_SCALAR_LIBM",)):  # the second for a glibc that lacks a vector variant
                command = [
                    cc,
                    *_flags(source),
                    *extra,
                    str(code),
                    "-o",
                    str(out),
                    *_openmp(),
                    "-Wl,--no-undefined",
                    "-lmvec",
                    "-lm",
                ]
                if extra or platform.machine() != "x86_64":
                    command.remove("-lmvec")
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    return
                error = done.stderr.strip()
                if "_ZGV" not in error and "lmvec" not in error:
                    break
            raise BuildError(f"{cc} refused {code}: {error.splitlines()[0] if error else 'no message'}")

        publish(path, make)
    except OSError as e:
        raise BuildError(f"the kernel cache {cache} cannot be written ({e}): set AUTOFUSE_CACHE to a folder that can") from e
    return path


def load(source: Source, cache: Path) -> Any:
    """The loaded program: a ctypes function for C, a JIT function a launch for Triton. Built at most once a process.

    Raises BuildError where a compiler refuses the source.
    """
    key = source.hash
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        mine = _locks.setdefault(key, threading.Lock())
    with mine:  # one thread builds a source, others build others
        found = _loaded.get(key)
        if found is None:
            found = _load_c(source, cache) if source.target == "cpu" else _load_triton(source, cache)
            _loaded[key] = found
    return found


def _load_c(source: Source, cache: Path) -> Any:
    path = compile_c(source, cache)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # a truncated or foreign file: build it again, once
        path.unlink(missing_ok=True)
        try:
            library = ctypes.CDLL(str(compile_c(source, cache)))
        except OSError as e:
            raise BuildError(f"the compiled kernel {path} does not load: {e}") from e
    function = library.kernel
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function.restype = None
    return function


def _load_triton(source: Source, cache: Path) -> Any:
    if importlib.util.find_spec("triton") is None:
        raise BuildError("triton is not installed: pip install triton, or use the CPU (--device cpu)")
    text = source.text
    if os.environ.get("TRITON_INTERPRET") == "1":
        for part, instead in STAND_INS.items():
            text = text.replace(PRELUDE[part], instead)
    name = f"autofuse_kernel_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    entries = [launch.entry for launch in source.launches]
    if name in sys.modules:
        return tuple(getattr(sys.modules[name], e) for e in entries)
    path = cache / "triton" / f"{name}.py"
    try:
        if not path.exists() or path.read_text() != text:
            publish(path, lambda p: _write(p, text))
    except OSError as e:
        raise BuildError(f"the kernel cache {cache} cannot be written ({e}): set AUTOFUSE_CACHE to a folder that can") from e
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        del sys.modules[name]
        raise BuildError(f"triton refused {path}: {type(e).__name__}: {e}") from e
    return tuple(getattr(module, e) for e in entries)
