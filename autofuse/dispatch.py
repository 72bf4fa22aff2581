"""fuse(): a function that runs its tuned kernel where the store has one, and its eager self where nothing else is right.

A call that has been seen costs one look-up on exact metadata, the allocation of the outputs and the launches. A new one is
prepared under a lock: trace, look up, build. Nothing here imports the search, Optuna, SQLAlchemy or Alembic.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch.compiler import is_dynamo_compiling

from . import accuracy, capture, cost, flat, operator, settings
from .chain import instantiate
from .errors import InputError, LaunchError
from .fusion import Fusion, Plan, check
from .guard import MISS, Guarded, meta, never, watched
from .into import Into, bare
from .lookup import Choice, Lookup, warn_once
from .program import Bound, Program
from .store.records import WorkloadRecord
from .stored import Stored, traced_of
from .tally import Tally
from .traced import Traced, flatten_call, sizes_of
from .workload import layouts_of, workload_of

MAX_CALLS = 4096  # exact signatures kept a function; row counts of a server's life fit, a leak does not
MAX_GUARDS = 1024  # of one function: each is a combination of dtypes, trailing extents, strides and devices

_generation = 0
_every: weakref.WeakSet[Fused] = weakref.WeakSet()


def reload() -> None:
    """Forget every prepared call and look-up in this process: the next calls read the store again."""
    global _generation
    _generation += 1
    for fused in list(_every):
        fused._hot = never


@dataclass(frozen=True)
class Explanation:
    """What a call runs and why. Printing it shows plan, schedules, match tier and times; `source` the kernels.

    Where no store had anything for the call: `nearest`, the tuned entry that comes nearest, and `differs`, a line for each
    field that is another there.
    """

    name: str
    tier: str
    note: str
    workload: WorkloadRecord | None
    plan: str
    schedules: tuple[dict[str, int | str], ...]
    median_us: float | None
    tuned_rows: int | None
    source: str = field(repr=False, default="")
    nearest: str = ""
    differs: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.tier}{f' ({self.note})' if self.note else ''}"]
        if self.workload is not None:
            extents = "x".join(map(str, self.workload.extents)) or "scalar"
            lines.append(f"  workload   rows {self.workload.rows}, extents {extents}, {', '.join(self.workload.dtypes)}")
            lines.append(f"  chain      {self.workload.chain_key}")
        lines.append(f"  plan       {self.plan}")
        for part, schedule in zip(self.plan.split(" | "), self.schedules, strict=False):
            knobs = ", ".join(f"{k}={v}" for k, v in schedule.items() if v != "")
            lines.append(f"  schedule   {part}: {knobs or 'none'}")
        if self.median_us is not None:
            lines.append(f"  tuned      {self.median_us:.2f} µs at rows {self.tuned_rows}")
        if self.nearest:
            lines.append(f"  nearest    {self.nearest}")
        lines += [f"  differs    {line}" for line in self.differs]
        return "\n".join(lines)


@dataclass
class _Call:
    """One exact signature, prepared: what runs, with which sizes, bound to which arguments."""

    traced: Traced
    program: Program | None
    bound: Bound | None
    sizes: dict[str, int]
    getters: tuple[capture.Place | None, ...]
    positions: tuple[int | None, ...]
    watches: tuple[capture.Watch, ...]
    metas: tuple[Any, ...]
    choice: Choice
    workload: WorkloadRecord | None
    checked: bool
    tick: Callable[[], int] | None = None  # counts a call, where calls that were missed are counted


@dataclass(frozen=True)
class Prepared:
    """A prepared call as what binds it anew needs it. `most`: row counts kept."""

    bound: Bound
    bind_into: Callable[[Sequence[torch.Tensor]], Bound]
    inputs: Sequence[torch.Tensor]
    positions: Sequence[int | None]
    places: Sequence[capture.Place | None]
    watches: Sequence[capture.Watch]
    dims: Sequence[Sequence[int | str]]
    outputs: Sequence[Sequence[int | str]]
    most: int = MAX_CALLS


def _spelled(a: Any, name: str) -> tuple[Any, ...]:
    """An argument that is no tensor, as part of a key: numbers by spelling (1 is not 1.0), objects by identity."""
    if a is None or isinstance(a, (bool, int, float, str, torch.dtype)):
        return type(a), repr(a)
    if isinstance(a, tuple) and all(x is None or isinstance(x, (bool, int, float, str)) for x in a):
        return tuple, repr(a)
    if isinstance(a, (list, dict, set, tuple)):
        raise InputError(
            f"{name} got an argument that is a {type(a).__name__}, no tensor and no number: pass tensors and numbers only"
        )
    return type(a), id(a)


def _kind(args: Sequence[Any]) -> tuple[Any, ...]:
    """What tells guards apart at little cost: they are many only where extents and dtypes are."""
    return tuple([(a.dtype, a.shape[-1:]) if isinstance(a, torch.Tensor) else type(a) for a in args])


def _bound(program: Program, taken: int, bind: Callable[[], Bound]) -> Bound:
    """A program bound to a call of so many tensors, on its own device whichever is current."""
    if program.device.type != "cuda":
        return bind()
    with torch.cuda.device(program.device):
        bound = bind()

    def elsewhere(*given: torch.Tensor) -> Any:
        with torch.cuda.device(program.device):
            return bound(*given)

    given = ", ".join(f"v{k}" for k in range(taken))
    names = {"bound": bound, "elsewhere": elsewhere, "current": torch._C._cuda_getDevice, "index": program.device.index}
    text = f"def run({given}):\n    return bound({given}) if current() == index else elsewhere({given})\n"
    return flat.function(text, names)


class BoundMethod:
    """A fused method of an object: called and explained without naming the object again."""

    def __init__(self, fused: Fused, instance: Any) -> None:
        self._fused, self.__self__ = fused, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fused(self.__self__, *args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What a call with these arguments runs, and why."""
        return self._fused.explain(self.__self__, *args, **kwargs)

    def tiers(self) -> dict[str, int]:
        """How many calls each match tier has served, those of other objects too."""
        return self._fused.tiers()


