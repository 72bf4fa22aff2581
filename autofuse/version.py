"""The installed version, and a hash of the code that generates kernels."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    __version__ = version("autofuse")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0.1.0"


@lru_cache
def kernel_source_hash() -> str:
    """16 hex digits over the source that decides what a config compiles to."""
    here = Path(__file__).parent
    files = [*sorted((here / "kernels").glob("*.py")), here / "ops.py", here / "decompose.py"]
    digest = hashlib.sha256()
    for f in files:
        digest.update(f.name.encode() + b"\0" + f.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def triton_version() -> str:
    """Without importing it; "" where there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
