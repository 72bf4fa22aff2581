"""The generator of autofuse/random.py as expressions: 32-bit integers that wrap, bit for bit what PyTorch's are."""

from __future__ import annotations

from .. import random
from .expr import Builder, Expr


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift(b: Builder, h: Expr, by: int) -> Expr:
    """h >> by without its sign: compilers make one shift of the two."""
    return b("and", b("shr", h, b.const(by, "int32")), b.const((1 << (32 - by)) - 1, "int32"))


def _xor(b: Builder, x: Expr, y: Expr) -> Expr:
    m, n = b.number(x), b.number(y)
    if m is not None and n is not None:
        return b.const(int(m) ^ int(n), "int32")
    return y if m == 0 else x if n == 0 else b("xor", x, y)


def _mixed(b: Builder, h: Expr) -> Expr:
    known = b.number(h)
    if known is not None:
        return b.const(_signed(random.mixed(int(known) & random.MASK)), "int32")
    h = _xor(b, h, _shift(b, h, 16))
    h = b("mul", h, b.const(_signed(random.MULTIPLIERS[0]), "int32"))
    h = _xor(b, h, _shift(b, h, 13))
    h = b("mul", h, b.const(_signed(random.MULTIPLIERS[1]), "int32"))
    return _xor(b, h, _shift(b, h, 16))


def _halves(b: Builder, x: Expr, narrow: bool = False) -> tuple[Expr, Expr]:
    """The low and high 32 bits of an int64; `narrow` where the high ones are 0."""
    known = b.number(x)
    if known is not None:
        low, high = (_signed((int(known) >> by) & random.MASK) for by in (0, 32))
        return b.const(low, "int32"), b.const(high, "int32")
    high_bits = b.const(0, "int32") if narrow else b.cast(b("shr", x, b.const(32, "int64")), "int32")
    return b.cast(x, "int32"), high_bits


def uniform(b: Builder, index: Expr, seed: Expr, offset: Expr, narrow: bool) -> Expr:
    """The float32 number of the element `index`; all three int64, `narrow` where the index is below 2^32."""
    seed_low, seed_high = _halves(b, seed)
    offset_low, offset_high = _halves(b, offset)
    low, high = _halves(b, index, narrow)
    a = _mixed(b, _xor(b, seed_low, b.const(_signed(random.GOLDEN), "int32")))
    k0 = _mixed(b, _xor(b, _mixed(b, _xor(b, a, seed_high)), offset_low))
    k1 = _mixed(b, _xor(b, _xor(b, k0, a), offset_high))
    h = _mixed(b, _xor(b, _mixed(b, _xor(b, low, k0)), _xor(b, k1, high)))
    return b("mul", b.cast(_shift(b, h, 8), "float32"), b.const(2.0**-24, "float32"))
