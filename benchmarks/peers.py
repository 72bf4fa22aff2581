"""What the chains are compared with: PyTorch eager and compiled, and the kernels of Liger, QuACK and FlashInfer.

A peer is bound to one set of arguments before it is timed; the call that results returns what the chain returns. What
works in place is bound to clones: it is checked on its first call and timed as it is used, without clones, on values
that drift from call to call (its traffic is the chain's). Its name ends in "_inplace". FlashInfer's and Liger's rotary
embeddings want keys too and get one head of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from examples.catalogue import EPS

Call = Callable[[], Any]
Bind = Callable[..., Call]
FP8 = torch.float8_e4m3fn
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 2e-2, FP8: 8e-2, torch.int8: 2e-2}
"""Largest difference from eager over eager's largest value, which lets fp8 differ by a step and int8 by one or two."""


def plain(fn: Callable[..., Any]) -> Bind:
    """A function of the chain's own arguments."""
    return lambda *args: partial(fn, *args)


def in_place(fn: Callable[..., Any]) -> Bind:
    """A function that overwrites its arguments and returns the chain's outputs."""
    return lambda *args: partial(fn, *(a.clone() if isinstance(a, Tensor) else a for a in args))


def compiled(fn: Callable[..., Any], mode: str) -> Bind:
    """torch.compile of a function, for exactly its shapes."""
    return plain(torch.compile(fn, dynamic=False, mode=None if mode == "default" else "max-autotune-no-cudagraphs"))


def build(call: Call) -> str:
    """Make torch.compile build what a call needs, with none of its Triton kernels launched; why it cannot, or ""."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    try:
        with torch.no_grad(), mock.patch.object(CachingAutotuner, "run", lambda *_, **__: None):
            call()
    except Exception as error:  # torch.compile raises anything
        return one_line(error)
    return ""


def copy_of(nbytes: int, device: str) -> Bind:
    """A copy that moves `nbytes`, half of them read."""
    source = torch.ones(max(1, nbytes // 8), device=device)
    return lambda *_: lambda: torch.empty_like(source).copy_(source)


def _liger() -> dict[str, Bind]:
    from liger_kernel.ops import layer_norm, rms_norm, swiglu
    from liger_kernel.ops import softmax as soft
    from liger_kernel.ops.utils import calculate_settings
    from liger_kernel.transformers import functional as lf

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = x[None].transpose(1, 2)
        turned, _ = lf.liger_rope(query, torch.empty_like(query[:, :1]), cos, sin, rotary_dim=2 * cos.shape[-1])
        return turned.transpose(1, 2)[0]  # type: ignore[no-any-return]

    def softmax_backward(dy: Tensor, y: Tensor) -> Any:
        block, warps = calculate_settings(y.shape[-1])
        return soft._softmax_backward(dy, y, block, warps, y.shape[-1] > block)

    def rmsnorm_backward(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> Any:
        in_float32 = rms_norm._str_to_casting_mode["gemma"]
        return rms_norm.rms_norm_backward(dy, x, w, rstd, 0.0, in_float32, *calculate_settings(x.shape[-1]), False, None)[:2]

    return {
        "rmsnorm": plain(lambda x, w: lf.liger_rms_norm(x, w, EPS)),
        "rmsnorm_gemma": plain(lambda x, w: lf.liger_rms_norm(x, w, EPS, 1.0, "gemma")),
        "add_rmsnorm": plain(lambda x, r, w: lf.liger_fused_add_rms_norm(x, r, w, EPS)),
        "add_rmsnorm_gemma": plain(lambda x, r, w: lf.liger_fused_add_rms_norm(x, r, w, EPS, 1.0, "gemma")),
        "layernorm": plain(lambda x, w, b: lf.liger_layer_norm(x, w, b, 1e-5)),
        "swiglu": plain(lambda x: swiglu.swiglu_fused_gate_up_forward(x)[1]),
        "swiglu_split": plain(lf.liger_swiglu),
        "geglu_split": plain(lf.liger_geglu),
        "relu2": plain(lf.liger_relu_squared),
        "softmax": plain(lf.liger_softmax),
        "rope_inplace": in_place(rope),
        "cross_entropy": plain(lambda x, t: lf.liger_cross_entropy(x, t, reduction="none")),
        "softmax_backward": plain(softmax_backward),
        "swiglu_backward_inplace": in_place(lambda dy, gate, up: swiglu.swiglu_backward(gate, up, dy)),
        "rmsnorm_backward": plain(rmsnorm_backward),
        "layernorm_backward": plain(lambda dy, x, w, mean, rstd: layer_norm.layer_norm_backward(dy, x, w, w, mean, rstd)),
    }


def _quack() -> dict[str, Bind]:
    import quack
    from quack.cross_entropy import cross_entropy_fwd
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd
    from quack.rotary import apply_rotary_emb
    from quack.softmax import softmax_bwd

    def add_norm(x: Tensor, r: Tensor, w: Tensor, offset: float = 0.0) -> Any:
        return quack.rmsnorm(x, w, residual=r, eps=EPS, prenorm=True, weight_offset=offset)

    def rope(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False) -> Any:
        return apply_rotary_emb(x[None], cos, sin, pairs)[0]

    return {
        "rmsnorm": plain(lambda x, w: quack.rmsnorm(x, w, eps=EPS)),
        "rmsnorm_gemma": plain(lambda x, w: quack.rmsnorm(x, w, eps=EPS, weight_offset=1.0)),
        "add_rmsnorm": plain(add_norm),
        "add_rmsnorm_gemma": plain(partial(add_norm, offset=1.0)),
        "layernorm": lambda x, w, b: partial(layernorm_fwd, x, w.float(), b.float(), 1e-5),
        "softmax": plain(quack.softmax),
        "rope": plain(rope),
        "rope_interleaved": plain(partial(rope, pairs=True)),
        "rope_partial": plain(rope),
        "cross_entropy": plain(cross_entropy_fwd),
        "cross_entropy_grad": plain(partial(cross_entropy_fwd, return_dx=True)),
        "softmax_backward": plain(softmax_bwd),
        "rmsnorm_backward": plain(lambda dy, x, w, rstd: rmsnorm_bwd(x, w, dy, rstd)[:2]),
        "layernorm_backward": plain(lambda dy, x, w, mean, rstd: layernorm_bwd(x, w, dy, rstd, mean)),
    }


def _flashinfer() -> dict[str, Bind]:
    import flashinfer as fi

    def add_norm(norm: Callable[..., None]) -> Bind:
        def run(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            norm(x, r, w, EPS)
            return x, r

        return in_place(run)

    def to_fp8(x: Tensor, w: Tensor, scale: Tensor) -> Call:
        def run() -> Tensor:
            out = torch.empty_like(x, dtype=FP8)
            fi.rmsnorm_quant(out, x, w, one, EPS)
            return out

        one = scale.reshape(1)
        return run

    def add_to_fp8(x: Tensor, r: Tensor, w: Tensor, scale: Tensor) -> Call:
        def run() -> tuple[Tensor, Tensor]:
            out = torch.empty_like(x, dtype=FP8)
            fi.fused_add_rmsnorm_quant(out, x, residual, w, one, EPS)
            return out, residual

        one, residual = scale.reshape(1), r.clone()
        return run

    def rope(neox: bool) -> Bind:
        def bind(x: Tensor, cos: Tensor, sin: Tensor) -> Call:
            head = x.shape[-1]
            table = torch.cat((cos, sin), -1).float()
            rows = torch.arange(x.shape[0], device=x.device)
            query, key = x.flatten(-2), x.new_zeros(x.shape[0], head)
            return lambda: fi.apply_rope_with_cos_sin_cache(rows, query, key, head, table, neox)[0].view_as(x)

        return bind

    return {
        "rmsnorm": plain(lambda x, w: fi.rmsnorm(x, w, EPS)),
        "rmsnorm_gemma": plain(lambda x, w: fi.gemma_rmsnorm(x, w, EPS)),
        "add_rmsnorm_inplace": add_norm(fi.fused_add_rmsnorm),
        "add_rmsnorm_gemma_inplace": add_norm(fi.gemma_fused_add_rmsnorm),
        "layernorm": lambda x, w, b: partial(fi.layernorm, x, w.float(), b.float(), 1e-5),
        "swiglu": plain(fi.silu_and_mul),
        "geglu": plain(fi.gelu_and_mul),
        "rmsnorm_fp8_static": to_fp8,
        "add_rmsnorm_fp8_static_inplace": add_to_fp8,
        "rope": rope(True),
        "rope_interleaved": rope(False),
        "rope_partial": rope(True),
    }


LIBRARIES: dict[str, Callable[[], dict[str, Bind]]] = {"liger": _liger, "quack": _quack, "flashinfer": _flashinfer}


@cache
def library(name: str) -> dict[str, Bind]:
    """A library's kernels by chain; none, with a line on stderr, where it cannot be imported."""
    try:
        return LIBRARIES[name]()
    except Exception as error:  # a broken install raises anything
        print(f"no {name} here: {one_line(error)}", file=sys.stderr, flush=True)
        return {}


