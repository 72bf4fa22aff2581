"""Where operands lie: stride classes, which row axes collapse, and the scalars that a launch passes.

A kernel is generated for a Layout: the exact strides of static dimensions where they are the usual ones, and which row
axes run on as one. Strides of rows, and unusual ones, are arguments. `Addressing` names the arguments; `Binder` computes
them for the tensors of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from ..chain import Dim, dim_value
from ..errors import Infeasible, LaunchError
from .expr import Access, Expr, walk
from .lower import Lowered

Stride = int | None
MAX_STEP = 16  # elements: 16 bytes of one byte each
INDEX = -1  # the operand of an index that is a value: one dimension of stride 1, so that it is grouped and addressed as a load is


@dataclass(frozen=True)
class Operand:
    """One tensor as a layout sees it: sizes and strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def contiguous(sizes: Sequence[int]) -> Operand:
        strides: list[int] = []
        step = 1
        for n in reversed(sizes):
            strides.insert(0, step)
            step *= max(n, 1)
        return Operand(tuple(sizes), tuple(strides))


def static_strides(shape: Sequence[Dim], operand: Operand) -> tuple[Stride, ...]:
    """The stride of each dimension where it is known when the kernel is generated, else None (an argument).

    Known: a static dimension's, where it is 0 (expanded) or what a contiguous tensor has. Row strides vary.
    """
    known: list[Stride] = []
    step: int | None = 1
    for dim, stride in zip(reversed(shape), reversed(operand.strides), strict=True):
        if dim == 1:
            known.insert(0, 0)
            continue
        if isinstance(dim, int):
            known.insert(0, stride if stride in (0, step) else None)
            step = None if step is None else step * dim
        else:
            known.insert(0, None)
            step = None
    return tuple(known)


@dataclass(frozen=True)
class Layout:
    """Strides an operand and dimension (inputs first, then outputs), and the row axes in groups that run on as one.

    `flat`: every operand is one run of memory in one order, or a single element, so that one index serves all.
    `steps`: for each operand the largest power of two, at most MAX_STEP, that divides the strides of its rows, whatever
    the row counts: a kernel is told it, since rows of 4104 elements are read in wide pieces and rows of 4097 are not.
    """

    strides: tuple[tuple[Stride, ...], ...]
    groups: tuple[tuple[str, ...], ...]
    flat: bool = False
    steps: tuple[int, ...] = ()


RowPart = tuple[tuple[int, tuple[tuple[str, tuple[int, tuple[str, ...]]], ...]], ...]


def row_part(access: Access, rows: Sequence[str]) -> RowPart:
    """What of an access varies with row axes: per dimension the row terms of its index."""
    parts = []
    for d, i in enumerate(access.index):
        terms = tuple((a, c) for a, c in i.terms if a in rows)
        if terms:
            parts.append((d, terms))
    return tuple(parts)


def accesses(low: Lowered, exprs: Sequence[Expr]) -> list[tuple[int, Access]]:
    """(operand, access) of every load and index under `exprs` and every store; operands count the inputs first."""
    inputs = low.chain.num_inputs
    found = [(e.attr.operand, e.attr) for e in walk(exprs) if e.op == "load"]
    found += [(INDEX, Access(INDEX, (e.attr,))) for e in walk(exprs) if e.op == "index"]
    found += [(inputs + s.access.operand, s.access) for s in low.stores]
    return found


def _strides(operands: Sequence[Operand], k: int) -> tuple[int, ...]:
    return (1,) if k == INDEX else operands[k].strides


def _axis_stride(part: RowPart, axis: str, strides: Sequence[int], sizes: Mapping[str, int]) -> int:
    total = 0
    for d, terms in part:
        for a, (k, symbols) in terms:
            if a == axis:
                total += k * prod(sizes[s] for s in symbols) * strides[d]
    return total


