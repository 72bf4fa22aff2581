"""The roles of a segment's axes: which are rows, which columns, and what is written for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..chain import Dim
from ..errors import Infeasible
from .axes import static_size, total
from .expr import Access, Expr, children, walk


@dataclass(frozen=True)
class Store:
    """One write: output `access.operand` at `access.index` gets `value`."""

    access: Access
    value: Expr


class Roles:
    """Found from what a segment writes. Raises Infeasible where the writes are no one kernel's.

    rows       axes that programs or threads share out: those that every store has, then the `reduced` ones
    reduced    row axes that a reduction joins (sums over rows); stores have all of them or, as its result, none
    cols       static axes that are reduced, or along which a row statistic is used
    spaces     the columns that meet in one value, outermost first; values of two spaces meet only in row values
    reduces    every reduction, arguments first; `folds` those over rows
    whole      the stores of every row; the others are results of reductions over rows
    """

    def __init__(self, stores: Sequence[Store], extents: dict[str, Dim], names: Sequence[Sequence[tuple[str, ...]]]) -> None:
        self.stores, self.extents, self.names = stores, extents, names
        self.reduces = [e for e in walk([s.value for s in stores]) if e.op == "reduce"]
        under: dict[int, set[Expr]] = {}
        for e in walk([s.value for s in self.stores]):
            mine = set[Expr]().union(*(under[c.number] for c in children(e)))
            under[e.number] = mine | {e} if e.op == "reduce" else mine
        joined = {a for r in self.reduces for a in r.attr[1]}
        self._find_reduced(under)
        cols = joined - self.reduced
        for r in self.reduces:
            if self.reduced & set(r.attr[1]):
                cols |= {a for a in r.axes if isinstance(self.extents[a], int)}
        for store in self.stores:
            axes = store.access.axes
            for r in under[store.value.number]:
                cols |= {a for a in axes - r.axes - joined if isinstance(self.extents[a], int)}
        if not self.reduces:
            cols |= self._pointwise_cols()
        for a in sorted(cols):
            if not isinstance(self.extents[a], int):
                raise Infeasible(f"an axis of {self.extents[a]} rows would be a column")
        every: list[str] = []
        for store in self.stores:
            for i in store.access.index:
                every += [a for a, c in sorted(i.terms, key=lambda t: _order(t[1])) if a not in every]
        every += [a for a in sorted(self.reduced) if a not in every]
        kept = [a for a in every if a not in cols and a not in self.reduced]
        self.rows = (*kept, *(a for a in every if a in self.reduced))
        for store in self.stores:
            missing = (set(self.rows) if store in self.whole else set(kept)) - store.access.axes
            if missing:
                raise Infeasible("outputs of different rows are no one segment")
        for r in self.reduces:
            if not r.axes <= set(self.rows) | cols:
                raise Infeasible("a reduction over other rows than the outputs'")
        self.cols = frozenset(cols)
        self.spaces = self._find_spaces(cols)

    def _find_reduced(self, under: dict[int, set[Expr]]) -> None:
        """The row axes that reductions join, and `whole`, the stores of every row."""
        folds = [r for r in self.reduces if any(not isinstance(self.extents[a], int) for a in r.attr[1])]
        self.folds = frozenset(folds)
        self.reduced = frozenset(a for r in folds for a in r.attr[1])
        for r in folds:
            if set(r.attr[1]) != self.reduced:
                raise Infeasible("reductions over different rows are no one segment")
            if self.folds & under[r.args[0].number]:
                raise Infeasible("a reduction over rows of what depends on another one")
        self.whole: list[Store] = []
        for store in self.stores:
            depends = bool(self.folds & under[store.value.number])
            if store.access.axes & self.reduced:
                if depends:
                    raise Infeasible("rows that depend on a reduction over them")
                self.whole.append(store)
            elif any(r not in self.folds and self.folds & under[r.number] for r in under[store.value.number]):
                raise Infeasible("a reduction over columns of a reduction over rows")
        if not folds:
            self.whole = list(self.stores)

    def _pointwise_cols(self) -> set[str]:
        """Without reductions the columns are the innermost static axes of the largest output, enough to fill a warp."""
        best: list[str] = []
        for store in self.stores:
            mine: list[str] = []
            for i in reversed(store.access.index):
                axes = [a for a, _ in i.terms]
                if any(not isinstance(self.extents[a], int) for a in axes) or static_size(total(mine, self.extents)) >= 64:
                    break
                mine += axes
            if static_size(total(mine, self.extents)) > static_size(total(best, self.extents)):
                best = mine
        found = set(best)
        for store in self.stores:  # pieces of one size share an axis; others are columns of their own
            found |= {a for a in store.access.axes if isinstance(self.extents[a], int) and a not in self._common(store)}
        return found

    def _common(self, store: Store) -> set[str]:
        shared = set(store.access.axes)
        for other in self.stores:
            shared &= other.access.axes
        return shared

    def _find_spaces(self, cols: set[str]) -> tuple[tuple[str, ...], ...]:
        group: dict[str, str] = {a: a for a in cols}

        def find(a: str) -> str:
            while group[a] != a:
                a = group[a]
            return a

        roots = [s.value for s in self.stores]
        together = [e.axes for e in walk(roots)] + [e.axes | set(e.attr[1]) for e in self.reduces]
        together += [s.access.axes for s in self.stores]
        for axes in together:
            mine = sorted(axes & cols)
            for a in mine[1:]:
                group[find(a)] = find(mine[0])
        spaces: dict[str, list[str]] = {}
        for a in sorted(cols, key=self._depth):
            spaces.setdefault(find(a), []).append(a)
        return tuple(tuple(s) for s in spaces.values())

    def _depth(self, axis: str) -> tuple[int, int, str]:
        """Outer axes first: by the position in the value with the most axes that has it."""
        best = (0, 0)
        for dims in self.names:
            flat = [a for d in dims for a in d]
            if axis in flat and len(flat) > best[0]:
                best = (len(flat), flat.index(axis))
        return (best[1], len(axis), axis)


def _order(coef: tuple[int, tuple[str, ...]]) -> tuple[int, int]:
    return -len(coef[1]), -coef[0]
