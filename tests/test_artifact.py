"""Binaries built ahead of time: the file, the driver's structures as a C compiler reads them, and which calls they serve."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from autofuse.errors import LaunchError
from autofuse.fusion import check
from autofuse.kernels import artifact, build, cuda
from autofuse.kernels.base import Limits, Source, Task
from autofuse.kernels.launch import Kernel
from autofuse.program import Layouts
from autofuse.trace import trace
from autofuse.traced import sizes_of
from tests.kernel_cases import data, offset

H100 = Limits("cuda", "sm_90", sm_count=132, shared_bytes=227 * 1024)
FAKE = Path(__file__).with_name("fake_cuda.c")


class Told(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("attributes", ctypes.c_uint),
        ("attribute", ctypes.c_uint), ("on", ctypes.c_uint), ("stream", ctypes.c_uint64), ("function", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64), ("arguments", ctypes.c_ubyte * 4096), ("launches", ctypes.c_uint),
        ("modules", ctypes.c_uint), ("asked", ctypes.c_uint), ("fail", ctypes.c_int),
    )  # fmt: skip


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    """What the driver was told."""
    path = tmp_path / "libcuda.so"
    subprocess.run([build.compiler()[0], "-shared", "-fPIC", "-O1", str(FAKE), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    with (
        mock.patch.object(cuda, "driver", lambda: library),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0x77, create=True),
    ):
        yield Told.in_dll(library, "told")


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(F.rms_norm(x, (x.shape[-1],), w, 1e-6))


def made(x: torch.Tensor, w: torch.Tensor) -> tuple[Task, Source, dict[str, int]]:
    traced = trace(norm, (x, w))
    sizes = sizes_of(traced, (x, w))
    assert sizes is not None
    layouts = Layouts(check(traced.chain), (x, w), sizes)
    (nodes,) = layouts.fusion.fused()
    seed = layouts.seed(nodes, H100)
    assert seed is not None
    kind, knobs = seed
    task = layouts.task(nodes, H100)
    return task, kind.emit(task, knobs), sizes


def test_a_launch_in_the_drivers_own_structures(told: Told) -> None:
    run = cuda.launcher(0x1234, (7, 3), 128, 60000, True, 2, [5, -6, 2**31 - 1], 2)
    run(0x99, 0x7F0000000010, 0x10)
    assert (list(told.grid), list(told.block), told.shared) == ([7, 3, 1], [128, 1, 1], 60000)
    assert (told.attributes, told.attribute, told.on, told.stream, told.function) == (1, 6, 1, 0x99, 0x1234)
    assert struct.unpack("@QQiiiQQ", bytes(told.arguments[: told.bytes])) == (0x7F0000000010, 0x10, 5, -6, 2**31 - 1, 0, 0)
    cuda.launcher(0x1234, (2**31 - 1,), 32, 0, False, 1, [], 0)(0, 16)
    assert told.attributes == 0 and told.grid[0] == 2**31 - 1 and told.bytes == 8
    told.fail = 200
    with pytest.raises(LaunchError, match="the launch failed: CUDA error 200, device kernel image is invalid"):
        run(0, 1, 2)


def test_a_module_is_loaded_once_a_device(told: Told) -> None:
    module = cuda.Module(b"good", "kernel", 100_000)
    assert [module.function(k) for k in (0, 0, 1)] == [0x1234] * 3
    assert told.modules == 2 and told.asked == 100_000
    with pytest.raises(LaunchError, match="the binary of kernel is not loaded: CUDA error 200"):
        cuda.Module(b"bad", "kernel", 0).function(0)
    with pytest.raises(LaunchError, match="no kernel missing: CUDA error 500, named symbol not found"):
        cuda.Module(b"good", "missing", 0).function(0)


def test_a_file_holds_binaries_and_only_a_whole_one_is_read(tmp_path: Path) -> None:
    task, source, _ = made(data(64, 512), data(512))
    path = artifact.write(source, task.low, "sm_90", tmp_path)
    found = artifact.find(source, "sm_90", (tmp_path / "none", tmp_path))
    assert found is not None and artifact.find(source, "sm_80", (tmp_path,)) is None
    (entry,), (module,) = found.entries, found.modules
    assert module.image[:4] == b"\x7fELF" and entry.arguments == 3 + len(source.launches[0].args)
    assert entry.threads == 32 * source.launches[0].num_warps and entry.trailing >= 0
    whole, before = path.read_bytes(), path.stat().st_mtime_ns
    assert artifact.write(source, task.low, "sm_90", tmp_path) == path and path.stat().st_mtime_ns == before
    for broken in (whole[:-1], whole + b"x", b"", b"{}\n", b"[]\n" + whole, whole.replace(b'"format": 1', b'"format": 9')):
        path.write_bytes(broken)
        assert artifact.find(source, "sm_90", (tmp_path,)) is None
    assert artifact.write(source, task.low, "sm_90", tmp_path) == path and path.read_bytes() == whole


def test_a_call_launches_the_binary_and_compiles_nothing(told: Told, tmp_path: Path) -> None:
    x, w, y = data(64, 512), data(512), torch.empty(64, 512)
    task, source, sizes = made(x, w)
    artifact.write(source, task.low, "sm_90", tmp_path)
    with mock.patch.object(build, "load", side_effect=AssertionError("compiled")):
        kernel = Kernel(task.low, task.layout, source, tmp_path, artifact.find(source, "sm_90", (tmp_path,)))
        kernel.bind([x, w], [y], sizes)(x, w, y)
        (launch,) = source.launches
        scalars = kernel.arguments(launch, [x, w], [y], sizes)
        pointers = [t.data_ptr() for t in (x, w, y)]
        n = len(pointers) * 8 + len(scalars) * 4
        assert struct.unpack(f"@QQQ{len(scalars)}i", bytes(told.arguments[:n])) == (*pointers, *scalars)
        assert told.stream == 0x77 and tuple(told.grid) == (*kernel.grid(launch, [y], sizes), 1)[:3]
        with pytest.raises(AssertionError, match="compiled"):  # which the binary was not made for
            kernel.bind([offset(x), w], [y], sizes)


def test_without_a_driver_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    cuda.driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(LaunchError, match="the CUDA driver's library is not found"):
        cuda.driver()
    cuda.driver.cache_clear()
