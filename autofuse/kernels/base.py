"""The protocol of kernel kinds, and the frozen values that pass between search, store, dispatch and kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from ..chain import Chain
from ..errors import Infeasible, InputError
from .layout import Layout
from .lower import Lowered

Knobs = Mapping[str, int | str]


@dataclass(frozen=True)
class Knob:
    """One choice of a schedule. Integer knobs that are `log2` step by doubling. `when` names the knob values under
    which this one exists at all (block_cols only under form=looped)."""

    name: str
    values: tuple[int | str, ...]
    when: tuple[tuple[str, tuple[int | str, ...]], ...] = ()

    @property
    def log2(self) -> bool:
        """Whether the values are consecutive powers of two, to be searched by exponent."""
        v = [x for x in self.values if isinstance(x, int)]
        return len(v) == len(self.values) > 1 and v[0] > 0 and not v[0] & (v[0] - 1) and all(y == 2 * x for x, y in pairwise(v))

    def active(self, knobs: Knobs) -> bool:
        """Whether the knob exists beside these choices."""
        return all(knobs.get(n) in values for n, values in self.when)


@dataclass(frozen=True)
class Space:
    """The knobs of a segment's kernel at one workload, and a free check: a reason why a choice is not legal, or None."""

    kind: str
    version: int
    knobs: tuple[Knob, ...]
    check: Callable[[Knobs], str | None] = field(compare=False, default=lambda _: None)

    def validate(self, knobs: Knobs) -> dict[str, int | str]:
        """The knobs, each known and of an allowed value; they may come from a database that someone else wrote.

        Raises Infeasible for anything else, and for a choice that is not legal here.
        """
        made: dict[str, int | str] = {}
        for knob in self.knobs:
            if not knob.active(made):
                continue
            value = knobs.get(knob.name)
            if type(value) not in (int, str) or value not in knob.values:
                raise Infeasible(f"{self.kind} has no {knob.name}={value!r} here: one of {', '.join(map(repr, knob.values))}")
            made[knob.name] = value
        if set(knobs) - set(made):
            raise Infeasible(f"{self.kind} has no knob {', '.join(sorted(set(knobs) - set(made)))} beside the others")
        reason = self.check(made)
        if reason:
            raise Infeasible(reason)
        return made

    def pinned(self, pins: Knobs) -> Space:
        """The space with some knobs held at a value. Raises InputError for a value that a knob of this space has not."""
        knobs = []
        for k in self.knobs:
            if k.name in pins and pins[k.name] not in k.values:
                raise InputError(f"{k.name}={pins[k.name]} is none of this target's: {', '.join(map(str, k.values))}")
            knobs.append(replace(k, values=(pins[k.name],)) if k.name in pins else k)
        return replace(self, knobs=tuple(knobs))

    def reduce(self, knobs: Knobs) -> dict[str, int | str]:
        """Only the knobs that exist beside each other, in the space's order."""
        made: dict[str, int | str] = {}
        for k in self.knobs:
            if k.active(made):
                made[k.name] = knobs[k.name]
        return made


@dataclass(frozen=True)
class Limits:
    """What a kernel kind must know of a device."""

    target: str
    arch: str
    threads: int = 1
    sm_count: int = 1
    shared_bytes: int = 48 * 1024
    warp: int = 32

    @property
    def overlaps(self) -> bool:
        """Whether a kernel can start while the one before it ends: NVIDIA GPUs from sm_90 on."""
        return self.arch.removeprefix("sm_").isdigit() and int(self.arch.removeprefix("sm_")) >= 90


@dataclass(frozen=True)
class Launch:
    """One launch of a program: entry point, scalar arguments (see layout.bind), launch shape, and the tensors it takes.

    grid: ("rows", rows a program, column blocks), ("blocks", the same, but a row's blocks follow each other), ("units",
    programs a row, column blocks), ("persistent", rows a tile, programs), ("flat", block) or ("threads",)
    inputs, outputs, workspaces: which of the segment's and the source's, by number
    """

    entry: str
    args: tuple[tuple[object, ...], ...]
    grid: tuple[object, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspaces: tuple[int, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    overlaps: bool = False  # starts while the kernel before it ends (programmatic dependent launch)
    registers: int = 0  # the most that a thread may take; 0: as many as there are

    def options(self, fuse_products: bool) -> dict[str, int | bool]:
        """What Triton's compiler is told."""
        # ptxas gives up on a kernel that needs more registers than there are, and takes 32: told the most, it takes that
        most = min(255, 65536 // (32 * self.num_warps), self.registers or 255)
        told = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": fuse_products, "maxnreg": most}
        return {**told, "launch_pdl": True} if self.overlaps else told


@dataclass(frozen=True)
class Source:
    """Generated source of one segment's program: its text, and the launches in order.

    workspaces: (dtype, elements a row) of memory that the launches share and that is given back after them
    """

    target: str
    text: str
    launches: tuple[Launch, ...]
    workspaces: tuple[tuple[str, int], ...] = ()
    threads: int = 1
    fuse_products: bool = True
    kept: tuple[int, ...] = ()  # the workspaces that are 0 before the first call and stay as it leaves them for the next

    @property
    def hash(self) -> str:
        """32 hex digits that name the compiled program: source, and what the compiler is told beside it."""
        told = repr(
            (self.target, self.text, [(k.entry, k.num_warps, k.num_stages, k.registers) for k in self.launches], self.fuse_products)
        )
        return hashlib.sha256(told.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Task:
    """One segment to make a kernel for: its lowering, the layout of its operands, its row count and the device.

    rows: of the kernel, static axes among them included
    kept: how many of them results keep, where reductions join the others
    """

    chain: Chain
    low: Lowered
    layout: Layout
    rows: int
    limits: Limits
    kept: int = 1


class Kind(Protocol):
    """A kernel kind: it says which segments it makes, with which knobs, a good first schedule, and the source."""

    name: str
    version: int

    def match(self, task: Task) -> bool:
        """Whether this kind makes the segment."""
        ...

    def space(self, task: Task) -> Space:
        """The knobs worth searching at this workload."""
        ...

    def seed(self, task: Task) -> dict[str, int | str]:
        """A good schedule without any search."""
        ...

    def variants(self, task: Task) -> list[dict[str, int | str]]:
        """What of the seed a search changes first, most promising first: one schedule's knobs each."""
        ...

    def emit(self, task: Task, knobs: Knobs) -> Source:
        """The kernel's source. Raises Infeasible for a schedule that is not legal here."""
        ...
