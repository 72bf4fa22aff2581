"""The guard of prepared calls: whatever differs from the call that was prepared never reaches its kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._C._dynamo import guards
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import autofuse
from autofuse import dispatch
from autofuse.errors import TraceError
from autofuse.guard import MISS, never
from tests.kernel_cases import right

pytestmark = pytest.mark.usefixtures("own_store")


@pytest.fixture(params=["TensorGuards", "flat"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways to look at tensors: torch's own, and what serves where a torch has it not."""
    if request.param == "flat":
        monkeypatch.delattr(guards, "TensorGuards")
    yield request.param


def norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(F.rms_norm(x + r, (x.shape[-1],), w, 1e-6))


def make(rows: int = 6, cols: int = 64, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + cols)
    return torch.randn(rows, cols).to(dtype), torch.randn(rows, cols).to(dtype), torch.randn(cols).to(dtype)


def hot(fused: Any, *args: Any) -> bool:
    """Whether a call is answered by the guard of the last one."""
    return fused._hot(*args) is not MISS


def test_rows_are_free_and_each_count_is_bound_once() -> None:
    fused = autofuse.fuse(norm)
    for rows in (6, 3, 1, 500, 6, 3):
        right(norm, make(rows), fused(*make(rows)))
        assert hot(fused, *make(rows))
    (kept,) = fused._guards.values()
    assert len(kept) == 1 and len(kept[0]._bound) == 4


def test_rows_that_do_not_fit_each_other() -> None:
    fused = autofuse.fuse(norm)
    fused(*make(6)), fused(*make(5))
    (x, _, w), (_, r, _) = make(6), make(5)
    assert not hot(fused, x, r, w)
    with pytest.raises(Exception, match="size"):
        fused(x, r, w)


def test_many_signatures() -> None:
    fused = autofuse.fuse(norm)
    calls = [make(4, cols, dtype) for cols in range(8, 136, 8) for dtype in (torch.float32, torch.bfloat16)]
    for _ in range(2):
        for args in calls:
            right(norm, args, fused(*args))
            assert hot(fused, *args)
    assert len(fused._calls) == len(calls) == len(fused._guards)


class Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def test_layouts_dtypes_and_classes_beside_a_prepared_call() -> None:
    fused = autofuse.fuse(norm)
    x, r, w = make(8)
    fused(x, r, w)
    raw = torch.randn(8 * 64 + 1)
    others: list[tuple[Any, ...]] = [
        (x.t().contiguous().t(), r, w), (x[::2], r[::2], w), (raw[1:].view(8, 64), r, w), (x, r[:1].expand(8, 64), w),
        (x.to(torch.bfloat16), r, w), (x, r, w.to(torch.bfloat16)), (x.view(2, 4, 64), r.view(2, 4, 64), w), (x[0], r[0], w),
        (x.as_subclass(Sub), r, w), (torch._neg_view(x), r, w), (x, x, w),
    ]  # fmt: skip
    for args in others:
        assert args[0] is args[1] or not hot(fused, *args)
        plain = [a.as_subclass(torch.Tensor) for a in args]
        got = fused(*args)
        assert type(got) is type(norm(*args))
        right(norm, tuple(p.clone() if p.is_neg() else p for p in plain), got.as_subclass(torch.Tensor))
        right(norm, (x, r, w), fused(x, r, w))


def test_modes_beside_a_prepared_call() -> None:
    fused = autofuse.fuse(norm)
    x, r, w = make()
    expected = fused(x, r, w)
    assert hot(fused, x, r, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert not hot(fused, x, r, w)
        assert torch.equal(fused(x, r, w), norm(x, r, w))
    with Mode() as mode:
        fused(x, r, w)
    assert torch.ops.aten.silu.default in mode.seen
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(fused(dual, r, w)).tangent is not None
    assert any("silu" in str(n.target) for n in make_fx(fused)(x, r, w).graph.nodes)
    assert torch.func.grad(lambda t: fused(t, r, w).sum())(x).abs().sum() > 0
    with torch.inference_mode():
        made = make(5)
        inside = fused(*made)
        assert inside.is_inference()
        right(norm, make(5), inside)
    right(norm, make(5), fused(*make(5)))
    assert not fused(*make(5)).is_inference()
    assert torch.equal(fused(x, r, w), expected)


def test_gradients_after_a_call_without_them() -> None:
    fused = autofuse.fuse(norm)
    x, r, w = make()
    weight = torch.nn.Parameter(w)
    with torch.no_grad():
        fused(x, r, weight)
        assert hot(fused, x, r, weight)
        assert not fused(x, r, weight).requires_grad
    assert not hot(fused, x, r, weight)
    fused(x, r, weight).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    fused(x, r, w)
    x.requires_grad_()
    assert fused(x, r, w).requires_grad


def test_arguments_that_are_no_tensors() -> None:
    def scaled(x: torch.Tensor, scale: float, flag: Any) -> torch.Tensor:
        return x * scale if flag else -x

    fused = autofuse.fuse(scaled)
    x = torch.randn(4, 8)
    for scale, flag in ((0.0, True), (-0.0, True), (1, True), (1.0, True), (True, True), (1.0, 1), (1.0, None), (0.5, False)):
        for _ in range(2):
            got, expected = fused(x, scale, flag), scaled(x, scale, flag)
            assert torch.equal(got, expected) and torch.equal(torch.signbit(got), torch.signbit(expected))
    assert fused._hot(x, 0.5, False, 1) is MISS and fused._hot(x, 0.5) is MISS
    with pytest.raises(TypeError, match="positional"):
        fused(x, 0.5, False, 1)
    with pytest.raises(TypeError, match="missing"):
        fused(x, 0.5)


def test_what_it_closes_over_changes_its_kind() -> None:
    holder: dict[str, Any] = {"w": torch.randn(16), "k": 2.0, "list": [1.0, 2.0]}

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * holder["w"] * holder["k"]
        made: torch.Tensor = y + sum(holder["list"])
        return made

    fused = autofuse.fuse(f)
    x = torch.randn(4, 16)
    changes: list[Callable[[], Any]] = [
        lambda: holder.update(w=torch.randn(16)), lambda: holder.update(k=3), lambda: holder.update(k=3.0),
        lambda: holder["list"].append(4.0), lambda: holder.update(w=torch.randn(16, dtype=torch.float64)),
        lambda: holder.update(w=torch.randn(1)), lambda: holder.update(w=torch.randn(17)[1:]),
    ]  # fmt: skip
    for change in changes:
        torch.testing.assert_close(fused(x), f(x))
        torch.testing.assert_close(fused(x), f(x))
        change()
    torch.testing.assert_close(fused(x), f(x))
    holder.pop("w")
    with pytest.raises(TraceError, match="KeyError: 'w'"):
        fused(x)


def test_reload_forgets_prepared_calls() -> None:
    fused = autofuse.fuse(norm)
    fused(*make())
    dispatch.reload()
    assert fused._hot is never
    right(norm, make(), fused(*make()))
    assert hot(fused, *make())


def test_threads_with_calls_of_their_own() -> None:
    fused = autofuse.fuse(norm)
    failed: list[str] = []

    def work(seed: int) -> None:
        for k in range(60):
            args = make(1 + (k * 7 + seed) % 9, 8 * (1 + (k + seed) % 3))
            got = fused(*args)
            if got.shape != args[0].shape or not torch.allclose(got, norm(*args), atol=1e-5):
                failed.append(f"{args[0].shape} {got}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
