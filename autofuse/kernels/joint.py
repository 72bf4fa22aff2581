"""Rows shared by several programs of one launch, which wait for each other: each keeps its piece of the row in registers.

A program takes its piece by a ticket, so that the pieces of a row run at the same time however the device hands out
programs: those of lower tickets run already and need nobody after their own row. What a piece gives to a reduction lies
in a workspace; when all pieces of the row have come, each joins them itself, in order, and goes on. A cluster of
processors does this in hardware; Triton reaches it through memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import Infeasible
from .base import Knobs, Source, Task
from .expr import Expr
from .tile import Tiles


class JointRows(Tiles):
    """Assembles one kernel."""

    def __init__(self, task: Task, knobs: Knobs) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise Infeasible("programs that wait for each other need a GPU: the interpreter runs one after the other")
        super().__init__(task, knobs, 1, "unrolled", int(knobs["block_cols"]), int(knobs["pieces"]))
        if len(self.low.spaces) != 1 or any(set(r.attr[1]) != set(self.low.spaces[0]) for r in self.low.reduces):
            raise Infeasible("a reduction that leaves columns is not shared among programs")
        self.slots: dict[int, int] = {}  # which workspace a reduction has
        self.met = 0

    def source(self) -> Source:
        p, pieces = self.p, self.pieces
        self.levels = self._levels()
        self.slots = {r.number: k for k, r in enumerate(self._looped_reduces())}
        self.flags = len(self.slots)
        (space,) = self.low.spaces
        p.line(f'ticket = tl.atomic_add(ws{self.flags}, 1, sem="relaxed")')
        p.line(f"piece = ticket % {pieces}")
        p.line(f"base = piece * {self.per_piece(space[0])}")
        p.set_rows(f"ticket // {pieces}", "rows", p.addressing.kept)
        p.line(f"slot = row.to(tl.int64) * {pieces}")
        mark = len(p.lines)
        self._loops()
        p.lines[mark:mark] = [p.indent + text for _, text in p.hoisted]
        work = (*((r.dtype, pieces) for r in self._looped_reduces()), ("int32", self.levels + 1))
        return self._wrap(("units", pieces, 1), work, zeroed=(self.flags,))

    def _finish(self, space: tuple[str, ...], reduces: Sequence[Expr], names: Sequence[str]) -> None:
        p = self.p
        if not reduces:
            return
        for r, acc in zip(reduces, names, strict=True):
            part = p.assign(p.reduce_text(acc, r.attr[0], r.attr[1], space), "s", "s")
            p.line(f"tl.store(ws{self.slots[r.number]} + slot + piece, {part})")
        flag = f"ws{self.flags} + 1 + row.to(tl.int64) * {self.levels} + {self.met}"
        p.line(f"{p.use('af_meet')}({flag}, {self.pieces})")
        self.met += 1
        for r in reduces:
            every = p.assign(f"tl.load(ws{self.slots[r.number]} + slot + tl.arange(0, {self.pieces}), volatile=True)", "v", "w")
            p.define(r, p.assign(p.along_axis(every, r.attr[0], 0), "s", "s"))
