"""A segment as expressions: what each output is at each point, which axes are rows, which are columns.

Views disappear here: a value is asked for at an index, and a view passes on another index. A reduction is asked for at
the index of its own axes only; anywhere else the segment is infeasible and the fusion boundary falls there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .. import ops
from ..chain import INPUT, Arg, Chain, Dim, Dtype, Ref, Size, Value, dim_factors
from ..decompose import expand
from ..errors import Infeasible, UnsupportedOp
from .axes import Analysis, static_size, total
from .expr import FLOATS, Access, Builder, Expr, Idx, axis_index, children, compute_dtype, walk
from .uniform import uniform

OVER_ROWS = frozenset({"sum", "mean", "amax", "amin", "any", "all", "prod"})  # what a reduction over leading axes may be
MAX_PIECES = 8  # a concatenation is written in up to this many pieces of one size, else with a mask a part


@dataclass(frozen=True)
class Store:
    """One write: output `access.operand` at `access.index` gets `value`."""

    access: Access
    value: Expr


def reduced_dims(v: Value) -> tuple[int, ...]:
    """The dimensions that an operation reduces over (normalises over, for softmax); () for any other."""
    name, entry = v.name, ops.OPS.get(v.name)
    if entry is None or entry.kind != "reduction":
        return ()
    args = list(v.args)
    position = 2 if name in ("linalg_vector_norm", "norm") else 1
    dims = args[position] if len(args) > position else None
    return (-1,) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)


class Lowered:
    """One segment, lowered.

    rows       axes that programs or threads share out: those that every store has, then the `reduced` ones
    reduced    row axes that a reduction joins (sums over rows); stores have all of them or, as its result, none
    cols       static axes that are reduced, or along which a row statistic is used
    spaces     the columns that meet in one value, outermost first; values of two spaces meet only in row values
    stores     what is written; `reduces` every reduction, arguments first
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.b = Builder()
        self.values, outputs = expand(chain)
        self.ndim: dict[int, int] = {i: len(v.shape) for i, v in enumerate(self.values)}
        analysis = Analysis(self.values, self._reduced)
        self.extents, self.names = analysis.extents, analysis.names
        self._memo: dict[tuple[int, tuple[Idx, ...], Expr | None], Expr] = {}
        self._breaks: dict[str, set[int]] = {}
        self.stores: list[Store] = []
        self.output_values = outputs
        for k, out in enumerate(outputs):
            self._store(k, out)
        self.reduces = [e for e in walk([s.value for s in self.stores]) if e.op == "reduce"]
        self._classify()

    # ---- indices

    def _reduced(self, v: Value) -> tuple[int, ...]:
        dims = reduced_dims(v)
        if not dims:
            return ()
        shape = self.values[v.refs[0]].shape
        if dims == (-1,) and not shape:
            return ()
        out = tuple(sorted(d % len(shape) for d in dims)) if shape else ()
        given = v.args[1] if len(v.args) > 1 else None
        if (given is None or given == ()) and v.name not in ("linalg_vector_norm", "norm"):
            out = tuple(range(len(shape)))
        if any(not isinstance(shape[d], int) for d in out) and v.name not in OVER_ROWS:
            raise UnsupportedOp(
                f"{v.op} reduces a leading axis, and over rows there are only {', '.join(sorted(OVER_ROWS))}: give it dim=-1, "
                "or compute it outside the function"
            )
        return out

    def natural(self, v: int) -> tuple[Idx, ...]:
        """The index of a value by its own axes, one a dimension."""
        return tuple(axis_index(axes, self.extents) for axes in self.names[v])

    def _store(self, k: int, out: int) -> None:
        index = self.natural(out)
        self._breaks.clear()
        value = self.at(out, index)
        pieces = self._pieces()
        if pieces is None:
            self._add_store(k, out, index, value)
            return
        axis, size = pieces
        extent = self.extents[axis]
        assert isinstance(extent, int)
        part = f"{axis}p{size}"
        self.extents[part] = size
        for start in range(0, extent, size):
            moved = tuple(self._substitute(i, axis, part, start) for i in index)
            self._add_store(k, out, moved, self.at(out, moved))

    def _add_store(self, k: int, out: int, index: tuple[Idx, ...], value: Expr) -> None:
        self.stores.append(Store(Access(k, index), value))

    def _substitute(self, i: Idx, axis: str, part: str, start: int) -> Idx:
        terms = dict(i.terms)
        if axis not in terms:
            return i
        k, names = terms.pop(axis)
        if names:
            raise Infeasible("a concatenated axis is merged with rows")
        made = Idx(tuple(sorted(terms.items())), i.const + k * start)
        return made if self.extents[part] == 1 else made + Idx(((part, (k, ())),))

    def _pieces(self) -> tuple[str, int] | None:
        """An axis to cut into equal pieces, so that a concatenation needs no mask; None where there is none."""
        if len(self._breaks) != 1:
            return None
        ((axis, cuts),) = self._breaks.items()
        extent = self.extents[axis]
        if not isinstance(extent, int):
            return None
        size = math.gcd(extent, *cuts)
        return (axis, size) if extent // size <= MAX_PIECES else None

    # ---- values at indices

    def at(self, v: int, index: tuple[Idx, ...], mask: Expr | None = None) -> Expr:
        """The value of number `v` at an index, in its compute dtype; loads under it are masked by `mask`."""
        key = (v, index, mask)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._at(self.values[v], v, index, mask)
        return found

    def _at(self, v: Value, number: int, index: tuple[Idx, ...], mask: Expr | None) -> Expr:
        if v.op == INPUT:
            return self.b.load(Access(number, index), v.dtype, mask)
        entry = ops.OPS[v.name]
        if entry.kind == "view":
            return self._view(v, index, mask)
        if entry.kind == "factory":
            return self._factory(v, index)
        if entry.kind == "reduction":
            return self._reduction(v, number, index, mask)
        return self._wrapped(self._pointwise(v, entry, index, mask), v.dtype)

    def _wrapped(self, e: Expr, dtype: str) -> Expr:
        """Small integers wrap around, as their storage does."""
        e = self.b.cast(e, compute_dtype(dtype))
        return self.b.round(e, dtype) if dtype in ("int8", "uint8", "int16") else e

    def _aligned(self, r: int, index: tuple[Idx, ...]) -> tuple[Idx, ...]:
        shape = self.values[r].shape
        own = index[len(index) - len(shape) :]
        return tuple(Idx() if n == 1 else i for i, n in zip(own, shape, strict=True))

    def _read(self, r: int, index: tuple[Idx, ...], mask: Expr | None, rounds: bool) -> Expr:
        e = self.at(r, self._aligned(r, index), mask)
        v = self.values[r]
        if rounds and v.op != INPUT and v.dtype not in FLOATS and v.dtype not in ("int32", "int64", "bool"):
            e = self.b.round(e, v.dtype)
        return e

    def _pointwise(self, v: Value, entry: ops.Op, index: tuple[Idx, ...], mask: Expr | None) -> Expr:
        b = self.b
        target = compute_dtype(v.dtype)
        if v.name == "to":
            return self._cast(v, index, mask)
        if v.name == "uniform":
            return self._uniform(v, index)
        if entry.args == "common":
            refs = [(self.values[r].dtype, len(self.values[r].shape)) for r in v.refs]
            scalars = [a for a in v.args if isinstance(a, (bool, int, float))]
            common = ops.common_dtype(refs, scalars)
            target = compute_dtype(common)
        rounding = common if entry.args == "common" else v.dtype

        def operand(a: Arg, first: bool) -> Arg:
            if isinstance(a, Ref):
                e = self._read(a.index, index, mask, entry.rounds)
                if entry.args == "own":
                    return e
                held = self.values[a.index].dtype
                e = b.cast(e, "bool" if first and entry.args == "cond" else target)
                return b.round(e, rounding) if entry.rounds and entry.args == "common" and held != rounding else e
            if isinstance(a, Size):
                if not isinstance(a.dim, int):
                    raise UnsupportedOp(f"{v.op} computes with a row count: pass it as a 0-d tensor")
                a = a.dim
            if isinstance(a, (bool, int, float)):
                if entry.args == "own":
                    return b.const(a, "float32" if isinstance(a, float) else "int64")
                if entry.rounds and entry.args == "common" and isinstance(a, float):
                    a = torch.tensor(a, dtype=ops.TORCH[rounding]).item()
                if v.dtype in ("int8", "uint8", "int16") and isinstance(a, int):  # the number takes the tensor's dtype first
                    a = int(torch.tensor(a).to(ops.TORCH[v.dtype]))
                return b.const(a, target)
            if isinstance(a, tuple):
                raise UnsupportedOp(f"{v.op} takes a list: no kernel kind lowers that")
            return a

        args = [operand(a, k == 0) for k, a in enumerate(v.args)]
        if v.name == "masked_fill":
            args = [b.cast(self._read(v.args[1].index, index, mask, False), "bool"),
                    b.cast(self._read(v.args[0].index, index, mask, False), target), args[2]]  # fmt: skip
        kwargs = {k: operand(a, False) for k, a in v.kwargs if not isinstance(a, Dtype)}
        if v.name == "round" and (len(v.args) > 1 or kwargs.get("decimals")):
            raise UnsupportedOp("round to decimals is not lowered: scale, round and scale back")
        if v.name == "nan_to_num" and "float" in v.dtype:  # eager's limits are those of the tensor's own dtype
            top = float(torch.finfo(ops.TORCH[v.dtype]).max)
            for k, (name, limit) in enumerate((("posinf", top), ("neginf", -top))):
                if (len(args) <= 2 + k or args[2 + k] is None) and kwargs.get(name) is None:
                    kwargs[name] = b.const(limit, target)
            args = [a for k, a in enumerate(args) if k < 2 or a is not None]
        assert entry.lower is not None
        try:
            e = entry.lower(b, *args, **kwargs)
        except TypeError as error:
            raise UnsupportedOp(f"{v.op} is not lowered with these arguments: {error}") from error
        return e

    def _cast(self, v: Value, index: tuple[Idx, ...], mask: Expr | None) -> Expr:
        source = v.args[0].index
        to = compute_dtype(v.dtype)
        discontinuous = to not in FLOATS
        e = self._read(source, index, mask, discontinuous)
        if e.dtype == "float64" and v.dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
            return self.b.round(self.b.cast(e, "float32"), v.dtype)
        e = self.b.cast(e, to)
        return self.b.round(e, v.dtype) if v.dtype not in FLOATS and v.dtype not in ("int8", "uint8", "int16") else e

    def _uniform(self, v: Value, index: tuple[Idx, ...]) -> Expr:
        """A random number by the element's own number; what it is like is not read."""
        linear = Idx()
        for point, n in zip(index, v.shape, strict=True):
            linear = linear.scale(n) + (Idx() if n == 1 else point)
        seed, offset = (self.at(r.index, ()) for r in v.args[1:])
        bounds = linear.bounds(self.extents)
        return uniform(self.b, self.b.index(linear), seed, offset, bounds is not None and bounds[1] < 2**32)

    def _factory(self, v: Value, index: tuple[Idx, ...]) -> Expr:
        to = compute_dtype(v.dtype)
        numbers = [a for a in v.args if isinstance(a, (bool, int, float)) and not isinstance(a, Ref)]
        name = v.name
        if name == "arange":
            given: list[Any] = [a.dim if isinstance(a, Size) else a for a in v.args]
            start = given[0] if len(given) > 1 else 0
            step = given[2] if len(given) > 2 else dict(v.kwargs).get("step", 1)
            if isinstance(start, str) or not isinstance(step, (int, float)):
                raise UnsupportedOp(f"{v.op} starts or steps by a row count: pass it as a 0-d tensor, added to arange(rows)")
            point = self.b.cast(self.b.index(index[0]), to)
            return self.b("add", self.b("mul", point, self.b.const(step, to)), self.b.const(start, to))
        if "zeros" in name:
            return self.b.const(0, to)
        if "ones" in name:
            return self.b.const(1, to)
        if not numbers:
            raise UnsupportedOp(f"{v.op} fills with a value that is no number: multiply by a tensor of ones")
        return self.b.round(self.b.const(numbers[-1], to), v.dtype)

    # ---- views

    def _view(self, v: Value, index: tuple[Idx, ...], mask: Expr | None) -> Expr:
        name = v.name
        source = v.refs[0]
        shape = self.values[source].shape
        if name == "cat":
            return self._cat(v, index, mask)
        if name == "gather":
            return self._gather(v, index, mask)
        if name == "contiguous":
            return self.at(source, index, mask)
        if name == "permute":
            moved = [Idx()] * len(shape)
            for at, d in enumerate(v.args[1]):
                moved[d] = index[at]
            return self.at(source, tuple(moved), mask)
        if name == "expand":
            return self.at(source, self._aligned(source, index), mask)
        if name == "slice":
            dim, start, step = v.args[1], static_size(v.args[2]), v.args[4]
            own = list(index)
            own[dim] = own[dim].scale(step) + Idx((), start)
            return self.at(source, tuple(own), mask)
        if name == "select":
            own = list(index)
            own.insert(v.args[1], Idx((), v.args[2]))
            return self.at(source, tuple(own), mask)
        assert name == "reshape", v.op
        return self.at(source, self._reshape(index, v.shape, shape), mask)

    def _reshape(self, index: tuple[Idx, ...], shape: Sequence[Dim], to: Sequence[Dim]) -> tuple[Idx, ...]:
        """The index in the source's shape: the shortest runs of dimensions with equal products, merged and split."""
        have, want = _prefixes(shape), _prefixes(to)
        out: list[Idx] = []
        i0 = j0 = 0
        for i in range(1, len(have)):
            j = next((j for j in range(j0, len(want)) if want[j] == have[i]), None)
            if j is None:
                continue
            linear = Idx()
            for point, n in zip(index[i0:i], shape[i0:i], strict=True):
                linear = linear.scale(n) + (Idx() if n == 1 else point)
            group: list[Idx] = []
            for n in reversed(to[j0 + 1 : j]):
                linear, low = linear.divmod(n, self.extents) if n != 1 else (linear, Idx())
                group.insert(0, low)
            if j > j0:
                group.insert(0, Idx() if to[j0] == 1 else linear)
            out += group
            i0, j0 = i, j
        return (*out, *(Idx() for _ in to[j0:]))

    def _cat(self, v: Value, index: tuple[Idx, ...], mask: Expr | None) -> Expr:
        dim = v.args[1]
        at = index[dim]
        bounds = at.bounds(self.extents)
        parts: list[tuple[int, int, int]] = []
        start = 0
        for r in v.args[0]:
            n = static_size(self.values[r.index].shape[dim])
            if bounds is None or (n and bounds[0] < start + n and bounds[1] >= start):
                parts.append((r.index, start, start + n))
            start += n
        if bounds is None:
            raise Infeasible("a concatenation is read at a gathered index")
        result: Expr | None = None
        for r, low, high in reversed(parts):
            own = tuple((i + Idx((), -low) if high > low + 1 else Idx()) if d == dim else i for d, i in enumerate(index))
            alone = len(parts) == 1
            inside = mask
            if not alone:
                here = self.b.index(at)
                condition = self.b("lt", here, self.b.const(high, "int64"))
                above = self.b("ge", here, self.b.const(low, "int64"))
                if high > bounds[1]:
                    condition = above
                elif low > bounds[0]:
                    condition = self.b("and", above, condition)
                inside = condition if mask is None else self.b("and", mask, condition)
                self._note_break(at, low, high)
            e = self.b.cast(self.at(r, own, inside), compute_dtype(v.dtype))
            if result is None:
                result = e
            else:
                result = self.b("where", self.b("lt", self.b.index(at), self.b.const(high, "int64")), e, result)
        if result is None:
            return self.b.const(0, compute_dtype(v.dtype))
        return result

    def _note_break(self, at: Idx, low: int, high: int) -> None:
        """Where the axis that varies fastest here would have to be cut so that no piece crosses a part's edge."""
        plain = [(a, c) for a, c in at.terms]
        if len(plain) != 1 or plain[0][1] != (1, ()):
            self._breaks.setdefault("", set())  # not one axis: no cutting
            self._breaks[""].add(0)
            return
        axis = plain[0][0]
        extent = static_size(self.extents[axis])
        cuts = {c - at.const for c in (low, high)}
        self._breaks.setdefault(axis, set()).update(c for c in cuts if 0 < c < extent)

    def _gather(self, v: Value, index: tuple[Idx, ...], mask: Expr | None) -> Expr:
        dim = v.args[1]
        source, wanted = v.args[0].index, v.args[2].index
        n = self.values[source].shape[dim]
        if not isinstance(n, int):
            raise UnsupportedOp("gather along a leading axis is not lowered: only along the last, static one")
        at = self.b.cast(self.at(wanted, index, mask), "int64")
        # eager raises for an index outside; a kernel cannot, and must not read outside: it reads the nearest
        at = self.b("min", self.b("max", at, self.b.const(0, "int64")), self.b.const(n - 1, "int64"))
        own = tuple(Idx((), 0, at) if d == dim else i for d, i in enumerate(index))
        return self.at(source, own, mask)

    # ---- reductions

    def _reduction(self, v: Value, number: int, index: tuple[Idx, ...], mask: Expr | None) -> Expr:
        b, name = self.b, v.name.lstrip("_")
        source = v.refs[0]
        drop = self._reduced(v)
        s = self.values[source]
        full = [Idx()] * len(s.shape)
        axes: list[str] = []
        for d in range(len(s.shape)):
            if d in drop:
                axes += self.names[source][d]
                full[d] = axis_index(self.names[source][d], self.extents)
        keeps = name in ("softmax", "log_softmax")
        rest = [i for d, i in enumerate(index) if d not in drop] if len(index) == len(s.shape) else list(index)
        at = 0
        for d in range(len(s.shape)):
            if d not in drop:
                full[d] = rest[at] if s.shape[d] != 1 else Idx()
                own = axis_index(self.names[source][d], self.extents)
                if full[d] != own and not self._plain(full[d], axes):
                    raise Infeasible(f"{v.op} is read at another index than its own")
                at += 1
        over = frozenset(axes)
        size = total(axes, self.extents)
        n = 0 if size == 0 else static_size(total([a for a in axes if isinstance(self.extents[a], int)], self.extents))
        out = compute_dtype(v.dtype)
        work = out if out in FLOATS else compute_dtype(s.dtype)
        rounds = name in ("argmax", "argmin", "any", "all") or (v.dtype not in ops.ITEMSIZE)

        def x(point: tuple[Idx, ...]) -> Expr:
            e = self.at(source, point, mask)
            if rounds and s.op != INPUT and s.dtype not in FLOATS and s.dtype not in ("int32", "int64", "bool"):
                e = b.round(e, s.dtype)
            return e

        natural = x(tuple(full))
        if keeps:
            here = b.cast(x(index), work)
            e = b.cast(natural, work)
            m = self._over("max", e, over) if n else e
            shifted = b("sub", here, m)
            total_ = self._over("sum", b("exp", b("sub", e, m)), over)
            if name == "softmax":
                return b("mul", b("exp", shifted), b("div", b.const(1, work), total_))
            return b("sub", shifted, b("log", total_))
        e = natural
        made = self._reduce(v, name, e, over, n, out)
        return self._wrapped(made, v.dtype)

    def _plain(self, i: Idx, reduced: Sequence[str]) -> bool:
        """An index that a reduction may be read at: of axes that are not reduced, each as itself, or a constant."""
        return i.value is None and not (i.axes & set(reduced)) and len(i.terms) <= 1 and all(c == (1, ()) for _, c in i.terms)

    def _over(self, kind: str, e: Expr, over: frozenset[str]) -> Expr:
        """A reduction; along axes that the argument does not vary with, a sum multiplies and an extreme is itself.

        Columns are reduced before rows, so that a kernel reduces each in its own way.
        """
        b = self.b
        rows = frozenset(a for a in over if not isinstance(self.extents[a], int))
        if rows and rows != over:
            return self._over(kind, self._over(kind, e, over - rows), rows)
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

    def _reduce(self, v: Value, name: str, e: Expr, over: frozenset[str], n: int, out: str) -> Expr:
        b = self.b
        if name in ("sum", "mean", "prod"):
            e = b.cast(e, out)
            if name == "prod":
                return self._over("prod", e, over)
            if name == "mean" and self._with_variance(v) and out in FLOATS:
                return self._mean(e, over, n)
            made = self._over("sum", e, over)
            symbols = dim_factors(total(sorted(over), self.extents))[1]
            if name == "mean" and symbols:
                return b("div", made, b("mul", b.cast(b.count(symbols), out), b.const(n, out)))
            return made if name == "sum" else b("mul", made, b.const(_ratio(1, n), out))
        if name in ("any", "all"):
            bits = b.cast(b.cast(e, "bool"), "int32")
            made = self._over("max" if name == "any" else "min", bits, over)
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
            return self._arg(v, e, over, name[3:])
        if name in ("var", "std"):
            e = b.cast(e, out)
            given = dict(v.kwargs)
            correction = given.get("correction", v.args[2] if len(v.args) > 2 else 1)
            correction = 1 if correction is None else correction
            d = b("sub", e, self._mean(e, over, n))
            squares = self._over("sum", b("mul", d, d), over)
            made = b("mul", squares, b.const(_ratio(1, max(0, n - correction)), out))
            return b("sqrt", made) if name == "std" else made
        if name == "logsumexp":
            e = b.cast(e, out)
            m = self._over("max", e, over)
            inf = b.const(math.inf, out)
            m = b("where", b("eq", b("abs", m), inf), b.const(0, out), m)  # as PyTorch: all -inf gives -inf
            return b("add", b("log", self._over("sum", b("exp", b("sub", e, m)), over)), m)
        if name in ("linalg_vector_norm", "norm"):
            p = v.args[1] if len(v.args) > 1 and v.args[1] is not None else 2
            e = b("abs", b.cast(e, out))
            if p == 2:
                return b("sqrt", self._over("sum", b("mul", e, e), over))
            if p == 1:
                return self._over("sum", e, over)
            if p in (math.inf, -math.inf):
                return self._extreme(e, over, "max" if p > 0 else "min")
            if p == 0:
                return self._over("sum", b.cast(b("ne", e, b.const(0, out)), out), over)
            return b("pow", self._over("sum", b("pow", e, b.const(p, out)), over), b.const(1 / p, out))
        raise UnsupportedOp(f"{v.op} is not lowered by any kernel kind yet")

    def _mean(self, e: Expr, over: frozenset[str], n: int) -> Expr:
        """The mean; in exact mode with what is left of its rounding error added, as a row with a large offset needs."""
        b = self.b
        share = b.const(_ratio(1, n), e.dtype)
        mean = b("mul", self._over("sum", e, over), share)
        rest = b("mul", self._over("sum", b("sub", e, mean), over), share)
        return b.make("by_mode", (b("add", mean, rest), mean), None, e.dtype)

    def _with_variance(self, v: Value) -> bool:
        """Whether a mean is a norm's: a variance of the same values is taken, and it is subtracted from them."""
        mine = next(k for k, w in enumerate(self.values) if w is v)
        norm = any(w.name in ("var", "std") and w.refs[:1] == v.refs[:1] for w in self.values)
        return norm and any(w.name == "sub" and w.refs == (v.refs[0], mine) for w in self.values)

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
            return b.cast(self._over(which, b.cast(e, "int32"), over), "bool")
        if e.dtype not in FLOATS:
            return self._over(which, e, over)
        return self._unkey(self._over(which, self._key(e, which), over), e, which)

    def _arg(self, v: Value, e: Expr, over: frozenset[str], which: str) -> Expr:
        """The first index of the extreme; NaN counts as the extreme, as in eager."""
        b = self.b
        source = v.refs[0]
        drop = self._reduced(v)
        place = axis_index([a for d in drop for a in self.names[source][d]], self.extents)
        if e.dtype in FLOATS:
            e = b("add", e, b.const(0.0, e.dtype))  # -0.0 becomes 0.0: the two are equal, and the first one is chosen
        key = self._key(e, which) if e.dtype in FLOATS else b.cast(e, "int32") if e.dtype == "bool" else e
        best = self._over(which, key, over)
        n = static_size(total([a for d in drop for a in self.names[source][d]], self.extents))
        at = b.cast(b.index(place), "int32")
        return b.cast(self._over("min", b("where", b("eq", key, best), at, b.const(n, "int32")), over), "int64")

    # ---- rows and columns

    def _classify(self) -> None:
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


def _ratio(a: float, n: float) -> float:
    return a / n if n else math.nan if a == 0 else math.inf


def _prefixes(shape: Sequence[Dim]) -> list[tuple[int, tuple[str, ...]]]:
    """The products of the first 0, 1, ... dimensions."""
    made: list[tuple[int, tuple[str, ...]]] = [(1, ())]
    for dim in shape:
        n, symbols = dim_factors(dim)
        made.append((made[-1][0] * n, tuple(sorted(made[-1][1] + symbols))))
    return made


@lru_cache(maxsize=4096)
def lower(chain: Chain) -> Lowered:
    """The lowering of a segment. Raises Infeasible where it is not one kernel, UnsupportedOp where nothing lowers it."""
    return Lowered(chain)
