"""PyTorch's own decomposition of one composite operation, as a chain of operations of the table.

It is traced on float32 (or float64) fakes, so the casts that PyTorch puts into its decompositions for bf16 and fp16
never appear: inside a kernel they are no rounding points.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from . import ops, settings
from .chain import INPUT, Arg, Chain, Dim, Dtype, Ref, Size, Value, dim_factors, map_arg
from .errors import AutofuseError, TraceError, UnsupportedOp
from .files import publish
from .graph import Reader
from .version import kernel_source_hash


@lru_cache
def _table() -> dict[Any, Any]:
    known = {n for n, op in ops.OPS.items() if op.lower is not None or op.kind in ("reduction", "factory")}
    known |= {name.removeprefix("op_") for name in vars(Reader) if name.startswith("op_")}
    table = {
        overload: rule
        for overload, rule in torch._decomp.decomposition_table.items()
        if isinstance(overload, torch._ops.OpOverload) and overload._schema.name.removeprefix("aten::").rstrip("_") not in known
    }
    return table | {torch.ops.aten.native_group_norm.default: _group_norm}


def _group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n: int, channels: int, inner: int, groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """native_group_norm by index maps: PyTorch's rule goes through strides, which a chain does not have."""
    split = x.reshape(n, groups, channels // groups * inner)
    var, mean = torch.var_mean(split, -1, correction=0, keepdim=True)
    scale = torch.rsqrt(var + eps)
    y = ((split - mean) * scale).reshape(x.shape)
    one_a_channel = [channels, *(1 for _ in x.shape[2:])]
    y = y if weight is None else y * weight.reshape(one_a_channel)
    y = y if bias is None else y + bias.reshape(one_a_channel)
    return y, mean.squeeze(-1), scale.squeeze(-1)


def overload_of(op: str) -> Any:
    """The overload of a value's operation, ATen's or our own. Raises UnsupportedOp where there is none of that name."""
    namespace, name, overload = op.split(".")
    if namespace == "autofuse":
        from . import random  # noqa: F401 - registers it
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if found is None:
        raise UnsupportedOp(f"torch {torch.__version__} has no operation {op}")
    return found


_known: dict[str, Chain] = {}


def decompose(value: Value, reads: tuple[Value, ...]) -> Chain:
    """As `_decompose`, once for what is written the same (Python takes 0.0 for -0.0, and 1 for 1.0 and True), also by
    other processes: the first trace of a process costs a second."""
    key = repr((value, reads))
    if key not in _known:
        path = settings.read().cache / "decompositions" / f"{hashlib.sha256((_sources() + key).encode()).hexdigest()[:32]}.json"
        found = None
        with contextlib.suppress(OSError, ValueError, AutofuseError):  # not there, or not whole
            found = Chain.from_json(path.read_text())
        if found is None:
            found = _decompose(value, reads)
            text = found.to_json()
            with contextlib.suppress(OSError):  # a folder that cannot be written costs time
                publish(path, lambda p: _write(p, text))
        _known[key] = found
    return _known[key]


def _write(path: Path, text: str) -> None:
    path.write_text(text)


@lru_cache
def _sources() -> str:
    """What a decomposition depends on beside the operation: PyTorch's rules, and how we read what they trace to."""
    graph = Path(__file__).with_name("graph.py").read_bytes()
    return f"{torch.__version__} {kernel_source_hash()} {hashlib.sha256(graph).hexdigest()} "


def _decompose(value: Value, reads: tuple[Value, ...]) -> Chain:
    """The chain that computes `value` from `reads` (the values that it refers to, in order, as inputs).

    The chain's inputs are `reads`; its row symbols are named as theirs. Raises UnsupportedOp where PyTorch has no
    decomposition, or one that does not end in operations of the table.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    from .trace import HINT

    env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    nodes: dict[str, Any] = {}
    names: dict[str, str] = {}

    def size(dim: Dim) -> Any:
        number, symbols = dim_factors(dim)
        total: Any = number
        for s in symbols:
            if s not in nodes:
                source = ConstantSource(s)
                symbol = env.create_symbol(HINT, source, dynamic_dim=DimDynamic.DYNAMIC)
                names[str(symbol)] = s
                nodes[s] = env.create_symintnode(symbol, hint=HINT, source=source)
            total = nodes[s] if total == 1 and not isinstance(total, torch.SymInt) else total * nodes[s]
        return total

    double = "float64" in (value.dtype, *(r.dtype for r in reads))
    wide = torch.float64 if double else torch.float32
    fakes = []
    with mode:
        for r in reads:
            dtype = ops.TORCH[r.dtype]
            fakes.append(torch.empty([size(d) for d in r.shape], dtype=wide if dtype.is_floating_point else dtype))
    position = {ref: k for k, ref in enumerate(dict.fromkeys(value.refs))}
    overload = overload_of(value.op)

    def call(*given: torch.Tensor) -> Any:
        def leaf(arg: Arg) -> Any:
            if isinstance(arg, Ref):
                return given[position[arg.index]]
            if isinstance(arg, Size):
                return size(arg.dim)
            return ops.TORCH[arg.name] if isinstance(arg, Dtype) else arg

        args = [lists(map_arg(a, leaf)) for a in value.args]
        return (overload(*args, **{k: lists(map_arg(a, leaf)) for k, a in value.kwargs}),)

    try:
        with mode, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gm = make_fx(call, decomposition_table=_table(), _allow_non_fake_inputs=True)(*fakes)
        reader = Reader(value.name, env, gm, list(range(len(reads))), None, names)
        chain = reader.read_chain()
    except TraceError as e:
        raise UnsupportedOp(f"{value.op} has no kernel, nor has what PyTorch makes it of; keep it outside the function") from e
    except Exception as e:
        raise UnsupportedOp(f"{value.op} is not lowered: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
    for node in chain.values:
        if node.op == value.op or (node.op != INPUT and node.name not in ops.OPS):
            raise UnsupportedOp(f"{value.op} has no kernel yet; keep it outside the function")
    return chain


def lists(arg: Any) -> Any:
    """An argument as ATen takes it: lists in place of tuples."""
    return [lists(a) for a in arg] if isinstance(arg, tuple) else arg


def expand(chain: Chain) -> tuple[list[Value], list[int]]:
    """The chain's values with every composite replaced by its decomposition, and the outputs' numbers among them.

    The value that ends a decomposition has the composite's own dtype: it is a value of eager's, rounded where eager
    rounds; the ones inside are not.
    """
    made: list[Value] = []
    number: list[int] = []

    def shifted(arg: Arg, table: Sequence[int] | Mapping[int, int]) -> Arg:
        return map_arg(arg, lambda a: Ref(table[a.index]) if isinstance(a, Ref) else a)

    for value in chain.values:
        args = shifted(value.args, number)
        kwargs = tuple((k, shifted(a, number)) for k, a in value.kwargs)
        here = Value(value.op, args, kwargs, value.shape, value.dtype)
        entry = ops.OPS.get(value.name)
        if value.op == INPUT or (entry is not None and entry.kind != "composite"):
            made.append(here)
            number.append(len(made) - 1)
            continue
        refs = tuple(dict.fromkeys(here.refs))
        # decompose by shape and dtype alone: the numbers of the values it reads are renamed to 0, 1, ...
        rename = {r: k for k, r in enumerate(refs)}
        kwargs = tuple((k, shifted(a, rename)) for k, a in here.kwargs)
        plain = Value(here.op, shifted(here.args, rename), kwargs, here.shape, here.dtype)
        inner = decompose(plain, tuple(Value(INPUT, (), (), made[r].shape, made[r].dtype) for r in refs))
        table = list(refs)
        out = inner.outputs[0]
        for k in inner.nodes:
            v = inner.values[k]
            made.append(
                Value(
                    v.op,
                    shifted(v.args, table),
                    tuple((n, shifted(a, table)) for n, a in v.kwargs),
                    v.shape,
                    value.dtype if k == out else v.dtype,
                )
            )
            table.append(len(made) - 1)
        number.append(table[out])
    return made, [number[o] for o in chain.outputs]
