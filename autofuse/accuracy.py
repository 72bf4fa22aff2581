"""Whether one output is right: compared with the float64 oracle, as far off as eager may be.

A row's tolerance is twice eager's largest error in the row plus ULPS units in the last place of the output dtype at
the row's largest |oracle|, and no less than twice what the row moves by when each input moves by a last bit of float32:
no better is known of sums that cancel, however lucky eager's few roundings are. Where the oracle or eager is not finite,
the output must be what one of them is; elsewhere it must be finite. Indices of argmax and argmin may differ where the
chosen values agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import ops
from .chain import INPUT, Chain, Ref, Value
from .reference import FP8_MAX, evaluate, oracle, rounded

ULPS = 4
ULPS64 = 64  # a float64 result has no better oracle: its oracle and eager are one and the same, rounded as they are
NINE_IN_TEN = 1.645  # standard deviations that nine in ten normally distributed errors stay within
ROW = 32  # elements: a shorter last axis is too small a sample of eager's error, so axes before it join the row


@dataclass(frozen=True)
class Verdict:
    """Whether results are right. Errors are the largest |difference to the oracle| of finite values."""

    ok: bool
    max_error: float = 0.0
    eager_error: float = 0.0
    message: str = ""


def ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of `dtype` at these float64 magnitudes."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Folded to (rows, elements of a row)."""
    width, axis = 1, x.dim()
    while axis > 0 and width < ROW:
        axis -= 1
        width *= x.shape[axis]
    return x.reshape(-1, width) if x.numel() else x.reshape(0, max(1, width))


