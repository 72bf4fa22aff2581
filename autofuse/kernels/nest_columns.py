"""The C function of a segment with reductions over rows: threads fold chunks of rows, then join them in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .c_text import COMPUTE, identity
from .choices import legal_stores
from .columns import detached
from .expr import FLOATS, Access, Expr, axis_index
from .nest import Nest
from .roles import Store

BLOCK = 64  # rows that are added up plainly


@dataclass(frozen=True)
class Fold(Store):
    """What a row adds to a chunk's partial result: `access` is its place among the columns."""

    kind: str
    buffer: str


class ColumnNest(Nest):
    """Chunks of rows are the units that threads share out; results are joined after them."""

    def _writes(self) -> list[tuple[Store, Expr]]:
        low = self.low
        stores = legal_stores(low, self.math, False)
        self.folds, self.leaves, self.results = detached(low, [(s, v) for s, v in stores if s not in low.whole])
        self.joining = False
        made: list[tuple[Store, Expr]] = [(s, v) for s, v in stores if s in low.whole]
        for k, f in enumerate(self.folds):
            place = axis_index(self._mine(f), low.extents)
            made.append((Fold(Access(-1, (place,)), f, f.attr[0], f"acc{k}"), f.args[0]))
        return made

    def _mine(self, f: Expr) -> list[str]:
        return [a for s in self.low.spaces for a in s if a in f.axes]

    def _place(self, f: Expr) -> str:
        text = ""
        for a in self._mine(f):
            text = self.p.column[a] if not text else f"({text}) * {self.low.extent(a)} + {self.p.column[a]}"
        return text or "0"

    def _write(self, store: Store, value: Expr) -> None:
        if not isinstance(store, Fold):
            super()._write(store, value)
            return
        self.p.accumulate(f"{store.buffer}[{self._place(store.value)}]", store.kind, self.p.name(value))

    def _at(self, columns: tuple[str, ...]) -> None:
        if self.joining:
            for k, leaf in enumerate(self.leaves):
                if set(self._mine(leaf)) <= set(columns):
                    self.p.scopes[-1][leaf.number] = f"acc{k}[{self._place(leaf)}]"

    def _body(self, stores: list[tuple[Store, Expr]], depth: int) -> list[str]:
        """One row's passes as text."""
        p = self.p
        mark, p.depth = len(p.lines), depth
        self.stores = stores
        with p.scope(indent=False):
            self._row()
        lines, p.lines = p.lines[mark:], p.lines[:mark]
        return lines

    def _decode(self, linear: str, groups: Sequence[int], indent: str) -> list[str]:
        out, left = [], linear
        for g in reversed(groups[1:]):
            out.append(f"{indent}const int64_t g{g} = ({left}) % e{g}, q{g} = ({left}) / e{g}; (void)g{g};")
            left = f"q{g}"
        return [*out, *(f"{indent}const int64_t g{g} = {left}; (void)g{g};" for g in groups[:1])]

    def _rows(self) -> list[str]:
        p, chunks = self.p, int(self.knobs["chunks"])
        row = self._body(self.stores, 4)
        buffers, free = self._allocate(), self._free()
        self.buffers, self.joining, keep, self.keep = {}, True, self.keep, "none"
        with p.scope(indent=False):
            for k, leaf in enumerate(self.leaves):
                if not self._mine(leaf):
                    p.define(leaf, f"acc{k}[0]")
            result = self._body(self.results, 3)
        self.keep = keep
        kept, reduced = self.addressing.kept, self.addressing.reduced
        out = [f"  const int64_t chunks = reds < {chunks} ? (reds > 0 ? reds : 1) : {chunks}, per = (reds + chunks - 1) / chunks;"]
        out += [
            f"  {self._type(f)} *ws{k} = malloc(rows * chunks * {self._room(f)} * sizeof({self._type(f)}));" for k, f in self.each
        ]
        out += ["  #pragma omp parallel num_threads((int)threads) if(threads > 1)", "  {", *buffers]
        out += ["  #pragma omp for schedule(static)", "  for (int64_t unit = 0; unit < rows * chunks; ++unit) {"]
        out += ["    const int64_t kept = unit / chunks, low = unit % chunks * per, high = low + per < reds ? low + per : reds;"]
        out += self._decode("kept", kept, "    ")
        for k, f in self.each:
            at = "(chunks > 1 ? unit : omp_get_thread_num())"
            out.append(f"    {self._type(f)} *restrict acc{k} = ws{k} + {at} * {self._room(f)};")
            start = identity(f.attr[0], f.dtype)
            out.append(f"    for (int64_t c = 0; c < {self._room(f)}; ++c) acc{k}[c] = {start};")
        out.append(f"    for (int64_t first = low; first < high; first += {BLOCK}) {{")
        out.append(f"    const int64_t last = first + {BLOCK} < high ? first + {BLOCK} : high;")
        out += ["    for (int64_t at = first; at < last; ++at) {", *self._decode("at", reduced, "      "), *row, "    }"]
        out += [line for k, f in self.each if self._compensated(f) for line in self._collect(k, f)]
        out += ["    }", *(self._settle(k, f) for k, f in self.each if self._compensated(f))]
        out += ["    if (chunks == 1) {", *result, "    }", "  }"]
        out += ["  #pragma omp for schedule(static)", "  for (int64_t unit = 0; unit < (chunks > 1 ? rows : 0); ++unit) {"]
        out += self._decode("unit", kept, "    ")
        for k, f in self.each:
            kind = self._type(f)
            out.append(f"    {kind} *restrict acc{k} = ws{k} + unit * chunks * {self._room(f)};")
            out.append(f"    for (int64_t n = 1; n < chunks; ++n) {{ const {kind} *restrict x = acc{k} + n * {self._room(f)};")
            p.depth = 3
            mark = len(p.lines)
            p.accumulate(f"acc{k}[c]", f.attr[0], "x[c]")
            (line,), p.lines = p.lines[mark:], p.lines[:mark]
            out.append(f"    for (int64_t c = 0; c < {self._width(f)}; ++c) {line.strip()} }}")
        out += [*result, "  }", *free, "  }", *(f"  free(ws{k});" for k, _ in self.each)]
        return out

    # ---- sums of many rows, accurate whatever the knobs: blocks of rows are added with what each addition loses

    @property
    def each(self) -> list[tuple[int, Expr]]:
        """The folds, numbered."""
        return list(enumerate(self.folds))

    def _type(self, f: Expr) -> str:
        return COMPUTE[f.dtype]

    def _width(self, f: Expr) -> int:
        return prod(self.low.extent(a) for a in self._mine(f))

    def _compensated(self, f: Expr) -> bool:
        return f.attr[0] == "sum" and f.dtype in FLOATS

    def _room(self, f: Expr) -> int:
        """Elements of a chunk: a block's sums, the chunk's, and what these have lost."""
        return self._width(f) * (3 if self._compensated(f) else 1)

    def _collect(self, k: int, f: Expr) -> list[str]:
        """Kahan's summation of a block's sums into the chunk's; past infinity nothing is lost."""
        n, kind = self._width(f), self._type(f)
        return [
            f"    for (int64_t c = 0; c < {n}; ++c) {{",
            f"      const {kind} y = acc{k}[c] - acc{k}[c + {2 * n}], t = acc{k}[c + {n}] + y, e = (t - acc{k}[c + {n}]) - y;",
            f"      acc{k}[c + {2 * n}] = e * 0 == 0 ? e : 0; acc{k}[c + {n}] = t; acc{k}[c] = 0;",
            "    }",
        ]

    def _settle(self, k: int, f: Expr) -> str:
        n = self._width(f)
        return f"    for (int64_t c = 0; c < {n}; ++c) acc{k}[c] = acc{k}[c + {n}];"
