"""PyTorch function -> Chain.

The function runs once on fake tensors, undecomposed (`make_fx` with `pre_dispatch=True`), with every leading axis a
symbol of its own and every trailing axis static. What the trace must not do silently, each of which gave wrong kernels
once: merge one tensor that is passed twice (every argument gets its own fake), bake in a row count (the shape
environment's guards are read afterwards), or freeze a closure's tensor (it is an input, found again by identity).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode

from . import ops
from .errors import AutofuseError, TraceError, UnsupportedOp
from .graph import Reader, at_line, internal
from .traced import Traced, sizes_of

aten = torch.ops.aten
Rows = frozenset[tuple[int, int]]  # (argument, axis): what varies from call to call
HINT = 16  # a hint of 2 or more, and divisible, so that no trace takes a branch of its own for it


def trace(fn: Callable[..., Any], args: Sequence[Any], ones: bool | None = None) -> Traced:
    """Trace `fn` over flat positional arguments: tensors (of any shape) and Python scalars.

    `ones` says whether leading axes of extent 1 are static (they broadcast) or rows like any other; None tries rows
    first. The last axis is static, but for a vector that only makes sense as one number a row; so are the axes after the
    leading one where the function fails with them as rows (it splits them, or cuts them). Scalars are part of the
    structure. Raises TraceError (or UnsupportedOp), which names the operation and line: that of the first try.
    """
    first: TraceError | None = None
    plain: TraceError | None = None
    for rows, last in _row_axes(args):
        if last and isinstance(plain, UnsupportedOp):  # not for want of a number a row
            continue
        try:
            return _trace_ones(fn, args, ones, rows)
        except TraceError as e:
            first = first or e
            plain = plain if last else e
    if ones is None and any(isinstance(a, torch.Tensor) and 0 in a.shape[:-1] for a in args):
        with contextlib.suppress(TraceError):
            return _trace_ones(fn, args, True, next(_row_axes(args))[0])
    assert first is not None
    raise first


MANY_VECTORS = 5  # 1-D arguments as long as the rows, of which every choice is tried


def _row_axes(args: Sequence[Any]) -> Iterator[tuple[Rows, bool]]:
    """Which axes may be rows, best guess first, and whether that makes the last axis of a vector one.

    Every leading axis; then with 1-D arguments that may hold one number a row (labels, scales), as long as a leading axis
    is. Where an argument has three axes or more, then the leading one alone (a batch of images, whose channels are split
    into groups): of every argument as long there, then of those with the most axes.
    """
    tensors = {k: a for k, a in enumerate(args) if isinstance(a, torch.Tensor)}
    every = frozenset((k, d) for k, a in tensors.items() for d in range(a.dim() - 1))
    choices = [every]
    most = max((a.dim() for a in tensors.values()), default=0)
    if most >= 3:
        widest = frozenset((k, 0) for k, a in tensors.items() if a.dim() == most)
        long = {tensors[k].shape[0] for k, _ in widest}
        choices += [frozenset((k, 0) for k, a in tensors.items() if a.dim() > 1 and a.shape[0] in long), widest]
    for rows in dict.fromkeys(choices):
        yield rows, False
        lengths = {tensors[k].shape[d] for k, d in rows}
        found = [(k, 0) for k, a in tensors.items() if a.dim() == 1 and a.shape[0] in lengths]
        few = len(found) <= MANY_VECTORS  # with as many rows as columns some may be numbers a row, others columns
        for n in range(len(found), 0, -1) if few else sorted({len(found), 1}, reverse=True):
            for vectors in combinations(found, n):
                yield rows | frozenset(vectors), True


def _trace_ones(fn: Callable[..., Any], args: Sequence[Any], ones: bool | None, rows: Rows) -> Traced:
    if ones is not None:
        return _trace(fn, args, ones, rows)
    if not any(args[k].shape[d] <= 1 for k, d in rows):
        return _trace(fn, args, False, rows)
    try:
        traced = _trace(fn, args, False, rows)
    except TraceError:
        if any(args[k].shape[d] == 0 for k, d in rows):  # with no row static nothing is computed: the last thing to try
            raise
        return _trace(fn, args, True, rows)
    sizes = sizes_of(traced, args)
    if sizes is None:
        return _trace(fn, args, True, rows)
    # a symbol stands for 2 rows or more, and a comparison with 1 (or a squeeze) leaves no guard: with 0 or 1 row the
    # function is traced as it is there too, and the rows' chain serves only where it is the same
    few = {s: n for s, n in sizes.items() if n <= 1}
    try:
        fixed = _trace(fn, args, True, rows)
    except TraceError:
        if 0 in few.values():  # views of no elements are ambiguous; nothing is computed from them
            return traced
        raise
    return traced if traced.chain.at(few) == fixed.chain else fixed


def _fake_args(
    args: Sequence[Any], env: ShapeEnv, mode: FakeTensorMode, ones: bool, rows: Rows
) -> tuple[list[Any], dict[str, str]]:
    from torch._dynamo.source import ConstantSource

    fakes: list[Any] = []
    where: dict[str, str] = {}
    for k, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            fakes.append(arg)
            continue
        if arg.layout != torch.strided or type(arg) not in (torch.Tensor, torch.nn.Parameter) or arg.is_quantized:
            raise TraceError(f"argument {k} is a {type(arg).__name__} of layout {arg.layout}: pass a plain strided tensor")
        if arg.dtype not in ops.STORAGE:
            raise TraceError(f"argument {k} has dtype {arg.dtype}: autofuse takes {', '.join(ops.STORAGE.values())}")
        dims: list[Any] = []
        for axis, n in enumerate(arg.shape):
            if (k, axis) not in rows or (ones and n <= 1):
                dims.append(int(n))
                continue
            source = ConstantSource(f"arg{k}_axis{axis}")
            symbol = env.create_symbol(HINT, source, dynamic_dim=DimDynamic.DYNAMIC)
            where[str(symbol)] = f"argument {k}, axis {axis}"
            dims.append(env.create_symintnode(symbol, hint=HINT, source=source))
        with mode:
            fakes.append(torch.empty(dims, dtype=arg.dtype, device=arg.device))
    return fakes, where


_LAYOUT = (torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.data_ptr)


_PRODUCTS = {
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "bilinear", "einsum",
    "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "tensordot", "inner", "outer", "chain_matmul",
}  # fmt: skip
_VALUES = {"item", "tolist", "__float__", "__int__", "__bool__", "__index__", "numpy"}


def _called_by_user(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and not internal(frame.f_code.co_filename)


class _Lines(TorchFunctionMode):
    """Notes the user's line of each call, for messages: fx copies `current_meta` to the nodes that the call makes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = inspect.currentframe()
        while frame is not None and internal(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            fx_traceback.current_meta["stack_trace"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        asked = getattr(func, "__name__", "")
        if asked in _PRODUCTS:
            raise UnsupportedOp(
                f"{asked}{at_line(fx_traceback.current_meta.get('stack_trace', ''))} is a matrix product, and no kernel kind makes "
                "one yet: keep it outside the function"
            )
        if asked in _VALUES and args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], FakeTensor):
            raise TraceError(
                f"{asked}{at_line(fx_traceback.current_meta.get('stack_trace', ''))} makes a number of a tensor that the function "
                "closes over, which would be frozen: keep it as a 0-d tensor"
            )
        if func in _LAYOUT and _called_by_user(sys._getframe(1)):
            raise TraceError(
                f"{asked}{at_line(fx_traceback.current_meta.get('stack_trace', ''))} asks how a tensor lies in memory: one "
                "chain serves every layout; keep this part outside the function"
            )
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return aten.contiguous.default(args[0])  # the method skips it, since fakes are; the arguments need not be
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs and warns while a trace fails is not the user's: our error says it in one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _trace(fn: Callable[..., Any], args: Sequence[Any], ones: bool, rows: Rows) -> Traced:
    env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes, where = _fake_args(args, env, mode, ones, rows)
    tensors = [k for k, a in enumerate(args) if isinstance(a, torch.Tensor)]
    spec: Any = None

    def flat(*given: Any) -> tuple[Any, ...]:
        nonlocal spec
        full = list(fakes)
        for k, t in zip(tensors, given, strict=True):
            full[k] = t
        leaves, spec = torch.utils._pytree.tree_flatten(fn(*full))
        return tuple(leaves)

    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        with mode, torch.no_grad(), _quiet(), fx_traceback.preserve_node_meta(), _Lines():
            gm = make_fx(flat, pre_dispatch=True, _allow_non_fake_inputs=True)(*[fakes[k] for k in tensors])
    except AutofuseError:
        raise
    except Exception as e:
        raise TraceError(_explain(name, e)) from e
    gathers = any(node.target is aten.gather.default for node in gm.graph.nodes)
    return Reader(name, env, gm, tensors, spec, _check_guards(name, env, where, gathers)).read()


