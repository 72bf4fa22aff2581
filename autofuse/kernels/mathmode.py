"""Math modes: what the transcendental expressions become before a dialect prints them.

"exact" keeps eager's accuracy with only what every dialect has (so that the interpreter runs it too): exp, log, sqrt,
sin, cos, erf, division rounded to nearest. "fast" uses forms with fewer or approximate instructions, and "approx" (GPU)
also the hardware's tanh of 11 bits, in sigmoid and erf too; the accuracy check decides whether they may win.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .expr import FLOATS, Access, Builder, Expr, Idx, walk

MODES = ("exact", "fast", "approx")
LOGIT_OF_ERF = (-1.5506915e-6, 6.2525556e-5, -7.3091662e-4, -2.9785708e-3, 2.9841045e-1, 3.2554829)


class Legal:
    """Rewrites expressions bottom-up into what dialects print. `gpu`: the dialect has the hardware's reciprocal."""

    def __init__(self, b: Builder, mode: str, gpu: bool) -> None:
        self.b, self.fast, self.approx = b, mode != "exact", mode == "approx"
        self.quick = gpu and self.fast
        self._done: dict[int, Expr] = {}

    def __call__(self, root: Expr) -> Expr:
        for e in walk([root]):
            if e.number not in self._done:
                self._done[e.number] = self._rewrite(e)
        return self._done[root.number]

    def carried(self, marks: Mapping[int, str]) -> dict[int, str]:
        """What is said of expressions by number, of what they have become."""
        return {self._done[n].number: said for n, said in marks.items() if n in self._done}

    def _idx(self, i: Idx) -> Idx:
        return i if i.value is None else Idx(i.terms, i.const, self._done[i.value.number])

    def _rewrite(self, e: Expr) -> Expr:
        b = self.b
        args = tuple(self._done[a.number] for a in e.args)
        if e.op == "by_mode":  # the exact form, and the one of fewer steps
            return args[1] if self.fast else args[0]
        if e.op == "load":
            access = Access(e.attr.operand, tuple(self._idx(i) for i in e.attr.index))
            return b.make("load", args, access, e.dtype, e.axes)
        if e.op == "index":
            return b.make("index", args, self._idx(e.attr), e.dtype, e.axes)
        rule = getattr(self, "_" + e.op, None)
        if rule is not None and e.dtype in FLOATS:
            made = rule(e, *args)
            if made is not None:
                assert isinstance(made, Expr)
                return made
        if e.op in ("const", "count", "reduce", "cast", "round", "bits", "unbits"):
            return b.make(e.op, args, e.attr, e.dtype, e.axes)
        return b(e.op, *args)

    def _c(self, value: float, like: Expr) -> Expr:
        return self.b.const(value, like.dtype)

    def _sum(self, *terms: Expr) -> Expr:
        total = terms[0]
        for t in terms[1:]:
            total = self.b("add", total, t)
        return total

    # ---- rules: None keeps the operation as it is

    def _sigmoid(self, e: Expr, x: Expr) -> Expr:
        b = self.b
        if self.approx and x.dtype == "float32":
            half = self._c(0.5, x)
            return b("add", b("mul", b("tanh_approx", b("mul", x, half)), half), half)
        return self._over(self._c(1, x), b("add", self._c(1, x), b("exp", b("neg", x))))

    def _over(self, x: Expr, y: Expr) -> Expr:
        """x / y for a y that is no denormal number and below 2^126, or infinite: by the hardware's reciprocal (1 ulp)
        where there is one."""
        b = self.b
        if self.quick and x.dtype == "float32":
            r = b("rcp", y)
            return r if b.number(x) == 1 else b("mul", x, r)
        return b("div", x, y)

    def _scaled(self, e: Expr) -> tuple[Expr, float]:
        """A value as another one times a constant."""
        if e.op == "mul":
            for one, other in (e.args, e.args[::-1]):
                c = self.b.number(other)
                if c is not None:
                    return one, float(c)
        return e, 1.0

    def _add(self, e: Expr, x: Expr, y: Expr) -> Expr | None:
        """1 + tanh(u) = 2 sigmoid(2 u), which cancels nothing; 1 + erf(u) likewise, by a fit of its logit."""
        if not self.fast or self.approx or x.dtype != "float32":
            return None
        b = self.b
        for one, other in zip((x, y), reversed(e.args), strict=True):
            if b.number(one) != 1 or other.op not in ("tanh", "erf"):
                continue
            u = self._done[other.args[0].number]
            if other.op == "tanh":
                if self._exp_of_softplus(_ordered(b, other.args[0])) is None:
                    return b("mul", self._c(2, x), self._over(one, b("add", one, b("exp", b("mul", self._c(-2, x), u)))))
            elif self.quick:
                # log2((1 + erf(u)) / (1 - erf(u))) = u Q(u^2): our own fit over |u| < 4.2, of absolute error 1e-5 and,
                # unlike a difference from 1, of relative error 0.3% where u = -2.8 and the result is 8e-5
                t = b("min", b("mul", u, u), self._c(18.0, u))
                q = self._poly(t, LOGIT_OF_ERF)
                tail = self._over(one, b("add", one, b("exp2", b("mul", b("neg", u), q))))
                # below it 1 + erf(u) is 0 in float32, and the fit ends
                return b("mul", self._c(2, x), b("where", b("lt", u, self._c(-4.0, u)), self._c(0, x), tail))
        return None

    def _mul(self, e: Expr, x: Expr, y: Expr) -> Expr | None:
        b = self.b
        if self.fast:
            (one, c), (other, d) = self._scaled(x), self._scaled(y)
            if c * d == 1.0 and c != 1.0 and math.frexp(c)[0] == 0.5:  # (x / 2) (2 y), as in gelu
                x, y = one, other
                return self._mul(e, x, y) or b("mul", x, y)
        for one, other in ((x, y), (y, x)):  # x * (1 / d) is one division where both vary alike
            if other.op == "div" and b.number(other.args[0]) == 1 and other.args[1].axes == one.axes and one is not other:
                return b("div", one, other.args[1])
        return None

    def _div(self, e: Expr, x: Expr, y: Expr) -> Expr | None:
        b = self.b
        if self.fast and y.axes < x.axes and b.number(x) is None:
            return b("mul", x, b("div", self._c(1, y), y))  # one reciprocal a row, or of a constant
        return None

    def _exp_of_softplus(self, x: Expr) -> Expr | None:
        """v where x is softplus(v) = log1p(exp(v)), in the forms that PyTorch's and a user's code take."""
        b = self.b
        if x.op == "where" and x.args[0].op == "lt" and b.number(x.args[0].args[0]) == 20:
            v = x.args[1]
            if x.args[0].args[1] is v and self._softplus_tail(x.args[2]) is v:
                return v
        return self._softplus_tail(x)

    def _softplus_tail(self, x: Expr) -> Expr | None:
        if x.op == "log1p" and x.args[0].op == "exp":
            return x.args[0].args[0]
        return None

    def _sub(self, e: Expr, x: Expr, y: Expr) -> Expr | None:
        if self.fast and e.args[1].op == "tanh":  # x - tanh(x) cancels: it needs every bit of the tanh
            return self.b("sub", x, self._tanh(e.args[1], self._done[e.args[1].args[0].number], False))
        return None

    def _tanh(self, e: Expr, x: Expr, fast: bool = True) -> Expr:
        b = self.b
        inner = self._exp_of_softplus(_ordered(b, e.args[0]))
        if inner is not None:
            # tanh(log(1 + n)) = n (n + 2) / (n (n + 2) + 2) with n = exp(v): all terms positive, one exp
            v = self._done[inner.number]
            n = b("exp", b("min", v, self._c(30, v)))
            t = b("mul", n, b("add", n, self._c(2, v)))
            return self._over(t, b("add", t, self._c(2, v)))
        two = self._c(2, x)
        if self.approx and fast and x.dtype == "float32":
            return b("tanh_approx", x)
        if self.fast and fast:
            wide = b("sub", self._c(1, x), self._over(two, b("add", b("exp", b("mul", two, x)), self._c(1, x))))
            return b("where", b("lt", b("abs", x), self._c(0.02, x)), x, wide)
        a = b("abs", x)
        if x.dtype == "float64":
            t = self._expm1(e, b("mul", two, b("min", a, self._c(30, x))))
            big = b("div", t, b("add", t, two))
        else:
            big = b(
                "sub",
                self._c(1, x),
                b("div", two, b("add", b("exp", b("mul", two, b("min", a, self._c(30, x)))), self._c(1, x))),
            )
        big = b("where", b("isnan", x), x, b("where", b("lt", x, self._c(0, x)), b("neg", big), big))
        if x.dtype == "float64":
            return b("where", b("lt", a, self._c(1e-9, x)), x, big)
        # Cephes tanhf (Moshier), |x| < 0.625: x + x^3 P(x^2)
        z = b("mul", x, x)
        p = self._poly(z, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1))
        small = b("add", x, b("mul", b("mul", x, z), p))
        return b("where", b("lt", a, self._c(0.625, x)), small, big)

    def _erf(self, e: Expr, x: Expr) -> Expr | None:
        """Fits of our own: rational over |x| <= 3.925, where erf is 1, of absolute error 3e-6; a tanh of a cubic, 3e-4."""
        if not self.fast or x.dtype != "float32":
            return None
        b = self.b
        if self.approx:
            cubic = b("mul", x, b("add", b("mul", b("mul", x, x), self._c(0.0997927274, x)), self._c(1.12967581, x)))
            return b("tanh_approx", cubic)
        c = b("max", b("min", x, self._c(3.925, x)), self._c(-3.925, x))
        t = b("mul", c, c)
        p = self._poly(t, (-2.63806597e-5, -5.24929026e-4, 3.98168639e-2, 1.21402003e-1, 1.12838221))
        q = self._poly(t, (-3.03159788e-4, 6.92004059e-3, 8.20616931e-2, 4.4098258e-1, 1.0))
        y = self._over(b("mul", c, p), q)
        y = b("where", b("le", self._c(3.925, x), x), self._c(1, x), y)  # exactly, so that 1 - erf(inf) is 0
        return b("where", b("le", x, self._c(-3.925, x)), self._c(-1, x), y)

    def _poly(self, z: Expr, coefficients: Sequence[float]) -> Expr:
        """Horner, highest power first."""
        p = self._c(coefficients[0], z)
        for c in coefficients[1:]:
            p = self.b("add", self.b("mul", p, z), self._c(c, z))
        return p

    def _expm1(self, e: Expr, x: Expr) -> Expr:
        b = self.b
        one = self._c(1, x)
        u = b("exp", x)
        if self.fast:  # near 0 by its series: a difference would lose every digit
            near = b("add", x, b("mul", b("mul", x, x), self._c(0.5, x)))
            return b("where", b("lt", b("abs", x), self._c(0.01, x)), near, b("sub", u, one))
        # Kahan's form: (u - 1) x / log(u) cancels u's rounding error
        um1 = b("sub", u, one)
        core = b("div", b("mul", um1, x), b("log", u))
        core = b("where", b("eq", um1, self._c(-1, x)), um1, core)
        core = b("where", b("eq", u, one), x, core)
        return b("where", b("lt", self._c(60, x), x), u, core)

    def _log1p(self, e: Expr, x: Expr) -> Expr:
        b = self.b
        one = self._c(1, x)
        u = b("add", one, x)
        if self.fast:
            near = b("sub", x, b("mul", b("mul", x, x), self._c(0.5, x)))
            return b("where", b("lt", b("abs", x), self._c(0.001, x)), near, b("log", u))
        core = b("mul", b("log", u), b("div", x, b("sub", u, one)))  # a quotient near 1: no product of large numbers
        core = b("where", b("eq", u, one), x, core)
        return b("where", b("eq", u, self._c(float("inf"), x)), u, core)

    def _pow(self, e: Expr, x: Expr, y: Expr) -> Expr:
        b = self.b
        if x.dtype == "float64":
            return b("pow", x, y)  # exp(y log x) would lose log2(y log x) bits
        x64, y64 = b.cast(x, "float64"), b.cast(y, "float64")
        zero, one = self._c(0, x64), self._c(1, x64)
        r = b("exp", b("mul", y64, b("log", b("abs", x64))))
        whole = b("eq", b("floor", y64), y64)
        half = b("mul", y64, self._c(0.5, y64))
        odd = b("ne", b("floor", half), half)
        nan = self._c(float("nan"), x64)
        negative = b("where", whole, b("where", odd, b("neg", r), r), nan)
        huge = b("eq", b("abs", x64), self._c(float("inf"), x64))
        negative = b("where", b("and", huge, b("not", whole)), r, negative)
        r = b("where", b("lt", x64, zero), negative, r)
        r = b("where", b("eq", y64, zero), one, b("where", b("eq", x64, one), one, r))
        return b.cast(r, x.dtype)


def _ordered(b: Builder, e: Expr) -> Expr:
    """`v > 20` and `20 < v` are one spelling, so that softplus is seen in both."""
    if e.op == "where" and e.args[0].op == "gt":
        c = e.args[0]
        return b("where", b("lt", c.args[1], c.args[0]), e.args[1], e.args[2])
    return e
