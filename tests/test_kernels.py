"""Kernels on inputs that break careless ones: shapes, layouts, special values, every form and knob."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.fusion import check
from autofuse.kernels.c_text import PRELUDE as C_PRELUDE
from autofuse.kernels.expr import walk
from autofuse.kernels.lower import Lowered
from autofuse.kernels.mathmode import MODES
from autofuse.kernels.registry import kind_of
from autofuse.program import Layouts
from autofuse.trace import trace
from autofuse.traced import sizes_of
from examples.catalogue import mish_add, rope, softmax
from examples.entries import CATALOGUE, Entry
from tests.kernel_cases import LAYOUTS, LIMITS, SHAPES, VALUES, Knobs, data, floats, offset, run, sliced, transposed, turned

GOLDEN = Path(__file__).parent / "golden"
CHAINS = {e.name: e for e in CATALOGUE}
Fn = Callable[..., Any]


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x * 1.5, (x.shape[-1],))


def gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y + x


def stats(x: Tensor) -> tuple[Tensor, ...]:
    """Reductions of every kind over one row, and the row scaled by them."""
    top = x.amax(-1, keepdim=True)
    return x - top, x.float().var(-1), x.argmin(-1), (x > 0).any(-1), x.logsumexp(-1), x.mean(-1)


def groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """A norm of the row, then a scale for each 8 columns."""
    y = F.rms_norm(x, (x.shape[-1],), None, 1e-5).unflatten(-1, (-1, 8))
    scale = y.abs().amax(-1, keepdim=True)
    return (y / (scale + 0.1)).flatten(-2), scale.squeeze(-1)


def halves(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return F.softmax(torch.cat((-right, left), -1), -1)


ROWWISE: dict[str, Fn] = {"softmax": softmax, "norm": norm, "stats": stats}
# the variance overflows; the sum of a row so far from 0 is short of bits for a mean as exact as eager's running one
BEYOND = {("norm", "huge"), ("norm", "offset_1e4")}
SHARED: dict[str, Fn] = {**ROWWISE, "gelu": lambda x: F.gelu(x + 1)}


def args_of(entry: Entry, rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> tuple[Any, ...]:
    return entry.case(rows, cols, str(dtype).removeprefix("torch."), seed=seed)


def catalogue(*cols: int) -> list[Any]:
    return [pytest.param(e.name, n, id=f"{e.name}-{n}") for e in CATALOGUE for n in cols if n % e.multiple == 0]


# ---- C: the catalogue


@pytest.mark.parametrize(("name", "cols"), catalogue(33, 256))
def test_catalogue(name: str, cols: int) -> None:
    for dtype in floats(("float32", "bfloat16") if cols == 33 else ("float16",)):
        assert run(CHAINS[name].fn, args_of(CHAINS[name], 7, cols, dtype)).message == "", dtype


@pytest.mark.parametrize(("name", "cols"), catalogue(33, 128))
def test_catalogue_unfused(name: str, cols: int) -> None:
    made = run(CHAINS[name].fn, args_of(CHAINS[name], 7, cols, torch.bfloat16), groups="unfused")
    assert made.message == ""
    assert len(made.plan.parts) >= CHAINS[name].num_ops - 4


@pytest.mark.parametrize("name", CHAINS)
def test_catalogue_of_no_rows(name: str) -> None:
    made = run(CHAINS[name].fn, args_of(CHAINS[name], 0, 128, torch.float32))
    assert made.message == ""


C_KNOBS: dict[str, Knobs] = {
    "exact": {"math": "exact", "keep": "none", "threads": 1, "block": 4096, "chunks": 1},
    "fast": {"math": "fast", "keep": "all", "threads": 2, "vector": 512, "row_block": 1, "block": 64, "chunks": 4},
    "chunks": {"keep": "costly", "chunk_cols": 16, "row_block": 64, "threads": 2, "chunks": 2},
}


@pytest.mark.parametrize("knobs", C_KNOBS)
@pytest.mark.parametrize("name", CHAINS)
def test_catalogue_knobs(name: str, knobs: str) -> None:
    if knobs == "fast" and name.startswith("cross_entropy"):
        pytest.skip("a float32 loss: the fast exp and log lose bits that it shows")
    assert run(CHAINS[name].fn, args_of(CHAINS[name], 5, 128, torch.bfloat16, 1), knobs=C_KNOBS[knobs]).message == ""


# ---- C: shapes, layouts, values


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("dtype", floats(("float32", "bfloat16")), ids=str)
def test_shapes(name: str, shape: str, dtype: torch.dtype) -> None:
    fn = softmax if name == "stats" and shape == "0x64" else SHARED[name]
    if name == "norm" and shape == "1x1":
        fn = lambda x: F.layer_norm(x * 1.5, (1,), eps=0.1)  # noqa: E731 - of one element, all is rounding
    x = data(*SHAPES[shape], dtype=dtype)
    if name == "stats" and shape == "1x1":
        fn = lambda x: (x - x.amax(-1, keepdim=True), x.argmin(-1), x.logsumexp(-1))  # noqa: E731
    other: Knobs = {"keep": "all", "chunk_cols": 1024, "row_block": 1}
    for knobs in ({}, other) if x.numel() > 20000 else ({},):
        assert run(fn, (x,), knobs=knobs).message == ""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHARED)
def test_layouts(name: str, layout: str) -> None:
    for dtype in floats(("float32", "float16")):
        assert run(SHARED[name], (LAYOUTS[layout](data(9, 40, dtype=dtype)),)).message == ""


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_two_layouts(first: str, second: str) -> None:
    x, y = LAYOUTS[first](data(6, 40)), LAYOUTS[second](data(6, 40, seed=1))
    assert run(gated, (x, y)).message == ""
    assert run(mish_add, (x, y.bfloat16()), groups="unfused").message == ""


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", SHARED)
def test_values(name: str, values: str) -> None:
    for dtype in floats():
        if (name, values) in BEYOND and dtype is not torch.float16:
            continue
        message = run(SHARED[name], (VALUES[values](dtype),)).message
        assert message == "", dtype


@pytest.mark.parametrize("math", ["exact", "fast"])
def test_layer_norm_far_from_zero(math: str) -> None:
    x = data(4, 1000) + 1e4
    assert run(norm, (x.half(),), knobs={"math": math}).message == ""
    assert run(lambda x: F.layer_norm(x, (x.shape[-1],)), (x,), knobs={"math": "exact"}).message == ""


def test_one_tensor_twice() -> None:
    x = data(5, 24)
    made = run(gated, (x, x))
    assert made.message == ""
    assert made.chain.num_inputs == 2
    assert run(lambda x, y: x.softmax(-1) + y, (x, x[:1])).message == ""


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
        ("int64", "float16"),
        ("bool", "bfloat16"),
        ("float64", "float32"),
        ("int8", "int32"),
    ],
)
def test_mixed_dtypes(left: str, right: str) -> None:
    x, y = data(5, 24, scale=9).to(getattr(torch, left)), data(5, 24, seed=1).to(getattr(torch, right))
    assert run(lambda x, y: (x + y, x * 2, y - x.sum(-1, keepdim=True), x > y), (x, y)).message == ""


def test_scalars_of_no_dimension() -> None:
    x, scale = data(5, 24), torch.tensor(0.125)
    assert run(lambda x, s: F.softmax(x * s, -1) + s, (x, scale)).message == ""
    assert run(lambda x, s: x.bfloat16() * s, (x, scale)).chain.values[-1].dtype == "bfloat16"
    assert run(lambda x, y: x * y + 1, (scale, torch.tensor(3.0))).message == ""


def test_a_number_a_row() -> None:
    x, scale, weight, labels = data(7, 33), data(7, seed=1), data(33, seed=2), torch.arange(7) * 4
    assert run(lambda x, s, w: x * s[:, None] * w, (x, scale, weight)).message == ""
    assert run(lambda x, s: (x.amax(-1) * s, x / s.unsqueeze(-1)), (x, scale)).message == ""
    assert run(lambda x, i: x.logsumexp(-1) - x.gather(-1, i[:, None])[:, 0], (x, labels)).message == ""
    labels[3] = -100
    assert run(lambda x, i: F.cross_entropy(x, i, reduction="none"), (x, labels)).message == ""


ROW_AXES: dict[str, Fn] = {
    "every_other": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded_inside": lambda x: x[:, :1].expand(x.shape),
    "swapped": lambda x: x.transpose(0, 1),
    "from_the_middle": lambda x: x[:, 1:4, 3:20],
    "turned": lambda x: x.permute(2, 0, 1),
}


@pytest.mark.parametrize("name", ROW_AXES)
def test_row_axes_that_are_no_one_run(name: str) -> None:
    x = ROW_AXES[name](data(3, 6, 24))
    for fn in SHARED.values():
        assert run(fn, (x,)).message == ""
    assert run(gated, (x, data(*x.shape, seed=1))).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("name", ROW_AXES)
def test_row_axes_that_are_no_one_run_triton(name: str) -> None:
    x = ROW_AXES[name](data(3, 6, 24))
    assert run(stats, (x,), "cuda", FORMS["whole_rows"]).message == ""
    assert run(gated, (x, data(*x.shape, seed=1)), "cuda", TILES["tile_rows"]).message == ""


def grouped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, w.shape[0] // 2, w, b))


IMAGES: dict[str, Callable[[], Tensor]] = {
    "image": lambda: data(3, 8, 5, 7),
    "one_wide": lambda: data(2, 4, 33, 1),
    "long": lambda: data(2, 6, 1000),
    "one": lambda: data(1, 2, 3, 4),
    "none": lambda: data(0, 8, 5, 7),
    "turned": lambda: data(3, 5, 7, 8).permute(0, 3, 2, 1),
    "sliced": lambda: sliced(data(3, 6, 5, 7)),
    "volume": lambda: data(2, 4, 3, 2, 5),
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("dtype", floats(), ids=str)
def test_group_norm(name: str, dtype: torch.dtype) -> None:
    x = IMAGES[name]().to(dtype)
    w, b = data(x.shape[1], seed=1).to(dtype), data(x.shape[1], seed=2).to(dtype)
    made = run(grouped, (x, w, b))
    assert made.message == ""
    assert len(made.plan.parts) == 1
    assert run(lambda x: F.group_norm(x, 2) * 2, (x,), groups="unfused").message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["whole", "whole_rows", "looped", "looped_rows"])
def test_group_norm_triton(form: str) -> None:
    for name in ("image", "one_wide", "long", "sliced", "volume"):
        x = IMAGES[name]()
        made = run(grouped, (x, data(x.shape[1], seed=1), data(x.shape[1], seed=2)), "cuda", FORMS[form])
        assert made.message == "", name
        assert len(made.plan.parts) == 1


def test_outer() -> None:
    x = data(40)
    assert run(lambda x: x[:, None] - x[None, :], (x,)).message == ""
    assert run(lambda x: (x[..., :, None] * x[..., None, :]).sum(-1), (data(3, 12),)).message == ""


def test_contiguous_of_a_transposed_input() -> None:
    assert run(lambda x: x.contiguous() + 1, (transposed(data(6, 10)),)).message == ""


@pytest.mark.parametrize("groups", ["fused", "unfused"])
def test_views_keep_eagers_strides(groups: str) -> None:
    x = data(4, 6, 24)
    for fn in (
        lambda x: (x + 1).transpose(-1, -2),
        lambda x: (x + 1).transpose(0, 1) * 2,
        lambda x: (x * 2).transpose(-1, -2).contiguous(),
        lambda x: ((x + 1)[..., 3:9], (x + 1).unflatten(-1, (4, 6)), x[..., :5]),
        lambda x: (x + 1).permute(2, 0, 1).exp(),
        lambda x: (x[..., :1] * 2).expand(-1, -1, 7),
        lambda x: x.transpose(0, 1).flatten(0, 1) + 1,
    ):
        for given in (x, transposed(x), sliced(x)):
            assert run(fn, (given,), groups=groups).message == ""


# ---- Triton, in the interpreter

FORMS: dict[str, Knobs] = {
    "whole": {"form": "whole", "rows_per_program": 1, "num_warps": 1, "overlap": 1},
    "whole_rows": {"form": "whole", "rows_per_program": 4, "num_warps": 1},
    "looped": {"form": "looped", "block_cols": 16, "online": 0, "rows_per_program": 1, "num_warps": 1, "turn": 1},
    "looped_online": {"form": "looped", "block_cols": 16, "online": 1, "rows_per_program": 1, "num_warps": 1},
    "whole_storage": {"form": "whole", "rows_per_program": 2, "num_warps": 1, "keep": "storage", "in0": "evict_first"},
    "persistent": {"form": "whole", "rows_per_program": 2, "num_warps": 1, "persistent": 1, "num_stages": 2},
    "persistent_storage": {"form": "whole", "rows_per_program": 1, "num_warps": 1, "persistent": 2, "keep": "storage"},
    "unrolled": {"form": "unrolled", "rows_per_program": 1, "block_cols": 16, "num_warps": 1},
    "unrolled_rows": {"form": "unrolled", "rows_per_program": 4, "block_cols": 32, "num_warps": 1, "persistent": 1},
    "unrolled_storage": {
        "form": "unrolled", "rows_per_program": 2, "block_cols": 16, "num_warps": 1, "keep": "storage", "in0": "past",
        "near": "evict_last",
    },
    "split": {"form": "split", "pieces": 3, "block_cols": 8, "online": 0, "num_warps": 1},
    "split_online": {
        "form": "split",
        "pieces": 4,
        "block_cols": 8,
        "online": 1,
        "num_warps": 1,
        "in0": "reuse",
        "overlap": 1,
        "turn": 1,
    },
    "looped_rows": {"form": "looped", "block_cols": 32, "online": 1, "rows_per_program": 4, "num_warps": 1, "num_stages": 2},
}  # fmt: skip
FEW_FORMS = {k: FORMS[k] for k in ("whole_rows", "unrolled_storage", "looped_online", "split_online")}
TILES: dict[str, Knobs] = {
    "flat": {"form": "flat", "block": 64, "overlap": 1},
    "tile": {"form": "tile", "rows_per_program": 1, "block_cols": 16, "order": "cols"},
    "tile_rows": {"form": "tile", "rows_per_program": 4, "block_cols": 16, "order": "cols"},
    "tile_by_blocks": {"form": "tile", "rows_per_program": 2, "block_cols": 16, "order": "rows"},
}


def of(form: str, knobs: Mapping[str, Knobs], math: str) -> Knobs:
    return {**knobs[form], "math": math}


@pytest.mark.interpret
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["softmax", "norm", "stats", "groups", "halves"])
def test_row_forms(name: str, form: str) -> None:
    fn = {**ROWWISE, "groups": groups, "halves": halves}[name]
    for cols, dtype in ((40, torch.float32), (72, torch.bfloat16), (64, torch.float16)):
        assert run(fn, (data(7, cols, dtype=dtype),), "cuda", of(form, FORMS, "exact")).message == ""
    if name != "groups":
        for math in ("fast", "approx"):
            assert run(fn, (data(3, 5, 34, dtype=torch.bfloat16),), "cuda", of(form, FORMS, math)).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_forms_of_layouts(layout: str, form: str) -> None:
    assert run(stats, (LAYOUTS[layout](data(6, 40)),), "cuda", of(form, FORMS, "exact")).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize(
    "form", ["whole_rows", "whole_storage", "looped", "looped_online", "unrolled_rows", "unrolled_storage", "split", "split_online"]
)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ROWWISE)
def test_row_forms_of_values(name: str, values: str, form: str) -> None:
    if (name, values) in BEYOND:
        values = "tiny"
    assert run(ROWWISE[name], (VALUES[values](torch.float32),), "cuda", of(form, FORMS, "exact")).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("form", TILES)
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_pointwise_forms(layout: str | None, form: str) -> None:
    for cols in (33, 64):
        x = data(7, cols)
        given = x if layout is None else LAYOUTS[layout](x)
        knobs: dict[str, int | str] = {**TILES[form]}
        if form == "flat" and layout not in (None, "misaligned"):
            knobs = {}
        assert run(gated, (given, data(7, cols, seed=1)), "cuda", knobs).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["tile", "tile_rows"])
def test_pointwise_views(form: str) -> None:
    x = data(3, 5, 48, dtype=torch.float16)
    for fn in (
        lambda x: torch.cat((x[..., :7] * 2, x[..., 7:] + 1), -1),
        lambda x: torch.stack((x[..., ::2], x[..., 1::2] * 3), -1).flatten(-2),
        lambda x: (x.transpose(0, 1) + 1, x.transpose(-1, -2) * 2),
        lambda x: x.unflatten(-1, (6, 8)) * x[..., :8].unsqueeze(-2),
    ):
        assert run(fn, (x,), "cuda", TILES[form]).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("math", ["exact", "fast"])
@pytest.mark.parametrize("form", ["whole", "unrolled"])
@pytest.mark.parametrize("name", ["add_norm_act", "add_layernorm_gelu", "rmsnorm_fp8_token", "swiglu_fp8_token"])
def test_what_eager_rounds_waits_rounded(name: str, form: str, math: str) -> None:
    chain = CHAINS[name]
    for rows, cols in ((3, 384), (5, 256)):
        args = chain.case(rows, cols, "bfloat16")
        knobs: Knobs = {"form": form, "rows_per_program": 2, "block_cols": 128, "num_warps": 1, "math": math, "early": 0}
        rounded, kept = (run(chain.fn, args, "cuda", {**knobs, "keep": keep}) for keep in ("rounded", "storage"))
        assert rounded.message == "" and rounded.sources != kept.sources


def test_what_eager_has_in_32_bits_is_not_rounded() -> None:
    """The sum of two tensors is read in float32 too; that of the others is bfloat16 for all who read it."""

    def wide(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = x.float() + r.float()
        return F.rms_norm(h, h.shape[-1:]).bfloat16(), h.bfloat16()

    def half(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return F.rms_norm(h.float(), h.shape[-1:]).bfloat16(), h

    x = data(4, 64, dtype=torch.bfloat16)
    assert "add" not in halved(wide, x)
    assert "add" in halved(half, x)


def halved(fn: Fn, x: Tensor) -> set[str]:
    """The operations whose results a kernel may keep in 16 bits."""
    low = Lowered(trace(fn, (x, x)).chain)
    every = walk([s.value for s in low.stores])
    return {e.op for e in every if e.number in low.halves}


EARLY: dict[str, Knobs] = {
    "rows": {"form": "whole", "early": 1, "keep": "wide", "rows_per_program": 2, "num_warps": 1, "registers": 40},
    "all": {"form": "whole", "early": 2, "keep": "wide", "rows_per_program": 1, "num_warps": 1},
    "persistent": {"form": "whole", "early": 2, "keep": "wide", "rows_per_program": 2, "num_warps": 1, "persistent": 2},
    "storage": {"form": "whole", "early": 2, "keep": "storage", "rows_per_program": 1, "num_warps": 1},
    "side by side": {"form": "unrolled", "early": 2, "keep": "wide", "rows_per_program": 1, "num_warps": 1, "block_cols": 128},
    "side by side, storage": {
        "form": "unrolled", "early": 2, "keep": "storage", "rows_per_program": 1, "num_warps": 1, "block_cols": 128,
    },
}  # fmt: skip


def sines(fn: Fn, math: str, device: str = "cpu") -> None:
    """A sine of every magnitude, near multiples of pi / 2, and of what has none; rows of near arguments alone are as exact."""
    g = torch.Generator().manual_seed(3)
    wide = torch.exp2(torch.empty(8, 256, dtype=torch.float64).uniform_(-30, 127.9, generator=g)).float()
    near = (torch.arange(-1024, 1024).double() * (torch.pi / 2)).float().view(8, 256)
    worst = torch.tensor([16367173 * 2.0**72, 1e5, 100000.01, -1e5, 3.4e38, 8.5e37, 1e-40, 0.0]).repeat(8, 32)
    for x in (wide, -wide, near, worst, data(8, 256) * 4, wide[:1, :7]):
        y = run(lambda x: fn(x), (x.to(device),), "cuda", {"math": math})
        assert math == "approx" or y.message == ""
        error = (y.outputs[0].cpu().double() - fn(x.double())).abs()
        assert float(error.max()) < (4e-6 if math == "approx" else 1.6e-7)  # the interpreter fuses no product
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1.0, 2e5, -3.0] * 4).view(1, 32)
    got = run(lambda x: fn(x), (special.to(device),), "cuda", {"math": math}).outputs[0].cpu()
    assert got[0, :3].isnan().all() and not got[0, 3:8].isnan().any()
    assert fn is torch.cos or torch.signbit(got[0, 3:5]).tolist() == [True, False]
    scalar = run(lambda x, s: x * fn(s), (data(4, 8).to(device), torch.tensor(2e5, device=device)), "cuda", {"math": math})
    assert math == "approx" or scalar.message == ""
    assert torch.allclose(scalar.outputs[0].cpu(), data(4, 8) * fn(torch.tensor(2e5)), rtol=2e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("math", MODES)
@pytest.mark.parametrize("fn", [torch.sin, torch.cos])
def test_sines(fn: Fn, math: str) -> None:
    sines(fn, math)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def saturated(device: str = "cpu") -> None:
    """What lies past fp8's range becomes its largest number, with a clamp and without one; NaN stays NaN, -0.0 is kept."""
    x = torch.tensor([1e4, -1e4, 448.0, 464.0, 465.0, torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-9, 0.07] * 3).view(3, 12)
    wanted = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    for fn in (to_fp8, lambda x: x.to(torch.float8_e4m3fn)):
        y = run(fn, (x.to(device),), "cuda").outputs[0].cpu()
        assert torch.equal(y.view(torch.uint8)[:, :7], wanted.view(torch.uint8)[:, :7])
        assert torch.equal(y.view(torch.uint8)[:, 8:], wanted.view(torch.uint8)[:, 8:])
        assert y.float()[:, 7].isnan().all()


