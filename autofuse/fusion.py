"""Legal segments and plans of a chain.

Index maps and constants belong to no segment: they are read through, or replayed on a result. What is left are the
chain's compute nodes; a plan is an ordered partition of them into convex segments. The boundaries are cuts (sets of nodes
that are closed under "is read by"), so that plans are paths from the empty cut to the full one, and the best plan is a
shortest path. A chain with more than MAX_CUTS cuts is searched along its canonical order only; `Fusion.bound` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .chain import Chain
from .errors import AutofuseError, Infeasible, InputError, UnsupportedOp
from .kernels.lower import Lowered, lower
from .ops import is_free

MAX_CUTS = 64
MAX_NODES = 48  # compute nodes of one segment

EAGER = "eager"


@dataclass(frozen=True)
class Part:
    """One segment of a plan: the compute nodes it holds, and the kind of program that makes it ("eager" or a kernel's)."""

    kind: str
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}({','.join(map(str, self.nodes))})"


@dataclass(frozen=True)
class Plan:
    """The fusion boundaries of a chain: an ordered partition of its compute nodes. `eager` is the function itself."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts)) or EAGER

    @property
    def is_eager(self) -> bool:
        """Whether this is the function itself, run as written."""
        return not self.parts

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan of `str(plan)`. Raises InputError for anything else."""
        if text.strip() == EAGER:
            return Plan(())
        parts = []
        for piece in text.split(" | "):
            found = re.fullmatch(r"(\w+)\((\d+(?:,\d+)*)\)", piece.strip())
            if found is None:
                raise InputError(
                    f"{text!r} is no plan: write it as kind(nodes) | kind(nodes), such as rowreduce(3,4) | pointwise(5)"
                )
            parts.append(Part(found[1], tuple(int(n) for n in found[2].split(","))))
        return Plan(tuple(parts))


@dataclass(frozen=True)
class Segment:
    """A convex part of a chain as a chain of its own: what it reads and writes are values of the whole chain.

    `symbols` pairs each row symbol of the part with the whole chain's.
    """

    nodes: tuple[int, ...]
    chain: Chain
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    symbols: tuple[tuple[str, str], ...]

    def sizes(self, whole: Mapping[str, int]) -> dict[str, int]:
        """The part's row symbols' sizes, given the whole chain's."""
        return {mine: whole[theirs] for mine, theirs in self.symbols}

    @cached_property
    def lowered(self) -> Lowered:
        """The segment as one kernel's expressions. Raises Infeasible where it is not one kernel."""
        return lower(self.chain)


