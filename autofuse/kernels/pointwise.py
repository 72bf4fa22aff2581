"""Pointwise kernels: every element by itself, flat where all operands are one run of memory, else in tiles."""

from __future__ import annotations

from math import prod

from .base import Knob, Knobs, Source, Space, Task
from .choices import default_math, default_overlap, hinted, hints, next_power, other_math, overlap, pieces, strided
from .expr import walk
from .mathmode import MODES
from .tile import MAX_TILE, Tiles

FILLS = 2**22  # elements that give every processor several wide blocks


class Pointwise:
    """Programs take blocks of elements (flat), or blocks of rows x columns (tile)."""

    name = "pointwise"
    version = 4

    def match(self, task: Task) -> bool:
        """A segment without reductions whose outputs have one width."""
        return not task.low.reduces and len(task.low.spaces) <= 1

    def _cols(self, task: Task) -> int:
        return prod(int(task.low.extents[a]) for s in task.low.spaces for a in s)

    def _flat(self, task: Task) -> bool:
        return task.layout.flat and len(task.low.spaces) == 1 and len(task.low.spaces[0]) == 1

    def space(self, task: Task) -> Space:
        if task.limits.target == "cpu":
            from .nest import cpu_space

            return cpu_space(self.name, self.version, task)
        cols = next_power(self._cols(task))
        flat = self._flat(task)
        knobs = (
            Knob("form", ("flat", "tile") if flat else ("tile",)),
            Knob("block", (256, 512, 1024, 2048, 4096, 8192), (("form", ("flat",)),)),
            Knob("rows_per_program", tuple(r for r in (1, 2, 4, 8, 16, 32, 64) if r == 1 or task.low.rows), (("form", ("tile",)),)),
            Knob(
                "block_cols",
                tuple(c for c in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if c <= cols) or (cols,),
                (("form", ("tile",)),),
            ),
            # whose programs follow each other: those of a row's blocks, or those of a block's rows
            Knob("order", ("cols", "rows"), (("form", ("tile",)),)),
            Knob("num_warps", (1, 2, 4, 8, 16)),
            Knob("math", MODES),
            *hints(task, False),
            overlap(task),
        )

        def check(k: Knobs) -> str | None:
            tile = int(k["block"]) if k["form"] == "flat" else int(k["rows_per_program"]) * int(k["block_cols"])
            threads = 32 * int(k["num_warps"])
            if tile > MAX_TILE or tile > threads * 64:
                return "too many elements a thread"
            return "more threads than elements" if tile < threads and threads > 32 else None

        return Space(self.name, self.version, knobs, check)

    def _sines(self, task: Task) -> bool:
        """Whether there are sines, which keep many registers busy and look at a whole tile's largest value."""
        return any(e.op in ("sin", "cos") for e in walk([s.value for s in task.low.stores]))

    def seed(self, task: Task) -> dict[str, int | str]:
        if task.limits.target == "cpu":
            from .nest import cpu_seed

            return cpu_seed(task)
        common: dict[str, int | str] = {"math": default_math(task), **hinted(task, ""), "overlap": default_overlap(task)}
        if self._flat(task):
            return {"form": "flat", "block": 1024, "num_warps": 4, **common}
        real = self._cols(task)
        block = min(next_power(real), 1024)
        if task.rows * real >= FILLS and not self._sines(task):
            # wide enough that what is the same for all rows is read in one run, with little waste
            block = next((b for b in (4096, 2048) if -(-real // b) * b * 16 <= real * 17), block)
        rows = 1
        while task.low.rows and rows < 64 and rows * block * pieces(task) < 1024:
            rows *= 2
        warps = max(1, min(4, rows * block // 128))
        order = "rows" if strided(task) else "cols"
        return {"form": "tile", "rows_per_program": rows, "block_cols": block, "order": order, "num_warps": warps, **common}

    def variants(self, task: Task) -> list[dict[str, int | str]]:
        if task.limits.target == "cpu":
            return []
        seed = self.seed(task)
        warps = int(seed["num_warps"])
        made = [hinted(task, "evict_last"), *other_math(task)]
        if self._sines(task):  # one warp has its largest value without waiting for others
            width = "block" if seed["form"] == "flat" else "block_cols"
            made += [{"num_warps": 1, width: 512}, {"num_warps": 1, width: 256}]
        if seed["form"] == "flat":
            made += [{"num_warps": 1}, {"block": 2048}, {"block": 512, "num_warps": 1}]
            block = min(1024, next_power(self._cols(task)))
            made.append({"form": "tile", "rows_per_program": max(1, 1024 // block), "block_cols": block, "order": "cols"})
        else:
            rows, block = int(seed["rows_per_program"]), int(seed["block_cols"])
            made += [{"block_cols": max(64, block // 2)}, {"rows_per_program": 2 * rows}, {"rows_per_program": max(1, rows // 2)}]
            made += [{"num_warps": 2 * warps}, {"block_cols": 2 * block}, {"num_warps": max(1, warps // 2)}]
            made.append({"order": "rows" if seed["order"] == "cols" else "cols"})
        made += [hinted(task, "evict_first"), {"overlap": 1 - int(seed["overlap"])}]
        return made

    def emit(self, task: Task, knobs: Knobs) -> Source:
        knobs = self.space(task).validate(knobs)
        if task.limits.target == "cpu":
            from .nest import Nest

            return Nest(task, knobs).source()
        form = str(knobs["form"])
        if form == "flat":
            return Tiles(task, knobs, 1, "flat", int(knobs["block"])).source()
        return Tiles(task, knobs, int(knobs["rows_per_program"]), "tile", int(knobs["block_cols"])).source()
