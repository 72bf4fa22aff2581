"""A workload that is small enough for many workers, and requests on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from autofuse.fusion import Fusion
from autofuse.kernels.base import Limits
from autofuse.search.client import Worker
from autofuse.search.recipes import recipes_of
from autofuse.trace import trace
from autofuse.traced import sizes_of

HERE = Path(__file__).parent


def double_plus_one(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def setup_of(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], cache: Path) -> dict[str, Any]:
    traced = trace(fn, args)
    inputs = [args[b.position] for b in traced.bindings if b.position is not None]
    return {
        "chain": traced.chain.to_json(),
        "recipes": [r.to_json() for r in recipes_of(inputs)],
        "sizes": sizes_of(traced, args),
        "device": "cpu",
        "limits": asdict(Limits("cpu", "x", threads=1)),
        "cache": str(cache),
        "seed": 0,
        "protocol": "loop",
    }


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def setup(cache: Path) -> Iterator[dict[str, Any]]:
    """The setup of double_plus_one with the faulty kind loaded."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before]))
    yield {**setup_of(double_plus_one, (torch.randn(16, 64),), cache), "plugins": ["faulty_kinds"]}
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def nodes() -> list[int]:
    """The compute nodes of double_plus_one."""
    return list(Fusion(trace(double_plus_one, (torch.randn(16, 64),)).chain).nodes)


@pytest.fixture(scope="session")
def worker(setup: dict[str, Any]) -> Iterator[Worker]:
    with Worker(setup) as made:
        yield made


@pytest.fixture(scope="session")
def segment(worker: Worker, nodes: list[int]) -> Callable[..., dict[str, Any]]:
    """Asks the shared worker for a segment with a fault."""

    def ask(fault: str, timeout_s: float = 30.0) -> dict[str, Any]:
        knobs = {"fault": fault}
        request = {"op": "segment", "nodes": nodes, "kind": "faulty", "knobs": knobs, "check": True, "budget_s": 0.01}
        return worker.request(request, timeout_s)

    return ask


@pytest.fixture(scope="session")
def other_setup(cache: Path) -> Callable[..., dict[str, Any]]:
    """Setups of other functions."""
    return lambda fn, *args: setup_of(fn, args, cache)
