"""Calls that write into memory of the caller's: `fused(..., out=)`, and the bare prepared call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import flat
from .errors import InputError
from .guard import MISS, Guarded
from .program import Bound

if TYPE_CHECKING:
    from .dispatch import Fused, Prepared


class Into:
    """One function's calls with `out`. A call that has been seen costs one guard over arguments and outputs."""

    def __init__(self, fused: Fused) -> None:
        self._fused = fused
        self._guards: list[Guarded] = []

    def __call__(self, args: tuple[Any, ...], out: Any) -> Any:
        """Run the function and leave its outputs in `out`, which is given back. Raises InputError for what cannot hold them."""
        outs, spec = torch.utils._pytree.tree_flatten(out)
        given = (*args, *outs)
        for guarded in self._guards:
            if guarded.run(*given) is not MISS:
                return out
        fused, name = self._fused, self._fused.name
        if torch.is_grad_enabled() and any(t.requires_grad for t in given if isinstance(t, torch.Tensor)):
            raise InputError(f"{name} got out= where a gradient is needed: call it without out, or under torch.no_grad()")
        for k, t in enumerate(outs):
            if not isinstance(t, torch.Tensor):
                raise InputError(f"output {k} of {name} got a {type(t).__name__} as out=: give a tensor")
            if torch._debug_has_internal_overlap(t) == 1:
                raise InputError(
                    f"output {k} of {name} got a tensor as out= whose elements share memory: give it memory of its own"
                )
        call = fused.ready(args)
        inputs = [a for a in args if isinstance(a, torch.Tensor)] if call is None else call.inputs
        refuse_shared(name, inputs, outs)
        result = fused(*args)
        leaves, wanted = torch.utils._pytree.tree_flatten(result)
        if spec != wanted and not (spec.type is list and wanted.type is tuple and spec.num_leaves == wanted.num_leaves):
            raise InputError(f"{name} gives {_nesting(result)}, and out= is {_nesting(out)}: nest it alike")
        for k, (t, y) in enumerate(zip(outs, leaves, strict=True)):
            if (t.shape, t.dtype, t.device) != (y.shape, y.dtype, y.device):
                raise InputError(
                    f"output {k} of {name} is {tuple(y.shape)} {y.dtype} on {y.device}, and its out= is {tuple(t.shape)} "
                    f"{t.dtype} on {t.device}: give a tensor like it"
                )
        for t, y in zip(outs, leaves, strict=True):
            t.copy_(y)
        if call is not None and not any(t.data_ptr() & 15 for t in outs):  # which no guard lets pass
            self._keep(call, given, outs)
        return out

    def _keep(self, call: Prepared, given: tuple[Any, ...], outs: Sequence[torch.Tensor]) -> None:
        bound = checked(call.bind_into(outs), self._fused.name, call.inputs, outs)
        positions = [*call.positions, *range(len(given) - len(outs), len(given))]
        for guarded in self._guards:
            if guarded.add(given, bound, call.most):
                return
        places = [*call.places, *(None for _ in outs)]
        dims = [*call.dims, *call.outputs]
        guarded = Guarded(given, [*call.inputs, *outs], positions, places, dims, call.watches)
        if len(self._guards) < call.most and guarded.add(given, bound, call.most):
            self._guards = [guarded, *self._guards]


def checked(bound: Bound, name: str, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> Bound:
    """A bound call that refuses outputs in an input's memory: by where they begin and end, and by a closer look where
    these meet."""

    def refuse(*tensors: torch.Tensor) -> None:
        refuse_shared(name, tensors[: len(inputs)], tensors[len(inputs) :])

    ins, into = ([f"{letter}{k}" for k in range(n)] for letter, n in (("v", len(inputs)), ("o", len(outs))))
    spans = {**dict(zip(ins, map(_span, inputs), strict=True)), **dict(zip(into, map(_span, outs), strict=True))}
    apart = [f"({a}p + {spans[a]} <= {b}p or {b}p + {spans[b]} <= {a}p)" for b in into for a in ins if spans[a] and spans[b]]
    apart += [f"({a}p + {spans[a]} <= {b}p or {b}p + {spans[b]} <= {a}p)" for n, b in enumerate(into) for a in into[:n]]
    every = ", ".join((*ins, *into))
    body = [*(f"{t}p = {t}.data_ptr()" for t in (*ins, *into)), f"if not ({' and '.join(apart)}): refuse({every})"] if apart else []
    text = f"def run({every}):\n" + "".join(f"    {line}\n" for line in (*body, f"bound({every})"))
    return flat.function(text, {"bound": bound, "refuse": refuse})


def refuse_shared(name: str, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Raise InputError where an output shares memory with an input or another output."""
    for k, t in enumerate(outs):
        for what, others in (("an input", inputs), ("another output", outs[:k])):
            if any(shares(t, other) for other in others):
                raise InputError(f"output {k} of {name} got {what}'s memory as out=: give it memory of its own")


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may have a byte in common. Exact where both are rows as far apart as the other's, as the parts
    of one wider tensor are; else by where they begin and end."""
    first, second = a.data_ptr(), b.data_ptr()
    if a.device != b.device or not a.numel() or not b.numel() or first + _span(a) <= second or second + _span(b) <= first:
        return False
    one, two = _rows(a), _rows(b)
    if one is None or two is None or one[0] != two[0]:
        return True
    step, offset = one[0], (second - first) % one[0]
    return offset < one[1] or offset + two[1] > step


def _span(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if not t.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _rows(t: torch.Tensor) -> tuple[int, int] | None:
    """How many bytes a tensor's rows are apart, and how many each has; None where it is no evenly spaced rows."""
    size = t.element_size()
    if t.dim() < 2 or t.stride(-1) != 1:
        return None
    step, count = 0, 1
    for n, s in reversed(list(zip(t.shape[:-1], t.stride()[:-1], strict=True))):
        if n != 1:
            if step and s != step * count:
                return None
            step = step or s
            count *= n
    return (step * size, t.shape[-1] * size) if step else None


def _nesting(result: Any) -> str:
    leaves = torch.utils._pytree.tree_leaves(result)
    return "one tensor" if isinstance(result, torch.Tensor) else f"a {type(result).__name__} of {len(leaves)}"


def bare(call: Prepared | None, fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    """What runs a prepared call with no guard at all: a function of all its arguments."""
    if call is None:
        return fn
    names: dict[str, Any] = {"bound": call.bound}
    read = [f"c{k} = {place.text(names)}" for k, place in enumerate(call.places) if place is not None]
    taken = ", ".join(f"a{p}" if p is not None else f"c{k}" for k, p in enumerate(call.positions))
    parameters = ", ".join(f"a{k}" for k in range(count))
    if not read and taken == parameters:
        return call.bound
    return flat.function(
        f"def run({parameters}):\n" + "".join(f"    {line}\n" for line in (*read, f"return bound({taken})")), names
    )
