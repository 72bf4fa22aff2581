"""A whole Triton kernel from a segment and its knobs: one tile, or loops over column blocks with accumulators."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from ..chain import INPUT, Chain
from ..cost import numel
from ..errors import Infeasible
from ..ops import ITEMSIZE, is_free
from .base import Knob, Knobs, Launch, Source, Task
from .expr import FLOATS, Expr, children, walk
from .layout import MAX_STEP, Addressing
from .lower import Lowered
from .mathmode import MODES, Legal
from .onepass import OnePass, moments, softmax_sums
from .roles import Store
from .triton_text import PRELUDE, TYPES, TritonPrinter, identity

MAX_TILE = 2**17  # elements of one tile: beyond it registers spill whatever the warps
SMALL = 2**23  # elements up to which what a kernel costs to start is worth a knob
SHORT = 2**20  # elements up to which it gains nearly always
MAX_UNROLLED = 16  # blocks of columns side by side in one kernel: its text grows with them
INEXACT = {"exp", "expm1", "log1p", "tanh", "sigmoid", "erf"}  # what the fast mode loses bits in


def widest(task: Task) -> int:
    """Columns of the widest space."""
    return max((prod(task.low.extent(a) for a in s) for s in task.low.spaces), default=1)


def is_hint(knob: str) -> bool:
    """Whether a knob is the eviction hint of an operand: in0, out1."""
    return re.fullmatch(r"(in|out)\d+", knob) is not None


def hints(task: Task, passes: bool) -> tuple[Knob, ...]:
    """A knob for the eviction hint of each large operand. `passes`: some forms read a row more than once."""
    chain, made = task.chain, []
    sizes = {s: 64 for s in chain.symbols}
    operands = [(f"in{k}", v) for k, v in enumerate(chain.inputs)]
    operands += [(f"out{k}", chain.values[o]) for k, o in enumerate(chain.outputs)]
    most = max((numel(v.shape, sizes) for _, v in operands), default=1)
    for name, v in operands:
        if 4 * numel(v.shape, sizes) < most or (name[0] == "i" and not chain.users[int(name[2:])]):
            continue
        loads = ("", "evict_first", "evict_last", *(("reuse", "past") if passes else ()))
        made.append(Knob(name, loads if name[0] == "i" else ("", "evict_first")))
    return tuple(made)


def near(task: Task) -> Knob:
    """A knob for the hint of all other inputs that vary with columns: many programs read them again."""
    hinted = {k.name for k in hints(task, True)}
    loads = tile_loads([s.value for s in task.low.stores], task.low)
    others = any(f"in{e.attr.operand}" not in hinted for e in loads)
    return Knob("near", ("", "evict_last") if others else ("",))


def early_choices(task: Task) -> tuple[int, ...]:
    """What of the tiles that are needed only after a reduction may be loaded before it: 0 nothing, 1 what is another in
    each row, 2 all."""
    late = late_loads([s.value for s in task.low.stores], task.low)
    rows = {streams(e, task.low) for e in late}
    return (0, *((1,) if True in rows else ()), *((2,) if False in rows else ()))


def overlap(task: Task) -> Knob:
    """Whether a short kernel starts while the one before it ends."""
    small = task.rows * widest(task) <= SMALL
    return Knob("overlap", (0, 1) if small and task.limits.overlaps else (0,))


def default_overlap(task: Task) -> int:
    """Where a search begins: what is over in a few microseconds gains most."""
    return int(1 in overlap(task).values and task.rows * widest(task) <= SHORT)


def hinted(task: Task, hint: str) -> dict[str, int | str]:
    """One eviction hint for all large inputs, and for outputs where they take it; "" for none, where a search begins."""
    return {k.name: hint if hint in k.values else "" for k in hints(task, True)}


def next_power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def default_math(task: Task) -> str:
    """The math mode to begin with: results that are rounded to 16 bits or fewer, or that eager computes from such, hide
    what the fast forms lose."""
    outputs, coarse = task.chain.outputs, rounded_values(task.chain)
    wide = [
        s.value for s in task.low.stores
        if task.chain.values[outputs[s.access.operand]].dtype in FLOATS and outputs[s.access.operand] not in coarse
    ]  # fmt: skip
    reads = any(v.dtype in FLOATS and len(v.shape) > 1 for v in task.chain.inputs)
    shows = any(e.op in INEXACT for e in walk(wide))
    return "exact" if wide and (reads or shows or task.low.folds) else "fast"


def rounded_values(chain: Chain) -> set[int]:
    """The values before which eager rounds a result of its own to 16 bits or fewer."""
    found: set[int] = set()
    for i, v in enumerate(chain.values):
        made = v.op != INPUT and not is_free(v.name)
        if any(r in found for r in v.refs) or (made and v.dtype in ITEMSIZE and "float" in v.dtype and ITEMSIZE[v.dtype] <= 2):
            found.add(i)
    return found


def legal_stores(low: Lowered, mode: str, gpu: bool) -> list[tuple[Store, Expr]]:
    """Every write with its value in a math mode."""
    legal = Legal(low.b, mode, gpu)
    return [(s, legal(s.value)) for s in low.stores]


def levels(roots: Sequence[Expr], counts: Callable[[Expr], bool]) -> dict[int, int]:
    """For every expression under the roots how many of the reductions that count lie under it in a row, itself included."""
    made: dict[int, int] = {}
    for e in walk(roots):
        made[e.number] = max((made[c.number] for c in children(e)), default=0) + (e.op == "reduce" and counts(e))
    return made


def first_needs(roots: Sequence[Expr]) -> tuple[dict[int, int], set[int]]:
    """The levels of all reductions, and the numbers of what lies under those of the first level, themselves included."""
    level = levels(roots, lambda r: True)
    return level, {c.number for c in walk([e for e in walk(roots) if e.op == "reduce" and level[e.number] == 1])}


def held_tiles(task: Task) -> int:
    """How many tiles wait in registers while the first reduction is made: computed for it, and used again after it."""
    roots, low = [s.value for s in task.low.stores], task.low
    space = {a for s in low.spaces for a in s}
    level, under = first_needs(roots)
    used = {c.number for e in walk(roots) if level[e.number] and e.op != "reduce" for c in children(e) if c.axes & space}
    return sum(not level[n] for n in used & under)


def tile_loads(roots: Sequence[Expr], low: Lowered) -> list[Expr]:
    """The tiles that are loaded from places that nothing loaded decides."""
    space = {a for s in low.spaces for a in s}
    return [e for e in walk(roots) if e.op == "load" and e.axes & space and not children(e)]


def other_math(task: Task) -> list[dict[str, int | str]]:
    """The faster math modes than the one to begin with."""
    return [{"math": m} for m in MODES[MODES.index(default_math(task)) + 1 :]]


def pieces(task: Task) -> int:
    """How many elements of one output a place of a tile writes: 2 for a rotary embedding."""
    outputs = [s.access.operand for s in task.low.stores]
    return max(map(outputs.count, outputs), default=1)


def streams(e: Expr, low: Lowered) -> bool:
    """Whether a load reads other memory in each row, so that none of it is in a cache."""
    return bool(low.rows) and set(low.rows) - low.reduced <= e.axes


def strided(task: Task) -> bool:
    """Whether columns of an input lie apart in memory, as in a transposed one: then rows are what is read together."""
    chain = task.chain
    return any(
        len(v.shape) > 1 and v.shape[-1] != 1 and chain.users[k] and task.layout.strides[k][-1] is None
        for k, v in enumerate(chain.inputs)
    )


def streamed(task: Task) -> int:
    """Bytes of a place of a tile that all inputs that vary with rows fill in each pass."""
    roots, low = [s.value for s in task.low.stores], task.low
    found = {e.attr for e in tile_loads(roots, low) if streams(e, low) and e.axes >= set(low.spaces[0])}
    return sum(ITEMSIZE[low.values[access.operand].dtype] for access in found)


def has_moments(low: Lowered) -> bool:
    """Whether a variance can be made in the pass that makes its mean."""
    return bool(moments([e for e in walk([v for _, v in legal_stores(low, "fast", True)]) if e.op == "reduce"], low))


def late_loads(roots: Sequence[Expr], low: Lowered) -> list[Expr]:
    """Those of them that are needed only after a reduction."""
    _, under = first_needs(roots)
    return [e for e in tile_loads(roots, low) if e.number not in under] if under else []


def print_in_storage(p: TritonPrinter, actions: Sequence[tuple[Expr, Callable[[], None]]], inner: Callable[[Expr], bool]) -> None:
    """Print what needs each expression, pass by pass over tiles that stay in registers in their storage dtype.

    After each level of reductions the tiles are widened anew, so that no wide copy lives as long as the row does.
    """
    roots = [e for e, _ in actions]
    level = levels(roots, inner)
    reduces = [e for e in walk(roots) if e.op == "reduce" and inner(e)]
    p.in_storage = True
    for k in range(1, max((level[r.number] for r in reduces), default=0) + 2):
        with p.scope(indent=False):
            named = [(r, p.name(r)) for r in reduces if level[r.number] == k]
            for e, action in actions:
                if level[e.number] == k - 1:
                    action()
        for r, name in named:
            p.define(r, name)
        p.age()
    p.in_storage = False
    p.raw.clear()


def rounded_tiles(passes: Sequence[Sequence[Expr]], halves: dict[int, str], known: Callable[[Expr], bool]) -> dict[int, str]:
    """The tiles that more than one pass needs and that eager has in 16 bits. `passes`: what each prints; `known`: what is
    a row's number by then."""
    before: set[int] = set()
    found: dict[int, str] = {}
    for roots in passes:
        now: set[int] = set()
        stack = list(roots)
        while stack:
            e = stack.pop()
            if e.number in now or known(e):
                continue
            now.add(e.number)
            if e.number in halves and e.number in before and e.op != "load":
                found[e.number] = halves[e.number]
                continue
            stack.extend(children(e))
        before |= now
    return found


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


