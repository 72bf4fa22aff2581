"""What a call costs on the host, in one process, interleaved: microseconds a call, the kernel's own time left out where it
runs on a GPU.

    python -m benchmarks.dispatch --device cpu
    python -m benchmarks.dispatch --device cuda:0

launch   the bare launch into memory that exists: C by ctypes, or Triton's compiled kernel with everything bound
bare     the same after allocating the output: what any dispatcher pays
ours     the fused function, called with the last call's arguments
rows     the fused function, the row count another at every call
jit      Triton's own `kernel[grid](...)` after the same allocation (GPU)
eager, compile: the function itself, and torch.compile's default mode

Also what the 50th signature of a function costs beside the 2nd. Prints a line for each bar.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import autofuse
from autofuse.program import empty_of

ROWS, COLS = 4, 256


def one(x: torch.Tensor) -> torch.Tensor:
    """Two operations of one input."""
    return F.silu(x) * 2


def three(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A residual, a norm and an activation."""
    return F.silu(F.rms_norm(x + residual, (x.shape[-1],), weight, 1e-6))


def six(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """Five operations of six inputs."""
    return (a * b + c) * d + e * f


CHAINS: tuple[tuple[Callable[..., torch.Tensor], Callable[..., list[tuple[int, ...]]]], ...] = (
    (one, lambda rows, cols: [(rows, cols)]),
    (three, lambda rows, cols: [(rows, cols), (rows, cols), (cols,)]),
    (six, lambda rows, cols: [(rows, cols)] * 6),
)


def made(shapes: Sequence[tuple[int, ...]], device: str) -> list[torch.Tensor]:
    """Tensors of these shapes."""
    return [torch.randn(s, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16) for s in shapes]


def launches(fused: Any, args: Sequence[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """The bare launch, the same with its allocation, and Triton's own call, of the one kernel that a call runs."""
    (call,) = fused._calls.values()
    (step,) = call.program.steps
    kernel, sizes = step.kernel, step.segment.sizes(call.sizes)
    out: torch.Tensor = call.program.empty(step.segment.writes[0], call.sizes)
    reads = [args[v] for v in step.segment.reads]
    empty, shape, strides, dtype = empty_of(out.device), tuple(out.shape), out.stride(), out.dtype
    if out.device.type == "cpu":
        (launch,) = kernel.source.launches
        scalars = kernel.arguments(launch, reads, [out], sizes)
        numbers = (ctypes.c_int64 * max(1, len(scalars)))(*scalars)
        ins = (ctypes.c_void_p * len(reads))(*[t.data_ptr() for t in reads])
        outs = (ctypes.c_void_p * 1)(out.data_ptr())
        function, threads = kernel.loaded, kernel.source.threads
        one_out = ctypes.c_void_p * 1

        def bare() -> torch.Tensor:
            y = empty(shape, strides, dtype)
            function(ins, one_out(y.data_ptr()), numbers, threads)
            return y

        def launch_alone() -> torch.Tensor:
            function(ins, outs, numbers, threads)
            return out  # whose memory `outs` points to

        return {"launch": launch_alone, "bare": bare}
    (part,) = kernel.compile(reads, [out], sizes)
    jit, grid, scalars, options = part.jit, part.grid, part.scalars, part.options
    run, function, packed = part.binary.run, part.binary.function, part.binary.packed_metadata
    g0, g1, g2 = (*grid, 1, 1)[:3]
    stream = torch.cuda.current_stream().cuda_stream

    def bound() -> torch.Tensor:
        y = empty(shape, strides, dtype)
        run(g0, g1, g2, stream, function, packed, None, None, None, *reads, y, *scalars)
        return y

    def jitted() -> torch.Tensor:
        y = empty(shape, strides, dtype)
        jit[grid](*reads, y, *scalars, **options)
        return y

    return {
        "launch": lambda: run(g0, g1, g2, stream, function, packed, None, None, None, *reads, out, *scalars),
        "bare": bound,
        "jit": jitted,
    }


def interleaved(calls: dict[str, Callable[[], Any]], device: str, repeats: int, number: int) -> dict[str, float]:
    """The median over repeats of the mean host time of one call, in microseconds; every repeat times every call in turn.

    On a GPU the queue is emptied before each batch, and a batch is short enough never to fill it."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 3):
        for name, call in calls.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(number):
                call()
            passed = time.perf_counter_ns() - start
            if repeat >= 3:
                taken[name].append(passed / number / 1000)
    return {name: statistics.median(times) for name, times in taken.items()}


def compare(fn: Callable[..., torch.Tensor], shapes: Callable[..., Any], o: argparse.Namespace) -> dict[str, float]:
    """Every way to make one call of a chain."""
    fused, compiled = autofuse.fuse(fn), torch.compile(fn, dynamic=False)
    args = made(shapes(ROWS, COLS), o.device)
    fused(*args)
    calls = launches(fused, args)
    others = [made(shapes(rows, COLS), o.device) for rows in range(1, 17)]
    for other in others:
        fused(*other)
    turn = iter(range(10**9))
    with torch.no_grad():
        compiled(*args)
        calls |= {
            "ours": lambda: fused(*args),
            "rows": lambda: fused(*others[next(turn) % 16]),
            "eager": lambda: fn(*args),
            "compile": lambda: compiled(*args),
        }
        return interleaved(calls, o.device, o.repeats, o.number)


def signatures(o: argparse.Namespace) -> dict[str, float]:
    """Calls that go round 2 and 50 signatures (extents and dtypes) of one function."""
    fused = autofuse.fuse(three)
    calls = []
    for k in range(50):
        cols = COLS + 4 * (k if k % 2 else -k)  # as many below as above: the kernels themselves take as long
        args = made([(ROWS, cols), (ROWS, cols), (cols,)], o.device)
        fused(*args)
        calls.append(args)
    turn = iter(range(10**9))
    with torch.no_grad():
        return interleaved(
            {"of 2": lambda: fused(*calls[48 + next(turn) % 2]), "of 50": lambda: fused(*calls[next(turn) % 50])},
            o.device, o.repeats, o.number,
        )  # fmt: skip


def main() -> None:
    """Print the table and the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--number", type=int, default=200, help="calls a repeat")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOFUSE_STORE"] = f"{folder}/store.db"
        rows = {fn.__name__: compare(fn, shapes, o) for fn, shapes in CHAINS}
        many = signatures(o)
    names = list(dict.fromkeys(n for row in rows.values() for n in row))
    print(f"{'us a call':<10}" + "".join(f"{n:>9}" for n in names))
    for name, row in rows.items():
        print(f"{name:<10}" + "".join(f"{row[n]:9.2f}" for n in names))
    print(f"signatures in turn: of 2 {many['of 2']:.2f}, of 50 {many['of 50']:.2f}")

    def bar(text: str, worst: float, most: float) -> None:
        print(f"  {text:<40} {worst:6.2f}, at most {most:.2f}: {'met' if worst <= most else 'MISSED'}")

    if o.device == "cpu":
        bar("ours over the bare C call, us", max(r["ours"] - r["launch"] for r in rows.values()), 6.0)
    else:
        bar("ours / bare", max(r["ours"] / r["bare"] for r in rows.values()), 1.25)
    bar("ours / torch.compile", max(r["ours"] / r["compile"] for r in rows.values()), 0.35)
    bar("ours / eager", max(r["ours"] / r["eager"] for r in rows.values()), 1.0)
    bar("50 signatures / 2", many["of 50"] / many["of 2"], 1.2)


if __name__ == "__main__":
    main()
