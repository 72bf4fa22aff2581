"""What the kernel tests share: one driver from a function to checked values, and inputs that break careless kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch

from autofuse import ops
from autofuse.accuracy import Expected, expect
from autofuse.chain import Chain
from autofuse.fusion import EAGER, Plan, check
from autofuse.kernels import artifact
from autofuse.kernels.base import Limits, Space
from autofuse.kernels.registry import BY_NAME
from autofuse.program import Layouts, Program
from autofuse.reference import evaluate
from autofuse.search.check import Case, Checker, Fill
from autofuse.settings import read
from autofuse.trace import trace
from autofuse.traced import sizes_of

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
LIMITS = {
    "cpu": Limits("cpu", "x", threads=2),
    "cuda": Limits("cuda", "sm_90", sm_count=1, shared_bytes=227 * 1024),
}
Knobs = Mapping[str, int | str]


@dataclass(frozen=True)
class Ran:
    """A program's outputs, what they must be, and the first thing that is wrong with them ("" where nothing is)."""

    chain: Chain
    plan: Plan
    sources: tuple[str, ...]
    outputs: tuple[torch.Tensor, ...]
    expected: tuple[Expected, ...]
    message: str

    @property
    def oracle(self) -> tuple[torch.Tensor, ...]:
        return tuple(e.oracle for e in self.expected)

    @property
    def eager(self) -> tuple[torch.Tensor, ...]:
        return tuple(e.eager for e in self.expected)


def run(
    fn: Callable[..., Any], args: Sequence[Any], target: str = "cpu", knobs: Knobs | None = None, groups: str = "fused",
    ahead: bool = False,
) -> Ran:  # fmt: skip
    """Trace, fuse, build and run `fn` with the heuristic schedules changed by `knobs`, and check what comes out.

    ahead: the binaries of `autofuse build` run, with no compiler."""
    if target == "cuda" and INTERPRETING:
        round_as_hardware()
    traced = trace(fn, args)
    fusion = check(traced.chain, traced.lines, getattr(fn, "__name__", "fn"))
    sizes = sizes_of(traced, args)
    assert sizes is not None
    inputs: list[Any] = [args[b.position] if b.position is not None else b.tensor for b in traced.bindings]
    layouts = Layouts(fusion, inputs, sizes)
    limits = LIMITS[target]
    plan, schedules = layouts.plan(fusion.fused() if groups == "fused" else fusion.unfused(), limits)
    assert all(p.kind != EAGER for p in plan.parts), f"no kernel makes a part of {plan}"
    knobbed = [turned(layouts, p.kind, p.nodes, s, knobs or {}, limits) for p, s in zip(plan.parts, schedules, strict=True)]
    # smaller blocks than a schedule may ask for, so that small tensors have ragged tails
    with mock.patch.object(Space, "validate", Space.reduce):
        program = Program(layouts, plan, knobbed, limits, read().cache, inputs[0].device)
        if ahead:
            for kernel in (s.kernel for s in program.steps if s.kernel is not None):
                artifact.write(kernel.source, kernel.low, limits.arch, read().cache)
            program = Program(layouts, plan, knobbed, limits, read().cache, inputs[0].device, ())
    checker = Checker(traced.chain, [Case("", tuple(inputs), sizes)])
    made: list[list[torch.Tensor]] = []

    def call(given: Sequence[torch.Tensor], at: Mapping[str, int], fill: Fill) -> list[torch.Tensor]:
        def empty(value: int, sizes: Mapping[str, int]) -> torch.Tensor:
            return fill(Program.empty(program, value, sizes))

        with mock.patch.object(program, "empty", empty):
            made.append(program(given, at))
        return made[-1]

    verdict = checker.check(call)
    assert not ahead or all(s.kernel is None or "loaded" not in vars(s.kernel) for s in program.steps), "compiled"
    expected = tuple(checker.expected(0))
    message = verdict.message or _as_eager(fn, args, traced.chain, inputs, sizes, traced.unflatten(made[0]))
    sources = tuple(s.text for s in program.sources if s is not None)
    return Ran(traced.chain, plan, sources, tuple(made[0]), expected, message)


def turned(layouts: Layouts, kind: str, nodes: Sequence[int], seed: Knobs, knobs: Knobs, limits: Limits) -> dict[str, int | str]:
    """The seed with those of `knobs` that this kind has."""
    space = BY_NAME[kind].space(layouts.task(nodes, limits))
    known = {k.name: k.values[0] for k in space.knobs}
    wanted = {n: v for n, v in knobs.items() if n in known}
    return space.reduce({**known, **seed, **wanted})


def _as_eager(
    fn: Callable[..., Any], args: Sequence[Any], chain: Chain, inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int], made: Any,
) -> str:  # fmt: skip
    """Whether the chain says what the function does, bit for bit, and the program's outputs look like the function's."""
    told = torch.utils._pytree.tree_leaves(fn(*args))
    ours = torch.utils._pytree.tree_leaves(made)
    for k, (t, e, y) in enumerate(zip(told, evaluate(chain, inputs, sizes), ours, strict=True)):
        if not same(t, e):
            return f"output {k} of the chain is not the function's"
        if y.shape != t.shape or y.dtype != t.dtype or (t.numel() and y.stride() != t.stride()):
            return f"output {k} is {y.dtype}{list(y.shape)} by {y.stride()}, not {t.dtype}{list(t.shape)} by {t.stride()}"
    return ""


