"""Reductions as expressions: which elementwise work comes before and after the plain sums and extremes of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..chain import Dim, Value, dim_factors
from ..errors import UnsupportedOp
from .axes import static_size, total
from .expr import FLOATS, Builder, Expr, axis_index


class Reducer:
    """Makes the reductions of one segment."""

    def __init__(self, b: Builder, extents: dict[str, Dim]) -> None:
        self.b, self.extents = b, extents

    def count(self, axes: Sequence[str]) -> int:
        """Elements along the static ones of these axes; 0 where there is none at all."""
        if total(axes, self.extents) == 0:
            return 0
        return static_size(total([a for a in axes if isinstance(self.extents[a], int)], self.extents))

    def softmax(self, here: Expr, e: Expr, axes: Sequence[str], log: bool) -> Expr:
        """softmax (or its log) over `axes` at `here`; `e` is the same value along the axes."""
        b, over = self.b, frozenset(axes)
        m = self.over("max", e, over) if self.count(axes) else e
        shifted = b("sub", here, m)
        total_ = self.over("sum", b("exp", b("sub", e, m)), over)
        if log:
            return b("sub", shifted, b("log", total_))
        e = b("exp", shifted)
        return b.make("by_mode", (b("div", e, total_), b("mul", e, b("div", b.const(1, here.dtype), total_))), None, here.dtype)

    def over(self, kind: str, e: Expr, over: frozenset[str]) -> Expr:
        """A reduction; along axes that the argument does not vary with, a sum multiplies and an extreme is itself.

        Columns are reduced before rows, so that a kernel reduces each in its own way.
        """
        b = self.b
        rows = frozenset(a for a in over if not isinstance(self.extents[a], int))
        if rows and rows != over:
            return self.over(kind, self.over(kind, e, over - rows), rows)
        if rows:
            if not rows <= e.axes:
                raise UnsupportedOp(f"a {kind} over rows of what does not vary with them is not lowered: multiply by their count")
            return b.reduce(kind, e, rows)
        missing = sorted(over - e.axes)
        n = static_size(total(missing, self.extents))
        if n == 0 or any(self.extents[a] == 0 for a in over):
            empty = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}[kind]
            if e.dtype not in FLOATS:
                empty = {"sum": 0, "prod": 1, "max": 0, "min": 1}[kind]
            return b.const(empty, e.dtype)
        if missing and kind == "sum":
            e = b("mul", e, b.const(n, e.dtype))
        if missing and kind == "prod":
            power, k, base = b.const(1, e.dtype), n, e
            while k:
                power = b("mul", power, base) if k & 1 else power
                base, k = b("mul", base, base), k >> 1
            e = power
        inside = over & e.axes
        return b.reduce(kind, e, inside) if inside else e

    def reduce(self, v: Value, e: Expr, axes: Sequence[str], out: str, norm: bool) -> Expr:
        """The reduction that `v` names, of `e` over `axes` (outermost first), in the compute dtype `out`.

        norm: a mean that is subtracted from what it is the mean of, beside a variance. Raises UnsupportedOp.
        """
        b, name, over, n = self.b, v.name, frozenset(axes), self.count(axes)
        if out == "bool" and name in ("sum", "prod"):  # of bools, as eager: any and all
            name = "any" if name == "sum" else "all"
        if name in ("sum", "mean", "prod"):
            e = b.cast(e, out)
            if name == "prod":
                return self.over("prod", e, over)
            if name == "mean" and norm and out in FLOATS:
                return self._mean(e, over, n)
            made = self.over("sum", e, over)
            symbols = dim_factors(total(sorted(over), self.extents))[1]
            if name == "mean" and symbols:
                return b("div", made, b("mul", b.cast(b.count(symbols), out), b.const(n, out)))
            return made if name == "sum" else b("mul", made, b.const(_ratio(1, n), out))
        if name in ("any", "all"):
            bits = b.cast(b.cast(e, "bool"), "int32")
            made = self.over("max" if name == "any" else "min", bits, over)
            # over no rows a maximum is the least integer and a minimum the largest
            made = b("max", made, b.const(0, "int32")) if name == "any" else b("min", made, b.const(1, "int32"))
            return b("ne", made, b.const(0, "int32"))
        if name in ("amax", "amin"):
            if n == 0:
                raise UnsupportedOp(f"{v.op} over no elements has no value")
            return self._extreme(e, over, name[1:])
        if name in ("argmax", "argmin"):
            if n == 0:
                raise UnsupportedOp(f"{v.op} over no elements has no value")
            return self._arg(e, axes, name[3:])
        if name in ("var", "std"):
            e = b.cast(e, out)
            given = dict(v.kwargs)
            correction = given.get("correction", v.args[2] if len(v.args) > 2 else 1)
            correction = 1 if correction is None else correction
            d = b("sub", e, self._mean(e, over, n))
            squares = self.over("sum", b("mul", d, d), over)
            made = b("mul", squares, b.const(_ratio(1, max(0, n - correction)), out))
            return b("sqrt", made) if name == "std" else made
        if name == "logsumexp":
            e = b.cast(e, out)
            m = self.over("max", e, over)
            inf = b.const(math.inf, out)
            m = b("where", b("eq", b("abs", m), inf), b.const(0, out), m)  # as PyTorch: all -inf gives -inf
            return b("add", b("log", self.over("sum", b("exp", b("sub", e, m)), over)), m)
        if name in ("linalg_vector_norm", "norm"):
            p = v.args[1] if len(v.args) > 1 and v.args[1] is not None else 2
            e = b("abs", b.cast(e, out))
            if p == 2:
                return b("sqrt", self.over("sum", b("mul", e, e), over))
            if p == 1:
                return self.over("sum", e, over)
            if p in (math.inf, -math.inf):
                return self._extreme(e, over, "max" if p > 0 else "min")
            if p == 0:
                return self.over("sum", b.cast(b("ne", e, b.const(0, out)), out), over)
            return b("pow", self.over("sum", b("pow", e, b.const(p, out)), over), b.const(1 / p, out))
        raise UnsupportedOp(f"{v.op} is not lowered by any kernel kind yet")

    def _mean(self, e: Expr, over: frozenset[str], n: int) -> Expr:
        """The mean; in exact mode with what is left of its rounding error added, as a row with a large offset needs."""
        b = self.b
        share = b.const(_ratio(1, n), e.dtype)
        mean = b("mul", self.over("sum", e, over), share)
        rest = b("mul", self.over("sum", b("sub", e, mean), over), share)
        finite = b("eq", b("sub", mean, mean), b.const(0, e.dtype))  # beside an infinity nothing is left
        return b.make("by_mode", (b("where", finite, b("add", mean, rest), mean), mean), None, e.dtype)

    def _key(self, e: Expr, which: str) -> Expr:
        """A signed integer that orders as the float does, with NaN beyond every number: so NaN propagates and the
        reduction is a plain integer one. The bits of a non-negative float are such a key already."""
        b = self.b
        nan = b.const(math.nan, e.dtype)
        if e.op == "abs" and which == "max":
            return b.bits(e)
        bits = b.bits(b("where", b("isnan", e), nan, e))
        width = 31 if bits.dtype == "int32" else 63
        low = b.const((1 << width) - 1, bits.dtype)
        key = b("xor", bits, b("and", b("shr", bits, b.const(width, bits.dtype)), low))
        if which == "min":
            key = b("where", b("isnan", e), b.const(-(1 << width), bits.dtype), key)
        return key

    def _unkey(self, key: Expr, e: Expr, which: str) -> Expr:
        b = self.b
        if e.op == "abs" and which == "max":
            return b.unbits(key)
        width = 31 if key.dtype == "int32" else 63
        bits = b("xor", key, b("and", b("shr", key, b.const(width, key.dtype)), b.const((1 << width) - 1, key.dtype)))
        value = b.unbits(bits)
        if which == "min":
            value = b("where", b("eq", key, b.const(-(1 << width), key.dtype)), b.const(math.nan, e.dtype), value)
        return value

    def _extreme(self, e: Expr, over: frozenset[str], which: str) -> Expr:
        b = self.b
        if e.dtype == "bool":
            return b.cast(self.over(which, b.cast(e, "int32"), over), "bool")
        if e.dtype not in FLOATS:
            return self.over(which, e, over)
        return self._unkey(self.over(which, self._key(e, which), over), e, which)

    def _arg(self, e: Expr, axes: Sequence[str], which: str) -> Expr:
        """The first index of the extreme; NaN counts as the extreme, as in eager."""
        b, over = self.b, frozenset(axes)
        place = axis_index(axes, self.extents)
        if e.dtype in FLOATS:
            e = b("add", e, b.const(0.0, e.dtype))  # -0.0 becomes 0.0: the two are equal, and the first one is chosen
        key = self._key(e, which) if e.dtype in FLOATS else b.cast(e, "int32") if e.dtype == "bool" else e
        best = self.over(which, key, over)
        n = static_size(total(axes, self.extents))
        at = b.cast(b.index(place), "int32")
        return b.cast(self.over("min", b("where", b("eq", key, best), at, b.const(n, "int32")), over), "int64")


def _ratio(a: float, n: float) -> float:
    return a / n if n else math.nan if a == 0 else math.inf
