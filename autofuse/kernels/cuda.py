"""Kernels from binaries: loaded and launched by the CUDA driver's own interface, with no compiler and no Triton."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from .. import flat
from ..errors import LaunchError

DEFAULT_SHARED = 48 * 1024  # bytes of shared memory that a kernel may take without asking
DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
BUFFER_POINTER, BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint), ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class Extra(ctypes.Structure):
    """The list of options that says where a launch's arguments lie."""

    _fields_ = (
        ("pointer", ctypes.c_void_p), ("buffer", ctypes.c_char_p), ("size", ctypes.c_void_p), ("bytes", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
    )  # fmt: skip


@lru_cache
def driver() -> Any:
    """The CUDA driver's library. Raises LaunchError where there is none."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise LaunchError(f"the CUDA driver's library is not found ({e}): install NVIDIA's driver") from e
    found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return found


def check(code: int, what: str) -> None:
    """Raise LaunchError, with the driver's own words, for a code that is not 0."""
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{what}: CUDA error {code}, {(text.value or b'unknown').decode()}")


class Module:
    """A binary, and its kernel on each device that it was asked for."""

    def __init__(self, image: bytes, entry: str, shared: int) -> None:
        self.image, self.entry, self.shared = image, entry, shared
        self._functions: dict[int, int] = {}
        self._lock = threading.Lock()

    def function(self, index: int) -> int:
        """The kernel on the device `index`, which is the current one. Raises LaunchError where the driver refuses it."""
        with self._lock:
            if index not in self._functions:
                cuda, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
                check(cuda.cuModuleLoadData(ctypes.byref(module), self.image), f"the binary of {self.entry} is not loaded")
                found = cuda.cuModuleGetFunction(ctypes.byref(function), module, self.entry.encode())
                check(found, f"the binary has no kernel {self.entry}")
                if self.shared > DEFAULT_SHARED:
                    asked = cuda.cuFuncSetAttribute(function, DYNAMIC_SHARED, self.shared)
                    check(asked, f"{self.entry} gets no {self.shared} bytes of shared memory")
                assert function.value is not None
                self._functions[index] = function.value
            return self._functions[index]


def launcher(
    function: int, grid: Sequence[int], threads: int, shared: int, overlaps: bool, pointers: int, scalars: Sequence[int],
    trailing: int,
) -> Callable[..., None]:  # fmt: skip
    """A launch with everything bound but the stream and the pointers: `run(stream, *pointers)`. Safe in any thread.

    overlaps: starts while the kernel before it ends. trailing: pointers after the arguments that the kernel does not use.
    """
    layout = struct.Struct("@" + "Q" * pointers + "i" * len(scalars) + ("Q" * trailing if trailing else "0Q"))
    size = ctypes.c_size_t(layout.size)
    attribute = Attribute(SERIALIZATION, b"", 1, b"")
    place = ", ".join(map(str, [*([*grid, 1, 1][:3]), threads, 1, 1, shared]))
    taken = [f"p{k}" for k in range(pointers)]
    held = ", ".join([*taken, *(str(int(n)) for n in scalars), *("0" for _ in range(trailing))])
    text = (
        f"def run(stream{''.join(f', {p}' for p in taken)}):\n"
        f"    code = launch(byref(Config({place}, stream, attributes, {int(overlaps)})), function, None,\n"
        f"        byref(Extra(1, pack({held}), 2, size, None)))\n"
        "    if code: check(code, 'the launch failed')\n"
    )
    names = {
        "launch": driver().cuLaunchKernelEx, "byref": ctypes.byref, "Config": Config, "Extra": Extra, "function": function,
        "pack": layout.pack, "size": ctypes.addressof(size), "check": check,
        "attributes": ctypes.addressof(attribute), "kept": (size, attribute),
    }  # fmt: skip
    return flat.function(text, names)
