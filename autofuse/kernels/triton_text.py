"""The Triton dialect: expressions as tensor statements over tiles.

A tile has a row dimension where a program takes several rows, and one dimension a column axis of its space. A value is a
scalar, a vector of rows, or a tile of full rank (extent 1 where it does not vary), so that broadcasting is explicit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from .. import ops
from ..errors import Infeasible, UnsupportedOp
from .emit import Printer
from .expr import FLOATS, Access, Builder, Expr, walk
from .layout import INDEX, Address, Addressing
from .lower import Lowered
from .roles import Store
from .trig import FAR, FAR_IN_TRITON, TRIG

TYPES = {
    "float32": "tl.float32", "float64": "tl.float64", "bfloat16": "tl.bfloat16", "float16": "tl.float16",
    "float8_e4m3fn": "tl.float8e4nv", "float8_e5m2": "tl.float8e5", "int8": "tl.int8", "uint8": "tl.uint8",
    "int16": "tl.int16", "int32": "tl.int32", "int64": "tl.int64", "bool": "tl.int1",
}  # fmt: skip
FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

PRELUDE = {
    # exp is ex2(x log2 e) in hardware, whose error grows with |x|: split the argument so that the rest is below ln2 / 2
    "af_exp": """@triton.jit
def af_exp(x):
    c = tl.minimum(tl.maximum(x, -104.0), 89.0)
    n = (c * 1.4426950408889634 + 12582912.0) - 12582912.0
    r = (c - n * 0.693359375) + n * 2.12194440e-4
    k = n.to(tl.int32)
    h = k >> 1
    low = ((h + 127) << 23).to(tl.float32, bitcast=True)
    high = ((k - h + 127) << 23).to(tl.float32, bitcast=True)
    y = tl.exp2(r * 1.4426950408889634) * low * high
    return tl.where(x != x, x, y)
""",
    "af_round": """@triton.jit
def af_round(x):
    a = tl.abs(x)
    r = (a + 8388608.0) - 8388608.0
    r = tl.where(a >= 8388608.0, a, r)
    return tl.where(x < 0.0, -r, r)
""",
    "af_round64": """@triton.jit
def af_round64(x):
    a = tl.abs(x)
    r = (a + 4503599627370496.0) - 4503599627370496.0
    r = tl.where(a >= 4503599627370496.0, a, r)
    return tl.where(x < 0.0, -r, r)
""",
    "af_idiv": """@triton.jit
def af_idiv(x, y):
    q = tl.abs(x) // tl.abs(y)
    return tl.where((x < 0) != (y < 0), -q, q)
""",
    "af_mul": """@triton.jit
def af_mul(x, y):
    return x * y
""",
    # the compiler cannot see that the result is its argument, so that it need not keep what it made of the argument
    "af_again8": """@triton.jit
def af_again8(x):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=4)
""",
    "af_again16": """@triton.jit
def af_again16(x):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
""",
    "af_again32": """@triton.jit
def af_again32(x):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1)
""",
    # the hardware's conversion saturates, infinities too, and keeps NaN; a GPU without one has no e4m3 in Triton
    "af_e4m3": "@triton.jit\ndef af_e4m3(x):\n    return x.to(tl.float8e4nv)\n",
    # two elements in two instructions, where a conversion takes three; a thread may have less than two
    "af_wide": """@triton.jit