def layout_of(low: Lowered, operands: Sequence[Operand], sizes: Mapping[str, int]) -> Layout:
    """The layout of these operands (inputs, then outputs) at these sizes of the row symbols."""
    shapes = [v.shape for v in low.chain.inputs] + [low.chain.values[o].shape for o in low.chain.outputs]
    strides = tuple(static_strides(s, o) for s, o in zip(shapes, operands, strict=True))
    parts = {(k, row_part(a, low.rows)) for k, a in accesses(low, [s.value for s in low.stores])}
    extent = {a: dim_value(low.extents[a], sizes) for a in low.rows}
    groups: list[list[str]] = []
    for axis in reversed(low.rows):
        same = groups and (axis in low.reduced) == (groups[0][0] in low.reduced)
        if same and _joins(axis, groups[0], parts, operands, extent, sizes):
            groups[0].insert(0, axis)
        else:
            groups.insert(0, [axis])
    made = tuple(tuple(g) for g in groups)
    steps = []
    for k, o in enumerate(operands):
        # a static axis that lies outside rows has their count in its stride, but a row's own is a factor of it
        given = [s for n, s in zip(shapes[k], o.strides, strict=True) if not isinstance(n, int)]
        given += [c * o.strides[d] for operand, p in parts if operand == k for d, terms in p for _, (c, _) in terms]
        steps.append(gcd(MAX_STEP, *given))
    return Layout(strides, made, _is_flat(low, made, strides, operands, extent, sizes), tuple(steps))


def _is_flat(
    low: Lowered, groups: tuple[tuple[str, ...], ...], strides: tuple[tuple[Stride, ...], ...],
    operands: Sequence[Operand], extent: Mapping[str, int], sizes: Mapping[str, int],
) -> bool:  # fmt: skip
    if low.reduces or len(groups) > 1 or len(low.spaces) > 1:
        return False
    if any(e.op == "load" and e.args for e in walk([s.value for s in low.stores])):
        return False
    cols = prod(dim_value(low.extents[a], {}) for s in low.spaces for a in s)
    addressing = Addressing(low, Layout(strides, groups))
    for k, access in accesses(low, [s.value for s in low.stores]):
        a = addressing.address(k, access)
        if a.const or a.offsets or a.gathers:
            return False
        if not a.rows and not a.cols:
            continue
        step = 1
        factors = {axis: factor for axis, factor, arg in a.cols if not arg}
        for axis in reversed([x for s in low.spaces for x in s]):
            if factors.get(axis) != step:
                return False
            step *= dim_value(low.extents[axis], {})
        many = bool(groups) and prod(extent[x] for x in groups[0]) > 1
        if many and _group_stride(row_part(access, low.rows), groups[0], _strides(operands, k), extent, sizes) != cols:
            return False
    return True


def _joins(
    axis: str, group: Sequence[str], parts: set[tuple[int, RowPart]], operands: Sequence[Operand],
    extent: Mapping[str, int], sizes: Mapping[str, int],
) -> bool:  # fmt: skip
    inner = prod(extent[a] for a in group)
    if extent[axis] == 1 or inner == 1:
        return True
    for k, part in parts:
        outer = _axis_stride(part, axis, _strides(operands, k), sizes)
        step = _group_stride(part, group, _strides(operands, k), extent, sizes)
        if outer != step * inner:
            return False
    return True


def _group_stride(
    part: RowPart, group: Sequence[str], strides: Sequence[int], extent: Mapping[str, int], sizes: Mapping[str, int]
) -> int:
    for a in reversed(group):
        if extent[a] != 1:
            return _axis_stride(part, a, strides, sizes)
    return 0


@dataclass(frozen=True)
class Address:
    """An access as code: base pointer, row terms (group, argument), column terms (axis, factor, argument or ""),
    a constant offset, and (factor, argument) offsets by strides that are arguments."""

    operand: int
    rows: tuple[tuple[int, str], ...]
    cols: tuple[tuple[str, int, str], ...]
    const: int
    offsets: tuple[tuple[int, str], ...]
    gathers: tuple[tuple[Expr, int, str], ...] = ()


