"""Kernels of winners built ahead of time, for this CPU and for a GPU that is not here."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

import autofuse
from autofuse import settings
from autofuse.cli import app
from autofuse.fusion import check
from autofuse.kernels import artifact, build
from autofuse.kernels.base import Limits
from autofuse.program import Layouts
from autofuse.store.records import (
    ChainRecord,
    ConfigRecord,
    DeviceRecord,
    EnvironmentRecord,
    ScheduleRecord,
)
from autofuse.store.store import Store
from autofuse.trace import trace
from autofuse.traced import sizes_of
from autofuse.workload import layouts_of, workload_of
from tests.kernel_cases import data, offset, right

pytestmark = pytest.mark.usefixtures("own_store")
H200 = DeviceRecord("h200", "nvidia", "NVIDIA H200", "sm_90", 132, shared_per_block_bytes=227 * 1024)
LIMITS = Limits("cuda", "sm_90", 1, 132, 227 * 1024)


def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.rms_norm(h, (h.shape[-1],), w, 1e-6), h


def inputs(rows: int = 64, cols: int = 512) -> tuple[Tensor, ...]:
    return data(rows, cols, dtype=torch.bfloat16), data(rows, cols, dtype=torch.bfloat16, seed=1), data(cols, dtype=torch.bfloat16)


def layouts_for(args: tuple[Tensor, ...]) -> Layouts:
    traced = trace(add_norm, args)
    return Layouts(check(traced.chain), args, sizes_of(traced, args) or {})


def won_on_an_h200(args: tuple[Tensor, ...]) -> None:
    """A store in which the heuristic config is a winner there."""
    layouts = layouts_for(args)
    chain = layouts.chain
    plan, schedules = layouts.plan(layouts.fusion.fused(), LIMITS)
    parts = [
        ChainRecord(layouts.fusion.segment(p.nodes).chain.key, "", layouts.fusion.segment(p.nodes).chain.graph) for p in plan.parts
    ]
    knobs = tuple(ScheduleRecord(c.key, p.kind, 5, dict(s)) for c, p, s in zip(parts, plan.parts, schedules, strict=True))
    work = workload_of(chain, layouts_of(chain, args), layouts.sizes)
    env = EnvironmentRecord("", "13.0", torch.__version__, "3.6.0", "", "3.12", "0.1.0", "hash")
    whole = ChainRecord(chain.key, "add_norm", chain.graph)
    with Store.open(settings.read().store) as store:
        run = store.begin_run(H200, env, whole, work, protocol="cold", sampler="", seed=0, trials_budget=1, seconds_budget=1.0)
        store.add_chain_segments(whole, [(str(p), c) for p, c in zip(plan.parts, parts, strict=True)])
        store.set_best(run, work, ConfigRecord(chain.key, str(plan), knobs), 10.0, True)


def test_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    args = inputs()
    won_on_an_h200(args)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["build", "--arch", "sm_90", "--out", str(out)])
    assert done.exit_code == 0 and f"winners built into {out}: 1" in done.stderr, done.output
    for rows in (64, 1000):  # the same binary serves a call with other rows
        layouts = layouts_for(inputs(rows))
        (nodes,) = layouts.fusion.fused()
        task = layouts.task(nodes, LIMITS)
        kind, knobs = layouts_for(args).seed(nodes, LIMITS) or (None, {})
        assert kind is not None
        assert artifact.find(kind.emit(task, knobs), "sm_90", (out,)) is not None, rows
    (held,) = (out / "cuda").iterdir()
    assert held.suffix == ".bin"


def test_what_no_binary_serves_is_named(tmp_path: Path) -> None:
    x, r, w = inputs()
    won_on_an_h200((offset(x), r, w))
    done = CliRunner().invoke(app, ["build", "--arch", "sm_90", "--out", str(tmp_path)])
    assert done.exit_code == 1 and "add_norm at rows 64 is not built: its input 0 is misaligned" in done.stderr
    done = CliRunner().invoke(app, ["build", "--arch", "sm_80"])
    assert done.exit_code == 2 and "no winners for sm_80" in done.stderr
    assert CliRunner().invoke(app, ["build", "--arch", "h100"]).exit_code == 2
    assert CliRunner().invoke(app, ["build", "--chain", "other", "--arch", "sm_90"]).exit_code == 2


def test_on_a_cpu_no_call_waits_for_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_CACHE", str(tmp_path / "tuned"))
    args = data(64, 96), data(64, 96, seed=1), data(96)
    assert autofuse.tune(add_norm, [args], trials=1, seconds=10).ok
    monkeypatch.setenv("AUTOFUSE_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["build", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    with mock.patch.object(build, "_loaded", {}), mock.patch("subprocess.run", side_effect=AssertionError("compiled")):
        fused = autofuse.fuse(add_norm)
        for rows in (64, 200):
            given = data(rows, 96), data(rows, 96, seed=1), data(96)
            right(add_norm, given, fused(*given))
        assert fused.explain(*args).tier == "exact"
