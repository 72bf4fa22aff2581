"""Tiles that stay in registers in fewer bits than they are computed in, from one pass over a row to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .choices import levels
from .expr import Expr, children, walk
from .triton_text import TritonPrinter


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
