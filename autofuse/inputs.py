"""What a user says about a function's arguments, as frozen values, and the tensors made from it.

x=rows,4096                      a tensor: extents or axis names, of the default dtype
labels=rows:int64:0..32000       with a dtype, and the range of its values: 0 to 31999
labels=rows:int64:0..cols        up to the extent of an axis, which is left out
weight=4096                      one axis
s=():float32                     no axis: a 0-d tensor
scale=0.125  causal=true         a Python scalar; a whole number needs its type: n=3:int
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, cast, overload

from .errors import InputError

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
INTEGER_BITS = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1)}
INTEGER_BITS |= {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
DTYPES = (*FLOATS, *INTEGER_BITS, "bool")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
SCALARS: dict[str, type[int | float]] = {"int": int, "float": float}
INTEGER_RANGE = (0, 100)
"""Integers of an argument without a range of its own are drawn from here; the end is left out."""

TOO_LARGE = ("alloc", "out of memory", "overflow", "too large")

_NAME = re.compile(r"[A-Za-z_]\w*")
_DIM = re.compile(r"(?:(\d{1,12})\*)?([A-Za-z_]\w*)(?:/(\d{1,12}))?")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. `dtype` None: the job's. Values lie in [low, high), or come from N(0, 1) without a range.

    `high` may be an extent such as "cols", for indices into that axis.
    """

    dims: tuple[int | str, ...]
    dtype: str | None = None
    low: float | None = None
    high: float | str | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis names in its shape and range."""
        return tuple(_axis(d)[1] for d in (*self.dims, self.high) if isinstance(d, str))

    def bounds(self, dtype: str, sizes: Mapping[str, int]) -> tuple[float, float] | None:
        """The range of its values at these extents, or None. Raises InputError where that holds no value of the dtype."""
        if self.low is None or self.high is None:
            return None
        if not isinstance(self.high, str):
            return self.low, self.high
        high = _extent(self.high, sizes)
        if self.low >= high:
            raise InputError(f"the range {self.low:g}..{self.high} is empty where {self.high} is {high}")
        _holds(dtype, self.low, high, f"{self.low:g}..{high}")
        return self.low, high


@dataclass(frozen=True)
class ScalarSpec:
    """A Python scalar: part of what is tuned, like the function itself."""

    value: int | float | bool


ArgSpec = TensorSpec | ScalarSpec


def parse_name(text: str, example: str) -> tuple[str, str]:
    """NAME=REST, taken apart. Raises InputError, which shows the example."""
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name.strip()) or not rest.strip():
        raise InputError(f"write NAME=VALUE, as in {example}")
    return name.strip(), rest.strip()


def parse_arg(text: str) -> ArgSpec:
    """An argument's description without its name, as in the head of this file. Raises InputError."""
    parts = [p.strip() for p in text.strip().split(":")]
    if len(parts) > 3 or not parts[0]:
        raise InputError(f"{text!r} is no argument: write DIM,DIM,...[:DTYPE[:LOW..HIGH]] or a number")
    if len(parts) == 1:
        scalar = _scalar(parts[0])
        if scalar is not None:
            return scalar
    if len(parts) > 1 and parts[1] in SCALARS:
        try:
            if len(parts) == 2:
                return ScalarSpec(SCALARS[parts[1]](parts[0]))
        except ValueError:
            pass
        raise InputError(f"{text!r} is no Python {parts[1]}: write NUMBER:{parts[1]}")
    dims = () if parts[0] == "()" else tuple(_dim(d.strip(), text) for d in parts[0].split(","))
    dtype = parse_dtype(parts[1]) if len(parts) > 1 else None
    if len(parts) < 3:
        return TensorSpec(dims, dtype)
    return TensorSpec(dims, dtype, *_range(parts[2], cast(str, dtype)))


def _scalar(text: str) -> ScalarSpec | None:
    """A scalar, or None for a whole number that is not negative: that is an extent."""
    if text in ("true", "false"):
        return ScalarSpec(text == "true")
    if re.fullmatch(r"-\d+", text):
        return ScalarSpec(int(text))
    if re.fullmatch(r"\d+", text):
        return None
    try:
        return ScalarSpec(float(text))
    except ValueError:
        return None