@pytest.mark.interpret
def test_fp8_saturates() -> None:
    saturated()


@pytest.mark.interpret
def test_minus_zero() -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -2.0]])
    for math in MODES:
        (y,) = run(torch.neg, (x,), "cuda", {"math": math}).outputs
        assert torch.equal(y, -x) and torch.equal(torch.signbit(y), torch.signbit(-x))


@pytest.mark.interpret
def test_tails_of_erf() -> None:
    """Exactly 0 where eager's is, in every math mode."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([-1e4, -20.0, -9.0, -7.0, 7.0, 9.0, 1e4, 3e4] * 4, dtype=dtype).view(2, 16)
        for fn in (lambda x: x * (1 - torch.erf(x)), F.gelu, lambda x: 1 + torch.erf(x)):
            for math in ("exact", "fast"):
                made = run(fn, (x,), "cuda", {"math": math})
                assert made.message == "" and torch.equal(made.outputs[0] == 0, fn(x.float()) == 0)


def test_a_mean_beside_a_deviation_is_infinite_with_its_row() -> None:
    x = data(6, 100)
    x[0, 40], x[1, 3], x[2, 7] = -torch.inf, torch.inf, torch.nan
    assert run(lambda x: (x - x.mean(-1, keepdim=True), x.std(-1, keepdim=True)), (x,)).message == ""


@pytest.mark.interpret
def test_log1p_of_large_numbers() -> None:
    x = torch.tensor([3e38, 1e30, 1e-30, -0.5, 0.0, torch.inf, 7.0, 1e10] * 4).view(2, 16)
    assert run(torch.log1p, (x,), "cuda", {"math": "exact"}).message == ""
    assert run(torch.log1p, (x,)).message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("form", EARLY)
@pytest.mark.parametrize("name", ["rmsnorm_gated", "adaln_modulate", "rmsnorm_fp8_block", "layernorm"])
def test_early_loads(name: str, form: str) -> None:
    """Tiles that are needed after a reduction, loaded before it."""
    for cols, dtype in ((384, torch.bfloat16), (300, torch.float32)):
        if cols % CHAINS[name].multiple:
            continue
        knobs = EARLY[form] if name == "rmsnorm_gated" else {**EARLY[form], "early": 2}
        made = run(CHAINS[name].fn, args_of(CHAINS[name], 5, cols, dtype), "cuda", knobs)
        assert made.message == ""
        last = {"rmsnorm_gated": "in2", "adaln_modulate": "in2", "layernorm": "in2", "rmsnorm_fp8_block": "in1"}[name]
        assert made.sources[0].index(f"tl.load({last}") < made.sources[0].index("tl.sum(")


def variance(x: torch.Tensor) -> torch.Tensor:
    return x.var(-1, correction=0)


@pytest.mark.interpret
@pytest.mark.parametrize("offset_by", [0.0, 1e4, -3e6])
@pytest.mark.parametrize("cols", [48, 64, 100, 333])
def test_a_variance_in_one_pass(cols: int, offset_by: float) -> None:
    """Exact with a large offset, and where the row's first element lies far from all others."""
    x = data(6, cols) + offset_by
    x[2, 0], x[3, 7], x[5] = offset_by + 1000, offset_by - 500, offset_by
    right = x.double().var(-1, correction=0)
    for rows, block in ((1, 16), (4, 32)):
        knobs: Knobs = {"form": "looped", "online": 1, "block_cols": block, "rows_per_program": rows, "math": "fast"}
        made = run(variance, (x,), "cuda", knobs)
        assert made.sources[0].count("tl.load(") == 2  # the first block, and one pass
        # about a unit in the last place for each of the elements of a place
        assert ((made.outputs[0] - right).abs() <= 2 * (4 + cols / block) * 1.2e-7 * right).all()
        assert run(lambda x: F.layer_norm(x, x.shape[-1:]), (x.bfloat16(),), "cuda", knobs).message == ""
    special = data(4, cols)
    special[0, 3], special[1, 5], special[2, 0] = torch.inf, torch.nan, 1e30
    assert run(variance, (special,), "cuda", knobs).message == ""
    special[2, 0], special[3, 0] = -torch.inf, 2.0
    spread = run(lambda x: (x - x.mean(-1, keepdim=True), x.std(-1, keepdim=True)), (special,), "cuda", knobs)
    assert spread.message == ""  # finite elements of a row with an infinity lie infinitely far from its mean