def af_wide(x):
    if x.numel < 2 * tl.extra.cuda.num_threads():
        return x.to(tl.float32)
    else:
        both: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(both, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
""",
    # the next kernel may start now, and waits where this one waits here: for all that the kernel before it has written
    "af_overlap": """@triton.jit
def af_overlap():
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
""",
    "af_far": FAR,
    "af_trig": TRIG,
    "af_rcp": """@triton.jit
def af_rcp(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
""",
    "af_tanh": """@triton.jit
def af_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
""",
}
# what stands for them in the interpreter, which runs no assembly
STAND_INS = {
    "af_far": FAR_IN_TRITON,
    "af_overlap": "@triton.jit\ndef af_overlap():\n    pass\n",
    **{f"af_again{n}": f"@triton.jit\ndef af_again{n}(x):\n    return x\n" for n in (8, 16, 32)},
    "af_e4m3": """@triton.jit
def af_e4m3(x):
    x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
""",
    "af_wide": "@triton.jit\ndef af_wide(x):\n    return x.to(tl.float32)\n",
    "af_rcp": "@triton.jit\ndef af_rcp(x):\n    return 1.0 / x\n",
    "af_tanh": """@triton.jit
def af_tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)
""",
}

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^", "shr": ">>",
}  # fmt: skip
CALLS = {"log": "tl.log", "log2": "tl.log2", "exp2": "tl.exp2", "sin": "tl.sin", "cos": "tl.cos", "erf": "tl.erf",
         "floor": "tl.floor", "ceil": "tl.ceil", "abs": "tl.abs"}  # fmt: skip
HARDWARE = {"tanh_approx": "af_tanh", "rcp": "af_rcp"}
IDENTITY = {"sum": "0", "prod": "1"}


def identity(kind: str, dtype: str) -> str:
    """The text of the value that a reduction starts from."""
    if kind in IDENTITY:
        return IDENTITY[kind] + (".0" if dtype in FLOATS else "")
    if dtype in FLOATS:
        return 'float("-inf")' if kind == "max" else 'float("inf")'
    width = 31 if dtype == "int32" else 63
    return str(-(1 << width) if kind == "max" else (1 << width) - 1)


class TritonPrinter(Printer):
    """Prints tiles. `blocks` gives each column axis's tile extent; `starts` the variable that a loop adds to it."""

    def __init__(
        self, low: Lowered, addressing: Addressing, rows: int, blocks: Mapping[str, int], math_mode: str, flat: bool = False
    ) -> None:
        super().__init__(low, addressing)
        self.rows_per_program, self.blocks, self.math, self.flat = rows, dict(blocks), math_mode, flat
        self.rowdim = rows > 1
        # the row dimension of a tile runs along these groups of row axes; the others stand still in a program
        self.along = addressing.reduced or addressing.kept
        self.along_axes = {a for g in self.along for a in addressing.layout.groups[g]}
        self.kind: dict[str, str] = {}
        self.prelude: set[str] = set()
        self.column: dict[str, str] = {}
        self.mask: dict[str, str] = {}
        self.base: dict[tuple[object, ...], str] = {}
        self.evict: dict[str, str] = {}  # "in0", "out1": the hint of that operand's loads or stores; "near": of all others
        self.bounded = True  # whether a flat block may pass the end of its operands
        self.last_pass = True  # whether what is loaded now is loaded for the last time
        self.in_storage = False  # whether tiles that are loaded stay in registers as they came, and are widened at each use
        self.raw: dict[int, tuple[str, bool]] = {}
        self.rounds: dict[int, str] = {}  # tiles that stay in registers rounded to these dtypes, while `in_storage`
        self.start: dict[str, str] = {}  # where a column axis's tile begins
        self.pairs: dict[int, tuple[Expr, Expr]] = {}
        self.hoisted: list[tuple[int, str]] = []  # (group of rows, statement) to be put where the group stands

    # ---- shapes

    def rank(self, space: tuple[str, ...]) -> int:
        return self.rowdim + len(space)

    def expand(self, position: int, rank: int) -> str:
        """The subscript that gives a vector its place in a tile."""
        if rank == 1:
            return ""
        return "[" + ", ".join(":" if k == position else "None" for k in range(rank)) + "]"

    def text(self, e: Expr, space: tuple[str, ...] | None) -> str:
        """The value as an operand in a tile of `space` (or among rows)."""
        name = self.name(e)
        if space is not None and self.kind.get(name) == "r":
            return name + self.expand(0, self.rank(space))
        return name

    def assign(self, text: str, kind: str, prefix: str = "v") -> str:
        name = self.fresh(prefix)
        self.line(f"{name} = {text}")
        self.kind[name] = kind
        return name

    # ---- rows and columns

    def prologue(self, blocks: int = 1) -> None:
        """The program's rows and where each group of row axes stands. `blocks`: as many programs one after the other have
        the same rows."""
        self.line("pid = tl.program_id(0)")
        if blocks > 1:
            self.line(f"block = pid % {blocks}")
            self.line(f"pid = pid // {blocks}")
        if self.flat:
            # a product, so that the compiler knows that the columns' count divides it and keeps the mask in wide pieces
            cols = prod(self.low.extent(a) for a in self.low.spaces[0])
            self.line(f"numel = rows.to(tl.int64) * {cols}")
            self.line(f"first = pid.to(tl.int64) * {self.blocks[self.low.spaces[0][0]]}")
        elif self.addressing.kept:
            self.set_rows(f"pid * {self.rows_per_program}" if self.rowdim else "pid", "rows", self.addressing.kept)

    def set_rows(self, first: str, end: str, groups: Sequence[int]) -> None:
        """Define the rows of a tile, from `first` on and below `end`, and where each of their groups stands."""
        if self.rowdim:
            self.line(f"row = {first} + tl.arange(0, {self.rows_per_program})")
            self.line(f"row_ok = row < {end}")
        else:
            self.line(f"row = {first}")
        self.place("row", groups)

    def place(self, linear: str, groups: Sequence[int]) -> None:
        """Where each of these groups of row axes stands, from the number of a row among them."""
        left = linear
        for g in reversed(groups[1:]):
            self.line(f"g{g} = {left} % e{g}")
            self.line(f"q{g} = {left} // e{g}")
            left = f"q{g}"
        for g in groups[:1]:
            self.line(f"g{g} = {left}")

    def set_column(self, axis: str, start: str, bounded: bool) -> None:
        """Define an axis's column index (from `start` on) and its mask where the tile may pass the extent."""
        space = self.space_of[axis]
        where = self.expand(self.rowdim + space.index(axis), self.rank(space))
        name = self.fresh("c")
        arange = f"tl.arange(0, {self.blocks[axis]}){where}"
        self.line(f"{name} = {arange}" if start == "0" else f"{name} = {start} + {arange}")
        self.column[axis], self.start[axis] = name, start
        self.mask.pop(axis, None)
        if not bounded:
            ok = self.fresh("m")
            self.line(f"{ok} = {name} < {self.low.extent(axis)}")
            self.mask[axis] = ok

    # ---- addresses

    def _row_parts(self, a: Address, space: tuple[str, ...] | None) -> list[str]:
        """What groups of row axes add to an address, 64-bit."""
        rows = []
        for g, arg in a.rows:
            key = ("row", g, arg)
            if key not in self.base:
                self.base[key] = self.fresh("b")
                # hoisted to where rows are known: they are defined in the outermost scope
                step = self.addressing.step(a.operand)  # the factor tells the compiler what divides the address
                told = f" * {step}" if step > 1 else ""
                self.hoisted.append((g, f"{self.base[key]} = g{g}.to(tl.int64) * {arg}{told}"))
            wide = self.rowdim and space is not None and g in self.along
            rows.append(self.base[key] + (self.expand(0, self.rank(space)) if wide and space is not None else ""))
        return rows

    def _pointer(self, name: str, a: Address, space: tuple[str, ...] | None) -> str:
        if self.flat:
            return f"{name} + first + {self.column[self.low.spaces[0][0]]}" if a.rows or a.cols else name
        parts = [name, *self._row_parts(a, space)]
        if a.const:
            parts.append(str(a.const))
        parts += [arg if k == 1 else f"{k} * {arg}" for k, arg in a.offsets]
        for axis, factor, arg in a.cols:
            term = self.column[axis]
            if arg:
                term = f"{term}.to(tl.int64) * {arg}"
            parts.append(term if factor == 1 else f"{term} * {factor}")
        for e, factor, arg in a.gathers:
            term = self.text(e, space)
            parts.append(" * ".join([term, *([str(factor)] if factor != 1 else []), *([arg] if arg else [])]))
        return " + ".join(parts)

    def _along(self, a: Address, axes: frozenset[str]) -> bool:
        """Whether an access varies along the tile's row dimension."""
        return any(g in self.along for g, _ in a.rows) or bool(axes & self.along_axes)

    def _masks(self, a: Address, space: tuple[str, ...] | None, axes: frozenset[str], extra: Expr | None = None) -> list[str]:
        if self.flat:
            return [f"first + {self.column[self.low.spaces[0][0]]} < numel"] if self.bounded and (a.rows or a.cols) else []
        masks = []
        if self.rowdim and self._along(a, axes):
            masks.append("row_ok" + (self.expand(0, self.rank(space)) if space is not None else ""))
        masks += [self.mask[c] for c in (space or ()) if c in axes and c in self.mask]
        if extra is not None:
            masks.append(self.text(extra, space))
        return masks

    def _hint(self, operand: str, a: Address) -> str:
        """The hint of a load; "reuse" keeps what a later pass reads again, and drops it there, "past" leaves the cache of a
        processor to others."""
        hint = self.evict.get(operand, self.evict.get("near", ""))
        if not hint or not a.cols:
            return ""
        if hint == "past":
            return ', cache_modifier=".cg"'
        if hint == "reuse":
            hint = "evict_first" if self.last_pass else "evict_last"
        return f', eviction_policy="{hint}"'

    def _held(self, e: Expr) -> str:
        """A loaded tile as it came: its variable where it is kept in storage or was fetched early, opaque after `age`."""
        itemsize = ops.ITEMSIZE[self.low.values[e.attr.operand].dtype]
        # one of few elements costs few registers, and may be less than a register's worth a thread
        rows = set(self.low.rows) - self.low.reduced
        # what is the same for all rows is near in a cache
        kept = self.in_storage and itemsize <= 4 and set(self.space(e) or ()) <= e.axes and rows <= e.axes
        found = self.raw.get(e.number)
        if found is None:
            text = self._fetch(e)
            if not kept:
                return text
            name = self.fresh("k")
            self.line(f"{name} = {text}")
            self.raw[e.number] = (name, True)
            return name
        return self._again(e.number, itemsize) if kept else found[0]

    def _again(self, number: int, itemsize: int) -> str:
        """A tile that is kept, opaque where it has aged."""
        name, fresh = self.raw[number]
        if not fresh:
            again = self.fresh("k")
            self.line(f"{again} = {self.use(f'af_again{8 * itemsize}')}({name})")
            self.raw[number] = (again, True)
        return self.raw[number][0]

    def _rounded_tile(self, e: Expr) -> str:
        """A tile as eager has it, in 16 bits while it waits."""
        if e.number not in self.raw:
            # made opaque at once, two share a register from here on
            text = f"{self.use('af_again16')}({self._emit(e)}.to({TYPES[self.rounds[e.number]]}))"
            self.raw[e.number] = (self.assign(text, "t", "k"), True)
        return self.assign(self._widened(self._again(e.number, 2), self.rounds[e.number], e.dtype), "t", "x")

    def fetch_early(self, e: Expr) -> None:
        """Load a tile now that is used later, so that it is on its way while a reduction waits."""
        there = self.known(e) is not None or e.number in self.raw or e.number in self.pairs  # pairs are loaded as one
        if ops.ITEMSIZE[self.low.values[e.attr.operand].dtype] <= 4 and not there:
            name = self.fresh("k")
            self.line(f"{name} = {self._fetch(e)}")
            self.raw[e.number] = (name, True)

    def age(self) -> None:
        """Tiles that are kept in storage are opaque to the compiler from now on."""
        self.raw = {number: (name, False) for number, (name, _) in self.raw.items()}

    def _fetch(self, e: Expr) -> str:
        """The text of a load."""
        access = e.attr
        a = self.addressing.address(access.operand, access)
        space = self.space(e)
        pointer = self._pointer(f"in{access.operand}", a, space)
        masks = self._masks(a, space, e.axes, e.args[0] if e.args else None)
        return f"tl.load({pointer}{self._told(access.operand, masks)}{self._hint(f'in{access.operand}', a)})"

    def _told(self, operand: int, masks: Sequence[str]) -> str:
        """The mask of a load."""
        zero = "0.0" if self.low.values[operand].dtype in FP8_MAX else "0"  # fp8 is made of no integer
        return f", mask={_all(masks)}, other={zero}" if masks else ""

    def load(self, e: Expr) -> str:
        space = self.space(e)
        if e.number in self.pairs:
            self._load_pair(*self.pairs[e.number])
            return self.name(e)
        text = self._held(e) if space is not None else self._fetch(e)
        rowish = self.rowdim and self._along(self.addressing.address(e.attr.operand, e.attr), e.axes)
        return self._as(e, text, "t" if space is not None else "r" if rowish else "s")

    def _as(self, e: Expr, text: str, kind: str) -> str:
        """What was loaded, in the dtype that is computed in."""
        storage = self.low.values[e.attr.operand].dtype
        if storage == "bool":
            text = f"({text} != 0)"
        elif storage != e.dtype:
            text = self._widened(text, storage, e.dtype) if kind == "t" else f"{text}.to({TYPES[e.dtype]})"
        return self.assign(text, kind, "x")

    def _widened(self, text: str, storage: str, dtype: str) -> str:
        """A tile in the dtype that is computed in."""
        if (storage, dtype) == ("bfloat16", "float32"):
            return f"{self.use('af_wide')}({text})"
        return f"{text}.to({TYPES[dtype]})"

    # ---- pairs: columns 2k and 2k + 1 are read and written as one run, not as two with gaps

    def find_pairs(self, roots: Sequence[Expr]) -> None:
        """The loads of neighbours two columns apart."""
        open_: dict[tuple[object, ...], tuple[Expr, int]] = {}
        found = [(e, self.addressing.address(e.attr.operand, e.attr)) for e in walk(roots) if e.op == "load" and not e.args]
        for e, a in sorted(found, key=lambda f: f[1].const):
            space = self.space(e)
            if space is None or not self._halves(a, space):
                continue
            key = (a.operand, a.rows, a.cols, a.offsets, e.dtype, e.axes)
            first = open_.pop(key, None)
            if first is not None and first[1] + 1 == a.const:
                self.pairs[first[0].number] = self.pairs[e.number] = (first[0], e)
            else:
                open_[key] = (e, a.const)

    def _halves(self, a: Address, space: tuple[str, ...]) -> bool:
        """Whether an address runs over every other element along the innermost axis of its space."""
        return not self.flat and not a.gathers and [(f, arg) for axis, f, arg in a.cols if axis == space[-1]] == [(2, "")]

    def pairs_with(self, one: Store, other: Store) -> bool:
        """Whether `other` writes the odd columns between the even ones of `one`."""
        a, b = self._written(one), self._written(other)
        mine = {self.space_of[c] for c in one.access.axes if c in self.space_of}
        return len(mine) == 1 and self._halves(a, next(iter(mine))) and replace(a, const=a.const + 1) == b

    @contextmanager
    def _wide(self, space: tuple[str, ...]) -> Iterator[None]:
        """The innermost axis's columns and mask twice as wide, for a run of pairs."""
        axis = space[-1]
        column, mask = self.column[axis], self.mask.get(axis)
        start = self.start[axis]
        where = self.expand(self.rank(space) - 1, self.rank(space))
        arange = f"tl.arange(0, {2 * self.blocks[axis]}){where}"
        self.column[axis] = self.fresh("c")
        self.line(f"{self.column[axis]} = " + (arange if start == "0" else f"({start}) * 2 + {arange}"))
        if mask is not None:
            self.mask[axis] = self.fresh("m")
            self.line(f"{self.mask[axis]} = {self.column[axis]} < {2 * self.low.extent(axis)}")
        yield
        self.column[axis] = column
        if mask is not None:
            self.mask[axis] = mask

    def _load_pair(self, one: Expr, other: Expr) -> None:
        space = self.space(one)
        assert space is not None
        a = _as_run(self.addressing.address(one.attr.operand, one.attr), space)
        extents = [self.rows_per_program if self._along(a, one.axes) else 1] if self.rowdim else []
        extents += [self.blocks[axis] if axis in one.axes else 1 for axis in space]
        with self._wide(space):
            told = self._told(one.attr.operand, self._masks(a, space, one.axes)) + self._hint(f"in{one.attr.operand}", a)
            run = self.assign(f"tl.load({self._pointer(f'in{one.attr.operand}', a, space)}{told})", "t", "x")
        even, odd = self.fresh("x"), self.fresh("x")
        self.line(f"{even}, {odd} = tl.split(tl.reshape({run}, ({', '.join(map(str, [*extents, 2]))})))")
        for e, text in ((one, even), (other, odd)):
            self.define(e, self._as(e, text, "t"))

    def store_pair(self, one: Store, low: Expr, other: Store, high: Expr) -> None:
        """Print two writes of neighbours as one."""
        space = next(self.space_of[c] for c in one.access.axes if c in self.space_of)
        a = _as_run(self._written(one), space)
        extents = ([self.rows_per_program] if self.rowdim else []) + [self.blocks[axis] for axis in space]
        shape = f"({', '.join(map(str, extents))}{',' if len(extents) == 1 else ''})"
        texts = [f"tl.broadcast_to({self._stored(s, v, space)}, {shape})" for s, v in ((one, low), (other, high))]
        with self._wide(space):
            self._write(one, a, space, f"tl.interleave({', '.join(texts)})")

    def store(self, store: Store, value: Expr) -> None:
        """Print one write."""
        a = self._written(store)
        mine = {self.space_of[c] for c in store.access.axes if c in self.space_of}
        if len(mine) > 1:
            raise Infeasible("a write over two unrelated column axes")
        space = next(iter(mine), None)
        if self.flat and self.low.spaces:
            space = self.low.spaces[0]
        self._write(store, a, space, self._stored(store, value, space))

    def _written(self, store: Store) -> Address:
        """Where a write goes."""
        return self.addressing.address(self.addressing.inputs + store.access.operand, store.access)

    def _stored(self, store: Store, value: Expr, space: tuple[str, ...] | None) -> str:
        """A value in the dtype that it is written in."""
        storage = self.low.chain.values[self.low.chain.outputs[store.access.operand]].dtype
        if value.op == "round" and value.attr == storage:
            # the store converts; the value is not needed rounded in registers
            return self.rounded(value.args[0], storage, space)
        text = self.text(value, space)
        if storage in FP8_MAX:
            return self.rounded(value, storage, space)
        if storage == "bool":
            return f"{text}.to(tl.int8)" if not value.is_const else f"tl.full((), {int(bool(value.attr))}, tl.int8)"
        if value.is_const:
            return f"{self.typed(value, space)}.to({TYPES[storage]})"
        return text if storage == value.dtype else f"{text}.to({TYPES[storage]})"

    def _write(self, store: Store, a: Address, space: tuple[str, ...] | None, text: str) -> None:
        name = f"out{store.access.operand}"
        pointer = self._pointer(name, a, space)
        masks = self._masks(a, space, store.access.axes)
        told = f", mask={_all(masks)}" if masks else ""
        hint = self.evict.get(name, "")
        told += f', eviction_policy="{hint}"' if hint and a.cols else ""
        self.line(f"tl.store({pointer}, {text}{told})")

    # ---- expressions

    def literal(self, e: Expr) -> str:
        value = Builder.number(e)
        if isinstance(value, float):
            text = repr(value) if math.isfinite(value) else f'float("{value}")'
            return f"tl.full((), {text}, tl.float64)" if e.dtype == "float64" else text
        return f"tl.full((), {value}, tl.int64)" if e.dtype == "int64" and abs(int(value or 0)) > 2**31 - 1 else str(value)

    def typed(self, e: Expr, space: tuple[str, ...] | None) -> str:
        """As `text`, with a constant's dtype spelled out (where Triton would guess it)."""
        if e.is_const and e.dtype != "float64":
            return f"tl.full((), {self.literal(e)}, {TYPES[e.dtype]})"
        return self.text(e, space)

    def rounded(self, x: Expr, storage: str, space: tuple[str, ...] | None) -> str:
        """`x` converted to a storage dtype; finite fp8 overflow saturates, NaN stays NaN."""
        limit = FP8_MAX.get(storage)
        if limit is None:
            return f"{self.typed(x, space)}.to({TYPES[storage]})"
        x = _unclamped(x, limit)
        if storage == "float8_e4m3fn" and x.dtype == "float32":
            return f"{self.use('af_e4m3')}({self.typed(x, space)})"
        nan = "propagate_nan=tl.PropagateNan.ALL"
        return f"tl.minimum(tl.maximum({self.typed(x, space)}, {-limit}, {nan}), {limit}, {nan}).to({TYPES[storage]})"

    def use(self, name: str) -> str:
        self.prelude.add(name)
        return name

    def emit(self, e: Expr) -> str:
        rows = set(self.low.rows) - self.low.reduced
        if self.in_storage and e.number in self.rounds and rows | set(self.space(e) or ()) <= e.axes:
            return self._rounded_tile(e)
        return self._emit(e)

    def _emit(self, e: Expr) -> str:
        if e.op == "const":
            return self.literal(e)
        if e.op == "load":
            return self.load(e)
        if e.op == "index":
            return self.index(e)
        if e.op == "count":
            return self.assign(f"{self.addressing.count(e.attr)}.to(tl.int64)", "s", "n")
        if e.op == "reduce":
            return self.reduce(e)
        space = self.space(e)
        given = (e.args[0].args[0],) if self._quick_exp(e) and e.args[0].op == "neg" else e.args
        for a in given:
            self.name(a)
        kinds = {self.kind.get(self.name(a), "s") for a in given}
        kind = "t" if "t" in kinds else "r" if "r" in kinds else "s"
        if kind != "t":
            space = None
        args = [self.text(a, space) for a in given]
        return self.assign(self.operation(e, args, space), kind)

    def _quick_exp(self, e: Expr) -> bool:
        """Whether e is an exp by one exp2, whose argument's sign goes into the constant."""
        return e.op == "exp" and self.math != "exact" and e.dtype == "float32"

    def operation(self, e: Expr, args: Sequence[str], space: tuple[str, ...] | None) -> str:
        op = e.op
        x = args[0]
        real = e.args[0].dtype in FLOATS
        if all(a.is_const for a in e.args):
            x = self.typed(e.args[0], space)
            args = [x, *args[1:]]
        if op in INFIX:
            return f"{x} {INFIX[op]} {args[1]}"
        if op == "div":
            if not real:
                return f"{self.use('af_idiv')}({x}, {args[1]})"
            if self.math == "exact" and e.dtype == "float32":
                return f"tl.div_rn({self.typed(e.args[0], space)}, {self.typed(e.args[1], space)})"
            return f"{x} / {args[1]}"
        if op in ("max", "min"):
            name = "tl.maximum" if op == "max" else "tl.minimum"
            told = ", propagate_nan=tl.PropagateNan.ALL" if real else ""
            return f"{name}({x}, {args[1]}{told})"
        if op == "where":
            if e.args[1].is_const and e.args[2].is_const:
                return f"tl.where({x}, {self.typed(e.args[1], space)}, {args[2]})"
            return f"tl.where({x}, {args[1]}, {args[2]})"
        if op == "exp":
            if self._quick_exp(e):
                return f"tl.exp2({x} * {'-' if e.args[0].op == 'neg' else ''}1.4426950408889634)"
            return f"{self.use('af_exp')}({x})" if e.dtype == "float32" else f"tl.exp({x})"
        if op == "sqrt":
            return f"tl.sqrt_rn({x})" if self.math == "exact" and e.dtype == "float32" else f"tl.sqrt({x})"
        if op == "rsqrt":
            if e.dtype == "float64":
                return f"1.0 / tl.sqrt({x})"
            return f"tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn({x}))" if self.math == "exact" else f"tl.rsqrt({x})"
        if op in ("sin", "cos") and e.dtype == "float32":
            self.prelude |= {"af_far", "af_trig"}
            return f"af_{op}({self.typed(e.args[0], space)}, {self.math == 'approx'})"
        if op in CALLS:
            return f"{CALLS[op]}({x})"
        if op in HARDWARE:
            return f"{self.use(HARDWARE[op])}({x})"
        if op == "pow":
            raise Infeasible("pow of float64 has no accurate Triton form")
        if op == "neg":
            return f"{x} * -1.0" if real else f"-{x}"  # -x is 0 - x, which is 0.0 of 0.0
        if op == "not":
            return f"~{x}" if e.dtype != "bool" else f"{x} == 0"
        if op == "isnan":
            return f"{x} != {x}"
        if op == "trunc":
            return f"tl.where({x} < 0.0, tl.ceil({x}), tl.floor({x}))"
        if op == "round_even":
            if not real:
                return x
            return f"{self.use('af_round' if e.dtype == 'float32' else 'af_round64')}({x})"
        if op == "fmod":
            return f"{x} - {self.use('af_idiv')}({x}, {args[1]}) * {args[1]}" if not real else f"{x} % {args[1]}"
        if op == "bits":
            return f"{self.typed(e.args[0], space)}.to({TYPES[e.dtype]}, bitcast=True)"
        if op == "unbits":
            return f"{self.typed(e.args[0], space)}.to({TYPES[e.dtype]}, bitcast=True)"
        if op == "cast":
            return f"{self.typed(e.args[0], space)}.to({TYPES[e.dtype]})"
        if op == "round":
            return f"{self.rounded(e.args[0], e.attr, space)}.to({TYPES[e.dtype]})"
        raise UnsupportedOp(f"{op} has no Triton form yet")

    def index(self, e: Expr) -> str:
        """An index as a value: 64-bit where rows or a wide column take part."""
        space = self.space(e)
        a = self.addressing.address(INDEX, Access(INDEX, (e.attr,)))
        if self.flat:
            return self.assign(f"first + {self.column[self.low.spaces[0][0]]}", "t")
        parts = self._row_parts(a, space)
        for axis, factor, arg in a.cols:
            wide = bool(arg) or abs(factor) * (self.low.extent(axis) - 1) >= 2**31
            term = f"{self.column[axis]}.to(tl.int64)" if wide else self.column[axis]
            parts.append(" * ".join([term, *([str(factor)] if factor != 1 else []), *([arg] if arg else [])]))
        parts += [self.text(value, space) for value, _, _ in a.gathers]
        if a.const:
            parts.append(str(a.const))
        text = " + ".join(parts)
        if space is not None:
            return self.assign(f"({text}).to(tl.int64)", "t")
        return self.assign(text, "r" if self.rowdim and self._along(a, e.axes) else "s")

    # ---- reductions

    def masked(self, x: Expr, kind: str, axes: Sequence[str]) -> str:
        """The tile with what lies past the extent replaced by the reduction's identity."""
        space = self.space(x)
        assert space is not None
        return self.inside(self.text(x, space), axes, identity(kind, x.dtype))

    def inside(self, text: str, axes: Sequence[str], other: str) -> str:
        """A tile with `other` in place of what lies past the extent of one of these axes."""
        masks = [self.mask[a] for a in axes if a in self.mask]
        return f"tl.where({_all(masks)}, {text}, {other})" if masks else text

    def reduce_text(self, text: str, kind: str, axes: Sequence[str], space: tuple[str, ...]) -> str:
        """A tile reduced over axes: to rows where all of the space goes, else with extent 1 there."""
        whole = set(axes) >= set(space)
        for axis in reversed([a for a in space if a in axes]):
            at = self.rowdim + space.index(axis)
            keep = "" if whole else ", keep_dims=True"
            text = self.along_axis(text, kind, at, keep)
        return text

    def along_axis(self, text: str, kind: str, axis: int, told: str = "") -> str:
        """A tile reduced over one of its dimensions."""
        if kind == "prod":
            return f"tl.reduce({text}, {axis}, {self.use('af_mul')}{told})"
        return f"tl.{kind}({text}, axis={axis}{told})"

    def accumulate(self, acc: str, kind: str, text: str) -> None:
        """Print what joins a tile to an accumulator."""
        if kind in ("sum", "prod"):
            self.line(f"{acc} {'+' if kind == 'sum' else '*'}= {text}")
        else:
            self.line(f"{acc} = tl.{kind}imum({acc}, {text})")

    def reduce(self, e: Expr) -> str:
        kind, axes = e.attr
        x = e.args[0]
        space = self.space(x)
        assert space is not None
        text = self.reduce_text(self.masked(x, kind, axes), kind, axes, space)
        return self.assign(text, self.reduced_kind(axes, space), "s")

    def reduced_kind(self, axes: Sequence[str], space: tuple[str, ...]) -> str:
        if set(axes) >= set(space):
            return "r" if self.rowdim else "s"
        return "t"


def _all(masks: Sequence[str]) -> str:
    return " & ".join(_paren(m) for m in masks)


def _paren(text: str) -> str:
    return f"({text})" if " " in text else text


def _as_run(a: Address, space: tuple[str, ...]) -> Address:
    """The address of a run of pairs: every column of the innermost axis in place of every other one."""
    return replace(a, cols=tuple((axis, 1 if axis == space[-1] else f, arg) for axis, f, arg in a.cols))


def _unclamped(e: Expr, limit: float) -> Expr:
    """What a value is before it is clamped to [-limit, limit], which a saturating conversion does anyway."""
    found, bounds = e, {}
    while found.op in ("min", "max") and found.op not in bounds and Builder.number(found.args[1]) is not None:
        bounds[found.op] = Builder.number(found.args[1])
        found = found.args[0]
    return found if bounds == {"min": limit, "max": -limit} else e
