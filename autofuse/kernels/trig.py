"""sin and cos of float32 in the Triton dialect, of its own operations alone: no table in memory, so that nothing spills.

Within |x| <= 1e5 Cody and Waite's reduction and a minimax polynomial of our own fit, beyond it Payne and Hanek's (Radian
reduction for trigonometric functions, 1983), which a tile runs only where it holds such a value.
"""

from __future__ import annotations

TRIG = """# One step of Payne and Hanek, for the x from `low` (>= 2^(base - 127)) to 2^(base - 89): r, |r| <= pi / 2, whose sine is
# x's sine or cosine. |x| = m 2^(base - 150) with m of 24 + 37 bits; a and b are 128 bits of 2^(base - 150) / pi, the first
# of weight 1, since only |x| / pi mod 2 counts: that is t / 2^63, to 2^-62, and no float32 is nearer to a multiple of
# pi / 2 than 2^-30. t's nearest integer tells the sign by its parity, and the rest times pi is r.
@triton.jit
def af_far(x, r, low: tl.constexpr, base: tl.constexpr, a: tl.constexpr, b: tl.constexpr, cosine: tl.constexpr):
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


# r as it is, but for |x| > 1e5: largest first, since what is done is small
@triton.jit
def af_all_far(x, r, top, cosine: tl.constexpr):
    if top >= 4951760157141521099596496896.0:
        x, r = af_far(x, r, 4951760157141521099596496896.0, 219, 0xE13ABE8FA9A6EE06, 0xDB14ACC9E21C820F, cosine)
    if top >= 18014398509481984.0:
        x, r = af_far(x, r, 18014398509481984.0, 181, 0xC9C882A53F84EAFA, 0x3EA69BB81B6C52B3, cosine)
    x, r = af_far(x, r, 100000.0, 143, 0x00517CC1B727220A, 0x94FE13ABE8FA9A6E, cosine)
    return r


@triton.jit
def af_top(x):  # the largest magnitude of a tile, or of a scalar; NaN does not count
    if len(x.shape) == 0:
        return tl.abs(x)
    else:
        return tl.max(tl.abs(x), axis=None)


# sin r, |r| <= 1.584: r + r^3 P(r^2), P minimax, then settled on float32 so that sin(pi / 2) is 1 and nothing more
@triton.jit
def af_sine(r):
    s = r * r
    p = tl.fma(s, 2.6123070711037144e-06, -0.00019809357763733715)
    p = tl.fma(p, s, 0.008332953788340092)
    p = tl.fma(p, s, -0.1666664332151413)
    return tl.fma(p, tl.fma(r, s, 0.0), r)  # r^3 of -0.0 is 0.0, so that -0.0 stays


# Cody and Waite: x = k pi + r. Adding 1.5 * 2^23 rounds x / pi, and leaves k's parity in the lowest bit: moved up to the
# sign's place it flips r. pi is a sum of numbers of 8 and 9 bits, by which k's products are exact whether or not they are
# fused, and of one that is positive, so that -0.0 stays.
@triton.jit
def af_sin(x):
    top = af_top(x)
    if top > 100000.0:
        x = af_all_far(x, x, top, False)
    n = tl.fma(x, 0.31830987334251404, 12582912.0)
    k = n - 12582912.0
    r = tl.fma(k, -3.140625, x)
    r = tl.fma(k, -0.0009670257568359375, r)
    r = tl.fma(k, -6.278329465203569e-07, r)
    return af_sine((r.to(tl.int32, bitcast=True) + (n.to(tl.int32, bitcast=True) << 31)).to(tl.float32, bitcast=True))


# As af_sin with k half of an odd number: cos x = -(-1)^floor(x / pi) sin(x - k pi). Adding 1.5 * 2^16 + 1 (for the minus)
# leaves x / pi to 1/128, of which the floor is taken; k has a bit more, so that pi's second part has 7 bits.
@triton.jit
def af_cos(x):
    n = tl.fma(x, 0.31830987334251404, 98305.0).to(tl.int32, bitcast=True) & -128
    k = n.to(tl.float32, bitcast=True) - 98304.5
    r = tl.fma(k, -3.140625, x)
    r = tl.fma(k, -0.00096893310546875, r)
    r = tl.fma(k, 1.279515686292143e-06, r)
    r = (r.to(tl.int32, bitcast=True) + (n << 24)).to(tl.float32, bitcast=True)
    top = af_top(x)
    if top > 100000.0:
        r = af_all_far(x, r, top, True)
    return af_sine(r)
"""
