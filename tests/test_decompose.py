"""Composite operations as PyTorch decomposes them: same values, no casts of its own, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from autofuse import decompose as module
from autofuse import ops
from autofuse.chain import INPUT, Chain
from autofuse.decompose import decompose, expand, overload_of
from autofuse.errors import UnsupportedOp
from autofuse.reference import evaluate
from autofuse.trace import trace
from tests.kernel_cases import data

COMPOSITES: dict[str, Callable[..., Any]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "layer_norm": lambda x: F.layer_norm(x, (24,)),
    "rms_norm": lambda x: F.rms_norm(x, (24,), eps=1e-5),
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "logaddexp": lambda x: torch.logaddexp(x, -x),
}


def expanded(fn: Callable[..., Any], x: torch.Tensor) -> Chain:
    values, outputs = expand(trace(fn, (x,)).chain)
    return Chain(tuple(values), tuple(outputs))


@pytest.mark.parametrize("name", COMPOSITES)
def test_values(name: str) -> None:
    x = data(5, 24, dtype=torch.float64, scale=3)
    (made,) = evaluate(expanded(COMPOSITES[name], x), [x], {"s0": 5})
    assert torch.allclose(made, COMPOSITES[name](x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", COMPOSITES)
def test_only_operations_of_the_table_and_no_casts(name: str) -> None:
    chain = expanded(COMPOSITES[name], data(5, 24, dtype=torch.bfloat16))
    assert all(v.op == INPUT or v.name in ops.OPS for v in chain.values)
    assert all(v.name != "to" for v in chain.values)
    assert chain.values[chain.outputs[0]].dtype == "bfloat16"


def test_a_users_cast_stays() -> None:
    chain = expanded(lambda x: F.gelu(x.float()).half(), data(5, 24, dtype=torch.bfloat16))
    assert [v.dtype for v in chain.values if v.name == "to"] == ["float32", "float16"]


def test_once_for_equal_shapes() -> None:
    x = trace(F.gelu, (data(5, 24),)).chain.values
    assert decompose(x[1], (x[0],)) is decompose(x[1], (x[0],))


def test_what_is_not_lowered() -> None:
    values = trace(lambda x: torch.cumsum(x, -1), (data(5, 24),)).chain.values
    with pytest.raises(UnsupportedOp, match="cumsum"):
        decompose(values[1], (values[0],))


def test_an_operation_that_this_torch_lacks() -> None:
    with pytest.raises(UnsupportedOp, match="has no operation"):
        overload_of("aten.of_no_torch.default")


def test_another_process_reads_what_one_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_CACHE", str(tmp_path))
    chain = trace(F.mish, (data(4, 24),)).chain
    (node,) = chain.nodes
    value, reads = chain.values[node], (chain.values[0],)
    monkeypatch.setattr(module, "_known", {})
    made = decompose(value, reads)
    (path,) = (tmp_path / "decompositions").iterdir()
    with mock.patch.object(module, "_decompose", side_effect=AssertionError):
        monkeypatch.setattr(module, "_known", {})
        assert decompose(value, reads) == made
    for text in ("", "{}", "[1", path.read_text()[:-40], '{"graph": 3, "extents": [], "dtypes": []}'):
        path.write_text(text)
        monkeypatch.setattr(module, "_known", {})
        assert decompose(value, reads) == made and path.read_text() == made.to_json()
    monkeypatch.setenv("AUTOFUSE_CACHE", str(path / "no folder"))
    monkeypatch.setattr(module, "_known", {})
    assert decompose(value, reads) == made
