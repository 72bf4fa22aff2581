"""What a tuning job reports: progress while it runs, a table when it is done. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """Where a run stands, after each trial. Times in microseconds; `left_s` is the budget that remains, in seconds."""

    workload: str
    trial: int
    trials: int
    best_us: float | None
    eager_us: float | None
    roofline_us: float
    left_s: float
    message: str = ""

    @property
    def share(self) -> float | None:
        """Share of the roofline reached: 1.0 is the bound."""
        return self.roofline_us / self.best_us if self.best_us else None


@dataclass(frozen=True)
class Tuned:
    """The result of one workload. `state` is done, interrupted or failed; `reason` says why the search ended."""

    name: str
    workload: str
    device: str
    eager_us: float | None
    unfused_us: float | None
    best_us: float | None
    roofline_us: float
    plan: str
    trials: int
    state: str
    reason: str
    schedules: tuple[dict[str, Any], ...] = ()

    @property
    def share(self) -> float | None:
        """Share of the roofline reached: 1.0 is the bound."""
        return self.roofline_us / self.best_us if self.best_us else None

    @property
    def speedup(self) -> float | None:
        """Eager time over the best time."""
        return self.eager_us / self.best_us if self.best_us and self.eager_us else None


@dataclass(frozen=True)
class TuneResult:
    """The results of a job, one a workload."""

    rows: tuple[Tuned, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every workload has a valid result."""
        return all(r.best_us is not None for r in self.rows)

    def to_json(self) -> list[dict[str, Any]]:
        """One dictionary a workload, with `share` and `speedup`."""
        return [{**asdict(r), "share": r.share, "speedup": r.speedup} for r in self.rows]

    def __str__(self) -> str:
        head = ("function", "workload", "eager µs", "unfused µs", "best µs", "speedup", "roofline", "plan")
        lines = [head, *(_cells(r) for r in self.rows)]
        widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
        numeric = range(2, 7)
        text = []
        for line in lines:
            cells = [c.rjust(w) if k in numeric else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))]
            text.append("  ".join(cells).rstrip())
        return "\n".join(text)


def _cells(r: Tuned) -> Sequence[str]:
    def number(x: float | None, form: str = "{:.1f}") -> str:
        return "-" if x is None else form.format(x)

    plan = r.plan if r.best_us is not None else f"{r.state}: {r.reason}"
    return (
        r.name, r.workload, number(r.eager_us), number(r.unfused_us), number(r.best_us), number(r.speedup, "{:.2f}x"),
        number(None if r.share is None else 100 * r.share, "{:.0f}%"), plan,
    )  # fmt: skip


ProgressCallback = Callable[[Progress], None]
