"""The axes of a segment: which dimension of which value is the same axis as which other.

Every dimension is a list of axes, outermost first. Pointwise operations unify the dimensions that they align, views
regroup and split them, reductions drop them. What comes out are the segment's axes with their extents, and for each
value its axes a dimension (none where the extent is 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..chain import INPUT, Dim, Size, Value, dim_factors, make_dim
from ..errors import Infeasible


class Axes:
    """Union-find over axes, with splits."""

    def __init__(self) -> None:
        self.extent: list[Dim] = []
        self.parent: list[int] = []
        self.parts: dict[int, tuple[int, int]] = {}

    def fresh(self, dim: Dim) -> list[int]:
        """New axes for a dimension: one for a static extent, one a row symbol; none for an extent of 1."""
        number, symbols = dim_factors(dim)
        made = []
        parts: list[Dim] = [*symbols] if number == 1 else [*symbols, number]
        for extent in parts:
            self.extent.append(extent)
            self.parent.append(len(self.parent))
            made.append(len(self.parent) - 1)
        return made

    def find(self, a: int) -> int:
        while self.parent[a] != a:
            a = self.parent[a]
        return a

    def resolve(self, axes: Sequence[int]) -> list[int]:
        """The same axes as they are now: unified and split."""
        out: list[int] = []
        for a in axes:
            a = self.find(a)
            out.extend(self.resolve(self.parts[a]) if a in self.parts else [a])
        return out

    def split(self, a: int, inner: int) -> tuple[int, int]:
        """Split a static axis into (extent / inner, inner)."""
        n = self.extent[a]
        if not isinstance(n, int) or inner <= 0 or n % inner:
            raise Infeasible(f"an axis of extent {n} does not split by {inner}")
        (high,), (low,) = self.fresh(n // inner), self.fresh(inner)
        self.parts[a] = (high, low)
        return high, low

    def unify(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Make two lists of axes of one total extent the same axes, splitting where one is finer."""
        a, b = self.resolve(left), self.resolve(right)
        while a and b:
            x, y = a.pop(), b.pop()
            if x == y:
                continue
            m, n = self.extent[x], self.extent[y]
            if m == n:
                self.parent[y] = x
            elif isinstance(m, int) and isinstance(n, int) and m > n > 0 and m % n == 0:
                high, low = self.split(x, n)
                self.parent[y] = low
                a.append(high)
            elif isinstance(m, int) and isinstance(n, int) and n > m > 0 and n % m == 0:
                high, low = self.split(y, m)
                self.parent[low] = x
                b.append(high)
            else:
                raise Infeasible(f"axes of extents {m} and {n} do not align")
            a, b = self.resolve(a), self.resolve(b)
        if a or b:
            raise Infeasible("axes do not align")

    def regroup(self, axes: Sequence[int], shape: Sequence[Dim]) -> list[list[int]]:
        """The axes dealt out to the dimensions of a new shape, split where a dimension cuts one."""
        rest = self.resolve(axes)
        dims: list[list[int]] = []
        for dim in reversed(shape):
            number, symbols = dim_factors(dim)
            want, names = number, list(symbols)
            group: list[int] = []
            if number == 0:
                raise Infeasible("a view of no elements")
            while want != 1 or names:
                if not rest:
                    raise Infeasible(f"a view to extent {dim} does not follow the axes")
                a = rest.pop()
                n = self.extent[a]
                if n == 0:
                    raise Infeasible("a view of no elements")
                if isinstance(n, str):
                    if n not in names:
                        raise Infeasible(f"a view to extent {dim} does not follow the axes")
                    names.remove(n)
                    group.insert(0, a)
                elif want % n == 0:
                    want //= n
                    group.insert(0, a)
                elif n % want == 0 and not names:
                    high, low = self.split(a, want)
                    rest.append(high)
                    want = 1
                    group.insert(0, low)
                else:
                    raise Infeasible(f"a view to extent {dim} does not follow the axes")
            dims.insert(0, group)
        if rest:
            raise Infeasible("a view does not follow the axes")
        return dims

    def snapshot(self) -> tuple[list[Dim], list[int], dict[int, tuple[int, int]]]:
        return list(self.extent), list(self.parent), dict(self.parts)

    def restore(self, saved: tuple[list[Dim], list[int], dict[int, tuple[int, int]]]) -> None:
        self.extent, self.parent, self.parts = list(saved[0]), list(saved[1]), dict(saved[2])


Dims = list[list[int]]