def normed_pairs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.rms_norm(x, (x.shape[-1],)) * w
    return torch.stack((y[..., ::2] - y[..., 1::2], y[..., 1::2] * 2), -1).flatten(-2)


@pytest.mark.interpret
def test_pairs_of_columns() -> None:
    """Columns 2k and 2k + 1 are one run of memory, not two with gaps."""
    inputs = (data(5, 3, 64), data(5, 32), data(5, 32))
    made = run(
        CHAINS["rope_interleaved"].fn, inputs, "cuda", {"form": "tile", "rows_per_program": 4, "block_cols": 16, "num_warps": 1}
    )
    assert made.message == ""
    assert made.sources[0].count("tl.load(in0") == made.sources[0].count("tl.store(") == 1
    for cols in (48, 64, 66):
        for shape in ((7, cols), (3, 2, cols)):
            x = data(*shape, dtype=torch.bfloat16)
            assert run(normed_pairs, (x, data(cols, dtype=torch.bfloat16)), "cuda").message == ""
    swapped = run(lambda x: torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2), (data(6, 40)[:, 1:39],), "cuda")
    assert swapped.message == ""
    far = run(lambda x: x[..., ::2] + x[..., 2::2].sum(-1, keepdim=True), (data(6, 40),), "cuda")  # every other one alone
    assert far.message == ""


