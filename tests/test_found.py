"""Wrong answers that a differential fuzzer and a hostile reader once found; each states the right one."""

from __future__ import annotations

import copy
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

import autofuse
from autofuse import dispatch
from autofuse.errors import InputError, TraceError, UnsupportedOp
from examples.entries import CATALOGUE
from tests.kernel_cases import right

fuse = autofuse.fuse
X = torch.randn(8, 64)


pytestmark = pytest.mark.usefixtures("own_store")


def same(got: Any, want: Any) -> None:
    narrow = got.dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(got, want, rtol=1e-2 if narrow else 1e-5, atol=1e-2 if narrow else 1e-6, equal_nan=True)


# ---- functions whose meaning changes with 0 or 1 row


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 2 if x.shape[0] == 1 else x * 3,
        lambda x: x * 2 if x.shape[0] > 1 else x * 3,
        lambda x: x * 2 if x.numel() > 64 else x * 3,
        lambda x: (x * 2).squeeze(0),
        lambda x: (x * 2).squeeze(),
        lambda x: x.sum(-1, keepdim=True).squeeze(),
    ],
)
def test_one_row_is_traced_as_it_is(fn: Callable[..., Any]) -> None:
    fused = fuse(fn)
    for rows in (4, 1, 4):
        x = torch.randn(rows, 64)
        same(fused(x), fn(x))


# ---- what a function reads from outside


def test_containers_helpers_dtypes_and_none_are_read_again() -> None:
    scale = {"s": 2.0}
    act: Callable[..., Any] = torch.relu
    extra: torch.Tensor | None = None
    dtype = torch.float16
    parts = [torch.ones(64)]

    def f(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = act(x * scale["s"])
        for p in parts:
            y = y + p
        if extra is not None:
            y = y + extra
        done: torch.Tensor = y.to(dtype)
        return done

    fused = fuse(f)
    same(fused(X), f(X))
    scale["s"] = 3.0
    same(fused(X), f(X))
    act = torch.sigmoid
    same(fused(X), f(X))
    parts.append(torch.ones(64) * 2)
    same(fused(X), f(X))
    extra = torch.randn(64)
    same(fused(X), f(X))
    dtype = torch.bfloat16
    same(fused(X), f(X))


def test_a_negative_zero_is_another_number() -> None:
    shift = 0.0
    fused = fuse(lambda x: 1 / (x * 0 + shift))
    x = torch.full((8, 64), -1.0)
    assert (fused(x) == torch.inf).all()
    shift = -0.0
    assert (fused(x) == -torch.inf).all()


def test_two_names_of_one_tensor_may_part() -> None:
    a = b = torch.ones(64)
    fused = fuse(lambda x: x * a + b)
    same(fused(X), X + 1)
    b = a * 5
    same(fused(X), X + 5)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(64))
        self.shift = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w + self.shift


class Decorated(Scale):
    @autofuse.fuse
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w + self.shift


@pytest.mark.parametrize("kind", ["module", "method", "inside"])
def test_modules_are_read_again(kind: str) -> None:
    m = Decorated() if kind == "method" else Scale()
    fused: Any = {"module": lambda: fuse(m), "method": lambda: m, "inside": lambda: fuse(lambda x: m(x))}[kind]()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        same(fused(X), X + 1)
        m.shift = 5.0
        same(fused(X), X + 5)
        m.w = torch.nn.Parameter(2 * torch.ones(64))
        same(fused(X), 2 * X + 5)
        if kind == "method":
            assert m.forward.explain(X).tier == "heuristic"  # type: ignore[attr-defined]
            assert copy.deepcopy(m)(X).shape == X.shape


def test_a_tensor_made_a_number_is_refused() -> None:
    t = torch.tensor(2.0)
    with pytest.raises(TraceError, match="makes a number of a tensor that the function closes over"):
        fuse(lambda x: x * float(t))(X)


@autofuse.fuse
def pickled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_pickle_and_deepcopy() -> None:
    assert pickle.loads(pickle.dumps(pickled)) is pickled
    same(copy.deepcopy(pickled)(X), X * 2)


