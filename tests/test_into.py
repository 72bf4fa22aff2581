"""Outputs in memory of the caller's, and bare prepared calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autofuse
from autofuse.errors import InputError
from autofuse.into import shares
from tests.kernel_cases import data

pytestmark = pytest.mark.usefixtures("own_store")


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x) * 2


def inputs(rows: int = 6, cols: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    return data(rows, cols), data(rows, cols, seed=1), data(cols, seed=2)


def test_outputs_go_where_the_caller_says() -> None:
    fused = autofuse.fuse(add_norm)
    for rows in (6, 6, 9, 1, 0, 9):
        args = inputs(rows)
        out = torch.full((rows, 64), -7.0), torch.full((rows, 64), -7.0)
        assert fused(*args, out=out) is out
        for y, e in zip(out, add_norm(*args), strict=True):
            assert torch.allclose(y, e, atol=1e-6)


def test_a_call_seen_before_allocates_nothing_and_copies_nothing() -> None:
    fused = autofuse.fuse(gelu)
    x, out = data(6, 64), torch.empty(6, 64)
    fused(x, out=out)
    out.fill_(-7)
    seen: list[str] = []

    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    guarded = fused._into._guards[0]
    with mock.patch("torch._C._len_torch_dispatch_stack", lambda: 0), Sees():  # type: ignore[no-untyped-call]
        next(iter(guarded._bound.values()))(x, out)
    assert seen == [] and torch.allclose(out, gelu(x), atol=1e-6)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.empty(64, 6).t(),
        lambda: torch.empty(6, 128)[:, ::2],
        lambda: torch.empty(6, 128)[:, 64:],
        lambda: torch.empty(6 * 64 + 1)[1:].view(6, 64),
        lambda: torch.empty(12, 64)[::2],
    ],
)
def test_any_layout(made: Callable[[], Tensor]) -> None:
    fused, x = autofuse.fuse(gelu), data(6, 64)
    for _ in range(3):
        out = made().fill_(-7)
        assert fused(x, out=out) is out and torch.allclose(out, gelu(x), atol=1e-6)


def test_parts_of_one_tensor_do_not_meet_and_what_meets_is_refused() -> None:
    fused = autofuse.fuse(gelu)
    both = data(6, 128)
    x, out = both[:, :64], both[:, 64:]
    expected, before = gelu(x), x.clone()
    for _ in range(3):
        fused(x, out=out)
        assert torch.allclose(out, expected, atol=1e-6) and torch.equal(x, before)
    plain = data(8, 64)
    held = plain.clone()
    for given, into in ((plain[:6], plain[:6]), (plain[:6], plain[2:]), (both[:, :64], both[:, 32:96])):
        for _ in range(2):
            with pytest.raises(InputError, match="an input's memory"):
                fused(given, out=into)
    y = torch.empty(6, 64)
    fused(plain[:6], out=y)  # which a guard knows from now on
    with pytest.raises(InputError, match="an input's memory"):
        fused(plain[:6], out=plain[1:7])
    assert torch.equal(plain, held)
    twice = autofuse.fuse(add_norm)
    args = inputs()
    twice(*args, out=(y, torch.empty(6, 64)))
    with pytest.raises(InputError, match="another output's memory"):
        twice(*args, out=(y, y))


def test_shares() -> None:
    t = torch.arange(240.0).view(4, 6, 10)
    for a, b in (
        (t[0], t[1]), (t[..., :5], t[..., 5:]), (t[..., :6], t[..., 5:]), (t[:2], t[1:]),
        (t[:, :, 0], t[:, :, 1]), (t[0, 0], t[0, 0, 9:]),
        (t[:, 1:3, :4], t[:, 1:3, 4:]), (t[::2], t[1::2]),
    ):  # fmt: skip
        exact = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
        assert shares(a, b) or not exact
        assert shares(b, a) == shares(a, b)
    assert not shares(t[..., :5], t[..., 5:]) and not shares(t[0], t[1]) and shares(t[..., :6], t[..., 5:])


def test_what_cannot_hold_the_outputs_is_named() -> None:
    fused, x = autofuse.fuse(gelu), data(6, 64)
    with pytest.raises(InputError, match=r"output 0 of gelu is \(6, 64\) torch.float32 on cpu, and its out= is \(6, 63\)"):
        fused(x, out=torch.empty(6, 63))
    with pytest.raises(InputError, match="float16"):
        fused(x, out=torch.empty(6, 64, dtype=torch.float16))
    with pytest.raises(InputError, match="one tensor, and out= is a tuple of 2"):
        fused(x, out=(torch.empty(6, 64), torch.empty(6, 64)))
    with pytest.raises(InputError, match="whose elements share memory"):
        fused(x, out=torch.empty(1, 64).expand(6, 64))
    with pytest.raises(InputError, match="got a int"):
        fused(x, out=3)
    with pytest.raises(InputError, match="gradient"):
        fused(x.clone().requires_grad_(), out=torch.empty(6, 64))
    assert torch.allclose(fused(x, out=None), gelu(x), atol=1e-6)


def test_outputs_that_are_views_or_inputs_are_copied() -> None:
    def views(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.exp()
        return y, y[:, :32], x

    fused, x = autofuse.fuse(views), data(6, 64)
    for _ in range(2):
        out = torch.empty(6, 64), torch.empty(6, 32), torch.empty(6, 64)
        fused(x, out=out)
        for y, e in zip(out, views(x), strict=True):
            assert torch.allclose(y, e, atol=1e-6)


def test_a_parameter_named_out_is_the_functions_own() -> None:
    def scaled(x: Tensor, out: float = 2.0) -> Tensor:
        return x * out

    assert torch.equal(autofuse.fuse(scaled)(data(3, 8), out=3.0), data(3, 8) * 3)


def test_a_compiled_caller() -> None:
    fused = autofuse.fuse(gelu)

    def caller(x: Tensor, out: Tensor) -> Tensor:
        return torch.add(fused(x, out=out), 1)

    x, out = data(6, 64), torch.empty(6, 64)
    y = torch.compile(caller, backend="aot_eager", fullgraph=True)(x, out)
    assert torch.allclose(out, gelu(x), atol=1e-6) and torch.allclose(y, out + 1)


def test_prepared_calls_are_bare() -> None:
    fused = autofuse.fuse(add_norm)
    args = inputs()
    run = fused.prepare(*args)
    for seed in range(3):
        given = data(6, 64, seed=seed), args[1], args[2]
        for y, e in zip(run(*given), add_norm(*given), strict=True):
            assert torch.allclose(y, e, atol=1e-6)
    (call,) = fused._calls.values()
    assert run is call.bound


def test_a_prepared_call_reads_what_the_function_closes_over() -> None:
    table = data(64)
    run = autofuse.fuse(lambda x, by: x * table * by).prepare(data(4, 64), 2.0)
    table.mul_(3)
    assert torch.allclose(run(data(4, 64), 2.0), data(4, 64) * table * 2)


def test_without_a_kernel_the_eager_function_is_the_prepared_call() -> None:
    x = data(4, 64).requires_grad_()
    fused = autofuse.fuse(gelu)
    assert fused.prepare(x) is gelu
    y = torch.empty(4, 64)
    with torch.no_grad():
        fused(x, out=y)
    assert torch.allclose(y, gelu(x.detach()), atol=1e-6)


def test_threads() -> None:
    fused, wrong = autofuse.fuse(gelu), []

    def work(seed: int) -> None:
        x, out = data(6, 64, seed=seed), torch.empty(6, 64)
        for _ in range(200):
            out.fill_(-7)
            fused(x, out=out)
            if not torch.allclose(out, gelu(x), atol=1e-6):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
