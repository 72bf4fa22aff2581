"""Losses over a vocabulary, and their gradients written by hand: one number a row, one row a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.errors import UnsupportedOp
from autofuse.fusion import check
from autofuse.trace import trace
from tests.kernel_cases import INF, data, floats, run, sliced, strided
from tests.test_kernels import FEW_FORMS

Fn = Callable[..., Any]


def loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


def likelihood(x: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.float(), -1), target, reduction="none", ignore_index=-1)


def by_gather(x: Tensor, target: Tensor) -> Tensor:
    return -torch.gather(F.log_softmax(x, -1), -1, target.clamp(min=0)[:, None])[:, 0]


def gradient(x: Tensor, target: Tensor, dloss: Tensor) -> Tensor:
    p = F.softmax(x.float(), -1)
    hit = (torch.arange(x.shape[-1], device=x.device) == target[:, None]).to(p.dtype)
    return ((p - hit) * dloss[:, None]).to(x.dtype)


def both(x: Tensor, target: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its gradient from one reading of the row; ignored targets give 0 for both."""
    logp = F.log_softmax(x.float(), -1)
    kept = target >= 0
    at = torch.where(kept, target, 0)
    hit = torch.arange(x.shape[-1], device=x.device) == at[:, None]
    grad = torch.where(hit, logp.exp() - 1, logp.exp()) * (dloss * kept)[:, None]
    return torch.where(kept, -logp.gather(-1, at[:, None])[:, 0], 0.0), grad.to(x.dtype)


FORWARD: dict[str, Fn] = {
    "loss": loss, "likelihood": likelihood, "by_gather": by_gather,
    "ignored": lambda x, t: F.cross_entropy(x, t, reduction="none", ignore_index=2),
    "smoothed": lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
    "weighted": lambda x, t: F.cross_entropy(x, t, torch.arange(x.shape[-1]).to(x.dtype) + 1, reduction="none"),
    "of_probabilities": lambda x, t: F.cross_entropy(x, F.softmax(-x, -1), reduction="none") + t,
}  # fmt: skip
BACKWARD: dict[str, Fn] = {"gradient": gradient, "both": both}
COLS = (1, 33, 257, 5000)


def targets(rows: int, cols: int, ignored: bool) -> Tensor:
    made = torch.arange(rows) * 7 % cols
    if ignored and rows > 2:
        made[1] = -100
    return made


def args_of(name: str, x: Tensor) -> tuple[Tensor, ...]:
    target = targets(x.shape[0], x.shape[-1], name in ("loss", "smoothed", "weighted", "both"))
    if name == "likelihood" and len(target) > 2:
        target[1] = -1
    return (x, target, data(x.shape[0], seed=3)) if name in BACKWARD else (x, target)


@pytest.mark.parametrize("dtype", floats(), ids=str)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_c(name: str, cols: int, dtype: torch.dtype) -> None:
    for rows in (5,) if name == "by_gather" else (5, 0):  # a gather may take fewer rows, 0 among them: not one row each
        args = args_of(name, data(rows, cols, dtype=dtype, scale=3))
        made = run({**FORWARD, **BACKWARD}[name], args)
        assert made.message == ""
        assert len(made.plan.parts) == 1
    assert run({**FORWARD, **BACKWARD}[name], args_of(name, data(4, cols, dtype=dtype)), groups="unfused").message == ""


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_layouts_c(name: str) -> None:
    x = data(6, 40, scale=3)
    for given in (sliced(x), strided(x), x.t().contiguous().t(), data(1, 40).expand(6, 40)):
        args = args_of(name, given)
        assert run({**FORWARD, **BACKWARD}[name], (args[0], *(strided(t) for t in args[1:])), knobs={"keep": "all"}).message == ""


def test_values() -> None:
    """An impossible target costs infinity; large logits lose nothing."""
    x = data(5, 40) + 1e3
    x[2, :20] = -INF
    target = torch.tensor([0, 39, 5, 25, 7])
    for fn in (loss, likelihood, by_gather):
        assert run(fn, (x, target)).message == ""
    assert run(loss, (x, target)).outputs[0][2] == INF


@pytest.mark.interpret
@pytest.mark.parametrize("form", FEW_FORMS)
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_triton(name: str, form: str) -> None:
    for x in (data(5, 33, scale=3), strided(data(6, 72, dtype=torch.bfloat16))):
        assert run({**FORWARD, **BACKWARD}[name], args_of(name, x), "cuda", {**FEW_FORMS[form], "math": "exact"}).message == ""


def test_classes_that_are_not_the_last_axis_are_refused() -> None:
    chain = trace(loss, (data(2, 5, 7), torch.zeros(2, 7, dtype=torch.int64))).chain
    with pytest.raises(UnsupportedOp, match=r"cross_entropy_loss.default in .* reduces a leading axis"):
        check(chain)
