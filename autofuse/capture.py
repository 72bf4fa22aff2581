"""Tensors and numbers that a function reads from outside its arguments, found by where they live.

A trace freezes what a closure, a global, a default or `self` holds at that moment. So every tensor is looked for by
path and read again at each call, and every number is watched: another value is another chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

Getter = Callable[[], Any]
_NUMBERS = (bool, int, float, str)
_DEPTH = 3


@dataclass(frozen=True)
class Watch:
    """A number that the trace has baked in: where it is read, and what it was."""

    get: Getter
    value: Any

    def same(self) -> bool:
        """Whether it still has the value that was traced."""
        now = self.get()
        return type(now) is type(self.value) and (now == self.value or now is self.value)


def _cell(cell: CellType) -> Getter:
    def get() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return None

    return get


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= _names(const)
    return found


def _functions(fn: Any, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """The function and the plain functions that it reaches by name or closure, a few levels down."""
    seen = set() if seen is None else seen
    fn = getattr(fn, "fn", fn)
    if isinstance(fn, MethodType):
        fn = fn.__func__
    fn = getattr(fn, "__wrapped__", fn)
    if not isinstance(fn, FunctionType) or id(fn) in seen or (fn.__module__ or "").split(".")[0] in ("torch", "autofuse"):
        return
    seen.add(id(fn))
    yield fn
    reached = [fn.__globals__.get(n) for n in _names(fn.__code__)]
    reached += [_cell(c)() for c in fn.__closure__ or ()]
    for other in reached:
        if isinstance(other, (FunctionType, MethodType)):
            yield from _functions(other, seen)


def roots(fn: Any, args: Sequence[Any]) -> Iterator[Getter]:
    """Where a function may read from: closures, globals it names, defaults, `self`, arguments that are no tensors."""
    bound = getattr(fn, "__self__", None)
    if bound is not None:
        yield _always(bound)
    for f in _functions(fn):
        for cell in f.__closure__ or ():
            yield _cell(cell)
        space = f.__globals__
        for name in sorted(_names(f.__code__)):
            if name in space:
                yield partial(space.get, name)
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            yield _always(value)
    for a in args:
        if not isinstance(a, (torch.Tensor, *_NUMBERS, type(None))):
            yield _always(a)


def _inside(get: Getter, depth: int) -> Iterator[tuple[Getter, Any]]:
    """A place and the places inside it: attributes of objects, parameters and buffers of modules, items of containers."""
    value = get()
    yield get, value
    if depth == 0 or value is None or isinstance(value, (torch.Tensor, type, FunctionType, *_NUMBERS)):
        return
    if isinstance(value, (list, tuple)):
        for k in range(min(len(value), 64)):
            yield from _inside(_under(get, k), depth - 1)
    elif isinstance(value, dict):
        for k in list(value)[:64]:
            yield from _inside(_under(get, k), depth - 1)
    elif hasattr(value, "__dict__") and not hasattr(value, "__spec__"):
        names = list(vars(value))
        if isinstance(value, torch.nn.Module):
            names += [*value._parameters, *value._buffers, *value._modules]
        for n in names:
            if not n.startswith("__"):
                yield from _inside(_attribute(get, n), depth - 1)


def _always(value: Any) -> Getter:
    return lambda: value


def _under(get: Getter, key: Any) -> Getter:
    return lambda: _item(get(), key)


def _attribute(get: Getter, name: str) -> Getter:
    return lambda: getattr(get(), name, None)


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (LookupError, TypeError):
        return None


def find(fn: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Getter]:
    """For each tensor that a trace captured, how to read it again; one made in the function itself is a constant."""
    wanted = {id(t): k for k, t in enumerate(tensors)}
    found: dict[int, Getter] = {}
    if wanted:
        for root in roots(fn, args):
            for get, value in _inside(root, _DEPTH):
                if id(value) in wanted:
                    found.setdefault(wanted[id(value)], get)
    return [found.get(k, _always(t)) for k, t in enumerate(tensors)]


def watches(fn: Any, args: Sequence[Any]) -> list[Watch]:
    """The numbers in closures and in globals that the function names."""
    made = []
    for f in _functions(fn):
        places: list[Getter] = [_cell(c) for c in f.__closure__ or ()]
        space = f.__globals__
        places += [partial(space.get, name) for name in sorted(_names(f.__code__)) if name in space]
        made += [Watch(get, get()) for get in places if isinstance(get(), _NUMBERS)]
    bound = getattr(fn, "__self__", None)
    if bound is not None and hasattr(bound, "__dict__"):
        for n, value in list(vars(bound).items()):
            if isinstance(value, _NUMBERS):
                made.append(Watch(partial(getattr, bound, n, None), value))
    return made
