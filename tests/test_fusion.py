"""Segments and plans: against brute force on small chains, bounded on long ones, equal values by every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.errors import Infeasible, InputError, UnsupportedOp
from autofuse.fusion import MAX_CUTS, Fusion, Part, Plan, check
from autofuse.program import Layouts, Program
from autofuse.settings import read
from autofuse.trace import trace
from autofuse.traced import sizes_of
from tests.kernel_cases import LIMITS, data, run

X = data(5, 24)

SMALL: dict[str, Callable[[Tensor], Any]] = {
    "line": lambda x: ((x * 2).exp() + 1).sum(-1),
    "diamond": lambda x: x.exp() * x.sin() + 1,
    "branches": lambda x: (x.exp().sum(-1), x.sin() + 1),
    "residual": lambda x: (F.rms_norm(h := x + 1, (24,), None, 1e-6), h),
    "views": lambda x: torch.cat((-(y := x * 2)[..., 12:], y[..., :12]), -1) * x,
    "unrelated": lambda x: (x + 1, torch.ones(3) * 2),
}


def fusion_of(fn: Callable[..., Any], *args: Any) -> Fusion:
    return Fusion(trace(fn, args).chain)


def closed(fusion: Fusion) -> set[frozenset[int]]:
    """Every set of operations that holds what its members read, by trying all sets."""
    nodes = fusion.nodes
    every = (frozenset(c) for n in range(len(nodes) + 1) for c in combinations(nodes, n))
    return {s for s in every if all(fusion.reads[n] <= s for n in s)}


def plans(fusion: Fusion) -> set[tuple[tuple[int, ...], ...]]:
    """Every ordered partition into sets that read only themselves and earlier ones."""

    def after(done: frozenset[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
        left = [n for n in fusion.nodes if n not in done]
        if not left:
            yield ()
        for size in range(1, len(left) + 1):
            for part in combinations(left, size):
                if all(fusion.reads[n] <= done | set(part) for n in part):
                    yield from ((part, *rest) for rest in after(done | set(part)))

    return set(after(frozenset()))


def paths(fusion: Fusion, connected: bool = True) -> set[tuple[tuple[int, ...], ...]]:
    """Every path of segments from the empty cut to the full one."""
    steps: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for a, b, nodes in fusion.edges():
        steps.setdefault(a, []).append((b, nodes))
    last = len(fusion.cuts) - 1

    def walk(at: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if at == last:
            yield ()
        for to, nodes in steps.get(at, []):
            yield from ((nodes, *rest) for rest in walk(to))

    return set(walk(0))


@pytest.mark.parametrize("name", SMALL)
def test_cuts_and_paths_are_all_there_are(name: str) -> None:
    fusion = fusion_of(SMALL[name], X)
    assert fusion.bound == ""
    assert set(fusion.cuts) == closed(fusion)
    assert fusion.cuts[0] == frozenset()
    assert fusion.cuts[-1] == frozenset(fusion.nodes)
    hang_together = {p for p in plans(fusion) if all(fusion._connected(part) for part in p)}
    assert paths(fusion) == hang_together


@pytest.mark.parametrize("name", SMALL)
def test_segments_are_convex(name: str) -> None:
    fusion = fusion_of(SMALL[name], X)
    chain = fusion.chain
    for _, _, nodes in fusion.edges():
        members = set(nodes)
        for n in fusion.nodes:
            if n in members:
                continue
            below = any(_reaches(fusion, m, n) for m in members)
            above = any(_reaches(fusion, n, m) for m in members)
            assert not (below and above), (nodes, n)
        segment = fusion.segment(nodes)
        assert set(segment.reads).isdisjoint(members)
        assert set(segment.writes) <= members
        assert segment.chain.num_inputs == len(segment.reads)
        assert [chain.values[w].dtype for w in segment.writes] == [segment.chain.values[o].dtype for o in segment.chain.outputs]


def _reaches(fusion: Fusion, start: int, end: int) -> bool:
    return start in fusion.reads[end] or any(_reaches(fusion, start, r) for r in fusion.reads[end])


def program(fusion: Fusion, layouts: Layouts, groups: Sequence[Sequence[int]]) -> Program:
    plan, schedules = layouts.plan(groups, LIMITS["cpu"])
    assert Plan.parse(str(plan)) == plan
    return Program(layouts, plan, schedules, LIMITS["cpu"], read().cache, torch.device("cpu"))


@pytest.mark.parametrize("name", ["line", "diamond", "residual", "views"])
def test_every_plan_gives_equal_values(name: str) -> None:
    traced = trace(SMALL[name], (X,))
    fusion = check(traced.chain)
    sizes = sizes_of(traced, (X,)) or {}
    layouts = Layouts(fusion, [X], sizes)
    told = torch.utils._pytree.tree_leaves(SMALL[name](X))
    for groups in sorted(paths(fusion)):
        for made, right in zip(program(fusion, layouts, groups)([X], sizes), told, strict=True):
            assert made.stride() == right.stride()
            assert torch.allclose(made, right, rtol=1e-5, atol=1e-6), groups


def test_more_rows_than_it_was_made_for() -> None:
    fn = SMALL["residual"]
    traced = trace(fn, (X,))
    fusion = check(traced.chain)
    made = program(fusion, Layouts(fusion, [X], {"s0": 5}), fusion.fused())
    for rows in (0, 1, 5, 600):
        x = data(rows, 24)
        for mine, right in zip(made([x], {"s0": rows}), fn(x), strict=True):
            assert torch.allclose(mine, right, rtol=1e-5, atol=1e-6)
        for mine, right in zip(made.bind([x], {"s0": rows})(x), fn(x), strict=True):
            assert torch.allclose(mine, right, rtol=1e-5, atol=1e-6)


def test_plan_text() -> None:
    plan = Plan((Part("rowreduce", (3, 4)), Part("pointwise", (5,)), Part("eager", (6, 7))))
    assert str(plan) == "rowreduce(3,4) | pointwise(5) | eager(6,7)"
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse("eager") == Plan(())
    assert Plan.parse("eager").is_eager
    for text in ("", "pointwise", "pointwise()", "pointwise(1) pointwise(2)", "pointwise(1,)", "drop table", "p(1)|p(2)"):
        with pytest.raises(InputError):
            Plan.parse(text)


def test_a_plan_that_is_none_of_the_chains() -> None:
    fusion = fusion_of(SMALL["line"], X)
    layouts = Layouts(fusion, [X], {"s0": 5})
    a, b, *rest = fusion.nodes
    for groups in ([(a,)], [(b,), (a,), tuple(rest)], [(a, b), (b, *rest)]):
        with pytest.raises(Infeasible):
            program(fusion, layouts, groups)


def long(x: Tensor) -> Tensor:
    for k in range(30):
        x = (x * (1 + k)).sin()
    return x


def wide(x: Tensor) -> list[Tensor]:
    return [x * (k + 2) for k in range(12)]


def test_a_long_chain_is_bounded_and_says_so() -> None:
    fusion = fusion_of(long, X)
    assert len(fusion.nodes) == 60
    assert len(fusion.cuts) == 61
    assert fusion.bound == ""
    assert run(long, (X,)).message == ""


def test_a_wide_chain_is_bounded_and_says_so() -> None:
    fusion = fusion_of(wide, X)
    assert len(fusion.cuts) == 13
    assert f"{MAX_CUTS} cuts" in fusion.bound
    assert len(list(fusion.edges())) == 13 * 12 // 2
    assert run(wide, (X,)).message == ""


def test_equal_segments_of_two_chains_are_one() -> None:
    def one(x: Tensor) -> Tensor:
        return F.gelu((x * 2).softmax(-1)) + 1

    def other(x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(torch.cat((x, y), -1).softmax(-1)) - 3

    first, second = fusion_of(one, X), fusion_of(other, X, X)
    pick = {v.name: i for i, v in enumerate(first.chain.values)}
    also = {v.name: i for i, v in enumerate(second.chain.values)}
    mine = first.segment((pick["softmax"], pick["gelu"]))
    theirs = second.segment((also["softmax"], also["gelu"]))
    assert mine.chain.key == theirs.chain.key
    assert mine.chain.key != first.segment((pick["gelu"],)).chain.key


def test_views_belong_to_no_segment() -> None:
    fusion = fusion_of(lambda x: (x * 2).unflatten(-1, (4, 6)).transpose(-1, -2).sum(-1), X)
    assert [fusion.chain.values[n].name for n in fusion.nodes] == ["mul", "sum"]
    first, second = fusion.nodes
    assert fusion.segment((second,)).reads == (first,)


def test_what_is_no_kernel() -> None:
    def running(x: Tensor) -> Tensor:
        return torch.cumsum(x, -1)

    traced = trace(running, (X,))
    with pytest.raises(UnsupportedOp, match=r"cumsum.* in running at .*test_fusion.py:\d+"):
        check(traced.chain, traced.lines, "running")


def test_a_segment_that_is_not_one_kernel() -> None:
    fusion = fusion_of(lambda x: x.softmax(-1).unflatten(-1, (4, 6)).transpose(-1, -2).flatten(-2).amax(-1), X)
    reason = fusion.legal(fusion.nodes)
    groups = fusion.fused()
    assert (reason is None) == (len(groups) == 1)
    assert all(fusion.legal(g) is None for g in groups)
