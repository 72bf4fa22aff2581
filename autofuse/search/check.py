"""Whether a program's results are right, on several inputs (see accuracy.py for one output).

Each case runs twice into differently poisoned outputs between guard zones, so that an element that is not written, a
write outside, and a result that depends on timing or on old memory all show. Inputs must be unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..accuracy import Expected, Verdict, expect, strides_of
from ..chain import Chain
from ..cost import numel
from .recipes import Recipe, make

CAP = {"cpu": 2**22, "cuda": 2**25}  # elements of all values of a chain that the float64 oracle holds
GUARD = 256  # bytes before and behind each output
PRIMES = (3, 2, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)

Fill = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[[Sequence[torch.Tensor], Mapping[str, int], Fill], Sequence[torch.Tensor]]
"""Runs a program. Every output it allocates goes through `fill`, which gives a poisoned tensor of the same layout."""


@dataclass(frozen=True)
class Case:
    """Inputs at some row counts."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    sizes: dict[str, int]


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
    chain: Chain, recipes: Sequence[Recipe], sizes: Mapping[str, int], device: torch.device, seed: int = 0,
    cap: int | None = None,
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


class Checker:
    """Checks programs of one chain on some cases. The oracle's and eager's results are computed once, at first need."""

    def __init__(self, chain: Chain, cases: Sequence[Case]) -> None:
        self.chain, self.cases = chain, list(cases)
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

    def _make(self, k: int) -> list[Expected]:
        case = self.cases[k]
        return expect(self.chain, case.inputs, case.sizes, self._floor)

    def expected(self, k: int) -> list[Expected]:
        """What each output must be in case `k`."""
        if self._floor is None:
            last = len(self.cases) - 1  # the actual row counts: the largest sample of eager's error
            self._expected[last] = self._make(last)
            self._floor = [e.eager_error for e in self._expected[last]]
        found = self._expected.get(k)
        if found is None:
            found = self._expected[k] = self._make(k)
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
            if v.ok and strides_of(y) != strides_of(e.eager):
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
