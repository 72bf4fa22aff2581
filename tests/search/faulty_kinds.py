"""A kernel kind with faults to order, registered by importing it: the measuring process must survive and name each.

The segment that it makes is x * 2 + 1 on float32.
"""

from __future__ import annotations

import ctypes
import time

from autofuse.kernels.base import Knobs, Launch, Source, Space, Task
from autofuse.kernels.registry import BY_NAME

FAULTS = {
    "none": "",
    "tail": "",
    "nan": "if (n > 5) y[5] = __builtin_nanf(\"\");",
    "input": "((float *)x)[3] += 1.0f;",
    "even": "if ((n / 64) % 2) y[n - 1] += 1.0f;",
    "race": "static int calls; y[n / 2] += 1e-7f * (calls++ % 2) * y[n / 2];",
    "outside": "y[n + 1] = 0.0f;",
    "wrong": "for (long i = 0; i < n; i++) y[i] *= 1.001f;",
    "hang": "for (;;) __asm__ volatile(\"\");",
    "segfault": "*(volatile int *)8 = 1;",
    "exit": "_Exit(7);",
    "abort": "fprintf(stderr, \"MLIR dump\\nthe reason\\n\\n\"); abort();",
    "noise": "printf(\"noise on fd 1\\n\"); fflush(stdout);",
    "refused": "this is no C;",
    "crash_text": "", "memory": "", "weird": "", "gil": "", "exit_call": "",
}  # fmt: skip


class Weird(Exception):
    """An exception that can be neither printed nor pickled."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> str:
        raise TypeError("no pickle")


class Faulty:
    """x * 2 + 1 with the fault that the knob names."""

    name = "faulty"
    version = 1

    def match(self, task: Task) -> bool:
        return task.limits.target == "cpu"

    def space(self, task: Task) -> Space:
        return Space(self.name, self.version, ())

    def seed(self, task: Task) -> dict[str, int | str]:
        return {"fault": "none"}

    def variants(self, task: Task) -> list[dict[str, int | str]]:
        return []

    def emit(self, task: Task, knobs: Knobs) -> Source:
        fault = str(knobs["fault"])
        if fault == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if fault == "crash_text":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
        if fault == "weird":
            raise Weird
        if fault == "exit_call":
            raise SystemExit(0)
        if fault == "gil":  # a compiler pass that hangs without letting other threads run
            ctypes.PyDLL(None).sleep(1000)
            time.sleep(1000)
        end = "n - 7" if fault == "tail" else "n"
        text = f"""#include <stdio.h>
#include <stdlib.h>
void kernel(void **in, void **out, const long *args, long threads) {{
    const float *x = in[0]; float *y = out[0]; long n = args[0];
    for (long i = 0; i < {end}; i++) y[i] = x[i] * 2.0f + 1.0f;
    {FAULTS[fault]}
}}
"""
        return Source("cpu", text, (Launch("kernel", (("numel",),), ("threads",), (0,), (0,)),))


BY_NAME[Faulty.name] = Faulty()
