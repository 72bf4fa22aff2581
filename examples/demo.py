"""`make demo`: tune three chains of the catalogue here, time them, call them, and ask the database about it.

Everything lies in the folder .demo, which is made anew. The tuning takes about a minute and a half.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autofuse
from autofuse import tables
from autofuse.device import default_device, describe
from autofuse.errors import InputError
from autofuse.progress import Reporter
from autofuse.search.measure import time_runs
from autofuse.store.store import Store
from examples.entries import CATALOGUE, Entry

CHAINS = ("add_norm_act", "softmax_scale_mask", "ripple")
SECONDS = 30.0
TRIALS = 40
TIMING_S = 1.5  # of each chain and function
QUERY = """
SELECT chain, rows, cols, plan, median_us, eager_us, unfused_us, speedup_vs_eager
FROM v_speedup ORDER BY speedup_vs_eager DESC
""".strip()

Call = Callable[[], Any]


def say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def compiled(entry: Entry, args: tuple[Any, ...]) -> Call | None:
    """The function by torch.compile, or None, with a word, where that does not work."""
    fn = torch.compile(entry.fn)
    try:
        fn(*args)
    except Exception as error:
        print(f"torch.compile does not work here: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None
    return partial(fn, *args)


def tune(entries: list[Entry], rows: int, cols: int, dtype: str, device: str, store: str) -> list[autofuse.TuneResult]:
    """Each chain's search, with its progress on stderr."""
    with Reporter() as report:
        return [
            autofuse.tune(
                e.fn, [e.case(rows, cols, dtype, device)], store=store, device=device, trials=TRIALS, seconds=SECONDS,
                progress=report, name=e.name,
            )
            for e in entries
        ]  # fmt: skip


def main() -> int:
    device = default_device()
    rows, cols, dtype = (1024, 4096, "float32") if device == "cpu" else (16384, 4096, "bfloat16")
    folder = Path(__file__).resolve().parents[1] / ".demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store = f"sqlite:///{folder / 'results.db'}"
    entries = [entry for name in CHAINS for entry in CATALOGUE if entry.name == name]

    say(f"1. Tuning {', '.join(CHAINS)} at {rows} x {cols} {dtype} on {describe(device).name}")
    start = time.perf_counter()
    results = tune(entries, rows, cols, dtype, device, store)
    print(f"the tuning took {time.perf_counter() - start:.0f} s")
    tables.show_tuned([row for result in results for row in result.rows], as_json=False)

    say("2. Eager, torch.compile and tuned, timed in turns, each with fresh outputs (µs); and the values against eager")
    lines = []
    fused = {entry.name: autofuse.fuse(entry.fn, store=store, name=entry.name) for entry in entries}
    for entry in entries:
        args, fn, ours = entry.case(rows, cols, dtype, device, seed=1), entry.fn, fused[entry.name]
        expected, got = fn(*args), ours(*args)
        rtol, atol = (1e-4, 1e-5) if dtype == "float32" else (2e-2, 1e-2)
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
        calls: dict[str, Call] = {"eager": partial(fn, *args)}
        inductor = compiled(entry, args)
        if inductor is not None:
            calls["compile"] = inductor
        calls["tuned"] = partial(ours, *args)
        runs = [lambda _, call=call: call() for call in calls.values()]
        timings = time_runs(runs, device, budget_s=TIMING_S * len(runs), protocol="loop" if device == "cpu" else "cold")
        us = {which: timing.median_us for which, timing in zip(calls, timings, strict=True)}
        other = us.get("compile")
        lines.append(
            [
                entry.name, us["eager"], other, us["tuned"], f"{us['eager'] / us['tuned']:.2f}x",
                other and f"{other / us['tuned']:.2f}x", f"{(got.double() - expected.double()).abs().max().item():.1e}",
            ]
        )  # fmt: skip
    heads = ("chain", "eager", "torch.compile", "tuned", "over eager", "over torch.compile", "largest difference")
    tables.show_result(heads, lines, as_json=False)

    say("3. What the calls run")
    for entry in entries:
        print(fused[entry.name].explain(*entry.case(rows, cols, dtype, device)))

    say(f"4. The database: autofuse sql --store .demo/results.db '{' '.join(QUERY.split())}'")
    with Store.open(store, read_only=True) as opened:
        tables.show_result(*opened.query(QUERY), as_json=False)
        trials = opened.query("SELECT status, count(*) AS trials FROM trial GROUP BY status ORDER BY trials DESC")
        tables.show_result(*trials, as_json=False)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            sys.exit(main())
        except InputError as error:
            sys.exit(f"demo: {error}")
    sys.exit(130)
