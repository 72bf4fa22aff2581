"""What people write, traced: the traps that gave silently wrong kernels, views, and errors that name op and line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.errors import AutofuseError, TraceError, UnsupportedOp
from autofuse.fusion import check
from autofuse.reference import evaluate
from autofuse.trace import trace
from autofuse.traced import flatten_call, sizes_of
from tests.kernel_cases import data, run, same

X, Y = data(6, 24), data(6, 24, seed=1)
WEIGHT = data(24, seed=2)


def agree(fn: Callable[..., Any], *args: Any) -> None:
    """The chain, and both the fused and the unfused program of it, give what the function gives."""
    for groups in ("fused", "unfused"):
        assert run(fn, args, groups=groups).message == ""


def refused(fn: Callable[..., Any], *args: Any, match: str, kind: type[AutofuseError] = TraceError) -> None:
    """Tracing or fusing raises, and names this file and a line of the function."""
    with pytest.raises(kind, match=match) as caught:
        traced = trace(fn, args)
        check(traced.chain, traced.lines, fn.__name__)
    lines, first = inspect.getsourcelines(fn)
    told = str(caught.value)
    assert any(f"{__file__}:{first + k}" in told for k in range(len(lines))), told


# ---- the traps


def test_one_tensor_as_two_arguments() -> None:
    traced = trace(lambda x, y: x - y, (X, X))
    assert traced.chain.num_inputs == 2
    assert [b.position for b in traced.bindings] == [0, 1]


def test_a_branch_on_rows() -> None:
    def branch(x: Tensor) -> Tensor:
        if x.shape[0] > 8:
            return x * 2
        return x + 1

    refused(branch, X, match="leading axis")


def test_a_branch_on_columns_is_structure() -> None:
    def branch(x: Tensor) -> Tensor:
        return x * 2 if x.shape[-1] > 8 else x + 1

    agree(branch, X)
    agree(branch, X[..., :5])
    assert trace(branch, (X,)).chain.key != trace(branch, (X[..., :5],)).chain.key


def test_rows_as_numbers() -> None:
    def divided(x: Tensor) -> Tensor:
        return x / x.shape[0]

    def counted(x: Tensor) -> Tensor:
        return x.sum(-1) / x.numel()

    refused(divided, X, match="row count")
    refused(counted, X, match="row count")
    for fn in (lambda x: x * len(x), lambda x: sum((x + k for k in range(x.shape[0])), x)):
        with pytest.raises(TraceError, match="leading axis"):
            trace(fn, (X,))


def test_rows_are_kept_or_multiplied() -> None:
    x = data(2, 3, 24)
    agree(lambda x: x.reshape(x.shape[0] * x.shape[1], -1) * 2, x)
    agree(lambda x: (x * 2).flatten(0, 1), x)

    def halved(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] // 2, 2, -1) * 2

    with pytest.raises(TraceError, match="leading axis"):
        trace(halved, (X,))

    def joined(x: Tensor) -> Tensor:
        return torch.cat((x, x), 0)

    refused(joined, X, match="leading axes", kind=UnsupportedOp)

    def cut(x: Tensor) -> Tensor:
        return x[:-1] * 2

    with pytest.raises(TraceError):
        trace(cut, (X,))


def test_axes_after_the_leading_one_are_static_where_they_must_be() -> None:
    x = data(2, 6, 5, 24)

    def halved(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:]).amax(-1)

    def cut(x: Tensor) -> Tensor:
        return x[:, 1:] * 2

    for fn in (halved, cut, lambda x: F.silu(F.group_norm(x, 3)), lambda x: x * torch.arange(x.shape[1] * 2)[::2, None, None]):
        agree(fn, x)
        agree(fn, x[:1])
        agree(fn, x[:, :, :1])
        agree(fn, data(4, 6, 5, 24)[::2])
        traced = trace(fn, (x,))
        assert traced.chain.inputs[0].shape == ("s0", 6, 5, 24)
        assert sizes_of(traced, (x[:1],)) == {"s0": 1}
        assert sizes_of(traced, (x[:, :3],)) is None
    assert trace(lambda x: x * 2, (x,)).chain.inputs[0].shape == ("s0", "s1", "s2", 24)


def test_axes_of_the_other_arguments_beside_a_batch() -> None:
    """A number a sample and channel, a table a channel, a number a sample: as long as the batch, or not, or by chance."""
    for n in (2, 6, 1):
        x, scale, table, factor = data(n, 6, 4, 5), data(n, 6, seed=1), data(6, 1, 5, seed=2), data(n, seed=3)
        agree(lambda x, s: F.group_norm(x, 2) * s[:, :, None, None], x, scale)
        agree(lambda x, t: F.group_norm(x, 2) + t, x, table)
        agree(lambda x, f: F.group_norm(x, 2) * f[:, None, None, None], x, factor)
        agree(lambda x, w: F.group_norm(x, 2, w, w) * 2, x, data(6, seed=4))
        agree(lambda x, f: x[:, 1:5] * f[:, None, None, None], x, factor)


def test_what_fails_either_way_says_what_it_said_first() -> None:
    def branch(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 8 else x + x.shape[1]

    def joined(x: Tensor) -> Tensor:
        return torch.cat((x[:, 1:], x[:, 1:]), 0)

    refused(branch, data(6, 4, 24), match=r"decides by the size of a leading axis \(argument 0, axis 0")
    with pytest.raises(TraceError, match=r"joined decides by the size of a leading axis \(argument 0, axis 1"):
        trace(joined, (data(6, 4, 24),))


def test_equal_rows_are_one_symbol() -> None:
    traced = trace(lambda x, y: x + y, (X, Y))
    assert traced.chain.symbols == ("s0",)
    assert sizes_of(traced, (X, Y)) == {"s0": 6}
    assert sizes_of(traced, (X, Y[:3])) is None
    assert sizes_of(traced, (X[..., :3], Y)) is None
    assert trace(lambda x, y: (x * 2, y * 2), (X, Y)).chain.symbols == ("s0", "s1")
    assert trace(lambda x: x * 2, (data(6, 6, 24),)).chain.symbols == ("s0", "s1")


def test_rows_of_one() -> None:
    agree(lambda x, y: x + y, X, Y[:1])
    agree(lambda x, y: x * y.softmax(-1), X[:1], Y[:1])
    agree(lambda x, y: x + y, X[None], Y)
    agree(lambda x, y: x + y, data(2, 1, 24), data(1, 3, 24))
    several = trace(lambda x, y: x + y, (X, Y)).chain.key
    assert trace(lambda x, y: x + y, (X[:1], Y[:1])).chain.key == several


def test_closures() -> None:
    scale = data(24, seed=3)

    def fn(x: Tensor) -> Tensor:
        return x * scale + WEIGHT * scale

    traced = trace(fn, (X,))
    assert [b.tensor is None for b in traced.bindings] == [True, False, False]
    assert traced.bindings[1].tensor is scale
    assert traced.bindings[2].tensor is WEIGHT
    agree(fn, X)
    layer = torch.nn.LayerNorm(24)
    agree(lambda x: F.gelu(layer(x)), X)


def test_tensors_made_inside() -> None:
    agree(lambda x: x * torch.tensor(2.0) + torch.tensor([1.0] * 24), X)
    agree(lambda x: F.prelu(x, torch.tensor([0.25])), X)
    agree(lambda x: x + torch.zeros(x.shape[0], 1), X)


def test_numbers_are_structure() -> None:
    def fn(x: Tensor, scale: float = 0.125, shift: int = 1) -> Tensor:
        return x * scale + shift

    agree(fn, X, 0.5, 2)
    assert trace(fn, (X, 0.5)).chain.key != trace(fn, (X, 0.25)).chain.key
    assert flatten_call(fn, (X,), {"shift": 3}) == (X, 0.125, 3)
    with pytest.raises(TraceError, match="keyword-only"):
        flatten_call(lambda x, *, only=1: x, (X,), {"only": 2})
    assert flatten_call(lambda x, y=2, *, only=1: x, (X,), {"y": 3}) == (X, 3)
    with pytest.raises(TypeError):
        flatten_call(fn, (X,), {"nothing": 3})


def test_in_place_on_what_is_fresh() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x * 2
        k = h + 1
        h += x
        h.relu_()
        h.clamp_(max=3).mul_(k)
        h **= 2
        h.masked_fill_(x > 0, 1.0)
        return h + k

    def by_another_name(x: Tensor) -> Tensor:
        h = x + 1
        h.detach().mul_(2)
        h.view(h.shape).add_(1)
        return h

    def whole(x: Tensor) -> tuple[Tensor, ...]:
        h, k = torch.empty_like(x), x.clone()
        h.copy_(x)
        k.copy_(x[:, :1])
        n = x * 2
        n.fill_(3.0)
        return h * 2, k, n + x

    agree(fn, X)
    agree(by_another_name, X)
    agree(whole, X)
    agree(lambda x: F.relu(x + 1, inplace=True), X)


def test_in_place_on_an_input() -> None:
    def plain(x: Tensor) -> Tensor:
        x += 1
        return x

    def viewed(x: Tensor) -> Tensor:
        x.view(-1).mul_(2)
        return x

    def transposed(x: Tensor) -> Tensor:
        x.t().mul_(2)
        return x

    def activated(x: Tensor) -> Tensor:
        return F.silu(x, inplace=True)

    def cast(x: Tensor) -> Tensor:
        return x.float().add_(1)

    for fn in (plain, viewed, transposed, activated, cast):
        before = X.clone()
        refused(fn, X, match="writes into an input")
        assert torch.equal(X, before)


def test_in_place_through_a_view() -> None:
    def into(x: Tensor) -> Tensor:
        h = x * 2
        h[..., :3].add_(1)
        return h

    def under(x: Tensor) -> Tensor:
        h = x * 2
        v = h[..., :3]
        h.add_(1)
        return v

    def item(x: Tensor) -> Tensor:
        h = x + 1
        h[..., 0] = 5.0
        return h

    def cast(x: Tensor) -> Tensor:
        h = x + 1
        h.to(torch.float32).mul_(2)
        return h

    for fn in (into, under, item, cast):
        refused(fn, X, match="through a view")


def test_data_dependent_flow() -> None:
    def branch(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    def number(x: Tensor) -> Tensor:
        return x * x.amax().item()

    def chosen(x: Tensor) -> Tensor:
        return x[x > 0]

    refused(branch, X, match="values of a tensor")
    refused(number, X, match="a tensor's value")
    refused(chosen, X, match="index", kind=UnsupportedOp)


def test_random() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    refused(noisy, X, match="random", kind=UnsupportedOp)
    refused(dropped, X, match=r"is random: use autofuse\.dropout\(x, p, seed\)", kind=UnsupportedOp)
    agree(lambda x: F.dropout(x, 0.5, training=False) * 2, X)
    agree(lambda x: F.rrelu(x, training=False), X)


def product(x: Tensor) -> Tensor:
    return x @ x.t()


def ordered(x: Tensor) -> Tensor:
    return x.sort(-1).values


def varied(x: Tensor) -> Tensor:
    return x.var(0)


def complexes(x: Tensor) -> Tensor:
    return x.to(torch.complex64)


def reread(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def running(x: Tensor) -> Tensor:
    return torch.cumsum(x * 2, -1)


@pytest.mark.parametrize(
    ("fn", "op"),
    [(product, "matmul"), (ordered, "sort"), (varied, "var"), (complexes, "complex64"), (reread, "view"), (running, "cumsum")],
)
def test_what_is_not_lowered_names_op_and_line(fn: Callable[..., Any], op: str) -> None:
    refused(fn, X, match=op, kind=UnsupportedOp)


def test_layout_questions() -> None:
    def asked(x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous() else x * 3

    def stepped(x: Tensor) -> Tensor:
        return x * x.stride(0)

    refused(asked, X, match="how a tensor lies")
    refused(stepped, X, match="how a tensor lies")


@pytest.mark.parametrize("given", [X.to_sparse(), torch.zeros(3, dtype=torch.complex64)], ids=["sparse", "complex"])
def test_tensors_that_no_chain_takes(given: Tensor) -> None:
    with pytest.raises(TraceError):
        trace(lambda x: x * 2, (given,))


def test_what_is_no_tensor() -> None:
    for fn in (lambda x: x.shape[0], lambda x: (x * 2, None), lambda x: ()):
        with pytest.raises(TraceError, match="returns"):
            trace(fn, (X,))
    with pytest.raises(TraceError, match="cannot be traced"):
        trace(lambda x: x.nothing(), (X,))


# ---- views

VIEWS: dict[str, Callable[..., Any]] = {
    "chunk": lambda x: [a * 2 for a in x.chunk(3, -1)],
    "split": lambda x: [a * 2 for a in x.split([4, 8, 12], -1)],
    "tensor_split": lambda x: [a * 2 for a in x.tensor_split(5, -1)],
    "narrow": lambda x: x.narrow(-1, 3, 7) + 1,
    "slice": lambda x: x[..., 2:-3:4] * 2,
    "slice_to_nothing": lambda x: x[..., 24:] * 2,
    "select": lambda x: x[..., 3] * x[:, -4],
    "first_row": lambda x: x[0] * 2,
    "unbind": lambda x: torch.stack([a.exp() for a in x.unflatten(-1, (3, 8)).unbind(-2)], -1),
    "stack": lambda x: torch.stack((x, x * 2), -1),
    "stack_rows": lambda x: torch.stack((x, x * 2), 1),
    "cat": lambda x: torch.cat((x[..., :5] * 2, x[..., 5:6], x), -1),
    "concat_of_one": lambda x: torch.cat((x * 2,), -1),
    "unflatten": lambda x: x.unflatten(-1, (4, 6)).sum(-1),
    "unflatten_minus_one": lambda x: x.unflatten(-1, (-1, 6)).amax(-1) + 1,
    "flatten": lambda x: (x.unflatten(-1, (4, 6)) * 2).flatten(-2),
    "flatten_all": lambda x: x.flatten() * 2,
    "reshape": lambda x: x.reshape(-1, 2, 12).softmax(-1),
    "view": lambda x: x.view(-1, 4, 6).transpose(-1, -2) * 2,
    "transpose": lambda x: x.t().exp(),
    "permute": lambda x: x.unflatten(-1, (4, 6)).permute(2, 0, 1) + 1,
    "movedim": lambda x: x.movedim(-1, 0) * 2,
    "swapaxes": lambda x: x.swapaxes(0, 1) * 2,
    "expand": lambda x: x[..., :1].expand(-1, 9) * 2,
    "expand_as": lambda x: x[..., :1].expand_as(x) * x,
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1) * x.unsqueeze(0),
    "repeat": lambda x: x.repeat(1, 2) * 2,
    "rotate_half": lambda x: x * 2 + torch.cat((-x[..., 12:], x[..., :12]), -1),
    "interleaved": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "groups": lambda x: (x.unflatten(-1, (3, 8)) / x.unflatten(-1, (3, 8)).norm(dim=-1, keepdim=True)).flatten(-2),
    "broadcast": lambda x: F.mse_loss(x, x[:, :1] * torch.ones_like(x), reduction="none"),
    "lower": lambda x: torch.where(torch.arange(24) <= 3, x, -1.0),
    "outer": lambda x: x[:, :, None] * x[:, None, :],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    agree(VIEWS[name], X)


def test_views_of_more_dimensions() -> None:
    x = data(2, 3, 4, 24)
    for fn in (
        lambda x: x.transpose(1, 2) * 2,
        lambda x: x.transpose(1, 2).flatten(-2) + 1,
        lambda x: x.flatten(0, 2).softmax(-1),
        lambda x: x.unflatten(-1, (2, 12)).sum((-1, -2)),
        lambda x: x.permute(0, 2, 1, 3).chunk(2, -1)[0].relu(),
    ):
        agree(fn, x)


# ---- outputs


def test_outputs() -> None:
    made = run(lambda x, y: {"a": x * 2, "b": (y, [x[..., :3], (x > 0).any(-1)])}, (X, Y))
    assert made.message == ""
    traced = trace(lambda x, y: {"a": x * 2, "b": (y, [x[..., :3]])}, (X, Y))
    assert traced.unflatten([1, 2, 3]) == {"a": 1, "b": (2, [3])}
    inputs = [X, Y]
    first, second, third = evaluate(traced.chain, inputs, {"s0": 6})
    assert second is Y
    assert third.data_ptr() == X.data_ptr()
    assert same(first, X * 2)


def test_an_input_or_a_view_of_one_is_no_copy() -> None:
    made = run(lambda x: (x, x.t(), x[:, 2:4], x.exp()), (X,))
    assert made.message == ""
    assert [t.data_ptr() == X.data_ptr() for t in made.outputs] == [True, True, False, False]
    assert made.outputs[2].data_ptr() == X.data_ptr() + 8


def test_one_output_twice() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    agree(fn, X)


def test_an_argument_that_is_not_read() -> None:
    traced = trace(lambda x, y: x * 2, (X, Y[:2]))
    assert [b.position for b in traced.bindings] == [0]


def test_pairs() -> None:
    agree(lambda x: x.max(-1), X)
    agree(lambda x: torch.min(x, dim=-1, keepdim=True), X)
    for mine, theirs in zip(run(lambda x: torch.var_mean(x, -1), (X,)).outputs, torch.var_mean(X, -1), strict=True):
        assert torch.allclose(mine, theirs)


def test_no_grad_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            h = x * 2
        return h + 1

    agree(fn, X)


def test_a_vector_as_long_as_the_rows() -> None:
    scale, labels = data(6, seed=4), torch.arange(6)
    traced = trace(lambda x, s: x * s[:, None], (X, scale))
    assert [v.shape for v in traced.chain.inputs] == [("s0", 24), ("s0",)]
    agree(lambda x, i: F.log_softmax(x, -1).gather(-1, i[:, None]).squeeze(-1).neg(), X, labels)
    square = data(24, 24)
    assert trace(lambda x, w: x * w, (square, WEIGHT)).chain.inputs[1].shape == (24,)
    assert trace(lambda x, s, w: x * s[:, None] * w, (square, data(24), WEIGHT)).chain.inputs[0].shape == ("s0", 24)


def test_the_index_of_a_gather_has_as_many_rows() -> None:
    traced = trace(lambda x, i: x.gather(-1, i), (X, torch.zeros(6, 2, dtype=torch.int64)))
    assert traced.chain.symbols == ("s0",)
    assert sizes_of(traced, (X, torch.zeros(3, 2, dtype=torch.int64))) is None
