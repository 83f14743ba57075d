"""Targets and compilation of TileLang kernels: one body serves a CPU and an sm_90a GPU.

The targets differ in four ways only: the number of lanes per row, the buffer of lanes, the loop over them,
and the compiler's options. Functions import TileLang when they need it.

The elementary functions are plain arithmetic, so that a C++ compiler can vectorise them: a call of the C
library's `expf` keeps a loop scalar. Constants are written as products of numbers that survive the seven
decimal digits TileLang prints. Intermediate results are variables, because TileLang repeats an expression
wherever its name is used.
"""

# No `from __future__ import annotations` with kernels: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

# TileLang passes no -O by itself, and reads a float's bits through a pointer to int. No flag relaxes the
# arithmetic of results: -ffast-math would also make the whole process flush denormals.
CPU_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
# Warp specialisation moves the initialisation of running statistics into the vocabulary loop (README.md).
CUDA_PASSES = {"tl.disable_warp_specialized": True}
HOPPER = "sm_90a"


@dataclass(frozen=True)
class Target:
    """A machine, and the shape of a row kernel's work on it.

    A row is read in tiles of `unroll * lanes` logits. Each lane keeps its own statistics.
    """

    name: str
    lanes: int
    unroll: int
    threads: int

    @property
    def is_cpu(self) -> bool:
        """True if the kernel is C++ for this machine's processor."""
        return self.name == "cpu"

    def lane_buffer(self, language: Any) -> Callable[..., Any]:
        """Return the allocator of one number per lane: an array on a CPU, registers of the block on a GPU."""
        return language.alloc_local if self.is_cpu else language.alloc_fragment

    def lane_loop(self, language: Any) -> Callable[..., Any]:
        """Return the loop over lanes: a vectorised loop nest on a CPU, the block's threads on a GPU."""
        return language.grid if self.is_cpu else language.Parallel

    def step_loop(self, language: Any) -> Callable[..., Any]:
        """Return the loop over the steps of a tile. The C++ compiler unrolls by itself."""
        return language.serial if self.is_cpu else language.unroll


# 64 lanes are four AVX-512 registers of float32: enough additions in flight to hide their latency.
CPU = Target("cpu", lanes=32, unroll=16, threads=1)
CUDA = Target(HOPPER, lanes=512, unroll=8, threads=512)


def tilelang_language() -> Any:
    """`tilelang.language`, imported on demand and untyped: a kernel is not Python to a type checker."""
    import tilelang.language

    return tilelang.language


@lru_cache(maxsize=4)
def missing(device: str) -> str | None:
    """Return why compiled kernels cannot run on `device` (`cpu` or `cuda`), with the fix, or None."""
    if importlib.util.find_spec("tilelang") is None:
        return "TileLang is not installed; install opd[tilelang]"
    cache = Path(os.environ.get("TILELANG_CACHE_DIR", "~/.tilelang/cache")).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        return f"TileLang's cache {cache} cannot be made ({wrong.strerror}); set TILELANG_CACHE_DIR"
    if device == "cpu":
        if shutil.which("g++") is None and shutil.which("c++") is None:
            return "TileLang compiles its CPU kernels with a C++ compiler and finds none; install g++"
        return None
    if device != "cuda":
        return f"compiled kernels run on cpu and cuda, not on {device}; use chunked"
    if not torch.cuda.is_available():
        return "no CUDA device can be used"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"the kernels are written for {HOPPER} and this GPU is another; use chunked"
    if shutil.which("nvcc") is None:
        return "TileLang compiles its CUDA kernels with nvcc and finds none; install the CUDA toolkit"
    return None


def target_of(tensor: torch.Tensor) -> Target:
    """Return the target of kernels that read `tensor`.

    Raises `RuntimeError` if they cannot run.
    """
    device = tensor.device.type
    reason = missing(device)
    if reason is not None:
        raise RuntimeError(f"the TileLang kernels cannot run on {device}: {reason}")
    return CPU if device == "cpu" else CUDA


@lru_cache(maxsize=128)
def build_kernel(factory: Callable[..., Any], target: Target, *options: Any) -> Any:
    """Compile `factory(target, *options)` once per process. TileLang caches the result on disk as well.

    Kernels leave the number of tokens and the vocabulary's size open, so neither needs a new compilation.
    """
    import tilelang

    function = factory(target, *options)
    if target.is_cpu:
        return tilelang.compile(
            function, target="c", execution_backend="cython", compile_flags=list(CPU_FLAGS)
        )
    return tilelang.compile(
        function,
        target={"kind": "cuda", "arch": HOPPER},
        execution_backend="tvm_ffi",
        pass_configs=dict(CUDA_PASSES),
    )


SQRT_HALF_BITS = 0x3F3504F3


class Functions(NamedTuple):
    """Macros over one number of a dtype. NaN passes through all of them."""

    exp: Any
    """Arguments at most 80. In float32 the result is 0 below -87.6 and within 1e-7 of the true one above."""
    expm1: Any
    """Arguments within +-80; relative error of 2e-7, near 0 too."""
    log1p: Any
    """Arguments above -1; relative error of 2e-7, near 0 too."""


def elementary_functions(dtype: str) -> Functions:
    """Build the three functions for `float32` or `float64`."""
    return _float32_functions() if dtype == "float32" else _float64_functions()


def _float64_functions() -> Functions:
    """Use the library's exponential and logarithm, and Kahan's quotients for the other two (N. Higham,
    Accuracy and Stability of Numerical Algorithms, section 1.14.1)."""
    T = tilelang_language()

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
        # Use its bits, because TileLang simplifies (x + 1) - 1 to x, and loses the rounding error.
        total = T.reinterpret(T.reinterpret(x + one, "int64"), "float64")
        return T.Select(total == one, x, T.log(total) * (x / (total - one)))

    return Functions(exp, expm1, log1p)


def _float32_functions() -> Functions:
    """Use range reduction by powers of two and the minimax polynomials of the Cephes library (S. Moshier)."""
    T = tilelang_language()

    def power_of_two(n: Any) -> Any:
        return T.reinterpret((T.cast(n, "int32") + 127) << 23, "float32")

    def expm1_polynomial(f: Any) -> Any:
        total = 1.987569e-4
        for coefficient in (1.398200e-3, 8.333452e-3, 4.166580e-2, 1.666667e-1, 0.5):
            total = total * f + T.float32(coefficient)
        return total * f * f + f

    def remainder(x: Any, n: Any) -> Any:
        """`x - n log 2`, as 355 / 512 - 2.121944e-4. The first product is exact for every n that occurs."""
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
    T = tilelang_language()

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
        # Use its bits, because TileLang simplifies (x + 1) - 1 to x, and loses the rounding error.
        total = T.reinterpret(bits, "float32")
        bits = bits - SQRT_HALF_BITS
        # total = 2^n (1 + f) with 1 + f in [sqrt 1/2, sqrt 2).
        n = T.cast(bits >> 23, "float32")
        f = T.reinterpret((bits & 0x7FFFFF) + SQRT_HALF_BITS, "float32") - 1.0
        log = (f - f * f * 0.5) + f * f * f * polynomial(f) - n * 2.121944e-4 + (n * 355.0) * 0.001953125
        # Add the rounding error of 1 + x.
        return log + (x - (total - 1.0)) / total

    return log1p
