"""Tensors and numbers that a function reads from outside its arguments, found by where they live.

A trace freezes what a closure, a global, a default or `self` holds at that moment. So every tensor is looked for by
path and read again at each call, and every number is watched: another value is another chain.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_NUMBERS = (bool, int, float, str)
_DEPTH = 6
_ITEMS = 512  # of one container
_WATCHES = 256  # a function that reads more from outside is watched no further


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is read: a root ("value", "cell", "global" of a dictionary, "call") or a step ("attribute", "item")
    from another place."""

    kind: str
    of: Any
    key: Any = None

    def __call__(self) -> Any:
        """What is there now; None where nothing is."""
        try:
            return self._read()
        except (AttributeError, LookupError, TypeError, ValueError):
            return None

    def _read(self) -> Any:
        match self.kind:
            case "value":
                return self.of
            case "cell":
                return self.of.cell_contents
            case "global":
                return self.of[self.key]
            case "call":
                return self.of()
            case "attribute":
                return getattr(self.of._read(), self.key)
            case _:
                return self.of._read()[self.key]

    def text(self, names: dict[str, Any]) -> str:
        """An expression that reads it, over `names`, to which it adds its own. It may raise where nothing is there."""
        match self.kind:
            case "value":
                return constant(names, self.of)
            case "cell":
                return f"{constant(names, self.of)}.cell_contents"
            case "global":
                return f"{constant(names, self.of)}[{constant(names, self.key)}]"
            case "call":
                return f"{constant(names, self.of)}()"
            case "attribute":
                base = self.of.text(names)
                plain = self.key.isidentifier() and not keyword.iskeyword(self.key)
                return f"{base}.{self.key}" if plain else f"getattr({base}, {constant(names, self.key)})"
            case _:
                return f"{self.of.text(names)}[{constant(names, self.key)}]"


def constant(names: dict[str, Any], value: Any) -> str:
    """The name under which `names` holds this very object, a new one where it does not yet."""
    for name, held in names.items():
        if held is value:
            return name
    name = f"k{len(names)}"
    names[name] = value
    return name


def equal(now: Any, then: Any) -> bool:
    """Numbers by their spelling (0.0 is not -0.0), anything else by identity."""
    if now is then:
        return True
    if type(now) is not type(then) or not isinstance(then, _NUMBERS):
        return False
    return repr(now) == repr(then) if isinstance(then, float) else bool(now == then)


def still(names: dict[str, Any], now: str, then: Any) -> str:
    """An expression that says whether `now` is `equal` to what was there."""
    name = constant(names, then)
    if isinstance(then, _NUMBERS):
        return f"({now} is {name} or {constant(names, equal)}({now}, {name}))"
    return f"{now} is {name}"


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple, dict)) else -1


@dataclass(frozen=True, eq=False)
class Watch:
    """What a trace has baked in: where it is read, and what it was: "same" (a number by its spelling, anything else by
    identity), the "length" of a container, the "repr" of an array, or what another place holds ("alike")."""

    place: Place
    value: Any
    by: str = "same"

    def same(self) -> bool:
        """Whether it still is what was traced."""
        now = self.place()
        match self.by:
            case "length":
                return bool(_length(now) == self.value)
            case "repr":
                return bool(repr(now) == self.value)
            case "alike":
                return now is self.value()
            case _:
                return equal(now, self.value)

    def text(self, names: dict[str, Any]) -> str:
        """An expression that says the same; it may raise where it is not."""
        now = self.place.text(names)
        if self.by == "alike":
            return f"{now} is {self.value.text(names)}"
        if self.by == "same":
            return still(names, now, self.value)
        return f"{constant(names, _length if self.by == 'length' else repr)}({now}) == {constant(names, self.value)}"


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
        self.places: list[tuple[Place, Any]] = []
        self._seen: set[int] = set()
        self._waiting: list[tuple[Place, Any, int]] = []
        self.names: set[str] = set()
        own = getattr(fn, "fn", fn)
        bound = getattr(own, "__self__", None)
        if bound is None and not isinstance(own, FunctionType):
            bound = own  # a module, a callable object
        self._enter(fn)
        for value in ([bound] if bound is not None else []) + [a for a in args if not isinstance(a, (torch.Tensor, *_NUMBERS))]:
            self._waiting.append((_value(value), value, _DEPTH))
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
            self._wait(Place("cell", cell))
        for name in sorted(names):
            if name in f.__globals__:
                self._wait(Place("global", f.__globals__, name))
        self._wait(Place("attribute", _value(f), "__defaults__"))
        self._wait(Place("attribute", _value(f), "__kwdefaults__"))

    def _wait(self, get: Place, depth: int = _DEPTH) -> None:
        self._waiting.append((get, get(), depth))

    def _visit(self, get: Place, value: Any, depth: int) -> None:
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
                self._wait(Place("item", get, k), depth - 1)
        elif isinstance(value, dict):
            for key in list(value)[:_ITEMS]:
                self._wait(Place("item", get, key), depth - 1)
        elif not isinstance(value, FunctionType):
            for name in sorted(self._attributes(value)):
                self._wait(Place("attribute", get, name), depth - 1)

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


def find(fn: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Place]:
    """For each tensor that a trace captured, how to read it again; one made in the function itself is a constant."""
    wanted = {id(t): k for k, t in enumerate(tensors)}
    found: dict[int, Place] = {}
    if wanted:
        for get, value in _Reach(fn, args).places:
            if id(value) in wanted:
                found.setdefault(wanted[id(value)], get)
    return [found.get(k, _value(t)) for k, t in enumerate(tensors)]


def watches(fn: Any, args: Sequence[Any]) -> list[Watch]:
    """What the function reads from outside and a trace bakes in: numbers, functions, dtypes, what is None, lengths.

    Of several places that hold one tensor, each is watched to go on holding the same as the first.
    """
    made: list[Watch] = []
    first: dict[int, Place] = {}
    for get, value in _Reach(fn, args).places:
        if isinstance(value, torch.Tensor):
            if id(value) in first:
                made.append(Watch(get, first[id(value)], "alike"))
            else:
                first[id(value)] = get
        elif isinstance(value, (list, tuple, dict)):
            made.append(Watch(get, len(value), "length"))
        elif isinstance(value, (*_NUMBERS, torch.dtype)) or value is None or callable(value):
            made.append(Watch(get, value))
        elif type(value).__module__ == "numpy":
            made.append(Watch(get, repr(value), "repr"))
    return [*made[:_WATCHES], Watch(Place("call", torch.get_default_dtype), torch.get_default_dtype())]


def _value(value: Any) -> Place:
    return Place("value", value)
