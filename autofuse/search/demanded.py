"""What was missed, made into cases again: the chain from the store, tensors of its workload, the search.

No data of the calls is kept, so tensors are made: floats from N(0, 1), integers that index from the rows or columns which
they may point to, other integers from INTEGER_RANGE. They lie in memory as the workload's layout classes say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import Any

import torch

from .. import ops
from ..chain import Chain, Value, dim_value, instantiate
from ..decompose import expand
from ..device import describe, parse_device
from ..errors import AutofuseError, InputError, TraceError
from ..inputs import INTEGER_RANGE
from ..kernels.layout import Operand
from ..result import ProgressCallback, Tuned
from ..store.store import Store
from ..stored import Stored
from ..workload import is_aligned, layout_class, layouts_of, workload_of
from .recipes import Recipe, make
from .tuner import Tuner

Row = Mapping[str, Any]
KEEPS_VALUES = {
    "reshape", "permute", "slice", "select", "expand", "contiguous", "clone", "cat", "to", "where", "clamp",
    "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip
"""Operations that make no index out of range of indices that are within it."""

MOST_DIMS = 5  # of an input whose layout is looked for among all orders of its dimensions


def tune_demand(
    tuner: Tuner, device: str, limit: int, note: Callable[[str], None], progress: ProgressCallback | None = None, **search: Any
) -> tuple[list[Tuned], bool]:
    """Tune what the calls on a device have missed, most time lost first. The store forgets the demand that a winner meets.

    Also says whether a workload could not be made again, or tuned, for a reason that went to `note`.
    """
    place = str(parse_device(device))
    uid = describe(place).uid
    tuner.store = tuner.store or Store.open(tuner.url)
    wanted: dict[str, Row] = {}
    for found in tuner.store.demand(uid):
        wanted.setdefault(found["workload_uid"], found)  # one a workload, whatever tiers served it
    rows: list[Tuned] = []
    failed = False
    for row in list(wanted.values())[:limit]:
        try:
            fn, inputs = case_of(row, place, search.get("seed", 0))
            result = tuner.tune(fn, [inputs], device=place, name=row["chain"], progress=progress, **search)
        except (InputError, TraceError) as error:
            note(f"autofuse: {row['chain']} at rows {row['rows']} ({row['workload_uid']}) is left out: {error}")
            failed = True
            continue
        rows += result.rows
        if any(tuned.state == "interrupted" for tuned in result.rows):
            break
    return rows, failed


def case_of(row: Row, device: str, seed: int) -> tuple[Stored, tuple[torch.Tensor, ...]]:
    """The chain of a row of `Store.demand` as a function, and arguments that are its workload.

    Raises InputError for a row that is not what autofuse writes, and for a layout that cannot be made again.
    """
    try:
        chain = instantiate(row["graph"], row["extents"], _texts(row["dtypes"]))
        layouts = _texts(row["layouts"])
        sizes = {s: int(row["sizes"][s]) for s in chain.symbols}
        known = chain.key == row["chain_key"] and len(layouts) == chain.num_inputs
    except (AutofuseError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"its chain in the store cannot be read ({type(error).__name__}: {error})") from error
    if not known:
        raise InputError("its chain in the store is not the one that its key names")
    bounds = index_bounds(chain, sizes)
    recipes = []
    for k, (value, layout) in enumerate(zip(chain.inputs, layouts, strict=True)):
        extents = tuple(dim_value(d, sizes) for d in value.shape)
        found = strides_of(value, extents, layout)
        if found is None:
            raise InputError(f"no tensor of {'x'.join(map(str, extents))} with the layout {layout!r} is made for its input {k}")
        strides, misalignment = found
        recipes.append(_recipe(value.dtype, extents, strides, misalignment, bounds.get(k)))
    try:
        inputs = tuple(make(recipes, [v.shape for v in chain.inputs], sizes, device, seed))
    except (RuntimeError, MemoryError) as error:
        raise InputError(f"its tensors cannot be made on {device} ({str(error).splitlines()[0]})") from error
    if workload_of(chain, layouts_of(chain, inputs), sizes).uid != row["workload_uid"]:
        raise InputError("the tensors that are made for it are another workload")
    return Stored([chain], row["chain"]), inputs


def _texts(column: Any) -> list[str]:
    return list(json.loads(column)) if isinstance(column, str) else list(column)


def _recipe(dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], misalignment: int, bound: int | None) -> Recipe:
    if dtype == "bool":
        return Recipe(sizes, strides, dtype, misalignment, mean=0.5, std=0.0, low=0, high=1)
    if ops.TORCH[dtype].is_floating_point:
        return Recipe(sizes, strides, dtype, misalignment)
    low, high = INTEGER_RANGE
    return Recipe(sizes, strides, dtype, misalignment, low=low, high=(high if bound is None else bound) - 1)


def index_bounds(chain: Chain, sizes: Mapping[str, int]) -> dict[int, int]:
    """For each input whose integers become indices, the smallest extent that they point into.

    Raises InputError where indices are computed from them: which are legal then is not known.
    """
    bounds: dict[int, int] = {}
    whole, (expanded, _) = chain.values, expand(chain)  # in which a loss shows its gather
    gathers = [(expanded, v.args[2].index, expanded[v.args[0].index].shape[v.args[1]]) for v in expanded if v.name == "gather"]
    for values, index, dim in [*gathers, *((whole, v.refs[0], v.shape[-1]) for v in whole if v.name == "one_hot")]:
        extent = dim_value(dim, sizes)
        for at in _sources(values, index, chain.num_inputs):
            bounds[at] = min(bounds.get(at, extent), extent)
    return bounds


def _sources(values: Sequence[Value], index: int, inputs: int) -> set[int]:
    """The inputs whose integers reach the value `index` as they are. Raises InputError where they are computed with."""
    waiting, seen = [index], set()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        ints = [r for r in values[at].refs if "int" in values[r].dtype]
        if ints and values[at].name not in KEEPS_VALUES:
            raise InputError(f"its indices are computed by {values[at].name}: tune it with the function and --arg")
        waiting += ints
    return {at for at in seen if at < inputs}


def strides_of(value: Value, sizes: Sequence[int], layout: str) -> tuple[tuple[int, ...], int] | None:
    """Strides (in elements) and misalignment (in bytes) of a tensor of this layout class, the plainest; None if none is
    found."""
    itemsize = ops.ITEMSIZE[value.dtype]
    for strides, offset in _candidates(value, sizes, layout, itemsize):
        laid = torch.empty_strided(tuple(sizes), strides, dtype=ops.TORCH[value.dtype], device="meta")
        if layout_class(value, Operand(tuple(sizes), strides), is_aligned(laid) and not offset) == layout:
            return strides, offset * itemsize
    return None


def _candidates(value: Value, sizes: Sequence[int], layout: str, itemsize: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Strides and offsets, contiguous ones first: every order of the dimensions, every second element, rows that start on
    16 bytes or lie apart; static dimensions that the class says are expanded have stride 0."""
    dims = len(sizes)
    if dims > MOST_DIMS:
        return
    static = iter(layout.split(":")[1].split(",")) if layout.count(":") == 2 else iter(())
    expanded = [isinstance(d, int) and next(static, "") == "0" and n > 1 for d, n in zip(value.shape, sizes, strict=True)]
    apart = [(-1, "")] + [(k, how) for k in range(dims) for how in ("pad", "gap")]
    for order, step, (place, how) in product(permutations(range(dims)), (1, 2), apart):
        strides, run = [0] * dims, step
        for k, d in enumerate(reversed(order)):
            if expanded[d]:
                continue
            strides[d] = run
            run *= max(1, sizes[d])
            if k == place:
                run += strides[d] if how == "gap" else -run % max(1, 16 // itemsize)
        yield tuple(strides), 0
        yield tuple(strides), 1