def _dim(text: str, whole: str) -> int | str:
    if re.fullmatch(r"\d{1,12}", text):
        return int(text)
    match = _DIM.fullmatch(text)
    if match and match.group(3) != "0":
        return text
    raise InputError(f"{text!r} in {whole!r} is no extent: write a whole number, the name of an axis, or 2*cols or cols/128")


def _axis(dim: str) -> tuple[int, str, int]:
    """An extent such as "2*cols" or "cols/128" as its factor, axis and divisor."""
    match = _DIM.fullmatch(dim)
    assert match is not None
    return int(match.group(1) or 1), match.group(2), int(match.group(3) or 1)


def _extent(dim: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    times, axis, parts = _axis(dim)
    n, rest = divmod(times * sizes[axis], parts)
    if rest:
        raise InputError(f"the extent {dim} is no whole number where {axis} is {sizes[axis]}")
    return n


def _range(text: str, dtype: str) -> tuple[float, float | str]:
    low_text, dots, high_text = text.partition("..")
    kind = int if dtype in INTEGER_BITS else float
    if dtype in INTEGER_BITS and _DIM.fullmatch(high_text) and re.fullmatch(r"-?\d+", low_text):
        _holds(dtype, int(low_text), int(low_text) + 1, text)
        return int(low_text), str(_dim(high_text, text))
    try:
        low, high = kind(low_text), kind(high_text)
    except ValueError:
        dots = ""
        low = high = 0
    if not dots or not math.isfinite(low) or not math.isfinite(high) or low >= high:
        raise InputError(f"{text!r} is no range: write LOW..HIGH, LOW below HIGH, as in 0..32000 (HIGH is left out)")
    if dtype == "bool":
        raise InputError("a bool argument takes no range")
    _holds(dtype, low, high, text)
    return low, high


def _holds(dtype: str, low: float, high: float, text: str) -> None:
    least, most = INTEGER_BITS.get(dtype, (-math.inf, math.inf))
    if low < least or high > most + 1:
        raise InputError(f"the range {text} leaves {dtype}, which holds {least} to {most}")


def parse_dtype(text: str) -> str:
    """A dtype's full name. Raises InputError."""
    name = SHORT.get(text, text.removeprefix("torch."))
    if name not in DTYPES:
        raise InputError(f"{text!r} is no dtype: it may be {', '.join(DTYPES)}")
    return name


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Default dtypes for the floating-point arguments, with commas between. Raises InputError."""
    names = tuple(parse_dtype(part.strip()) for part in text.split(","))
    for name in names:
        if name not in FLOATS:
            raise InputError(f"{name} is no floating-point dtype: it may be {', '.join(FLOATS)}")
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """The values of an axis, with commas between. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch(r"\d{1,12}", part):
            raise InputError(f"{part!r} is no extent: write whole numbers with commas between, as in rows=16,2048")
    return tuple(int(part) for part in parts)


def check_axes(args: Mapping[str, ArgSpec], axes: Mapping[str, Sequence[int]]) -> None:
    """Every axis that an argument names has values, and every axis with values is named. Raises InputError."""
    used = {axis: name for name, spec in args.items() if isinstance(spec, TensorSpec) for axis in spec.axes}
    unused = [axis for axis in axes if axis not in used]
    for axis, name in used.items():
        if axis not in axes:
            typo = f" (no argument names {', '.join(map(repr, unused))}: is it a typo?)" if unused else ""
            raise InputError(f"the axis {axis!r} of argument {name!r} has no values: give them, as in {axis}=16,2048{typo}")
    for axis in axes:
        if axis not in used:
            known = f"they name {', '.join(sorted(used))}" if used else "they name none"
            raise InputError(f"no argument names the axis {axis!r}: {known}")


@dataclass(frozen=True)
class CaseSpec:
    """One workload's arguments: the extent of each axis and the dtype of those that say none."""

    args: tuple[ArgSpec, ...]
    sizes: tuple[tuple[str, int], ...]
    dtype: str

    def check(self) -> None:
        """Raises InputError for an extent that is no whole number, or a range of no values."""
        for spec in self.args:
            if isinstance(spec, TensorSpec):
                for dim in spec.dims:
                    _extent(dim, dict(self.sizes))
                spec.bounds(spec.dtype or self.dtype, dict(self.sizes))

    def make(self, device: str, seed: int) -> tuple[Any, ...]:
        """The arguments, the same ones for the same seed and device."""
        sizes = dict(self.sizes)
        return tuple(
            spec.value if isinstance(spec, ScalarSpec) else make_tensor(spec, sizes, self.dtype, device, seed + k)
            for k, spec in enumerate(self.args)
        )


@dataclass(frozen=True)
class Cases(Sequence[tuple[Any, ...]]):
    """The arguments of several workloads; each is made when it is asked for, so that one at a time is in memory."""

    specs: tuple[CaseSpec, ...]
    device: str
    seed: int = 0

    def __len__(self) -> int:
        return len(self.specs)

    @overload
    def __getitem__(self, index: int) -> tuple[Any, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Cases: ...
    def __getitem__(self, index: int | slice) -> tuple[Any, ...] | Cases:
        if isinstance(index, slice):
            return Cases(self.specs[index], self.device, self.seed)
        return self.specs[index].make(self.device, self.seed + 1000 * (index % len(self.specs)))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[k] for k in range(len(self.specs)))


def case_specs(args: Iterable[ArgSpec], axes: Mapping[str, Sequence[int]], dtypes: Sequence[str]) -> tuple[CaseSpec, ...]:
    """All workloads: each default dtype with each combination of the axes' values. Equal ones appear once."""
    order = tuple(args)
    free = any(isinstance(spec, TensorSpec) and spec.dtype is None for spec in order)
    found: dict[CaseSpec, None] = {}
    for dtype in dtypes if free else dtypes[:1]:
        for sizes in product(*axes.values()):
            found[CaseSpec(order, tuple(zip(axes, sizes, strict=True)), dtype)] = None
    return tuple(found)


def make_tensor(spec: TensorSpec, sizes: Mapping[str, int], dtype: str, device: str, seed: int) -> torch.Tensor:
    """A tensor of random values: floats N(0, 1), integers in INTEGER_RANGE, bools, or what the spec's range says.

    Raises InputError for one that memory cannot hold.
    """
    shape = [_extent(dim, sizes) for dim in spec.dims]
    name = spec.dtype or dtype
    bounds = spec.bounds(name, sizes)
    try:
        return _random(bounds, shape, name, device, seed)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        # torch says in several ways and classes that a tensor is too large
        if not isinstance(error, MemoryError | OverflowError) and not any(sign in str(error).lower() for sign in TOO_LARGE):
            raise
        told = ",".join(map(str, shape))
        raise InputError(
            f"an argument of {told} {name} does not fit into the memory of {device}: make its extents smaller"
        ) from error


def _random(bounds: tuple[float, float] | None, shape: Sequence[int], name: str, device: str, seed: int) -> torch.Tensor:
    import torch

    kind: torch.dtype = getattr(torch, name)
    generator = torch.Generator(device=device).manual_seed(seed)
    if name == "bool":
        return torch.randint(0, 2, shape, generator=generator, device=device, dtype=torch.uint8).bool()
    if name in INTEGER_BITS:
        low, high = bounds or INTEGER_RANGE
        return torch.randint(int(low), int(high), shape, generator=generator, device=device, dtype=kind)
    wide = torch.float32 if name.startswith("float8") else kind
    if bounds is None:
        return torch.randn(shape, generator=generator, device=device, dtype=wide).to(kind)
    made = torch.rand(shape, generator=generator, device=device, dtype=wide)
    low, high = bounds
    return made.mul_(high - low).add_(low).to(kind)