def libraries(chain: str, device: str) -> dict[str, Bind]:
    """The libraries' kernels for a chain on a device."""
    if torch.device(device).type != "cuda":
        return {}
    found = {}
    for name in LIBRARIES:
        for ending in ("", "_inplace"):
            bind = library(name).get(chain + ending)
            if bind is not None:
                found[name + ending] = bind
    return found


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def differs(got: Any, expected: Sequence[Tensor], dtype: torch.dtype) -> str:
    """What is wrong with a peer's outputs, or "". A wider dtype than eager's is not wrong; `dtype` is the inputs', to which
    eager rounds between its operations."""
    leaves = torch.utils._pytree.tree_leaves(got)
    if len(leaves) != len(expected):
        return f"{len(leaves)} outputs, not {len(expected)}"
    for k, (y, e) in enumerate(zip(leaves, expected, strict=True)):
        if not isinstance(y, Tensor) or y.shape != e.shape:
            return f"output {k} is {getattr(y, 'shape', type(y).__name__)}, not {tuple(e.shape)}"
        tolerance = max(TOLERANCES.get(d, 0.0) for d in (y.dtype, e.dtype, dtype))
        wide = torch.float64 if e.device.type == "cpu" else torch.float32
        error, top = (y.to(wide) - e.to(wide)).abs().max().item(), e.to(wide).abs().max().item()
        if not error <= tolerance * top:
            return f"output {k} differs from eager's by {error:.3g}, of at most {top:.3g}"
    return ""
