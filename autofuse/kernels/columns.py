"""A Triton program for reductions over rows: programs fold chunks of rows, a second launch joins what they leave.

Partial results lie in a workspace and are joined in the order of the chunks, so that results do not depend on which
program ends first. Values of whole rows (a norm's gradient of its input) are written on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from .base import Knobs, Launch, Source, Task
from .choices import legal_stores, next_power
from .expr import FLOATS, Expr, children, walk
from .layout import Addressing
from .lower import Lowered
from .module import function, loop_over, module
from .roles import Store
from .storage import print_in_storage
from .triton_text import TYPES, TritonPrinter, identity

STANDING = 32  # columns a thread up to which what is the same for all rows stays in registers
JOIN_TILE = 4096  # elements that the second launch holds at once


Write = tuple[Store, Expr]


def detached(low: Lowered, results: Sequence[Write]) -> tuple[list[Expr], list[Expr], list[Write]]:
    """The reductions over rows under some writes, a leaf that stands for each, and the writes in terms of the leaves."""
    leaves: dict[int, Expr] = {}
    folds: list[Expr] = []
    made: dict[int, Expr] = {}
    for e in walk([v for _, v in results]):
        if e.op == "reduce" and low.reduced & set(e.attr[1]):
            folds.append(e)
            made[e.number] = leaves[e.number] = low.b.make("fold", (), len(folds) - 1, e.dtype, e.axes)
            continue
        args = tuple(made[a.number] for a in e.args)
        made[e.number] = e if args == e.args else low.b.make(e.op, args, e.attr, e.dtype, e.axes)
    return folds, [leaves[f.number] for f in folds], [(s, made[v.number]) for s, v in results]


def needs_whole_rows(low: Lowered) -> bool:
    """Whether a program must hold all columns of a row: for statistics of rows, or columns of several widths."""
    return len(low.spaces) > 1 or any(r not in low.folds for r in low.reduces)


class Columns:
    """Assembles one program: `fold`, and `join` where several chunks share a result."""

    def __init__(self, task: Task, knobs: Knobs) -> None:
        self.task, self.low, self.knobs = task, task.low, knobs
        self.math = str(knobs["math"])
        self.rows, self.chunks = int(knobs["block_rows"]), int(knobs["chunks"])
        self.registers = int(knobs["registers"])
        self.warps, self.stages = int(knobs["num_warps"]), int(knobs["num_stages"])
        stores = legal_stores(task.low, self.math, True)
        self.whole = [(s, v) for s, v in stores if s in task.low.whole]
        joined = [(s, v) for s, v in stores if s not in task.low.whole]
        self.folds, self.leaves, self.results = detached(task.low, joined)
        self.prelude: set[str] = set()

    def source(self) -> Source:
        texts, launches = [], []
        for text, launch in [self._fold()] if self.chunks == 1 else [self._fold(), self._join()]:
            texts.append(text)
            launches.append(launch)
        work = () if self.chunks == 1 else tuple((f.dtype, self.chunks * self._width(f)) for f in self.folds)
        return Source("cuda", module(self.prelude, texts), tuple(launches), work, fuse_products=self.math != "exact")

    # ---- tiles

    def _printer(self, rows: int, block: int) -> TritonPrinter:
        """`block`: columns of a tile, 0 for all of them."""
        blocks: dict[str, int] = {}
        for s in self.low.spaces:
            pads = {a: next_power(self.low.extent(a)) for a in s}
            if block:
                pads[s[0]] = max(1, min(pads[s[0]], block // prod(pads[a] for a in s[1:])))
            blocks |= pads
        p = TritonPrinter(self.low, Addressing(self.low, self.task.layout, True), rows, blocks, self.math)
        if self.knobs.get("overlap"):
            p.use("af_overlap")
        return p

    def _pieces(self, p: TritonPrinter) -> int:
        """Programs side by side along the columns."""
        if len(self.low.spaces) != 1:
            return 1
        a = self.low.spaces[0][0]
        return -(-self.low.extent(a) // p.blocks[a])

    def _columns(self, p: TritonPrinter) -> None:
        many = self._pieces(p) > 1
        for s in self.low.spaces:
            if many:
                p.line(f"start = tl.program_id(1) * {p.blocks[s[0]]}")
            for k, a in enumerate(s):
                p.set_column(a, "start" if many and k == 0 else "0", self.low.extent(a) % p.blocks[a] == 0)

    def _mine(self, p: TritonPrinter, e: Expr) -> list[str]:
        """The column axes that a value varies with, outermost first."""
        return [a for a in p.space(e) or () if a in e.axes]

    def _width(self, f: Expr) -> int:
        return prod(self.low.extent(a) for s in self.low.spaces for a in s if a in f.axes)

    def _shape(self, p: TritonPrinter, e: Expr, first: Sequence[int]) -> str:
        space = p.space(e) or ()
        dims = [*first, *(p.blocks[a] if a in e.axes else 1 for a in space)]
        return f"({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"

    def _place(self, p: TritonPrinter, e: Expr) -> tuple[str, str]:
        """Where a value lies among its columns, and the mask of those that there are ("" where all are)."""
        mine = self._mine(p, e)
        step = 1
        terms: list[str] = []
        for a in reversed(mine):
            terms.insert(0, p.column[a] if step == 1 else f"{p.column[a]} * {step}")
            step *= self.low.extent(a)
        return " + ".join(terms), " & ".join(f"({p.mask[a]})" for a in mine if a in p.mask)

    # ---- the launches

    def _fold(self) -> tuple[str, Launch]:
        whole = needs_whole_rows(self.low)
        p = self._printer(self.rows, 0 if whole else int(self.knobs["block_cols"]))
        kept, reduced = p.addressing.kept, p.addressing.reduced
        p.line("pid = tl.program_id(0)")
        p.line(f"kept = pid // {self.chunks}")
        p.place("kept", kept)
        p.line(f"per = tl.cdiv(reds, {self.chunks * self.rows}) * {self.rows}")
        p.line(f"low = (pid % {self.chunks}) * per")
        p.line("high = tl.minimum(low + per, reds)")
        self._columns(p)
        mark = len(p.lines)
        bodies = [f.args[0] for f in self.folds]
        roots = [*bodies, *(v for _, v in self.whole)]
        if max((prod(p.blocks[a] for a in s) for s in self.low.spaces), default=1) <= STANDING * 32 * self.warps:
            self._name_standing(p, roots)
        accs = []
        for f in self.folds:
            acc = p.fresh("acc")
            shape = self._shape(p, f.args[0], [self.rows] if p.rowdim else [])
            p.line(f"{acc} = tl.full({shape}, {identity(f.attr[0], f.dtype)}, {TYPES[f.dtype]})")
            if self._compensated(f):
                p.line(f"{acc}c = tl.zeros_like({acc})")
            accs.append(acc)
        p.line(f"for at in {loop_over('low', 'high', self.rows, self.stages)}:")
        with p.scope():
            p.set_rows("at", "high", reduced)
            inner = len(p.lines)
            actions: list[tuple[Expr, Callable[[], None]]] = []
            for s, v in self.whole:
                actions.append((v, partial(p.store, s, v)))
            for f, acc in zip(self.folds, accs, strict=True):
                actions.append((f.args[0], partial(self._add, p, acc, f)))
            if self.knobs.get("keep") == "storage":
                print_in_storage(p, actions, lambda r: True)
            else:
                for _, action in actions:
                    action()
            p.lines[inner:inner] = [p.indent * 2 + text for g, text in p.hoisted if g in reduced]
        for f, leaf, acc in zip(self.folds, self.leaves, accs, strict=True):
            tile = p.space(f) is not None
            name = p.assign(p.along_axis(acc, f.attr[0], 0, ", keep_dims=True" if tile else ""), "t", "s") if p.rowdim else acc
            p.kind[name] = "t" if tile else "s"
            p.define(leaf, name)
        if self.chunks == 1:
            for store, value in self.results:
                p.store(store, value)
        else:
            for k, (f, leaf) in enumerate(zip(self.folds, self.leaves, strict=True)):
                place, mask = self._place(p, f)
                pointer = f"ws{k} + pid.to(tl.int64) * {self._width(f)}" + (f" + {place}" if place else "")
                p.line(f"tl.store({pointer}, {p.name(leaf)}{f', mask={mask}' if mask else ''})")
        p.lines[mark:mark] = [p.indent + text for g, text in p.hoisted if g not in reduced]
        self.prelude |= p.prelude
        grid = ("units", self.chunks, self._pieces(p))
        return function(p, "fold", grid, self.warps, self.stages, range(len(self.folds)), self.registers)

    def _name_standing(self, p: TritonPrinter, roots: Sequence[Expr]) -> None:
        """Print what is the same for all rows, so that it is loaded once a program."""
        stands: set[int] = set()
        for e in walk(roots):
            if e.op != "reduce" and not e.axes & self.low.reduced and all(c.number in stands for c in children(e)):
                stands.add(e.number)
                if e.op == "load" and p.space(e) is not None and not children(e):
                    p.fetch_early(e)  # as it came: it is widened where it is used
                elif e.op != "const" and p.space(e) is None:
                    p.name(e)

    def _compensated(self, f: Expr) -> bool:
        """Whether a sum keeps what each addition loses: a chunk may be of any number of rows."""
        return self.math == "exact" and f.attr[0] == "sum" and f.dtype in FLOATS

    def _add(self, p: TritonPrinter, acc: str, f: Expr) -> None:
        if not self._compensated(f):
            p.accumulate(acc, f.attr[0], self._within(p, f))
            return
        y, t, e = p.fresh("y"), p.fresh("t"), p.fresh("e")  # Kahan's summation; past infinity nothing is lost
        p.line(f"{y} = {self._within(p, f)} - {acc}c")
        p.line(f"{t} = {acc} + {y}")
        p.line(f"{e} = ({t} - {acc}) - {y}")
        p.line(f"{acc}c = tl.where({e} - {e} == 0.0, {e}, 0.0)")
        p.line(f"{acc} = {t}")

    def _within(self, p: TritonPrinter, f: Expr) -> str:
        """What a tile adds to a fold: nothing of the rows behind its last one."""
        e = f.args[0]
        space = p.space(e)
        text = p.text(e, space)
        if not p.rowdim:
            return text
        ok = "row_ok" + (p.expand(0, p.rank(space)) if space is not None else "")
        return f"tl.where({ok}, {text}, {identity(f.attr[0], f.dtype)})"

    def _join(self) -> tuple[str, Launch]:
        widest = max((prod(next_power(self.low.extent(a)) for a in s) for s in self.low.spaces), default=1)
        # so narrow that every processor has one
        block = widest if len(self.low.spaces) > 1 else min(widest, 128, max(16, next_power(widest // self.task.limits.sm_count)))
        p = self._printer(1, block)
        p.along, p.along_axes = (), set()
        p.line("pid = tl.program_id(0)")
        p.place("pid", p.addressing.kept)
        self._columns(p)
        mark = len(p.lines)
        step = max(1, min(next_power(self.chunks), JOIN_TILE // block))
        for k, f in enumerate(self.folds):
            place, mask = self._place(p, f)
            rank = len(p.space(f) or ())
            lift = "[None, " + ", ".join(":" * rank) + "]" if rank else ""
            chunk = "[:, " + ", ".join(["None"] * rank) + "]" if rank else ""
            acc = p.fresh("acc")
            p.line(f"{acc} = tl.full({self._shape(p, f, [step])}, {identity(f.attr[0], f.dtype)}, {TYPES[f.dtype]})")
            p.line(f"for at in range(0, {self.chunks}, {step}):")
            p.line(f"    chunk = at + tl.arange(0, {step})")
            width = self._width(f)
            pointer = f"ws{k} + (pid.to(tl.int64) * {self.chunks} + chunk{chunk}) * {width}"
            pointer += f" + ({place}){lift}" if place else ""
            masks = [f"(chunk < {self.chunks}){chunk}"] if self.chunks % step else []
            masks += [f"({mask}){lift}"] if mask else []
            told = f", mask={' & '.join(masks)}, other={identity(f.attr[0], f.dtype)}" if masks else ""
            with p.scope():
                p.accumulate(acc, f.attr[0], f"tl.load({pointer}{told})")
            name = p.assign(p.along_axis(acc, f.attr[0], 0), "t" if rank else "s", "s")
            p.define(self.leaves[k], name)
        for store, value in self.results:
            p.store(store, value)
        p.lines[mark:mark] = [p.indent + text for _, text in p.hoisted]
        self.prelude |= p.prelude
        warps = max(1, min(8, step * block // 256))
        return function(p, "join", ("rows", 1, self._pieces(p)), warps, 1, range(len(self.folds)))
