"""Whole programs against several cases: row counts, poison, guards, inputs, repeatability, layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import autofuse.accuracy
from autofuse.chain import Chain
from autofuse.reference import evaluate
from autofuse.search.check import Case, Checker, Fill, _repeats, case_sizes, check_program, make_cases
from autofuse.search.recipes import recipes_of
from autofuse.trace import trace

CPU = torch.device("cpu")
Program = Callable[[torch.Tensor, torch.Tensor], None]


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


CHAIN = trace(twice, (torch.randn(16, 64),)).chain
CASES = make_cases(CHAIN, recipes_of([torch.randn(16, 64)]), {"s0": 16}, CPU)


def verdict(program: Program) -> str:
    """The message of a program that writes y from x, "" where it is right."""

    def run(inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], fill: Fill) -> list[torch.Tensor]:
        y = fill(torch.empty_like(inputs[0]))
        program(inputs[0], y)
        return [y]

    v = check_program(run, CHAIN, CASES)
    assert v.ok == (not v.message)
    return v.message


def right(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x * 2)


def test_right() -> None:
    assert verdict(right) == ""


def test_unwritten() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        y[:-1] = (x * 2)[:-1]

    assert "are wrong" in verdict(program)


def test_only_on_some_row_counts() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        right(x, y)
        if len(x) == 1:
            y[0, 3] += 1

    assert verdict(program).startswith("one row (s0=1)")

    def odd(x: torch.Tensor, y: torch.Tensor) -> None:
        right(x, y)
        if len(x) % 2 and len(x) > 1:
            y[-1] += 1

    assert verdict(odd).startswith("ragged rows (s0=3)")


def test_old_memory_of_scratch_shows() -> None:
    """A value that is right within the tolerance, but not the same in the next run."""
    scratch = torch.zeros(1)

    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        right(x, y)
        scratch.add_(1)
        y[0, 0] *= 1 + 1e-7 * float(scratch % 2)

    assert "two runs" in verdict(program)


def test_input_is_written_and_restored() -> None:
    before = [c.inputs[0].clone() for c in CASES]

    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        right(x, y)
        x[0, 0] += 1

    assert "an input was modified" in verdict(program)
    assert all(torch.equal(c.inputs[0], b) for c, b in zip(CASES, before, strict=True))


def test_padding_of_an_input_is_input() -> None:
    x = torch.randn(16, 80)[:, :64]
    cases = make_cases(CHAIN, recipes_of([x]), {"s0": 16}, CPU)

    def run(inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], fill: Fill) -> list[torch.Tensor]:
        y = fill(torch.empty(inputs[0].shape))
        y.copy_(inputs[0] * 2)
        if len(y) > 1:
            inputs[0].as_strided((1,), (1,), 70).fill_(1.0)
        return [y]

    assert "an input was modified" in check_program(run, CHAIN, cases).message


def test_outside() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        right(x, y)
        y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(0.0)

    assert "outside" in verdict(program)


def test_layout_is_eagers() -> None:
    x = torch.randn(64, 16).t()
    cases = make_cases(CHAIN, recipes_of([x]), {"s0": 16}, CPU)

    def run(inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], fill: Fill) -> list[torch.Tensor]:
        return [(inputs[0] * 2).contiguous()]

    assert "strides" in check_program(run, CHAIN, cases).message
    assert check_program(lambda i, s, f: [i[0] * 2], CHAIN, cases).ok


def test_number_of_outputs() -> None:
    assert "outputs" in check_program(lambda i, s, f: [], CHAIN, CASES).message


def test_unwritten_memory_that_is_right_by_chance() -> None:
    """The first poison, as integers, is -1: only the second one shows that nothing was written."""
    chain = trace(lambda x: x - 1, (torch.zeros(16, 64, dtype=torch.int32),)).chain
    cases = make_cases(chain, recipes_of([torch.zeros(16, 64, dtype=torch.int32)]), {"s0": 16}, CPU)
    v = check_program(lambda i, s, f: [f(torch.empty_like(i[0]))], chain, cases)
    assert not v.ok and "two runs" in v.message


def test_any_nan_repeats_any_other() -> None:
    a = torch.tensor([0x7FC00000, 1], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00001, 1], dtype=torch.int32).view(torch.float32)
    assert _repeats(a, b) and not _repeats(a, b.flip(0))


def test_nan_repeats() -> None:
    chain = trace(lambda x: x.log(), (torch.randn(16, 64),)).chain
    cases = make_cases(chain, recipes_of([torch.randn(16, 64)]), {"s0": 16}, CPU)
    assert check_program(lambda i, s, f: evaluate(chain, i, s), chain, cases).ok


def test_what_run_raises_passes_through() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        verdict(program)


def test_case_sizes() -> None:
    def names(sizes: dict[str, int], cap: int = 10**9, chain: Chain = CHAIN) -> list[tuple[str, dict[str, int]]]:
        return [(n, s) for n, s, _ in case_sizes(chain, sizes, cap)]

    assert names({"s0": 16}) == [
        ("ragged rows", {"s0": 3}), ("one row", {"s0": 1}), ("actual rows", {"s0": 16}), ("a second seed", {"s0": 16}),
    ]  # fmt: skip
    assert [n for n, _ in names({"s0": 1})] == ["ragged rows", "actual rows", "a second seed"]
    capped = dict(names({"s0": 4096}, cap=64 * 1000))["actual rows"]["s0"]
    assert 64 * 2 * capped <= 64 * 1000 < 64 * 2 * 2 * (capped + 1) and capped % 2 == 1
    two = trace(lambda x: x * 2, (torch.randn(4, 16, 64),)).chain
    assert names({"s0": 4, "s1": 16}, chain=two)[0] == ("ragged rows", {"s0": 3, "s1": 2})
    static = trace(lambda x: x * 2, (torch.randn(64),)).chain
    assert [n for n, _ in names({}, chain=static)] == ["actual rows", "a second seed"]


def test_expected_results_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = autofuse.accuracy.oracle  # type: ignore[attr-defined]

    def counted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr("autofuse.accuracy.oracle", counted)
    checker = Checker(CHAIN, [Case("a", CASES[0].inputs, CASES[0].sizes), CASES[-1]])
    for _ in range(3):
        assert checker.check(lambda i, s, f: [i[0] * 2]).ok
    assert len(calls) == 2 and checker.nbytes > 0
