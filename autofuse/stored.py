"""Chains of a store as a function: what is tuned, or run, without the source that they were traced from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import ops
from .chain import Chain
from .errors import InputError
from .reference import evaluate
from .traced import Binding, Traced, sizes_of


class Stored:
    """A function of tensors, in the order of the chain's inputs, which PyTorch's own operations compute: the first of the
    chains that the tensors' dtypes and static extents fit.

    It returns the one output, or a tuple of them. Raises InputError where no chain fits.
    """

    def __init__(self, chains: Sequence[Chain], name: str) -> None:
        self.name = self.__name__ = name
        self._traced = tuple(_bound(chain) for chain in chains)

    def traced(self, inputs: Sequence[torch.Tensor]) -> Traced:
        """The chain for these tensors, each input bound by its position, so that no trace is made."""
        for traced in self._traced:
            if _fits(traced, inputs):
                return traced
        given = ", ".join(f"{tuple(t.shape)} {t.dtype}" if isinstance(t, torch.Tensor) else repr(t) for t in inputs)
        takes = "; or ".join(dict.fromkeys(map(_takes, self._traced)))
        raise InputError(
            f"{self.name} in the store takes {takes}, not {given}: pass such tensors in this order, or tune it for these"
        )

    def __call__(self, *inputs: torch.Tensor) -> Any:
        traced = self.traced(inputs)
        sizes = sizes_of(traced, inputs)
        assert sizes is not None
        return traced.unflatten(evaluate(traced.chain, inputs, sizes))


def _bound(chain: Chain) -> Traced:
    shown: Any = 0 if len(chain.outputs) == 1 else (0,) * len(chain.outputs)
    return Traced(chain, tuple(Binding(k) for k in range(chain.num_inputs)), torch.utils._pytree.tree_flatten(shown)[1])


def _fits(traced: Traced, inputs: Sequence[Any]) -> bool:
    values = traced.chain.inputs
    if len(inputs) != len(values) or not all(isinstance(t, torch.Tensor) for t in inputs):
        return False
    same = all(ops.TORCH[v.dtype] == t.dtype for v, t in zip(values, inputs, strict=True))
    return same and sizes_of(traced, inputs) is not None


def _takes(traced: Traced) -> str:
    return ", ".join(f"({', '.join(map(str, v.shape))}) {v.dtype}" for v in traced.chain.inputs)


def traced_of(fn: Callable[..., Any], args: Sequence[Any]) -> Traced:
    """What a trace of `fn` at these arguments gives; of chains of a store, what they already are. Raises TraceError, and
    InputError where no chain of a store fits."""
    if isinstance(fn, Stored):
        return fn.traced(args)
    from .trace import trace  # a third of a second of sympy, for whoever traces at all

    return trace(fn, args)
