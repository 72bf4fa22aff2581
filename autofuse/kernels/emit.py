"""What the dialects share: printing an expression once, in scopes that end where a loop's body ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import Infeasible
from .expr import Expr
from .layout import Addressing
from .lower import Lowered


class Printer(ABC):
    """Prints statements; `name(e)` gives the variable that holds an expression, printing it if no open scope has it."""

    indent = "    "

    def __init__(self, low: Lowered, addressing: Addressing) -> None:
        self.low, self.addressing = low, addressing
        self.lines: list[str] = []
        self.depth = 1
        self.scopes: list[dict[int, str]] = [{}]
        self.counter = 0
        self.space_of = {a: s for s in low.spaces for a in s}

    # ---- text and scopes

    def line(self, text: str) -> None:
        self.lines.append(self.indent * self.depth + text)

    def fresh(self, prefix: str = "v") -> str:
        self.counter += 1
        return f"{prefix}{self.counter}"

    @contextmanager
    def scope(self, indent: bool = True) -> Iterator[None]:
        """Names made inside are unknown after it."""
        self.scopes.append({})
        self.depth += indent
        yield
        self.depth -= indent
        self.scopes.pop()

    def known(self, e: Expr) -> str | None:
        for scope in reversed(self.scopes):
            if e.number in scope:
                return scope[e.number]
        return None

    def define(self, e: Expr, name: str) -> None:
        self.scopes[-1][e.number] = name

    def name(self, e: Expr) -> str:
        """The variable (or literal) that holds `e`."""
        found = self.known(e)
        if found is None:
            found = self.emit(e)
            self.define(e, found)
        return found

    @abstractmethod
    def emit(self, e: Expr) -> str:
        """Print `e`, whose arguments are asked for by name; the variable's name or a literal."""

    # ---- columns

    def space(self, e: Expr) -> tuple[str, ...] | None:
        """The columns that an expression varies with, as their space; None for a row value."""
        found = {self.space_of[a] for a in e.axes if a in self.space_of}
        if len(found) > 1:
            raise Infeasible("a value over two unrelated column axes")
        return next(iter(found), None)
