"""What the benchmark prints of its rows: a table for each suite, and for each bar whether it is met, or by how much not.

A row is a dictionary, as it lies in the JSON file: "times" holds the microseconds of each candidate.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suites import NEAR_8, NEIGHBOUR

Row = dict[str, Any]
Ratio = Callable[[Row, Sequence[Row]], float | None]

OURS = "ours"
COMPILED = ("compile", "compile_max")
FIRST = ("copy", "eager", *COMPILED)
NO_PEERS = ("copy", OURS)


def us(row: Row, name: str) -> float | None:
    """The median of one candidate."""
    found = row["times"].get(name)
    return None if found is None else float(found["median_us"])


def fastest(row: Row, names: Iterable[str]) -> float | None:
    """The least median of these candidates."""
    return min((t for t in (us(row, n) for n in names) if t is not None), default=None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None else None


def to_copy(row: Row, _: Sequence[Row] = ()) -> float | None:
    return _ratio(us(row, OURS), us(row, "copy"))


def over_compile(row: Row, _: Sequence[Row] = ()) -> float | None:
    return _ratio(fastest(row, COMPILED), us(row, OURS))


def over_eager(row: Row, _: Sequence[Row] = ()) -> float | None:
    return _ratio(us(row, "eager"), us(row, OURS))


def to_compile(row: Row, _: Sequence[Row] = ()) -> float | None:
    return _ratio(us(row, OURS), fastest(row, COMPILED))


def to_peer(row: Row, _: Sequence[Row] = ()) -> float | None:
    return _ratio(us(row, OURS), fastest(row, (n for n in row["times"] if n not in NO_PEERS)))


def to_peer_if_odd(row: Row, rows: Sequence[Row] = ()) -> float | None:
    return None if row["cols"] in NEAR_8 else to_peer(row, rows)


def to_neighbour(row: Row, rows: Sequence[Row] = ()) -> float | None:
    """Time a byte against that of the same chain with NEIGHBOUR columns and about as many rows."""
    if row["cols"] not in NEAR_8:
        return None
    same = [r for r in rows if r["cols"] == NEIGHBOUR and (r["chain"], r["dtype"]) == (row["chain"], row["dtype"])]
    near = max(same, key=lambda r: r["bytes"], default=None)  # the others of that width have few rows
    mine, other = us(row, OURS), us(near, OURS) if near else None
    return mine / row["bytes"] / (other / near["bytes"]) if near and mine is not None and other is not None else None


@dataclass(frozen=True)
class Bar:
    """A limit for a ratio: for its geometric mean, or for each workload. `least`: the ratio may not be below it."""

    text: str
    limit: float
    ratio: Ratio
    each: bool = True
    least: bool = False

    def verdict(self, rows: Sequence[Row]) -> str:
        """One line: met, or by how much not, and where."""
        found = [(value, name_of(r)) for r in rows if (value := self.ratio(r, rows)) is not None]
        what = f"{self.text}, {'each' if self.each else 'geometric mean'} of {len(found)}"
        wanted = f"{'at least' if self.least else 'at most'} {self.limit:.2f}"
        if not found:
            return f"unknown          {what}: {wanted}"
        sign = -1 if self.least else 1
        ordered = sorted(found, key=lambda v: -sign * v[0])
        value = ordered[0][0] if self.each else geomean([v for v, _ in found])
        over = (value / self.limit - 1) * sign
        state = "met" if over <= 0 else f"missed by {100 * over:.1f}%"
        worst = f" at {ordered[0][1]}" if self.each else ""
        beyond = [f"{name} {v:.3f}" for v, name in ordered if (v - self.limit) * sign > 0] if self.each else []
        tail = f"; {len(beyond)} beyond: {', '.join(beyond)}" if beyond else ""
        return f"{state:16s} {what}: {value:.3f}{worst} ({wanted}){tail}"


BARS: dict[str, tuple[Bar, ...]] = {
    "large": (
        Bar("ours / copy", 1.05, to_copy, each=False),
        Bar("ours / copy", 1.20, to_copy),
        Bar("torch.compile / ours", 1.40, over_compile, each=False, least=True),
        Bar("ours / fastest peer", 1.02, to_peer),
    ),
    "long": (Bar("ours / copy", 1.30, to_copy),),
    "decode": (Bar("ours / fastest peer", 1.03, to_peer), Bar("ours / torch.compile", 1.00, to_compile)),
    "odd": (
        Bar(f"time a byte / that of {NEIGHBOUR} columns, 8 more or fewer", 1.25, to_neighbour),
        Bar("ours / fastest peer", 1.00, to_peer_if_odd),
    ),
}


def geomean(values: Sequence[float]) -> float:
    """The geometric mean; nan of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def name_of(row: Row) -> str:
    """A row's workload for people."""
    return f"{row['chain']} {row['rows']}x{row['cols']} {row['dtype']}"


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines: microseconds of every candidate, and the ratios."""
    names = list(dict.fromkeys([*FIRST, *(n for r in rows for n in r["times"] if n != OURS), OURS]))
    names = [n for n in names if any(n in r["times"] for r in rows)]
    wide = {n: max(9, len(n)) for n in names}
    heads = " ".join(f"{n:>{wide[n]}s}" for n in names)
    lines = [f"{'chain':24s} {'shape':>14s} {'dtype':9s} {'floor':>9s} {heads}  /compile   /eager    /copy    /peer"]
    for r in rows:
        cells = " ".join(f"{'' if (t := us(r, n)) is None else format(t, '.2f'):>{wide[n]}s}" for n in names)
        ratios = " ".join(_times(f(r)) for f in (over_compile, over_eager, to_copy, to_peer))
        shape = f"{r['rows']}x{r['cols']}"
        lines.append(f"{r['chain']:24s} {shape:>14s} {r['dtype']:9s} {r['floor_us']:9.2f} {cells} {ratios}")
    return lines


def _times(value: float | None) -> str:
    return f"{'' if value is None else format(value, '.2f') + 'x':>9s}"


def means(rows: Sequence[Row]) -> list[str]:
    """The geometric means over all rows."""
    lines = []
    many = [r for r in rows if r["ops"] >= 3]
    for text, of, ratio in (
        ("torch.compile / ours", rows, over_compile),
        ("eager / ours", rows, over_eager),
        ("eager / ours, chains of three or more operations", many, over_eager),
        ("ours / copy", rows, to_copy),
        ("ours / fastest peer", rows, to_peer),
    ):
        values = [v for r in of if (v := ratio(r)) is not None]
        if values:
            least, most = min(values), max(values)
            lines.append(f"{text}: geometric mean {geomean(values):.3f}, {least:.3f} to {most:.3f} over {len(values)} workloads")
    return lines


def report(rows: Sequence[Row]) -> str:
    """Everything that the rows say, suite by suite; what failed, and winners that spill registers."""
    lines: list[str] = []
    for suite in dict.fromkeys(r["suite"] for r in rows):
        every = [r for r in rows if r["suite"] == suite]
        good = [r for r in every if "error" not in r]
        lines += ["", *([f"suite {suite}"] if suite else []), *table(good), *means(good)]
        lines += [bar.verdict(good) for bar in BARS.get(suite, ())]
        lines += [f"spills           {name_of(r)}: {r['spills']} in {r['plan']} {r['schedules']}" for r in good if r.get("spills")]
        lines += [f"left out         {name_of(r)}: {n}: {why}" for r in good for n, why in r["left_out"].items()]
        lines += [f"failed           {name_of(r)}: {r['error']}" for r in every if "error" in r]
    return "\n".join(lines)


def key(r: Row) -> tuple[Any, ...]:
    """Which workload a row is of."""
    return r["suite"], r["chain"], r["cols"], r["dtype"], r["asked_rows"]


def merge(parts: Iterable[Sequence[Row]]) -> list[Row]:
    """The rows of several runs in one list; of one workload the last that did not fail."""
    found: dict[tuple[Any, ...], Row] = {}
    for rows in parts:
        for r in rows:
            if key(r) not in found or "error" not in r or "error" in found[key(r)]:
                found[key(r)] = r
    return list(found.values())


def read(path: str) -> list[Row]:
    """The rows of a JSON file, which may be compressed (.gz). Raises ValueError for one that holds none."""
    data = Path(path).read_bytes()
    try:
        rows = json.loads(gzip.decompress(data) if path.endswith(".gz") else data)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no JSON file of results: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) and r.keys() >= {"suite", "chain", "cols"} for r in rows):
        raise ValueError(f"{path} is no list of a benchmark's rows: give what --json has written")
    return rows


def write(path: str, rows: Sequence[Row]) -> None:
    """The rows into a JSON file, compressed where it is named .gz, which is whole at any moment."""
    beside, data = Path(f"{path}.part"), json.dumps(rows, indent=1).encode()
    beside.write_bytes(gzip.compress(data, mtime=0) if path.endswith(".gz") else data)
    os.replace(beside, path)
