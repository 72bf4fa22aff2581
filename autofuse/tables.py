"""What the command prints on stdout: a table for a person, or JSON. Nothing else goes there."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .dispatch import Explanation
    from .doctor import Check
    from .result import Tuned


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, the value in a row, and whether it is a number (set to the right)."""

    head: str
    value: Callable[[Mapping[str, Any]], Any]
    number: bool = False


def _of(name: str, head: str = "", number: bool = False) -> Column:
    return Column(head or name, lambda row: row[name], number)


def _dtypes(row: Mapping[str, Any]) -> str:
    return ", ".join(json.loads(row["dtypes"]))


def _knobs(knobs: Mapping[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in (knobs or {}).items())


def _schedule(row: Mapping[str, Any]) -> str:
    return f"{row['kind']}: {_knobs(row['knobs'])}"


def _plan(text: str) -> str:
    """A plan that fits into a line: a long one is its first segment and how many there are. `show` has all of it."""
    if len(text) <= PLAN_WIDTH:
        return text
    first, *rest = text.split(" | ")
    if len(first) > PLAN_WIDTH:
        first = first[: PLAN_WIDTH - 1] + "…"
    return f"{first} … ({len(rest) + 1} segments)" if rest else first


PLAN_WIDTH = 60
AS_JSON = ("dtypes", "layouts", "knobs")
"""Columns that hold JSON: a view, or a database without a type for it, gives them as text."""

BEST = (
    _of("chain"), _of("rows", number=True), _of("cols", number=True), Column("dtypes", _dtypes), _of("device"),
    _of("median_us", "best µs", True), Column("plan", lambda r: _plan(r["plan"])), _of("verified"), _of("torch"), _of("protocol"),
)  # fmt: skip
HISTORY = (
    _of("trial_id", "trial", True), Column("when (UTC)", lambda r: r["created"].strftime("%Y-%m-%d %H:%M:%S")),
    _of("chain"), _of("measured"), _of("rows", number=True), _of("cols", number=True), _of("status"),
    _of("median_us", "µs", True), Column("plan or schedule", lambda r: _plan(r["plan"] or "") or _schedule(r)),
    _of("message"),
)  # fmt: skip
DEMAND = (
    _of("chain", "function"), _of("rows", number=True), Column("extents", lambda r: "x".join(map(str, r["extents"])) or "-"),
    Column("dtypes", _dtypes), _of("device"), _of("tier"), _of("calls", number=True), _of("seconds", number=True),
    _of("lost_s", "lost s", True),
)  # fmt: skip
TUNED = (
    _of("name", "function"), _of("workload"), _of("eager_us", "eager µs", True), _of("unfused_us", "unfused µs", True),
    _of("best_us", "best µs", True), Column("speedup", lambda r: r["speedup"] and f"{r['speedup']:.2f}x", True),
    Column("roofline", lambda r: r["share"] and f"{r['share']:.0%}", True),
    Column("plan", lambda r: _plan(r["plan"]) if r["best_us"] is not None else f"{r['state']}: {r['reason']}"),
)  # fmt: skip


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], as_json: bool) -> None:
    """Rows of a view: some of the columns as a table, all as JSON."""
    if as_json:
        _json([_parsed(row) for row in rows])
    else:
        _table([c.head for c in columns], [[c.value(r) for c in columns] for r in rows], [c.number for c in columns])


def show_tuned(rows: Sequence[Tuned], as_json: bool) -> None:
    """The results of a job."""
    from .result import TuneResult

    show_rows(TuneResult(tuple(rows)).to_json(), TUNED, as_json)


def show_result(names: Sequence[str], rows: Sequence[Sequence[Any]], as_json: bool) -> None:
    """The result of a user's query. In JSON a name that several columns have gets a number: name, name:1."""
    if as_json:
        keys: list[str] = []
        for name in names:
            same = sum(k == name or k.startswith(f"{name}:") for k in keys)
            keys.append(f"{name}:{same}" if same else name)
        _json([_parsed(dict(zip(keys, row, strict=True))) for row in rows])
    else:
        numbers = [all(isinstance(r[k], int | float | None) for r in rows) for k in range(len(names))]
        _table(names, rows, numbers)


def show_record(record: Mapping[str, Any], as_json: bool) -> None:
    """All about one trial, a line for each field that says something."""
    if as_json:
        _json(_parsed(record))
        return
    lines: list[tuple[str, Any]] = [
        (k, _knobs(v) if k == "knobs" else v) for k, v in record.items() if k not in ("run", "schedules")
    ]
    lines += [(f"run {k}", v) for k, v in record["run"].items() if k not in record and f"run_{k}" not in record]
    lines += [(f"schedule {k}", _schedule(s)) for k, s in enumerate(record["schedules"])]
    _table(["field", "value"], [line for line in lines if line[1] not in (None, "")], [False, False])


def show_explained(told: Sequence[Explanation], as_json: bool) -> None:
    """What calls would run, a paragraph each."""
    if as_json:
        _json([asdict(one) for one in told])
        return
    _write("\n\n".join(map(str, told)) + "\n")


def show_checks(checks: Iterable[Check], as_json: bool) -> None:
    """What `doctor` found."""
    if as_json:
        _json([asdict(check) for check in checks])
        return
    rows = [[check.what, "ok" if check.ok else "missing", check.found, check.remedy] for check in checks]
    _table(["what", "state", "found", "what to do"], rows, [False] * 4)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:.1f}"
    if isinstance(value, dict | list):
        return json.dumps(_plain(value))
    return " ".join(str(value).split())


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[bool]) -> None:
    terminal = sys.stdout.isatty()
    text = io.StringIO()
    # A pipe gets each row on a line of its own, whatever its length.
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 100_000, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head, number in zip(heads, numbers, strict=True):
        table.add_column(escape(head), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row))
    console.print(table)
    _write("".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()))


def _parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for JSON: lists and objects as such, not as text that holds them."""
    made = dict(row)
    for name in AS_JSON:
        value = made.get(name)
        if isinstance(value, str):
            with suppress(ValueError):
                made[name] = json.loads(value)
    return made


def _json(value: Any) -> None:
    _write(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """What JSON can hold: times in ISO 8601, numbers that are not finite as null, anything unknown as text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, date):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _write(text: str) -> None:
    """Print, and be silent where nobody reads on (`autofuse history | head`)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
