"""Rows shared by several programs of one launch, which wait for each other: each keeps its piece of the row in registers.

A program takes its piece by a ticket, so that the pieces of a row run at the same time however the device hands out
programs: those of lower tickets run already and need nobody after their own row. A row has no more pieces than the device
has processors, so that they always fit. What a piece gives to a reduction lies
in a workspace, one 64-bit word with the number of the launch beside the value: who finds that number finds the value, and
neither a fence nor a clearing is needed. One thread of a program looks whether the row's count has come to all its pieces
(where all warps look at the words, they are in each other's way); then each program joins the words itself, in order, and
goes on. A cluster of processors does this in hardware; Triton reaches it through memory.

To wait costs microseconds: a softmax's sum and a variance are made of each piece by itself and joined with the maximum
and the mean.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

from ..errors import Infeasible
from ..ops import ITEMSIZE
from .base import Knobs, Source, Task
from .expr import Expr
from .onepass import OnePass
from .roles import Store
from .tile import Tiles
from .triton_text import TYPES


class JointRows(Tiles):
    """Assembles one kernel."""

    def __init__(self, task: Task, knobs: Knobs) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise Infeasible("programs that wait for each other need a GPU: the interpreter runs one after the other")
        rows = int(knobs.get("rows_per_program", 1))  # several read what is the same for all rows once
        super().__init__(task, knobs, rows, "unrolled", int(knobs["block_cols"]), int(knobs["pieces"]))
        shared = [r for r in self.low.reduces if self.looped & set(r.attr[1])]  # the others lie within a block
        if len(self.low.spaces) != 1 or any(set(r.attr[1]) != set(self.low.spaces[0]) for r in shared):
            raise Infeasible("a reduction that leaves columns is not shared among programs")
        if any(ITEMSIZE[r.dtype] != 4 for r in shared):
            raise Infeasible("a reduction that is not in 32 bits is not shared among programs")
        self.slots: dict[int, int] = {}  # which words a reduction has
        self.due: list[OnePass] = []  # whose totals the pass at hand owes
        self.parts: dict[int, str] | None = None  # what this piece gives, while more is made of it
        self.met = 0

    def source(self) -> Source:
        p, pieces = self.p, self.pieces
        levels = self._levels()
        self.slots = {r.number: k for k, r in enumerate(self._looped_reduces())}
        (space,) = self.low.spaces
        self.counts = len(self.slots) * pieces  # where a row's counts stand, after its words
        words = self.counts + levels
        p.line('ticket = tl.atomic_add(ws0, 1, sem="relaxed")')
        groups = f"tl.cdiv(rows, {self.rows})" if p.rowdim else "rows"
        p.line(f"programs = {groups}.to(tl.int64) * {pieces}")
        p.line("launch = (ticket // programs + 1).to(tl.int32)")
        p.line("unit = (ticket % programs).to(tl.int32)")
        p.line(f"piece = unit % {pieces}")
        p.line(f"base = piece * {self.per_piece(space[0])}")
        p.line(f"first = unit // {pieces}" + (f" * {self.rows}" if p.rowdim else ""))
        p.set_rows("first", "rows", p.addressing.kept)
        p.line(f"words = ws0 + 1 + row.to(tl.int64) * {words}")
        p.line(f"counts = ws0 + {1 + self.counts} + first.to(tl.int64) * {words}")
        mark = len(p.lines)
        self._loops()
        p.lines[mark:mark] = [p.indent + text for _, text in p.hoisted]
        return self._wrap(("blocks", self.rows, pieces), (("int64", words + 1),), kept=(0,))

    @property
    def kind(self) -> str:
        """What a row's number is to the printer: one, or one of each row."""
        return "r" if self.p.rowdim else "s"

    def _unrolled(self, space: tuple[str, ...], reduces: Sequence[Expr], writes: Sequence[tuple[Store, Expr]]) -> None:
        totals = {o.total.number: o for o in self.online}
        self.due = [totals[r.number] for r in reduces if r.number in totals]
        super()._unrolled(space, [r for r in reduces if r.number not in totals], writes)

    def _finish(self, space: tuple[str, ...], reduces: Sequence[Expr], names: Sequence[str]) -> None:
        p = self.p
        made = {
            r.number: p.assign(p.reduce_text(a, r.attr[0], r.attr[1], space), self.kind, "s")
            for r, a in zip(reduces, names, strict=True)
        }
        if self.parts is not None:
            self.parts |= made
        elif made:
            due, self.due, self.parts = self.due, [], made
            if due:
                self._alone(space, due)
            parts, self.parts = self.parts, None
            self._meet([*reduces, *(o.total for o in due)], parts, due)

    def _count(self, space: tuple[str, ...], piece: str, least: int) -> str:
        """The columns of a piece, or of each of several."""
        n, per, others = self.low.extent(space[0]), self.per_piece(space[0]), prod(self.low.extent(a) for a in space[1:])
        return f"tl.minimum(tl.maximum({n} - {piece} * {per}, {least}), {per}).to(tl.float32) * {others}.0"

    def _alone(self, space: tuple[str, ...], due: Sequence[OnePass]) -> None:
        """Another pass over the piece, for what needs a reduction's result: its own part stands for it."""
        p, blocks = self.p, self.side[space]
        assert self.parts is not None
        held = [dict(b.names) for b in blocks]
        with p.scope(indent=False):
            count = p.assign(self._count(space, "piece", 1), "s", "n")
            for o in due:
                p.define(o.first, p.assign(o.alone(p, self.parts[o.first.number], count), self.kind, "s"))
            super()._unrolled(space, [o.total for o in due], ())
        for b, names in zip(blocks, held, strict=True):
            b.names = names  # what was made of a part is not the row's

    def _meet(self, reduces: Sequence[Expr], parts: dict[int, str], due: Sequence[OnePass]) -> None:
        """Give this piece's parts, wait for those of the others, and join all."""
        p, many = self.p, self.p.rowdim
        tag = p.assign("launch.to(tl.int64) << 32", "s", "n")
        self._give(reduces, parts, tag)
        self._wait(many)
        every = self._words(reduces, tag)
        (space,) = self.low.spaces
        counts = p.assign(self._count(space, f"tl.arange(0, {self.pieces})", 0), "v", "n") if due else ""
        for o in due:
            o.join(p, every[o.first.number], every[o.total.number], counts, many)
        joined = {e.number for o in due for e in (o.first, o.total)}
        for r in reduces:
            if r.number not in joined:
                p.define(r, p.assign(p.along_axis(every[r.number], r.attr[0], int(many)), self.kind, "s"))

    def _at(self, r: Expr) -> str:
        """Where a row's words of a reduction begin."""
        return f"words + {self.slots[r.number] * self.pieces}"

    def _give(self, reduces: Sequence[Expr], parts: dict[int, str], tag: str) -> None:
        given = ", mask=row_ok" if self.p.rowdim else ""
        for r in reduces:
            bits = f"({parts[r.number]}).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF"
            self.p.line(f'tl.atomic_xchg({self._at(r)} + piece, {tag} | ({bits}){given}, sem="relaxed")')

    def _words(self, reduces: Sequence[Expr], tag: str) -> dict[int, str]:
        """What all pieces have given."""
        p, every = self.p, f"tl.arange(0, {self.pieces})"
        found = {r.number: p.fresh("w") for r in reduces}
        loads = []
        for r in reduces:
            where, told = f"{self._at(r)} + {every}", ""
            if p.rowdim:
                where, told = f"({self._at(r)})[:, None] + {every}[None, :]", f", mask=row_ok[:, None], other={tag}"
            loads.append(f"{found[r.number]} = tl.load({where}{told}, volatile=True)")
        for text in loads:
            p.line(text)
        if not p.rowdim:
            # each warp has every word and looks at its own; of several rows it may not, so that fences order them
            late = " | ".join(f"(({w} >> 32).to(tl.int32) != launch)" for w in found.values())
            p.line(f"while tl.max(({late}).to(tl.int32), axis=0) != 0:")
            with p.scope():
                for text in loads:
                    p.line(text)
        return {r.number: p.assign(f"{found[r.number]}.to(tl.int32).to({TYPES[r.dtype]}, bitcast=True)", "v", "w") for r in reduces}

    def _wait(self, ordered: bool) -> None:
        """Until the row's count says that all pieces of this launch have come: it grows from launch to launch. `ordered`:
        what any of their threads has written is there then."""
        p, pieces = self.p, self.pieces
        count, here, last = f"counts + {self.met}", p.fresh("n"), p.fresh("n")
        self.met += 1
        if ordered:
            p.line("tl.debug_barrier()")
        arrive, look = ("acq_rel", "acquire") if ordered else ("relaxed", "relaxed")
        p.line(f'{here} = tl.atomic_add({count}, 1, sem="{arrive}") + 1')
        p.line(f"{last} = ({here} + {pieces - 1}) // {pieces} * {pieces}")
        p.line(f"while {here} < {last}:")
        with p.scope():
            p.line(f'{here} = tl.atomic_add({count}, 0, sem="{look}")')