def _user_line(e: BaseException) -> str:
    found, tb = "", e.__traceback__
    while tb is not None:
        if not internal(tb.tb_frame.f_code.co_filename):
            found = f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}"
        tb = tb.tb_next
    return found


def _explain(name: str, e: Exception) -> str:
    kind, text = type(e).__name__, str(e).strip().splitlines()[0] if str(e).strip() else ""
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError") or "item()" in text:
        return (
            f"{name}{at_line(_user_line(e))} depends on the values of a tensor ({text[:120]}): a chain has no data-dependent "
            "control flow; write it with torch.where, or keep this part outside the function"
        )
    return f"{name} cannot be traced{at_line(_user_line(e))}: {kind}: {text[:300]}"


def _check_guards(name: str, env: ShapeEnv, where: Mapping[str, str], gathers: bool) -> dict[str, str]:
    """An equality of two row counts is kept (the chain has one symbol for both); any other guard is an error.

    A gather takes an index of fewer rows too; a chain with one takes equal rows: symbols that are renamed are returned.
    """
    import sympy

    renamed: dict[str, str] = {}
    for guard in env.guards:
        expr = guard.expr
        if gathers and isinstance(expr, (sympy.Le, sympy.Ge)) and all(isinstance(env.replace(s), sympy.Symbol) for s in expr.args):
            a, b = (str(env.replace(s)) for s in expr.args)
            a, b = renamed.get(a, a), renamed.get(b, b)
            renamed |= {k: b for k in (a, *(k for k, v in renamed.items() if v == a)) if k != b}
            continue
        if isinstance(expr, sympy.Eq) and all(isinstance(side, sympy.Symbol) for side in expr.args):
            continue
        if env.replace(expr) in (sympy.true, True):
            continue
        names = ", ".join(where.get(str(s), str(s)) for s in sorted(expr.free_symbols, key=str))
        line = ""
        stack = getattr(getattr(guard, "sloc", None), "user_stack", None) or getattr(
            getattr(guard, "sloc", None), "framework_loc", None
        )
        if stack is not None:
            line = _stack_line(stack)
        raise TraceError(
            f"{name}{at_line(line)} decides by the size of a leading axis ({names}: {expr}): one chain serves every row "
            "count, so it may not branch on one; keep the branch outside the function"
        )
    for symbol, to in env.replacements.items():
        if not getattr(to, "free_symbols", None):
            raise TraceError(
                f"{name} works only where {where.get(str(symbol), symbol)} is {to}: a leading axis must take any size; "
                "keep this part outside the function"
            )
    return renamed


def _stack_line(stack: Any) -> str:
    found = ""
    for frame in [stack] if isinstance(stack, str) or hasattr(stack, "filename") else stack:
        path = getattr(frame, "filename", "")
        if path and not internal(path):
            found = f"{path}:{frame.lineno}"
    return found
