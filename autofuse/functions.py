"""The user's function: found by its file or module, and its parameters matched with what is said about arguments."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from .errors import InputError
from .inputs import ArgSpec, ScalarSpec, TensorSpec


def load_function(target: str, folder: Path) -> Callable[..., Any]:
    """The function that PATH.py:NAME or PACKAGE.MODULE:NAME means; paths and modules are looked for from `folder`.

    Raises InputError where there is none, or where its file fails.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{target!r} names no function: write path.py:function or package.module:function")
    found: Any = _import_file(folder / Path(place).expanduser()) if place.endswith(".py") else _import(place, folder)
    known = sorted(k for k, v in vars(found).items() if callable(v) and getattr(v, "__module__", "") == found.__name__)
    for part in name.split("."):
        if not hasattr(found, part):
            has = f"it has {', '.join(known)}" if known else "it defines none"
            raise InputError(f"{place} has no function {name!r}: {has}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{name} in {place} is a {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def _import_file(path: Path) -> Any:
    path = path.absolute()
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    name = f"_autofuse_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _search(path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {_told(error)}") from error
    return module


def _import(place: str, folder: Path) -> Any:
    _search(folder.absolute())
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise InputError(f"the module {place} cannot be imported: {_told(error)}") from error


def _search(folder: Path) -> None:
    """As if the user's file were run from there: it may import what lies beside it, now or when it is called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and "importlib" not in frames[-1].filename else ""
    return f"{type(error).__name__}: {error}{at}"


def bind(fn: Callable[..., Any], args: Mapping[str, ArgSpec], how: str = "--arg") -> tuple[ArgSpec, ...]:
    """The arguments in the order of the function's parameters, its defaults between them. Raises InputError.

    `how` is how the user gives one: an option of the command, or a key of a job file.
    """
    plain = getattr(fn, "fn", fn)
    name = getattr(plain, "__name__", str(plain))
    try:
        parameters = inspect.signature(plain).parameters
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} has no signature that can be read: wrap it in a plain function") from error
    takes = ", ".join(parameters) or "nothing"
    for given in args:
        if given not in parameters:
            raise InputError(f"{name} has no parameter {given!r}: it takes {takes}")
    order: list[ArgSpec] = []
    waiting: list[Any] = []
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(f"{name} takes *{key}: wrap it in a function whose parameters have names")
        if key not in args:
            if parameter.default is parameter.empty:
                raise InputError(f"{name} needs an argument {key!r}: give it with {how} {key}=...")
            if parameter.kind is not parameter.KEYWORD_ONLY:
                waiting.append(parameter.default)
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            raise InputError(f"{key} of {name} can only be given by keyword: wrap it in a function where it need not be")
        order += [ScalarSpec(default) for default in waiting]
        waiting.clear()
        spec = args[key]
        if parameter.annotation in NUMBERS and whole_number(spec):
            raise InputError(f"{key} of {name} is a Python number: {number_hint(key, spec)}")
        order.append(spec)
    return tuple(order)


NUMBERS = (int, float, "int", "float")
"""Annotations of a parameter that is no tensor."""


def whole_number(spec: ArgSpec) -> bool:
    """Whether an argument was written as one whole number, which is an extent."""
    return isinstance(spec, TensorSpec) and spec.dtype is None and len(spec.dims) == 1 and isinstance(spec.dims[0], int)


def number_hint(key: str, spec: ArgSpec) -> str:
    """How a whole number is written that should be no extent."""
    n = cast(TensorSpec, spec).dims[0]
    return f"{key}={n} is a tensor of {n} elements, so write {key}={n}:int or {key}={n}.0"
