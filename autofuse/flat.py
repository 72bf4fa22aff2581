"""Small functions made from text, so that a call's path holds no loop, no list and no look-up that one line can spare.

Texts name their constants T0, S1 and so on, and get the values beside them: one text is compiled once a process, however
many functions are made of it. No text holds anything but names that this package makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any


@lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    return compile(text, "<autofuse>", "exec")


def function(text: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `run` that `text` defines, with `names` as its globals."""
    space = dict(names)
    exec(_code(text), space)
    made: Callable[..., Any] = space["run"]
    return made
