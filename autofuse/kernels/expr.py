"""Expressions over axes: what a kernel computes for one point of its iteration space.

An expression is interned: two that are equal are one object, so that a dialect emits each once. `axes` are the axes that
its value varies with, `level` how many reductions over the looped axes lie under it (filled in by the kinds).
Compute dtypes are float32, float64, int32, int64 and bool; storage dtypes appear only in loads, stores and `round`.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..chain import Dim, dim_factors
from ..errors import Infeasible

FLOATS = ("float32", "float64")
COMPARES = ("lt", "le", "gt", "ge", "eq", "ne")
LOW = {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}


def compute_dtype(storage: str) -> str:
    """The dtype that values of a storage dtype are computed in."""
    if storage in LOW or storage == "float32":
        return "float32"
    if storage in ("int8", "uint8", "int16", "int32"):
        return "int32"
    return storage


# ---------------------------------------------------------------------------------------------------------- indices

Coef = tuple[int, tuple[str, ...]]


def _mul(a: Coef, b: Coef) -> Coef:
    return a[0] * b[0], tuple(sorted(a[1] + b[1]))


def _coef(dim: Dim) -> Coef:
    return dim_factors(dim)


@dataclass(frozen=True)
class Idx:
    """A linear index: const + sum of coefficient x axis. A coefficient is an integer times row symbols.

    A term may also be an expression (a gather's index), with coefficient 1.
    """

    terms: tuple[tuple[str, Coef], ...] = ()
    const: int = 0
    value: Expr | None = None

    def __add__(self, other: Idx) -> Idx:
        merged = dict(self.terms)
        for axis, c in other.terms:
            if axis in merged:
                if merged[axis][1] != c[1]:
                    raise Infeasible(f"axis {axis} is indexed with two strides at once")
                merged[axis] = (merged[axis][0] + c[0], c[1])
            else:
                merged[axis] = c
        if self.value is not None and other.value is not None:
            raise Infeasible("two gathers in one index")
        terms = tuple(sorted((a, c) for a, c in merged.items() if c[0]))
        return Idx(terms, self.const + other.const, self.value or other.value)

    def scale(self, dim: Dim) -> Idx:
        """The index times an extent."""
        c = _coef(dim)
        if c == (1, ()):
            return self
        if self.value is not None or (self.const and c[1]):
            raise Infeasible("a gathered or shifted index is not merged with other axes")
        return Idx(tuple((a, _mul(k, c)) for a, k in self.terms), self.const * c[0])

    @property
    def axes(self) -> frozenset[str]:
        own = frozenset(a for a, _ in self.terms)
        return own | self.value.axes if self.value is not None else own

    def divmod(self, dim: Dim, extents: dict[str, Dim]) -> tuple[Idx, Idx]:
        """(index // dim, index % dim), exact. Raises Infeasible where they are not linear."""
        n, symbols = _coef(dim)
        if self.value is not None:
            raise Infeasible("a gathered index is not split")
        high, low = [], []
        for axis, (k, names) in self.terms:
            rest = list(names)
            ok = k % n == 0
            for s in symbols:
                if s in rest:
                    rest.remove(s)
                else:
                    ok = False
            if ok:
                high.append((axis, (k // n, tuple(rest))))
            else:
                low.append((axis, (k, names)))
        qc, rc = divmod(self.const, n) if not symbols else (0, self.const)
        remainder = Idx(tuple(low), rc)
        if not remainder._below(dim, extents):
            raise Infeasible(f"an index does not split by {dim}")
        return Idx(tuple(high), qc), remainder

    def _below(self, dim: Dim, extents: dict[str, Dim]) -> bool:
        n, symbols = _coef(dim)
        if all(not names and isinstance(extents[a], int) for a, (_, names) in self.terms):
            top = self.const + sum(k * (int(extents[a]) - 1) for a, (k, _) in self.terms if k > 0)
            bottom = self.const + sum(k * (int(extents[a]) - 1) for a, (k, _) in self.terms if k < 0)
            return bottom >= 0 and (top < n or bool(symbols and top == 0))
        if self.const:
            return False
        # mixed radix: innermost first, each coefficient is the product of the extents inside it
        size: Coef = (1, ())
        left = dict(self.terms)
        while left:
            axis = next((a for a, c in left.items() if c == size), None)
            if axis is None:
                return False
            del left[axis]
            size = _mul(size, _coef(extents[axis]))
        return size == (n, tuple(sorted(symbols)))

    def bounds(self, extents: dict[str, Dim]) -> tuple[int, int] | None:
        """The least and the largest value, where all is static."""
        if self.value is not None:
            return None
        low = high = self.const
        for a, (k, names) in self.terms:
            n = extents[a]
            if names or not isinstance(n, int):
                return None
            span = k * (n - 1)
            low, high = (low, high + span) if span > 0 else (low + span, high)
        return low, high


def axis_index(axes: Sequence[str], extents: dict[str, Dim]) -> Idx:
    """The row-major linear index over these axes, outermost first."""
    total = Idx()
    for axis in axes:
        total = total.scale(extents[axis]) + Idx(((axis, (1, ())),))
    return total


# ------------------------------------------------------------------------------------------------------ expressions


class Expr:
    """One interned expression; make them with a Builder."""

    __slots__ = ("args", "attr", "axes", "dtype", "number", "op")

    def __init__(self, op: str, args: tuple[Expr, ...], attr: Any, dtype: str, axes: frozenset[str], number: int) -> None:
        self.op, self.args, self.attr, self.dtype, self.axes, self.number = op, args, attr, dtype, axes, number

    def __lt__(self, other: Expr) -> bool:
        return self.number < other.number

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.args))
        return f"{self.op}{'' if self.attr is None else f'[{self.attr}]'}({inner})"

    @property
    def is_const(self) -> bool:
        return self.op == "const"


@dataclass(frozen=True)
class Access:
    """What a load reads or a store writes: an operand's number and one index a dimension."""

    operand: int
    index: tuple[Idx, ...]

    @property
    def axes(self) -> frozenset[str]:
        return frozenset().union(*(i.axes for i in self.index)) if self.index else frozenset()


def _exactly(value: float | int | bool, dtype: str) -> float | int | bool:
    """A constant as its compute dtype holds it."""
    if dtype != "float32" or not math.isfinite(value):
        return value
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def walk(roots: Sequence[Expr]) -> Iterator[Expr]:
    """Every expression under the roots once, arguments first."""
    seen: set[int] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            e, done = stack.pop()
            if done:
                yield e
                continue
            if e.number in seen:
                continue
            seen.add(e.number)
            stack.append((e, True))
            stack.extend((c, False) for c in reversed(children(e)))


def children(e: Expr) -> tuple[Expr, ...]:
    """The arguments, and the expressions in a load's index."""
    if e.op == "load":
        return e.args + tuple(i.value for i in e.attr.index if i.value is not None)
    if e.op == "index" and e.attr.value is not None:
        return (*e.args, e.attr.value)
    return e.args


class Builder:
    """Makes interned expressions, with the folding that every dialect wants."""

    def __init__(self) -> None:
        self._table: dict[Any, Expr] = {}

    def make(self, op: str, args: tuple[Expr, ...], attr: Any, dtype: str, axes: frozenset[str] | None = None) -> Expr:
        key = (op, tuple(a.number for a in args), attr, type(attr), dtype)
        found = self._table.get(key)
        if found is None:
            if axes is None:
                axes = frozenset().union(*(a.axes for a in args)) if args else frozenset()
            found = self._table[key] = Expr(op, args, attr, dtype, axes, len(self._table))
        return found

    def const(self, value: float | int | bool, dtype: str) -> Expr:
        value = bool(value) if dtype == "bool" else float(value) if dtype in FLOATS else int(value)
        if isinstance(value, float):
            return self.make("const", (), repr(value), dtype)  # by spelling: nan is itself, -0.0 is not 0.0
        return self.make("const", (), value, dtype)

    @staticmethod
    def number(e: Expr) -> float | int | bool | None:
        """The value of a constant, else None."""
        if e.op != "const":
            return None
        return float(e.attr) if isinstance(e.attr, str) else e.attr

    def load(self, access: Access, storage: str, mask: Expr | None = None) -> Expr:
        axes = access.axes | (mask.axes if mask is not None else frozenset())
        return self.make("load", () if mask is None else (mask,), access, compute_dtype(storage), axes)

    def index(self, idx: Idx) -> Expr:
        """An index as an int64 value."""
        if not idx.terms and idx.value is None:
            return self.const(idx.const, "int64")
        return self.make("index", (), idx, "int64", idx.axes)

    def count(self, symbols: tuple[str, ...]) -> Expr:
        """The product of row counts as an int64 value, known when a kernel is launched."""
        return self.make("count", (), symbols, "int64", frozenset())

    def reduce(self, kind: str, x: Expr, axes: frozenset[str], dtype: str | None = None) -> Expr:
        """sum, max, min (integers, or floats known to carry no NaN that matters), prod over `axes`."""
        return self.make("reduce", (x,), (kind, tuple(sorted(axes))), dtype or x.dtype, x.axes - axes)

    def cast(self, x: Expr, dtype: str) -> Expr:
        """Convert between compute dtypes; a float becomes an int by truncation, anything a bool by != 0."""
        if x.dtype == dtype:
            return x
        value = self.number(x)
        if value is not None and (dtype in FLOATS or not isinstance(value, float) or math.isfinite(value)):
            return self.const(value, dtype)
        if dtype == "bool":
            return self("ne", x, self.const(0, x.dtype))
        return self.make("cast", (x,), None, dtype)

    def round(self, x: Expr, storage: str) -> Expr:
        """The value rounded to a storage dtype, back in its compute dtype: a rounding point."""
        if storage in (*FLOATS, "int32", "int64", "bool") and compute_dtype(storage) == x.dtype:
            return x
        if x.op == "round" and x.attr == storage:
            return x
        if x.dtype == "float64" and storage == "float32":
            return self.cast(self.cast(x, "float32"), "float64")
        return self.make("round", (x,), storage, x.dtype)

    def bits(self, x: Expr) -> Expr:
        """The bit pattern of a float as a signed integer of the same width."""
        return self.make("bits", (x,), None, "int32" if x.dtype == "float32" else "int64")

    def unbits(self, x: Expr) -> Expr:
        return self.make("unbits", (x,), None, "float32" if x.dtype == "int32" else "float64")

    def __call__(self, op: str, *args: Expr) -> Expr:
        """A pointwise operation: arguments of one dtype (but the condition of `where`)."""
        if op == "where":
            c, x, y = args
            known = self.number(c)
            if known is not None:
                return x if known else y
            if x is y:
                return x
            assert x.dtype == y.dtype and c.dtype == "bool", (x.dtype, y.dtype, c.dtype)
            return self.make("where", args, None, x.dtype)
        assert len({a.dtype for a in args}) == 1, (op, [a.dtype for a in args])
        folded = self._fold(op, args)
        if folded is not None:
            return folded
        dtype = "bool" if op in COMPARES or op == "isnan" else args[0].dtype
        if op == "isnan" and args[0].dtype not in FLOATS:
            return self.const(False, "bool")
        return self.make(op, args, None, dtype)

    def _fold(self, op: str, args: tuple[Expr, ...]) -> Expr | None:
        """Only what is exact for every input, NaN and signed zero included."""
        dtype = args[0].dtype
        values = [self.number(a) for a in args]
        if op in ("mul", "div") and values[-1] == 1 and dtype != "bool":
            return args[0] if op == "mul" or dtype in FLOATS else None
        if op == "mul" and values[0] == 1 and dtype != "bool":
            return args[1]
        if op == "add" and dtype not in FLOATS and values[-1] == 0:
            return args[0]
        if op == "sub" and values[-1] == 0 and repr(values[-1]) in ("0.0", "0", "False"):
            return args[0]
        if op == "neg" and args[0].op == "neg":
            return args[0].args[0]
        if op in ("floor", "ceil", "trunc", "round_even") and dtype not in FLOATS:
            return args[0]
        if op == "abs" and args[0].op in ("abs", "neg"):
            return self("abs", args[0].args[0])
        if op == "not" and args[0].op == "not":
            return args[0].args[0]
        if op == "and" and dtype == "bool" and any(v is not None for v in values):
            known = values[0] if values[-1] is None else values[-1]
            return (args[0] if values[-1] is not None else args[1]) if known else self.const(False, "bool")
        if op in COMPARES and all(v is not None for v in values):
            x, y = (_exactly(v, dtype) for v in values if v is not None)
            return self.const(getattr(operator, op)(x, y), "bool")
        if op == "abs" and values[0] is not None:
            return self.const(abs(values[0]), dtype)
        if all(v is not None for v in values) and op in ("add", "sub", "mul", "neg", "not"):
            a = values[0]
            b = values[-1]
            assert a is not None and b is not None
            if op == "not":
                return self.const(not a, "bool") if dtype == "bool" else None
            if dtype == "float32" or dtype == "bool":
                return None  # folding in double would round differently
            folded = {"add": a + b, "sub": a - b, "mul": a * b, "neg": -a}[op]
            return self.const(folded, dtype)
        return None
