"""Whether a program's results are right: compared with the float64 oracle, as far off as eager may be, on several inputs.

Per output a row's tolerance is twice eager's largest error in the row plus 4 units in the last place of the output dtype
at the row's largest |oracle|. Each case runs twice into differently poisoned outputs between guard zones: an element that is not
written, a write outside, and a result that depends on timing or on old memory all show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .. import ops
from ..chain import INPUT, Chain, Ref, Value
from ..cost import numel
from ..reference import FP8_MAX, evaluate, oracle, rounded
from .recipes import Recipe, make

ULPS = 4
ROW = 32  # elements: a shorter last axis is too small a sample of eager's error, so axes before it join the row
CAP = {"cpu": 2**22, "cuda": 2**25}  # elements of all values of a chain that the float64 oracle holds
GUARD = 256  # bytes before and behind each output
PRIMES = (3, 2, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)

Fill = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[[Sequence[torch.Tensor], Mapping[str, int], Fill], Sequence[torch.Tensor]]
"""Runs a program. Every output it allocates goes through `fill`, which gives a poisoned tensor of the same layout."""


@dataclass(frozen=True)
class Verdict:
    """Whether results are right. Errors are the largest |difference to the oracle| of finite values."""

    ok: bool
    max_error: float = 0.0
    eager_error: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Case:
    """Inputs at some row counts."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    sizes: dict[str, int]


# ---- one output


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
    """

    def __init__(
        self, oracle: torch.Tensor, eager: torch.Tensor, value: Value, *,
        flips: bool = False, source: torch.Tensor | None = None, source_dtype: torch.dtype | None = None, floor: float = 0.0,
    ) -> None:  # fmt: skip
        self.value, self.flips, self.source, self.eager = value, flips, source, eager
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
        last = ULPS * ulp(torch.where(finite, o.abs(), 0.0).amax(-1, keepdim=True), self.dtype)
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

    def _float(self, y: torch.Tensor) -> Verdict:
        v = _rows(y.to(torch.float64))
        error = (v - self.oracle).abs()
        bad = ~(error <= self.tolerance)  # NaN is bad
        if self.special is not None:
            agrees = _same(v, self.oracle) | _same(v, _rows(self.eager.to(torch.float64)))
            bad &= ~(self.special & agrees)
        worst = _max(torch.where(self.finite & v.isfinite(), error, 0.0))
        wrong = int(bad.sum())
        if not wrong:
            return self._told(True, worst)
        lost = bad & (~v.isfinite() | ~self.finite)
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
    flips: bool = False, source: torch.Tensor | None = None, source_dtype: torch.dtype | None = None, floor: float = 0.0,
) -> Verdict:  # fmt: skip
    """Whether one output is right; see Expected for the options."""
    return Expected(oracle, eager, value, flips=flips, source=source, source_dtype=source_dtype, floor=floor).verdict(y)


def flipping(chain: Chain) -> frozenset[int]:
    """The values behind a discontinuity of a computed float: there a last-bit difference may flip an element."""
    root: list[int] = []
    flips: set[int] = set()
    coarse: list[float] = []  # the widest unit that a cast of a computed value rounded to
    for i, v in enumerate(chain.values):
        refs = v.refs
        root.append(root[refs[0]] if refs and ops.is_free(v.name) else i)
        unit = max((coarse[r] for r in refs), default=0.0)
        made = [r for r in refs if "float" in chain.values[r].dtype and chain.values[root[r]].op != INPUT]
        entry = ops.OPS.get(v.name)
        cuts = (entry is not None and entry.rounds) or v.name in ("argmax", "argmin", "any", "all")
        cast = v.name == "to" and bool(made)
        if cast and "float" in v.dtype:
            unit = max(unit, torch.finfo(ops.TORCH[v.dtype]).eps)
        coarse.append(unit)
        if any(r in flips for r in refs) or (made and cuts) or (cast and "float" not in v.dtype):
            flips.add(i)
        elif "float" in v.dtype and unit > torch.finfo(ops.TORCH[v.dtype]).eps:
            flips.add(i)
    return frozenset(flips)


# ---- cases


def case_sizes(chain: Chain, sizes: Mapping[str, int], cap: int) -> list[tuple[str, dict[str, int], int]]:
    """(name, sizes, seed offset) of each case: small ones first, since they find most faults at no cost."""
    actual = dict(sizes)
    while sum(numel(v.shape, actual) for v in chain.values) > cap and any(n > 1 for n in actual.values()):
        longest = max(actual, key=lambda s: actual[s])
        actual[longest] = max(1, actual[longest] // 2)
    if actual != dict(sizes):  # no power of two, so that a last block is ragged
        longest = max(actual, key=lambda s: actual[s])
        actual[longest] = max(1, actual[longest] - 1)
    found: list[tuple[str, dict[str, int], int]] = []
    if chain.symbols:
        ragged = {s: PRIMES[k % len(PRIMES)] for k, s in enumerate(chain.symbols)}
        found += [("ragged rows", ragged, 2), ("one row", dict.fromkeys(chain.symbols, 1), 3)]
    made = [c for c in found if c[1] != actual]
    return [*made, ("actual rows", actual, 0), ("a second seed", dict(actual), 1)]


def make_cases(
    chain: Chain, recipes: Sequence[Recipe], sizes: Mapping[str, int], device: torch.device, seed: int = 0, cap: int | None = None,
) -> list[Case]:  # fmt: skip
    """The inputs that a chain's programs are checked on."""
    shapes = [v.shape for v in chain.inputs]
    limit = CAP[device.type] if cap is None else cap
    return [
        Case(name, tuple(make(recipes, shapes, at, device, seed * 101 + offset)), at)
        for name, at, offset in case_sizes(chain, sizes, limit)
    ]


