"""Two reductions at once, where the second would need the first one's result: in one pass over a row's blocks, or from
pieces of a row that know nothing of each other.

A softmax's maximum and sum (online softmax: Milakov and Gimelshein, 2018), and a variance with its mean (joined as by Chan,
Golub and LeVeque, 1979).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

from .expr import Builder, Expr
from .lower import Lowered
from .triton_text import TYPES, TritonPrinter


class OnePass(ABC):
    """`first` and `total`, reductions of `f` over the same columns: what is printed before, in and after the loop, and what
    in a piece of a row and after it."""

    def __init__(self, total: Expr, first: Expr, f: Expr) -> None:
        self.total, self.first, self.f = total, first, f
        self.acc = ""

    @abstractmethod
    def begin(self, p: TritonPrinter, shape: str, space: tuple[str, ...], start: str) -> None:
        """Print what the loop adds to. `start`: the first column of a block that there is."""

    @abstractmethod
    def step(self, p: TritonPrinter, space: tuple[str, ...]) -> None:
        """Print what a block adds."""

    @abstractmethod
    def end(self, p: TritonPrinter, space: tuple[str, ...]) -> None:
        """Print and define the results."""

    @abstractmethod
    def alone(self, p: TritonPrinter, part: str, count: str) -> str:
        """What stands for `first` where a piece of `count` columns makes its part of `total`, from its part of `first`.
        A piece of no columns says 1."""

    @abstractmethod
    def join(self, p: TritonPrinter, firsts: str, totals: str, counts: str, rows: bool = False) -> None:
        """Print and define the results, from the parts and column counts of all pieces, of one row or of several."""


LEAST = "-3.4028234663852886e38"


class SoftmaxSum(OnePass):
    """sum over exp(f - max f): the running maximum and the sum, rescaled where the maximum grows."""

    def begin(self, p: TritonPrinter, shape: str, space: tuple[str, ...], start: str) -> None:
        acc = self.acc = p.fresh("acc")
        p.line(f"{acc}m = tl.full({shape}, {LEAST}, {TYPES[self.f.dtype]})")
        p.line(f"{acc} = tl.zeros({shape}, {TYPES[self.f.dtype]})")

    def step(self, p: TritonPrinter, space: tuple[str, ...]) -> None:
        """One exp an element: of -|x - m|, which rescales the old sum where x is a new maximum and is x's own term
        where it is not. m starts at the least finite number, so that -inf adds nothing."""
        acc = self.acc
        x = p.assign(p.masked(self.f, "max", space), "t")
        e = p.fresh()
        exp = "tl.exp2({} * 1.4426950408889634)" if p.math != "exact" else p.use("af_exp") + "({})"
        if self.f.dtype == "float64":
            exp = "tl.exp({})"
        p.line(f"{e} = {exp.format(f'(-tl.abs({x} - {acc}m))')}")
        p.line(f"{acc} = tl.where({x} > {acc}m, {acc} * {e} + 1.0, {acc} + {e})")
        p.line(f"{acc}m = tl.maximum({acc}m, {x})")

    def end(self, p: TritonPrinter, space: tuple[str, ...]) -> None:
        acc, axes = self.acc, self.total.attr[1]
        kind = p.reduced_kind(axes, space)
        m = p.assign(p.reduce_text(f"{acc}m", "max", axes, space), kind, "s")
        p.define(self.first, m)
        wide = m + p.expand(0, p.rank(space)) if kind == "r" else m
        s = p.assign(p.reduce_text(f"({acc} * {self._exp(p)}({acc}m - {wide}))", "sum", axes, space), kind, "s")
        s = p.assign(f'tl.where({m} == float("inf"), float("nan"), {s})', kind, "s")
        p.define(self.total, s)

    def _exp(self, p: TritonPrinter) -> str:
        return "tl.exp" if self.f.dtype == "float64" or p.math != "exact" else p.use("af_exp")

    def alone(self, p: TritonPrinter, part: str, count: str) -> str:
        return f"tl.maximum({part}, {LEAST})"  # a piece of nothing but -inf adds nothing

    def join(self, p: TritonPrinter, firsts: str, totals: str, counts: str, rows: bool = False) -> None:
        kind, axis, lift = ("r", 1, "[:, None]") if rows else ("s", 0, "")
        top = p.assign(f"tl.maximum(tl.max({firsts}, axis={axis}), {LEAST})", kind, "s")
        p.define(self.first, top)
        text = f"tl.sum({totals} * {self._exp(p)}({firsts} - {top}{lift}), axis={axis})"
        p.define(self.total, p.assign(text, kind, "s"))


class Moments(OnePass):
    """sum over (f - mean f)^2, with sum over f: each place of a block adds up how far its elements lie from the first of
    them, x0, and the squares of that: s and q over k elements. With m the mean, its part of the sum is
    q - (m - x0) (2 s - k (m - x0)); m and x0 are taken from another element of the row, so that they keep their digits.

    A common offset goes with x0, and where x0 lies far from the others it is itself most of the sum: the result's relative
    error is at most about k units in the last place.
    """

    def begin(self, p: TritonPrinter, shape: str, space: tuple[str, ...], start: str) -> None:
        acc = self.acc = p.fresh("acc")
        with p.scope(indent=False):
            for k, a in enumerate(space):
                first = start if k == 0 else "0"
                p.set_column(a, first, p.low.extent(a) >= p.blocks[a] if k == 0 else p.low.extent(a) == p.blocks[a])
            p.line(f"{acc}x = {p.masked(self.f, 'sum', space)}")
            axes = self.total.attr[1]
            self.near = p.assign(
                p.reduce_text(p.masked(self.f, "max", space), "max", axes, space), p.reduced_kind(axes, space), "s"
            )
        for name in ("t", "s", "q", *(("k",) if self._ragged(p, space) else ())):
            p.line(f"{acc}{name} = tl.zeros({shape}, tl.float32)")

    def _columns(self, p: TritonPrinter) -> float:
        return float(prod(p.low.extent(a) for a in self.total.attr[1]))

    def _ragged(self, p: TritonPrinter, space: tuple[str, ...]) -> bool:
        """Whether some places of a block hold fewer elements than others."""
        return any(p.low.extent(a) % p.blocks[a] for a in space)

    def step(self, p: TritonPrinter, space: tuple[str, ...]) -> None:
        acc = self.acc
        p.line(f"{acc}t += {p.masked(self.f, 'sum', space)}")
        d = p.assign(p.inside(f"{p.text(self.f, space)} - {acc}x", space, "0.0"), "t")
        if self._ragged(p, space):
            p.line(f"{acc}k += {p.inside('1.0', space, '0.0')}")
        p.line(f"{acc}s += {d}")
        p.line(f"{acc}q += {d} * {d}")

    def end(self, p: TritonPrinter, space: tuple[str, ...]) -> None:
        acc, axes = self.acc, self.total.attr[1]
        kind = p.reduced_kind(axes, space)
        n = self._columns(p)
        k = f"{acc}k" if self._ragged(p, space) else str(n // prod(p.blocks[a] for a in space))
        lift = p.expand(0, p.rank(space)) if kind == "r" else ""
        p.line(f"{acc}x = {acc}x - {self.near}{lift}")
        total = p.assign(p.reduce_text(f"{acc}t", "sum", axes, space), kind, "s")
        p.define(self.first, total)
        mean = p.assign(f"{p.reduce_text(f'({acc}s + {k} * {acc}x)', 'sum', axes, space)} * {1 / n}", kind, "s")
        off = p.assign(f"{mean}{lift} - {acc}x", "t")
        text = f"({acc}q - {off} * (2.0 * {acc}s - {k} * {off}))"
        s = p.assign(p.reduce_text(text, "sum", axes, space), kind, "s")
        # squares of finite elements that overflow are infinite, and no difference of infinities
        s = p.assign(f'tl.where(({total} - {total} == 0.0) & ({s} - {s} != 0.0), float("inf"), {s})', kind, "s")
        # rounding may leave a little less than nothing
        p.define(self.total, p.assign(f"tl.where({s} < 0.0, 0.0, {s})", kind, "s"))

    def alone(self, p: TritonPrinter, part: str, count: str) -> str:
        return f"{part} * ({self._columns(p)} / {count})"  # the mean of the piece, once it is divided

    def join(self, p: TritonPrinter, firsts: str, totals: str, counts: str, rows: bool = False) -> None:
        kind, axis, lift = ("r", 1, "[:, None]") if rows else ("s", 0, "")
        if rows:
            counts = f"{counts}[None, :]"
        total = p.assign(f"tl.sum({firsts}, axis={axis})", kind, "s")
        p.define(self.first, total)
        off = p.assign(f"{firsts} / tl.maximum({counts}, 1.0) - ({total} / {self._columns(p)}){lift}", "v", "w")
        p.define(self.total, p.assign(f"tl.sum({totals} + {counts} * {off} * {off}, axis={axis})", kind, "s"))


def softmax_sums(reduces: Sequence[Expr]) -> list[OnePass]:
    """The softmax sums among these reductions."""
    found: list[OnePass] = []
    for r in reduces:
        if r.attr[0] != "sum" or r.args[0].op != "exp":
            continue
        d = r.args[0].args[0]
        if d.op == "sub" and d.args[1].op == "reduce" and d.args[1].attr == ("max", r.attr[1]) and d.args[1].args[0] is d.args[0]:
            found.append(SoftmaxSum(r, d.args[1], d.args[0]))
    return found


def moments(reduces: Sequence[Expr], low: Lowered) -> list[OnePass]:
    """The sums of squared distances from a mean over all columns of a space among these reductions."""
    found: list[OnePass] = []
    for r in reduces:
        square = r.args[0]
        if r.attr[0] != "sum" or r.dtype != "float32" or square.op != "mul" or square.args[0] is not square.args[1]:
            continue
        d = square.args[0]
        if d.op != "sub" or not any(set(s) == set(r.attr[1]) for s in low.spaces):
            continue
        f, total = d.args[0], _summed(d.args[1], prod(low.extent(a) for a in r.attr[1]))
        if total is not None and total.attr == ("sum", r.attr[1]) and total.args[0] is f:
            found.append(Moments(r, total, f))
    return found


def _summed(mean: Expr, n: int) -> Expr | None:
    """The sum that `mean` is an n-th of, or None."""
    if mean.op == "mul":
        for total, other in (mean.args, mean.args[::-1]):
            c = Builder.number(other)
            if total.op == "reduce" and c is not None and abs(float(c) * n - 1) < 1e-6:
                return total
    if mean.op == "div" and mean.args[0].op == "reduce" and Builder.number(mean.args[1]) == n:
        return mean.args[0]
    return None
