"""Fused functions inside torch.compile and torch.export: one operator in the graph, and right."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autofuse
from tests.kernel_cases import data

pytestmark = pytest.mark.usefixtures("own_store")


@autofuse.fuse
def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, eps), h


class Graphs:
    """A backend that keeps the graphs that it gets."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.operators.append([str(n.target) for n in module.graph.nodes if n.op == "call_function"])
        return module.forward


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def inputs(rows: int = 6, cols: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    return data(rows, cols), data(rows, cols, seed=1), data(cols, seed=2)


def test_one_operator_and_no_graph_break() -> None:
    graphs = Graphs()

    def caller(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y, h = add_norm(x * 2, r, w, eps=1e-3)
        return torch.add(y, h)

    made = torch.compile(caller, backend=graphs, fullgraph=True)
    x, r, w = inputs()
    assert torch.allclose(made(x, r, w), caller(x, r, w), atol=1e-6)
    assert [o for o in graphs.operators[0] if "autofuse" in o] == ["autofuse.call.default"]
    assert not [o for o in graphs.operators[0] if "rms_norm" in o]


def test_the_default_backend_runs_the_kernel_under_changing_row_counts() -> None:
    made = torch.compile(lambda x, r, w: add_norm(x, r, w)[0].sin(), dynamic=True, fullgraph=True)
    for rows in (6, 9, 30, 1):
        x, r, w = inputs(rows)
        assert torch.allclose(made(x, r, w), add_norm.fn(x, r, w)[0].sin(), atol=1e-6), rows
    assert add_norm.explain(*inputs(9)).tier == "heuristic"


def test_gradients_go_through_the_functions_own_operations() -> None:
    x, r, w = inputs()
    w.requires_grad_()
    graphs = Graphs()
    made = torch.compile(lambda x, r, w: add_norm(x, r, w)[0], backend=graphs, fullgraph=True)
    made(x, r, w).sum().backward()
    got, w.grad = w.grad, None
    add_norm.fn(x, r, w)[0].sum().backward()
    assert got is not None and w.grad is not None and torch.allclose(got, w.grad, atol=1e-6)
    assert not any("autofuse" in o for o in graphs.operators[0])
    with torch.no_grad():
        assert torch.allclose(made(x, r, w), add_norm.fn(x, r, w)[0], atol=1e-6)
    assert any("autofuse" in o for o in graphs.operators[-1])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.view(-1, 2),  # shows its input's memory
        lambda x: (x, x + 1),
        lambda x: {"a": x.exp(), "b": [x * 2, (x - 1,)]},
        lambda x: [x.relu()],
        lambda x: x.t() * 2,
        lambda x: x.amax(-1, keepdim=True),
    ],
)
def test_outputs_nest_and_lie_as_eagers(fn: Callable[..., Any]) -> None:
    fused = autofuse.fuse(fn)
    x = data(6, 64)
    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        got, expected = torch.compile(lambda x: fused(x), backend=backend, fullgraph=True)(x), fn(x)
        flat, spec = torch.utils._pytree.tree_flatten(got)
        wanted, same = torch.utils._pytree.tree_flatten(expected)
        assert spec == same
        for a, b in zip(flat, wanted, strict=True):
            assert torch.allclose(a, b) and a.stride() == b.stride()


def test_numbers_are_constants_of_the_graph() -> None:
    @autofuse.fuse
    def scaled(x: Tensor, by: float, how: str = "up", keep: bool = True) -> Tensor:
        return x * by if how == "up" and keep else x / by

    x = data(4, 8)
    for args, kwargs in (((2.0,), {}), ((3,), {"how": "down"}), ((0.5,), {"keep": False}), ((float("inf"),), {})):
        made = torch.compile(lambda x, a=args, k=kwargs: scaled(x, *a, **k), backend="aot_eager", fullgraph=True)
        assert torch.allclose(made(x), scaled.fn(x, *args, **kwargs))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(data(64, seed=5), requires_grad=False)

    @autofuse.fuse
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.weight


def test_a_method_and_autocast_keep_their_own_operations() -> None:
    block, x = Block(), data(4, 64)
    made = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(made(x), torch.relu(x) * block.weight)
    x, r, w = inputs()
    graphs = Graphs()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(lambda x, r, w: add_norm(x, r, w)[0], backend=graphs, fullgraph=True)(x, r, w)
    assert not any("autofuse" in o for o in graphs.operators[0])


def test_what_is_read_from_outside_is_read_at_each_call() -> None:
    table = data(64)
    fused = autofuse.fuse(lambda x: x * table)
    made = torch.compile(lambda x: fused(x) + 1, backend="aot_eager", fullgraph=True)
    x = data(4, 64)
    assert torch.equal(made(x), x * table + 1)
    table.mul_(2)
    assert torch.equal(made(x), x * table + 1)


class Model(torch.nn.Module):
    def forward(self, x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return torch.mul(add_norm(x, r, w, eps=1e-3)[0], 2)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, tmp_path: Path) -> None:
    x, r, w = inputs()
    rows = torch.export.Dim("rows", min=2, max=4096)
    with torch.no_grad():
        made = torch.export.export(Model(), (x, r, w), dynamic_shapes=({0: rows}, {0: rows}, None), strict=strict)
    assert [str(n.target) for n in made.graph.nodes if "autofuse" in str(n.target)] == ["autofuse.call.default"]
    a, b, c = inputs(11)
    assert torch.allclose(made.module()(a, b, c), Model()(a, b, c), atol=1e-6)
    held = io.BytesIO()
    torch.export.save(made, held)
    (tmp_path / "model.pt2").write_bytes(held.getvalue())
    torch.save((a, b, c, Model()(a, b, c)), tmp_path / "io.pt")
    folder = Path(__file__).parent
    script = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
        "import torch, autofuse.operator\n"
        f"made = torch.export.load({str(tmp_path / 'model.pt2')!r}).module()\n"
        f"a, b, c, y = torch.load({str(tmp_path / 'io.pt')!r})\n"
        "assert torch.allclose(made(a, b, c), y, atol=1e-6)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_a_saved_graph_names_what_it_lacks() -> None:
    with pytest.raises(autofuse.InputError, match=r"lost of nowhere, which is not there"):
        torch.ops.autofuse.call("nowhere:lost#1", [data(2, 2)], [], ["tensor"])


def test_vmap_runs_the_functions_own_operations() -> None:
    x, r, w = data(3, 6, 64), data(3, 6, 64, seed=1), data(64, seed=2)
    got = torch.func.vmap(add_norm, in_dims=(0, 0, None))(x, r, w)
    for a, b in zip(got, add_norm.fn(x, r, w), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    made = torch.compile(lambda x, r, w: torch.func.vmap(add_norm, in_dims=(0, 0, None))(x, r, w)[0], backend="aot_eager")
    assert torch.allclose(made(x, r, w), got[0], atol=1e-6)
