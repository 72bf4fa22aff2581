"""A whole Triton kernel from a segment and its knobs: one tile, or loops over column blocks with accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from ..errors import Infeasible
from .base import Knobs, Source, Task
from .choices import is_hint, late_loads, levels, next_power, streams, tile_loads
from .expr import Expr, children, walk
from .layout import MAX_STEP, Addressing
from .mathmode import Legal
from .module import function, loop_over, module
from .onepass import OnePass, moments, softmax_sums
from .roles import Store
from .storage import print_in_storage, rounded_tiles
from .triton_text import TYPES, TritonPrinter, identity

MAX_TILE = 2**17  # elements of one tile: beyond it registers spill whatever the warps
MAX_UNROLLED = 16  # blocks of columns side by side in one kernel: its text grows with them


@dataclass
class Block:
    """One of several blocks of columns that lie side by side: its indices, its masks, and the values that it holds, or the
    tiles as they came from memory."""

    column: dict[str, str] = field(default_factory=dict)
    mask: dict[str, str] = field(default_factory=dict)
    start: dict[str, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    raw: dict[int, tuple[str, bool]] = field(default_factory=dict)


class Tiles:
    """Assembles one kernel. `pieces`: programs that share a row whose blocks lie side by side."""

    def __init__(self, task: Task, knobs: Knobs, rows: int, form: str, block: int, pieces: int = 1) -> None:
        self.task, self.low, self.knobs, self.form, self.pieces = task, task.low, knobs, form, pieces
        self.math = str(knobs["math"])
        legal = Legal(task.low.b, self.math, True)
        self.stores = [(s, legal(s.value)) for s in task.low.stores]
        self.halves = legal.carried(task.low.halves) if knobs.get("keep") == "rounded" else {}
        self.looped = {s[0] for s in task.low.spaces} if form in ("looped", "unrolled", "split", "tile") else set()
        self.blocks: dict[str, int] = {}
        for s in task.low.spaces:
            pads = {a: next_power(self.low.extent(a)) for a in s}
            if form != "whole":
                inner = prod(pads[a] for a in s[1:])
                pads[s[0]] = max(1, min(pads[s[0]], block // inner)) if form != "flat" else block
            self.blocks |= pads
            if form == "unrolled" and -(-self.low.extent(s[0]) // (pads[s[0]] * pieces)) > MAX_UNROLLED:
                raise Infeasible(f"over {MAX_UNROLLED} blocks side by side")
            if rows * prod(pads.values()) > MAX_TILE:
                raise Infeasible(f"a tile of {rows * prod(pads.values())} elements")
        if rows > 1 and not task.low.rows:
            raise Infeasible("one row, several rows a program")
        self.rows = rows
        self.p = self._printer()
        self.p.find_pairs([v for _, v in self.stores])
        self.level: dict[int, int] = {}
        self.backward = False
        self.side: dict[tuple[str, ...], list[Block]] = {}
        self.online: list[OnePass] = []
        if knobs.get("online") == 1 or pieces > 1:
            reduces = [e for e in walk([v for _, v in self.stores]) if e.op == "reduce"]
            self.online = softmax_sums(reduces)
            if form != "split":
                self.online += moments(reduces, self.low)

    def _printer(self) -> TritonPrinter:
        p = TritonPrinter(
            self.low, Addressing(self.low, self.task.layout, True), self.rows, self.blocks, self.math, self.form == "flat"
        )
        p.evict = {n: str(v) for n, v in self.knobs.items() if is_hint(n) or n == "near"}
        if self.knobs.get("overlap"):
            p.use("af_overlap")
        return p

    def source(self) -> Source:
        p, low = self.p, self.low
        if self.knobs.get("persistent"):
            return self._persistent()
        blocks = self._blocks_a_row() if self.knobs.get("order") == "cols" else 1
        p.prologue(blocks)
        mark = len(p.lines)
        if self.form == "flat":
            self._flat()
        elif self.form == "whole":
            self._columns("0")
            self._whole()
        elif self.form == "tile":
            for s in low.spaces:
                p.line(f"start = {'block' if blocks > 1 else 'tl.program_id(1)'} * {p.blocks[s[0]]}")
            self._columns("start")
            self._print_stores(self.stores)
        else:
            self._loops()
        p.lines[mark:mark] = [p.indent + text for _, text in p.hoisted]
        return self._wrap()

    def _flat(self) -> None:
        """One block of elements. Where rows do not end at wide pieces a mask would cut all of them: only the last block has
        one then."""
        p = self.p
        (space,) = self.low.spaces
        if prod(self.low.extent(a) for a in space) % MAX_STEP == 0:
            self._columns("0")
            self._print_stores(self.stores)
            return
        p.line(f"if first + {p.blocks[space[0]]} <= numel:")
        for last in (False, True):
            p.bounded = last
            if last:
                p.line("else:")
            with p.scope():
                self._columns("0")
                self._print_stores(self.stores)

    def _persistent(self) -> Source:
        """As many programs as run at once, each taking one tile of rows after the other."""
        p, kept = self.p, self.p.addressing.kept
        programs = int(self.knobs["persistent"]) * self.task.limits.sm_count
        p.line("pid = tl.program_id(0)")
        if self.form == "whole":
            self._columns("0")
            rows = set(self.low.rows)
            for e in walk([v for _, v in self.stores]):  # what is the same for all rows is loaded once
                if e.op == "load" and not e.axes & rows and p.space(e) is not None:
                    p.name(e)
        p.line(f"for tile in {self._loop_over('pid', f'tl.cdiv(rows, {self.rows})', programs)}:")
        with p.scope():
            p.set_rows(f"tile * {self.rows}" if p.rowdim else "tile", "rows", kept)
            mark = len(p.lines)
            if self.form == "whole":
                self._whole()
            else:
                self._loops()
            p.lines[mark:mark] = [p.indent * 2 + text for _, text in p.hoisted]
        return self._wrap(("persistent", self.rows, programs))

    def _whole(self) -> None:
        for e in self._early():
            self.p.fetch_early(e)
        if self.knobs.get("keep") not in ("storage", "rounded"):
            self._print_stores(self.stores)
            return
        p = self.p
        if self.halves:
            level = levels([v for _, v in self.stores], lambda r: True)
            p.rounds = self._rounds(level, lambda r: r.op == "reduce")
        actions = [(v, partial(p.store, s, v)) for s, v in self.stores]
        print_in_storage(p, actions, lambda r: True)

    def _rounds(self, level: dict[int, int], known: Callable[[Expr], bool]) -> dict[int, str]:
        """The tiles that wait for a later pass as eager has them, in 16 bits. `level`: reductions under an expression."""
        roots = [v for _, v in self.stores]
        reduces = [e for e in walk(roots) if known(e)]
        every = range(1, max((level[r.number] for r in reduces), default=0) + 2)
        firsts = {o.first.number for o in self.online}
        passes = [
            some
            for k in every
            for some in (
                [r.args[0] for r in reduces if level[r.number] == k and r.number in firsts],
                [r.args[0] for r in reduces if level[r.number] == k and r.number not in firsts]
                + [v for v in roots if level[v.number] == k - 1],
            )
        ]
        return rounded_tiles(passes, self.halves, known)

    def _columns(self, start: str) -> None:
        for s in self.low.spaces:
            for k, a in enumerate(s):
                n = self.low.extent(a)
                own = start if k == 0 else "0"
                even = n % self.p.blocks[a] == 0 if (own != "0" or self.form == "looped") else n == self.p.blocks[a]
                if self.form == "flat":
                    even = True
                self.p.set_column(a, own, even)

    def _print_stores(self, stores: Sequence[tuple[Store, Expr]]) -> None:
        left = list(stores)
        while left:
            store, value = left.pop(0)
            other = next((w for w in left if self.p.pairs_with(store, w[0])), None)
            if other is None:
                self.p.store(store, value)
            else:
                left.remove(other)
                self.p.store_pair(store, value, *other)

    def _early(self) -> list[Expr]:
        """Tiles to load before the first reduction although some are needed only after one (`early`: 1 those that are
        others in each row, 2 all): those that the reductions need come first."""
        wanted, roots = int(self.knobs.get("early", 0)), [v for _, v in self.stores]
        every = late_loads(roots, self.low)
        late = [e for e in every if wanted == 2 or (wanted and streams(e, self.low))]
        return [*(e for e in tile_loads(roots, self.low) if e not in every), *late] if late else []

    # ---- loops

    def _loop_over(self, low: object, high: object, step: object) -> str:
        return loop_over(low, high, step, int(self.knobs.get("num_stages", 1)))

    def _levels(self) -> int:
        """Number every expression by how many looped reductions lie under it; the largest of a reduction's."""
        paired = {o.total.number for o in self.online}  # which come with the reduction that they need
        roots = [v for _, v in self.stores]
        self.level = levels(roots, lambda r: r.number not in paired and bool(self.looped & set(r.attr[1])))
        return max((self.level[r.number] for r in self._looped_reduces()), default=0)

    def _looped_reduces(self) -> list[Expr]:
        return [e for e in walk([v for _, v in self.stores]) if e.op == "reduce" and self.looped & set(e.attr[1])]

    def turns(self, level: int) -> bool:
        """Whether a pass runs from the end of the row: it meets first what the pass before it has left in the cache."""
        return bool(self.knobs.get("turn")) and level % 2 == 0

    def _loops(self) -> None:
        p, low = self.p, self.low
        top = self._levels()
        reduces = self._looped_reduces()
        if self.halves and self.form == "unrolled":
            p.rounds = self._rounds(self.level, lambda r: r.op == "reduce" and bool(self.looped & set(r.attr[1])))
        left = list(self.stores)
        for level in range(1, top + 2):
            p.last_pass = level == top + 1
            self.backward = self.turns(level)
            for space in low.spaces:
                mine = [r for r in reduces if self.level[r.number] == level and p.space(r.args[0]) == space]
                writes = [(s, v) for s, v in left if self.level[v.number] < level and self._space_of(s) == space]
                left = [w for w in left if w not in writes]
                if mine or writes:
                    self._unrolled(space, mine, writes) if self.form == "unrolled" else self._loop(space, mine, writes)
            rest = [(s, v) for s, v in left if self.level[v.number] <= level and self._space_of(s) is None]
            left = [w for w in left if w not in rest]
            self._print_stores(rest)
        assert not left, "a write was not placed"

    def _space_of(self, store: Store) -> tuple[str, ...] | None:
        return next((self.p.space_of[c] for c in store.access.axes if c in self.p.space_of), None)

    def _hoist(self, roots: Sequence[Expr]) -> None:
        """Row values that a loop's body needs are printed before it: what the body names is forgotten after it."""
        for e in walk(roots):
            if (
                e.op != "const"
                and self.p.space(e) is None
                and all(self.p.known(c) is not None or c.is_const or self.p.space(c) is None for c in children(e))
            ):
                self.p.name(e)

    def _loop(self, space: tuple[str, ...], reduces: Sequence[Expr], writes: Sequence[tuple[Store, Expr]]) -> None:
        p = self.p
        online = {o.total.number: o for o in self.online if o.total in reduces}
        firsts = {o.first.number for o in online.values()}
        bodies = [online[r.number].f if r.number in online else r.args[0] for r in reduces]
        self._hoist([*bodies, *(v for _, v in writes)])
        axis = space[0]
        n, block = self.low.extent(axis), p.blocks[axis]
        extents = [*([self.rows] if self.rows > 1 else []), *(p.blocks[a] for a in space)]
        shape = f"({', '.join(map(str, extents))},)"
        low, high = self._range(space)
        accumulators: dict[int, str] = {}
        for r in reduces:
            if r.number in online:
                online[r.number].begin(p, shape, space, low)
            elif r.number not in firsts:
                acc = accumulators[r.number] = p.fresh("acc")
                p.line(f"{acc} = tl.full({shape}, {identity(r.attr[0], r.dtype)}, {TYPES[r.dtype]})")
        start = p.fresh("i")
        p.line(f"for {start} in {self._loop_over(low, high, block)}:")
        with p.scope():
            if self.backward:  # the first block comes last
                both = str((n - 1) // block * block) if low == "0" else f"2 * {low} + ({high} - {low} - 1) // {block} * {block}"
                start = p.assign(f"{both} - {start}", "s", "i")
            for k, a in enumerate(space):
                p.set_column(a, start if k == 0 else "0", n % block == 0 if k == 0 else self.low.extent(a) == p.blocks[a])
            for r in reduces:
                if r.number in online:
                    online[r.number].step(p, space)
                elif r.number not in firsts:
                    p.accumulate(accumulators[r.number], r.attr[0], p.masked(r.args[0], r.attr[0], space))
            self._print_stores(writes)
        for r in reduces:
            if r.number in online:
                online[r.number].end(p, space)
            elif r.number not in firsts:
                text = p.reduce_text(accumulators[r.number], r.attr[0], r.attr[1], space)
                p.define(r, p.assign(text, p.reduced_kind(r.attr[1], space), "s"))

    def _unrolled(self, space: tuple[str, ...], reduces: Sequence[Expr], writes: Sequence[tuple[Store, Expr]]) -> None:
        """A pass over blocks that lie side by side in registers: a row of 5 x 1024 columns is no tile of 8192."""
        p = self.p
        self._hoist([*(r.args[0] for r in reduces), *(v for _, v in writes)])
        axis = space[0]
        n, block = self.low.extent(axis), p.blocks[axis]
        per = self.per_piece(axis)
        even = n == per * self.pieces
        blocks = self.side.setdefault(space, [Block() for _ in range(per // block)])
        names = [p.fresh("acc") for _ in reduces]
        early = [e for e in self._early() if p.space(e) == space]
        p.in_storage = self.knobs.get("keep") in ("storage", "rounded")
        for k, one in enumerate(blocks):
            p.raw = one.raw
            p.scopes.append({} if p.in_storage else one.names)
            begins = not one.column
            if begins:
                for d, a in enumerate(space):
                    whole = self.low.extent(a) == p.blocks[a]
                    if d == 0:
                        whole = even or (self.pieces == 1 and (k + 1) * block <= n)
                    start = str(k * block) if self.pieces == 1 else f"base + {k * block}"
                    p.set_column(a, start if d == 0 else "0", whole)
                one.column, one.mask = {a: p.column[a] for a in space}, {a: p.mask[a] for a in space if a in p.mask}
                one.start = {a: p.start[a] for a in space}
            for a in space:
                p.column[a] = one.column[a]
                p.mask.pop(a, None)
            p.mask |= one.mask
            p.start |= one.start
            if begins:
                for e in early:
                    p.fetch_early(e)
            for r, acc in zip(reduces, names, strict=True):
                text, kind = p.masked(r.args[0], r.attr[0], space), r.attr[0]
                if k:
                    p.accumulate(acc, kind, text)
                else:
                    p.line(f"{acc} = {text}")
            self._print_stores(writes)
            p.scopes.pop()
            p.age()
            one.raw = p.raw
        p.in_storage = False
        self._finish(space, reduces, names)

    def per_piece(self, axis: str) -> int:
        """Columns of each program's piece of a row: whole blocks."""
        block = self.blocks[axis]
        return -(-self.low.extent(axis) // (block * self.pieces)) * block

    def _finish(self, space: tuple[str, ...], reduces: Sequence[Expr], names: Sequence[str]) -> None:
        """What a pass over blocks side by side has accumulated is the reductions' results."""
        p = self.p
        for r, acc in zip(reduces, names, strict=True):
            name = p.assign(p.reduce_text(acc, r.attr[0], r.attr[1], space), p.reduced_kind(r.attr[1], space), "s")
            p.define(r, name)

    def _range(self, space: tuple[str, ...]) -> tuple[str, str]:
        """The columns that a loop passes over."""
        return "0", str(self.low.extent(space[0]))

    # ---- the function around it

    def _wrap(
        self, grid: tuple[object, ...] | None = None, work: tuple[tuple[str, int], ...] = (), kept: tuple[int, ...] = ()
    ) -> Source:
        p = self.p
        text, launch = function(
            p, "kernel", grid or self._grid(), int(self.knobs["num_warps"]), int(self.knobs.get("num_stages", 1)),
            range(len(work)), int(self.knobs.get("registers", 0)),
        )  # fmt: skip
        return Source("cuda", module(p.prelude, [text]), (launch,), work, fuse_products=self.math != "exact", kept=kept)

    def _grid(self) -> tuple[object, ...]:
        if self.form == "flat":
            return ("flat", int(self.p.blocks[self.low.spaces[0][0]]))
        return ("blocks" if self.knobs.get("order") == "cols" else "rows", self.rows, self._blocks_a_row())

    def _blocks_a_row(self) -> int:
        """How many programs a row's columns take."""
        if self.form != "tile" or not self.low.spaces:
            return 1
        axis = self.low.spaces[0][0]
        return -(-self.low.extent(axis) // self.p.blocks[axis])
