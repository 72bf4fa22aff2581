"""A config made runnable: each segment's kernel built, the values between them allocated, views replayed on results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import flat, ops
from .chain import Value, dim_value
from .errors import Infeasible
from .fusion import EAGER, Fusion, Part, Plan, Segment
from .kernels.artifact import find
from .kernels.base import Kind, Limits, Source, Task
from .kernels.launch import Kernel, operand_of
from .kernels.layout import Operand, bind, layout_of
from .kernels.registry import BY_NAME, kind_of
from .reference import evaluate

Schedules = Sequence[Mapping[str, int | str]]
Bound = Callable[..., Any]


def physical_order(strides: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dimensions in memory, outermost first, of a dense tensor; None where it is plainly contiguous.

    Dimensions of extent 1 stay where they are.
    """
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    return None if order == sorted(order) else tuple(order)


def allocate(value: Value, sizes: Mapping[str, int], device: torch.device, order: tuple[int, ...] | None) -> torch.Tensor:
    """Fresh memory for a value at these sizes, laid out as eager lays it out."""
    shape = tuple(dim_value(d, sizes) for d in value.shape)
    if order is None:
        return torch.empty(shape, dtype=ops.TORCH[value.dtype], device=device)
    return torch.empty_permuted(shape, order, dtype=ops.TORCH[value.dtype], device=device)


@dataclass(frozen=True)
class Step:
    """One segment ready to run: its kernel, or None where PyTorch runs its operations."""

    segment: Segment
    kernel: Kernel | None


