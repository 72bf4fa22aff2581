"""A chain of the store as a function: what is tuned, or run, without the source that it was traced from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .chain import Chain
from .errors import InputError
from .reference import evaluate
from .traced import Binding, Traced, sizes_of


class StoredChain:
    """A function of a chain's inputs, in their order, which PyTorch's own operations compute.

    It returns the one output, or a tuple of them. `traced` binds each input by its position, so that no trace is made.
    """

    def __init__(self, chain: Chain, name: str) -> None:
        self.chain, self.name = chain, name
        self.__name__ = name
        shown: Any = 0 if len(chain.outputs) == 1 else (0,) * len(chain.outputs)
        spec = torch.utils._pytree.tree_flatten(shown)[1]
        self.traced = Traced(chain, tuple(Binding(k) for k in range(chain.num_inputs)), spec)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        sizes = sizes_of(self.traced, inputs) if len(inputs) == self.chain.num_inputs else None
        if sizes is None:
            given = ", ".join(str(tuple(t.shape)) for t in inputs)
            takes = ", ".join(f"({', '.join(map(str, v.shape))})" for v in self.chain.inputs)
            raise InputError(f"{self.name} takes tensors of {takes}, not of {given}: pass the chain's inputs in their order")
        return self.traced.unflatten(evaluate(self.chain, inputs, sizes))


def traced_of(fn: Callable[..., Any], args: Sequence[Any]) -> Traced:
    """What a trace of `fn` at these arguments gives; of a chain of the store, what it already is. Raises TraceError."""
    if isinstance(fn, StoredChain):
        return fn.traced
    from .trace import trace

    return trace(fn, args)