@pytest.mark.interpret
@pytest.mark.parametrize(("name", "cols"), catalogue(40, 128))
def test_catalogue_triton(name: str, cols: int) -> None:
    dtype = torch.float32 if cols == 40 else torch.bfloat16
    assert run(CHAINS[name].fn, args_of(CHAINS[name], 3, cols, dtype), "cuda").message == ""


@pytest.mark.interpret
@pytest.mark.parametrize(("name", "cols"), catalogue(128))
def test_catalogue_triton_unfused(name: str, cols: int) -> None:
    assert run(CHAINS[name].fn, args_of(CHAINS[name], 3, cols, torch.bfloat16), "cuda", groups="unfused").message == ""


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [s for s in SHAPES if s not in ("2x70000", "5x4096")])
def test_shapes_triton(shape: str) -> None:
    x = data(*SHAPES[shape])
    assert run(softmax, (x,), "cuda").message == ""
    assert run(lambda x: F.gelu(x) * 2, (offset(x),), "cuda").message == ""


@pytest.mark.interpret
def test_long_row_triton() -> None:
    made = run(softmax, (data(1, 70000),), "cuda")
    assert made.message == ""
    assert "for i" in made.sources[0]


@pytest.mark.interpret
def test_a_number_a_row_triton() -> None:
    x, scale, labels = data(7, 33), data(7, seed=1), torch.arange(7) * 4
    assert run(lambda x, s: (x.amax(-1) * s, x / s.unsqueeze(-1)), (x, scale), "cuda").message == ""
    assert run(lambda x, i: F.cross_entropy(x, i, reduction="none"), (x, labels), "cuda").message == ""