# ---- arithmetic


def test_integers() -> None:
    a = torch.arange(512).reshape(8, 64) - 100
    same(fuse(lambda x: x // 7)(a), a // 7)
    same(fuse(lambda x: x % 7)(a), a % 7)
    for fn in (lambda x, y: x // y, lambda x, y: x % y, lambda x, y: torch.fmod(x, y), lambda x, y: x**y):
        with pytest.raises(UnsupportedOp, match="integer"):
            fuse(fn)(a, a)
    top = torch.full((8, 64), 2**31 - 1, dtype=torch.int32)
    fused = fuse(lambda x: (x + 1) > x)
    fused(top * 0)
    same(fused(top), (top + 1) > top)
    ninth = fuse(lambda x: x**9)
    ninth(torch.ones_like(a))
    same(ninth(torch.ones_like(a) * 3), torch.ones_like(a) * 3**9)


def test_products_are_not_contracted() -> None:
    fused = fuse(lambda a, b, c, d: (a * b - c * d) * 1e20)
    fused(X, X, X * 0.5, X * 0.5)
    assert not fused(X, X, X, X).any()


def test_floor_division_by_infinity() -> None:
    fused = fuse(lambda x, y: x // y)
    fused(X, X.abs() + 1)
    inf = torch.full_like(X, torch.inf)
    same(fused(-X.abs(), inf), -X.abs() // inf)
    same(fused(X.abs(), inf), X.abs() // inf)


def test_rows_with_an_offset() -> None:
    norm = fuse(lambda x: F.layer_norm(x, (x.shape[-1],)))
    norm(torch.randn(8, 100))
    constant = torch.full((8, 100), 1000.3)
    same(norm(constant), F.layer_norm(constant, (100,)))
    var = fuse(lambda x: x.var(-1))
    var(torch.randn(8, 48))
    x = 1000.3 + 0.01 * torch.randn(8, 48)
    torch.testing.assert_close(var(x).double(), x.double().var(-1), rtol=1e-4, atol=0)


def test_small_values_in_fast_math() -> None:
    for fn in (torch.log1p, torch.expm1, torch.tanh, torch.sinh):
        fused = fuse(lambda x, fn=fn: fn(x) * 1e8)
        fused(X.abs().bfloat16())
        small = torch.full((8, 64), 1e-8).bfloat16()
        torch.testing.assert_close(fused(small), fn(small) * 1e8, rtol=2e-2, atol=0)


def test_nan_to_num_has_the_limits_of_its_dtype() -> None:
    fused = fuse(lambda x: torch.nan_to_num(x))
    fused(X.half())
    inf = torch.full((8, 64), torch.inf).half()
    same(fused(inf), torch.nan_to_num(inf))
    same(fused(-inf), torch.nan_to_num(-inf))


def test_the_first_of_equal_zeros() -> None:
    x = torch.tensor([[-0.0, 0.0, -1.0]])
    same(fuse(lambda x: x.argmax(-1))(x), x.argmax(-1))


# ---- memory


def test_copies_are_copies() -> None:
    for fn in (lambda x: torch.cat([x], -1), lambda x: torch.stack([x]), lambda x: x.to(torch.float32, copy=True)):
        x = X.clone()
        fuse(lambda x, fn=fn: (fn(x), x + 1))(x)[0].zero_()
        same(x, X)


def test_views_are_views() -> None:
    x = X.clone()
    for fn in (lambda a: a.swapaxes(-1, -2), lambda a: a.moveaxis(0, 1), lambda a: a.adjoint()):
        got = fuse(lambda a, fn=fn: (fn(a), a + 1))(x)[0]
        assert got.data_ptr() == x.data_ptr() and got.stride() == fn(x).stride()  # type: ignore[no-untyped-call]
    with pytest.raises(TraceError, match="writes through a view"):
        fuse(lambda a: (lambda h: (h, h.swapaxes(0, 1).mul_(2)))(a + 1))(x)


def test_an_argument_that_is_read_for_its_shape_only() -> None:
    w = torch.randn(64)
    same(fuse(lambda x, w: w.expand(x.shape) * 2)(X, w), w.expand(8, 64) * 2)
    same(fuse(lambda x, w: torch.zeros(x.shape) + w)(X, w), torch.zeros(8, 64) + w)


# ---- who looks on


def test_forward_mode_gradients_and_negated_views() -> None:
    fused = fuse(lambda x: x * 2)
    level: Any = forward_ad.dual_level
    with level():
        assert forward_ad.unpack_dual(fused(forward_ad.make_dual(X, torch.ones_like(X)))).tangent is not None
    z = torch.randn(8, 64, dtype=torch.cfloat)
    fused(torch.view_as_real(z)[..., 1])
    same(fused(z.conj().imag), z.conj().imag * 2)


# ---- what is refused, and what a row of the store may do


def test_messages() -> None:
    with pytest.raises(UnsupportedOp, match=r"^matmul at .*test_found\.py:\d+ is a matrix product"):
        fuse(lambda x, w: torch.relu(x @ w))(X, torch.randn(64, 64))
    with pytest.raises(TypeError, match="missing a required argument: 'w'"):
        fuse(lambda x, w: x * w)(X)
    with pytest.raises(InputError, match="that is a list, no tensor and no number"):
        fuse(lambda x, s: x * s[0])(X, [1.0])
    with pytest.raises(UnsupportedOp, match="is not lowered: it reduces a leading axis"):
        fuse(lambda x: x.softmax(0))(X)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE schedule SET knobs = '[1,2]'",
        "UPDATE config SET plan = 'pointwise(1,2,99)' WHERE plan <> 'eager'",
        "DELETE FROM config_schedule",
        "UPDATE workload SET rows = 'x'",
    ],
)
def test_rows_that_no_one_of_us_wrote(tmp_path: Path, sql: str) -> None:
    def gate(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.5 * x) + F.softplus(x)

    args = (torch.randn(256, 512),)
    assert autofuse.tune(gate, [args], trials=3, seconds=20).ok
    db = sqlite3.connect(tmp_path / "store.db")
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute(sql)
    db.commit()
    db.close()
    dispatch.reload()
    same(fuse(gate)(*args), gate(*args))


# ---- one program for many calls: what differs between them must be seen


def kernels_run(fused: Any, *calls: tuple[Any, ...]) -> None:
    """Each call is right, and none of them falls back to eager."""
    for args in calls:
        leaves, eager = (torch.utils._pytree.tree_leaves(v) for v in (fused(*args), fused.fn(*args)))
        for got, want in zip(leaves, eager, strict=True):
            same(got, want)
            assert not got.numel() or got.stride() == want.stride()
        assert fused.explain(*args).tier == "heuristic", args


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.gelu(x),
        lambda x: autofuse.dropout(x, 0.3, 1),
        lambda x: F.rms_norm(x.unflatten(-1, (-1, 16)), (16,)),
        lambda x: x.unflatten(-1, (-1, 16)).abs().amax(-1),
        lambda x: x.unflatten(-1, (4, 16)).sum((0, 1)),
    ],
)
def test_rows_that_lie_apart_after_rows_that_do_not(fn: Callable[..., Any]) -> None:
    part = torch.randn(6, 192).chunk(3, -1)[0]
    kernels_run(fuse(fn), (torch.randn(4, 64),), (part,), (torch.randn(4, 64),), (torch.randn(1, 64).expand(6, 64),))
    kernels_run(fuse(fn), (part,), (torch.randn(4, 64),))


def test_strides_of_results_after_another_layout() -> None:
    for calls in ([torch.randn(9, 14)[:, ::2], torch.randn(7, 5).t()], [torch.randn(7, 5).t(), torch.randn(9, 14)[:, ::2]]):
        kernels_run(fuse(lambda x: x * 2), *((x,) for x in calls))


def test_a_tuned_config_on_a_slice() -> None:
    def act(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * 2

    assert autofuse.tune(act, [(torch.randn(64, 256),)], trials=3, seconds=20).ok
    fused = fuse(act)
    for x in (torch.randn(64, 256), torch.randn(64, 512)[:, :256]):
        torch.testing.assert_close(fused(x), act(x), rtol=1e-4, atol=1e-5)  # a fast form of erf may have won


def test_many_rows_after_one() -> None:
    w = torch.randn(8)
    kernels_run(fuse(lambda x, w: x * w + 1), *((torch.randn(n, 8), w) for n in (1, 5, 1000, 1)))
    kernels_run(fuse(lambda x: x - x.mean(0)), *((torch.randn(n, 8),) for n in (1, 300, 5)))


def test_sums_of_many_rows_after_few() -> None:
    many = torch.rand(1_000_000, 4) + 1000
    kernels_run(fuse(lambda x: x.mean(0)), (many[:5],), (many,), (many - 1000.5,))
    ones = torch.ones(40_000_000, 1, dtype=torch.int8)
    fused = fuse(lambda x: (x > 0).float().mean(0))
    assert fused(ones[:4]) == 1 and fused(ones) == 1
    assert fuse(lambda x: x.sum(0))(torch.full((200, 3), float("inf"))).tolist() == [float("inf")] * 3


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.max(),
        lambda x: x.min(),
        lambda x: x.sum(()),
        lambda x: x.norm(),
        lambda x: x.unflatten(-1, (4, 2)).mean((0, 2)),
        lambda x: (x[:, :2] + x[:, 2:4]).unsqueeze(-1).mean((0, 2)),
        lambda x: (x.amax(-1), x.sum(0)),
        lambda x: x * torch.arange(x.shape[0], dtype=torch.int8)[:, None],
        lambda x: (x > 0).sum(0, dtype=torch.bool),
    ],
)
def test_reductions_that_crashed(fn: Callable[..., Any]) -> None:
    kernels_run(fuse(fn), (torch.randn(5, 8),), (torch.randn(300, 8),))


def test_no_rows_beside_an_extreme_of_columns() -> None:
    fused = fuse(lambda x: (x.amax(-1), x.sum(0)))
    kernels_run(fused, (torch.randn(5, 8),), (torch.randn(0, 8),))


def test_a_first_call_that_eager_refuses_too() -> None:
    fused = fuse(lambda x, t: F.cross_entropy(x, t, reduction="none"))
    with pytest.raises(IndexError):
        fused(torch.randn(4, 8), torch.tensor([1, 8, 0, 3]))
    kernels_run(fused, (torch.randn(4, 8), torch.tensor([1, 2, 0, 3])))


def test_channels_last_stays() -> None:
    x = torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)
    fused = fuse(lambda x: F.group_norm(x, 2))
    with pytest.warns(RuntimeWarning, match="it gives strides"):
        got = fused(x)
    assert got.stride() == F.group_norm(x, 2).stride()


