"""sin and cos of float32 in the Triton dialect, of its own operations alone: no table in memory, so that nothing spills.

Within |x| <= 1e5 Cody and Waite's reduction and a minimax polynomial of our own fit, beyond it Payne and Hanek's (Radian
reduction for trigonometric functions, 1983), in assembly on a GPU, where a thread runs it only if it holds such a value,
and in Triton's own operations in the interpreter, which runs no assembly.
"""

from __future__ import annotations

TRIG = """# sin r, |r| <= 1.584: r + r^3 P(r^2), P minimax, then settled on float32 so that sin(pi / 2) is 1 and nothing more.
# `quick`: to 2^-19 of itself, for results of 16 bits
@triton.jit
def af_sine(r, quick: tl.constexpr):
    s = r * r
    if quick:
        p = tl.fma(s, -0.00018520372395869344, 0.008313617669045925)
        p = tl.fma(p, s, -0.16665810346603394)
    else:
        p = tl.fma(s, 2.6123070711037144e-06, -0.00019809357763733715)
        p = tl.fma(p, s, 0.008332953788340092)
        p = tl.fma(p, s, -0.1666664332151413)
    return tl.fma(p, tl.fma(r, s, 0.0), r)  # r^3 of -0.0 is 0.0, so that -0.0 stays


# Cody and Waite: x = k pi + r. Adding 1.5 * 2^23 rounds x / pi, and leaves k's parity in the lowest bit: moved up to the
# sign's place it flips r. pi is a sum of numbers of 8 and 9 bits, by which k's products are exact whether or not they are
# fused, and of one that is positive, so that -0.0 stays.
@triton.jit
def af_sin(x, quick: tl.constexpr):
    n = tl.fma(x, 0.31830987334251404, 12582912.0)
    k = n - 12582912.0
    r = tl.fma(k, -3.140625, x)
    if quick:
        r = tl.fma(k, -0.0009676535846665502, r)
    else:
        r = tl.fma(k, -0.0009670257568359375, r)
        r = tl.fma(k, -6.278329465203569e-07, r)
    r = (r.to(tl.int32, bitcast=True) + (n.to(tl.int32, bitcast=True) << 31)).to(tl.float32, bitcast=True)
    return af_sine(af_far(x, r, False), quick)


# As af_sin with k half of an odd number: cos x = -(-1)^floor(x / pi) sin(x - k pi). Adding 1.5 * 2^16 + 1 (for the minus)
# leaves x / pi to 1/128, of which the floor is taken; k has a bit more, so that pi's second part has 7 bits.
@triton.jit
def af_cos(x, quick: tl.constexpr):
    n = tl.fma(x, 0.31830987334251404, 98305.0).to(tl.int32, bitcast=True) & -128
    k = n.to(tl.float32, bitcast=True) - 98304.5
    r = tl.fma(k, -3.140625, x)
    if quick:
        r = tl.fma(k, -0.0009676535846665502, r)
    else:
        r = tl.fma(k, -0.00096893310546875, r)
        r = tl.fma(k, 1.279515686292143e-06, r)
    r = (r.to(tl.int32, bitcast=True) + (n << 24)).to(tl.float32, bitcast=True)
    return af_sine(af_far(x, r, True), quick)
"""

FAR_IN_TRITON = """# One step of Payne and Hanek, for the x from `low` (>= 2^(base - 127)) to 2^(base - 89): r, |r| <= pi / 2, whose
# sine is x's sine or cosine. |x| = m 2^(base - 150) with m of 24 + 37 bits; a and b are 128 bits of 2^(base - 150) / pi, the
# first of weight 1, since only |x| / pi mod 2 counts: that is t / 2^63, to 2^-62, and no float32 is nearer to a multiple of
# pi / 2 than 2^-30. t's nearest integer tells the sign by its parity, and the rest times pi is r.
@triton.jit
def af_step(x, r, low: tl.constexpr, base: tl.constexpr, a: tl.constexpr, b: tl.constexpr, cosine: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    m = ((bits & 8388607) | 8388608).to(tl.uint64) << (((bits >> 23) & 255) - base).to(tl.uint64)
    t = m * tl.full((), a, tl.uint64) + tl.umulhi(m, tl.full((), b, tl.uint64))
    flip = bits & -2147483648
    if cosine:
        t += 4611686018427387904
        flip = 0
    flip ^= ((t + 4611686018427387904) >> 63).to(tl.int32) << 31
    far = ((t << 1).to(tl.int64, bitcast=True).to(tl.float64) * tl.full((), 1.7030607900432772e-19, tl.float64)).to(tl.float32)
    far = (far.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True) + (x - x)  # NaN of an infinity
    return tl.where(tl.abs(x) >= low, far, x), tl.where(tl.abs(x) >= low, far, r)


@triton.jit
def af_top(x):  # the largest magnitude of a tile, or of a scalar; NaN does not count
    if len(x.shape) == 0:
        return tl.abs(x)
    else:
        return tl.max(tl.abs(x), axis=None)


# r as it is, but for |x| > 1e5: largest first, since what is done is small
@triton.jit
def af_far(x, r, cosine: tl.constexpr):
    top = af_top(x)
    if top >= 4951760157141521099596496896.0:
        x, r = af_step(x, r, 4951760157141521099596496896.0, 219, 0xE13ABE8FA9A6EE06, 0xDB14ACC9E21C820F, cosine)
    if top >= 18014398509481984.0:
        x, r = af_step(x, r, 18014398509481984.0, 181, 0xC9C882A53F84EAFA, 0x3EA69BB81B6C52B3, cosine)
    if top > 100000.0:
        x, r = af_step(x, r, 100000.0, 143, 0x00517CC1B727220A, 0x94FE13ABE8FA9A6E, cosine)
    return r
"""

