"""autofuse: tuned fused kernels for chains of PyTorch operations.

    @autofuse.fuse                            a function that runs its tuned kernel
    autofuse.tune(fn, [(x, weight), ...])     the offline job: search, check, measure, store
    autofuse.reload()                         read the store again
    autofuse.dropout(x, p, seed)              dropout whose mask a kernel makes and makes again; also drop_path, uniform

What is not used is not imported: a program that only calls fused functions never loads Optuna, SQLAlchemy or Alembic,
and the command's help does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    AutofuseError,
    BuildError,
    Infeasible,
    InputError,
    LaunchError,
    MissError,
    StoreCorrupt,
    StoreError,
    StoreNewer,
    TraceError,
    UnsupportedOp,
    WorkerError,
)
from .result import Progress, Tuned, TuneResult
from .version import __version__

if TYPE_CHECKING:
    from .dispatch import Explanation, Fused, fuse, load, reload
    from .random import drop_path, dropout, uniform
    from .search.tuner import tune

_LAZY = {
    "Explanation": "dispatch",
    "Fused": "dispatch",
    "drop_path": "random",
    "dropout": "random",
    "fuse": "dispatch",
    "load": "dispatch",
    "reload": "dispatch",
    "tune": "search.tuner",
    "uniform": "random",
}

__all__ = [
    "AutofuseError",
    "BuildError",
    "Explanation",
    "Fused",
    "Infeasible",
    "InputError",
    "LaunchError",
    "MissError",
    "Progress",
    "StoreCorrupt",
    "StoreError",
    "StoreNewer",
    "TraceError",
    "TuneResult",
    "Tuned",
    "UnsupportedOp",
    "WorkerError",
    "__version__",
    "drop_path",
    "dropout",
    "fuse",
    "load",
    "reload",
    "tune",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'autofuse' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    return value
