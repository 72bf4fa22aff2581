"""Rows split among programs: for few or long rows, one launch a level of reductions and one that ends the row.

Each program takes a piece of a row's columns. What its piece gives to a reduction lies in a workspace; every program of
the next launch joins the pieces of its row itself, in order, which costs less than a launch between.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Infeasible
from .base import Knobs, Launch, Source, Task
from .choices import next_power
from .expr import Expr
from .module import function, module
from .tile import Tiles
from .triton_text import identity


class SplitRows(Tiles):
    """Assembles one program of several launches."""

    def __init__(self, task: Task, knobs: Knobs) -> None:
        super().__init__(task, knobs, 1, "split", int(knobs["block_cols"]))
        self.pieces = int(knobs["pieces"])

    def source(self) -> Source:
        low = self.low
        top = self._levels()
        reduces = self._looped_reduces()
        for r in reduces:
            space = self.p.space(r.args[0])
            if space is None or set(r.attr[1]) < set(space):
                raise Infeasible("a reduction that leaves columns is not split among programs")
        number = {r.number: k for k, r in enumerate(reduces)}
        left = list(self.stores)
        prelude: set[str] = set()
        texts: list[str] = []
        launches: list[Launch] = []
        for level in range(1, top + 2):
            self.p = p = self._printer()
            p.last_pass = level == top + 1
            self.backward = self.turns(level)
            # the rows that were read last come first, too
            p.line("pid = tl.num_programs(0) - 1 - tl.program_id(0)" if self.backward else "pid = tl.program_id(0)")
            p.line("piece = tl.program_id(1)")
            p.set_rows("pid", "rows", p.addressing.kept)
            mark = len(p.lines)
            self._join([r for r in reduces if self.level[r.number] < level], number)
            for space in low.spaces:
                mine = [r for r in reduces if self.level[r.number] == level and p.space(r.args[0]) == space]
                writes = [(s, v) for s, v in left if self.level[v.number] < level and self._space_of(s) == space]
                left = [w for w in left if w not in writes]
                if mine or writes:
                    self._loop(space, mine, writes)
                for r in mine:
                    p.line(f"tl.store(ws{number[r.number]} + pid.to(tl.int64) * {self.pieces} + piece, {p.name(r)})")
            rest = [(s, v) for s, v in left if self.level[v.number] < level and self._space_of(s) is None]
            left = [w for w in left if w not in rest]
            self._print_stores(rest)
            p.lines[mark:mark] = [p.indent + text for _, text in p.hoisted]
            prelude |= p.prelude
            grid = ("rows", 1, self.pieces)
            stages = int(self.knobs.get("num_stages", 1))
            text, launch = function(p, f"pass{level}", grid, int(self.knobs["num_warps"]), stages, range(len(reduces)))
            texts.append(text)
            launches.append(launch)
        assert not left, "a write was not placed"
        work = tuple((r.dtype, self.pieces) for r in reduces)
        return Source("cuda", module(prelude, texts), tuple(launches), work, fuse_products=self.math != "exact")

    def _range(self, space: tuple[str, ...]) -> tuple[str, str]:
        p, n, per = self.p, self.low.extent(space[0]), self.per_piece(space[0])
        low, high = p.fresh("low"), p.fresh("high")
        p.line(f"{low} = piece * {per}")
        p.line(f"{high} = tl.minimum({low} + {per}, {n})")
        return low, high

    def _join(self, done: Sequence[Expr], number: dict[int, int]) -> None:
        """The reductions of earlier launches, from what the pieces of this row gave."""
        p = self.p
        online = {o.total.number: o for o in self.online}
        firsts = {o.first.number for o in self.online}
        if not done:
            return
        pad = next_power(self.pieces)
        p.line(f"every = tl.arange(0, {pad})")
        p.line(f"given = pid.to(tl.int64) * {self.pieces} + every")

        def parts(r: Expr) -> str:
            text = f"ws{number[r.number]} + given"
            if pad != self.pieces:
                text += f", mask=every < {self.pieces}, other={identity(r.attr[0], r.dtype)}"
            return p.assign(f"tl.load({text})", "v", "w")

        for r in done:
            if r.number in firsts:
                continue
            if r.number in online:
                online[r.number].join(p, parts(online[r.number].first), parts(r), "")
                continue
            p.define(r, p.assign(p.reduce_text(parts(r), r.attr[0], ("every",), ("every",)), "s", "s"))
