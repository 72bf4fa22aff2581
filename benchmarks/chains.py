"""The catalogue against eager, torch.compile and libraries, tuned and measured in one run, interleaved.

    python -m benchmarks.chains --device cpu --shape 256x4096 --dtype float32 --dtype bfloat16
    python -m benchmarks.chains --device cuda:0 --suite large --compile max --jobs 6 --part 1/8 --json large-1.json
    python -m benchmarks.chains --merge large-*.json

large   traffic of 256 MiB at hidden sizes of 1024 to 16384 (losses: at vocabularies)
long    rows of 32768 to 262144 columns
decode  1 to 256 rows of 4096 columns, in a CUDA graph
odd     4096 columns and up to 8 more or fewer, and 1, 3 and 1000 rows

Every candidate allocates its outputs anew, but those whose name ends in "_inplace" (see peers.py). `copy` is a copy of
the same bytes timed in the same run, `floor` those bytes at the device's copy bandwidth. A candidate is compared with
eager before it is timed, and left out, with a line, where it fails or differs. Prints microseconds and ratios, and for
each bar of a suite whether it is met. The JSON file is written after each workload, failed ones included.

With several jobs, processes build side by side and take turns on the device: what is timed is timed alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import autofuse
from autofuse import cost, settings
from autofuse.device import default_device, describe, environment
from autofuse.search.measure import Sampler, Timing, ceilings, choose_protocol, input_sets, interleave, prepare, turn
from autofuse.search.tuner import Tuner
from autofuse.store.store import Store
from autofuse.trace import trace
from autofuse.traced import sizes_of
from autofuse.workload import layouts_of, workload_of
from benchmarks import peers
from benchmarks.report import OURS, Row, key, merge, read, report, write
from benchmarks.suites import SUITES, Workload, at_shapes, part, workloads
from examples.entries import CATALOGUE

RESOURCES = """
SELECT t.registers, t.spills, t.shared_bytes FROM best b
JOIN workload w ON w.id = b.workload_id
JOIN trial t ON t.config_id = b.config_id AND t.workload_id = b.workload_id
WHERE w.uid = '{uid}' AND t.status = 'ok' ORDER BY t.registers IS NULL, t.id DESC LIMIT 1
"""


def bench(w: Workload, options: argparse.Namespace, tuner: Tuner) -> Row:
    """Tune one workload and time every candidate on it."""
    device, fn, rows = options.device, w.entry.fn, w.filled()
    torch._dynamo.reset()
    args = w.entry.case(rows, w.cols, w.dtype, device)
    traced = trace(fn, args)
    sizes = sizes_of(traced, args) or {}
    nbytes = cost.bytes_min(traced.chain, sizes)
    protocol = choose_protocol(nbytes, device)
    if w.protocol and protocol != "loop":
        protocol = w.protocol
    modes = {mode: peers.compiled(fn, mode) for mode in options.compile}
    left_out = {name_of(m): why for m, bind in modes.items() if (why := peers.build(bind(*args)))}
    started = time.monotonic()
    result = tuner.tune(fn, [args], device=device, trials=options.trials, seconds=options.seconds, name=w.entry.name).rows[0]
    tune_s = time.monotonic() - started
    if result.state == "interrupted":
        raise KeyboardInterrupt  # the search has taken the signal for itself
    if result.best_us is None:
        raise RuntimeError(f"no result: {result.reason}")
    sets = [args, *(w.entry.case(rows, w.cols, w.dtype, device, k) for k in range(1, input_sets(nbytes, device, protocol)))]
    binds = {"copy": peers.copy_of(nbytes, device), "eager": peers.plain(fn), OURS: peers.plain(autofuse.fuse(fn, store=tuner.url))}
    binds |= {name_of(m): bind for m, bind in modes.items() if name_of(m) not in left_out}
    binds |= peers.libraries(w.entry.name, device)
    timings, more = measure(binds, sets, getattr(torch, w.dtype), device, protocol, options.time)
    left_out |= more
    if OURS not in timings:
        raise RuntimeError(f"the fused function: {left_out[OURS]}")
    uid = workload_of(traced.chain, layouts_of(traced.chain, [a for a in args if isinstance(a, torch.Tensor)]), sizes).uid
    return {
        **head(w), "rows": rows, "ops": w.entry.num_ops, "protocol": protocol, "bytes": nbytes,
        "floor_us": 1e6 * nbytes / ceilings(device, nbytes).bandwidth, "times": {n: vars(t) for n, t in timings.items()},
        "left_out": left_out, "plan": result.plan, "schedules": list(result.schedules), **resources(tuner.url, uid),
        "trials": result.trials, "tune_s": round(tune_s, 1), "state": result.state, "reason": result.reason,
    }  # fmt: skip


def name_of(mode: str) -> str:
    """What the table calls a mode of torch.compile."""
    return "compile" if mode == "default" else "compile_max"


def head(w: Workload) -> Row:
    """What a row says of its workload before anything is measured."""
    return {
        "suite": w.suite, "chain": w.entry.name, "rows": w.rows, "cols": w.cols, "dtype": w.dtype, "asked_rows": w.rows,
    }  # fmt: skip


def measure(
    binds: dict[str, peers.Bind], sets: Sequence[tuple[Any, ...]], dtype: torch.dtype, device: str, protocol: str, seconds: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Interleaved timings of the candidates that work and agree with eager, and why the others do not."""
    left_out: dict[str, str] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, bind in binds.items():
            if name.startswith("compile"):
                continue  # which is built, and chooses among its kernels with the device to itself
            try:
                bind(*sets[0])()
            except Exception as error:  # a peer raises anything
                left_out[name] = peers.one_line(error)
        with turn(device, settings.read().cache):
            ready = {n: b for n, b in binds.items() if n not in left_out}
            return _timed(ready, sets, dtype, device, protocol, seconds, left_out), left_out