# ---- whole programs


class _Poison:
    """Gives poisoned copies of freshly allocated outputs, between guard zones."""

    def __init__(self, byte: int) -> None:
        self.byte = byte
        self.buffers: list[torch.Tensor] = []

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        if not t.numel():
            return t
        size = t.element_size()
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        raw = torch.full((span * size + 2 * GUARD,), self.byte, dtype=torch.uint8, device=t.device)
        self.buffers.append(raw)
        return raw.view(t.dtype).as_strided(t.shape, t.stride(), GUARD // size)

    def intact(self) -> bool:
        zones = [z for b in self.buffers for z in (b[:GUARD], b[-GUARD:])]
        return not zones or bool((torch.cat(zones) == self.byte).all())


def _bits(t: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.view(kinds[t.element_size()])


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The whole memory behind these tensors, padding included, each once."""
    found: dict[int, torch.Tensor] = {}
    for t in tensors:
        storage = t.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
    return list(found.values())


def _repeats(a: torch.Tensor, b: torch.Tensor) -> bool:
    equal = _bits(a) == _bits(b)
    if bool(equal.all()):
        return True
    if not a.dtype.is_floating_point:
        return False
    a, b = a.float(), b.float()
    return bool((equal | (a.isnan() & b.isnan())).all())


def _strides(t: torch.Tensor) -> list[int]:
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1] if t.numel() else []


class Checker:
    """Checks programs of one chain on some cases. The oracle's and eager's results are computed once, when first needed."""

    def __init__(self, chain: Chain, cases: Sequence[Case]) -> None:
        self.chain, self.cases = chain, list(cases)
        self._flips = flipping(chain)
        self._expected: dict[int, list[Expected]] = {}
        self._floor: list[float] | None = None

    @property
    def nbytes(self) -> int:
        """About how much memory the cases and their results hold."""
        total = 0
        for case in self.cases:
            total += sum(s.numel() for s in _storages(case.inputs))
            total += sum(10 * numel(self.chain.values[o].shape, case.sizes) for o in self.chain.outputs)
        return total

    def _sources(self) -> dict[int, int]:
        """Outputs that are argmax or argmin -> the value that they choose from."""
        found = {}
        for o in self.chain.outputs:
            v = self.chain.values[o]
            if v.name in ("argmax", "argmin") and isinstance(v.args[0], Ref):
                found[o] = v.args[0].index
        return found

    def _make(self, k: int, floors: Sequence[float]) -> list[Expected]:
        case, chain = self.cases[k], self.chain
        chosen = self._sources()
        wanted = [*chain.outputs, *chosen.values()]
        right = oracle(chain, case.inputs, case.sizes, wanted)
        eager = evaluate(chain, case.inputs, case.sizes)
        extra = dict(zip(chosen, right[len(chain.outputs) :], strict=True))
        made = []
        for n, o in enumerate(chain.outputs):
            source, dtype = extra.get(o), None
            if source is not None:
                dtype = ops.TORCH[chain.values[chosen[o]].dtype]
                source = rounded(source, chain.values[chosen[o]].dtype) if dtype.is_floating_point else source
            made.append(
                Expected(
                    right[n], eager[n], chain.values[o],
                    flips=o in self._flips, source=source, source_dtype=dtype, floor=floors[n],
                )
            )  # fmt: skip
        return made

    def expected(self, k: int) -> list[Expected]:
        """What each output must be in case `k`."""
        if self._floor is None:
            last = len(self.cases) - 1  # the actual row counts: the largest sample of eager's error
            self._expected[last] = self._make(last, [0.0] * len(self.chain.outputs))
            self._floor = [e.eager_error for e in self._expected[last]]
        found = self._expected.get(k)
        if found is None:
            found = self._expected[k] = self._make(k, self._floor)
        return found

    def check(self, run: Run) -> Verdict:
        """Whether the program is right on every case. What `run` raises passes through."""
        max_error = eager_error = 0.0
        for k, case in enumerate(self.cases):
            v = self._check_case(run, k, case)
            max_error, eager_error = max(max_error, v.max_error), max(eager_error, v.eager_error)
            if not v.ok:
                return Verdict(False, max_error, eager_error, f"{case.name} {_show(case.sizes)}: {v.message}")
        return Verdict(True, max_error, eager_error)

    def _check_case(self, run: Run, k: int, case: Case) -> Verdict:
        expected = self.expected(k)
        memory = _storages(case.inputs)
        before = [m.clone() for m in memory]
        made = []
        for byte in (0xFF, 0x7F):
            poison = _Poison(byte)
            made.append(list(run(case.inputs, case.sizes, poison)))
            if memory and memory[0].is_cuda:
                torch.cuda.synchronize(memory[0].device)
            if any(not torch.equal(m, b) for m, b in zip(memory, before, strict=True)):
                for m, b in zip(memory, before, strict=True):
                    m.copy_(b)  # the next candidate starts from the same inputs
                return Verdict(False, message="an input was modified")
            if not poison.intact():
                return Verdict(False, message="memory outside an output was written")
        first, second = made
        if len(first) != len(expected):
            return Verdict(False, message=f"gives {len(first)} outputs instead of {len(expected)}")
        max_error = eager_error = 0.0
        for n, (y, e) in enumerate(zip(first, expected, strict=True)):
            v = e.verdict(y)
            if v.ok and _strides(y) != _strides(e.eager):
                v = Verdict(False, message=f"has strides {list(y.stride())}, eager's are {list(e.eager.stride())}")
            if v.ok and not _repeats(y, second[n]):
                v = Verdict(False, message="two runs on the same inputs differ: a race, or memory that is not written")
            max_error, eager_error = max(max_error, v.max_error), max(eager_error, v.eager_error)
            if not v.ok:
                return Verdict(False, max_error, eager_error, f"output {n} {v.message}")
        return Verdict(True, max_error, eager_error)


def _show(sizes: Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{s}={n}" for s, n in sizes.items()) + ")" if prod(sizes.values()) and sizes else ""


def check_program(run: Run, chain: Chain, cases: Sequence[Case]) -> Verdict:
    """Whether a program of the chain is right on these cases."""
    return Checker(chain, cases).check(run)
