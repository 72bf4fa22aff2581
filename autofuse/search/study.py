"""One Optuna study a segment: which schedule to try next. Its memory is rebuilt from trials, never stored twice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from ..errors import Infeasible
from ..kernels.base import Kind, Knob, Space, Task

STARTUP = 10
MAX_WARM = 1000  # TPE costs 14 ms an ask at 1,000 trials: warm starts are capped
MAX_WRONG = 2  # results of one math mode, before the mode counts as too coarse for this segment
MAX_SKIPS = 60  # proposals thrown away for free in one ask, before the space counts as spent

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Proposal:
    """A schedule to measure, and the study's trial that waits for its time."""

    def __init__(self, trial: optuna.trial.Trial, knobs: dict[str, int | str], source_hash: str) -> None:
        self.trial, self.knobs, self.source_hash = trial, knobs, source_hash


class SegmentStudy:
    """Asks TPE for schedules of one segment; statically illegal and already measured ones are skipped for free."""

    def __init__(self, task: Task, kind: Kind, seed: int, pins: Mapping[str, int | str] | None = None) -> None:
        self.task, self.kind, self.pins = task, kind, dict(pins or {})
        self.space: Space = kind.space(task).pinned(self.pins)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                n_startup_trials=STARTUP, multivariate=True, group=True, constant_liar=True, seed=seed
            )
        self.study = optuna.create_study(sampler=sampler)
        self.seen: set[str] = set()
        self.best_us = math.inf
        self.best_knobs: dict[str, int | str] | None = None
        self.trials = 0
        self.spent = False
        self._wrong: dict[str, int] = {}
        self._times: dict[frozenset[tuple[str, int | str]], float] = {}

    # ---- knobs and distributions

    def _distribution(self, knob: Knob) -> BaseDistribution:
        if knob.log2:
            low, high = (int(math.log2(int(v))) for v in (knob.values[0], knob.values[-1]))
            return IntDistribution(low, high)
        return CategoricalDistribution(list(knob.values))

    def _suggest(self, trial: optuna.trial.Trial) -> dict[str, int | str]:
        made: dict[str, int | str] = {}
        for knob in self.space.knobs:
            if not knob.active(made):
                continue
            if len(knob.values) == 1:
                made[knob.name] = knob.values[0]
            elif knob.log2:
                d = self._distribution(knob)
                assert isinstance(d, IntDistribution)
                made[knob.name] = 2 ** trial.suggest_int(knob.name, d.low, d.high)
            else:
                made[knob.name] = trial.suggest_categorical(knob.name, list(knob.values))  # type: ignore[assignment]
        return made

    def _params(self, knobs: Mapping[str, int | str]) -> dict[str, Any] | None:
        """The study's parameters of these knobs, or None where a value is not in the space."""
        params: dict[str, Any] = {}
        made: dict[str, int | str] = {}
        for knob in self.space.knobs:
            if not knob.active(made):
                continue
            value = knobs.get(knob.name)
            if value is None or value not in knob.values:
                return None
            made[knob.name] = value
            if len(knob.values) > 1:
                params[knob.name] = int(math.log2(int(value))) if knob.log2 else value
        return params

    def held(self, knobs: Mapping[str, int | str]) -> bool:
        """Whether a schedule keeps to what is pinned."""
        return all(knobs.get(n, v) == v for n, v in self.pins.items())

    # ---- memory

    def hash_of(self, knobs: Mapping[str, int | str]) -> str:
        """The source hash of a schedule. Raises Infeasible for an illegal one."""
        reason = self.space.check(knobs)
        if reason:
            raise Infeasible(reason)
        source = self.kind.emit(self.task, knobs)
        return f"{source.hash}:{source.threads}"

    def remember(self, knobs: Mapping[str, int | str], source_hash: str, median_us: float | None, warm: bool = False) -> None:
        """A trial made elsewhere: resumed, a seed, or of a near workload (`warm`, then it guides but is not done)."""
        params = self._params(knobs)
        if not warm and self.held(knobs):
            if source_hash:
                self.seen.add(source_hash)
            self._note(knobs, median_us)
        if params is None or len(self.study.trials) >= MAX_WARM:
            return
        distributions = {k.name: self._distribution(k) for k in self.space.knobs if k.name in params}
        state = TrialState.PRUNED if median_us is None else TrialState.COMPLETE
        self.study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=distributions, state=state,
                value=None if median_us is None else math.log(median_us),
            )
        )  # fmt: skip

    def enqueue(self, knobs: Mapping[str, int | str]) -> None:
        """Try this schedule next, if it is in the space."""
        params = self._params(self.space.reduce({**self._filled(knobs), **knobs}))
        if params is not None:
            self.study.enqueue_trial(params)

    def enqueue_variants(self) -> None:
        """Try what usually beats the kind's seed, before all else that is not enqueued yet."""
        for changes in self.kind.variants(self.task):
            self.enqueue(changes)

    def _filled(self, knobs: Mapping[str, int | str]) -> dict[str, int | str]:
        seed = self.kind.seed(self.task)
        return {k.name: knobs.get(k.name, seed.get(k.name, k.values[0])) for k in self.space.knobs}

    def time_of(self, knobs: Mapping[str, int | str]) -> float | None:
        """The time of a schedule that was measured, else None."""
        return self._times.get(frozenset(knobs.items()))

    def _note(self, knobs: Mapping[str, int | str], median_us: float | None) -> None:
        self.trials += 1
        if median_us is not None:
            self._times[frozenset(knobs.items())] = median_us
        if median_us is not None and median_us < self.best_us:
            self.best_us, self.best_knobs = median_us, dict(knobs)

    # ---- ask and tell

    def ask(self) -> Proposal | None:
        """The next schedule to measure, or None where the space is spent."""
        for _ in range(MAX_SKIPS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial = self.study.ask()
                knobs = self._suggest(trial)
            try:
                source_hash = self.hash_of(knobs)
            except Infeasible:
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            if source_hash in self.seen or self._wrong.get(str(knobs.get("math")), 0) >= MAX_WRONG:
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            self.seen.add(source_hash)
            return Proposal(trial, knobs, source_hash)
        self.spent = True
        return None

    def tell(self, proposal: Proposal, median_us: float | None) -> None:
        """The time of a proposal, or None where it has none."""
        self._note(proposal.knobs, median_us)
        if median_us is None:
            self.study.tell(proposal.trial, state=TrialState.PRUNED)
        else:
            self.study.tell(proposal.trial, math.log(median_us))

    def wrong(self, knobs: Mapping[str, int | str]) -> None:
        """A schedule whose results were wrong: a math mode that is wrong a few times is tried no more."""
        mode = str(knobs.get("math"))
        self._wrong[mode] = self._wrong.get(mode, 0) + 1

    def top(self, n: int) -> list[dict[str, int | str]]:
        """The n fastest schedules so far, fastest first."""
        done = sorted(
            (t for t in self.study.trials if t.state == TrialState.COMPLETE and t.value is not None),
            key=lambda t: t.value or 0.0,
        )
        made: list[dict[str, int | str]] = []
        for t in done:
            knobs: dict[str, int | str] = {}
            for knob in self.space.knobs:
                if knob.active(knobs):
                    raw = t.params.get(knob.name, knob.values[0])
                    knobs[knob.name] = 2**raw if knob.log2 and knob.name in t.params else raw
            if knobs not in made:
                made.append(knobs)
            if len(made) == n:
                break
        return made


def optimistic(best_us: float, trials: int, bound_us: float) -> float:
    """What a segment may still reach: large hope when little was tried, shrinking with trials, never under its roofline."""
    if math.isinf(best_us):
        return bound_us
    hope = 1.0 / (1.0 + trials / 5.0)
    return max(bound_us, best_us * (1.0 - hope))


def shortest(edges: Iterable[tuple[int, int, int, float]], last: int) -> tuple[float, list[int]]:
    """The shortest path from cut 0 to cut `last` over edges (from, to, name, time), as (time, names).

    Cuts are numbered so that every edge goes up; with no path the time is infinite.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    by_start: dict[int, list[tuple[int, int, float]]] = {}
    for a, b, name, time in edges:
        by_start.setdefault(a, []).append((b, name, time))
    for a in range(last):
        if a not in best:
            continue
        so_far, path = best[a]
        for b, name, time in by_start.get(a, ()):
            if b not in best or so_far + time < best[b][0]:
                best[b] = (so_far + time, [*path, name])
    return best.get(last, (math.inf, []))
