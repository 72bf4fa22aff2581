"""A Triton kernel kind with faults to order, registered by importing it. The segment that it makes is x * 2 + 1."""

from __future__ import annotations

from autofuse.kernels.base import Knobs, Launch, Source, Space, Task
from autofuse.kernels.registry import BY_NAME

FAULTS = {
    "none": "",
    "race": "tl.store(out0, tl.extra.cuda.globaltimer().to(tl.float32))",
    "nan": 'tl.store(out0 + 5, float("nan"))',
    "outside": "tl.store(out0 + numel + 1, 0.0)",
    "illegal": "tl.store(out0 + pid.to(tl.int64) + (1 << 40), 0.0)",
    "hang": "x = tl.load(in0, volatile=True)\n    while x == x:\n        x = tl.load(in0, volatile=True)",
    "refused": "tl.no_such_function(out0)",
    "warps": "",
}


class FaultyTriton:
    """x * 2 + 1 with the fault that the knob names."""

    name = "faulty_triton"
    version = 1

    def match(self, task: Task) -> bool:
        return task.limits.target == "cuda"

    def space(self, task: Task) -> Space:
        return Space(self.name, self.version, ())

    def seed(self, task: Task) -> dict[str, int | str]:
        return {"fault": "none"}

    def variants(self, task: Task) -> list[dict[str, int | str]]:
        return []

    def emit(self, task: Task, knobs: Knobs) -> Source:
        fault = str(knobs["fault"])
        text = f"""import triton
import triton.language as tl


@triton.jit
def kernel(in0, out0, numel):
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(out0 + at, tl.load(in0 + at, mask=at < numel) * 2.0 + 1.0, mask=at < numel)
    {FAULTS[fault]}
"""
        warps = 64 if fault == "warps" else 4
        return Source("cuda", text, (Launch("kernel", (("numel",),), ("flat", 1024), (0,), (0,), num_warps=warps),))


BY_NAME[FaultyTriton.name] = FaultyTriton()
