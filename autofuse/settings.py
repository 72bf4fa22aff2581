"""The only reader of the environment (AUTOFUSE_*). A plain dataclass: the runtime must not pay for importing pydantic."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import InputError

ON_MISS = ("heuristic", "eager", "error")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    store     URL of the result database (AUTOFUSE_STORE); default: SQLite in the user's data folder
    cache     folder of built kernels (AUTOFUSE_CACHE); default: the user's cache folder
    disable   AUTOFUSE_DISABLE=1: every fused function is its eager self
    on_miss   AUTOFUSE_ON_MISS: what a call does when the store has nothing near it
    demand    AUTOFUSE_DEMAND=1: calls that no config was tuned for are counted, and written to the store
    layers    URLs of databases that are only read, below the store, the first before the next (AUTOFUSE_LAYERS)
    named     whether AUTOFUSE_STORE is set
    artifacts folders whose binaries, made by `autofuse build --out`, are run beside the cache's (AUTOFUSE_ARTIFACTS)
    """

    store: str
    cache: Path
    disable: bool
    on_miss: str
    demand: bool = False
    layers: tuple[str, ...] = ()
    named: bool = False
    artifacts: tuple[Path, ...] = ()


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise InputError(f"{name} is {text!r}: set it to 1 or 0")


def read(env: Mapping[str, str] | None = None) -> Settings:
    """Read the settings now. Raises InputError for a value that is not one of those allowed."""
    env = os.environ if env is None else env
    on_miss = env.get("AUTOFUSE_ON_MISS", "").strip() or "heuristic"
    if on_miss not in ON_MISS:
        raise InputError(f"AUTOFUSE_ON_MISS is {on_miss!r}: set it to one of {', '.join(ON_MISS)}")
    store = env.get("AUTOFUSE_STORE", "").strip()
    cache = env.get("AUTOFUSE_CACHE", "").strip()
    layers = tuple(store_url(text) for text in _paths(env.get("AUTOFUSE_LAYERS", "")))
    named = bool(store)
    if not store or not cache:
        import platformdirs

        store = store or f"sqlite:///{Path(platformdirs.user_data_dir('autofuse', False)) / 'autofuse.db'}"
        cache = cache or platformdirs.user_cache_dir("autofuse", False)
    return Settings(
        store_url(store), Path(cache).expanduser(), _flag(env, "AUTOFUSE_DISABLE"), on_miss, _flag(env, "AUTOFUSE_DEMAND"),
        layers, named, tuple(Path(p).expanduser() for p in env.get("AUTOFUSE_ARTIFACTS", "").split(os.pathsep) if p.strip()),
    )  # fmt: skip


def _paths(text: str) -> list[str]:
    """The paths and URLs between separators of a search path (":", on Windows ";"), which a URL may hold too: what follows
    the URL of a server is another only if it begins like a URL, "/", "." or "~"."""
    made: list[str] = []
    server = False
    for piece in re.split(rf"{re.escape(os.pathsep)}(?!//)", text):
        starts = "://" in piece or piece.startswith(("/", ".", "~"))
        if server and not starts:
            made[-1] += os.pathsep + piece
            continue
        made.append(piece)
        server = "://" in piece and not piece.startswith("sqlite")
    return [p.strip() for p in made if p.strip()]


def store_url(text: str) -> str:
    """A database URL as it is, or a plain path as a SQLite URL of that file."""
    if "://" in text:
        return text
    return f"sqlite:///{Path(text).expanduser().absolute()}"
