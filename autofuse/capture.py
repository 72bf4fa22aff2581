"""Tensors and numbers that a function reads from outside its arguments, found by where they live.

A trace freezes what a closure, a global, a default or `self` holds at that moment. So every tensor is looked for by
path and read again at each call, and every number is watched: another value is another chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

Getter = Callable[[], Any]
_NUMBERS = (bool, int, float, str)
_DEPTH = 6
_ITEMS = 512  # of one container
_WATCHES = 256  # a function that reads more from outside is watched no further


@dataclass(frozen=True)
class Watch:
    """What a trace has baked in: where it is read, and what it was. Numbers by their spelling (0.0 is not -0.0), a
    container by its length, anything else by identity."""

    get: Getter
    value: Any

    def same(self) -> bool:
        """Whether it still is what was traced."""
        now, then = self.get(), self.value
        if now is then:
            return True
        if type(now) is not type(then) or not isinstance(then, _NUMBERS):
            return False
        return repr(now) == repr(then) if isinstance(then, float) else bool(now == then)


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


def _function(fn: Any) -> FunctionType | None:
    """The plain function behind a method, a module, a callable object, a wrapper or a fused function."""
    fn = getattr(fn, "fn", fn)
    if isinstance(fn, torch.nn.Module):
        fn = type(fn).forward
        fn = getattr(fn, "fn", fn)
    if isinstance(fn, MethodType):
        fn = getattr(fn.__func__, "fn", fn.__func__)
    fn = getattr(fn, "__wrapped__", fn)
    if not isinstance(fn, FunctionType) and callable(fn) and not isinstance(fn, type):
        fn = type(fn).__call__
    if not isinstance(fn, FunctionType) or (fn.__module__ or "").split(".")[0] in ("torch", "autofuse"):
        return None
    return fn


class _Reach:
    """Everything that a function may read from outside its arguments: places, with what is there now."""

    def __init__(self, fn: Any, args: Sequence[Any]) -> None:
        self.functions: dict[int, FunctionType] = {}
        self.places: list[tuple[Getter, Any]] = []
        self._seen: set[int] = set()
        self._waiting: list[tuple[Getter, Any, int]] = []
        self.names: set[str] = set()
        own = getattr(fn, "fn", fn)
        bound = getattr(own, "__self__", None)
        if bound is None and not isinstance(own, FunctionType):
            bound = own  # a module, a callable object
        self._enter(fn)
        for value in ([bound] if bound is not None else []) + [a for a in args if not isinstance(a, (torch.Tensor, *_NUMBERS))]:
            self._waiting.append((_always(value), value, _DEPTH))
        while self._waiting:
            self._visit(*self._waiting.pop(0))

    def _enter(self, fn: Any) -> None:
        f = _function(fn)
        if f is None or id(f) in self.functions:
            return
        self.functions[id(f)] = f
        names = _names(f.__code__)
        self.names |= names
        for cell in f.__closure__ or ():
            self._wait(_cell(cell))
        for name in sorted(names):
            if name in f.__globals__:
                self._wait(partial(f.__globals__.get, name))
        self._wait(_attribute(_always(f), "__defaults__"))
        self._wait(_attribute(_always(f), "__kwdefaults__"))

    def _wait(self, get: Getter, depth: int = _DEPTH) -> None:
        self._waiting.append((get, get(), depth))

    def _visit(self, get: Getter, value: Any, depth: int) -> None:
        if isinstance(value, ModuleType):
            return
        self.places.append((get, value))
        if isinstance(value, (torch.Tensor, type, torch.dtype, *_NUMBERS)) or value is None:
            return
        if _function(value) is not None:
            self._enter(value)
        if depth == 0 or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (list, tuple)):
            for k in range(min(len(value), _ITEMS)):
                self._wait(_under(get, k), depth - 1)
        elif isinstance(value, dict):
            for key in list(value)[:_ITEMS]:
                self._wait(_under(get, key), depth - 1)
        elif not isinstance(value, FunctionType):
            for name in sorted(self._attributes(value)):
                self._wait(_attribute(get, name), depth - 1)

    def _attributes(self, value: Any) -> set[str]:
        """The instance's own attributes that the functions name (a module's parameters and children among them)."""
        mine = set(getattr(value, "__dict__", ()))
        for slots in (getattr(t, "__slots__", ()) for t in type(value).__mro__):
            mine |= {slots} if isinstance(slots, str) else set(slots)
        if isinstance(value, torch.nn.Module):
            mine |= {*value._parameters, *value._buffers, *value._modules}
            if isinstance(value, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
                return mine
            if (type(value).__module__ or "").startswith("torch."):
                return mine - {n for n in mine if n.startswith("_")}
        return {n for n in mine if n in self.names and not n.startswith("__")}


def find(fn: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Getter]:
    """For each tensor that a trace captured, how to read it again; one made in the function itself is a constant."""
    wanted = {id(t): k for k, t in enumerate(tensors)}
    found: dict[int, Getter] = {}
    if wanted:
        for get, value in _Reach(fn, args).places:
            if id(value) in wanted:
                found.setdefault(wanted[id(value)], get)
    return [found.get(k, _always(t)) for k, t in enumerate(tensors)]


def watches(fn: Any, args: Sequence[Any]) -> list[Watch]:
    """What the function reads from outside and a trace bakes in: numbers, functions, dtypes, what is None, lengths.

    Of several places that hold one tensor, each is watched to go on holding the same as the first.
    """
    made: list[Watch] = []
    first: dict[int, Getter] = {}
    for get, value in _Reach(fn, args).places:
        if isinstance(value, torch.Tensor):
            if id(value) in first:
                made.append(Watch(_alike(first[id(value)], get), True))
            else:
                first[id(value)] = get
        elif isinstance(value, (list, tuple, dict)):
            made.append(Watch(_length(get), len(value)))
        elif isinstance(value, (*_NUMBERS, torch.dtype)) or value is None or callable(value):
            made.append(Watch(get, value))
        elif type(value).__module__ == "numpy":
            made.append(Watch(_spelled(get), repr(value)))
    return [*made[:_WATCHES], Watch(torch.get_default_dtype, torch.get_default_dtype())]


def _alike(one: Getter, other: Getter) -> Getter:
    return lambda: one() is other()


def _length(get: Getter) -> Getter:
    def length() -> int:
        value = get()
        return len(value) if isinstance(value, (list, tuple, dict)) else -1

    return length


def _spelled(get: Getter) -> Getter:
    return lambda: repr(get())


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