def loop_over(low: object, high: object, step: object, stages: int) -> str:
    """A loop's range; with several stages the loads of later passes are under way while one is computed."""
    return f"tl.range({low}, {high}, {step}, num_stages={stages})" if stages > 1 else f"range({low}, {high}, {step})"


def function(
    p: TritonPrinter,
    entry: str,
    grid: tuple[object, ...],
    num_warps: int,
    num_stages: int = 1,
    workspaces: Sequence[int] = (),
    registers: int = 0,
) -> tuple[str, Launch]:
    """A printed body as a function, and its launch: only the tensors and scalars that the body names are arguments."""
    overlaps = "af_overlap" in p.prelude
    body = "\n".join([p.indent + "af_overlap()", *p.lines] if overlaps else p.lines)
    inputs = [k for k in range(p.low.chain.num_inputs) if _uses(body, f"in{k}")]
    outputs = [k for k in range(len(p.low.chain.outputs)) if _uses(body, f"out{k}")]
    work = [k for k in workspaces if _uses(body, f"ws{k}")]
    args = {n: s for n, s in p.addressing.args.items() if n == "rows" or _uses(body, n)}
    names = [*(f"in{k}" for k in inputs), *(f"out{k}" for k in outputs), *(f"ws{k}" for k in work), *args]
    # row counts vary from call to call: a kernel that specialised on one would be compiled again for the next
    varying = [n for n in args if n in ("rows", "reds") or n[0] == "e" or n.startswith("n_")]
    text = f"@triton.jit(do_not_specialize={varying!r})\ndef {entry}({', '.join(names)}):\n{body}\n"
    shape = (tuple(inputs), tuple(outputs), tuple(work), num_warps, num_stages)
    launch = Launch(entry, tuple(args.values()), grid, *shape, overlaps=overlaps, registers=registers)
    return text, launch


def module(prelude: set[str], functions: Sequence[str]) -> str:
    """A whole source file."""
    parts = [*(PRELUDE[n] for n in PRELUDE if n in prelude), *functions]
    return "import triton\nimport triton.language as tl\n\n\n" + "\n\n".join(parts)


def _uses(body: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", body) is not None
