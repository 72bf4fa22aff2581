"""The catalogue against eager and torch.compile, tuned and measured in one run, interleaved.

    python -m benchmarks.chains --device cpu --shape 256x4096 --dtype float32 --dtype bfloat16
    python -m benchmarks.chains --device cuda:0 --shape 16384x4096 --dtype bfloat16 --compile max --json out.json

Every candidate allocates its outputs anew. `copy` is a copy of the same bytes timed in the same run, `floor` those bytes at
the device's copy bandwidth. Prints microseconds and ratios; the geometric means come last.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import autofuse
from autofuse import cost
from autofuse.device import default_device
from autofuse.search.measure import ceilings, choose_protocol, time_runs
from autofuse.trace import sizes_of, trace
from examples.entries import CATALOGUE, Entry

Call = Callable[..., Any]


def liger(entry: Entry) -> Call | None:
    """Liger's kernel for a chain, where it has one and is installed."""
    try:
        from liger_kernel.transformers import functional as lf  # type: ignore[import-not-found]
    except ImportError:
        return None
    known: dict[str, Call] = {
        "add_rmsnorm": lambda x, r, w: lf.liger_fused_add_rms_norm(x, r, w, 1e-6),
        "softmax": lambda x: lf.liger_softmax(x),
        "swiglu": lambda x: lf.liger_swiglu(*x.chunk(2, -1)),
    }
    return known.get(entry.name)


def copy_of(nbytes: int, device: str) -> Call:
    """A copy that moves `nbytes`, half of them read."""
    source = torch.ones(max(1, nbytes // 8), device=device)
    return lambda *_: torch.empty_like(source).copy_(source)


def compiled(fn: Call, mode: str) -> Call:
    """torch.compile of a function, for exactly its shapes."""
    if mode == "default":
        return torch.compile(fn, dynamic=False)
    return torch.compile(fn, dynamic=False, mode="max-autotune-no-cudagraphs")


def bench(entry: Entry, rows: int, cols: int, dtype: str, options: argparse.Namespace, store: str) -> dict[str, Any]:
    """Tune one workload and time every candidate on it."""
    device = options.device
    args = entry.case(rows, cols, dtype, device)
    traced = trace(entry.fn, args)
    sizes = sizes_of(traced, args) or {}
    nbytes = cost.bytes_min(traced.chain, sizes)
    protocol = choose_protocol(nbytes, device)
    started = time.monotonic()
    result = autofuse.tune(entry.fn, [args], store=store, trials=options.trials, seconds=options.seconds).rows[0]
    tune_s = time.monotonic() - started
    fused = autofuse.fuse(entry.fn, store=store)
    sets = [args] if protocol != "graph" else [entry.case(rows, cols, dtype, device, seed) for seed in range(4)]
    calls: dict[str, Call] = {"copy": copy_of(nbytes, device), "eager": entry.fn, "ours": fused}
    for mode in options.compile:
        calls["compile" if mode == "default" else "compile_max"] = compiled(entry.fn, mode)
    peer = liger(entry) if device != "cpu" else None
    if peer is not None:
        calls["liger"] = peer
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls.values():
            for s in sets:
                call(*s)
        runs = [lambda k, call=call: call(*sets[k % len(sets)]) for call in calls.values()]
        timings = time_runs(runs, device, budget_s=options.time * len(runs), protocol=protocol, rotate=len(sets))
    row: dict[str, Any] = {
        "chain": entry.name, "rows": rows, "cols": cols, "dtype": dtype, "ops": entry.num_ops, "protocol": protocol,
        "floor": 1e6 * nbytes / ceilings(device, nbytes).bandwidth, "plan": result.plan, "trials": result.trials,
        "schedules": list(result.schedules), "tune_s": round(tune_s, 1), "state": result.state, "reason": result.reason,
    }  # fmt: skip
    row |= {name: t.median_us for name, t in zip(calls, timings, strict=True)}
    return row


def geomean(values: Sequence[float]) -> float:
    """The geometric mean; nan of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table, and what it says over all."""
    names = [n for n in ("floor", "copy", "eager", "compile", "compile_max", "liger", "ours") if any(n in r for r in rows)]
    print(f"{'chain':20s} {'shape':>12s} {'dtype':9s} " + " ".join(f"{n:>11s}" for n in names) + "  /compile   /eager    /copy")
    for r in rows:
        fast = min((r[n] for n in ("compile", "compile_max") if n in r), default=math.nan)
        cells = " ".join(f"{r[n]:11.2f}" if n in r else " " * 11 for n in names)
        print(
            f"{r['chain']:20s} {r['rows']:>6d}x{r['cols']:<5d} {r['dtype']:9s} {cells} "
            f"{fast / r['ours']:8.2f}x {r['eager'] / r['ours']:7.2f}x {r['ours'] / r['copy']:7.2f}x"
        )
    speed = [
        min(r[n] for n in ("compile", "compile_max") if n in r) / r["ours"] for r in rows if "compile" in r or "compile_max" in r
    ]
    if speed:
        print(f"torch.compile / ours: geometric mean {geomean(speed):.3f}x, least {min(speed):.3f}x over {len(speed)} workloads")
    many = [r["eager"] / r["ours"] for r in rows if r["ops"] >= 3]
    print(
        f"eager / ours, chains of three or more operations: {geomean(many):.2f}x; "
        f"ours / copy: {geomean([r['ours'] / r['copy'] for r in rows]):.3f}x"
    )


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--shape", action="append", help="ROWSxCOLS, again for more")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--chain", action="append", help="only these chains of the catalogue")
    parser.add_argument("--compile", action="append", choices=["default", "max", "none"])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--time", type=float, default=0.3, help="seconds of timing for each candidate")
    parser.add_argument("--limit", type=float, default=1e9, help="stop starting workloads after this many seconds")
    parser.add_argument("--store", help="keep the results here; default: a new store that is thrown away")
    parser.add_argument("--json", help="write every row here")
    options = parser.parse_args()
    options.compile = [m for m in options.compile or ["default"] if m != "none"]
    shapes = [
        tuple(map(int, s.split("x")))
        for s in options.shape or (["64x1024", "256x4096", "1024x4096"] if options.device == "cpu" else ["16384x4096"])
    ]
    dtypes = options.dtype or (["float32", "bfloat16"] if options.device == "cpu" else ["bfloat16"])
    wanted = [e for e in CATALOGUE if not options.chain or e.name in options.chain]
    torch._dynamo.config.recompile_limit = 512
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or str(Path(folder) / "bench.db")
        for entry in wanted:
            for dtype in dtypes:
                for r, c in shapes:
                    if time.monotonic() - began > options.limit:
                        print("out of time", file=sys.stderr)
                        break
                    try:
                        rows.append(bench(entry, r, c, dtype, options, store))
                        last = rows[-1]
                        print(
                            f"{entry.name} {r}x{c} {dtype}: {last['tune_s']} s, {last['trials']} trials, {last['reason']}, "
                            f"{last['plan']} {last['schedules']}",
                            file=sys.stderr,
                            flush=True,
                        )
                    except Exception as e:
                        print(f"{entry.name} {r}x{c} {dtype}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
                    if options.json:
                        Path(options.json).write_text(json.dumps(rows, indent=1))
    if rows:
        show(rows)


if __name__ == "__main__":
    main()
