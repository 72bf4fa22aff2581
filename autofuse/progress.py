"""How a running job is shown on stderr: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from .result import Progress

EVERY_S = 5.0
"""Without a terminal: a line when a workload begins, when a better time is found, and after as many seconds."""


def describe(p: Progress) -> str:
    """Best time so far, share of the roofline and time left, as both forms show them."""
    best = "-" if p.best_us is None else f"{p.best_us:.1f} µs"
    share = "-" if p.share is None else f"{p.share:.0%}"
    return f"best {best}, {share} of the roofline, {max(0.0, p.left_s):.0f} s left"


class Reporter:
    """Called with each Progress of a job. A context manager: leaving it clears the bar."""

    def __init__(self) -> None:
        self.workload = ""
        self.best_us: float | None = None
        self.printed = 0.0
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # a message may be long: `history` has all of it
            self.bar = Bar(
                TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), MofNCompleteColumn(),
                TextColumn("{task.fields[told]}", markup=False, table_column=rest), console=Console(stderr=True),
                transient=True, expand=True,
            )  # fmt: skip
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, p: Progress) -> None:
        """Show where a run stands."""
        if self.bar is None:
            self._line(p)
            return
        if self.task is None:
            self.task = self.bar.add_task("", total=1, told="")
        told = describe(p) + (f"; {p.message}" if p.message else "")
        self.bar.update(self.task, description=p.workload, completed=p.trial, total=max(p.trial, p.trials), told=told)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self.bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.console.print(text, markup=False, highlight=False)

    def _line(self, p: Progress) -> None:
        better = p.best_us is not None and (self.best_us is None or p.best_us < self.best_us)
        now = time.monotonic()
        if p.workload != self.workload:
            self.workload, self.best_us, better = p.workload, None, True
        if better or now - self.printed > EVERY_S:
            self.printed = now
            print(f"{p.workload}: trial {p.trial}/{p.trials}, {describe(p)}", file=sys.stderr, flush=True)
        if p.best_us is not None:
            self.best_us = p.best_us if self.best_us is None else min(self.best_us, p.best_us)
