"""tune(): the offline job over a function's cases, one worker process for all of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from .. import capture, dispatch, settings
from ..device import describe, environment, parse_device
from ..errors import InputError, TraceError
from ..fusion import Plan, check
from ..kernels.mathmode import MODES
from ..result import ProgressCallback, Tuned, TuneResult
from ..store.records import ChainRecord, ConfigRecord
from ..store.store import Store
from ..stored import traced_of
from ..traced import flatten_call, sizes_of
from ..workload import describe as describe_workload
from .client import Worker
from .measure import ceilings
from .recipes import recipes_of
from .run import Run


def _setup(run: Run) -> dict[str, Any]:
    """What the worker must know to make the same inputs and kernels; JSON."""
    return {
        "op": "setup",
        "chain": run.chain.to_json(),
        "recipes": [r.to_json() for r in recipes_of(run.inputs)],
        "sizes": run.sizes,
        "device": run.device,
        "limits": asdict(run.limits),
        "cache": str(settings.read().cache),
        "seed": run.seed,
        "protocol": run.protocol,
    }


class Tuner:
    """A store and a measuring process, for one or many functions: the process starts once. A context manager.

    The store is opened with the first function: bad input leaves none behind. StoreError where it cannot be written.
    """

    def __init__(self, store: str) -> None:
        self.url = store
        self.store: Store | None = None
        self.worker = Worker({}, timeout_s=120.0)

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.worker.close()
        if self.store is not None:
            self.store.close()

    def tune(
        self, fn: Callable[..., Any], cases: Sequence[Sequence[Any]], *, device: str | None = None, trials: int = 60,
        seconds: float = 30.0, seed: int = 0, progress: ProgressCallback | None = None, name: str | None = None,
        math: str | None = None,
    ) -> TuneResult:  # fmt: skip
        """As autofuse.tune, into this store and with this process."""
        if trials < 1 or not seconds > 0:
            raise InputError(f"trials={trials}, seconds={seconds}: both must be positive")
        if math is not None and math not in MODES:
            raise InputError(f"math={math!r} is no math mode: one of {', '.join(MODES)}")
        if hasattr(cases, "shape") or not cases:
            raise InputError("cases is a sequence of argument tuples, one a workload: [(x, weight), ...]")
        own = getattr(fn, "name", None) if isinstance(fn, dispatch.Fused) else None
        plain = fn.fn if isinstance(fn, dispatch.Fused) else fn
        title = str(name or own or getattr(plain, "__name__", type(plain).__name__))
        self.store = self.store or Store.open(self.url)
        rows: list[Tuned] = []
        for case in cases:
            run = _run_of(plain, case, title, self.store, device, trials, seconds, seed, progress)
            run.pins = {} if math is None else {"math": math}
            row, interrupted = _drive(run, self.worker)
            rows.append(row)
            if interrupted:
                break
        dispatch.reload()
        return TuneResult(tuple(rows))


def tune(
    fn: Callable[..., Any], cases: Sequence[Sequence[Any]], *, store: str | None = None, device: str | None = None,
    trials: int = 60, seconds: float = 30.0, seed: int = 0, progress: ProgressCallback | None = None, name: str | None = None,
    math: str | None = None,
) -> TuneResult:  # fmt: skip
    """Find the fastest config of a function at each case, and keep every trial in the store.

    `cases` are argument tuples, as the function is called: tensors of any strides on one device, and Python scalars.
    `trials` and `seconds` bound one case. `math` pins the math mode ("exact", "fast", on a GPU "approx"); None searches
    it. This process uses the results at once; others after `autofuse.reload()`.
    Ctrl-C ends the case at hand with what is known. Raises TraceError for a function that is no chain, InputError for
    bad cases or budgets, StoreError where the store cannot be written.
    """
    store = store or (fn._store if isinstance(fn, dispatch.Fused) else None)
    with Tuner(settings.store_url(store) if store else settings.read().store) as tuner:
        return tuner.tune(
            fn, cases, device=device, trials=trials, seconds=seconds, seed=seed, progress=progress, name=name, math=math
        )


def _run_of(
    fn: Callable[..., Any], case: Sequence[Any], title: str, store: Store, device: str | None, trials: int, seconds: float,
    seed: int, progress: ProgressCallback | None,
) -> Run:  # fmt: skip
    """The run of one case, its function traced and its inputs in hand."""
    args = flatten_call(fn, tuple(case) if isinstance(case, (tuple, list)) else (case,), {})
    with contextlib.suppress(ValueError):  # a callable without a signature
        try:
            inspect.signature(fn).bind(*args)
        except TypeError as e:
            raise InputError(f"{title}: {e}; a case is a tuple of all its arguments") from e
    traced = traced_of(fn, args)
    fusion = check(traced.chain, traced.lines, title)
    constants = [b.tensor for b in traced.bindings if b.position is None and b.tensor is not None]
    getters = iter(capture.find(fn, args, constants))
    inputs = [args[b.position] if b.position is not None else next(getters)() for b in traced.bindings]
    if not inputs:
        raise TraceError(f"{title} takes no tensor: there is nothing to tune")
    found = {str(t.device) for t in inputs}
    if len(found) != 1 or (device is not None and str(parse_device(device)) not in found):
        raise InputError(f"the case's tensors are on {', '.join(sorted(found))}: put all on {device or 'one device'}")
    sizes = sizes_of(traced, args)
    if sizes is None:
        raise InputError(f"{title}: the case's shapes do not fit together")
    where = str(parse_device(found.pop()))
    if any(t.numel() == 0 for t in inputs):
        raise InputError(f"{title}: a case of no elements takes no time; give it at least one row")
    return Run(title, traced, fusion, [t.detach() for t in inputs], sizes, where, trials, seconds, seed, store, progress)


def _drive(run: Run, worker: Worker) -> tuple[Tuned, bool]:
    """Search, finish, and keep the winner; whether Ctrl-C ended it."""
    env = environment(run.device)
    record = replace(describe(run.device), peak_bandwidth_gbs=round(ceilings(run.device).bandwidth / 1e9, 1))
    chain = ChainRecord(run.chain.key, run.name, run.chain.graph)
    run.run_id = run.store.begin_run(
        record, env, chain, run.workload, protocol=run.protocol, sampler="tpe", seed=run.seed, trials_budget=run.trials_budget,
        seconds_budget=run.seconds_budget, roofline_us=run.roofline_us,
    )  # fmt: skip
    state, winner, interrupted = "failed", None, False
    incumbent = _incumbent(run, record.uid, env.uid)
    older = incumbent is not None  # what a pinned mode that has no kernel must not take the place of
    if incumbent is not None and any(s.knobs.get(n, v) != v for s in incumbent[0].schedules for n, v in run.pins.items()):
        incumbent = None
    run.reason = "interrupted"
    try:
        worker.prepare(_setup(run))
        run.clock = worker.clock
        run.started = run.clock()  # the budget is for the search; starting a process is not part of it
        run.make_parts()
        run.resume(env.uid, record.uid)
        run.transfer(record.uid)
        run.seeds(worker)
        run.search(worker)
        winner = run.finish(worker, incumbent)
        state = "done" if winner is not None else "failed"
        if winner is None:
            run.reason = "no config was valid: see `autofuse history`"
    except KeyboardInterrupt:
        interrupted, state, run.reason = True, "interrupted", "interrupted"
        worker.close()
        winner = min(run.configs.values(), key=lambda c: c[1], default=None)
    finally:
        if winner is not None and not (run.pins and older and Plan.parse(winner[0].plan).is_eager):
            run.store.set_best(run.run_id, run.workload, winner[0], winner[1], not interrupted)
        run.store.finish_run(
            run.run_id,
            state,
            reason=run.reason,
            eager_us=run.eager_us,
            unfused_us=run.unfused_us,
            roofline_us=run.roofline_us,
        )
    return (
        Tuned(
            run.name, describe_workload(run.chain, run.sizes), run.device, run.eager_us, run.unfused_us,
            winner[1] if winner else None, run.roofline_us, winner[0].plan if winner else "", run.done, state, run.reason,
            tuple(dict(s.knobs) for s in winner[0].schedules) if winner else (),
        ),
        interrupted,
    )  # fmt: skip


def _incumbent(run: Run, device_uid: str, environment_uid: str) -> tuple[ConfigRecord, float] | None:
    """The config that is best so far here, to be measured beside the finalists."""
    for best in run.store.best_records(run.workload.family, device_uid):
        if best.rows == run.workload.rows and best.environment.uid == environment_uid and best.protocol == run.protocol:
            return ConfigRecord(run.chain.key, best.plan, best.schedules), best.median_us
    return None
