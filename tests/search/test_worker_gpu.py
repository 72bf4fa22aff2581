"""The measuring process on a GPU: real kernels by both protocols, and faults that lose the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autofuse.fusion import Fusion
from autofuse.kernels.base import Limits
from autofuse.program import Layouts
from autofuse.search.client import Worker
from autofuse.search.measure import ceilings, time_runs, turn
from autofuse.trace import trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HERE = Path(__file__).parent
LIMITS = {"target": "cuda", "arch": "sm_90", "sm_count": 132, "shared_bytes": 227 * 1024}
Setups = Callable[..., dict[str, Any]]


def on_gpu(setup: dict[str, Any], protocol: str) -> dict[str, Any]:
    return {**setup, "device": "cuda:0", "limits": LIMITS, "protocol": protocol}


def double_plus_one(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def add_norm_silu(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + r
    return F.silu(F.rms_norm(h, (h.shape[-1],), w)), h


@pytest.fixture(scope="module")
def faulty(other_setup: Setups) -> Iterator[Callable[..., dict[str, Any]]]:
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), before])
    x = torch.randn(16, 64, device="cuda")
    nodes = list(Fusion(trace(double_plus_one, (x,)).chain).nodes)
    with Worker({**on_gpu(other_setup(double_plus_one, x), "graph"), "plugins": ["faulty_triton"]}) as worker:

        def ask(fault: str, timeout_s: float = 60.0) -> dict[str, Any]:
            request = {
                "op": "segment",
                "nodes": nodes,
                "kind": "faulty_triton",
                "knobs": {"fault": fault},
                "budget_s": 0.01,
            }
            return worker.request(request, timeout_s)

        yield ask
    os.environ["PYTHONPATH"] = before


@pytest.mark.parametrize(
    ("fault", "statuses", "message"),
    [
        ("nan", ("incorrect",), "nan"),
        ("race", ("incorrect",), ""),
        ("outside", ("incorrect",), "outside"),
        ("illegal", ("crashed",), "illegal memory access"),
        ("refused", ("compile_error",), ""),
        ("warps", ("pruned", "compile_error"), ""),
    ],
)
def test_faults(faulty: Callable[..., dict[str, Any]], fault: str, statuses: tuple[str, ...], message: str) -> None:
    answer = faulty(fault)
    assert answer["status"] in statuses and message in answer["message"], answer
    print(answer)
    good = faulty("none")
    assert good["status"] == "ok" and good["registers"] > 0 and good["spills"] == 0 and good["shared_bytes"] >= 0, good


def test_hanging_kernel(faulty: Callable[..., dict[str, Any]]) -> None:
    assert faulty("none")["status"] == "ok"
    assert faulty("hang", 3.0)["status"] == "timeout"
    assert faulty("none")["status"] == "ok"


@pytest.mark.parametrize(("rows", "protocol"), [(256, "graph"), (8192, "cold")])
def test_real_kernels(other_setup: Setups, rows: int, protocol: str) -> None:
    x, r = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    args = (x, r, torch.randn(4096, device="cuda", dtype=torch.bfloat16))
    chain = trace(add_norm_silu, args).chain
    fusion = Fusion(chain)
    limits = Limits(**LIMITS)  # type: ignore[arg-type]
    layouts = Layouts(fusion, [x, r, args[2]], {"s0": rows})
    configs: list[dict[str, Any]] = [{"plan": "eager", "schedules": []}]
    for groups in (fusion.fused(), fusion.unfused()):
        plan, schedules = layouts.plan(groups, limits)
        configs.append({"plan": str(plan), "schedules": schedules})
    with Worker(on_gpu(other_setup(add_norm_silu, *args), protocol)) as worker:
        race = worker.request({"op": "race", "configs": configs, "budget_s": 0.3})
        assert [a["status"] for a in race["results"]] == ["ok"] * 3, race
        eager, fused, unfused = (a["median_us"] for a in race["results"])
        print(protocol, rows, f"eager {eager:.1f} fused {fused:.1f} unfused {unfused:.1f} us", race["results"][1])
        assert fused < unfused and fused < eager
        made = layouts.seed(fusion.nodes, limits)
        assert made is not None
        alone = {"op": "segment", "nodes": list(fusion.nodes), "kind": made[0].name, "knobs": made[1], "budget_s": 0.1}
        answer = worker.request(alone)
        print(answer)
        assert answer["status"] == "ok" and 0.8 < answer["median_us"] / fused < 1.25
        assert answer["registers"] > 0 and answer["compile_s"] > 0
        refused = worker.request({**alone, "most_spills": -1})
        assert refused["status"] == "pruned" and refused["message"].startswith("0 registers are spilled"), refused


def test_ceilings_and_protocols() -> None:
    c = ceilings("cuda:0")
    print(c)
    assert 1e11 < c.bandwidth < 2e13 and c.flops > 1e13
    x = torch.randn(2**20, device="cuda")
    for protocol in ("graph", "cold"):
        one, two = time_runs([lambda _: x + 1, lambda _: (x + 1) * 2], "cuda:0", budget_s=0.05, protocol=protocol, rotate=1)
        print(protocol, one, two)
        assert one.median_us < two.median_us and one.samples >= 7


def test_processes_take_turns(other_setup: Setups) -> None:
    """A request waits while another process measures on the device; the time is not the candidate's."""
    x = torch.randn(64, 256, device="cuda")
    setup = on_gpu(other_setup(double_plus_one, x), "graph")
    config = {"op": "config", "plan": "eager", "schedules": [], "budget_s": 0.01}
    with Worker(setup) as worker:
        assert worker.request(config)["status"] == "ok"
        before = worker.waited_s
        with ThreadPoolExecutor(1) as pool:
            with turn("cuda:0", Path(setup["cache"])):
                asked = pool.submit(worker.request, config, 5.0)
                time.sleep(6)
                assert not asked.done()
            assert asked.result(10)["status"] == "ok"
        assert 5.5 < worker.waited_s - before < 9
