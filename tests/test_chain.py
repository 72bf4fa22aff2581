"""The canonical form of chains: what its key leaves out, what it keeps, and the way through JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.chain import INPUT, Chain, Dtype, Ref, Size, Value, dim_factors, dim_value, instantiate, make_dim
from autofuse.errors import AutofuseError
from autofuse.reference import evaluate
from autofuse.trace import trace
from autofuse.traced import sizes_of
from examples.entries import CATALOGUE, Entry
from tests.kernel_cases import data, same


def chain_of(fn: Callable[..., Any], *args: Any) -> Chain:
    return trace(fn, args).chain


def add_norm(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = x + y
    return F.rms_norm(h, (h.shape[-1],), None, 1e-6), h


X, Y = data(4, 24), data(4, 24, seed=1)


@pytest.mark.parametrize("entry", CATALOGUE, ids=[e.name for e in CATALOGUE])
def test_json_round_trip(entry: Entry) -> None:
    args = entry.case(4, 256, "bfloat16")
    traced = trace(entry.fn, args)
    chain = traced.chain
    back = Chain.from_json(chain.to_json())
    assert back == chain
    assert back.key == chain.key
    assert instantiate(chain.graph, chain.extents, chain.dtypes) == chain
    inputs = [args[b.position] for b in traced.bindings if b.position is not None]
    sizes = sizes_of(traced, args)
    assert sizes is not None
    for a, b in zip(evaluate(back, inputs, sizes), evaluate(chain, inputs, sizes), strict=True):
        assert same(a, b)


def test_round_trip_of_every_kind_of_argument() -> None:
    value = Value(
        "aten.x.y",
        (Ref(0), Size("2*s0"), Dtype("int8"), (1, True, None, "s", (2.5,))),
        (("a", float("inf")),),
        ("s0", 3),
        "float32",
    )
    chain = Chain.build([Value(INPUT, (), (), ("s0", 3), "float32"), value], [1])
    assert Chain.from_json(chain.to_json()) == chain
    numbers = [0.1, -0.0, float("-inf"), 1e-45, 3.0]
    chain = Chain.build([Value(INPUT, (), (), (3,), "int8"), Value("aten.x.y", (Ref(0), *numbers), (), (3,), "int8")], [1])
    back = Chain.from_json(chain.to_json())
    assert [repr(a) for a in back.values[1].args[1:]] == [repr(n) for n in numbers]


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"graph": {"format": 99}, "extents": [], "dtypes": []}'])
def test_what_is_no_chain(text: str) -> None:
    with pytest.raises(AutofuseError):
        Chain.from_json(text)


def test_a_chain_of_another_format() -> None:
    chain = chain_of(add_norm, X, Y)
    told = json.loads(chain.to_json())
    told["graph"]["format"] = 99
    with pytest.raises(AutofuseError, match="upgrade autofuse"):
        Chain.from_json(json.dumps(told))


def other_names(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.add(left, right)
    unused = total * 3 + left.sum(-1, keepdim=True)
    del unused
    result = F.rms_norm(total, (total.shape[-1],), None, 1e-6)
    return result, total


def other_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    dead = y * 2
    h = x + y
    dead = dead + h
    return F.rms_norm(h, (24,), None, 1e-6), h


def test_the_key_leaves_out_names_rows_and_dead_code() -> None:
    chain = chain_of(add_norm, X, Y)
    assert chain_of(other_names, X, Y) == chain
    assert chain_of(other_order, X, Y) == chain
    assert chain_of(add_norm, data(99, 24), data(99, 24)) == chain
    assert chain_of(add_norm, data(0, 24), data(0, 24)) == chain


def test_the_key_leaves_out_the_order_of_statements() -> None:
    def one(x: Tensor) -> Tensor:
        a, b = x.exp(), x.sin()
        return a * b

    def other(x: Tensor) -> Tensor:
        b = x.sin()
        a = x.exp()
        return a * b

    assert chain_of(one, X) == chain_of(other, X)


def test_the_key_leaves_out_extents_and_dtypes() -> None:
    chain = chain_of(add_norm, X, Y)
    wide = chain_of(add_norm, data(4, 512), data(4, 512))
    assert wide.key == chain.key
    assert wide != chain
    half = chain_of(add_norm, X.half(), Y.half())
    assert half.key == chain.key
    assert half.dtypes == ("float16",)
    assert instantiate(chain.graph, (512,), chain.dtypes) == wide
    assert instantiate(chain.graph, chain.extents, ("float16",)) == half


def test_the_key_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from autofuse.trace import trace; from tests.test_chain import add_norm; "
        "x = torch.randn(7, 64); print(trace(add_norm, (x, x)).chain.key)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == chain_of(add_norm, X, Y).key


DIFFERENT: list[Callable[..., Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: y - x,
    lambda x, y: (x + y) * 2,
    lambda x, y: (x + y) * 2.0,
    lambda x, y: (x + y) * 3.0,
    lambda x, y: x + x,
    lambda x, y: (x + y, x),
    lambda x, y: (x, x + y),
    lambda x, y: (x + y).to(torch.bfloat16),
    lambda x, y: (x + y).to(torch.float64),
    lambda x, y: (x + y).sum(-1),
    lambda x, y: (x + y).sum(-1, keepdim=True),
    lambda x, y: x + y.unsqueeze(-2),
    lambda x, y: torch.cat((x, y), -1),
    lambda x, y: torch.cat((y, x), -1),
]


def test_different_structures_differ() -> None:
    keys = [chain_of(fn, X, Y).key for fn in DIFFERENT]
    assert len(set(keys)) == len(keys)


def test_two_dtypes_are_not_one() -> None:
    assert chain_of(lambda x, y: x + y, X, Y.half()).key != chain_of(lambda x, y: x + y, X, Y).key


def test_dimensions() -> None:
    assert dim_factors("2*s1*s0") == (2, ("s0", "s1"))
    assert make_dim(6, ()) == 6
    assert make_dim(1, ("s1", "s0")) == "s0*s1"
    assert dim_value("2*s0*s1", {"s0": 3, "s1": 5}) == 30
    assert make_dim(*dim_factors("s10*s2")) == "s2*s10"


def test_a_part_is_a_chain_of_its_own() -> None:
    chain = chain_of(lambda x, y: F.silu(x + y) * y, X, Y)
    other = chain_of(lambda a, b, c: F.silu(torch.cat((a, b), -1)) * c, X[..., :12], X[..., 12:], Y)
    nodes = {v.name: i for i, v in enumerate(chain.values)}
    theirs = {v.name: i for i, v in enumerate(other.values)}
    part, reads, symbols = chain.subchain([nodes["silu"], nodes["mul"]], [nodes["mul"]])
    same_part, _, _ = other.subchain([theirs["silu"], theirs["mul"]], [theirs["mul"]])
    assert part.key == same_part.key
    assert set(reads) == {nodes["add"], 1}
    assert set(symbols.values()) <= set(chain.symbols)


def test_it_shows_itself() -> None:
    assert str(chain_of(lambda x: (x * 2).sum(-1), X)).splitlines() == [
        "%0: float32[s0, 24] = input()",
        "%1: float32[s0, 24] = mul.Tensor(%0, 2)",
        "%2: float32[s0] = sum.dim_IntList(%1, [-1])",
        "return %2",
    ]
