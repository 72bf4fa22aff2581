"""The silicon and the software that a result belongs to."""

from __future__ import annotations

import contextlib
import os
import platform
from functools import lru_cache
from pathlib import Path

import torch

from .errors import BuildError, InputError
from .kernels import build
from .kernels.base import Limits
from .store.records import DeviceRecord, EnvironmentRecord, content_uid
from .version import __version__, kernel_source_hash, triton_version


def default_device() -> str:
    """The GPU if there is one, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def parse_device(text: str | None) -> torch.device:
    """The device of this name. Raises InputError for one that is not here."""
    try:
        device = torch.device(text or default_device())
    except RuntimeError as e:
        raise InputError(f"{text!r} is no device: use cpu or cuda:0") from e
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device("cuda", device.index or 0)
        if (device.index or 0) >= count:
            raise InputError(f"there is no {device}: this machine has {count} CUDA devices; use --device cpu")
    elif device.type != "cpu":
        raise InputError(f"no kernels are made for {device.type}: use cpu or cuda:0")
    return device


@lru_cache
def cpu_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_bytes(level: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
            if (index / "level").read_text().strip() == str(level):
                text = (index / "size").read_text().strip()
                return int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1)
    return None


def _cpu_name() -> str:
    for line in build.cpu_model().splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@lru_cache
def describe(device: str) -> DeviceRecord:
    """Identity and limits of a device; `uid` hashes them, so that one name with another memory or MIG slice is another."""
    if torch.device(device).type == "cpu":
        flags = content_uid(build.cpu_model())
        name, threads = _cpu_name(), cpu_threads()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        l2 = _cache_bytes(2)
        uid = content_uid("cpu", name, platform.machine(), threads, flags, l2)
        return DeviceRecord(uid, "cpu", name, platform.machine(), threads, l2_bytes=l2, memory_bytes=memory)
    p = torch.cuda.get_device_properties(torch.device(device))
    arch = f"sm_{p.major}{p.minor}"
    shared = getattr(p, "shared_memory_per_multiprocessor", None)
    block = getattr(p, "shared_memory_per_block_optin", None)
    l2 = getattr(p, "L2_cache_size", None)
    gib = round(p.total_memory / 2**30)
    uid = content_uid("nvidia", p.name, arch, p.multi_processor_count, shared, l2, gib)
    return DeviceRecord(
        uid, "nvidia", p.name, arch, p.multi_processor_count, shared, block,
        getattr(p, "regs_per_multiprocessor", None), l2, p.total_memory,
        partition="MIG" if "MIG" in p.name else "",
    )  # fmt: skip


@lru_cache
def limits(device: str) -> Limits:
    """What kernel kinds must know of a device."""
    return limits_of(describe(device))


def limits_of(record: DeviceRecord) -> Limits:
    """The same of a device that need not be here."""
    if record.vendor == "cpu":
        return Limits("cpu", record.arch, threads=record.sm_count)
    return Limits("cuda", record.arch, 1, record.sm_count, record.shared_per_block_bytes or 48 * 1024)


@lru_cache
def environment(device: str) -> EnvironmentRecord:
    """The software of this process, as far as a time or a kernel depends on it."""
    compiler = ""
    with contextlib.suppress(BuildError):
        compiler = build.compiler()[1]
    cuda = torch.device(device).type == "cuda"
    driver = ""
    if cuda:
        with contextlib.suppress(Exception):
            driver = str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
    return EnvironmentRecord(
        driver=driver,
        cuda=(torch.version.cuda or "") if cuda else "",
        torch=torch.__version__,
        triton=triton_version() if cuda else "",
        compiler="" if cuda else compiler,
        python=platform.python_version(),
        autofuse=__version__,
        kernel_source_hash=kernel_source_hash(),
    )