def _timed(
    binds: dict[str, peers.Bind], sets: Sequence[tuple[Any, ...]], dtype: torch.dtype, device: str, protocol: str, seconds: float,
    left_out: dict[str, str],
) -> dict[str, Timing]:  # fmt: skip
    ready: dict[str, Sampler] = {}
    try:
        expected = [t.clone() for t in torch.utils._pytree.tree_leaves(binds["eager"](*sets[0])())]
        for name, bind in binds.items():
            try:
                calls = [bind(*s) for s in sets]
                wrong = "" if name == "copy" else peers.differs(calls[0](), expected, dtype)
                if wrong:
                    left_out[name] = wrong
                    continue
                for call in calls[1:]:
                    call()
                ready[name] = prepare(lambda k, calls=calls: calls[k](), device, protocol, len(calls))  # type: ignore[misc]
            except Exception as error:  # a peer raises anything
                left_out[name] = peers.one_line(error)
        del expected
        return dict(zip(ready, interleave(list(ready.values()), device, seconds * len(ready)), strict=True))
    finally:
        for sampler in ready.values():
            sampler.close()


def resources(store: str, uid: str) -> dict[str, int | None]:
    """Registers, spills and shared memory of a workload's winner, where the store knows them."""
    with Store.open(settings.store_url(store), read_only=True) as opened:
        names, rows = opened.query(RESOURCES.format(uid=uid))
    return dict(zip(names, rows[0], strict=True)) if rows else {}


_tuner: Tuner | None = None  # of a process that measures


def _begin(store: str) -> None:
    """Make this process one that measures."""
    global _tuner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the process that started it minds
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch._dynamo.config.recompile_limit = 512
    torch._inductor.config.compile_threads = 1  # there are other processes
    _tuner = Tuner(settings.store_url(store))


def _one(w: Workload, options: argparse.Namespace) -> Row:
    """A workload's row; one that fails has "error"."""
    assert _tuner is not None
    try:
        return bench(w, options, _tuner)
    except Exception as error:
        return {**head(w), "error": peers.one_line(error)}


