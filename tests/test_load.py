"""What is tuned under a name, called without its source."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autofuse
from autofuse.errors import InputError
from tests.kernel_cases import data, right

pytestmark = pytest.mark.usefixtures("own_store")


def scaled_norm(x: Tensor, weight: Tensor, by: float = 3.0) -> tuple[Tensor, Tensor]:
    h = x * by
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


def inputs(rows: int, cols: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return data(rows, cols, dtype=dtype), data(cols, dtype=dtype, seed=1)


def tuned() -> None:
    cases = [inputs(6), inputs(6, 128), inputs(6, 64, torch.bfloat16)]
    assert autofuse.tune(scaled_norm, cases, trials=1, seconds=10, name="mine").ok


def test_what_is_tuned_runs_by_its_name() -> None:
    tuned()
    fused = autofuse.load("mine")
    for args in (inputs(6), inputs(9), inputs(6, 128), inputs(40, 64, torch.bfloat16), inputs(0)):
        right(scaled_norm, args, fused(*args))
    assert fused.explain(*inputs(6)).tier == "exact" and fused.explain(*inputs(9)).tier == "near rows"
    assert fused.tiers()["exact"] == 2
    again = pickle.loads(pickle.dumps(fused))
    right(scaled_norm, inputs(6), again(*inputs(6)))


def test_what_does_not_fit_is_named() -> None:
    tuned()
    fused = autofuse.load("mine")
    wanted = r"mine in the store takes \(s0, 64\) bfloat16, \(64\) bfloat16; or .*, not \(6, 65\) torch.float32, \(65,\)"
    with pytest.raises(InputError, match=wanted):
        fused(*inputs(6, 65))
    with pytest.raises(InputError, match="takes"):
        fused(inputs(6)[0])
    with pytest.raises(InputError, match=r"not .*3\.0"):
        fused(*inputs(6), 3.0)
    with pytest.raises(InputError, match=r"nothing is tuned under the name 'yours'.*autofuse best"):
        autofuse.load("yours")


def test_a_layer_serves_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped.db"
    cases = [inputs(6)]
    assert autofuse.tune(scaled_norm, cases, trials=1, seconds=10, name="mine", store=str(shipped)).ok
    monkeypatch.setenv("AUTOFUSE_LAYERS", str(shipped))
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "own.db"))
    with pytest.warns(RuntimeWarning, match="the store is not used"):
        fused = autofuse.load("mine")
    right(scaled_norm, inputs(6), fused(*inputs(6)))
    assert fused.explain(*inputs(6)).tier == "exact"


HEAVY = ["torch._dynamo", "sympy", "sqlalchemy", "alembic", "optuna", "pydantic", "autofuse.trace"]


def test_no_trace_and_no_tool_is_loaded() -> None:
    tuned()
    script = (
        "import sys, torch, autofuse\n"
        "x, w = torch.randn(6, 64), torch.randn(64)\n"
        "y, h = autofuse.load('mine')(x, w)\n"
        "assert torch.equal(h, x * 3)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=300)  # decomposes a norm
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
