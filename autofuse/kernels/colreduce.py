"""Reductions over rows: sums, means and extremes along leading axes, alone or beside what is computed a row at a time."""

from __future__ import annotations

from math import prod

from ..errors import Infeasible
from .base import Knob, Knobs, Source, Space, Task
from .choices import default_math, default_overlap, next_power, other_math, overlap
from .columns import Columns, needs_whole_rows
from .mathmode import MODES
from .rowreduce import padded

MAX_WIDE = 2**14  # columns of a whole row: its accumulators stay in registers beside the row itself
PER_THREAD = 128  # elements


class ColReduce:
    """Programs fold chunks of rows into partial results, which a second launch joins in a fixed order."""

    name = "colreduce"
    version = 2

    def match(self, task: Task) -> bool:
        """A segment with a reduction over rows."""
        return bool(task.low.reduced)

    def _tile(self, task: Task, k: Knobs) -> int:
        cols = padded(task)
        return int(k["block_rows"]) * (cols if needs_whole_rows(task.low) else min(cols, int(k["block_cols"])))

    def space(self, task: Task) -> Space:
        if task.limits.target == "cpu":
            from .nest import cpu_space

            return cpu_space(self.name, self.version, task)
        cols, sms = padded(task), task.limits.sm_count
        if needs_whole_rows(task.low):
            if cols > MAX_WIDE:
                raise Infeasible(f"rows of {cols} columns are too wide to be kept beside sums over rows")
            shape: tuple[Knob, ...] = (
                Knob("block_rows", tuple(r for r in (1, 2, 4, 8, 16, 32, 64) if r == 1 or r * cols <= 2**14)),
                Knob("chunks", (1, *(sms * k for k in (1, 2, 4, 8) if sms * k > 1))),
                Knob("keep", ("wide", "storage")),
            )
        else:
            shape = (
                Knob("block_rows", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
                Knob("block_cols", tuple(c for c in (32, 64, 128, 256, 512, 1024) if c <= cols) or (cols,)),
                Knob("chunks", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
            )
        more = (
            Knob("num_warps", (1, 2, 4, 8, 16, 32)),
            Knob("num_stages", (1, 2, 3, 4)),
            Knob("registers", (0, 64, 80, 96, 128)),
            Knob("math", MODES),
        )
        knobs = (*shape, *more, overlap(task))

        def check(k: Knobs) -> str | None:
            tile, threads = self._tile(task, k), 32 * int(k["num_warps"])
            if tile > threads * PER_THREAD:
                return f"over {PER_THREAD} elements a thread"
            if threads * int(k["registers"]) > 65536:
                return "more registers than a processor has"
            return "more threads than elements" if tile < threads // 2 and threads > 32 else None

        return Space(self.name, self.version, knobs, check)

    def seed(self, task: Task) -> dict[str, int | str]:
        if task.limits.target == "cpu":
            from .nest import cpu_seed

            return cpu_seed(task)
        cols, sms = padded(task), task.limits.sm_count
        math, overlaps = default_math(task), default_overlap(task)
        if needs_whole_rows(task.low):
            rows = max(1, min(64, 2048 // cols))
            warps = max(1, min(32, rows * cols // 512))
            keep = "storage" if cols >= 2**13 else "wide"
            return {
                "block_rows": rows,
                "chunks": sms * (2 if warps <= 8 else 1) if sms > 1 and task.kept < sms else 1,
                "keep": keep,
                "num_warps": warps,
                "registers": 128 if warps == 8 else 0,
                "num_stages": 3 if cols <= 2**13 else 2,
                "math": math,
                "overlap": overlaps,
            }
        block = min(cols, 128)
        rows = max(1, min(256, 4096 // block))
        pieces = -(-prod(int(task.low.extents[a]) for s in task.low.spaces for a in s) // block)
        chunks = min(512, next_power(max(1, 4 * sms // max(1, pieces * task.kept))))
        return {
            "block_rows": rows,
            "block_cols": block,
            "chunks": chunks,
            "num_warps": max(1, min(4, rows * block // 64)),
            "registers": 0,
            "num_stages": 2,
            "math": math,
            "overlap": overlaps,
        }

    def variants(self, task: Task) -> list[dict[str, int | str]]:
        if task.limits.target == "cpu":
            return []
        seed = self.seed(task)
        chunks, warps, rows = int(seed["chunks"]), int(seed["num_warps"]), int(seed["block_rows"])
        made = other_math(task)
        made += [{"num_stages": 1}, {"num_stages": 2}, {"chunks": 2 * chunks}, {"num_warps": 2 * warps}, {"block_rows": 2 * rows}]
        if "keep" in seed:
            made += [{"num_warps": 2 * warps, "registers": 0, "chunks": task.limits.sm_count}, {"registers": 0}]
            made += [{"keep": "wide" if seed["keep"] == "storage" else "storage"}, {"chunks": task.limits.sm_count}]
        made += [{"chunks": max(1, chunks // 2)}, {"num_warps": max(1, warps // 2)}, {"overlap": 1 - int(seed["overlap"])}]
        return made

    def emit(self, task: Task, knobs: Knobs) -> Source:
        knobs = self.space(task).validate(knobs)
        if task.limits.target == "cpu":
            from .nest_columns import ColumnNest

            return ColumnNest(task, knobs).source()
        return Columns(task, knobs).source()