def run(every: Sequence[Workload], options: argparse.Namespace, store: str) -> Iterator[Row]:
    """A row for each workload, as it is done."""
    # both compilers find in one place what the other processes have built
    os.environ.setdefault("TRITON_CACHE_DIR", str(settings.read().cache / "triton"))
    began, left = time.monotonic(), list(every)
    pool = ProcessPoolExecutor(options.jobs, get_context("spawn"), _begin, (store,))
    under_way: dict[Future[Row], Workload] = {}
    try:
        while left or under_way:
            while left and len(under_way) < options.jobs and time.monotonic() - began < options.limit:
                w = left.pop(0)
                under_way[pool.submit(_one, w, options)] = w
            if not under_way:
                print(f"out of time: {len(left)} workloads are not measured, {left[0]} the first", file=sys.stderr)
                return
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                w, row = under_way.pop(done), done.result()
                tuned = "{rows} rows, {tune_s} s, {trials} trials, {reason}, {plan} {schedules}"
                print(f"{w}: {row.get('error') or tuned.format(**row)}", file=sys.stderr, flush=True)
                for name, why in row.get("left_out", {}).items():
                    print(f"{w}: {name} is left out: {why}", file=sys.stderr, flush=True)
                yield row
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()  # nobody waits for what it measures
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def planned(options: argparse.Namespace) -> list[Workload]:
    """The workloads of the command line. Raises ValueError."""
    every = CATALOGUE
    unknown = set(options.chain or ()) - {e.name for e in every}
    if unknown:
        raise ValueError(f"no chain is named {', '.join(sorted(unknown))}: there are {', '.join(e.name for e in CATALOGUE)}")
    entries = [e for e in CATALOGUE if not options.chain or e.name in options.chain]
    cpu = torch.device(options.device).type == "cpu"
    if options.suite:
        found = workloads(options.suite, entries, options.dtype or ["bfloat16"])
        found = [w for w in found if not options.cols or w.cols in options.cols]
    else:
        default = ["64x1024", "256x4096", "1024x4096"] if cpu else ["16384x4096"]
        shapes = [(int(r), int(c)) for r, _, c in (s.partition("x") for s in options.shape or default)]
        found = at_shapes(shapes, entries, options.dtype or (["float32", "bfloat16"] if cpu else ["bfloat16"]))
    done = {key(r) for path in options.lacking or () for r in read(path) if "error" not in r}
    found = [w for w in found if key(head(w)) not in done]
    return part(options.part, found) if options.part else found


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=default_device())
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--suite", choices=list(SUITES), help="a table of the performance goal")
    which.add_argument("--shape", action="append", help="ROWSxCOLS, again for more")
    which.add_argument("--merge", nargs="+", metavar="JSON", help="print the tables of earlier runs, measure nothing")
    parser.add_argument("--cols", action="append", type=int, help="only these columns of the suite, again for more")
    parser.add_argument("--part", help="i/n: every n-th workload, from the i-th")
    parser.add_argument("--lacking", nargs="+", metavar="JSON", help="only workloads that these files have no result of")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--chain", action="append", help="only these chains of the catalogue")
    parser.add_argument("--compile", action="append", choices=["default", "max", "none"])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--time", type=float, default=0.3, help="seconds of timing for each candidate")
    parser.add_argument("--limit", type=float, default=1e9, help="stop starting workloads after this many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that build side by side")
    parser.add_argument("--store", help="keep the results here; default: a new store that is thrown away")
    parser.add_argument("--json", help="write every row here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends a run with its table, as Ctrl-C does
    options.compile = [m for m in options.compile or ["default"] if m != "none"]
    rows: list[Row] = []
    try:
        if options.merge:
            rows = merge(read(path) for path in options.merge)
            return
        every = planned(options)
        if options.jobs > 1 and torch.device(options.device).type == "cpu":
            raise ValueError("--jobs is for GPUs: on a CPU what builds disturbs what is measured")
        where, env = describe(options.device).name, environment(options.device)
        print(f"{len(every)} workloads on {where}, torch {env.torch}, triton {env.triton}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for row in run(every, options, options.store or str(Path(folder) / "bench.db")):
                rows.append({**row, "device": where, "torch": env.torch, "triton": env.triton})
                if options.json:
                    write(options.json, rows)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        if rows:
            print(report(rows))
            if options.json and options.merge:
                write(options.json, rows)


if __name__ == "__main__":
    main()
