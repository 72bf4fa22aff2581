"""What the measuring process does with a request: programs built, checked against the oracle, and timed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..accuracy import Verdict
from ..chain import Chain
from ..cost import bytes_min
from ..errors import Infeasible, InputError
from ..fusion import EAGER, Fusion, Plan, Segment
from ..kernels.base import Limits, Source
from ..kernels.launch import Kernel
from ..kernels.registry import BY_NAME
from ..program import Layouts, Program, allocate, empty_of
from ..reference import evaluate
from .check import Case, Checker, Fill, make_cases
from .measure import Timing, input_sets, interleave, prepare, turn
from .outcome import compile_triton, failure, resources
from .recipes import Recipe, make

MEASURED = ("segment", "config", "race")  # requests that run on the device, one process at a time
KEPT_BYTES = 2**30  # recorded inputs and oracle results of segments; the least recently used go first
Call = Callable[[int], Any]


class Bench:
    """The state of one measuring process: a chain at one workload on one device."""

    def __init__(self) -> None:
        self.ready = False

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. What goes wrong with a candidate is in its status."""
        op = request.get("op")
        if op == "setup":
            self._setup(request)
            return {"status": "ok"}
        if not self.ready:
            raise InputError("the first request must be a setup")
        answers: dict[Any, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "build": self._build, "ahead": self._ahead, "segment": self._segment, "config": self._config, "race": self._race,
        }  # fmt: skip
        if op not in answers:
            raise InputError(f"{op!r} is no request: one of setup, {', '.join(answers)}")
        try:
            return answers[op](request)
        except BaseException as e:
            made = failure(e)
            del e
            if made["status"] == "out_of_memory" and self.device.type == "cuda":
                torch.cuda.empty_cache()
            return made

    def turn(self, request: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """What a request waits for before it begins: no other process measures on the device."""
        if self.ready and request.get("op") in MEASURED:
            return turn(self.device, self.cache)
        return contextlib.nullcontext()

    def _setup(self, r: Mapping[str, Any]) -> None:
        for name in r.get("plugins", ()):
            importlib.import_module(name)
        self.chain = Chain.from_json(r["chain"])
        self.fusion = Fusion(self.chain)
        self.recipes = [Recipe.from_json(x) for x in r["recipes"]]
        self.sizes: dict[str, int] = dict(r["sizes"])
        self.device = torch.device(r["device"])
        self.limits = Limits(**r["limits"])
        self.cache = Path(r["cache"])
        self.seed = int(r.get("seed", 0))
        self.protocol = str(r["protocol"])
        self.cap: int | None = r.get("cap")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(max(1, self.limits.threads))
        shapes = [v.shape for v in self.chain.inputs]
        count = input_sets(bytes_min(self.chain, self.sizes), self.device, self.protocol)
        self.sets = [make(self.recipes, shapes, self.sizes, self.device, 7919 + self.seed + k) for k in range(count)]
        self.layouts = Layouts(self.fusion, self.sets[0], self.sizes)
        self._cases: list[Case] | None = None
        self._whole: Checker | None = None
        self._built: dict[str, dict[str, Any]] = {}
        self._kept: OrderedDict[tuple[int, ...], _Recorded] = OrderedDict()
        self.ready = True

    @property
    def cases(self) -> list[Case]:
        """The inputs that the whole chain is checked on."""
        if self._cases is None:
            self._cases = make_cases(self.chain, self.recipes, self.sizes, self.device, self.seed, self.cap)
        return self._cases

    @property
    def whole(self) -> Checker:
        """The whole chain's checker."""
        if self._whole is None:
            self._whole = Checker(self.chain, self.cases)
        return self._whole

    # ---- one segment

    def _reads(self, segment: Segment, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        """What the segment reads, from the eager chain, laid out as a program lays out values between segments."""
        made = evaluate(self.chain, inputs, sizes, segment.reads)
        return tuple(
            t if v < self.chain.num_inputs else self._empty(v, sizes).copy_(t) for v, t in zip(segment.reads, made, strict=True)
        )

    def _empty(self, value: int, sizes: Mapping[str, int]) -> torch.Tensor:
        return allocate(self.chain.values[value], sizes, self.device, self.layouts.orders[value])

    def recorded(self, segment: Segment) -> _Recorded:
        """The segment's inputs and checker, made once and kept while there is room."""
        found = self._kept.get(segment.nodes)
        if found is None:
            found = _Recorded(self, segment)
            self._kept[segment.nodes] = found
        self._kept.move_to_end(segment.nodes)
        while len(self._kept) > 1 and sum(k.nbytes for k in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return found

    def _kernel(self, segment: Segment, r: Mapping[str, Any]) -> Kernel:
        task = self.layouts.task(segment.nodes, self.limits)
        kind = BY_NAME.get(r["kind"])
        if kind is None or not kind.match(task):
            raise Infeasible(f"{r['kind']} does not make the segment of operations {segment.nodes}")
        source = kind.emit(task, r["knobs"])
        return Kernel(task.low, task.layout, source, self.cache)

    def _build(self, r: Mapping[str, Any]) -> dict[str, Any]:
        segment = self.fusion.segment(r["nodes"])
        start = time.perf_counter()
        if r["kind"] == EAGER:
            return {"status": "ok", "compile_s": 0.0, "source_hash": ""}
        kernel = self._kernel(segment, r)
        facts: dict[str, Any] = {}
        if kernel.source.target != "cpu":
            mine = segment.sizes(self.sizes)
            outputs = [self._empty(v, self.sizes) for v in segment.writes]
            reads = [self.sets[0][v] if v < self.chain.num_inputs else self._empty(v, self.sizes) for v in segment.reads]
            facts = compile_triton(kernel, reads, outputs, mine)
        return {
            "status": "ok", "compile_s": time.perf_counter() - start, "source_hash": kernel.source.hash, **facts,
        }  # fmt: skip

    def _ahead(self, r: Mapping[str, Any]) -> dict[str, Any]:
        """Several schedules of one segment built side by side; what fails here fails again when it is asked for."""
        self.fusion.segment(r["nodes"])  # made once, before threads ask for it

        def one(knobs: Mapping[str, Any]) -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread's own
            asked = {"nodes": r["nodes"], "kind": r["kind"], "knobs": knobs}
            with contextlib.suppress(Exception):
                self._built[_key(asked)] = self._build(asked)

        with ThreadPoolExecutor(max(1, min(len(r["knobs"]), os.cpu_count() or 1))) as pool:
            list(pool.map(one, r["knobs"]))
        return {"status": "ok"}

    def _segment(self, r: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._built.pop(_key(r), None) or self._build(r)
        most, spills = r.get("most_spills"), answer.get("spills") or 0
        if most is not None and spills > most:
            return {**answer, "status": "pruned", "message": f"{spills} registers are spilled, more than {most}"}
        segment = self.fusion.segment(r["nodes"])
        kept = self.recorded(segment)
        kernel = None if r["kind"] == EAGER else self._kernel(segment, r)
        mine = segment.sizes(self.sizes)

        def run(reads: Sequence[torch.Tensor], sizes: Mapping[str, int], fill: Fill) -> Sequence[torch.Tensor]:
            if kernel is None:
                return evaluate(segment.chain, reads, sizes)
            whole = {theirs: sizes[ours] for ours, theirs in segment.symbols}
            outputs = [fill(self._empty(v, whole)) for v in segment.writes]
            kernel(reads, outputs, sizes)
            return outputs

        if r.get("check", True):
            verdict = kept.checker.check(run)
            answer |= _errors(verdict)
            if not verdict.ok:
                return answer
        return answer | self._timed(self._segment_call(segment, kernel, kept.sets, mine), r)

    def _segment_call(
        self, segment: Segment, kernel: Kernel | None, sets: Sequence[Sequence[torch.Tensor]], mine: Mapping[str, int],
    ) -> Call:  # fmt: skip
        if kernel is None:
            return lambda k: evaluate(segment.chain, sets[k], mine)
        # the launch as dispatch prepares it: everything but the outputs is bound once
        sample = [self._empty(v, self.sizes) for v in segment.writes]
        launch = kernel.bind(sets[0], sample, mine)
        layout = [(tuple(t.shape), t.stride(), t.dtype) for t in sample]
        empty = empty_of(self.device)

        def call(k: int) -> list[torch.Tensor]:
            made = [empty(shape, stride, dtype) for shape, stride, dtype in layout]
            launch(*sets[k], *made)
            return made

        return call

    def _timed(self, call: Call, r: Mapping[str, Any]) -> dict[str, Any]:
        sampler = prepare(call, self.device, self.protocol, len(self.sets))
        try:
            (timing,) = interleave([sampler], self.device, float(r.get("budget_s", 0.2)))
        finally:
            sampler.close()
        return _times(timing)

    # ---- whole configs

    def _program(self, r: Mapping[str, Any]) -> tuple[Program, dict[str, Any]]:
        plan = Plan.parse(r["plan"])
        start = time.perf_counter()
        program = Program(self.layouts, plan, r.get("schedules", ()), self.limits, self.cache, self.device)
        program(self.sets[0], self.sizes)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        answer: dict[str, Any] = {
            "status": "ok", "compile_s": time.perf_counter() - start, "source_hash": joined_hash(program.sources),
        }  # fmt: skip
        return program, answer | resources(program)

    def _checked(self, r: Mapping[str, Any], check: bool) -> tuple[Program, dict[str, Any]]:
        program, answer = self._program(r)
        if check:
            answer |= _errors(self.whole.check(runner(program)))
        return program, answer

    def _config(self, r: Mapping[str, Any]) -> dict[str, Any]:
        program, answer = self._checked(r, r.get("check", True))
        if answer["status"] != "ok":
            return answer
        return answer | self._timed(_bound_call(program, self.sets, self.sizes), r)

    def _race(self, r: Mapping[str, Any]) -> dict[str, Any]:
        """Every config checked, then those that are right timed against each other. Answers with `results` in order."""
        results: list[dict[str, Any]] = []
        samplers = []
        for config in r["configs"]:
            try:
                program, answer = self._checked(config, config.get("check", r.get("check", True)))
                if answer["status"] == "ok":
                    call = _bound_call(program, self.sets, self.sizes)
                    samplers.append((len(results), prepare(call, self.device, self.protocol, len(self.sets))))
            except BaseException as e:
                answer = failure(e)
                if answer["status"] == "crashed":
                    raise
            results.append(answer)
        try:
            timings = interleave([s for _, s in samplers], self.device, float(r.get("budget_s", 1.0)))
        finally:
            for _, s in samplers:
                s.close()
        for (at, _), timing in zip(samplers, timings, strict=True):
            results[at] |= _times(timing)
        return {"status": "ok", "results": results}


def _key(r: Mapping[str, Any]) -> str:
    return json.dumps([list(r["nodes"]), r["kind"], r["knobs"]], sort_keys=True)


class _Recorded:
    """What a segment is checked and timed on."""

    def __init__(self, bench: Bench, segment: Segment) -> None:
        cases = [Case(c.name, bench._reads(segment, c.inputs, c.sizes), segment.sizes(c.sizes)) for c in bench.cases]
        self.checker = Checker(segment.chain, cases)
        self.sets = [bench._reads(segment, inputs, bench.sizes) for inputs in bench.sets]
        self.nbytes = self.checker.nbytes + sum(t.numel() * t.element_size() for s in self.sets for t in s)


def _bound_call(program: Program, sets: Sequence[Sequence[torch.Tensor]], sizes: Mapping[str, int]) -> Call:
    bound = program.bind(sets[0], sizes)
    return lambda k: bound(*sets[k])


def runner(program: Program) -> Callable[[Sequence[torch.Tensor], Mapping[str, int], Fill], list[torch.Tensor]]:
    """A program whose freshly allocated values are poisoned by `fill`."""

    def run(inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], fill: Fill) -> list[torch.Tensor]:
        empty = program.empty
        vars(program)["empty"] = lambda value, at: fill(empty(value, at))
        try:
            return program(inputs, sizes)
        finally:
            del vars(program)["empty"]

    return run


def joined_hash(sources: Sequence[Source | None]) -> str:
    """One name for the sources of a config's kernels: the source's own where there is one, "" where there is none."""
    hashes = [s.hash for s in sources if s is not None]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:32] if hashes else ""


def _errors(v: Verdict) -> dict[str, Any]:
    made: dict[str, Any] = {"max_error": v.max_error, "eager_error": v.eager_error}
    return made if v.ok else {**made, "status": "incorrect", "message": v.message}


def _times(t: Timing) -> dict[str, Any]:
    return {"median_us": t.median_us, "p20_us": t.p20_us, "p80_us": t.p80_us, "samples": t.samples}