def test_tensors_that_no_kernel_makes() -> None:
    for fn in (lambda x: x * torch.linspace(0, 1, 64), lambda x: x * torch.eye(64)[0]):
        with pytest.raises(UnsupportedOp, match="makes a tensor of its own"):
            fuse(fn)(X)


def test_a_pinned_mode_without_a_kernel_leaves_the_winner(tmp_path: Path) -> None:
    def act(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) - x * 0.999

    args = (torch.randn(16, 256) * 1e-3,)
    first = autofuse.tune(act, [args], trials=4, seconds=30, math="exact").rows[0]
    assert first.plan != "eager"
    second = autofuse.tune(act, [args], trials=4, seconds=30, math="fast").rows[0]
    dispatch.reload()
    assert fuse(act).explain(*args).plan == (first.plan if second.plan == "eager" else second.plan)


@pytest.mark.parametrize("name", ["layernorm_backward", "rmsnorm_backward"])
def test_as_many_rows_as_columns(name: str) -> None:
    """Some vectors hold a number a row and others one a column, and all are equally long."""
    entry = next(e for e in CATALOGUE if e.name == name)
    fused = autofuse.fuse(entry.fn)
    for rows in (64, 7):
        args = entry.case(rows, 64)
        right(entry.fn, args, fused(*args))
        assert fused.explain(*args).tier == "heuristic"
