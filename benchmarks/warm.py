"""Builds what a benchmark will need, side by side on all cores, before anything is measured.

torch.compile's kernels and the schedules that a search tries first go into the compilers' own caches on disk. What
torch.compile measures to choose among its kernels is measured again where it is timed: choices made beside other
processes would be unfair to it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from autofuse import settings
from autofuse.device import limits
from autofuse.errors import AutofuseError
from autofuse.fusion import Fusion
from autofuse.kernels import build
from autofuse.kernels.launch import Kernel
from autofuse.program import Layouts, allocate
from autofuse.search.outcome import compile_triton
from autofuse.search.study import SegmentStudy
from autofuse.trace import sizes_of, trace
from benchmarks import peers
from benchmarks.suites import Workload


def keep_no_choices() -> None:
    """torch.compile keeps kernels on disk, but not which of them was the fastest."""
    torch._inductor.config.autotune_local_cache = False
    torch._inductor.config.bundle_triton_into_fx_graph_cache = False


def warm(every: Sequence[Workload], device: str, modes: Sequence[str], schedules: int, processes: int) -> None:
    """Build for all workloads. What fails fails again, with its reason, when it is measured."""
    began = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), max_tasks_per_child=40) as pool:
        jobs = [pool.submit(one, w, device, tuple(modes), schedules) for w in every]
        failed = [str(why) for job in as_completed(jobs) if (why := job.exception() or job.result())]
    for why in dict.fromkeys(failed):
        print(f"not built ahead: {why}", file=sys.stderr, flush=True)
    print(f"built for {len(every)} workloads in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def one(w: Workload, device: str, modes: Sequence[str], schedules: int) -> str:
    """Build for one workload; what went wrong, or ""."""
    keep_no_choices()
    torch._inductor.config.compile_threads = 1
    args = w.entry.case(w.filled(), w.cols, w.dtype, device)
    wrong = ""
    for mode in modes:
        try:
            with torch.no_grad():
                peers.compiled(w.entry.fn, mode)(*args)()
        except Exception as error:  # torch.compile raises anything
            wrong = f"{w}: torch.compile: {peers.one_line(error)}"
    torch._dynamo.reset()
    try:
        _schedules(w, args, device, schedules)
    except AutofuseError as error:
        wrong = f"{w}: {peers.one_line(error)}"
    del args
    torch.cuda.empty_cache()
    return wrong


def _schedules(w: Workload, args: Sequence[object], device: str, most: int) -> None:
    """The heuristic schedules of the fused kernels, and of each the first `most` that a search would try."""
    traced = trace(w.entry.fn, args)
    fusion, sizes = Fusion(traced.chain), sizes_of(traced, args) or {}
    inputs = [t for b in traced.bindings if b.position is not None and isinstance(t := args[b.position], torch.Tensor)]
    layouts, where = Layouts(fusion, inputs, sizes), limits(device)
    for nodes in fusion.fused():
        made = layouts.seed(nodes, where)
        if made is None:
            continue
        kind, seed = made
        task, segment = layouts.task(nodes, where), fusion.segment(nodes)
        study = SegmentStudy(task, kind, 0)
        study.enqueue_variants()
        study.seen.add(study.hash_of(seed))
        wanted = [seed, *(p.knobs for _ in range(most) if (p := study.ask()) is not None)]

        def empty(v: int) -> torch.Tensor:
            return allocate(traced.chain.values[v], sizes, torch.device(device), layouts.orders[v])

        reads = [inputs[v] if v < traced.chain.num_inputs else empty(v) for v in segment.reads]
        for knobs in wanted:
            source = kind.emit(task, knobs)
            kernel = Kernel(task.low, task.layout, source, build.load(source, settings.read().cache))
            if source.target != "cpu":
                try:
                    compile_triton(kernel, reads, [empty(v) for v in segment.writes], segment.sizes(sizes))
                except Exception:
                    continue
