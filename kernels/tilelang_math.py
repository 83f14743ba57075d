"""Elementary functions in TileLang, from arithmetic alone, so that a C++ compiler can vectorise them.

A call of the C library's `expf` keeps a loop scalar. Constants are written as products of numbers that
survive the seven decimal digits TileLang prints. Intermediate results are variables, because TileLang repeats
an expression wherever its name is used.
"""

# No `from __future__ import annotations` where kernels are defined: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
from typing import Any, NamedTuple

from opd.kernels.tilelang_target import language

SQRT_HALF_BITS = 0x3F3504F3


class Functions(NamedTuple):
    """Macros over one number of the dtype they were made for; a NaN passes through all of them."""

    exp: Any
    """Arguments at most 80. In float32 the result is 0 below -87.6 and within 1e-7 of the true one above."""
    expm1: Any
    """Arguments within +-80; relative error of 2e-7, near 0 too."""
    log1p: Any
    """Arguments above -1; relative error of 2e-7, near 0 too."""


def functions(dtype: str) -> Functions:
    """The three functions for `float32` or `float64`."""
    return _float32() if dtype == "float32" else _float64()


def _float64() -> Functions:
    """The library's exponential and logarithm; the other two by Kahan's quotients (N. Higham, Accuracy and
    Stability of Numerical Algorithms, section 1.14.1)."""
    T = language()

    one = T.float64(1)

    @T.macro
    def exp(x):
        return T.exp(x)

    @T.macro
    def expm1(x):
        power, quotient = T.alloc_var("float64"), T.alloc_var("float64")
        power = T.exp(x)
        quotient = T.Select(power == one, x, (power - one) * x / T.log(power))
        return T.Select(T.max(x, -x) < one, quotient, power - one)

    @T.macro
    def log1p(x):
        total = T.alloc_var("float64")
        # By way of its bits: TileLang simplifies (x + 1) - 1 to x, and with it the rounding error away.
        total = T.reinterpret(T.reinterpret(x + one, "int64"), "float64")
        return T.Select(total == one, x, T.log(total) * (x / (total - one)))

    return Functions(exp, expm1, log1p)


def _float32() -> Functions:
    """Range reduction by powers of two and the minimax polynomials of the Cephes library (S. Moshier)."""
    T = language()

    def power_of_two(n: Any) -> Any:
        return T.reinterpret((T.cast(n, "int32") + 127) << 23, "float32")

    def expm1_polynomial(f: Any) -> Any:
        total = 1.987569e-4
        for coefficient in (1.398200e-3, 8.333452e-3, 4.166580e-2, 1.666667e-1, 0.5):
            total = total * f + T.float32(coefficient)
        return total * f * f + f

    def remainder(x: Any, n: Any) -> Any:
        """`x - n log 2`, as 355 / 512 - 2.121944e-4: the first product is exact for every n that occurs."""
        return (x - (n * 355.0) * 0.001953125) + n * 2.121944e-4

    @T.macro
    def exp(x):
        bounded, n, f = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
        # Not max(x, -88): on a GPU that would turn a NaN into -88.
        bounded = T.Select(x < T.float32(-88), T.float32(-88), x)
        n = T.floor(bounded * 1.442695 + 0.5)
        f = remainder(bounded, n)
        return (expm1_polynomial(f) + 1.0) * power_of_two(n)

    @T.macro
    def expm1(x):
        n, f, scale = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
        n = T.floor(x * 1.442695 + 0.5)
        f = remainder(x, n)
        scale = power_of_two(n)
        return expm1_polynomial(f) * scale + (scale - 1.0)

    return Functions(exp, expm1, _log1p_float32())


def _log1p_float32() -> Any:
    T = language()

    coefficients = (-1.151461e-1, 1.167700e-1, -1.242014e-1, 1.424932e-1, -1.666806e-1, 2.000071e-1)

    def polynomial(f: Any) -> Any:
        total = 7.037684e-2
        for coefficient in (*coefficients, -2.499999e-1, 3.333333e-1):
            total = total * f + T.float32(coefficient)
        return total

    @T.macro
    def log1p(x):
        bits, total = T.alloc_var("int32"), T.alloc_var("float32")
        n, f, log = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
        bits = T.reinterpret(x + 1.0, "int32")
        # By way of its bits: TileLang simplifies (x + 1) - 1 to x, and with it the rounding error away.
        total = T.reinterpret(bits, "float32")
        bits = bits - SQRT_HALF_BITS
        # total = 2^n (1 + f) with 1 + f in [sqrt 1/2, sqrt 2).
        n = T.cast(bits >> 23, "float32")
        f = T.reinterpret((bits & 0x7FFFFF) + SQRT_HALF_BITS, "float32") - 1.0
        log = (f - f * f * 0.5) + f * f * f * polynomial(f) - n * 2.121944e-4 + (n * 355.0) * 0.001953125
        # What rounding took from 1 + x.
        return log + (x - (total - 1.0)) / total

    return log1p
