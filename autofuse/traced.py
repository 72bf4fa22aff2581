"""A chain with what binds it to calls: made by a trace, used without one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .chain import Chain
from .errors import TraceError


@dataclass(frozen=True)
class Binding:
    """Where an input of the chain comes from: an argument's position, or a tensor that the function closes over."""

    position: int | None
    tensor: torch.Tensor | None = None


@dataclass(frozen=True)
class Traced:
    """A chain with what binds it to a call: one Binding an input, how outputs nest, which sizes must be equal.

    `lines` says for each operation where the function first calls it ("file:line"), for messages.
    """

    chain: Chain
    bindings: tuple[Binding, ...]
    spec: Any
    lines: Mapping[str, str] = field(default_factory=dict, compare=False)

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The outputs nested as the function returns them."""
        return torch.utils._pytree.tree_unflatten(list(outputs), self.spec)


def sizes_of(traced: Traced, args: Sequence[Any]) -> dict[str, int] | None:
    """The row symbols' sizes at these arguments, or None where the chain does not fit them."""
    sizes: dict[str, int] = {}
    for value, bound in zip(traced.chain.inputs, traced.bindings, strict=True):
        tensor: Any = bound.tensor if bound.position is None else args[bound.position]
        if len(tensor.shape) != len(value.shape):
            return None
        for dim, n in zip(value.shape, tensor.shape, strict=True):
            if isinstance(dim, int):
                if dim != n:
                    return None
            elif sizes.setdefault(dim, n) != n:
                return None
    return sizes


def flatten_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The positional arguments of a call, defaults filled in. Raises what the call itself would: TypeError."""
    if not kwargs:
        return tuple(args)
    signature = inspect.signature(fn)
    bound = signature.bind(*args, **kwargs)
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    only = [k for k in kwargs if kinds.get(k) is not inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if only:  # what cannot be passed by position
        names = ", ".join(only)
        raise TraceError(f"{getattr(fn, '__name__', fn)} got {names} as keyword-only: make it an ordinary parameter")
    bound.apply_defaults()
    return bound.args
