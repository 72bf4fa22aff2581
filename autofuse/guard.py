"""The guard of a prepared call, as one flat function: is this the call that was prepared, with how many rows, and go.

A guard covers dtype, device, trailing extents, strides, alignment and what the function reads from outside; rows are free
and look up what is bound to them. torch's own TensorGuards look at tensors where they are present: beside metadata they see
autocast, transforms, inference mode and tracers, which all change a tensor's dispatch keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from . import flat
from .capture import Place, Watch, constant, still

MISS = object()
"""What a guard answers for a call that it was not made for."""

Run = Callable[..., Any]


def never(*args: Any) -> Any:
    """The guard of a function without a prepared call."""
    return MISS


def watched() -> bool:
    """Whether something looks on that must see the function's own operations: autocast, a transform, forward-mode
    gradients, a tracer, a dispatch mode."""
    return (
        torch._C._is_any_autocast_enabled()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def meta(t: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor that a prepared call depends on, rows too."""
    return (t.dtype, t.shape, t.stride(), t.data_ptr() & 15, t.device)


class Guarded:
    """The prepared calls that differ in their rows alone. `run(*args)` runs one of them, or answers MISS.

    args: the call's; inputs: the chain's, each an argument (its position) or read from a place
    dims: the chain's shape of each input, where a name is a row count
    """

    def __init__(
        self, args: Sequence[Any], inputs: Sequence[torch.Tensor], positions: Sequence[int | None], places: Sequence[Place | None],
        dims: Sequence[Sequence[int | str]], watches: Sequence[Watch],
    ) -> None:  # fmt: skip
        self._bound: dict[Any, Run] = {}
        names: dict[str, Any] = {"MISS": MISS, "forward": forward_ad, "modes": torch._C._len_torch_dispatch_stack}
        names |= {"get": self._bound.get, "grad": torch.is_grad_enabled}
        texts = [f"a{p}" if p is not None else f"c{k}" for k, p in enumerate(positions)]
        shapes = dict(zip(texts, dims, strict=True))
        tensors: dict[str, torch.Tensor] = {f"a{k}": a for k, a in enumerate(args) if isinstance(a, torch.Tensor)}
        tensors |= dict(zip(texts, inputs, strict=True))
        sizes, strides = [], []
        keys = []
        for text, t in tensors.items():
            shape = shapes.get(text, t.shape)
            free = [not isinstance(d, int) for d in shape]
            sizes.append([None if f else n for f, n in zip(free, t.shape, strict=True)])
            open_strides = t.dim() > 2 and any(free)
            strides.append([None if open_strides and d < t.dim() - 1 else s for d, s in enumerate(t.stride())])
            if any(free):
                keys.append(f"{text}.shape")
            if open_strides:
                keys.append(f"{text}.stride()")
        read = [f"c{k} = {place.text(names)}" for k, place in enumerate(places) if place is not None]
        conditions = [_tensors(tensors, sizes, strides, names)]
        if any(t.requires_grad for t in tensors.values()):
            conditions.append("not grad()")
        for k, a in enumerate(args):
            if not isinstance(a, torch.Tensor):
                conditions.append(still(names, f"a{k}", a))
        conditions += [w.text(names) for w in watches]
        pointers = " | ".join(f"{text}.data_ptr()" for text in tensors)
        parameters = "".join(f"a{k}=MISS, " for k in range(len(args)))
        body = [
            "if rest or forward._current_level >= 0 or modes(): return MISS",
            "try:",
            *(f"    {line}" for line in read),
            f"    if not ({' and '.join(conditions)}): return MISS",
            f"    if ({pointers}) & 15: return MISS",
            f"    found = get({_tuple(keys)})",
            "except (AttributeError, LookupError, TypeError, ValueError):",
            "    return MISS",
            f"return MISS if found is None else found({', '.join(texts)})",
        ]
        text = f"def run({parameters}*rest):\n" + "".join(f"    {line}\n" for line in body)
        self.run = flat.function(text, names)
        self._key_of = flat.function(text, names | {"get": lambda key: lambda *inputs: key})

    def add(self, args: Sequence[Any], run: Run, most: int) -> bool:
        """Bind a run of the chain's inputs to these row counts, where a call with these arguments passes the guard; says
        whether it does."""
        key = self._key_of(*args)
        if key is MISS:
            return False
        if len(self._bound) >= most:
            self._bound.clear()
        self._bound[key] = run
        return True


def _tuple(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"({', '.join(keys)})"


def _tensors(
    tensors: dict[str, torch.Tensor], sizes: Any, strides: Any,
    names: dict[str, Any],
) -> str:  # fmt: skip
    """The condition that tensors are as these are, but for sizes and strides of None."""
    from torch._C._dynamo import guards

    if hasattr(guards, "TensorGuards"):
        made = guards.TensorGuards(*tensors.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        names["check"] = made.check
        return f"check({', '.join(tensors)})"
    names["watched"], names["strided"] = watched, torch.strided
    made_of = []
    for (text, t), size, stride in zip(tensors.items(), sizes, strides, strict=True):
        made_of += [
            f"type({text}) is {constant(names, type(t))}",
            f"{text}.dtype is {constant(names, t.dtype)}",
            f"{text}.device == {constant(names, t.device)}",
            f"{text}.layout is strided",
            f"{text}.requires_grad is {t.requires_grad}",
            f"{text}.is_inference() is {t.is_inference()}",
            f"not {text}.is_neg()",
            f"{text}.dim() == {t.dim()}",
            *(f"{text}.shape[{d}] == {n}" for d, n in enumerate(size) if n is not None),
            *(f"{text}.stride({d}) == {n}" for d, n in enumerate(stride) if n is not None),
        ]
    return " and ".join(["not watched()", *made_of])