def right(fn: Callable[..., Any], args: tuple[Any, ...], got: Any) -> None:
    """`got` is what eager gives: nesting, shapes, dtypes and strides; values by the accuracy rule."""
    traced = trace(fn, args)
    leaves = torch.utils._pytree.tree_leaves(got)
    eager = torch.utils._pytree.tree_leaves(fn(*args))
    inputs: list[Any] = [args[b.position] if b.position is not None else b.tensor for b in traced.bindings]
    sizes = sizes_of(traced, args)
    assert sizes is not None and len(leaves) == len(eager)
    for expected, y, e in zip(expect(traced.chain, inputs, sizes), leaves, eager, strict=True):
        assert (y.shape, y.dtype, y.stride()) == (e.shape, e.dtype, e.stride())
        verdict = expected.verdict(y)
        assert verdict.ok, verdict.message


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes, dtypes and values, NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        a, b = a.double(), b.double()
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


@cache
def round_as_hardware() -> None:
    """Triton's interpreter cuts off the bits of bf16 and fp8 where hardware rounds to nearest even: make it round."""
    import numpy as np
    from triton.runtime import interpreter

    kinds = {
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
        "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    }  # fmt: skip
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

    def convert(data: Any, source: Any, to: Any, rounding: Any) -> Any:
        given, wanted = kinds[source.name], kinds[to.name]
        x = torch.from_numpy(np.array(data, order="C").view(bits[given.itemsize])).view(given)
        return x.to(wanted).view(torch.uint8).numpy().reshape(-1).view(bits[wanted.itemsize]).reshape(data.shape)

    interpreter._convert_float = convert


# ---- inputs


def data(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Numbers near 1, the same at every call."""
    generator = torch.Generator().manual_seed(seed * 1009 + len(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def offset(t: torch.Tensor, by: int = 1) -> torch.Tensor:
    """The same values `by` elements behind an aligned address: data_ptr % 16 is not 0."""
    room = torch.zeros(t.numel() + by + 16, dtype=t.dtype)
    moved = room[by : by + t.numel()].view(t.shape)
    moved.copy_(t)
    assert not t.numel() or moved.data_ptr() % 16
    return moved


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values with the last two axes swapped in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def sliced(t: torch.Tensor) -> torch.Tensor:
    """The same values as a part of a wider tensor, from an odd column on."""
    wide = torch.zeros((*t.shape[:-1], t.shape[-1] + 8), dtype=t.dtype)
    part = wide[..., 3 : 3 + t.shape[-1]]
    part.copy_(t)
    return part


def expanded(t: torch.Tensor) -> torch.Tensor:
    """The first row of `t`, shown for every row: stride 0."""
    return t[:1].expand(t.shape)


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values at every other column of a wider tensor."""
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


SHAPES: dict[str, tuple[int, ...]] = {
    "0x64": (0, 64),
    "1x1": (1, 1),
    "7x33": (7, 33),
    "3x1000": (3, 1000),
    "5x4096": (5, 4096),
    "2x70000": (2, 70000),
    "3d": (3, 5, 40),
    "4d": (2, 3, 4, 24),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": transposed,
    "sliced": sliced,
    "strided": strided,
    "expanded": expanded,
    "misaligned": offset,
}


def _with(rows: int, cols: int, dtype: torch.dtype, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    t = data(rows, cols, dtype=dtype)
    change(t)
    return t


def _fill(rows: Any, cols: Any, value: float) -> Callable[[torch.Tensor], Any]:
    def change(t: torch.Tensor) -> None:
        t[rows, cols] = value

    return change


INF, NAN = float("inf"), float("nan")
ALL = slice(None)
VALUES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "minus_inf_row": lambda d: _with(5, 40, d, _fill(2, ALL, -INF)),
    "half_minus_inf": lambda d: _with(5, 40, d, _fill(ALL, slice(7, 30), -INF)),
    "all_nan": lambda d: _with(5, 40, d, _fill(ALL, ALL, NAN)),
    "one_nan": lambda d: _with(5, 40, d, _fill(1, 37, NAN)),
    "plus_inf": lambda d: _with(5, 40, d, _fill(3, 5, INF)),
    "both_inf": lambda d: _with(5, 40, d, lambda t: (_fill(3, 5, INF)(t), _fill(3, 6, -INF)(t))),
    "zeros": lambda d: _with(5, 40, d, _fill(ALL, ALL, 0.0)),
    "offset_1e4": lambda d: (data(5, 40) + 1e4).to(d),
    "huge": lambda d: (data(5, 40).sign() * (6e4 if d is torch.float16 else 1e30)).to(d),
    "tiny": lambda d: (data(5, 40) * 1e-30).to(d),
}


def floats(names: Sequence[str] = ("float32", "bfloat16", "float16")) -> list[torch.dtype]:
    """The dtypes of these names."""
    return [ops.TORCH[n] for n in names]