class Addressing:
    """Names the scalar arguments of a kernel and turns accesses into addresses.

    `stepped`: strides of rows are passed in steps of the layout, and the kernel multiplies them.
    """

    def __init__(self, low: Lowered, layout: Layout, stepped: bool = False) -> None:
        self.low, self.layout, self.stepped = low, layout, stepped
        self.inputs = low.chain.num_inputs
        self.args: dict[str, tuple[object, ...]] = {"rows": ("rows",)}
        # the groups of row axes that results keep come first, then those that reductions join
        self.reduced = tuple(g for g, axes in enumerate(layout.groups) if axes[0] in low.reduced)
        self.kept = tuple(g for g in range(len(layout.groups)) if g not in self.reduced)
        if self.reduced:
            self.args["reds"] = ("reds",)
        for g in (*self.kept[1:], *self.reduced[1:]):
            self.args[f"e{g}"] = ("extent", g)
        self._group_of = {a: g for g, axes in enumerate(layout.groups) for a in axes}

    def _stride_arg(self, operand: int, dim: int) -> tuple[int, str]:
        """(factor, argument): the stride of a dimension as a constant, or as an argument."""
        known = 1 if operand == INDEX else self.layout.strides[operand][dim]
        if known is not None:
            return known, ""
        name = f"t{operand}_{dim}"
        self.args[name] = ("stride", operand, dim)
        return 1, name

    def step(self, operand: int) -> int:
        """By what the strides of an operand's rows are divided."""
        return self.layout.steps[operand] if self.stepped and operand != INDEX else 1

    def count(self, symbols: tuple[str, ...]) -> str:
        """The argument that holds a product of row counts."""
        name = "n_" + "_".join(symbols)
        self.args[name] = ("count", symbols)
        return name

    def address(self, operand: int, access: Access) -> Address:
        """The address of an access; `operand` counts the inputs first, then the outputs, or is INDEX."""
        part = row_part(access, self.low.rows)
        groups = sorted({self._group_of[a] for _, terms in part for a, _ in terms})
        rows = []
        for g in groups:
            axes = self.layout.groups[g]
            own = tuple((d, tuple(t for t in terms if t[0] in axes)) for d, terms in part)
            spec = ("group", operand, g, tuple((d, t) for d, t in own if t), self.step(operand))
            name = next((n for n, s in self.args.items() if s == spec), None)
            if name is None:
                name = f"r{'i' if operand == INDEX else operand}_{g}"
                name += "" if name not in self.args else f"_{len(self.args)}"
                self.args[name] = spec
            rows.append((g, name))
        cols: list[tuple[str, int, str]] = []
        const = 0
        offsets, gathers = [], []
        for d, i in enumerate(access.index):
            mine = [(a, c) for a, c in i.terms if a not in self._group_of]
            if not mine and not i.const and i.value is None:
                continue
            factor, arg = self._stride_arg(operand, d)
            for a, (k, symbols) in mine:
                if symbols and operand != INDEX:
                    raise Infeasible("a column axis that strides over rows")
                if factor:
                    cols.append((a, k * factor, self.count(symbols) if symbols else arg))
            if i.const and factor:
                if arg:
                    offsets.append((i.const * factor, arg))
                else:
                    const += i.const * factor
            if i.value is not None and factor:
                gathers.append((i.value, factor, arg))
        return Address(operand, tuple(rows), tuple(cols), const, tuple(offsets), tuple(gathers))


def bind(
    specs: Sequence[tuple[object, ...]],
    layout: Layout,
    low: Lowered,
    operands: Sequence[Operand],
    sizes: Mapping[str, int],
) -> list[int]:
    """The scalar arguments of a launch, in the order of `specs`."""
    extent = {a: dim_value(low.extents[a], sizes) for g in layout.groups for a in g}
    made = []
    for spec in specs:
        kind = spec[0]
        if kind in ("rows", "reds"):
            made.append(prod(n for a, n in extent.items() if (a in low.reduced) == (kind == "reds")))
        elif kind == "count":
            assert isinstance(spec[1], tuple)
            made.append(prod(sizes[s] for s in spec[1]))
        elif kind == "numel":
            made.append(prod(operands[-1].sizes))
        elif kind == "extent":
            made.append(prod(extent[a] for a in layout.groups[int(str(spec[1]))]))
        elif kind == "stride":
            made.append(operands[int(str(spec[1]))].strides[int(str(spec[2]))])
        else:
            _, operand, group, part, step = spec
            assert isinstance(operand, int) and isinstance(group, int) and isinstance(part, tuple) and isinstance(step, int)
            stride = _group_stride(part, layout.groups[group], _strides(operands, operand), extent, sizes)
            if stride % step:
                raise LaunchError(f"rows {stride} elements apart: the kernel was made for multiples of {step}")
            made.append(stride // step)
    return made
