"""What a task says about its schedules: which math to begin with, what is loaded early, near or in one pass, and the knobs
that several kinds share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod

from ..chain import INPUT, Chain
from ..cost import numel
from ..ops import ITEMSIZE, is_free
from .base import Knob, Task
from .expr import FLOATS, Expr, children, walk
from .lower import Lowered
from .mathmode import MODES, Legal
from .onepass import moments
from .roles import Store

SMALL = 2**23  # elements up to which what a kernel costs to start is worth a knob
SHORT = 2**20  # elements up to which it gains nearly always
INEXACT = {"exp", "expm1", "log1p", "tanh", "sigmoid", "erf"}  # what the fast mode loses bits in


def widest(task: Task) -> int:
    """Columns of the widest space."""
    return max((prod(task.low.extent(a) for a in s) for s in task.low.spaces), default=1)


def is_hint(knob: str) -> bool:
    """Whether a knob is the eviction hint of an operand: in0, out1."""
    return re.fullmatch(r"(in|out)\d+", knob) is not None


def hints(task: Task, passes: bool) -> tuple[Knob, ...]:
    """A knob for the eviction hint of each large operand. `passes`: some forms read a row more than once."""
    chain, made = task.chain, []
    sizes = {s: 64 for s in chain.symbols}
    operands = [(f"in{k}", v) for k, v in enumerate(chain.inputs)]
    operands += [(f"out{k}", chain.values[o]) for k, o in enumerate(chain.outputs)]
    most = max((numel(v.shape, sizes) for _, v in operands), default=1)
    for name, v in operands:
        if 4 * numel(v.shape, sizes) < most or (name[0] == "i" and not chain.users[int(name[2:])]):
            continue
        loads = ("", "evict_first", "evict_last", *(("reuse", "past") if passes else ()))
        made.append(Knob(name, loads if name[0] == "i" else ("", "evict_first")))
    return tuple(made)


def near(task: Task) -> Knob:
    """A knob for the hint of all other inputs that vary with columns: many programs read them again."""
    hinted = {k.name for k in hints(task, True)}
    loads = tile_loads([s.value for s in task.low.stores], task.low)
    others = any(f"in{e.attr.operand}" not in hinted for e in loads)
    return Knob("near", ("", "evict_last") if others else ("",))


def early_choices(task: Task) -> tuple[int, ...]:
    """What of the tiles that are needed only after a reduction may be loaded before it: 0 nothing, 1 what is another in
    each row, 2 all."""
    late = late_loads([s.value for s in task.low.stores], task.low)
    rows = {streams(e, task.low) for e in late}
    return (0, *((1,) if True in rows else ()), *((2,) if False in rows else ()))


def overlap(task: Task) -> Knob:
    """Whether a short kernel starts while the one before it ends."""
    small = task.rows * widest(task) <= SMALL
    return Knob("overlap", (0, 1) if small and task.limits.overlaps else (0,))


def default_overlap(task: Task) -> int:
    """Where a search begins: what is over in a few microseconds gains most."""
    return int(1 in overlap(task).values and task.rows * widest(task) <= SHORT)


def hinted(task: Task, hint: str) -> dict[str, int | str]:
    """One eviction hint for all large inputs, and for outputs where they take it; "" for none, where a search begins."""
    return {k.name: hint if hint in k.values else "" for k in hints(task, True)}


def next_power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def default_math(task: Task) -> str:
    """The math mode to begin with: results that are rounded to 16 bits or fewer, or that eager computes from such, hide
    what the fast forms lose."""
    outputs, coarse = task.chain.outputs, rounded_values(task.chain)
    wide = [
        s.value for s in task.low.stores
        if task.chain.values[outputs[s.access.operand]].dtype in FLOATS and outputs[s.access.operand] not in coarse
    ]  # fmt: skip
    reads = any(v.dtype in FLOATS and len(v.shape) > 1 for v in task.chain.inputs)
    shows = any(e.op in INEXACT for e in walk(wide))
    return "exact" if wide and (reads or shows or task.low.folds) else "fast"


def rounded_values(chain: Chain) -> set[int]:
    """The values before which eager rounds a result of its own to 16 bits or fewer."""
    found: set[int] = set()
    for i, v in enumerate(chain.values):
        made = v.op != INPUT and not is_free(v.name)
        if any(r in found for r in v.refs) or (made and v.dtype in ITEMSIZE and "float" in v.dtype and ITEMSIZE[v.dtype] <= 2):
            found.add(i)
    return found


def legal_stores(low: Lowered, mode: str, gpu: bool) -> list[tuple[Store, Expr]]:
    """Every write with its value in a math mode."""
    legal = Legal(low.b, mode, gpu)
    return [(s, legal(s.value)) for s in low.stores]


def levels(roots: Sequence[Expr], counts: Callable[[Expr], bool]) -> dict[int, int]:
    """For every expression under the roots how many of the reductions that count lie under it in a row, itself included."""
    made: dict[int, int] = {}
    for e in walk(roots):
        made[e.number] = max((made[c.number] for c in children(e)), default=0) + (e.op == "reduce" and counts(e))
    return made


def first_needs(roots: Sequence[Expr]) -> tuple[dict[int, int], set[int]]:
    """The levels of all reductions, and the numbers of what lies under those of the first level, themselves included."""
    level = levels(roots, lambda r: True)
    return level, {c.number for c in walk([e for e in walk(roots) if e.op == "reduce" and level[e.number] == 1])}


def held_tiles(task: Task) -> int:
    """How many tiles wait in registers while the first reduction is made: computed for it, and used again after it."""
    roots, low = [s.value for s in task.low.stores], task.low
    space = {a for s in low.spaces for a in s}
    level, under = first_needs(roots)
    used = {c.number for e in walk(roots) if level[e.number] and e.op != "reduce" for c in children(e) if c.axes & space}
    return sum(not level[n] for n in used & under)


def tile_loads(roots: Sequence[Expr], low: Lowered) -> list[Expr]:
    """The tiles that are loaded from places that nothing loaded decides."""
    space = {a for s in low.spaces for a in s}
    return [e for e in walk(roots) if e.op == "load" and e.axes & space and not children(e)]


def other_math(task: Task) -> list[dict[str, int | str]]:
    """The faster math modes than the one to begin with."""
    return [{"math": m} for m in MODES[MODES.index(default_math(task)) + 1 :]]


def pieces(task: Task) -> int:
    """How many elements of one output a place of a tile writes: 2 for a rotary embedding."""
    outputs = [s.access.operand for s in task.low.stores]
    return max(map(outputs.count, outputs), default=1)


def streams(e: Expr, low: Lowered) -> bool:
    """Whether a load reads other memory in each row, so that none of it is in a cache."""
    return bool(low.rows) and set(low.rows) - low.reduced <= e.axes


def strided(task: Task) -> bool:
    """Whether columns of an input lie apart in memory, as in a transposed one: then rows are what is read together."""
    chain = task.chain
    return any(
        len(v.shape) > 1 and v.shape[-1] != 1 and chain.users[k] and task.layout.strides[k][-1] is None
        for k, v in enumerate(chain.inputs)
    )


def streamed(task: Task) -> int:
    """Bytes of a place of a tile that all inputs that vary with rows fill in each pass."""
    roots, low = [s.value for s in task.low.stores], task.low
    found = {e.attr for e in tile_loads(roots, low) if streams(e, low) and e.axes >= set(low.spaces[0])}
    return sum(ITEMSIZE[low.values[access.operand].dtype] for access in found)


def has_moments(low: Lowered) -> bool:
    """Whether a variance can be made in the pass that makes its mean."""
    return bool(moments([e for e in walk([v for _, v in legal_stores(low, "fast", True)]) if e.op == "reduce"], low))


def late_loads(roots: Sequence[Expr], low: Lowered) -> list[Expr]:
    """Those of them that are needed only after a reduction."""
    _, under = first_needs(roots)
    return [e for e in tile_loads(roots, low) if e.number not in under] if under else []
