"""A chain: the graph of operations of one function, frozen and canonical.

Values are numbered: the inputs come first, then the nodes in the order in which a depth-first walk from the outputs
finishes them, so that names, the order of statements and dead code leave no trace. A dimension is an int where it is
static, and a product of row symbols ("s0", "s0*s1", "2*s0") where it is a row count that varies from call to call.

`structure` is the chain with its static extents and dtypes replaced by symbols (c0, c1 ... and t0, t1 ...);
`key` hashes the structure alone. `instantiate(structure, extents, dtypes)` is the exact way back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from .errors import AutofuseError
from .store.records import canonical_json, content_uid

Dim = int | str
INPUT = "input"
FORMAT = 1


@dataclass(frozen=True)
class Ref:
    """The value of this number, as an argument."""

    index: int


@dataclass(frozen=True)
class Size:
    """An extent as an argument (of a view, a norm, a slice): an int or a product of row symbols."""

    dim: Dim


@dataclass(frozen=True)
class Dtype:
    """A dtype as an argument: a cast that the user wrote."""

    name: str


Arg = Any  # Ref | Size | Dtype | int | float | bool | str | None | tuple of these


@dataclass(frozen=True)
class Value:
    """One input or one operation. `op` is "input" or an ATen overload such as "aten.add.Tensor"."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    shape: tuple[Dim, ...]
    dtype: str

    @property
    def refs(self) -> tuple[int, ...]:
        """The values that this one reads, in argument order."""
        return tuple(_refs((self.args, tuple(v for _, v in self.kwargs))))

    @property
    def name(self) -> str:
        """The operation without namespace and overload: "add"."""
        return self.op.split(".")[1] if "." in self.op else self.op


def _refs(arg: Arg) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.index
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _refs(item)


def map_arg(arg: Arg, leaf: Callable[[Arg], Arg]) -> Arg:
    """The argument with `leaf` applied to everything that is not a tuple."""
    if isinstance(arg, tuple):
        return tuple(map_arg(a, leaf) for a in arg)
    return leaf(arg)


def dim_factors(dim: Dim) -> tuple[int, tuple[str, ...]]:
    """A dimension as (integer, sorted row symbols)."""
    if isinstance(dim, int):
        return dim, ()
    number, symbols = 1, []
    for part in dim.split("*"):
        if part.lstrip("-").isdigit():
            number *= int(part)
        else:
            symbols.append(part)
    return number, tuple(sorted(symbols, key=_symbol_order))


def _symbol_order(symbol: str) -> tuple[str, int]:
    return symbol[0], int(symbol[1:]) if symbol[1:].isdigit() else 0


def make_dim(number: int, symbols: Sequence[str]) -> Dim:
    """The dimension of these factors, in its one spelling."""
    if not symbols:
        return number
    text = "*".join(sorted(symbols, key=_symbol_order))
    return text if number == 1 else f"{number}*{text}"


