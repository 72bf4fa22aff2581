"""A chain evaluated by PyTorch: as eager does it (baseline, fallback), and in float64 (the oracle of every check)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import ops
from .chain import INPUT, Arg, Chain, Dtype, Ref, Size, Value, dim_value, map_arg
from .decompose import lists, overload_of

FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def _call(v: Value, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    overload = overload_of(v.op)
    kw = dict(kwargs)
    if ops.OPS.get(v.name) is not None and ops.OPS[v.name].kind == "factory" and not v.refs:
        kw["device"] = device
        kw.setdefault("dtype", ops.TORCH[v.dtype])
    made = overload(*[lists(a) for a in args], **{k: lists(a) for k, a in kw.items()})
    assert isinstance(made, torch.Tensor)
    return made


def evaluate(
    chain: Chain, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], wanted: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The chain's outputs (or the values `wanted`) exactly as eager computes them, views as views."""
    values: list[torch.Tensor | None] = [*inputs, *(None for _ in chain.nodes)]
    device = inputs[0].device if inputs else torch.device("cpu")
    for i in chain.nodes:
        v = chain.values[i]

        def leaf(arg: Arg) -> Any:
            if isinstance(arg, Ref):
                return values[arg.index]
            if isinstance(arg, Size):
                return dim_value(arg.dim, sizes)
            return ops.TORCH[arg.name] if isinstance(arg, Dtype) else arg

        args = [map_arg(a, leaf) for a in v.args]
        values[i] = _call(v, args, {k: map_arg(a, leaf) for k, a in v.kwargs}, device)
    made = [values[o] for o in (chain.outputs if wanted is None else wanted)]
    return [m for m in made if m is not None]


def to_storage(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """`x` in a storage dtype; finite fp8 overflow saturates (eager gives NaN in some versions), NaN stays NaN."""
    limit = FP8_MAX.get(dtype)
    if limit is not None and x.dtype.is_floating_point:
        x = x.clamp(-limit, limit)
    return x.to(ops.TORCH[dtype])


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """`x` in float64 after rounding to a float storage dtype."""
    return to_storage(x, dtype).to(torch.float64)


def oracle(
    chain: Chain, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], wanted: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The chain's outputs in float64 (integers and bools as they are).

    Rounding points are kept: casts that the user wrote, and eager's rounding of an argument before a discontinuity.
    """
    values: list[torch.Tensor] = [_widen(t) for t in inputs]
    device = inputs[0].device if inputs else torch.device("cpu")
    for i in chain.nodes:
        v = chain.values[i]
        values.append(_oracle_value(chain, v, values, sizes, device))
    return [values[o] for o in (chain.outputs if wanted is None else wanted)]


def _widen(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float64) if t.dtype.is_floating_point else t


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _oracle_value(
    chain: Chain, v: Value, values: Sequence[torch.Tensor], sizes: Mapping[str, int], device: torch.device
) -> torch.Tensor:
    entry = ops.OPS.get(v.name)
    rounds = (entry is not None and entry.rounds) or v.name in ("argmax", "argmin", "any", "all")
    common: str | None = None
    if entry is not None and entry.args == "common":
        refs = [(chain.values[r].dtype, len(chain.values[r].shape)) for r in v.refs]
        common = ops.common_dtype(refs, [a for a in v.args if isinstance(a, (bool, int, float))])

    def leaf(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            x, source = values[arg.index], chain.values[arg.index]
            if (rounds or (v.name == "to" and not _is_float(v.dtype))) and source.op != INPUT and _is_float(source.dtype):
                x = rounded(x, source.dtype)
            if common is not None and rounds and _is_float(common) and x.dtype.is_floating_point:
                x = rounded(x, common)
            return x
        if isinstance(arg, Size):
            return dim_value(arg.dim, sizes)
        if isinstance(arg, Dtype):
            return torch.float64 if _is_float(arg.name) else ops.TORCH[arg.name]
        if common is not None and rounds and _is_float(common) and isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return rounded(torch.tensor(arg, dtype=torch.float64), common).item()
        return arg

    args = [map_arg(a, leaf) for a in v.args]
    kwargs = {k: map_arg(a, leaf) for k, a in v.kwargs}
    if v.name == "to":
        x = args[0]
        return rounded(x, v.dtype) if _is_float(v.dtype) else x.to(ops.TORCH[v.dtype])
    made = _call(v, args, kwargs, device)
    if not _is_float(v.dtype):
        return made.to(ops.TORCH[v.dtype])
    made = made.to(torch.float64)
    return rounded(made, v.dtype) if entry is not None and entry.kind == "factory" else made
