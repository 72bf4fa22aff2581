"""A traced graph of PyTorch's -> values of a chain: views brought to a few index maps, writes in place undone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import ops
from .chain import INPUT, Arg, Chain, Dim, Dtype, Ref, Size, Value, dim_factors, make_dim, map_arg
from .errors import TraceError, UnsupportedOp
from .traced import Binding, Traced

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten


_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


def internal(path: str) -> bool:
    return path.startswith(_INSIDE) or path.endswith("contextlib.py") or path.startswith("<")


def _line(node: torch.fx.Node) -> str:
    """The user's line that made a node, "file:line"."""
    return str(node.meta.get("stack_trace") or "")


def at_line(line: str) -> str:
    return f" at {line}" if line else ""


class Reader:
    """Turns a traced graph into values. `names` gives the row symbols other names than the shape environment's."""

    def __init__(
        self, name: str, env: ShapeEnv, gm: torch.fx.GraphModule, tensors: Sequence[int], spec: Any,
        names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.env, self.gm, self.tensors, self.spec = name, env, gm, tensors, spec
        self.names = names or {}
        self.values: list[Value] = []
        self.bindings: list[Binding] = []
        self.lines: dict[int, str] = {}
        self.of: dict[torch.fx.Node, Any] = {}  # value number, list of them, or a Dim for a size
        self.root: dict[int, int] = {}  # the value whose memory a view shows
        self.viewed: set[int] = set()
        self.constants: dict[int, int] = {}

    # ---- small pieces

    def dim(self, size: Any, node: torch.fx.Node) -> Dim:
        if isinstance(size, int):
            return size
        import sympy

        expr = self.env.replace(sympy.expand(size.node.expr if hasattr(size, "node") else size))
        number, symbols = 1, []
        for factor in sympy.Mul.make_args(expr):
            if factor.is_Integer:
                number *= int(factor)
            elif factor.is_Symbol:
                symbols.append(self.names.get(str(factor), str(factor)))
            elif factor.is_Pow and factor.exp.is_Integer and factor.exp > 0 and factor.base.is_Symbol:
                symbols += [self.names.get(str(factor.base), str(factor.base))] * int(factor.exp)
            else:
                raise UnsupportedOp(
                    f"{node.target} in {self.name}{at_line(_line(node))} makes a row count of {expr}: a chain keeps its "
                    "leading axes or multiplies them; slice and pad them outside the function"
                )
        return make_dim(number, symbols)

    def add(
        self, node: torch.fx.Node, op: str, args: Sequence[Arg], shape: Sequence[Dim], dtype: torch.dtype,
        kwargs: Mapping[str, Arg] | None = None,
    ) -> int:  # fmt: skip
        if dtype not in ops.STORAGE:
            raise UnsupportedOp(f"{node.target} in {self.name}{at_line(_line(node))} gives {dtype}: no kernel holds that type")
        kw = tuple(sorted((k, v) for k, v in (kwargs or {}).items() if v is not None))
        self.values.append(Value(op, tuple(args), kw, tuple(shape), ops.STORAGE[dtype]))
        number = len(self.values) - 1
        self.lines[number] = _line(node)
        self.root[number] = number
        return number

    def view(self, node: torch.fx.Node, op: str, source: int, args: Sequence[Arg], shape: Sequence[Dim]) -> int:
        v = self.values[source]
        number = self.add(node, op, (Ref(source), *args), shape, ops.TORCH[v.dtype])
        self.root[number] = self.root[source]
        self.viewed.add(self.root[source])
        return number

    def shape(self, node: torch.fx.Node) -> list[Dim]:
        return [self.dim(s, node) for s in node.meta["val"].shape]

    def arg(self, a: Any, node: torch.fx.Node) -> Arg:
        if isinstance(a, torch.fx.Node):
            got = self.of[a]
            if isinstance(got, list):
                return tuple(Ref(g) for g in got)
            if isinstance(got, Size):
                return got
            return Ref(got)
        if isinstance(a, (list, tuple)):
            return tuple(self.arg(x, node) for x in a)
        if isinstance(a, torch.dtype):
            if a not in ops.STORAGE:
                raise UnsupportedOp(f"{node.target} in {self.name}{at_line(_line(node))} asks for {a}: no kernel holds that type")
            return Dtype(ops.STORAGE[a])
        if isinstance(a, torch.SymInt):
            return Size(self.dim(a, node))
        if isinstance(a, (torch.SymFloat, torch.SymBool, complex)):
            raise UnsupportedOp(
                f"{node.target} in {self.name}{at_line(_line(node))} computes with a row count: pass it as a 0-d tensor"
            )
        if isinstance(a, (torch.device, torch.layout, torch.memory_format)):
            return None
        if a is None or isinstance(a, (bool, int, float, str)):
            return a
        raise UnsupportedOp(f"{node.target} in {self.name}{at_line(_line(node))} has an argument of type {type(a).__name__}")

    # ---- the walk

    def read_values(self) -> list[int]:
        """Fill `values`; the numbers of the outputs."""
        at = 0
        outputs: list[int] = []
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                self.of[node] = self.add(node, INPUT, (), [self.dim(s, node) for s in value.shape], value.dtype)
                self.bindings.append(Binding(self.tensors[at]))
                at += 1
            elif node.op == "get_attr":
                self.of[node] = self.constant(node)
            elif node.op == "call_function":
                self.of[node] = self.call(node)
            elif node.op == "output":
                for out in node.args[0]:
                    outputs.append(self.output(out, node))
        if not outputs:
            raise TraceError(f"{self.name} returns no tensor: a chain has at least one output")
        return outputs

    def read_chain(self) -> Chain:
        """The values as they are, inputs first: of a graph that closes over nothing."""
        outputs = self.read_values()
        return Chain(tuple(self.values), tuple(outputs))

    def read(self) -> Traced:
        """The canonical chain and its bindings."""
        outputs = self.read_values()
        # Chain.build brings the inputs to the front in order, closures' tensors among them
        return self.drop_unused(Chain.build(self.values, outputs), tuple(self.bindings))

    def drop_unused(self, chain: Chain, bindings: tuple[Binding, ...]) -> Traced:
        """An argument that is not read is no input; the row symbols that only it names go with it."""
        used = {i for i in range(chain.num_inputs) if chain.users[i] or i in chain.outputs}
        named = {s for i in used for d in chain.values[i].shape for s in dim_factors(d)[1]}
        for i in range(chain.num_inputs):  # one that is read for its shape only stays, for the row count that it carries
            mine = {s for d in chain.values[i].shape for s in dim_factors(d)[1]}
            if i not in used and mine - named and mine & _symbols_of(chain):
                used.add(i)
                named |= mine
        order = [i for i in range(len(chain.values)) if i >= chain.num_inputs or i in used]
        number = {old: new for new, old in enumerate(order)}

        def renumber(arg: Arg) -> Arg:
            if isinstance(arg, tuple):
                return tuple(renumber(a) for a in arg)
            return Ref(number[arg.index]) if isinstance(arg, Ref) else arg

        values = [
            Value(v.op, renumber(v.args), tuple((k, renumber(a)) for k, a in v.kwargs), v.shape, v.dtype)
            for v in (chain.values[i] for i in order)
        ]
        built = Chain.build(values, [number[o] for o in chain.outputs])
        return Traced(built, tuple(b for i, b in enumerate(bindings) if i in used), self.spec, self.lines_by_op())

    def lines_by_op(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for i, v in enumerate(self.values):
            if v.op != INPUT:
                found.setdefault(v.op, self.lines[i])
        return found

    def output(self, out: Any, node: torch.fx.Node) -> int:
        if not isinstance(out, torch.fx.Node) or not isinstance(self.of.get(out), int):
            what = type(out).__name__ if not isinstance(out, torch.fx.Node) else "a size"
            raise TraceError(f"{self.name} returns {what}: a chain returns tensors; return the rest outside the function")
        return int(self.of[out])

    def constant(self, node: torch.fx.Node) -> int:
        tensor = getattr(self.gm, str(node.target))
        if isinstance(tensor, FakeTensor):
            raise UnsupportedOp(
                f"{self.name} makes a tensor that it does not compute{at_line(_line(node))}: pass it as an argument"
            )
        if tensor.dtype not in ops.STORAGE:
            raise TraceError(f"{self.name} closes over a tensor of dtype {tensor.dtype}: no kernel holds that type")
        number = self.constants.get(id(tensor))
        if number is None:
            number = self.add(node, INPUT, (), [int(n) for n in tensor.shape], tensor.dtype)
            self.constants[id(tensor)] = number
            self.bindings.append(Binding(None, tensor))
        return number

    def call(self, node: torch.fx.Node) -> Any:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            import operator

            if target is operator.getitem:
                return self.of[node.args[0]][node.args[1]]  # type: ignore[index]
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                return Size(self.dim(value, node))
            if getattr(target, "__module__", "").startswith("torch") and "grad" in getattr(target, "__name__", ""):
                return None  # torch.no_grad() inside the function
            raise UnsupportedOp(f"{self.name}{at_line(_line(node))} calls {target}, which is no tensor operation")
        name = target._schema.name.removeprefix("aten::").removeprefix("autofuse::")
        if target.namespace == "prims" and (name in ops.OPS or name == "convert_element_type"):
            name = "to" if name == "convert_element_type" else name
        elif target.namespace not in ("aten", "autofuse"):
            raise UnsupportedOp(f"{target} in {self.name}{at_line(_line(node))} is not an ATen operation: no kernel kind lowers it")
        bound = _bind(target, node)
        if name in ("dropout", "rrelu") and not bound.get("train", bound.get("training", False)):
            return self.evaluated(node, name, bound)
        if torch.Tag.nondeterministic_seeded in target.tags:
            instead = "autofuse.dropout(x, p, seed)" if name in ("dropout", "native_dropout") else "autofuse.uniform(x, seed)"
            raise UnsupportedOp(
                f"{name} in {self.name}{at_line(_line(node))} is random: use {instead}, whose numbers a kernel can draw again, or "
                "draw them outside and pass them in"
            )
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and name in ("sym_size", "sym_numel", "sym_stride"):
            return Size(self.dim(value, node))
        if name == "detach_":
            return int(self.of[bound["self"]])
        if name.endswith("_") and not name.endswith("__") and not name.startswith("_"):
            return self.inplace(node, target, name, bound)
        return self.functional(node, target, name, bound)

    def evaluated(self, node: torch.fx.Node, name: str, bound: dict[str, Any]) -> int:
        """An operation that is random in training only, as it is in evaluation."""
        if name == "dropout":
            return int(self.of[bound["input"]])
        slope = (bound.get("lower", 1 / 8) + bound.get("upper", 1 / 3)) / 2
        source = self.of[bound["self"]]
        return self.add(node, "aten.leaky_relu.default", (Ref(source), slope), self.shape(node), node.meta["val"].dtype)

    def inplace(self, node: torch.fx.Node, target: Any, name: str, bound: dict[str, Any]) -> int:
        first = next(iter(bound.values()))
        number = self.of[first]
        base = self.root[number]
        if self.values[base].op == INPUT:
            raise TraceError(
                f"{name} in {self.name}{at_line(_line(node))} writes into an input: use its form without the underscore"
            )
        if base != number or base in self.viewed:
            raise TraceError(
                f"{name} in {self.name}{at_line(_line(node))} writes through a view, or into a tensor that a view shows: "
                "use its form without the underscore"
            )
        v = self.values[number]
        if name == "copy_":
            cast = self.add(
                node,
                "aten.to.dtype",
                (self.arg(bound["src"], node), Dtype(v.dtype)),
                self.values[self.of[bound["src"]]].shape,
                ops.TORCH[v.dtype],
            )
            made = cast
            if self.values[cast].shape != v.shape:
                wide = (Ref(cast), tuple(Size(d) for d in v.shape))
                made = self.add(node, "aten.expand.default", wide, v.shape, ops.TORCH[v.dtype])
                made = self.add(node, "aten.contiguous.default", (Ref(made),), v.shape, ops.TORCH[v.dtype])
        elif name in ("zero_", "fill_"):
            fill = 0 if name == "zero_" else self.arg(bound["value"], node)
            made = self.add(node, "aten.full_like.default", (Ref(number), fill), v.shape, ops.TORCH[v.dtype])
        else:
            functional = _without_writing(target, name[:-1])
            if functional is None:
                raise UnsupportedOp(f"{name} in {self.name}{at_line(_line(node))} has no form without writing in place")
            made = self.functional(node, functional, name[:-1], bound)
            if self.values[made].dtype != v.dtype:
                made = self.add(node, "aten.to.dtype", (Ref(made), Dtype(v.dtype)), v.shape, ops.TORCH[v.dtype])
        for other, held in self.of.items():  # detach() and the like gave the same tensor another name
            if isinstance(held, int) and held == number:
                self.of[other] = made
        return made

    def functional(self, node: torch.fx.Node, target: Any, name: str, bound: dict[str, Any]) -> Any:
        value = node.meta.get("val")
        handler = getattr(self, "op_" + name, None)
        if handler is not None:
            return handler(node, bound)
        if name in ("item", "_local_scalar_dense"):
            raise TraceError(
                f"{name} in {self.name}{at_line(_line(node))} makes a number of a tensor's value, which a chain cannot depend "
                "on: keep it as a 0-d tensor"
            )
        if target._schema.returns and target._schema.returns[0].alias_info is not None:
            raise UnsupportedOp(
                f"{name} in {self.name}{at_line(_line(node))} gives a view that is no index map yet: use reshape, transpose, slices"
            )
        if not isinstance(value, torch.Tensor):
            raise UnsupportedOp(
                f"{name} in {self.name}{at_line(_line(node))} gives {type(value).__name__}: no kernel kind lowers it yet; "
                "keep it outside the function"
            )
        if name not in ops.OPS and not any(isinstance(a, torch.fx.Node) for a in torch.utils._pytree.tree_leaves(bound)):
            raise UnsupportedOp(
                f"{name} in {self.name}{at_line(_line(node))} makes a tensor of its own, as no kernel does yet: make it "
                "outside the function and pass it in"
            )
        required = [p for p in target._schema.arguments if not p.kwarg_only]
        args = [self.arg(bound[p.name], node) for p in required if p.name in bound]
        extents = ("normalized_shape", "size", *(("end",) if name == "arange" else ()))
        args = [_sizes(a) if p.name in extents else a for a, p in zip(args, required, strict=False)]
        kwargs = {p.name: self.arg(bound[p.name], node) for p in target._schema.arguments if p.kwarg_only and p.name in bound}
        for drop in ("device", "layout", "pin_memory", "memory_format", "generator"):
            kwargs.pop(drop, None)
        if name == "rms_norm" and bound.get("eps") is None:
            # eager's default is the epsilon of the type it computes in; spelled out, it does not change with the oracle's
            wide = value.dtype if value.dtype == torch.float64 else torch.float32
            args = [*args[:2], *(args[2:3] or [None]), torch.finfo(wide).eps]
        overload = f"{'autofuse' if target.namespace == 'autofuse' else 'aten'}.{name}.{target._overloadname}"
        if name in ops.OPS and ops.OPS[name].kind == "view":
            raise UnsupportedOp(f"{overload} in {self.name}{at_line(_line(node))} is a view that is not an index map yet")
        return self.add(node, overload, args, self.shape(node), value.dtype, kwargs)

    # ---- views, brought to reshape, permute, slice, select, expand and cat

    def _reshape(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[next(iter(bound.values()))]
        return self.reshaped(node, source, self.shape(node))

    def reshaped(self, node: torch.fx.Node, source: int, shape: Sequence[Dim]) -> int:
        if tuple(shape) == self.values[source].shape:
            return int(source)
        return self.view(node, "aten.reshape.default", source, (tuple(Size(d) for d in shape),), shape)

    def op_view(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        if "dtype" in bound:
            raise UnsupportedOp(f"{node.target} in {self.name}{at_line(_line(node))} reads the bits of a tensor as another type")
        return self._reshape(node, bound)

    op_reshape = op__unsafe_view = op_unflatten = op_flatten = op_squeeze = op_unsqueeze = _reshape
    op_view_as = op_reshape_as = op_ravel = _reshape

    def _identity(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        return int(self.of[next(iter(bound.values()))])

    op_detach = op_alias = op_lift_fresh = op_lift_fresh_copy = op_conj = op_resolve_conj = op_resolve_neg = _identity
    op_positive = op_real = _identity

    def op_contiguous(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        return self.view(node, "aten.contiguous.default", source, (), self.values[source].shape)

    def op_clone(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        return self.add(node, "aten.clone.default", (Ref(source),), self.values[source].shape, ops.TORCH[self.values[source].dtype])

    def _permuted(self, node: torch.fx.Node, source: int, order: Sequence[int]) -> int:
        shape = [self.values[source].shape[i] for i in order]
        if list(order) == list(range(len(order))):
            return source
        return self.view(node, "aten.permute.default", source, (tuple(order),), shape)

    def op_permute(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        n = len(self.values[source].shape)
        return self._permuted(node, source, [d % n for d in bound["dims"]])

    def op_transpose(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        n = len(self.values[source].shape)
        order = list(range(n))
        if n:
            a, b = (bound[k] % n for k in (("dim0", "dim1") if "dim0" in bound else ("axis0", "axis1")))
            order[a], order[b] = order[b], order[a]
        return self._permuted(node, source, order)

    op_swapaxes = op_swapdims = op_transpose

    def _t(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        n = len(self.values[source].shape)
        order = list(range(n))
        if n >= 2:
            order[-1], order[-2] = order[-2], order[-1]
        return self._permuted(node, source, order)

    op_t = op_numpy_T = op_mT = op_matrix_H = op_adjoint = op_mH = _t

    def op_movedim(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        n = len(self.values[source].shape)
        src, dst = (
            [d % n for d in ([dims] if isinstance(dims, int) else dims)] for dims in (bound["source"], bound["destination"])
        )
        rest = iter([d for d in range(n) if d not in src])
        place = dict(zip(dst, src, strict=True))
        return self._permuted(node, source, [place[i] if i in place else next(rest) for i in range(n)])

    op_moveaxis = op_movedim

    def op_expand(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        shape = self.shape(node)
        if tuple(shape) == self.values[source].shape:
            return int(source)
        return self.view(node, "aten.expand.default", source, (tuple(Size(d) for d in shape),), shape)

    op_expand_as = op_broadcast_to = op_expand

    def op_broadcast_tensors(self, node: torch.fx.Node, bound: dict[str, Any]) -> list[int]:
        shape = [self.dim(s, node) for s in node.meta["val"][0].shape]
        sources = [self.of[t] for t in bound["tensors"]]
        sizes = (tuple(Size(d) for d in shape),)
        return [
            s if tuple(shape) == self.values[s].shape else self.view(node, "aten.expand.default", s, sizes, shape) for s in sources
        ]

    def sliced(self, node: torch.fx.Node, source: int, dim: int, start: int, length: int, step: int = 1) -> int:
        shape = list(self.values[source].shape)
        if not isinstance(shape[dim], int):
            raise UnsupportedOp(
                f"{node.target} in {self.name}{at_line(_line(node))} cuts a leading axis: slices are of the last, static axis; "
                "cut rows outside the function"
            )
        if start == 0 and step == 1 and length == shape[dim]:
            return source
        end = start + step * (length - 1) + 1 if length else start
        shape[dim] = length
        args = (dim, Size(start), Size(end), step)
        return self.view(node, "aten.slice.Tensor", source, args, shape)

    def op_slice(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        shape = self.values[source].shape
        dim = bound.get("dim", 0) % len(shape)
        n, step = shape[dim], bound.get("step", 1)
        start, end = bound.get("start"), bound.get("end")
        if tuple(self.shape(node)) == shape and step == 1:
            return int(source)
        if not isinstance(n, int) or not all(x is None or isinstance(x, int) for x in (start, end)):
            return self.sliced(node, source, dim, 1, 0)
        first, last, _ = slice(start, None if end is None or end > n else end).indices(n)
        return self.sliced(node, source, dim, first, max(0, -(-(last - first) // step)), step)

    def op_narrow(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        shape = self.values[source].shape
        dim = bound["dim"] % len(shape)
        start = bound["start"]
        if not isinstance(shape[dim], int) or not isinstance(start, int) or not isinstance(bound["length"], int):
            return self.sliced(node, source, dim, 1, 0)
        return self.sliced(node, source, dim, start % shape[dim] if start < 0 else start, bound["length"])

    def op_select(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        shape = self.values[source].shape
        dim, index = bound["dim"] % len(shape), bound["index"]
        n = shape[dim]
        if not isinstance(index, int) or (index < 0 and not isinstance(n, int)):
            raise UnsupportedOp(
                f"select in {self.name}{at_line(_line(node))} takes a row by a varying index: do it outside the function"
            )
        return self.selected(node, source, dim, index % n if isinstance(n, int) else index)

    def selected(self, node: torch.fx.Node, source: int, dim: int, index: int) -> int:
        shape = list(self.values[source].shape)
        del shape[dim]
        return self.view(node, "aten.select.int", source, (dim, index), shape)

    def op_gather(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source, index = self.of[bound["self"]], self.of[bound["index"]]
        dim = bound["dim"] % max(1, len(self.values[source].shape))
        dtype = ops.TORCH[self.values[source].dtype]
        return self.add(node, "aten.gather.default", (Ref(source), dim, Ref(index)), self.shape(node), dtype)

    def _pieces(self, node: torch.fx.Node, bound: dict[str, Any]) -> list[int]:
        source = self.of[bound["self"]]
        dim = bound.get("dim", 0) % len(self.values[source].shape)
        lengths = [self.dim(t.shape[dim], node) for t in node.meta["val"]]
        made, start = [], 0
        for length in lengths:
            if not isinstance(length, int):
                self.sliced(node, source, dim, 1, 0)
            made.append(self.sliced(node, source, dim, start, int(length)))
            start += int(length)
        return made

    op_chunk = op_split = op_split_with_sizes = op_tensor_split = _pieces

    def op_unbind(self, node: torch.fx.Node, bound: dict[str, Any]) -> list[int]:
        source = self.of[bound["self"]]
        dim = bound.get("dim", 0) % len(self.values[source].shape)
        return [self.selected(node, source, dim, i) for i in range(len(node.meta["val"]))]

    def _cat(self, node: torch.fx.Node, parts: Sequence[int], dim: int, dtype: torch.dtype) -> int:
        shape = self.shape(node)
        if len(parts) == 1:  # a copy, as eager's is
            return self.add(node, "aten.clone.default", (Ref(parts[0]),), self.values[parts[0]].shape, dtype)
        if any(not isinstance(self.values[p].shape[dim], int) for p in parts):
            raise UnsupportedOp(f"cat in {self.name}{at_line(_line(node))} joins leading axes: join them outside the function")
        return self.add(node, "aten.cat.default", (tuple(Ref(p) for p in parts), dim), shape, dtype)

    def op_cat(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        parts = [self.of[t] for t in bound["tensors"]]
        out = node.meta["val"]
        parts = [p for p in parts if self.values[p].shape != (0,)]  # torch skips an empty 1-D part
        return self._cat(node, parts, bound.get("dim", 0) % out.dim(), out.dtype)

    op_concat = op_concatenate = op_cat

    def op_stack(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        out = node.meta["val"]
        dim = bound.get("dim", 0) % out.dim()
        parts = []
        for t in bound["tensors"]:
            source = self.of[t]
            shape = list(self.values[source].shape)
            shape.insert(dim, 1)
            parts.append(self.reshaped(node, source, shape))
        return self._cat(node, parts, dim, out.dtype)

    # ---- casts and pairs

    def _cast(self, node: torch.fx.Node, bound: dict[str, Any]) -> int:
        source = self.of[bound["self"]]
        dtype = node.meta["val"].dtype
        same = ops.STORAGE.get(dtype) == self.values[source].dtype
        if same and (bound.get("copy") or node.target is aten._to_copy.default):
            return self.add(node, "aten.clone.default", (Ref(source),), self.values[source].shape, dtype)
        if same and self.values[self.root[source]].op == INPUT:
            return int(source)  # eager returns the tensor itself, and an input's values are of that dtype already
        if dtype not in ops.STORAGE:
            raise UnsupportedOp(f"{node.target} in {self.name}{at_line(_line(node))} casts to {dtype}: no kernel holds that type")
        made = self.add(node, "aten.to.dtype", (Ref(source), Dtype(ops.STORAGE[dtype])), self.values[source].shape, dtype)
        if ops.STORAGE[dtype] == self.values[source].dtype:  # the tensor itself: a write into one is a write into both
            self.root[made] = self.root[source]
            self.viewed.add(self.root[source])
        return made

    op_to = op__to_copy = op_type_as = op_float = op_half = op_bfloat16 = op_double = op_int = op_long = op_bool = _cast

    def _pair(self, node: torch.fx.Node, bound: dict[str, Any], names: Sequence[str]) -> list[int]:
        source = self.of[bound["self"]]
        if bound.get("dim") is None:
            raise UnsupportedOp(f"{node.target} in {self.name}{at_line(_line(node))} reduces every axis: give it dim=-1")
        keep = bool(bound.get("keepdim", False))
        dims: Arg = bound["dim"] if isinstance(bound["dim"], int) else tuple(bound["dim"])
        made = []
        for name, t in zip(names, node.meta["val"], strict=True):
            shape = [self.dim(s, node) for s in t.shape]
            overload = {"amax": "default", "amin": "default", "argmax": "default", "argmin": "default", "mean": "dim"}.get(
                name, "correction"
            )
            many = dims if name in ("argmax", "argmin") else (dims if isinstance(dims, tuple) else (dims,))
            args = (Ref(source), many) if name == "var" or name == "std" else (Ref(source), many, keep)
            kw = (
                {"correction": bound.get("correction", int(bool(bound.get("unbiased", True)))), "keepdim": keep}
                if name in ("var", "std")
                else {}
            )
            made.append(self.add(node, f"aten.{name}.{overload}", args, shape, t.dtype, kw))
        return made

    def op_max(self, node: torch.fx.Node, bound: dict[str, Any]) -> Any:
        return self._extreme(node, bound, "max")

    def op_min(self, node: torch.fx.Node, bound: dict[str, Any]) -> Any:
        return self._extreme(node, bound, "min")

    def _extreme(self, node: torch.fx.Node, bound: dict[str, Any], which: str) -> Any:
        out = node.meta["val"]
        if "dim" in bound:
            return self._pair(node, bound, ["a" + which, "arg" + which])
        if "other" in bound:
            args = (self.arg(bound["self"], node), self.arg(bound["other"], node))
            return self.add(node, f"aten.{which}imum.default", args, self.shape(node), out.dtype)
        return self.add(node, f"aten.a{which}.default", (self.arg(bound["self"], node), (), False), self.shape(node), out.dtype)

    def op_var_mean(self, node: torch.fx.Node, bound: dict[str, Any]) -> list[int]:
        return self._pair(node, bound, ["var", "mean"])

    def op_std_mean(self, node: torch.fx.Node, bound: dict[str, Any]) -> list[int]:
        return self._pair(node, bound, ["std", "mean"])


def _symbols_of(chain: Chain) -> set[str]:
    """The row symbols that the operations' shapes name."""
    return {s for i in chain.nodes for d in chain.values[i].shape for s in dim_factors(d)[1]}


def _sizes(arg: Arg) -> Arg:
    """Ints that are extents, as such: the structure does not depend on their values."""
    return map_arg(arg, lambda a: Size(a) if isinstance(a, int) and not isinstance(a, bool) else a)


def _without_writing(target: Any, name: str) -> Any:
    """The overload of an operation that takes what its in-place form takes, or None."""
    packet = getattr(aten, name, None)
    takes = [str(a.type) for a in target._schema.arguments]
    for overload in () if packet is None else (target._overloadname, *packet.overloads()):
        found = getattr(packet, overload, None)
        if found is not None and [str(a.type) for a in found._schema.arguments] == takes:
            return found
    return None


def _bind(target: Any, node: torch.fx.Node) -> dict[str, Any]:
    """The call's arguments by the schema's names; those left at their default are absent."""
    bound: dict[str, Any] = {}
    for parameter, value in zip(target._schema.arguments, node.args, strict=False):
        bound[parameter.name] = value
    bound.update(node.kwargs)
    return bound
