"""The C dialect: expressions as scalar statements inside loops that the compiler vectorises.

bf16, fp16 and fp8 are converted by their bits in 32-bit lanes. exp is our own polynomial; the other transcendentals are
libm's, declared with vector variants where glibc has them. Never -ffast-math: loading such a library flushes torch's
denormals and deletes isnan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import Infeasible, UnsupportedOp
from .emit import Printer
from .expr import FLOATS, Access, Builder, Expr
from .layout import INDEX, Address, Addressing
from .lower import Lowered
from .roles import Store

STORAGE = {
    "float32": "float", "float64": "double", "bfloat16": "uint16_t", "float16": "uint16_t", "float8_e4m3fn": "uint8_t",
    "float8_e5m2": "uint8_t", "int8": "int8_t", "uint8": "uint8_t", "int16": "int16_t", "int32": "int32_t",
    "int64": "int64_t", "bool": "uint8_t",
}  # fmt: skip
COMPUTE = {"float32": "float", "float64": "double", "int32": "int32_t", "int64": "int64_t", "bool": "int32_t"}
SHORT = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}

PRELUDE = r"""#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(AF_SCALAR_LIBM)
#define AF_SIMD __attribute__((simd("notinbranch")))
#define AF_VECTOR(name) AF_SIMD float name##f(float); AF_SIMD double name(double);
AF_VECTOR(log) AF_VECTOR(log2) AF_VECTOR(exp2) AF_VECTOR(sin) AF_VECTOR(cos) AF_VECTOR(erf)
AF_SIMD double exp(double);
#endif
#define AF static inline __attribute__((always_inline))
#ifdef __FP_FAST_FMAF
#define AF_FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define AF_FMA(a, b, c) ((a) * (b) + (c))
#endif

