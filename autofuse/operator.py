"""A fused function inside torch.compile and torch.export: one opaque operator, `autofuse::call`, with a fake kernel.

The graph holds the function's name, its tensors, and the other arguments as text. What the operator cannot be leaves the
function's own operations in the graph: where an input needs a gradient, under autocast, with an argument that is neither
tensor nor number, where an output shows an input's memory, and where the function reads tensors from outside.

What runs in `in_graph` and below it is traced by Dynamo: it holds to what Dynamo can follow.
"""

from __future__ import annotations

import ast
import importlib
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import InputError

if TYPE_CHECKING:
    from .dispatch import Fused

SCHEMA = "call(str function, Tensor[] tensors, Scalar[] numbers, str[] arguments) -> Tensor[]"
TENSOR, NUMBER = "tensor", "number"  # what stands for the next one among a call's arguments
INLINE: tuple[Any, ...] = ("inline",)
KEYWORD = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)

_known: weakref.WeakValueDictionary[str, Fused] = weakref.WeakValueDictionary()
_in_graphs: dict[str, Fused] = {}  # a graph outlives whoever made it
_structures: dict[tuple[str, tuple[str, ...]], tuple[Any, ...]] = {}
_library = torch.library.Library("autofuse", "DEF")
_library.define(SCHEMA)


def register(fused: Fused) -> str:
    """What a graph calls a fused function. Another process finds it there by its module and name."""
    module, name = getattr(fused.fn, "__module__", ""), getattr(fused.fn, "__qualname__", type(fused.fn).__name__)
    handle = f"{module}:{name}#{id(fused)}"
    _known[handle] = fused
    return handle


def _find(handle: str) -> Fused:
    fused = _in_graphs.get(handle)
    if fused is not None:
        return fused
    from .dispatch import Fused

    module, _, name = handle.partition("#")[0].partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not isinstance(found, Fused):
        raise InputError(
            f"a graph calls the fused function {name} of {module}, which is not there: only a function that is decorated with "
            "autofuse.fuse at the top of a module can be called from a saved graph"
        )
    _in_graphs[handle] = found
    return found


def _arguments(tensors: Sequence[torch.Tensor], numbers: Sequence[Any], texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments from what the graph holds."""
    left, more = iter(tensors), iter(numbers)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        named = KEYWORD.fullmatch(text)
        if named:
            text = named.group(2)
        value = next(left) if text == TENSOR else next(more) if text == NUMBER else ast.literal_eval(text)
        if named:
            kwargs[named.group(1)] = value
        else:
            args.append(value)
    return args, kwargs


def _call(function: str, tensors: list[torch.Tensor], numbers: list[Any], arguments: list[str]) -> list[torch.Tensor]:
    args, kwargs = _arguments(tensors, numbers, arguments)
    return list(torch.utils._pytree.tree_leaves(_find(function)(*args, **kwargs)))


def _call_batched(function: str, tensors: list[torch.Tensor], numbers: list[Any], arguments: list[str]) -> list[torch.Tensor]:
    """A call under vmap, which is a transform of the function's own operations."""
    args, kwargs = _arguments(tensors, numbers, arguments)
    return list(torch.utils._pytree.tree_leaves(_find(function).fn(*args, **kwargs)))


def _call_fake(function: str, tensors: list[torch.Tensor], numbers: list[Any], arguments: list[str]) -> list[torch.Tensor]:
    """What a call gives, without values: the function's own operations on fake tensors."""
    args, kwargs = _arguments(tensors, numbers, arguments)
    if function in _known:
        _in_graphs[function] = _known[function]
    try:
        result = _find(function).fn(*args, **kwargs)
    except Exception:  # what is wrong with the call, or a tensor from outside, shows where its operations are traced
        _structures[function, tuple(arguments)] = INLINE
        return []
    leaves = torch.utils._pytree.tree_leaves(result)
    structure = _structure(result, iter(range(len(leaves))))
    mine = {_memory(t) for t in tensors}
    if not all(isinstance(t, torch.Tensor) for t in leaves):
        structure, leaves = INLINE, []
    elif any(_memory(t) in mine for t in leaves) or len({_memory(t) for t in leaves}) < len(leaves):
        structure = INLINE  # an operator's outputs have memory of their own
    _structures[function, tuple(arguments)] = structure
    return [t.clone() for t in leaves] if structure is INLINE else leaves


def _memory(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _structure(result: Any, leaves: Any) -> tuple[Any, ...]:
    """How outputs nest, as nested tuples that Dynamo can hold as a constant."""
    if isinstance(result, torch.Tensor):
        return ("tensor", next(leaves))
    if type(result) in (tuple, list):
        parts = [_structure(r, leaves) for r in result]
        return INLINE if INLINE in parts else (type(result).__name__, *parts)
    if type(result) is dict and all(isinstance(k, str) for k in result):
        named = [(k, _structure(result[k], leaves)) for k in result]
        return INLINE if any(s is INLINE for _, s in named) else ("dict", *named)
    return INLINE


def structure_of(function: str, arguments: list[str]) -> tuple[Any, ...]:
    """How the outputs of the call that was just traced nest."""
    return _structures.get((function, tuple(arguments)), INLINE)


structure_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without its import


def _nested(structure: tuple[Any, ...], leaves: Sequence[torch.Tensor]) -> Any:
    kind = structure[0]
    if kind == "tensor":
        return leaves[structure[1]]
    if kind == "dict":
        return {k: _nested(s, leaves) for k, s in structure[1:]}
    parts = [_nested(s, leaves) for s in structure[1:]]
    return tuple(parts) if kind == "tuple" else parts


def _copied(result: Any, out: Any) -> Any:
    """The outputs of a call, left in `out`."""
    if isinstance(out, torch.Tensor):
        out.copy_(result)
    else:
        for t, y in zip(torch.utils._pytree.tree_leaves(out), torch.utils._pytree.tree_leaves(result), strict=True):
            t.copy_(y)
    return out


def below_autograd() -> bool:
    """Whether this thread is inside an operator's kernel, where nothing can be traced."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded("AutogradOther"))


def in_graph(fused: Fused, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call that is being traced into a graph."""
    out = kwargs.get("out") if not fused.own_out else None
    if out is not None:
        return _copied(in_graph(fused, args, {k: v for k, v in kwargs.items() if k != "out"}), out)
    tensors, numbers, texts = [], [], []
    fits = not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    for name, a in [*[("", a) for a in args], *kwargs.items()]:
        if isinstance(a, torch.Tensor):
            text = TENSOR
            tensors.append(a)
            if torch.is_grad_enabled() and a.requires_grad:
                fits = False
        elif isinstance(a, (bool, int, float)):
            text = NUMBER  # not spelled out: Dynamo may have made it symbolic
            numbers.append(a)
        elif a is None or isinstance(a, str):
            text = f"{a!r}"
        else:
            text, fits = "", False
        texts.append(f"{name}={text}" if name else text)
    if not fits or not tensors:
        return fused.fn(*args, **kwargs)
    leaves = torch.ops.autofuse.call.default(fused.handle, tensors, numbers, texts)
    structure = structure_of(fused.handle, texts)
    if structure[0] == "inline":
        return fused.fn(*args, **kwargs)
    return _nested(structure, leaves)


_library.impl("call", _call, "CompositeExplicitAutograd")
_library.impl("call", _call_batched, "FuncTorchBatched")
torch.library.register_fake("autofuse::call", _call_fake, lib=_library)
