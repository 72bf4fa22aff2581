"""Triton kernels compiled for GPUs that are not here: what they take, and that nothing spills."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autofuse
from autofuse.fusion import Fusion, check
from autofuse.kernels.base import Limits
from autofuse.kernels.resources import Resources, compile_for, resources
from autofuse.program import Layouts
from autofuse.settings import read
from autofuse.trace import trace
from autofuse.traced import sizes_of
from examples.catalogue import softmax
from examples.entries import CATALOGUE
from tests.kernel_cases import data, turned
from tests.test_kernels import grouped, groups, norm, stats
from tests.test_ops import SAMPLES, make

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CHAINS = {e.name: e for e in CATALOGUE}


def compiled(fn: Callable[..., Any], args: Sequence[Any], arch: int, knobs: dict[str, int | str] | None = None) -> list[Resources]:
    """The resources of each kernel of the fused plan with its heuristic schedule, changed by `knobs`."""
    limits = Limits("cuda", f"sm_{arch}", sm_count=132, shared_bytes=SHARED[arch])
    traced = trace(fn, args)
    fusion = check(traced.chain)
    layouts = Layouts(fusion, [args[b.position] for b in traced.bindings if b.position is not None], sizes_of(traced, args) or {})
    made = []
    for nodes in fusion.fused():
        seed = layouts.seed(nodes, limits)
        assert seed is not None
        kind, schedule = seed
        task = layouts.task(nodes, limits)
        source = kind.emit(task, turned(layouts, kind.name, nodes, schedule, knobs or {}, limits))
        made.append(resources(source, task.low, arch, read().cache))
    return made


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", CHAINS)
def test_heuristic_schedules_do_not_spill(name: str, arch: int) -> None:
    if "fp8" in name and arch == 80:
        arch = 89  # the first that converts to fp8
    for found in compiled(CHAINS[name].fn, CHAINS[name].case(64, 4096, "bfloat16"), arch):
        assert found.stack_bytes == 0
        assert found.registers <= 255
        assert found.shared_bytes <= SHARED[arch]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_random_numbers_and_groups_do_not_spill(arch: int) -> None:
    x, image = data(64, 4096, dtype=torch.bfloat16), data(2, 320, 64, 64, dtype=torch.bfloat16)
    cases: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (lambda x, s: F.layer_norm(autofuse.dropout(x, 0.1, s) + x, x.shape[-1:]), (x, torch.tensor(3))),
        (lambda x: F.softmax(x.tril(), -1), (data(2, 4, 64, 2048, dtype=torch.bfloat16),)),
        (grouped, (image, data(320), data(320))),
    ]
    for fn, args in cases:
        (found,) = compiled(fn, args, arch)
        assert found.stack_bytes == 0


@pytest.mark.parametrize("name", ["softmax", "norm", "stats", "add_norm_act", "rmsnorm_fp8_block"])
def test_long_rows_do_not_spill(name: str) -> None:
    own: dict[str, Callable[..., Any]] = {"softmax": softmax, "norm": norm, "stats": stats}
    if name in own:
        found = compiled(own[name], (data(2, 70000, dtype=torch.bfloat16),), 90)
    else:
        found = compiled(CHAINS[name].fn, CHAINS[name].case(2, 70016, "bfloat16"), 90)
    assert [r.stack_bytes for r in found] == [0] * len(found)


@pytest.mark.parametrize("keep", ["wide", "storage"])
def test_an_early_load_of_few_elements_compiles(keep: str) -> None:
    """A weight a channel, of which a thread has one 16-bit element: less than a register."""
    knobs: dict[str, int | str] = {
        "form": "unrolled", "keep": keep, "early": 2, "block_cols": 4096, "num_warps": 8, "persistent": 1, "registers": 0,
    }  # fmt: skip
    assert compiled(CHAINS["groupnorm_silu"].fn, CHAINS["groupnorm_silu"].case(4, 12288, "bfloat16"), 90, knobs)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "name", ["rmsnorm", "softmax", "add_layernorm_gelu", "rmsnorm_fp8_token", "rmsnorm_fp8_block", "cross_entropy"]
)
def test_rows_of_several_programs_that_wait(name: str, arch: int) -> None:
    if "fp8" in name and arch == 80:
        arch = 89
    knobs: dict[str, int | str] = {
        "form": "joint", "pieces": 32, "block_cols": 2048, "num_warps": 8, "keep": "storage", "registers": 80, "math": "fast",
    }  # fmt: skip
    for cols, together in ((131072, 1), (140032, 1), (131072, 2)):
        knobs["rows_per_program"], knobs["num_warps"] = together, 8 * together
        (found,) = compiled(CHAINS[name].fn, CHAINS[name].case(4, cols, "bfloat16"), arch, knobs)
        assert found.stack_bytes == 0 and found.registers <= 80


@pytest.mark.parametrize("online", [0, 1])
def test_looped_forms_compile(online: int) -> None:
    knobs: dict[str, int | str] = {"form": "looped", "online": online, "num_stages": 2, "block_cols": 1024, "num_warps": 4}
    for fn in (softmax, groups):
        (found,) = compiled(fn, (data(4, 4096, dtype=torch.bfloat16),), 90, knobs)
        assert found.stack_bytes == 0


def test_wide_data() -> None:
    (found,) = compiled(CHAINS["add_layernorm_gelu"].fn, CHAINS["add_layernorm_gelu"].case(4, 4096, "float32"), 90)
    assert found.stack_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "float8_e4m3fn"])
def test_every_operation_compiles(dtype: str) -> None:
    """What the interpreter lets pass and the compiler does not: types, mostly."""
    by_args: dict[tuple[str, ...], list[Callable[..., Any]]] = {}
    for name, samples in SAMPLES.items():
        for sample in samples[: 20 if name == "to" else 1]:
            if dtype in sample.dtypes and name not in ("slice", "select", "expand", "permute", "reshape"):
                by_args.setdefault(sample.args, []).append(sample.fn)
    for kinds, fns in by_args.items():
        args = [make(kind, dtype, seed) for seed, kind in enumerate(kinds)]
        for k in range(0, len(fns), 12):

            def some(*given: Any, some: Sequence[Callable[..., Any]] = fns[k : k + 12]) -> list[Any]:
                return [fn(*given) for fn in some]

            assert compiled(some, args, 90)


@pytest.mark.parametrize("rows", [1, 64, 2000])
def test_rows_of_few_columns_have_a_schedule(rows: int) -> None:
    """A router over 8 experts, or 2: fewer elements than a warp has threads."""
    for cols in (2, 8):
        (found,) = compiled(softmax, (data(rows, cols, dtype=torch.bfloat16),), 90)
        assert found.stack_bytes == 0


@pytest.mark.parametrize(("cols", "narrowest"), [(4096, 16), (4104, 16), (4100, 8), (4098, 4), (4097, 2)])
@pytest.mark.parametrize("name", ["rmsnorm", "softmax", "swiglu", "relu2"])
def test_rows_are_read_in_pieces_as_wide_as_strides_allow(name: str, cols: int, narrowest: int) -> None:
    """Bytes of the narrowest load of a row; one run of memory has its narrow loads in its last block alone."""
    args = CHAINS[name].case(16, cols, "bfloat16")
    traced = trace(CHAINS[name].fn, args)
    layouts = Layouts(Fusion(traced.chain), list(args), sizes_of(traced, args) or {})
    limits = Limits("cuda", "sm_90", sm_count=132, shared_bytes=SHARED[90])
    (nodes,) = layouts.fusion.fused()
    seed = layouts.seed(nodes, limits)
    assert seed is not None
    kind, knobs = seed
    task = layouts.task(nodes, limits)
    widths = set()
    for made in compile_for(kind.emit(task, knobs), task.low, 90, read().cache):
        for count, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+) ", made.asm["ptx"]):
            widths.add(int(count or 1) * int(bits) // 8)
    if knobs["form"] == "flat":
        assert max(widths) == 16
    else:
        assert min(widths) == narrowest


def test_no_more_programs_wait_than_run_at_once() -> None:
    args = CHAINS["rmsnorm"].case(4, 131072, "bfloat16")
    traced = trace(CHAINS["rmsnorm"].fn, args)
    layouts = Layouts(Fusion(traced.chain), list(args), sizes_of(traced, args) or {})
    reasons = []
    for sms in (16, 32):
        limits = Limits("cuda", "sm_90", sm_count=sms, shared_bytes=SHARED[90])
        seed = layouts.seed(layouts.fusion.nodes, limits)
        assert seed is not None
        space = seed[0].space(layouts.task(layouts.fusion.nodes, limits))
        joint: dict[str, int | str] = {"form": "joint", "pieces": 32, "block_cols": 2048, "num_warps": 8}
        knobs = space.reduce({**{k.name: k.values[0] for k in space.knobs}, **joint})
        reasons.append(space.check(knobs))
    assert reasons == ["more programs wait for each other than surely run at once", None]
