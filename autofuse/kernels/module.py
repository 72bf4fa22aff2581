"""From a printed body to a source file: functions with the arguments that they name, and their launches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .base import Launch
from .triton_text import PRELUDE, TritonPrinter


def loop_over(low: object, high: object, step: object, stages: int) -> str:
    """A loop's range; with several stages the loads of later passes are under way while one is computed."""
    return f"tl.range({low}, {high}, {step}, num_stages={stages})" if stages > 1 else f"range({low}, {high}, {step})"


def function(
    p: TritonPrinter,
    entry: str,
    grid: tuple[object, ...],
    num_warps: int,
    num_stages: int = 1,
    workspaces: Sequence[int] = (),
    registers: int = 0,
) -> tuple[str, Launch]:
    """A printed body as a function, and its launch: only the tensors and scalars that the body names are arguments."""
    overlaps = "af_overlap" in p.prelude
    body = "\n".join([p.indent + "af_overlap()", *p.lines] if overlaps else p.lines)
    inputs = [k for k in range(p.low.chain.num_inputs) if _uses(body, f"in{k}")]
    outputs = [k for k in range(len(p.low.chain.outputs)) if _uses(body, f"out{k}")]
    work = [k for k in workspaces if _uses(body, f"ws{k}")]
    args = {n: s for n, s in p.addressing.args.items() if n == "rows" or _uses(body, n)}
    names = [*(f"in{k}" for k in inputs), *(f"out{k}" for k in outputs), *(f"ws{k}" for k in work), *args]
    # row counts vary from call to call: a kernel that specialised on one would be compiled again for the next
    varying = [n for n in args if n in ("rows", "reds") or n[0] == "e" or n.startswith("n_")]
    text = f"@triton.jit(do_not_specialize={varying!r})\ndef {entry}({', '.join(names)}):\n{body}\n"
    shape = (tuple(inputs), tuple(outputs), tuple(work), num_warps, num_stages)
    launch = Launch(entry, tuple(args.values()), grid, *shape, overlaps=overlaps, registers=registers)
    return text, launch


def module(prelude: set[str], functions: Sequence[str]) -> str:
    """A whole source file."""
    parts = [*(PRELUDE[n] for n in PRELUDE if n in prelude), *functions]
    return "import triton\nimport triton.language as tl\n\n\n" + "\n\n".join(parts)


def _uses(body: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", body) is not None
