"""The catalogue's table: each chain with its arguments, and the shapes at which it makes sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autofuse import inputs
from examples import catalogue as c
from examples import training as t

ROWWISE = ("large", "long", "decode", "odd")
POINTWISE = ("large", "decode", "odd")
VOCABULARIES = (32000, 50257, 128256, 256000)


@dataclass(frozen=True)
class Entry:
    """A chain of the catalogue. `args` are written as for `autofuse tune --arg`, with the axes rows and cols.

    num_ops: operations that read and write memory in eager mode, composites of PyTorch counted as one.
    multiple: what the number of columns must be a multiple of.
    suites: the benchmark's suites that it belongs to.
    widths: its own columns, in place of a suite's, where those of hidden sizes make no sense.
    """

    name: str
    fn: Callable[..., Any]
    args: dict[str, str]
    num_ops: int
    multiple: int = 1
    suites: tuple[str, ...] = ROWWISE
    widths: tuple[int, ...] = ()

    def case(self, rows: int, cols: int, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
        """Arguments of one workload; `cols` is the last axis of the output."""
        specs = tuple(inputs.parse_arg(text) for text in self.args.values())
        made = dict(zip(self.args, inputs.CaseSpec(specs, (("rows", rows), ("cols", cols)), dtype).make(device, seed), strict=True))
        if "cos" in made:
            made["cos"], made["sin"] = made["cos"].cos(), made["cos"].sin()  # of the same angles
        return tuple(made.values())


X = "rows,cols"
X3 = "4,rows,cols"  # a batch of sequences, or heads of scores
NORM = {"x": X, "weight": "cols"}
ADD_NORM = {"x": X, "residual": X, "weight": "cols"}
STATIC = {"scale": "():float32:0.01..0.02"}
HALVES = {"x": "rows,2*cols"}
HEADS = {"x": "rows,cols/128,128", "cos": "rows,64", "sin": "rows,64"}
QK = {"query": HEADS["x"], "key": "rows,8,128", "query_weight": "128", "key_weight": "128", "cos": "rows,64", "sin": "rows,64"}
LOGITS = {"logits": X, "target": "rows:int64:0..cols"}
RSTD = {"rstd": "rows:float32:0.5..2"}
LARGE = ("large",)

CATALOGUE: list[Entry] = [
    Entry("rmsnorm", c.rmsnorm, NORM, 1),
    Entry("rmsnorm_gemma", c.rmsnorm_gemma, NORM, 10),
    Entry("add_rmsnorm", c.add_rmsnorm, ADD_NORM, 2),
    Entry("add_rmsnorm_gemma", c.add_rmsnorm_gemma, ADD_NORM, 11),
    Entry("add_norm_act", c.add_norm_act, ADD_NORM, 3),
    Entry("rmsnorm_gated", c.rmsnorm_gated, {"x": X, "z": X, "weight": "cols"}, 3),
    Entry("layernorm", c.layernorm, {**NORM, "bias": "cols"}, 1),
    Entry("add_layernorm", c.add_layernorm, {**ADD_NORM, "bias": "cols"}, 2),
    Entry("add_layernorm_gelu", c.add_layernorm_gelu, {**ADD_NORM, "bias": "cols"}, 3),
    Entry("adaln_modulate", c.adaln_modulate, {"x": X3, "scale": "4,1,cols", "shift": "4,1,cols"}, 4),
    Entry("swiglu", c.swiglu, HALVES, 2, suites=POINTWISE),
    Entry("swiglu_split", c.swiglu_split, {"gate": X, "up": X}, 2, suites=POINTWISE),
    Entry("geglu", c.geglu, HALVES, 2, suites=POINTWISE),
    Entry("geglu_split", c.geglu_split, {"gate": X, "up": X}, 2, suites=POINTWISE),
    Entry("relu2", c.relu2, {"x": X}, 2, suites=POINTWISE),
    Entry("bias_gelu", c.bias_gelu, {"x": X, "bias": "cols"}, 2, suites=POINTWISE),
    Entry("bias_gelu_tanh", c.bias_gelu_tanh, {"x": X, "bias": "cols"}, 2, suites=POINTWISE),
    Entry("mish_add", c.mish_add, {"x": X, "y": X}, 2, suites=POINTWISE),
    Entry("softcap", c.softcap, {"x": X}, 3, suites=POINTWISE),
    Entry("layer_scale", c.layer_scale, {"residual": X, "branch": X, "gamma": "cols"}, 2, suites=POINTWISE),
    Entry(
        "layer_scale_drop_path", c.layer_scale_drop_path,
        {"residual": X3, "branch": X3, "gamma": "cols", "keep": "4,1,1:bool"}, 4, suites=("large", "odd"),
    ),
    Entry("ripple", c.ripple, {"x": X, "gain": "cols"}, 11, suites=POINTWISE),
    Entry("softmax", c.softmax, {"x": X}, 1),
    Entry("log_softmax", c.log_softmax, {"x": X}, 1),
    Entry("softmax_scale_mask", c.softmax_scale_mask, {"x": X, "mask": X}, 3),
    Entry("rope", c.rope, HEADS, 7, 128, ("large", "decode")),
    Entry("rope_interleaved", c.rope_interleaved, HEADS, 7, 128, ("large", "decode")),
    Entry("rope_partial", c.rope_partial, {**HEADS, "cos": "rows,32", "sin": "rows,32"}, 8, 128, ("large", "decode")),
    Entry("qk_norm_rope", c.qk_norm_rope, QK, 16, 128, ("large", "decode")),
    Entry("rmsnorm_fp8_token", c.rmsnorm_fp8_token, NORM, 8),
    Entry("rmsnorm_fp8_block", c.rmsnorm_fp8_block, NORM, 8, 128),
    Entry("rmsnorm_fp8_static", c.rmsnorm_fp8_static, {**NORM, **STATIC}, 5),
    Entry("add_rmsnorm_fp8_token", c.add_rmsnorm_fp8_token, ADD_NORM, 9),
    Entry("add_rmsnorm_fp8_block", c.add_rmsnorm_fp8_block, ADD_NORM, 9, 128),
    Entry("add_rmsnorm_fp8_static", c.add_rmsnorm_fp8_static, {**ADD_NORM, **STATIC}, 6),
    Entry("swiglu_fp8_token", c.swiglu_fp8_token, HALVES, 9),
    Entry("swiglu_fp8_block", c.swiglu_fp8_block, HALVES, 9, 128),
    Entry("int8_token", c.int8_token, {"x": X}, 9),
    Entry("softmax_backward", t.softmax_backward, {"dy": X, "y": X}, 7, suites=("large", "long", "odd")),
    Entry("swiglu_backward", t.swiglu_backward, {"dy": X, "gate": X, "up": X}, 14, suites=LARGE),
    Entry("rmsnorm_backward", t.rmsnorm_backward, {"dy": X, "x": X, "weight": "cols", **RSTD}, 13, suites=LARGE),
    Entry(
        "layernorm_backward", t.layernorm_backward, {"dy": X, "x": X, "weight": "cols", "mean": "rows:float32:-0.5..0.5", **RSTD},
        16, suites=LARGE,
    ),
    Entry("softmax_causal", c.softmax_causal, {"x": X3}, 6, suites=LARGE, widths=(2048, 4096, 8192)),
    Entry("cross_entropy", t.cross_entropy, LOGITS, 2, suites=("large", "long"), widths=VOCABULARIES),
    Entry("cross_entropy_grad", t.cross_entropy_grad, LOGITS, 7, suites=("large", "long"), widths=VOCABULARIES),
    Entry(
        "groupnorm_silu", c.groupnorm_silu, {"x": "rows,64,cols", "weight": "64", "bias": "64"}, 2, suites=LARGE,
        widths=(1024, 4096, 16384),
    ),
    Entry(
        "dropout_add_layernorm", t.dropout_add_layernorm,
        {"x": X, "residual": X, "weight": "cols", "bias": "cols", "seed": "():int64:0..1000000"}, 5, suites=LARGE,
    ),
]  # fmt: skip