class Layouts:
    """How every value of a chain lies in memory at one call: the inputs as they are, the others as eager lays them out."""

    def __init__(self, fusion: Fusion, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
        self.fusion, self.chain, self.sizes = fusion, fusion.chain, dict(sizes)
        self.orders = dict.fromkeys(self.chain.nodes) if self._is_plain(inputs) else self._memory_orders(inputs)
        self.operands = {k: operand_of(t) for k, t in enumerate(inputs)}
        for value in self.orders:
            self.operands[value] = self._operand(value)

    def _is_plain(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether nothing lies other than contiguously: no operation but these two turns axes or repeats one. The first
        run without data costs a process most of a second."""
        return all(t.is_contiguous() for t in inputs) and not any(
            self.chain.values[n].name in ("permute", "expand") for n in self.chain.nodes
        )

    def _memory_orders(self, inputs: Sequence[torch.Tensor]) -> dict[int, tuple[int, ...] | None]:
        """The chain runs once without data, on tensors with the inputs' strides."""
        metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs]
        wanted = list(self.chain.nodes)
        made = evaluate(self.chain, metas, self.sizes, wanted)
        return {
            i: physical_order(t.stride(), t.shape) if t.numel() and _dense(t) else None for i, t in zip(wanted, made, strict=True)
        }

    def _operand(self, value: int) -> Operand:
        shape = [dim_value(d, self.sizes) for d in self.chain.values[value].shape]
        order = self.orders[value]
        if order is None:
            return Operand.contiguous(shape)
        strides, step = [0] * len(shape), 1
        for d in reversed(order):
            strides[d] = step
            step *= max(1, shape[d])
        return Operand(tuple(shape), tuple(strides))

    def task(self, nodes: Sequence[int], limits: Limits) -> Task:
        """A segment as a task of the kernel kinds. Raises Infeasible where it is not one kernel."""
        segment = self.fusion.segment(nodes)
        mine = segment.sizes(self.sizes)
        operands = [self.operands[v] for v in (*segment.reads, *segment.writes)]
        low = segment.lowered
        layout = layout_of(low, operands, mine)
        kept, joined = (max(1, n) for n in bind((("rows",), ("reds",)), layout, low, (), mine))
        return Task(segment.chain, low, layout, kept * joined, limits, kept)

    def seed(
        self, nodes: Sequence[int], limits: Limits, pins: Mapping[str, int | str] | None = None
    ) -> tuple[Kind, dict[str, int | str]] | None:
        """The kind and heuristic schedule of a segment, some knobs pinned, or None where no kernel makes it."""
        if self.fusion.legal(nodes) is not None:
            return None
        try:
            task = self.task(nodes, limits)
            kind = kind_of(task)
            knobs = {**kind.seed(task), **(pins or {})}
            kind.emit(task, knobs)
        except Infeasible:
            return None
        return kind, knobs

    def plan(
        self, groups: Sequence[Sequence[int]], limits: Limits, pins: Mapping[str, int | str] | None = None
    ) -> tuple[Plan, list[dict[str, int | str]]]:
        """The plan of these groups of nodes with heuristic schedules. A group that no kernel makes is cut into what
        kernels make; PyTorch runs single operations that none does."""
        parts: list[Part] = []
        schedules: list[dict[str, int | str]] = []
        for group in groups:
            left = tuple(group)
            while left:
                size = len(left)
                made = self.seed(left, limits, pins)
                while made is None and size > 1:
                    size -= 1
                    made = self.seed(left[:size], limits, pins)
                parts.append(Part(EAGER if made is None else made[0].name, left[:size]))
                schedules.append({} if made is None else made[1])
                left = left[size:]
        return Plan(tuple(parts)), schedules


class Program:
    """A config of a chain at one layout class, for any row count. Calling it gives the chain's outputs."""

    def __init__(
        self, layouts: Layouts, plan: Plan, schedules: Schedules, limits: Limits, cache: Path, device: torch.device,
        trusted: Sequence[Path] | None = None,
    ) -> None:  # fmt: skip
        """`trusted`: folders beside the cache whose binaries are launched as they are; None: every kernel is compiled here."""
        self.fusion, self.plan, self.chain = layouts.fusion, plan, layouts.chain
        self.device, self.orders = device, layouts.orders
        self.sources: list[Source | None] = []
        self.steps: list[Step] = []
        self._views: dict[int, Segment] = {}
        self.checked = False  # by its first caller, where no search has
        if plan.is_eager:
            return
        self._check_plan()
        for part, knobs in zip(plan.parts, schedules, strict=True):
            kernel = source = None
            if part.kind != EAGER:
                task = layouts.task(part.nodes, limits)
                kind = BY_NAME.get(part.kind)
                if kind is None or not kind.match(task):
                    raise Infeasible(f"{part.kind} does not make the segment of operations {part.nodes}")
                source = kind.emit(task, knobs)
                artifact = None
                if trusted is not None and source.target == "cuda":
                    artifact = find(source, limits.arch, (cache, *trusted))
                kernel = Kernel(task.low, task.layout, source, cache, artifact)
            self.sources.append(source)
            self.steps.append(Step(self.fusion.segment(part.nodes), kernel))
        written = {v for s in self.steps for v in s.segment.writes}
        # index maps of results are replayed by PyTorch, so that an output that is a view stays one
        self.replayed = [o for o in dict.fromkeys(self.chain.outputs) if o >= self.chain.num_inputs and o not in written]

    def _check_plan(self) -> None:
        held = [n for p in self.plan.parts for n in p.nodes]
        if sorted(held) != sorted(self.fusion.nodes):
            raise Infeasible("the plan does not hold each operation of the chain once")
        done: set[int] = set()
        for p in self.plan.parts:
            needs = set[int]().union(*(self.fusion.reads[n] for n in p.nodes))
            if needs - done - set(p.nodes):
                raise Infeasible("a segment of the plan reads what a later one writes")
            done |= set(p.nodes)

    def __call__(self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """The chain's outputs. Inputs are never written."""
        if self.plan.is_eager:
            return evaluate(self.chain, inputs, sizes)
        values: dict[int, torch.Tensor] = dict(enumerate(inputs))
        for step in self.steps:
            segment = step.segment
            reads = [values[v] for v in segment.reads]
            if step.kernel is None:
                made = evaluate(segment.chain, reads, segment.sizes(sizes))
            else:
                made = [self.empty(v, sizes) for v in segment.writes]
                step.kernel(reads, made, segment.sizes(sizes))
            values.update(zip(segment.writes, made, strict=True))
        for o in self.replayed:
            self._replay(o, values, sizes)
        return [values[o] for o in self.chain.outputs]

    def bind(
        self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], spec: Any = None, counter: Callable[[], Any] | None = None
    ) -> Bound:
        """The program for inputs of exactly these sizes and strides: a function of them that gives the outputs, nested as
        `spec` (a tree of torch.utils._pytree) says, or as a list. Shapes, scalars and grids are computed once, here.
        `counter` is called in each run."""
        arguments = ", ".join(f"v{k}" for k in range(self.chain.num_inputs))
        lines, names = self._body(inputs, sizes)
        names["spec"], names["unflatten"] = spec, torch.utils._pytree.tree_unflatten
        names["counter"], counted = counter, ["counter()"] if counter is not None else []
        outputs = ", ".join(f"v{o}" for o in self.chain.outputs)
        if spec is None:
            result = f"[{outputs}]"
        elif spec.is_leaf():
            result = outputs
        elif spec.type in (tuple, list) and spec.num_nodes == spec.num_children + 1:
            result = f"({outputs},)" if spec.type is tuple else f"[{outputs}]"
        else:
            result = f"unflatten([{outputs}], spec)"
        text = "".join(f"    {line}\n" for line in (*lines, *counted, f"return {result}"))
        return flat.function(f"def run({arguments}):\n{text}", names)

    def bind_into(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sizes: Mapping[str, int],
        counter: Callable[[], Any],
    ) -> Bound:  # fmt: skip
        """As `bind`, for a function of the inputs and of tensors like `outputs`, which get the chain's outputs. Kernels write
        what lies in memory as eager lays it out; the rest is copied. No output may share memory with an input."""
        given = [f"o{k}" for k in range(len(outputs))]
        owned: dict[int, str] = {}
        written = {v for step in self.steps if step.kernel is not None for v in step.segment.writes}
        for name, value, t in zip(given, self.chain.outputs, outputs, strict=True):
            if value in written and t.numel() and t.stride() == self.empty(value, sizes).stride():
                owned.setdefault(value, name)
        lines, names = self._body(inputs, sizes, owned)
        for name, value in zip(given, self.chain.outputs, strict=True):
            if owned.get(value) != name:
                lines.append(f"{name}.copy_(v{value})")
        arguments = ", ".join([*(f"v{k}" for k in range(self.chain.num_inputs)), *given])
        text = "".join(f"    {line}\n" for line in (*lines, "counter()"))
        return flat.function(f"def run({arguments}):\n{text}", names | {"counter": counter})

    def _body(
        self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], owned: Mapping[int, str] | None = None
    ) -> tuple[list[str], dict[str, Any]]:
        """The lines of a bound call, which make every output v<value> of the inputs v<k>, and what they name. `owned`: the
        names of tensors that kernels write values into."""
        if self.plan.is_eager:
            every = ", ".join(f"v{k}" for k in range(self.chain.num_inputs))
            targets = "".join(f"v{o}, " for o in self.chain.outputs)
            return [f"{targets}= evaluate(chain, [{every}], sizes)"] if targets else [], {
                "evaluate": evaluate, "chain": self.chain, "sizes": dict(sizes),
            }  # fmt: skip
        names: dict[str, Any] = {"evaluate": evaluate, "empty": empty_of(self.device), "view": _view}
        lines: list[str] = []
        values: dict[int, torch.Tensor] = dict(enumerate(inputs))
        needed = {v: n for n, step in enumerate(self.steps) for v in step.segment.reads}  # the last step that reads a value
        kept = set(self.chain.outputs) | {self.fusion.root(o) for o in self.chain.outputs} | self._shown()
        for n, step in enumerate(self.steps):
            segment = step.segment
            mine = segment.sizes(sizes)
            taken = [f"v{v}" for v in segment.reads]
            made = [self.empty(v, sizes) for v in segment.writes]
            if step.kernel is None:
                names |= {f"chain{n}": segment.chain, f"sizes{n}": mine}
                lines.append(f"{''.join(f'v{v}, ' for v in segment.writes)}= evaluate(chain{n}, [{', '.join(taken)}], sizes{n})")
            else:
                for v, t in zip(segment.writes, made, strict=True):
                    if owned and v in owned:
                        lines.append(f"v{v} = {owned[v]}")
                        continue
                    names |= {f"shape{v}": tuple(t.shape), f"stride{v}": t.stride(), f"dtype{v}": t.dtype}
                    lines.append(f"v{v} = empty(shape{v}, stride{v}, dtype{v})")
                names[f"launch{n}"] = step.kernel.bind([values[v] for v in segment.reads], made, mine)
                lines.append(f"launch{n}({', '.join((*taken, *(f'v{v}' for v in segment.writes)))})")
            values.update(zip(segment.writes, made, strict=True))
            done = [v for v, last in needed.items() if last == n and v >= self.chain.num_inputs and v not in kept]
            if done:  # the allocator gives their memory to the next step
                lines.append(f"del {', '.join(f'v{v}' for v in done)}")
        views = self._views_of(values, sizes)
        if views is None:
            names |= {"replay": self._replay, "sizes": dict(sizes)}
            here = sorted(set(range(self.chain.num_inputs)) | {v for s in self.steps for v in s.segment.writes if v in kept})
            lines.append(f"held = {{{', '.join(f'{v}: v{v}' for v in here)}}}")
            for o in self.replayed:
                lines += [f"replay({o}, held, sizes)", f"v{o} = held[{o}]"]
        else:
            for o, (root, *how) in views.items():
                names |= {f"how{o}": tuple(how)}
                lines.append(f"v{o} = view(v{root}, *how{o})")
        return lines, names

    def _shown(self) -> set[int]:
        """Every value that replaying the outputs' index maps reads."""
        found: set[int] = set()
        waiting = list(self.replayed)
        while waiting:
            v = waiting.pop()
            if v not in found:
                found.add(v)
                waiting += self.chain.values[v].refs
        return found

    def _views_of(self, held: dict[int, torch.Tensor], sizes: Mapping[str, int]) -> dict[int, View] | None:
        """How each replayed output shows an input or a written value; None where one of them is a copy."""
        views: dict[int, View] = {}
        known = set(held)
        for o in self.replayed:
            self._replay(o, held, sizes)
            root, t = self.fusion.root(o), held[o]
            if root not in known or t.untyped_storage().data_ptr() != held[root].untyped_storage().data_ptr() or not t.numel():
                return None
            views[o] = (root, tuple(t.shape), t.stride(), int(t.storage_offset()) - int(held[root].storage_offset()))
        return views

    def empty(self, value: int, sizes: Mapping[str, int]) -> torch.Tensor:
        """Fresh memory for a value, laid out as eager lays it out."""
        return allocate(self.chain.values[value], sizes, self.device, self.orders[value])

    def _replay(self, value: int, values: dict[int, torch.Tensor], sizes: Mapping[str, int]) -> None:
        if value in values:
            return
        for r in self.chain.values[value].refs:
            self._replay(r, values, sizes)
        segment = self._views.get(value)
        if segment is None:
            sub, reads, symbols = self.chain.subchain([value], [value])
            segment = self._views[value] = Segment((value,), sub, reads, (value,), tuple(symbols.items()))
        (values[value],) = evaluate(segment.chain, [values[r] for r in segment.reads], segment.sizes(sizes))


def empty_of(device: torch.device) -> Callable[..., torch.Tensor]:
    """What allocates (shape, strides, dtype) on the current device of this type: torch's own short cut past its dispatcher
    where it has one."""
    from torch._C._dynamo import guards

    found: Callable[..., torch.Tensor] | None = getattr(guards, f"_empty_strided_{device.type}", None)
    return found or (lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device))


View = tuple[int, tuple[int, ...], tuple[int, ...], int]


def _view(t: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """An index map of a tensor, by its strides: what replaying it would give, at once."""
    return t.as_strided(size, stride, t.storage_offset() + offset)


def _dense(t: torch.Tensor) -> bool:
    step = 1
    for s, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n != 1 and s != step:
            return False
        step *= n
    return True
