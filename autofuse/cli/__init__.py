"""The command `autofuse`. Thin: it reads options, calls the library and prints. Torch, the store and the search are
imported by the commands that need them, so that `--help` is quick.

Exit codes: 0 done, 1 nothing valid was found, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

from . import tuning, results, database  # noqa: F401 # isort: skip - in the order of `autofuse --help`
from .base import app

__all__ = ["app", "main"]


def main() -> None:
    """The console script."""
    app(prog_name="autofuse")
