"""A segment as expressions: what each output is at each point, which axes are rows, which are columns.

Views disappear here: a value is asked for at an index, and a view passes on another index. A reduction is asked for at
the index of its own axes only; anywhere else the segment is infeasible and the fusion boundary falls there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import ops
from ..chain import INPUT, Arg, Chain, Dim, Dtype, Ref, Size, Value, dim_factors
from ..decompose import expand
from ..errors import Infeasible, UnsupportedOp
from .axes import Analysis, static_size
from .expr import FLOATS, Access, Builder, Expr, Idx, axis_index, compute_dtype
from .reductions import Reducer
from .roles import Roles, Store
from .uniform import uniform

OVER_ROWS = frozenset({"sum", "mean", "amax", "amin", "any", "all", "prod", "norm", "linalg_vector_norm"})
"""What a reduction over leading axes may be."""

MAX_PIECES = 8  # a concatenation is written in up to this many pieces of one size, else with a mask a part


def reduced_dims(v: Value, rank: int) -> tuple[int, ...]:
    """The dimensions of its argument, of `rank`, that an operation reduces over (normalises over, for softmax), in order;
    () for any other operation."""
    name, entry = v.name, ops.OPS.get(v.name)
    if entry is None or entry.kind != "reduction":
        return ()
    position = 2 if name in ("linalg_vector_norm", "norm") else 1
    dims = v.args[position] if len(v.args) > position else None
    if dims is None or dims == ():
        return tuple(range(rank))
    return tuple(sorted(d % rank for d in ((dims,) if isinstance(dims, int) else dims))) if rank else ()


class Lowered:
    """One segment, lowered.

    stores     what is written
    rows, reduced, cols, spaces, reduces, folds, whole: as in roles.Roles
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.b = Builder()
        self.values, outputs = expand(chain)
        self.ndim: dict[int, int] = {i: len(v.shape) for i, v in enumerate(self.values)}
        analysis = Analysis(self.values, self._reduced)
        self.extents, self.names = analysis.extents, analysis.names
        self.reducer = Reducer(self.b, self.extents)
        self._memo: dict[tuple[int, tuple[Idx, ...], Expr | None], Expr] = {}
        self._breaks: dict[str, set[int]] = {}
        self._halves: dict[int, str] = {}
        self._wide: set[int] = set()
        self._stays_wide: dict[int, bool] = {}
        self.stores: list[Store] = []
        self.output_values = outputs
        for k, out in enumerate(outputs):
            self._store(k, out)
        found = Roles(self.stores, self.extents, self.names)
        self.reduces, self.folds, self.whole = found.reduces, found.folds, found.whole
        self.rows, self.reduced, self.cols, self.spaces = found.rows, found.reduced, found.cols, found.spaces

    # ---- indices

    def _reduced(self, v: Value) -> tuple[int, ...]:
        if not v.refs:
            return ()
        shape = self.values[v.refs[0]].shape
        out = reduced_dims(v, len(shape))
        if any(not isinstance(shape[d], int) for d in out) and v.name not in OVER_ROWS:
            raise UnsupportedOp(
                f"{v.op} reduces a leading axis, and over rows there are only {', '.join(sorted(OVER_ROWS))}: give it dim=-1, "
                "or compute it outside the function"
            )
        return out

    def extent(self, axis: str) -> int:
        """The extent of a static axis."""
        n = self.extents[axis]
        assert isinstance(n, int)
        return n

    @property
    def extremes_of_rows(self) -> bool:
        """Whether there is a largest or smallest over rows, which no rows have not."""
        extremes = [v for v in self.values if v.name in ("amax", "amin")]
        return any(not isinstance(self.values[v.refs[0]].shape[d], int) for v in extremes for d in self._reduced(v))

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
            self._note(v, found)
        return found

    def _note(self, v: int, e: Expr) -> None:
        """Whether eager has the value of an expression in 16 bits, and nothing reads it in more."""
        value = self.values[v]
        if v not in self._stays_wide:
            uses = [u for u in self.values if v in u.refs]
            down = all(u.name == "to" and u.dtype in ops.HALVES for u in uses) and v not in self.output_values
            up = value.name == "to" and self.values[value.refs[0]].dtype in ops.HALVES
            self._stays_wide[v] = value.op == INPUT or not (value.dtype in ops.HALVES or down or up or ops.is_free(value.name))
        if self._stays_wide[v]:
            self._wide.add(e.number)
        elif value.dtype in ops.HALVES:
            self._halves.setdefault(e.number, value.dtype)

    @property
    def halves(self) -> dict[int, str]:
        """Expressions, by number, that eager rounds to 16 bits wherever they are read, and to which dtype."""
        return {n: dtype for n, dtype in self._halves.items() if n not in self._wide}

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
            return self._wrapped(self.b("add", self.b("mul", point, self.b.const(step, to)), self.b.const(start, to)), v.dtype)
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
            return self.reducer.softmax(b.cast(x(index), work), b.cast(natural, work), axes, name == "log_softmax")
        return self._wrapped(self.reducer.reduce(v, natural, axes, out, self._with_variance(v)), v.dtype)

    def _plain(self, i: Idx, reduced: Sequence[str]) -> bool:
        """An index that a reduction may be read at: of axes that are not reduced, each as itself, or a constant."""
        return i.value is None and not (i.axes & set(reduced)) and len(i.terms) <= 1 and all(c == (1, ()) for _, c in i.terms)

    def _with_variance(self, v: Value) -> bool:
        """Whether a mean is a norm's: a variance of the same values is taken, and it is subtracted from them."""
        if v.name != "mean":
            return False
        mine = next(k for k, w in enumerate(self.values) if w is v)
        norm = any(w.name in ("var", "std") and w.refs[:1] == v.refs[:1] for w in self.values)
        return norm and any(w.name == "sub" and w.refs == (v.refs[0], mine) for w in self.values)


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