def _max(x: torch.Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


class Expected:
    """What one output must be.

    flips   a discontinuity (comparison, rounding, narrow cast) of a computed value lies before it: a few elements may
            fall on the other side, about as many as eager's do
    source  of argmax and argmin: the oracle's values of the argument, rounded to eager's dtype, `source_dtype`
    floor   eager's error at other inputs, where a row is too small a sample
    moved   the oracle at inputs that moved by a last bit; asked for only where a result would be wrong
    """

    def __init__(
        self, oracle: torch.Tensor, eager: torch.Tensor, value: Value, *,
        flips: bool = False, source: torch.Tensor | None = None, source_dtype: torch.dtype | None = None,
        floor: float = 0.0, moved: Callable[[], Iterable[torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self.value, self.flips, self.source, self.eager, self.moved = value, flips, source, eager, moved
        self.dtype, self.source_dtype = eager.dtype, source_dtype
        self.slack = min(4, 1 + oracle.numel() // 64) if flips else 0
        self.oracle = oracle
        self.eager_error = 0.0
        if value.name in ("argmax", "argmin") and source is not None:
            self._init_chosen(source)
        elif self.dtype.is_floating_point:
            self._init_float(floor)
        elif self.dtype is torch.bool:
            self.eager_error = float((eager != oracle).sum())
        else:
            error = _rows((eager.to(torch.float64) - oracle.to(torch.float64)).abs())
            self.eager_error = _max(error)
            self.tolerance = 2 * error.amax(-1, keepdim=True) + 1 if error.numel() else error

    def _init_float(self, floor: float) -> None:
        limit = FP8_MAX.get(self.value.dtype)
        if self.flips or limit is not None:
            self.moved = None  # a step of the result is no measure of its error
        o = self.oracle.to(torch.float64)
        o = _rows(o if limit is None else o.clamp(-limit, limit))
        e = _rows(self.eager.to(torch.float64))
        finite = o.isfinite()
        error = torch.where(finite & e.isfinite(), (e - o).abs(), 0.0)
        self.oracle, self.finite = o, finite
        special = ~(finite & e.isfinite())
        self.special = special if bool(special.any()) else None
        self.eager_error = _max(error)
        if not o.numel():
            self.tolerance = o
            return
        worst = error.amax(-1, keepdim=True)
        size = self.size = torch.where(finite, o.abs(), 0.0).amax(-1, keepdim=True)
        last = self.last = (ULPS if self.dtype != torch.float64 else ULPS64) * ulp(size, self.dtype)
        # one row is a small sample of eager's error: the relative error of nine rows in ten counts for every row, and
        # that of the worst row as far as the worst of so many normally distributed errors lies beyond that
        relative = (worst / size).nan_to_num(0.0, 0.0, 0.0).flatten().sort().values
        if relative.numel() > 1:
            usual = relative[max(0, 9 * relative.numel() // 10 - 1)]
            beyond = max(1.0, math.sqrt(2 * math.log(relative.numel())) / NINE_IN_TEN)
            # and no row's more than eager's largest error anywhere: rows that cancel to nothing say nothing of others
            worst = torch.maximum(worst, (torch.minimum(usual * beyond, relative[-1]) * size).clamp(max=float(worst.max())))
        if o.shape[1] < ROW:
            worst = worst.clamp(min=floor)
        self.tolerance = 2 * worst + last
        if self.flips:
            self.slack += 2 * int((error > 2 * worst.median() + last).sum())

    def _choose(self, index: torch.Tensor) -> torch.Tensor:
        assert self.source is not None
        source, axis, keep = self.source, _argument(self.value, 1, "dim"), _argument(self.value, 2, "keepdim")
        if axis is None:
            return source.reshape(-1)[index.reshape(-1)]
        at = index if keep else index.unsqueeze(axis)
        return source.gather(axis, at)

    def _init_chosen(self, source: torch.Tensor) -> None:
        axis = _argument(self.value, 1, "dim")
        self.extent = source.numel() if axis is None else source.shape[axis]
        self.best = self._choose(self.oracle)
        gap = (self._choose(self.eager) - self.best).abs().nan_to_num(0.0)
        self.eager_error = _max(gap)
        self.tolerance = torch.zeros_like(self.best, dtype=torch.float64)
        if self.flips and source.dtype.is_floating_point:
            last = ulp(self.best.double().abs().nan_to_num(0.0, 0.0, 0.0), self.source_dtype or source.dtype)
            self.tolerance = 2 * self.eager_error + ULPS * last

    # ---- the verdict

    def verdict(self, y: torch.Tensor) -> Verdict:
        """Whether `y` is right."""
        if y.shape != self.eager.shape or y.dtype != self.dtype:
            return Verdict(False, message=f"is {y.dtype}{list(y.shape)}, eager gives {self.dtype}{list(self.eager.shape)}")
        if not y.numel():
            return Verdict(True)
        if self.value.name in ("argmax", "argmin") and self.source is not None:
            return self._chosen(y)
        if self.dtype.is_floating_point:
            return self._float(y)
        if self.dtype is torch.bool:
            if bool((y.view(torch.uint8) > 1).any()):
                return Verdict(False, message="holds bytes that are neither true nor false: not every element is written")
            wrong = float((y != self.oracle).sum())
            allowed = 2 * self.eager_error + self.slack
            return self._told(wrong <= allowed, wrong, f"{wrong:.0f} values differ from the oracle, {allowed:.0f} may")
        error = _rows((y.to(torch.float64) - self.oracle.to(torch.float64)).abs())
        worst = _max(error)
        bad = error > self.tolerance if self.flips else _rows(y != self.oracle)
        wrong = int(bad.sum())
        return self._told(not wrong, worst, f"{wrong} of {y.numel()} integers are wrong, by {worst:g} at most")

    def _allow_moves(self) -> None:
        """Raise the tolerance to what the oracle says of inputs that differ in a last bit."""
        moved, self.moved = self.moved, None
        for near in moved() if moved is not None else ():
            move = (_rows(near.to(torch.float64)) - self.oracle).abs()
            move = torch.where(self.finite, move, 0.0).nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
            self.tolerance = torch.maximum(self.tolerance, 2 * move + self.last)

    def _float(self, y: torch.Tensor) -> Verdict:
        v = _rows(y.to(torch.float64))
        error = (v - self.oracle).abs()
        bad = ~(error <= self.tolerance)  # NaN is bad
        if self.special is not None:
            agrees = _same(v, self.oracle) | _same(v, _rows(self.eager.to(torch.float64)))
            bad &= ~(self.special & agrees)
        if self.moved is not None and bool(bad.any()):
            self._allow_moves()
            return self._float(y)
        worst = _max(torch.where(self.finite & v.isfinite(), error, 0.0))
        wrong = int(bad.sum())
        if not wrong:
            return self._told(True, worst)
        # an element that fell on the other side of a step is still of its row's size
        far = error > 2 * self.size + self.tolerance
        lost = bad & (~v.isfinite() | ~self.finite | far)
        if wrong <= self.slack and not bool(lost.any()):
            return self._told(True, worst)
        at = int(bad.reshape(-1).to(torch.uint8).argmax())
        row, col = divmod(at, v.shape[1])
        place = _unravel(at, y.shape)
        message = (
            f"{wrong} of {y.numel()} values are wrong, first at {place}: {v[row, col]:.6g} where the oracle has "
            f"{self.oracle[row, col]:.6g} (tolerance {float(self.tolerance[row, 0]):.3g})"
        )
        return self._told(False, worst, message)

    def _chosen(self, y: torch.Tensor) -> Verdict:
        if bool(((y < 0) | (y >= self.extent)).any()):
            return Verdict(False, message=f"holds indices outside [0, {self.extent})")
        chosen = self._choose(y)
        gap = (chosen.double() - self.best.double()).abs()
        good = _same(chosen, self.best) | (gap <= self.tolerance)
        wrong = int((~good).sum())
        return self._told(not wrong, _max(gap.nan_to_num(0.0)), f"{wrong} of {y.numel()} indices choose a wrong value")

    def _told(self, ok: bool, error: float, message: str = "") -> Verdict:
        return Verdict(ok, error, self.eager_error, "" if ok else message)


def strides_of(t: torch.Tensor) -> list[int]:
    """The strides that matter: of dimensions of more than one element, and none of an empty tensor."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1] if t.numel() else []


def _unravel(at: int, shape: Sequence[int]) -> list[int]:
    place: list[int] = []
    for n in reversed(shape):
        place.insert(0, at % n)
        at //= n
    return place


def _argument(value: Value, position: int, name: str) -> Any:
    if len(value.args) > position:
        return value.args[position]
    return dict(value.kwargs).get(name)


def compare(
    y: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, value: Value, *,
    flips: bool = False, source: torch.Tensor | None = None, source_dtype: torch.dtype | None = None,
    floor: float = 0.0,
) -> Verdict:  # fmt: skip
    """Whether one output is right; see Expected for the options."""
    return Expected(oracle, eager, value, flips=flips, source=source, source_dtype=source_dtype, floor=floor).verdict(y)


def _exact(value: Value) -> bool:
    """Whether every target has the same bits: there is no last bit that differs."""
    return value.op == INPUT or value.name == "uniform"


def _cuts(v: Value) -> bool:
    """Whether an operation is a step somewhere: a last bit of its argument may move its result by more than that."""
    if v.name == "to":
        return "float" not in v.dtype
    entry = ops.OPS.get(v.name)
    return (entry is not None and entry.rounds) or v.name in ("argmax", "argmin", "any", "all")


def flipping(chain: Chain) -> frozenset[int]:
    """The values behind a discontinuity of a computed float: there a last-bit difference may flip an element."""
    root: list[int] = []
    flips: set[int] = set()
    coarse: list[float] = []  # the widest unit that a cast of a computed value rounded to
    for i, v in enumerate(chain.values):
        refs = v.refs
        root.append(root[refs[0]] if refs and ops.is_free(v.name) else i)
        unit = max((coarse[r] for r in refs), default=0.0)
        made = [r for r in refs if "float" in chain.values[r].dtype and not _exact(chain.values[root[r]])]
        cast = v.name == "to" and bool(made)
        if cast and "float" in v.dtype:
            unit = max(unit, torch.finfo(ops.TORCH[v.dtype]).eps)
        coarse.append(unit)
        if (
            any(r in flips for r in refs)
            or (made and _cuts(v))
            or ("float" in v.dtype and unit > torch.finfo(ops.TORCH[v.dtype]).eps)
        ):
            flips.add(i)
    return frozenset(flips)


def _chosen_from(chain: Chain) -> dict[int, int]:
    """Outputs that are argmax or argmin -> the value that they choose from."""
    found = {}
    for o in chain.outputs:
        v = chain.values[o]
        if v.name in ("argmax", "argmin") and isinstance(v.args[0], Ref):
            found[o] = v.args[0].index
    return found


def _moved(
    chain: Chain, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], output: int
) -> Iterator[torch.Tensor]:  # fmt: skip
    """An output of the oracle at inputs each of which moved by a last bit of fp32, up or down at random, twice."""
    for k in range(2):
        moved = []
        for t in inputs:
            if not t.dtype.is_floating_point or t.dtype == torch.float64:
                moved.append(t)
                continue
            rng = torch.Generator(t.device).manual_seed(5 + k)
            sign = torch.randint(0, 2, t.shape, generator=rng, device=t.device) * 2 - 1
            moved.append(t.double() * (1 + sign * torch.finfo(torch.float32).eps))
        yield oracle(chain, moved, sizes, [output])[0]


def expect(
    chain: Chain, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], floors: Sequence[float] | None = None
) -> list[Expected]:
    """What each output of a chain must be at these inputs: runs the float64 oracle and eager."""
    chosen = _chosen_from(chain)
    right = oracle(chain, inputs, sizes, [*chain.outputs, *chosen.values()])
    eager = evaluate(chain, inputs, sizes)
    sources = dict(zip(chosen, right[len(chain.outputs) :], strict=True))
    flips = flipping(chain)
    smooth = not any(_cuts(v) for v in chain.values)
    made = []
    for n, o in enumerate(chain.outputs):
        source, dtype = sources.get(o), None
        if source is not None:
            name = chain.values[chosen[o]].dtype
            dtype = ops.TORCH[name]
            source = rounded(source, name) if dtype.is_floating_point else source
        made.append(
            Expected(
                right[n],
                eager[n],
                chain.values[o],
                flips=o in flips,
                source=source,
                source_dtype=dtype,
                floor=0.0 if floors is None else floors[n],
                moved=partial(_moved, chain, inputs, sizes, o) if smooth else None,
            )
        )
    return made