PACK = 4
_STEP = """
abs.f32 top, {x};
setp.gt.f32 far, top, 0f47c35000;
@!far bra NEAR{k};
mov.b32 bits, {x};
shr.u32 by, bits, 23;
and.b32 by, by, 255;
and.b32 word, bits, 8388607;
or.b32 word, word, 8388608;
cvt.u64.u32 m, word;
setp.ge.u32 middle, by, 181;
setp.ge.u32 last, by, 219;
selp.b64 a, 0xC9C882A53F84EAFA, 0x00517CC1B727220A, middle;
selp.b64 a, 0xE13ABE8FA9A6EE06, a, last;
selp.b64 b, 0x3EA69BB81B6C52B3, 0x94FE13ABE8FA9A6E, middle;
selp.b64 b, 0xDB14ACC9E21C820F, b, last;
selp.b32 word, 181, 143, middle;
selp.b32 word, 219, word, last;
sub.u32 by, by, word;
shl.b64 m, m, by;
mul.lo.u64 t, m, a;
mul.hi.u64 m, m, b;
add.u64 t, t, m;
{quarter}
add.u64 m, t, 0x4000000000000000;
shr.u64 m, m, 32;
cvt.u32.u64 word, m;
and.b32 word, word, 0x80000000;
xor.b32 bits, bits, word;
shl.b64 t, t, 1;
cvt.rn.f64.s64 turn, t;
mul.f64 turn, turn, 0d3C0921FB54442D18;
cvt.rn.f32.f64 top, turn;
mov.b32 word, top;
xor.b32 word, word, bits;
mov.b32 top, word;
sub.f32 over, {x}, {x};
add.f32 top, top, over;
mov.b32 {out}, top;
NEAR{k}:"""


def _assembly(cosine: bool, pack: int) -> str:
    """The step of FAR_IN_TRITON's base that suits each of `pack` values, skipped at once where none is far."""
    outs, xs, rs = ([f"${k + start * pack}" for k in range(pack)] for start in range(3))
    lines = [
        "{", ".reg .pred far, middle, last;", ".reg .f32 top, over;", ".reg .b32 bits, word, by;", ".reg .b64 m, t, a, b;",
        ".reg .f64 turn;", *(f"mov.b32 {out}, {r};" for out, r in zip(outs, rs, strict=True)), "mov.f32 top, 0f00000000;",
    ]  # fmt: skip
    for x in xs:
        lines += [f"abs.f32 over, {x};", "max.f32 top, top, over;"]
    lines += ["setp.gt.f32 far, top, 0f47c35000;", "@!far bra NEAR;"]
    # a cosine's argument is a quarter on, and has no sign
    quarter = "add.u64 t, t, 0x4000000000000000;\nmov.b32 bits, 0;" if cosine else "and.b32 bits, bits, 0x80000000;"
    for k, (out, x) in enumerate(zip(outs, xs, strict=True)):
        lines += _STEP.format(out=out, x=x, k=k, quarter=quarter).split("\n")[1:]
    return " ".join([*lines, "NEAR:", "}"])


def _far_in_assembly() -> str:
    """As FAR_IN_TRITON's `af_far`; a thread that has less than PACK values takes them one by one."""
    text = "@triton.jit\ndef af_far(x, r, cosine: tl.constexpr):\n"
    text += f"    few: tl.constexpr = len(x.shape) == 0 or x.numel < {PACK} * tl.extra.cuda.num_threads()\n"
    for branch, cosine, pack in (
        ("if few and cosine", True, 1), ("elif few", False, 1), ("elif cosine", True, PACK), ("else", False, PACK),
    ):  # fmt: skip
        constraints = ",".join(["=&f"] * pack + ["f"] * 2 * pack)
        asm = _assembly(cosine, pack)
        text += f"    {branch}:\n"
        text += f'        return tl.inline_asm_elementwise("{asm}", "{constraints}", [x, r], tl.float32, True, {pack})\n'
    return text


FAR = _far_in_assembly()
