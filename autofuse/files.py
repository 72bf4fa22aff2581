"""Files that several processes make at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def publish(path: Path, make: Callable[[Path], None]) -> None:
    """Make a file beside its place and move it there: readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem + ".", suffix=".tmp" + path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        make(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
