"""What the benchmark measures: suites of workloads, and how many rows fill a suite's traffic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofuse import cost
from autofuse.trace import trace
from autofuse.traced import sizes_of
from examples.entries import Entry

MIB = 2**20
HIDDEN = (1024, 2880, 4096, 5120, 7168, 8192, 14336, 16384)
LONG = 32768
"""Rows of this many columns and more belong to the suite of long rows."""

MAX_ROWS = 65536
ROUND_ROWS = 16


@dataclass(frozen=True)
class Suite:
    """Columns with rows each. Rows None: as many as `traffic` bytes need. `protocol` None: by the bytes, as in a search."""

    shapes: tuple[tuple[int | None, int], ...]
    traffic: int = 256 * MIB
    protocol: str | None = None
    own_widths: bool = True  # an entry's own columns take the place of the suite's


NEIGHBOUR = 4096
NEAR_8 = (NEIGHBOUR - 8, NEIGHBOUR + 8)
ODD = (NEIGHBOUR - 2, NEIGHBOUR - 1, NEIGHBOUR + 1, NEIGHBOUR + 2)

SUITES: dict[str, Suite] = {
    "large": Suite(tuple((None, n) for n in HIDDEN)),
    "long": Suite(tuple((None, n) for n in (LONG, 65536, 131072, 262144)), 128 * MIB),
    "decode": Suite(tuple((rows, 4096) for rows in (1, 16, 64, 256)), protocol="graph", own_widths=False),
    "odd": Suite(
        (*((None, n) for n in (NEIGHBOUR, *NEAR_8, *ODD)), *((rows, NEIGHBOUR) for rows in (1, 3, 1000))), own_widths=False
    ),
}


@dataclass(frozen=True)
class Workload:
    """One entry at one shape. `rows` None: what `traffic` bytes need."""

    suite: str
    entry: Entry
    rows: int | None
    cols: int
    dtype: str
    traffic: int = 256 * MIB
    protocol: str | None = None

    def __str__(self) -> str:
        return f"{self.entry.name} {'?' if self.rows is None else self.rows}x{self.cols} {self.dtype}"

    def filled(self) -> int:
        """Its rows, found from the chain's bytes a row where they are not given."""
        if self.rows is not None:
            return self.rows
        few, more = (bytes_of(self.entry, rows, self.cols, self.dtype) for rows in (ROUND_ROWS, 2 * ROUND_ROWS))
        return rows_for((more - few) / ROUND_ROWS, self.traffic)


def bytes_of(entry: Entry, rows: int, cols: int, dtype: str) -> int:
    """Bytes that must cross memory: each input read once, each output written once."""
    args = entry.case(rows, cols, dtype)
    traced = trace(entry.fn, args)
    return cost.bytes_min(traced.chain, sizes_of(traced, args) or {})


def rows_for(bytes_a_row: float, traffic: int) -> int:
    """Rows that move `traffic` bytes: at most MAX_ROWS, and a multiple of ROUND_ROWS where there are as many."""
    rows = max(1, min(MAX_ROWS, int(traffic / bytes_a_row)))
    return rows - rows % ROUND_ROWS if rows >= ROUND_ROWS else rows


def workloads(name: str, entries: Iterable[Entry], dtypes: Sequence[str]) -> list[Workload]:
    """A suite's workloads: of each entry that belongs to it, at the shapes at which it makes sense."""
    suite = SUITES[name]
    found = []
    for entry in entries:
        if name not in entry.suites:
            continue
        shapes = suite.shapes
        if suite.own_widths and entry.widths:
            shapes = tuple((None, n) for n in entry.widths if (n >= LONG) == (name == "long"))
        found += [
            Workload(name, entry, rows, cols, dtype, suite.traffic, suite.protocol)
            for dtype in dtypes
            for rows, cols in shapes
            if cols % entry.multiple == 0
        ]
    return found


def at_shapes(shapes: Iterable[tuple[int, int]], entries: Iterable[Entry], dtypes: Sequence[str]) -> list[Workload]:
    """Each entry at each of the given shapes that suit it."""
    every = list(shapes)
    return [Workload("", e, r, c, dtype) for e in entries for dtype in dtypes for r, c in every if c % e.multiple == 0]


def part(text: str, every: Sequence[Workload]) -> list[Workload]:
    """The workloads of part "i/n": every n-th one, from the i-th; i counts from 1. Raises ValueError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    i, n = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if not 1 <= i <= n:
        raise ValueError(f"{text!r} is no part: write i/n, as in 1/4 to 4/4")
    return list(every[i - 1 :: n])
