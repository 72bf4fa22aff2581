"""Row kernels: programs take whole rows, reductions join columns."""

from __future__ import annotations

from math import prod

from .base import Knob, Knobs, Source, Space, Task
from .tile import MAX_TILE, Tiles, default_math, next_power

WHOLE_MAX = 2**16  # columns of a whole row in registers


def padded(task: Task) -> int:
    """Columns of the widest space, each axis filled up to a power of two."""
    return max((prod(next_power(int(task.low.extents[a])) for a in s) for s in task.low.spaces), default=1)


class RowReduce:
    """A whole row in registers (several rows a program), or columns in blocks with accumulators."""

    name = "rowreduce"
    version = 1

    def match(self, task: Task) -> bool:
        """Any segment with a reduction, or with outputs of several widths."""
        return bool(task.low.reduces) or len(task.low.spaces) > 1

    def space(self, task: Task) -> Space:
        if task.limits.target == "cpu":
            from .nest import cpu_space

            return cpu_space(self.name, self.version, task)
        cols = padded(task)
        forms: list[int | str] = [f for f, ok in (("whole", cols <= WHOLE_MAX), ("looped", cols > 1024)) if ok]
        rows = tuple(r for r in (1, 2, 4, 8, 16, 32) if r == 1 or (r * cols <= 2**15 and task.low.rows))
        knobs = (
            Knob("form", tuple(forms)),
            Knob("rows_per_program", rows),
            Knob("num_warps", (1, 2, 4, 8, 16, 32)),
            Knob("block_cols", (512, 1024, 2048, 4096, 8192, 16384), (("form", "looped"),)),
            Knob("num_stages", (1, 2, 4), (("form", "looped"),)),
            Knob("online", (0, 1), (("form", "looped"),)),
            Knob("math", ("exact", "fast")),
            Knob("load_evict", ("", "evict_first", "evict_last")),
            Knob("store_evict", ("", "evict_first")),
        )

        def check(k: Knobs) -> str | None:
            tile = int(k["rows_per_program"]) * (cols if k["form"] == "whole" else min(cols, int(k["block_cols"])))
            threads = 32 * int(k["num_warps"])
            if tile > MAX_TILE:
                return "the tile has too many elements"
            if tile < threads // 2:
                return "more threads than elements"
            if tile > threads * 128:
                return "over 128 elements a thread"
            return None

        return Space(self.name, self.version, knobs, check)

    def seed(self, task: Task) -> dict[str, int | str]:
        if task.limits.target == "cpu":
            from .nest import cpu_seed

            return cpu_seed(task)
        cols = padded(task)
        common: dict[str, int | str] = {"math": default_math(task), "load_evict": "", "store_evict": ""}
        if cols <= 2**15:
            rows = 1
            while task.low.rows and rows < 8 and cols * rows * 2 <= 2048 and task.rows >= 4 * rows * task.limits.sm_count:
                rows *= 2
            warps = min(16, max(1, next_power(cols * rows // 512) if cols * rows > 512 else 1))
            return {"form": "whole", "rows_per_program": rows, "num_warps": max(warps, 4 if cols >= 1024 else 1), **common}
        return {
            "form": "looped",
            "rows_per_program": 1,
            "num_warps": 16,
            "block_cols": 8192,
            "num_stages": 1,
            "online": 1,
            **common,
        }

    def emit(self, task: Task, knobs: Knobs) -> Source:
        knobs = self.space(task).validate(knobs)
        if task.limits.target == "cpu":
            from .nest import Nest

            return Nest(task, knobs).source()
        form = str(knobs["form"])
        return Tiles(task, knobs, int(knobs["rows_per_program"]), form, int(knobs.get("block_cols", 0))).source()