class Analysis:
    """The axes of every value of a segment, found in one pass over its values."""

    def __init__(self, values: Sequence[Value], reduced: Callable[[Value], tuple[int, ...]]) -> None:
        self.axes = Axes()
        self.values = values
        self.dims: list[Dims] = []
        for value in values:
            self.dims.append(self._dims(value, reduced))
        self.dims = [[self.axes.resolve(d) for d in dims] for dims in self.dims]
        names: dict[int, str] = {}
        for dims in self.dims:
            for d in dims:
                for a in d:
                    names.setdefault(a, f"a{len(names)}")
        self.extents: dict[str, Dim] = {name: self.axes.extent[a] for a, name in names.items()}
        self.names: list[list[tuple[str, ...]]] = [[tuple(names[a] for a in d) for d in dims] for dims in self.dims]

    def _repeats(self) -> bool:
        """Whether some value now has one axis twice: x[:, None] - x[None, :] must not become its own diagonal."""
        for dims in self.dims:
            flat = [a for d in dims for a in self.axes.resolve(d)]
            if len(flat) != len(set(flat)):
                return True
        return False

    def _unify(self, left: list[int], right: list[int]) -> None:
        saved = self.axes.snapshot()
        try:
            self.axes.unify(left, right)
            if not self._repeats():
                return
        except Infeasible:
            pass
        self.axes.restore(saved)  # then they stay two axes, and one is read at the other's index

    def _distinct(self, dims: Dims, shape: Sequence[Dim]) -> Dims:
        seen: set[int] = set()
        out: Dims = []
        for d, n in zip(dims, shape, strict=True):
            d = self.axes.resolve(d)
            if seen & set(d):
                d = self.axes.fresh(n)
            seen |= set(d)
            out.append(d)
        return out

    def _dims(self, v: Value, reduced: Callable[[Value], tuple[int, ...]]) -> Dims:
        axes = self.axes

        def get(i: int) -> Dims:
            return self.dims[v.refs[i]]

        name = v.name
        if v.op == INPUT or not v.refs:
            return [axes.fresh(d) for d in v.shape]
        source = self.values[v.refs[0]]
        if name == "reshape":
            flat = [a for d in get(0) for a in d]
            return axes.regroup(flat, v.shape)
        if name == "contiguous":
            return list(get(0))
        if name == "permute":
            return [get(0)[d] for d in v.args[1]]
        if name == "slice":
            dim = v.args[1]
            return [axes.fresh(n) if k == dim else d for k, (d, n) in enumerate(zip(get(0), v.shape, strict=True))]
        if name == "select":
            return [d for k, d in enumerate(get(0)) if k != v.args[1]]
        if name == "expand":
            pad: Dims = [axes.fresh(n) for n in v.shape[: len(v.shape) - len(source.shape)]]
            for n, m, d in zip(v.shape[len(pad) :], source.shape, get(0), strict=True):
                pad.append(axes.fresh(n) if m != n else d)
            return pad
        if name == "cat":
            dim = v.args[1]
            out: Dims = []
            for k, n in enumerate(v.shape):
                if k == dim:
                    out.append(axes.fresh(n))
                    continue
                for other in range(1, len(v.refs)):
                    self._unify(get(0)[k], get(other)[k])
                out.append(get(0)[k])
            return out
        if name == "gather":
            dim, index = v.args[1], self.dims[v.args[2].index]
            for k in range(len(v.shape)):
                if k != dim and self.values[v.args[2].index].shape[k] == source.shape[k]:
                    self._unify(get(0)[k], index[k])
            return [list(d) for d in index]
        drop = reduced(v)
        if drop and not _keeps_shape(name):
            kept = [d for k, d in enumerate(get(0)) if k not in drop]
            if len(v.shape) == len(source.shape):
                return [[] if k in drop else d for k, d in enumerate(get(0))]
            return kept
        # pointwise: align from the right
        result: Dims = []
        n = len(v.shape)
        refs = list(dict.fromkeys(v.refs))
        for k in range(n):
            first: list[int] | None = None
            for r in refs:
                at = k - (n - len(self.values[r].shape))
                if at < 0 or self.values[r].shape[at] == 1:
                    continue
                d = self.dims[r][at]
                if first is None:
                    first = d
                else:
                    self._unify(first, d)
            result.append(first if first is not None else axes.fresh(v.shape[k]))
        return self._distinct(result, v.shape)


def _keeps_shape(name: str) -> bool:
    return name.lstrip("_") in ("softmax", "log_softmax")


def total(axes: Sequence[str], extents: dict[str, Dim]) -> Dim:
    """The product of the extents."""
    number = 1
    symbols: list[str] = []
    for a in axes:
        n, s = dim_factors(extents[a])
        number *= n
        symbols += s
    return make_dim(number, symbols)


def static_size(arg: object) -> int:
    """A static extent argument as an int."""
    if isinstance(arg, Size):
        arg = arg.dim
    if not isinstance(arg, int):
        raise Infeasible(f"{arg} is no static extent")
    return arg