# ---- generated source

LOOPED: Knobs = {"form": "looped", "block_cols": 1024, "online": 1, "math": "exact", "num_warps": 4}
GOLD: dict[str, tuple[str, Fn, tuple[Any, ...], Knobs]] = {
    "add_norm_act.py": ("cuda", CHAINS["add_norm_act"].fn, (*(data(6, 48).bfloat16(),) * 2, data(48).bfloat16()), {}),
    "softmax_looped.py": ("cuda", softmax, (data(6, 4000),), LOOPED),
    "rope.py": ("cuda", rope, (data(6, 4, 32).half(), data(6, 16).half(), data(6, 16).half()), {}),
    "softmax.c": ("cpu", softmax, (data(6, 100),), {"keep": "costly", "math": "exact"}),
    "groups.c": ("cpu", groups, (data(6, 64).bfloat16(),), {"keep": "all", "math": "fast"}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLD)
def test_golden(name: str) -> None:
    target, fn, args, knobs = GOLD[name]
    traced = trace(fn, args)
    fusion = check(traced.chain)
    layouts = Layouts(fusion, args, sizes_of(traced, args) or {})
    (nodes,) = fusion.fused()
    task = layouts.task(nodes, LIMITS[target])
    kind = kind_of(task)
    text = kind.emit(task, turned(layouts, kind.name, nodes, kind.seed(task), knobs, LIMITS[target])).text.replace(C_PRELUDE, "")
    text = re.sub(r"\A.*?(?=@triton\.jit\(do_not)", "", text, flags=re.DOTALL)  # without imports and helpers
    path = GOLDEN / name
    if os.environ.get("AUTOFUSE_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    changed = difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), name, "now", lineterm="")
    assert not (told := "\n".join(changed)), f"AUTOFUSE_UPDATE_GOLDEN=1 accepts this:\n{told}"