def dim_value(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The extent of a dimension, given the sizes of the row symbols."""
    number, symbols = dim_factors(dim)
    return number * prod(sizes[s] for s in symbols)


@dataclass(frozen=True, eq=False)
class Chain:
    """A frozen graph of values; see the module's text. Make one with `Chain.build`, which canonicalises."""

    values: tuple[Value, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def build(values: Sequence[Value], outputs: Sequence[int]) -> Chain:
        """The canonical chain of these values: dead ones dropped, order and row symbols made canonical.

        Inputs keep their relative order, and unused ones stay (a caller binds arguments by position).
        """
        return Chain._canonical(values, outputs)[0]

    @staticmethod
    def _canonical(values: Sequence[Value], outputs: Sequence[int]) -> tuple[Chain, dict[str, str]]:
        """The canonical chain, and the old name of each of its row symbols."""
        order: list[int] = [i for i, v in enumerate(values) if v.op == INPUT]
        seen = set(order)
        stack: list[tuple[int, int]] = []
        for out in outputs:
            if out in seen:
                continue
            stack.append((out, 0))
            seen.add(out)
            while stack:
                index, at = stack.pop()
                refs = values[index].refs
                while at < len(refs) and refs[at] in seen:
                    at += 1
                if at < len(refs):
                    stack.append((index, at + 1))
                    stack.append((refs[at], 0))
                    seen.add(refs[at])
                else:
                    order.append(index)
        number = {old: new for new, old in enumerate(order)}
        symbols: dict[str, str] = {}

        def rename(dim: Dim) -> Dim:
            factor, names = dim_factors(dim)
            return make_dim(factor, [symbols.setdefault(n, f"s{len(symbols)}") for n in names])

        def leaf(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref(number[arg.index])
            return Size(rename(arg.dim)) if isinstance(arg, Size) else arg

        made = []
        for old in order:
            v = values[old]
            shape = tuple(rename(d) for d in v.shape)
            kwargs = tuple(sorted((k, map_arg(a, leaf)) for k, a in v.kwargs))
            made.append(Value(v.op, map_arg(v.args, leaf), kwargs, shape, v.dtype))
        chain = Chain(tuple(made), tuple(number[o] for o in outputs))
        return chain, {new: old for old, new in symbols.items()}

    @cached_property
    def num_inputs(self) -> int:
        """How many of the values are inputs; they are the first ones."""
        return sum(v.op == INPUT for v in self.values)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs, in argument order."""
        return self.values[: self.num_inputs]

    @cached_property
    def nodes(self) -> range:
        """The numbers of the operations."""
        return range(self.num_inputs, len(self.values))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each value the operations that read it."""
        users: list[list[int]] = [[] for _ in self.values]
        for i in self.nodes:
            for r in dict.fromkeys(self.values[i].refs):
                users[r].append(i)
        return tuple(tuple(u) for u in users)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The row symbols, in order of appearance."""
        found: dict[str, None] = {}
        for v in self.values:
            for d in v.shape:
                found.update(dict.fromkeys(dim_factors(d)[1]))
        return tuple(sorted(found, key=_symbol_order))

    def at(self, sizes: Mapping[str, int]) -> Chain:
        """The chain with these row symbols fixed: as it would be with those axes static."""

        def fix(dim: Dim) -> Dim:
            number, names = dim_factors(dim)
            for n in names:
                number *= sizes.get(n, 1)
            return make_dim(number, [n for n in names if n not in sizes])

        def leaf(arg: Arg) -> Arg:
            return Size(fix(arg.dim)) if isinstance(arg, Size) else arg

        values = [
            Value(v.op, map_arg(v.args, leaf), tuple((k, map_arg(a, leaf)) for k, a in v.kwargs), tuple(map(fix, v.shape)), v.dtype)
            for v in self.values
        ]
        return Chain.build(values, self.outputs)

    # ---- structure, key, JSON

    @cached_property
    def _json(self) -> str:
        return self.to_json()

    def __eq__(self, other: object) -> bool:
        """By what is written: Python takes 0.0 for -0.0 and 1 for 1.0 and True, and a chain must not."""
        return isinstance(other, Chain) and self._json == other._json

    def __hash__(self) -> int:
        return hash(self._json)

    @cached_property
    def _symbolic(self) -> tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]:
        extents: dict[int, str] = {}
        dtypes: dict[str, str] = {}
        for v in self.values:  # shapes first: an argument becomes a symbol only if it names an extent of a shape
            for d in v.shape:
                number = dim_factors(d)[0]
                if number > 1:
                    extents.setdefault(number, f"c{len(extents)}")
            dtypes.setdefault(v.dtype, f"t{len(dtypes)}")

        def dim(d: Dim) -> Dim:
            number, names = dim_factors(d)
            if number in extents:
                return make_dim(1, [extents[number], *names])
            return d

        values = [
            [v.op, _dump(v.args, dim), [[k, _dump(a, dim)] for k, a in v.kwargs], [dim(d) for d in v.shape], dtypes[v.dtype]]
            for v in self.values
        ]
        graph = {"format": FORMAT, "values": values, "outputs": list(self.outputs)}
        return graph, tuple(extents), tuple(dtypes)

    @property
    def graph(self) -> str:
        """The structure as canonical JSON: what the store keeps."""
        return canonical_json(self._symbolic[0])

    @property
    def extents(self) -> tuple[int, ...]:
        """The static extents, in order of appearance: c0, c1, ..."""
        return self._symbolic[1]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes, in order of appearance: t0, t1, ..."""
        return self._symbolic[2]

    @cached_property
    def key(self) -> str:
        """A hash of the structure alone: 32 hex digits."""
        return content_uid(self._symbolic[0])

    def to_json(self) -> str:
        """The whole chain, extents and dtypes included, as canonical JSON."""
        return canonical_json({"graph": self._symbolic[0], "extents": list(self.extents), "dtypes": list(self.dtypes)})

    @staticmethod
    def from_json(text: str) -> Chain:
        """The chain of `to_json`. Raises AutofuseError for anything else."""
        try:
            data = json.loads(text)
            return instantiate(data["graph"], data["extents"], data["dtypes"])
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise AutofuseError(f"this is no chain of autofuse (format {FORMAT}): {e}") from e

    def subchain(self, inside: Sequence[int], outputs: Sequence[int]) -> tuple[Chain, tuple[int, ...], dict[str, str]]:
        """The part made of the nodes `inside`, giving `outputs`, as a chain of its own; which values it reads, and
        this chain's name of each of its row symbols."""
        members = set(inside)
        reads: dict[int, None] = {}
        for i in sorted(members):
            for r in self.values[i].refs:
                if r not in members:
                    reads.setdefault(r)
        for o in outputs:
            if o not in members:
                reads.setdefault(o)
        order = [*reads, *sorted(members)]
        number = {old: new for new, old in enumerate(order)}

        def leaf(arg: Arg) -> Arg:
            return Ref(number[arg.index]) if isinstance(arg, Ref) else arg

        values = []
        for old in order:
            v = self.values[old]
            if old in members:
                kwargs = tuple((k, map_arg(a, leaf)) for k, a in v.kwargs)
                values.append(Value(v.op, map_arg(v.args, leaf), kwargs, v.shape, v.dtype))
            else:
                values.append(Value(INPUT, (), (), v.shape, v.dtype))
        chain, symbols = Chain._canonical(values, [number[o] for o in outputs])
        return chain, tuple(reads), symbols

    def __str__(self) -> str:
        lines = []
        for i, v in enumerate(self.values):
            shape = ", ".join(str(d) for d in v.shape)
            args = ", ".join(_show(a) for a in v.args) + "".join(f", {k}={_show(a)}" for k, a in v.kwargs)
            lines.append(f"%{i}: {v.dtype}[{shape}] = {v.op.removeprefix('aten.')}({args})")
        lines.append("return " + ", ".join(f"%{o}" for o in self.outputs))
        return "\n".join(lines)


def _show(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"%{arg.index}"
    if isinstance(arg, Size):
        return str(arg.dim)
    if isinstance(arg, Dtype):
        return arg.name
    if isinstance(arg, tuple):
        return "[" + ", ".join(_show(a) for a in arg) + "]"
    return repr(arg)


def _dump(arg: Arg, dim: Callable[[Dim], Dim]) -> Any:
    if isinstance(arg, Ref):
        return {"v": arg.index}
    if isinstance(arg, Size):
        return {"d": dim(arg.dim)}
    if isinstance(arg, Dtype):
        return {"t": arg.name}
    if isinstance(arg, tuple):
        return [_dump(a, dim) for a in arg]
    if isinstance(arg, float):
        return {"f": repr(arg)}  # repr is exact, and spells inf and nan, which JSON cannot
    return arg


def _load(data: Any, dim: Callable[[Dim], Dim]) -> Arg:
    if isinstance(data, list):
        return tuple(_load(d, dim) for d in data)
    if isinstance(data, dict):
        ((tag, content),) = data.items()
        made: dict[str, Callable[[Any], Arg]] = {
            "v": Ref, "d": lambda d: Size(dim(d)), "t": Dtype, "f": float,
        }  # fmt: skip
        return made[tag](content)
    return data


def instantiate(graph: Mapping[str, Any] | str, extents: Sequence[int], dtypes: Sequence[str]) -> Chain:
    """The chain of a structure with these extents (c0, c1, ...) and dtypes (t0, t1, ...)."""
    if isinstance(graph, str):
        graph = json.loads(graph)
        assert not isinstance(graph, str)
    if graph["format"] != FORMAT:
        raise AutofuseError(f"a chain of format {graph['format']}, this autofuse reads format {FORMAT}: upgrade autofuse")

    def dim(d: Dim) -> Dim:
        number, names = dim_factors(d)
        for name in names:
            if name[0] == "c":
                number *= extents[int(name[1:])]
        return make_dim(number, [n for n in names if n[0] != "c"])

    values = tuple(
        Value(op, _load(args, dim), tuple((k, _load(a, dim)) for k, a in kwargs), tuple(dim(d) for d in shape), dtypes[int(t[1:])])
        for op, args, kwargs, shape, t in graph["values"]
    )
    return Chain(values, tuple(graph["outputs"]))
