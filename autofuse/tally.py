"""How many calls each match tier served, counted by a C function: an addition in Python would cost each call more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

TIERS = ("exact", "near rows", "near device", "heuristic", "eager")
"""The match tiers, the best first."""


class Tally:
    """A count for each tier. `counter` gives what adds one to it; it is safe in any thread."""

    def __init__(self) -> None:
        self._counts = {tier: count() for tier in TIERS}
        self._lock = threading.Lock()
        self._back = dict.fromkeys(TIERS, 0)

    def counter(self, tier: str) -> Callable[[], int]:
        """What is called for each call that the tier serves."""
        return self._counts[tier].__next__

    def take_back(self, tier: str) -> None:
        """Say that a call was counted that the tier did not serve after all."""
        with self._lock:
            self._back[tier] += 1

    def read(self) -> dict[str, int]:
        """The calls of each tier that served any."""
        with self._lock:
            found = {tier: next(counted) - self._back[tier] for tier, counted in self._counts.items()}
            for tier in TIERS:
                self._back[tier] += 1  # a count can only be read by adding to it
        return {tier: n for tier, n in found.items() if n}