AF uint32_t af_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
AF float af_float(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
AF uint64_t af_bits64(double x) { uint64_t b; memcpy(&b, &x, 8); return b; }
AF double af_double(uint64_t b) { double x; memcpy(&x, &b, 8); return x; }

/* storage formats: round to nearest even; finite fp8 overflow saturates, NaN stays NaN */
AF float af_from_bf16(uint16_t h) { return af_float((uint32_t)h << 16); }
AF uint16_t af_to_bf16(float x) {
  uint32_t b = af_bits(x), r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return (uint16_t)((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : r);
}
AF float af_from_f16(uint16_t h) {
  uint32_t a = ((uint32_t)h & 0x7fffu) << 13, s = ((uint32_t)h & 0x8000u) << 16;
  uint32_t f = af_bits(af_float(a) * 0x1p112f);
  f = (h & 0x7c00u) == 0x7c00u ? (a | 0x7f800000u) : f;
  return af_float(f | s);
}
AF uint32_t af_small(uint32_t a, int shift, uint32_t bias, uint32_t least, float magic) {
  uint32_t normal = ((a + (1u << (shift - 1)) - 1u + ((a >> shift) & 1u)) >> shift) - bias;
  uint32_t tiny = af_bits(af_float(a) + magic) - af_bits(magic);
  return a < least ? tiny : normal;
}
AF uint16_t af_to_f16(float x) {
  uint32_t b = af_bits(x), a = b & 0x7fffffffu, s = (b >> 16) & 0x8000u;
  uint32_t c = a < 0x47800000u ? a : 0x47800000u;
  uint32_t r = af_small(c, 13, 112u << 10, 0x38800000u, 0.5f);
  return (uint16_t)((a > 0x7f800000u ? 0x7e00u : r) | s);
}
AF float af_from_e4m3(uint8_t h) {
  uint32_t a = ((uint32_t)h & 0x7fu) << 20, s = ((uint32_t)h & 0x80u) << 24;
  uint32_t f = af_bits(af_float(a) * 0x1p120f);
  f = (h & 0x7fu) == 0x7fu ? 0x7fc00000u : f;
  return af_float(f | s);
}
AF uint8_t af_to_e4m3(float x) {
  uint32_t b = af_bits(x), a = b & 0x7fffffffu, s = (b >> 24) & 0x80u;
  uint32_t c = a < 0x43e00000u ? a : 0x43e00000u;
  uint32_t r = af_small(c, 20, 120u << 3, 0x3c800000u, 16384.0f);
  return (uint8_t)((a > 0x7f800000u ? 0x7fu : r) | s);
}
AF float af_from_e5m2(uint8_t h) {
  uint32_t a = ((uint32_t)h & 0x7fu) << 21, s = ((uint32_t)h & 0x80u) << 24;
  uint32_t f = af_bits(af_float(a) * 0x1p112f);
  f = (h & 0x7cu) == 0x7cu ? (a | 0x7f800000u) : f;
  return af_float(f | s);
}
AF uint8_t af_to_e5m2(float x) {
  uint32_t b = af_bits(x), a = b & 0x7fffffffu, s = (b >> 24) & 0x80u;
  uint32_t c = a < 0x47600000u ? a : 0x47600000u;
  uint32_t r = af_small(c, 21, 112u << 2, 0x38800000u, 128.0f);
  return (uint8_t)((a > 0x7f800000u ? 0x7fu : r) | s);
}

/* exp(x) = 2^n exp(r), |r| <= ln2 / 2; polynomial of Cephes expf (Moshier). 2^n in two steps, for denormal results */
AF float af_exp(float x) {
  float c = x < -104.0f ? 0.0f : x; /* a result that underflows takes a hundred cycles: the 0 is chosen, not computed */
  c = c > 89.0f ? 89.0f : c;
  float n = AF_FMA(c, 1.44269504f, 12582912.0f) - 12582912.0f;
  float r = AF_FMA(n, 2.12194440e-4f, AF_FMA(n, -0.693359375f, c));
  float p = 1.9875691500e-4f;
  p = AF_FMA(p, r, 1.3981999507e-3f);
  p = AF_FMA(p, r, 8.3334519073e-3f);
  p = AF_FMA(p, r, 4.1665795894e-2f);
  p = AF_FMA(p, r, 1.6666665459e-1f);
  p = AF_FMA(p, r, 5.0000001201e-1f);
  float y = AF_FMA(p * r, r, r) + 1.0f;
  int32_t k = (int32_t)n, h = k >> 1;
  y = (y * af_float((uint32_t)(h + 127) << 23)) * af_float((uint32_t)(k - h + 127) << 23);
  return x < -104.0f ? 0.0f : y;
}
/* a shorter polynomial (relative error 4e-6) and one scaling: results below 2^-126 are 0 */
AF float af_exp_fast(float x) {
  float c = x < -87.3f ? -87.3f : x;
  c = c > 88.7f ? 88.7f : c;
  float n = AF_FMA(c, 1.44269504f, 12582912.0f) - 12582912.0f;
  float r = AF_FMA(n, -0.693147182f, c);
  float p = 4.1665795894e-2f;
  p = AF_FMA(p, r, 1.6666665459e-1f);
  p = AF_FMA(p, r, 5.0000001201e-1f);
  float y = AF_FMA(p * r, r, r) + 1.0f;
  y = y * af_float((uint32_t)((int32_t)n + 126) << 23) * 2.0f;
  y = x > 88.72f ? INFINITY : y;
  return x < -87.3f ? 0.0f : y;
}
#define AF_EXTREMES(T, S) \
  AF T af_max##S(T a, T b) { return ((a > b) | (a != a)) ? a : b; } \
  AF T af_min##S(T a, T b) { return ((a < b) | (a != a)) ? a : b; }
AF_EXTREMES(float, ) AF_EXTREMES(double, 64) AF_EXTREMES(int32_t, _i) AF_EXTREMES(int64_t, _l)
"""

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
         "and": "&", "or": "|", "xor": "^", "shr": ">>"}  # fmt: skip
CALLS = {"log": "log", "log2": "log2", "exp2": "exp2", "sin": "sin", "cos": "cos", "erf": "erf", "floor": "floor",
         "ceil": "ceil", "trunc": "trunc", "round_even": "rint", "sqrt": "sqrt", "abs": "fabs", "fmod": "fmod",
         "pow": "pow"}  # fmt: skip
SUFFIX = {"float32": "", "float64": "64", "int32": "_i", "int64": "_l", "bool": "_i"}


def identity(kind: str, dtype: str) -> str:
    """The value that a reduction starts from."""
    if kind in ("sum", "prod"):
        return "0" if kind == "sum" else "1"
    if dtype in FLOATS:
        return "-INFINITY" if kind == "max" else "INFINITY"
    width = "32" if dtype == "int32" else "64"
    return f"INT{width}_{'MIN' if kind == 'max' else 'MAX'}"


class CPrinter(Printer):
    """Prints scalars; a column axis in scope is a loop variable."""

    indent = "  "

    def __init__(self, low: Lowered, addressing: Addressing, math_mode: str) -> None:
        super().__init__(low, addressing)
        self.math = math_mode
        self.column: dict[str, str] = {}

    def declare(self, dtype: str, text: str, prefix: str = "v") -> str:
        name = self.fresh(prefix)
        self.line(f"const {COMPUTE[dtype]} {name} = {text};")
        return name

    # ---- addresses

    def offset(self, a: Address) -> str:
        parts = [f"g{g} * {arg}" for g, arg in a.rows]
        if a.const:
            parts.append(str(a.const))
        parts += [arg if k == 1 else f"{k} * {arg}" for k, arg in a.offsets]
        for axis, factor, arg in a.cols:
            parts.append(" * ".join([self.column[axis], *([str(factor)] if factor != 1 else []), *([arg] if arg else [])]))
        for e, factor, arg in a.gathers:
            parts.append(" * ".join([self.name(e), *([str(factor)] if factor != 1 else []), *([arg] if arg else [])]))
        return " + ".join(parts) or "0"

    def load(self, e: Expr) -> str:
        access = e.attr
        a = self.addressing.address(access.operand, access)
        storage = self.low.values[access.operand].dtype
        text = f"in{access.operand}[{self.offset(a)}]"
        if storage in SHORT:
            text = f"af_from_{SHORT[storage]}({text})"
        elif storage == "bool":
            text = f"({text} != 0)"
        if e.args:
            text = f"{self.name(e.args[0])} ? {text} : 0"
        return self.declare(e.dtype, text, "x")

    def store(self, store: Store, value: Expr) -> None:
        """Print one write."""
        a = self.addressing.address(self.addressing.inputs + store.access.operand, store.access)
        storage = self.low.chain.values[self.low.chain.outputs[store.access.operand]].dtype
        if value.op == "round" and value.attr == storage:
            value = value.args[0]  # the write converts
        text = self.name(value)
        if storage in SHORT:
            text = f"af_to_{SHORT[storage]}({text})"
        elif storage != value.dtype:
            text = f"({STORAGE[storage]})({text})"
        self.line(f"out{store.access.operand}[{self.offset(a)}] = {text};")

    def accumulate(self, acc: str, kind: str, x: str) -> None:
        """Print what joins a value to an accumulator."""
        if kind in ("sum", "prod"):
            self.line(f"{acc} {'+' if kind == 'sum' else '*'}= {x};")
        else:
            self.line(f"{acc} = {x} {'>' if kind == 'max' else '<'} {acc} ? {x} : {acc};")

    # ---- expressions

    def literal(self, e: Expr) -> str:
        value = Builder.number(e)
        if isinstance(value, float):
            f = "f" if e.dtype == "float32" else ""
            if math.isnan(value):
                return "NAN"
            if math.isinf(value):
                return "INFINITY" if value > 0 else "(-INFINITY)"
            return f"({value!r}{f})" if value < 0 or str(value)[0] == "-" else f"{value!r}{f}"
        number = int(value or 0)
        if number == -(1 << 31) or number == -(1 << 63):
            return "INT32_MIN" if e.dtype == "int32" else "INT64_MIN"
        return f"({number}{'LL' if e.dtype == 'int64' else ''})"

    def emit(self, e: Expr) -> str:
        if e.op == "const":
            return self.literal(e)
        if e.op == "load":
            return self.load(e)
        if e.op == "index":
            return self.index(e)
        if e.op == "count":
            return self.addressing.count(e.attr)
        if e.op == "reduce":
            raise Infeasible("a reduction inside its own loop")
        return self.declare(e.dtype, self.operation(e, [self.name(a) for a in e.args]))

    def operation(self, e: Expr, args: Sequence[str]) -> str:
        op, x = e.op, args[0]
        source = e.args[0].dtype
        real = source in FLOATS
        f = "f" if source == "float32" else ""
        if op in INFIX:
            return f"{x} {INFIX[op]} {args[1]}"
        if op in ("max", "min") and e.args[1].is_const and not math.isnan(float(Builder.number(e.args[1]) or 0)):
            return f"{x} {'<' if op == 'max' else '>'} {args[1]} ? {args[1]} : {x}"  # keeps a NaN with one comparison
        if op in ("max", "min"):
            return f"af_{op}{SUFFIX[e.dtype]}({x}, {args[1]})"
        if op == "where":
            return f"{x} ? {args[1]} : {args[2]}"
        if op == "exp":
            if e.dtype == "float64":
                return f"exp({x})"
            return f"af_exp_fast({x})" if self.math == "fast" else f"af_exp({x})"
        if op == "rsqrt":
            return f"1.0{f} / sqrt{f}({x})"
        if op in CALLS:
            if real:
                return f"{CALLS[op]}{f}({', '.join(args)})"
            if op == "abs":
                return f"{x} < 0 ? -{x} : {x}"
            if op == "fmod":
                return f"{x} % {args[1]}"
            return x
        if op == "neg":
            return f"-{x}"
        if op == "not":
            return f"~{x}" if e.dtype != "bool" else f"!{x}"
        if op == "isnan":
            return f"{x} != {x}"
        if op == "bits":
            return f"(int32_t)af_bits({x})" if source == "float32" else f"(int64_t)af_bits64({x})"
        if op == "unbits":
            return f"af_float((uint32_t){x})" if source == "int32" else f"af_double((uint64_t){x})"
        if op == "cast":
            return f"({COMPUTE[e.dtype]}){x}"
        if op == "round":
            if e.attr in SHORT:
                return f"af_from_{SHORT[e.attr]}(af_to_{SHORT[e.attr]}({x}))"
            return f"({STORAGE[e.attr]})({x})"
        raise UnsupportedOp(f"{op} has no C form yet")

    def index(self, e: Expr) -> str:
        """An index as a 64-bit value."""
        a = self.addressing.address(INDEX, Access(INDEX, (e.attr,)))
        return self.declare("int64", self.offset(a))