class Fusion:
    """The compute nodes of a chain, its cuts and its segments."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.nodes = tuple(i for i in chain.nodes if not is_free(chain.values[i].name))
        self._segments: dict[tuple[int, ...], Segment] = {}
        self.reads = {n: self._sources(n) for n in self.nodes}
        self.cuts, self.bound = self._cuts()

    def root(self, value: int) -> int:
        """The input, constant or compute node whose memory an index map shows."""
        while value >= self.chain.num_inputs and is_free(self.chain.values[value].name) and self.chain.values[value].refs:
            value = self.chain.values[value].refs[0]
        return value

    def _sources(self, node: int) -> frozenset[int]:
        """The compute nodes that a node reads, through index maps."""
        found: set[int] = set()
        stack = list(self.chain.values[node].refs)
        mine = set(self.nodes)
        while stack:
            r = stack.pop()
            if r in mine:
                found.add(r)
            elif r >= self.chain.num_inputs:
                stack.extend(self.chain.values[r].refs)
        return frozenset(found)

    def _cuts(self) -> tuple[list[frozenset[int]], str]:
        """Every cut, smallest first; along the canonical order only where there are too many."""
        level: set[frozenset[int]] = {frozenset()}
        every = [frozenset[int]()]
        while level:
            grown: set[frozenset[int]] = set()
            for cut in level:
                for n in self.nodes:
                    if n not in cut and self.reads[n] <= cut:
                        grown.add(cut | {n})
            every += sorted(grown, key=sorted)
            if len(every) > MAX_CUTS:
                line = [frozenset(self.nodes[:k]) for k in range(len(self.nodes) + 1)]
                note = (
                    f"over {MAX_CUTS} cuts: only boundaries along the canonical order of the {len(self.nodes)} operations "
                    "are searched"
                )
                return line, note
            level = grown
        return every, ""

    # ---- segments

    def segment(self, nodes: Sequence[int]) -> Segment:
        """The segment of these compute nodes, with the index maps and constants between them."""
        key = tuple(sorted(nodes))
        found = self._segments.get(key)
        if found is None:
            found = self._segments[key] = self._make(key)
        return found

    def _make(self, nodes: tuple[int, ...]) -> Segment:
        chain, members = self.chain, set(nodes)
        inside = set(nodes)
        stack = [r for n in nodes for r in chain.values[n].refs]
        compute = set(self.nodes)
        while stack:
            r = stack.pop()
            if r < chain.num_inputs or r in compute or r in inside:
                continue
            inside.add(r)
            stack.extend(chain.values[r].refs)
        writes = tuple(n for n in nodes if self._needed_outside(n, members))
        sub, reads, symbols = chain.subchain(sorted(inside), writes)
        return Segment(nodes, sub, reads, writes, tuple(symbols.items()))

    def _needed_outside(self, node: int, members: set[int]) -> bool:
        stack = [node]
        seen = set()
        while stack:
            v = stack.pop()
            if v in self.chain.outputs:
                return True
            for u in self.chain.users[v]:
                if u in seen:
                    continue
                seen.add(u)
                if is_free(self.chain.values[u].name):
                    stack.append(u)
                elif u not in members:
                    return True
        return False

    def legal(self, nodes: Sequence[int]) -> str | None:
        """Why these nodes are not one kernel, or None where they are."""
        if len(nodes) > MAX_NODES:
            return f"over {MAX_NODES} operations"
        segment = self.segment(nodes)
        if not segment.writes:
            return "nothing is written"
        try:
            segment.lowered  # noqa: B018
        except (Infeasible, UnsupportedOp) as e:
            return str(e)
        return None

    def edges(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Every segment between two cuts, as (from, to, nodes) with cuts by number: connected ones, and single nodes."""
        for a, low in enumerate(self.cuts):
            for b in range(a + 1, len(self.cuts)):
                high = self.cuts[b]
                if low < high:
                    nodes = tuple(sorted(high - low))
                    if len(nodes) <= MAX_NODES and self._connected(nodes):
                        yield a, b, nodes

    def _connected(self, nodes: Sequence[int]) -> bool:
        """Whether the nodes hang together, by what they read or by an input that two of them share."""
        if len(nodes) == 1 or len(nodes) == len(self.nodes):
            return True
        touch = {
            n: {("n", n)} | {("n", r) for r in self.reads[n]} | {("i", self.root(r)) for r in self.chain.values[n].refs}
            for n in nodes
        }
        mine, left = set(touch[nodes[0]]), set(nodes[1:])
        while True:
            near = {n for n in left if touch[n] & mine}
            if not near:
                return not left
            for n in near:
                mine |= touch[n]
            left -= near

    def unfused(self) -> list[tuple[int, ...]]:
        """Each operation alone, in order."""
        return [(n,) for n in self.nodes]

    def fused(self) -> list[tuple[int, ...]]:
        """As few segments as are legal, taken greedily along the canonical order."""
        parts: list[tuple[int, ...]] = []
        k = 0
        while k < len(self.nodes):
            size = len(self.nodes) - k
            while size > 1 and self.legal(self.nodes[k : k + size]) is not None:
                size -= 1
            parts.append(self.nodes[k : k + size])
            k += size
        return parts


def check(chain: Chain, lines: Mapping[str, str] | None = None, name: str = "the function") -> Fusion:
    """The fusion of a chain, every operation of it known to be lowered. Raises UnsupportedOp with operation and line."""
    fusion = Fusion(chain)
    for n in fusion.nodes:
        try:
            fusion.segment((n,)).lowered  # noqa: B018
        except Infeasible as e:
            op = chain.values[n].op
            raise UnsupportedOp(_where(op, lines, name, f"is not lowered with these shapes: {e}")) from e
        except UnsupportedOp as e:
            op = chain.values[n].op
            raise UnsupportedOp(_where(op, lines, name, f"is not lowered: {e}")) from e
    if not fusion.nodes and not all(o < chain.num_inputs or fusion.root(o) < chain.num_inputs for o in chain.outputs):
        raise AutofuseError(f"{name} computes nothing from its inputs: it needs no kernel")
    return fusion


def _where(op: str, lines: Mapping[str, str] | None, name: str, what: str) -> str:
    line = (lines or {}).get(op, "")
    what = what.replace(f"{op} ", "it ")
    return f"{op.removeprefix('aten.')} in {name}{f' at {line}' if line else ''} {what}"