class Fused:
    """A function with its tuned kernels. Call it like the function; see `explain` for what a call runs."""

    def __init__(self, fn: Callable[..., Any], store: str | None = None, name: str | None = None) -> None:
        if not callable(fn):
            raise InputError(f"fuse takes a function, not {type(fn).__name__}")
        self.fn = fn
        self.name: str = name or str(getattr(fn, "__name__", type(fn).__name__))
        self._store = store
        self._lock = threading.RLock()
        self.own_out = False
        self._tally = Tally()
        self._reset()
        functools.update_wrapper(self, fn)
        self.handle = operator.register(self)
        with contextlib.suppress(ValueError, TypeError):  # a callable without a signature
            self.own_out = "out" in inspect.signature(fn).parameters
        _every.add(self)

    def _reset(self) -> None:
        self._generation = _generation
        self._hot: Callable[..., Any] = never
        self._into = Into(self)
        self._guards: dict[Any, list[Guarded]] = {}
        self._calls: dict[Any, _Call] = {}
        self._traces: dict[Any, tuple[Traced, Fusion, tuple[Any, ...], tuple[capture.Watch, ...]]] = {}
        self._lookup: Lookup | None = None
        self._disabled: bool | None = None
        self._counts = False

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        return Fused(self.fn, self._store, self.name)

    def __reduce__(self) -> Any:
        """A decorated function is pickled by name, as a plain one is; another by the function it was made of."""
        found: Any = sys.modules.get(self.fn.__module__)
        for part in getattr(self.fn, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        return self.fn.__qualname__ if found is self else (Fused, (self.fn, self._store, self.name))

    def __repr__(self) -> str:
        return f"<autofuse.fuse {self.name}>"

    # ---- the hot path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return operator.in_graph(self, args, kwargs)
        if not kwargs:
            result = self._hot(*args)
            if result is not MISS:
                return result
        return self._other(args, kwargs)

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not the last one again: another prepared call, or a new one."""
        if self._generation != _generation:
            with self._lock:
                if self._generation != _generation:
                    self._reset()
        if kwargs:
            if "out" in kwargs and not self.own_out:
                out = kwargs.pop("out")
                args = flatten_call(self.fn, args, kwargs)
                return self._into(args, out) if out is not None else self(*args)
            args = flatten_call(self.fn, args, kwargs)
        for guarded in self._guards.get(_kind(args), ()):
            result = guarded.run(*args)
            if result is not MISS:
                self._hot = guarded.run
                return result
        return self._exact(args)

    def _exact(self, args: tuple[Any, ...]) -> Any:
        """A call that no guard knows, by its exact metadata."""
        if self._disabled is None:
            self._configure()
        if self._disabled:
            return self._eagerly(args)
        if torch.compiler.is_compiling():
            return operator.in_graph(self, args, {})
        grad = torch.is_grad_enabled()
        exact = None if watched() else self._signature(args, grad)
        if exact is None:
            return self._eagerly(args)
        call = self._calls.get(exact)
        if call is None or not self._fresh(call, grad):
            return self._first(exact, args, grad)
        return self._run(call, args)

    def _signature(self, args: Sequence[Any], grad: bool) -> tuple[Any, ...] | None:
        """All metadata of a call, or None where only the eager function is right."""
        key = []
        for a in args:
            if isinstance(a, torch.Tensor):
                if (grad and a.requires_grad) or (type(a) is not torch.Tensor and type(a) is not torch.nn.Parameter):
                    return None
                if a.layout is not torch.strided or a.is_neg():
                    return None
                key.append(meta(a))
            else:
                key.append(_spelled(a, self.name))
        return tuple(key)

    def _fresh(self, call: _Call, grad: bool) -> bool:
        """Whether what the function closes over is still as it was traced, and needs no gradient."""
        for get, then in zip(call.getters, call.metas, strict=True):
            if get is not None:
                t = get()
                if not isinstance(t, torch.Tensor) or (grad and t.requires_grad) or meta(t) != then:
                    return False
        return all(w.same() for w in call.watches)

    def _inputs(self, call: _Call, args: Sequence[Any]) -> list[torch.Tensor]:
        return [args[p] if p is not None else g() for p, g in zip(call.positions, call.getters, strict=True)]  # type: ignore[misc]

    def _run(self, call: _Call, args: Sequence[Any]) -> Any:
        if call.bound is not None:
            return call.bound(*self._inputs(call, args))
        self._tally.counter(call.choice.tier)()
        if call.tick is not None:
            call.tick()
        return self.fn(*args)

    def _eagerly(self, args: Sequence[Any]) -> Any:
        """A call that no choice was made for, or whose kernel failed."""
        self._tally.counter("eager")()
        return self.fn(*args)

    # ---- preparing a call

    def _configure(self) -> None:
        with self._lock:
            read = settings.read()
            self._lookup = Lookup(self.name, self._store, read)
            self._counts = read.demand
            self._disabled = read.disable

    def _first(self, exact: Any, args: tuple[Any, ...], grad: bool) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            warn_once(
                f"capture {self.name}",
                f"{self.name} is called for the first time with these shapes inside a CUDA graph capture: its eager "
                "function is captured; call it once before",
            )
            return self._eagerly(args)
        with self._lock:
            call = self._calls.get(exact)
            if call is None or not self._fresh(call, grad):
                prepared = self._prepare(args, grad)
                if prepared is None:
                    return self._eagerly(args)
                if len(self._calls) >= MAX_CALLS:
                    self._calls.clear()
                call = prepared
                tuned = call.program is not None and call.choice.best is not None
                result = self._checked_run(call, args)
                if tuned and call.program is None:
                    return result  # the next such call takes the next tier
                if self._counts and call.choice.tier != "exact":
                    from . import demand

                    assert self._lookup is not None
                    demand.watch(call, self.name, self._lookup.url, self._inputs(call, args))
                self._calls[exact] = call
                self._guard(call, args)
                return result
        return self._run(call, args)

    def _guard(self, call: _Call, args: tuple[Any, ...]) -> None:
        """Let a guard find this call from now on. What no guard can know (misaligned tensors) is found by `_exact`."""
        if call.bound is None or self._generation != _generation:
            return
        inputs = self._inputs(call, args)
        if sum(map(len, self._guards.values())) >= MAX_GUARDS:
            self._guards = {}
        alike = self._guards.get(_kind(args), [])
        for guarded in alike:
            if guarded.add(args, call.bound, MAX_CALLS):
                self._hot = guarded.run
                return
        dims = [v.shape for v in call.traced.chain.inputs]
        guarded = Guarded(args, inputs, call.positions, call.getters, dims, call.watches)
        if guarded.add(args, call.bound, MAX_CALLS):
            self._guards = {**self._guards, _kind(args): [guarded, *alike]}
            self._hot = guarded.run

    def _trace(self, args: Sequence[Any]) -> tuple[Traced, Fusion, tuple[Any, ...], tuple[capture.Watch, ...]]:
        key = tuple(
            (a.dtype, a.dim(), a.shape[-1] if a.dim() else 0, tuple(min(n, 2) for n in a.shape[:-1]), a.device)
            if isinstance(a, torch.Tensor) else _spelled(a, self.name)
            for a in args
        )  # fmt: skip
        found = self._traces.get(key)
        if found is not None and all(w.same() for w in found[3]):
            values = [g() if g is not None else None for g in found[2]]
            same = [
                b.tensor is None or (isinstance(v, torch.Tensor) and (v.shape, v.dtype) == (b.tensor.shape, b.tensor.dtype))
                for b, v in zip(found[0].bindings, values, strict=True)
            ]
            if all(same) and sizes_of(found[0], args) is not None:
                return found
        with contextlib.suppress(ValueError):  # a callable without a signature
            inspect.signature(self.fn).bind(*args)  # a TypeError here is the caller's own
        watched = tuple(capture.watches(self.fn, args))
        if operator.below_autograd():
            with ThreadPoolExecutor(1) as apart:  # a thread of its own has nothing excluded
                traced = apart.submit(traced_of, self.fn, args).result()
        else:
            traced = traced_of(self.fn, args)
        fusion = check(traced.chain, traced.lines, self.name)
        constants = [b.tensor for b in traced.bindings if b.position is None and b.tensor is not None]
        getters = iter(capture.find(self.fn, args, constants))
        bound = tuple(None if b.position is not None else next(getters) for b in traced.bindings)
        self._traces[key] = (traced, fusion, bound, watched)
        return self._traces[key]

    def _prepare(self, args: Sequence[Any], grad: bool, why: bool = False) -> _Call | None:
        """The prepared call, or None where the eager function is the right thing for this one call. `why`: see `choose`."""
        devices = {a.device for a in args if isinstance(a, torch.Tensor) and (a.dim() or a.device.type != "cpu")}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            return None  # mixed devices raise what eager raises
        traced, fusion, getters, watched = self._trace(args)
        inputs = [args[b.position] if b.position is not None else g() for b, g in zip(traced.bindings, getters, strict=True)]
        if any(t.device not in devices for t in inputs) or (grad and any(t.requires_grad for t in inputs)):
            return None
        sizes = sizes_of(traced, [*args])
        if sizes is None:
            return None
        metas = tuple(None if g is None else meta(t) for g, t in zip(getters, inputs, strict=True))
        positions = tuple(b.position for b in traced.bindings)
        device = next(iter(devices))
        work = workload_of(traced.chain, layouts_of(traced.chain, inputs), sizes)
        assert self._lookup is not None
        choice, program = self._lookup.choose(fusion, inputs, sizes, work, device, why)
        checked = choice.checked
        return _Call(traced, program, None, sizes, getters, positions, watched, metas, choice, work, checked)

    def _checked_run(self, call: _Call, args: Sequence[Any]) -> Any:
        """The first run: a schedule that no search has checked is compared with the oracle, and eager runs if it errs."""
        if call.program is None:
            return self._run(call, args)
        inputs = self._inputs(call, args)
        try:
            counter = self._tally.counter(call.choice.tier)
            bind = functools.partial(call.program.bind, inputs, call.sizes, call.traced.spec, counter)
            call.bound = _bound(call.program, len(inputs), bind)
            result = self._run(call, args)
            if not call.checked and not call.program.checked:
                problem = _disagreement(call, inputs)
                if problem:
                    self._tally.take_back(call.choice.tier)
                    raise LaunchError(problem)
                call.checked = call.program.checked = True
            return result
        except Exception as e:  # a compiler's own errors too: Triton's are of many classes
            if call.program.device.type == "cuda" and "CUDA error" in str(e):
                raise  # the context is lost: nothing that follows can be right
            instead = self._eagerly(args)  # what this raises (a label that is no class) is the caller's, no fault of a kernel
            warn_once(f"wrong {self.name}", f"{self.name} runs its eager function: its {call.choice.tier} kernel failed ({e})")
            assert self._lookup is not None
            assert call.workload is not None
            self._lookup.distrust(call.choice, call.workload.family, str(call.program.device), str(e))
            call.program = call.bound = None
            call.choice = Choice("eager", str(e), Plan(()))
            return instead

    # ---- for callers that own memory, or guard by themselves

    def ready(self, args: tuple[Any, ...]) -> Prepared | None:
        """The call with these arguments, prepared by running it once if it is new; None where the eager function runs."""
        grad = torch.is_grad_enabled()
        exact = self._signature(args, grad)
        if exact not in self._calls or self._generation != _generation:
            self(*args)
        if exact is None or self._disabled or torch.compiler.is_compiling() or watched():
            return None
        call = self._calls.get(exact)
        if call is None or call.bound is None or call.program is None or not self._fresh(call, grad):
            return None
        program, inputs, sizes, chain = call.program, self._inputs(call, args), call.sizes, call.traced.chain

        def bind_into(outs: Sequence[torch.Tensor]) -> Bound:
            tally, tick = self._tally.counter(call.choice.tier), call.tick
            counter = tally if tick is None else lambda: (tally(), tick())
            bind = functools.partial(program.bind_into, inputs, outs, sizes, counter)
            return _bound(program, len(inputs) + len(outs), bind)

        return Prepared(
            call.bound, bind_into, inputs, call.positions, call.getters, call.watches,
            [v.shape for v in chain.inputs], [chain.values[o].shape for o in chain.outputs],
        )  # fmt: skip

    def prepare(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The bare call for arguments like these, for engines that guard by themselves: a function of the same arguments,
        by position, that launches with nothing looked at.

        Right only for tensors of the same shapes, strides, dtypes, device and 16-byte alignment, with nothing that needs a
        gradient. Runs the function once; gives the eager function where a call would run that.
        """
        args = flatten_call(self.fn, args, kwargs)
        return bare(self.ready(args), self.fn, len(args))

    # ---- looking inside

    def tiers(self) -> dict[str, int]:
        """How many calls each match tier has served so far, in this process: every call, also since before a `reload()`.

        Calls that eager serves by rule (an input needs a gradient, autocast, a tracer) are "eager"; those inside
        torch.compile are not seen.
        """
        return self._tally.read()

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What a call with these arguments runs, and why; it prepares the call but does not run it."""
        if kwargs:
            args = flatten_call(self.fn, args, kwargs)
        if self._generation != _generation:
            self._reset()
        if self._disabled is None:
            self._configure()
        if self._disabled:
            return Explanation(self.name, "eager", "AUTOFUSE_DISABLE is set", None, "eager", (), None, None)
        with self._lock:
            call = self._prepare(args, torch.is_grad_enabled(), why=True)
        grad = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if call is None or grad:
            return Explanation(
                self.name,
                "eager",
                "an input needs a gradient" if grad else "the inputs are on several devices, or do not fit the traced chain",
                None,
                "eager",
                (),
                None,
                None,
            )
        source = ""
        if call.program is not None:
            source = "\n\n".join(s.text for s in call.program.sources if s is not None)
        best, miss = call.choice.best, call.choice.miss
        return Explanation(
            self.name, call.choice.tier, call.choice.note, call.workload, str(call.choice.plan), call.choice.schedules,
            best.median_us if best else None, best.rows if best else None, source,
            miss.nearest if miss else "", miss.differs if miss else (),
        )  # fmt: skip


CHECKED_ELEMENTS = 2**24  # the float64 oracle of more would take seconds and gigabytes


def _disagreement(call: _Call, inputs: Sequence[torch.Tensor]) -> str:
    """Why a program is wrong against the float64 oracle and eager, or "" where it is right.

    A large call is checked on its first rows: those of the outermost row symbol, so that the layout stays as it is.
    """
    assert call.program is not None
    chain, sizes, given = call.traced.chain, dict(call.sizes), list(inputs)
    largest = max(cost.numel(v.shape, sizes) for v in chain.values)
    if largest > CHECKED_ELEMENTS and chain.symbols:
        first = chain.symbols[0]
        keep = max(1, sizes[first] * CHECKED_ELEMENTS // largest)
        for k, v in enumerate(chain.inputs):
            for d, dim in enumerate(v.shape):
                if dim == first:
                    given[k] = given[k].narrow(d, 0, keep)
        sizes[first] = keep
    outputs = call.program(given, sizes)
    for expected, y in zip(accuracy.expect(chain, given, sizes), outputs, strict=True):
        verdict = expected.verdict(y)
        if not verdict.ok:
            return verdict.message
        if accuracy.strides_of(y) != accuracy.strides_of(expected.eager):
            return f"it gives strides {y.stride()} where eager gives {expected.eager.stride()}"
    return ""


@overload
def fuse(fn: Callable[..., Any], *, store: str | None = None, name: str | None = None) -> Fused: ...
@overload
def fuse(fn: None = None, *, store: str | None = None, name: str | None = None) -> Callable[[Callable[..., Any]], Fused]: ...


def fuse(fn: Callable[..., Any] | None = None, *, store: str | None = None, name: str | None = None) -> Any:
    """Make a function of tensors run its tuned fused kernels.

    `store` is a database URL or path (default: AUTOFUSE_STORE, else the user's data folder), opened at the first call.
    `name` is what the database calls the chain. Inputs that need a gradient, autocast and torch.compile run the eager
    function. Raises TraceError at the first call of a function that is no chain.
    """
    if fn is None:
        return lambda f: Fused(f, store, name)
    return Fused(fn, store, name)


def load(name: str, *, store: str | None = None) -> Fused:
    """The fused function of the chains that the store, or a layer, has under a name: without its source, and without a trace.

    It takes the chain's tensors, in the order in which the function read them, and gives its one output or a tuple; numbers
    are part of what was tuned. It knows the dtypes and static extents that are tuned now; others raise InputError at the
    call. Raises InputError where nothing of that name is tuned.
    """
    read = settings.read()
    found = Lookup(name, store, read).graphs()
    if not found:
        raise InputError(
            f"nothing is tuned under the name {name!r} in {store or read.store}: `autofuse best` lists what is, `autofuse tune` "
            "adds to it"
        )
    return Fused(Stored([instantiate(g.graph, g.extents, g.dtypes) for g in found], name), store, name)


__all__ = ["Explanation", "Fused", "fuse", "load", "reload"]
