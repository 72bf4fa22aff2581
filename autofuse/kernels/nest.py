"""A whole C function from a segment and its knobs: rows shared out among OpenMP threads, columns in vectorised loops.

Passes over a row's columns come one a reduction level. A value that several passes need is computed again, or kept in a
row buffer per thread (the `keep` knob): recomputing an exp costs more than a load from the first-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..errors import Infeasible
from .base import Knob, Knobs, Launch, Source, Space, Task
from .c_text import COMPUTE, PRELUDE, STORAGE, CPrinter, identity
from .choices import default_math, legal_stores, widest
from .expr import Expr, children, walk
from .layout import Addressing
from .roles import Store

COSTLY = {"exp", "exp2", "log", "log2", "sin", "cos", "erf", "div", "sqrt", "rsqrt", "fmod"}
SUM_BLOCK = 2048  # columns summed in one go: partial sums keep fp32 accurate on long rows


def cpu_space(kind: str, version: int, task: Task) -> Space:
    """The knobs of the C kernels, for both kinds."""
    threads = tuple(sorted({1, task.limits.threads} | {t for t in (2, 4, 8, 16, 32, 64) if t < task.limits.threads}))
    cols = widest(task)
    knobs = [
        Knob("threads", threads),
        Knob("row_block", (1, 4, 16, 64)),
        Knob("vector", (256, 512)),
        Knob("math", ("exact", "fast")),
    ]
    if task.low.reduced:
        knobs[1] = Knob("chunks", tuple(dict.fromkeys((1, *(threads[-1] * k for k in (1, 2, 4, 8, 16, 32))))))
    if task.low.reduces:
        knobs.append(Knob("keep", ("none", "costly", "all")))
    elif not task.layout.flat:
        knobs.append(Knob("chunk_cols", (*(c for c in (1024, 4096, 16384) if c < cols), 0)))
    else:
        knobs.append(Knob("block", (4096, 16384, 65536)))
    return Space(kind, version, tuple(knobs))


def cpu_seed(task: Task) -> dict[str, int | str]:
    """A good C schedule without any search."""
    cols = sum(prod(int(task.low.extents[a]) for a in s) for s in task.low.spaces) or 1
    small = task.rows * cols < 16384
    made: dict[str, int | str] = {
        "threads": 1 if small else task.limits.threads,
        "row_block": 4,
        "vector": 256,
        "math": default_math(task),
    }
    if task.low.reduced:
        del made["row_block"]
        # a chunk of few rows would cost more to join than to compute
        most = task.limits.threads * 32
        made["chunks"] = next((c for c in (task.limits.threads * k for k in (1, 2, 4, 8, 16)) if task.rows <= c * 64), most)
    if task.low.reduces:
        made["keep"] = "costly"
    elif not task.layout.flat:
        made["chunk_cols"] = 0
    else:
        made["block"] = 16384
    return made


class Nest:
    """Assembles one C function."""

    def __init__(self, task: Task, knobs: Knobs) -> None:
        self.task, self.low, self.knobs = task, task.low, knobs
        self.addressing = Addressing(task.low, task.layout)
        self.math = str(knobs["math"])
        self.stores = self._writes()
        self.p = CPrinter(task.low, self.addressing, self.math)
        self.keep = str(knobs.get("keep", "none"))
        self.buffers: dict[int, tuple[str, str, int]] = {}  # expression -> (name, dtype, elements)
        for e in walk([v for _, v in self.stores]):
            if e.op == "reduce":
                self._home(e)

    def _writes(self) -> list[tuple[Store, Expr]]:
        """What a row writes."""
        return legal_stores(self.low, self.math, False)

    def _write(self, store: Store, value: Expr) -> None:
        self.p.store(store, value)

    # ---- structure

    def _home(self, r: Expr) -> tuple[tuple[str, ...], int]:
        """The space of a reduction and the depth it is computed at: inside the loops over the space's outer axes."""
        axes = r.attr[1]
        space = self.p.space(r.args[0])
        assert space is not None
        depth = len(space) - len(axes)
        if set(space[depth:]) != set(axes):
            raise Infeasible("a reduction over outer columns only")
        return space, depth

    def _below(self, roots: Sequence[Expr]) -> list[Expr]:
        """The reductions under the roots that are not computed yet, arguments first."""
        found: list[Expr] = []
        seen: set[int] = set()

        def visit(e: Expr) -> None:
            if e.number in seen or self.p.known(e) is not None:
                return
            seen.add(e.number)
            for c in children(e):
                visit(c)
            if e.op == "reduce":
                found.append(e)

        for r in roots:
            visit(r)
        return found

    def _levels(self, reduces: Sequence[Expr]) -> dict[int, int]:
        """For each reduction how many of the others it waits for in a row."""
        mine = {r.number for r in reduces}
        level: dict[int, int] = {}
        for e in walk(list(reduces)):
            under = max((level[c.number] for c in children(e)), default=0)
            level[e.number] = under + (e.number in mine)
        return level

    def _scope(
        self, space: tuple[str, ...], depth: int, writes: Sequence[tuple[Store, Expr]], accs: Sequence[tuple[Expr, str]]
    ) -> None:
        """Inside the loops over `space[:depth]`: first the reductions that live here, then what was asked for."""
        roots = [v for _, v in writes] + [r.args[0] for r, _ in accs]
        pending = [r for r in self._below(roots) if self._home(r) == (space, depth)]
        level = self._levels(pending)
        for k in range(1, max((level[r.number] for r in pending), default=0) + 1):
            self._pass(space, depth, [r for r in pending if level[r.number] == k], [])
        self._run(space, depth, writes, accs)

    def _pass(self, space: tuple[str, ...], depth: int, reduces: Sequence[Expr], writes: Sequence[tuple[Store, Expr]]) -> None:
        """One pass over `space[depth:]` that computes some reductions and does some writes."""
        accs = []
        for r in reduces:
            name = self.p.fresh("s")
            self.p.line(f"{COMPUTE[r.dtype]} {name} = {identity(r.attr[0], r.dtype)};")
            accs.append((r, name))
        self._run(space, depth, writes, accs)
        for r, name in accs:
            self.p.define(r, name)

    def _run(
        self, space: tuple[str, ...], depth: int, writes: Sequence[tuple[Store, Expr]], accs: Sequence[tuple[Expr, str]]
    ) -> None:
        if not writes and not accs:
            return
        p, axis = self.p, space[depth]
        n = self.low.extent(axis)
        self._hoist([v for _, v in writes] + [r.args[0] for r, _ in accs], space[:depth])
        if depth < len(space) - 1:
            var = p.fresh("c")
            p.line(f"for (int64_t {var} = 0; {var} < {n}; ++{var}) {{")
            with p.scope():
                p.column[axis] = var
                self._at(space[: depth + 1])
                inner = set(space[depth + 1 :])
                deep = [(s, v) for s, v in writes if inner & (s.access.axes | v.axes)]
                flat = [w for w in writes if w not in deep]
                deep_accs = [(r, a) for r, a in accs if inner & r.args[0].axes]
                flat_accs = [w for w in accs if w not in deep_accs]
                roots = [v for _, v in flat] + [r.args[0] for r, _ in flat_accs]
                pending = [
                    r
                    for r in self._below([*roots, *(v for _, v in deep), *(r.args[0] for r, _ in deep_accs)])
                    if self._home(r) == (space, depth + 1)
                ]
                level = self._levels(pending)
                for k in range(1, max((level[r.number] for r in pending), default=0) + 1):
                    self._pass(space, depth + 1, [r for r in pending if level[r.number] == k], [])
                self._run(space, depth + 1, deep, deep_accs)
                for r, a in flat_accs:
                    self._accumulate(a, r)
                for s, v in flat:
                    self._write(s, v)
            p.line("}")
            return
        self._innermost(space, axis, n, writes, accs)

    def _innermost(
        self, space: tuple[str, ...], axis: str, n: int, writes: Sequence[tuple[Store, Expr]], accs: Sequence[tuple[Expr, str]]
    ) -> None:
        p = self.p
        blocked = [(r, a) for r, a in accs if r.attr[0] == "sum" and n > SUM_BLOCK]
        low, high = "0", str(n)
        if blocked:
            start = p.fresh("b")
            p.line(f"for (int64_t {start} = 0; {start} < {n}; {start} += {SUM_BLOCK}) {{")
            p.depth += 1
            low, high = start, f"({start} + {SUM_BLOCK} < {n} ? {start} + {SUM_BLOCK} : {n})"
        inner = {a: a for _, a in accs}
        for r, a in blocked:
            inner[a] = p.fresh("s")
            p.line(f"{COMPUTE[r.dtype]} {inner[a]} = 0;")
        lower, upper = low, high
        if self.chunk is not None and space == self.low.spaces[0]:
            lower, upper = self.chunk
        var = p.fresh("c")
        clauses = ""
        for r, a in accs:
            sign = {"sum": "+", "prod": "*"}.get(r.attr[0], r.attr[0])
            clauses += f" reduction({sign}:{inner[a]})"
        plain = not writes and all(r.attr[0] in ("max", "min") and r.dtype in ("int32", "int64") for r, _ in accs)
        if not plain:  # an integer extreme alone is vectorised in registers; told to, gcc keeps it in an array of lanes
            p.line(f"#pragma omp simd{clauses}")
        p.line(f"for (int64_t {var} = {lower}; {var} < {upper}; ++{var}) {{")
        with p.scope():
            p.column[axis] = var
            self._enter(space)
            for r, a in accs:
                self._accumulate(inner[a], r)
            for s, v in writes:
                self._write(s, v)
            for e in walk([v for _, v in writes] + [r.args[0] for r, _ in accs]):
                if e.number not in self.buffers or self._buffer_space[e.number] != space or p.known(e) is None:
                    continue
                name = self.buffers[e.number][0]
                if name not in self.filled:
                    p.line(f"{name}[{self._linear(space)}] = {p.name(e)};")
                    self.just_filled.add(name)
        p.line("}")
        if blocked:
            for _, a in blocked:
                p.line(f"{a} += {inner[a]};")
            p.depth -= 1
            p.line("}")
        self.filled |= self.just_filled
        self.just_filled.clear()

    def _at(self, columns: tuple[str, ...]) -> None:
        """Inside the loops over these columns: what has a place among them may be named here."""

    def _enter(self, space: tuple[str, ...]) -> None:
        """Inside the loops over all of a space: what lies in buffers over it has a name here."""
        self._at(space)
        for number, (name, _, _) in self.buffers.items():
            if name in self.filled and self._buffer_space[number] == space:
                self.p.scopes[-1][number] = f"{name}[{self._linear(space)}]"

    def _linear(self, space: tuple[str, ...]) -> str:
        text = ""
        for a in space:
            text = self.p.column[a] if not text else f"({text}) * {self.low.extent(a)} + {self.p.column[a]}"
        return text

    def _accumulate(self, acc: str, r: Expr) -> None:
        self.p.accumulate(acc, r.attr[0], self.p.name(r.args[0]))

    def _hoist(self, roots: Sequence[Expr], outer: Sequence[str]) -> None:
        """What does not vary inside a loop is printed before it."""
        p, allowed = self.p, set(outer)
        ready: set[int] = set()
        for e in walk(roots):
            cols = {a for a in e.axes if a in p.space_of}
            if e.op == "reduce":
                if p.known(e) is not None:
                    ready.add(e.number)
                continue
            if cols <= allowed and all(c.number in ready for c in children(e)):
                ready.add(e.number)
                if e.op != "const":
                    p.name(e)

    # ---- one row

    def _row(self) -> None:
        low = self.low
        everything = [v for _, v in self.stores]
        reduces = [r for r in self._below(everything) if self._home(r)[1] == 0]
        level = self._levels(reduces)
        depth_of = {e.number: level_under(e, level) for e in walk(everything)}
        passes: list[tuple[tuple[str, ...], list[Expr], list[tuple[Store, Expr]]]] = []
        left = list(self.stores)
        for k in range(1, max((level[r.number] for r in reduces), default=0) + 2):
            for space in low.spaces:
                mine = [r for r in reduces if level[r.number] == k and self._home(r)[0] == space]
                writes = [(s, v) for s, v in left if depth_of[v.number] < k and self._space_of(s) == space]
                left = [w for w in left if w not in writes]
                if mine or writes:
                    passes.append((space, mine, writes))
        self._plan_buffers(passes)
        for space, mine, writes in passes:
            roots = [v for _, v in writes] + [r.args[0] for r in mine]
            deeper = [r for r in self._below(roots) if self._home(r)[1] == 0 and r not in mine]
            assert not deeper, "a pass before its reductions"
            self._pass(space, 0, mine, writes)
        for s, v in left:
            self._write(s, v)

    def _space_of(self, store: Store) -> tuple[str, ...] | None:
        return next((self.p.space_of[c] for c in store.access.axes if c in self.p.space_of), None)

    def _plan_buffers(self, passes: Sequence[tuple[tuple[str, ...], list[Expr], list[tuple[Store, Expr]]]]) -> None:
        """Which values go into row buffers: those that two passes over the same columns both need, root-most."""
        self.filled: set[str] = set()
        self.just_filled: set[str] = set()
        self._buffer_space: dict[int, tuple[str, ...]] = {}
        if self.keep == "none":
            return
        seen: dict[int, int] = {}
        first: dict[int, Expr] = {}
        needed: list[set[int]] = []
        for space, mine, writes in passes:
            found: set[int] = set()
            stack = [v for _, v in writes] + [r.args[0] for r in mine]
            while stack:
                e = stack.pop()
                if e.number in found or e.op == "reduce":
                    continue
                found.add(e.number)
                first[e.number] = e
                stack.extend(children(e))
            for number in found:
                if set(space) <= first[number].axes and first[number].axes & set(self.low.rows):
                    seen[number] = seen.get(number, 0) + 1
            needed.append(found)
        shared = {n for n, count in seen.items() if count > 1 and first[n].op not in ("load", "const", "index")}
        inside = {c.number for n in shared for c in walk([first[n]]) if c.number != n}
        # a value under another shared one is needed by itself only where a pass uses it outside of that one
        roots = set()
        for n in shared:
            users = [e for e in first.values() if any(c.number == n for c in children(e)) and e.number not in shared]
            if n not in inside or users:
                roots.add(n)
        for n in sorted(roots):
            e = first[n]
            cost = sum(c.op in COSTLY for c in walk([e]))
            if (self.keep == "all" or cost) and e.dtype in ("float32", "float64"):
                own = self.p.space(e)
                assert own is not None
                self.buffers[n] = (f"buf{len(self.buffers)}", e.dtype, prod(self.low.extent(a) for a in own))
                self._buffer_space[n] = own

    # ---- the function

    chunk: tuple[str, str] | None = None

    def source(self) -> Source:
        p, low = self.p, self.low
        flat = self.task.layout.flat and not low.reduces and bool(low.spaces)
        self.filled, self.just_filled, self._buffer_space = set(), set(), {}
        p.depth = 3
        body = self._flat() if flat else self._rows()
        args = dict(self.addressing.args)
        if flat:
            args["numel"] = ("numel",)
        chain = low.chain
        head = ["void kernel(void **in, void **out, const int64_t *a, int64_t threads) {"]
        head += [f"  const {STORAGE[v.dtype]} *restrict in{k} = in[{k}];" for k, v in enumerate(chain.inputs)]
        head += [f"  {STORAGE[chain.values[o].dtype]} *restrict out{k} = out[{k}];" for k, o in enumerate(chain.outputs)]
        head += [f"  const int64_t {name} = a[{k}]; (void){name};" for k, name in enumerate(args)]
        text = PRELUDE + "\n" + "\n".join([*head, *body, "}"]) + "\n"
        flags = f"vector={self.knobs['vector']}"
        ins, outs = tuple(range(chain.num_inputs)), tuple(range(len(chain.outputs)))
        launch = Launch("kernel", tuple(args.values()), ("threads",), ins, outs)
        return Source("cpu", f"/* {flags} */\n{text}", (launch,), threads=int(self.knobs["threads"]))

    def _rows(self) -> list[str]:
        """The function's body: rows shared out among threads."""
        p, low = self.p, self.low
        groups = len(self.task.layout.groups)
        chunk = int(self.knobs.get("chunk_cols", 0))
        pieces = 1
        if chunk and low.spaces and len(low.spaces[0]) == 1:
            n = self.low.extent(low.spaces[0][0])
            pieces = -(-n // chunk)
            self.chunk = ("lo", "hi")
        mark = len(p.lines)
        self._row()
        row, p.lines = p.lines[mark:], p.lines[:mark]
        block = int(self.knobs["row_block"])
        out = ["  #pragma omp parallel num_threads((int)threads) if(threads > 1)", "  {"]
        out += self._allocate()
        # the innermost group of row axes is a loop of its own: a division a row would cost as much as a short row
        units = "1" if not groups else "rows" if groups == 1 else f"(rows / e{groups - 1})"
        out.append(f"  #pragma omp for schedule(static, {block})")
        out.append(f"  for (int64_t unit = 0; unit < {units} * {pieces}; ++unit) {{")
        out.append(f"    int64_t left = unit / {pieces}; (void)left;" if pieces > 1 else "    int64_t left = unit; (void)left;")
        if pieces > 1:
            out.append(f"    const int64_t lo = unit % {pieces} * {chunk}, hi = lo + {chunk} < {n} ? lo + {chunk} : {n};")
        for g in range(groups - 2, 0, -1):
            out.append(f"    const int64_t g{g} = left % e{g}; left /= e{g}; (void)g{g};")
        if groups:
            out.append("    const int64_t g0 = left; (void)g0;")
        if groups > 1:
            out.append(f"    for (int64_t g{groups - 1} = 0; g{groups - 1} < e{groups - 1}; ++g{groups - 1}) {{")
            row = [*row, "    }"]
        out += row
        out.append("  }")
        out += [*self._free(), "  }"]
        return out

    def _allocate(self) -> list[str]:
        """A thread's row buffers."""
        made = []
        for name, dtype, n in self.buffers.values():
            size = (n * (8 if dtype == "float64" else 4) + 63) // 64 * 64
            made.append(f"  {COMPUTE[dtype]} *restrict {name} = aligned_alloc(64, {size});")
        return made

    def _free(self) -> list[str]:
        return [f"  free({name});" for name, _, _ in self.buffers.values()]

    def _flat(self) -> list[str]:
        p = self.p
        block = int(self.knobs["block"])
        axis = self.low.spaces[0][-1]
        with p.scope(indent=False):
            self._hoist([v for _, v in self.stores], ())
            row, p.lines = p.lines, []
            p.line("#pragma omp simd")
            p.line("for (int64_t c = lo; c < hi; ++c) {")
            with p.scope():
                for a in self.low.spaces[0]:
                    p.column[a] = "0"
                p.column[axis] = "c"
                for s, v in self.stores:
                    self._write(s, v)
            p.line("}")
        lines = [*row, *p.lines]
        zeros = [f"    const int64_t g{g} = 0; (void)g{g};" for g in range(len(self.task.layout.groups))]
        return [
            f"  const int64_t units = (numel + {block - 1}) / {block};",
            "  #pragma omp parallel for schedule(static) num_threads((int)threads) if(threads > 1)",
            "  for (int64_t unit = 0; unit < units; ++unit) {",
            f"    const int64_t lo = unit * {block}, hi = lo + {block} < numel ? lo + {block} : numel;",
            *zeros, *lines, "  }",
        ]  # fmt: skip


def level_under(e: Expr, level: dict[int, int]) -> int:
    """How many passes must have run before an expression can be computed."""
    best = 0
    for x in walk([e]):
        if x.op == "reduce":
            best = max(best, level.get(x.number, 0))
    return best
