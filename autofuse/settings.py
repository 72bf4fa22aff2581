"""The only reader of the environment (AUTOFUSE_*). A plain dataclass: the runtime must not pay for importing pydantic."""

from __future__ import annotations

import os
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
    """

    store: str
    cache: Path
    disable: bool
    on_miss: str
    demand: bool = False


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
    if not store or not cache:
        import platformdirs

        store = store or f"sqlite:///{Path(platformdirs.user_data_dir('autofuse', False)) / 'autofuse.db'}"
        cache = cache or platformdirs.user_cache_dir("autofuse", False)
    return Settings(
        store_url(store), Path(cache).expanduser(), _flag(env, "AUTOFUSE_DISABLE"), on_miss, _flag(env, "AUTOFUSE_DEMAND")
    )


def store_url(text: str) -> str:
    """A database URL as it is, or a plain path as a SQLite URL of that file."""
    if "://" in text:
        return text
    return f"sqlite:///{Path(text).expanduser().absolute()}"
