"""The streaming row kernel: two blocks of logits -> divergences and, in place, their gradient.

Compiled, with the signature and contract of `opd.kernels.divergences.divergence_`. One sweep over both blocks
collects each row's statistics, and a second one writes the gradient. The Jensen-Shannon divergence is a sum
over tokens only once both normalisers are known, so it takes a sweep of its own for the value.

With running maxima `m_p`, `m_q` a lane keeps `sum e^(p - m_p)`, `sum e^(q - m_q)` and `a = sum e^(p - m_p)
d`, `d = (p - m_p) - (q - m_q)`. Moving to larger maxima by `x = m_p - m_p'` and `y = m_q - m_q'` is exact
algebra: `a' = (a + sum_p (x - y)) e^x`, `sum_p' = sum_p e^x`, `sum_q' = sum_q e^y`. Once lanes share their
maxima their sums add up, and `KL(p || q) = a / sum_p - log(sum_p / sum_q)`.
"""

# No `from __future__ import annotations` with kernels: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.kernels import divergences, verification
from opd.kernels.divergences import MAX_LOG_RATIO
from opd.kernels.tilelang_target import (
    Target,
    build_kernel,
    elementary_functions,
    target_of,
    tilelang_language,
)

# An empty lane holds LOWEST. An index beyond the vocabulary reads MASKED, so its exponential is 0 even there.
# Both are finite, because a difference of infinities would be NaN.
LOWEST = -1e30
MASKED = -2e30


class Lanes(NamedTuple):
    """Buffers `[1, lanes]` and, from `row_max_p` on, totals `[1]`. `p` weighs the mean."""

    max_p: Any
    max_q: Any
    sum_p: Any
    sum_q: Any
    mean: Any
    part_p: Any
    """One tile's share of a sum, added up separately because short sums round less."""
    part_q: Any
    part_mean: Any
    x: Any
    y: Any
    e: Any
    row_max_p: Any
    row_max_q: Any
    row_sum_p: Any
    row_sum_q: Any
    row_mean: Any
    """Not yet divided by `row_sum_p`."""

    @classmethod
    def allocate_lanes(cls, target: Target, dtype: str) -> "Lanes":
        """Allocate the buffers; call it inside a kernel."""
        T = tilelang_language()

        buffer = target.lane_buffer(T)
        lanes = [buffer((1, target.lanes), dtype) for _ in range(11)]
        return cls(*lanes, *(buffer((1,), dtype) for _ in range(5)))


class FirstSweep(NamedTuple):
    """Macros that fill `Lanes`."""

    start: Any
    """`(lanes)`: reset, once before the loop over the vocabulary."""
    absorb: Any
    """`(lanes, p, q, row, begin, vocabulary, masked)`: add the tile of both rows from `begin` on."""
    merge: Any
    """`(lanes)`: compute the row's totals."""


def logit_reader(dtype: str) -> Any:
    """Return `at(logits, row, index, vocabulary, masked)`: a logit, or `MASKED` beyond the vocabulary."""
    T = tilelang_language()

    def at(logits: Any, row: Any, index: Any, vocabulary: Any, masked: bool) -> Any:
        if not masked:
            return logits[row, index]
        return T.if_then_else(index < vocabulary, logits[row, index], T.cast(MASKED, dtype))

    return at


def first_sweep(target: Target, dtype: str) -> FirstSweep:
    """Build the macros for one target and dtype."""
    T = tilelang_language()

    start, rescale, merge = _lane_macros(target, dtype)
    raise_maxima, exp, at = (
        _raise_maxima(target, dtype, rescale),
        elementary_functions(dtype).exp,
        logit_reader(dtype),
    )
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def absorb(s, p, q, row, begin, vocabulary, masked):
        raise_maxima(s, p, q, row, begin, vocabulary, masked)
        for o, i in each(1, lanes):
            s.part_p[o, i] = 0.0
            s.part_q[o, i] = 0.0
            s.part_mean[o, i] = 0.0
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.x[o, i] = at(p, row, begin + u * lanes + i, vocabulary, masked) - s.max_p[o, i]
                s.y[o, i] = at(q, row, begin + u * lanes + i, vocabulary, masked) - s.max_q[o, i]
            for o, i in each(1, lanes):
                s.e[o, i] = exp(s.x[o, i])
            for o, i in each(1, lanes):
                s.part_p[o, i] = s.part_p[o, i] + s.e[o, i]
                s.part_mean[o, i] = s.part_mean[o, i] + s.e[o, i] * (s.x[o, i] - s.y[o, i])
                s.part_q[o, i] = s.part_q[o, i] + exp(s.y[o, i])
        for o, i in each(1, lanes):
            s.sum_p[o, i] = s.sum_p[o, i] + s.part_p[o, i]
            s.sum_q[o, i] = s.sum_q[o, i] + s.part_q[o, i]
            s.mean[o, i] = s.mean[o, i] + s.part_mean[o, i]

    return FirstSweep(start, absorb, merge)


def _raise_maxima(target: Target, dtype: str, rescale: Any) -> Any:
    """Build the macro that moves each lane's statistics to a tile's larger maxima."""
    T = tilelang_language()

    at = logit_reader(dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def raise_maxima(s, p, q, row, begin, vocabulary, masked):
        for o, i in each(1, lanes):
            s.part_p[o, i] = s.max_p[o, i]
            s.part_q[o, i] = s.max_q[o, i]
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.part_p[o, i] = T.max(s.part_p[o, i], at(p, row, begin + u * lanes + i, vocabulary, masked))
                s.part_q[o, i] = T.max(s.part_q[o, i], at(q, row, begin + u * lanes + i, vocabulary, masked))
        for o, i in each(1, lanes):
            s.x[o, i] = s.max_p[o, i] - s.part_p[o, i]
            s.y[o, i] = s.max_q[o, i] - s.part_q[o, i]
        rescale(s)
        for o, i in each(1, lanes):
            s.max_p[o, i] = s.part_p[o, i]
            s.max_q[o, i] = s.part_q[o, i]

    return raise_maxima


def _lane_macros(target: Target, dtype: str) -> tuple[Any, Any, Any]:
    """Build the macros that read no logits: `start`, `rescale` and `merge`."""
    T = tilelang_language()

    exp, each, lanes = elementary_functions(dtype).exp, target.lane_loop(T), target.lanes

    @T.macro
    def start(s):
        for o, i in each(1, lanes):
            s.max_p[o, i] = LOWEST
            s.max_q[o, i] = LOWEST
            s.sum_p[o, i] = 0.0
            s.sum_q[o, i] = 0.0
            s.mean[o, i] = 0.0

    @T.macro
    def rescale(s):
        """Move the sums by `x` and `y`, which are at most 0."""
        for o, i in each(1, lanes):
            s.e[o, i] = exp(s.x[o, i])
        for o, i in each(1, lanes):
            s.mean[o, i] = (s.mean[o, i] + s.sum_p[o, i] * (s.x[o, i] - s.y[o, i])) * s.e[o, i]
            s.sum_p[o, i] = s.sum_p[o, i] * s.e[o, i]
            s.sum_q[o, i] = s.sum_q[o, i] * exp(s.y[o, i])

    @T.macro
    def merge(s):
        T.reduce_max(s.max_p, s.row_max_p, dim=1)
        T.reduce_max(s.max_q, s.row_max_q, dim=1)
        for o, i in each(1, lanes):
            s.x[o, i] = s.max_p[o, i] - s.row_max_p[o]
            s.y[o, i] = s.max_q[o, i] - s.row_max_q[o]
        rescale(s)
        T.reduce_sum(s.sum_p, s.row_sum_p, dim=1)
        T.reduce_sum(s.sum_q, s.row_sum_q, dim=1)
        T.reduce_sum(s.mean, s.row_mean, dim=1)

    return start, rescale, merge


DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def divergence_(student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, /) -> Tensor:
    """Return the divergence of each row `[R]` between two chunks of logits `[R, V]`, both overwritten.

    With `coef` `[R]`, `student` is left holding `coef * d divergence / d student logits`. A row's result does
    not depend on the other rows or on the number of threads. PyTorch computes a kind without a kernel here.
    Raises `TypeError` for logits that are neither float32 nor float64, `ValueError` for rows that are not
    contiguous, and `RuntimeError` without TileLang or a compiler.
    """
    if student.dtype not in DTYPES or teacher.dtype != student.dtype:
        raise TypeError(
            f"logits are {student.dtype} and {teacher.dtype}; give float32 or float64, both the same"
        )
    if kind not in _GRADIENTS:
        return divergences.divergence_(student, teacher, kind, beta, coef)
    if not (student.is_contiguous() and teacher.is_contiguous()):
        raise ValueError("logits given to a compiled row kernel must be contiguous; call .contiguous() first")
    target = target_of(student)
    kernel, gradient = build_kernel(row_kernel, target, kind, DTYPES[student.dtype]), int(coef is not None)
    values = torch.empty(len(student), dtype=student.dtype, device=student.device)
    # Without a gradient the kernel never reads coef, but it needs a pointer.
    coef = values if coef is None else coef.to(student.dtype).contiguous()
    run_rows(lambda *arrays: kernel(*arrays, beta, gradient), student, teacher, coef, values)
    # A divergence is never negative, but rounding may give a few -1e-8. NaN passes through.
    return values.clamp_min_(0)


def verified_divergence_(
    student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, /
) -> Tensor:
    """Run `divergence_` for float32 on a CPU if it was verified for this vocabulary, else PyTorch's."""
    fits = kind in _GRADIENTS and student.device.type == "cpu" and student.dtype == torch.float32
    if fits and trusted(kind, student.shape[1]):
        return divergence_(student, teacher, kind, beta, coef)
    return divergences.divergence_(student, teacher, kind, beta, coef)


def quiet_compilation() -> None:
    """Keep compilations out of a run's log."""
    tilelang_language()  # its import sets the level that is raised here
    logging.getLogger("tilelang").setLevel(logging.WARNING)


PROVED: set[str] = set()
"""Kinds whose kernel this process has verified, and uses; `tokens` for single ones."""


@lru_cache(maxsize=64)
def trusted(kind: str, vocabulary: int) -> bool:
    """Return True if the kernel agrees with float64 on this processor, checked once per kind and vocabulary.

    The result decides, never a clock, so a resumed run uses the kernels that it began with. A kernel that
    fails, or cannot be compiled, is skipped with a warning.
    """
    quiet_compilation()

    def launch(
        student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, _: Any
    ) -> Tensor:
        return divergence_(student, teacher, kind, beta, coef)

    if not verification.verify_row_kernel(
        "TileLang", "here", launch, kind, vocabulary, torch.device("cpu"), rounds=False
    ):
        return False
    PROVED.add(kind)
    return True


def run_rows(kernel: Callable[..., Any], *arrays: Tensor) -> None:
    """Run a compiled kernel on arrays of `R` rows each, on a CPU shared out over PyTorch's threads."""
    rows = len(arrays[0])
    threads = min(torch.get_num_threads(), rows) if arrays[0].device.type == "cpu" else 1
    if threads > 1:
        parts = zip(*(array.tensor_split(threads) for array in arrays), strict=True)
        list(_thread_pool(threads).map(lambda part: kernel(*part), parts))
    elif rows:
        kernel(*arrays)


@lru_cache(maxsize=4)
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool that shares out the rows: a compiled kernel runs without the interpreter's lock."""
    return ThreadPoolExecutor(threads, thread_name_prefix="opd-rows")


def row_kernel(target: Target, kind: str, dtype: str) -> Any:
    """Build the kernel's TileLang function, for any number of rows and any vocabulary.

    Arguments: student `[R, V]`, teacher `[R, V]`, coef `[R]`, values `[R]` (written), all `dtype`; beta; 1 to
    write the gradient, else 0.
    """
    T = tilelang_language()

    rows, vocabulary, tile = T.dynamic("rows"), T.dynamic("vocabulary"), target.lanes * target.unroll
    sweep = first_sweep(target, dtype)
    each = target.lane_loop(T)
    jsd_value = _jsd_value(target, dtype)
    write_gradient = _GRADIENTS[kind](target, dtype)

    @T.macro
    def tiles(body, *arguments):
        """Run `body` for every full tile of the vocabulary, then for a shorter last one, if any."""
        for t in T.serial(vocabulary // tile):
            body(*arguments, t * tile, vocabulary, False)
        for t in T.serial(vocabulary // tile, T.ceildiv(vocabulary, tile)):
            body(*arguments, t * tile, vocabulary, True)

    @T.prim_func
    def divergence(
        student: T.Tensor((rows, vocabulary), dtype),
        teacher: T.Tensor((rows, vocabulary), dtype),
        coef: T.Tensor((rows,), dtype),
        values: T.Tensor((rows,), dtype),
        beta: getattr(T, dtype),
        gradient: T.int32,
    ):
        with T.Kernel(rows, threads=target.threads) as row:
            s = Lanes.allocate_lanes(target, dtype)
            # KL(t || p) has the statistics of KL(p || t) with the roles exchanged.
            p, q = (teacher, student) if kind == "forward" else (student, teacher)
            sweep.start(s)
            tiles(sweep.absorb, s, p, q, row)
            sweep.merge(s)
            if kind == "jsd":
                for o, i in each(1, target.lanes):
                    s.part_p[o, i] = T.log(s.row_sum_p[o] / s.row_sum_q[o])
                    s.mean[o, i] = 0.0
                    s.sum_q[o, i] = 0.0
                tiles(jsd_value, s, p, q, beta, row)
                T.reduce_sum(s.mean, s.row_mean, dim=1)
                T.reduce_sum(s.sum_q, s.row_max_q, dim=1)
                for o in each(1):
                    values[row] = beta * (s.row_max_q[o] / s.row_sum_q[o]) + (1 - beta) * (
                        s.row_mean[o] / s.row_sum_p[o]
                    )
            else:
                for o in each(1):
                    values[row] = s.row_mean[o] / s.row_sum_p[o] - T.log(s.row_sum_p[o] / s.row_sum_q[o])
            if gradient != 0:
                tiles(write_gradient, s, p, q, coef, beta, row)

    return divergence


def _reverse_gradient(target: Target, dtype: str) -> Any:
    """Build `p (d - E_p[d])`, with `p` the student."""
    T = tilelang_language()

    exp, at = elementary_functions(dtype).exp, logit_reader(dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def write(s, p, q, coef, beta, row, begin, vocabulary, masked):
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.x[o, i] = at(p, row, begin + u * lanes + i, vocabulary, masked) - s.row_max_p[o]
                s.y[o, i] = at(q, row, begin + u * lanes + i, vocabulary, masked) - s.row_max_q[o]
            for o, i in each(1, lanes):
                s.e[o, i] = exp(s.x[o, i]) * (coef[row] / s.row_sum_p[o])
            for o, i in each(1, lanes):
                if not masked or begin + u * lanes + i < vocabulary:
                    p[row, begin + u * lanes + i] = s.e[o, i] * (
                        s.x[o, i] - s.y[o, i] - s.row_mean[o] / s.row_sum_p[o]
                    )

    return write


def _forward_gradient(target: Target, dtype: str) -> Any:
    """Build `q - p`, with `p` the teacher and `q` the student."""
    T = tilelang_language()

    exp, at = elementary_functions(dtype).exp, logit_reader(dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def write(s, p, q, coef, beta, row, begin, vocabulary, masked):
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.x[o, i] = exp(at(p, row, begin + u * lanes + i, vocabulary, masked) - s.row_max_p[o])
                s.y[o, i] = exp(at(q, row, begin + u * lanes + i, vocabulary, masked) - s.row_max_q[o])
            for o, i in each(1, lanes):
                if not masked or begin + u * lanes + i < vocabulary:
                    q[row, begin + u * lanes + i] = coef[row] * (
                        s.y[o, i] / s.row_sum_q[o] - s.x[o, i] / s.row_sum_p[o]
                    )

    return write


def _jsd_terms(target: Target, dtype: str) -> Any:
    """Build the macro for a token's terms: `e` and `x` become `e^(p - max)` and `u = log(p / m)`, and `y`
    becomes `e^(q - max) log(t / m)`.

    It expects the log-ratio of the normalisers in `part_p`.
    """
    T = tilelang_language()

    exp, expm1, log1p = elementary_functions(dtype)
    at = logit_reader(dtype)
    low, high = T.cast(-MAX_LOG_RATIO, dtype), T.cast(MAX_LOG_RATIO, dtype)
    each, lanes = target.lane_loop(T), target.lanes

    @T.macro
    def terms(s, p, q, beta, row, at_token, vocabulary, masked):
        for o, i in each(1, lanes):
            s.x[o, i] = at(p, row, at_token + i, vocabulary, masked) - s.row_max_p[o]
            s.y[o, i] = at(q, row, at_token + i, vocabulary, masked) - s.row_max_q[o]
        for o, i in each(1, lanes):
            s.e[o, i] = exp(s.x[o, i])
            s.part_q[o, i] = exp(s.y[o, i])
        for o, i in each(1, lanes):
            s.x[o, i] = s.x[o, i] - s.y[o, i] - s.part_p[o, i]
        for o, i in each(1, lanes):
            # Unlike max and min on a GPU, selections pass a NaN on.
            s.x[o, i] = T.Select(s.x[o, i] < low, low, T.Select(s.x[o, i] > high, high, s.x[o, i]))
        for o, i in each(1, lanes):
            s.y[o, i] = expm1(s.x[o, i]) * (1 - beta)
            s.part_mean[o, i] = expm1(-s.x[o, i]) * beta
        for o, i in each(1, lanes):
            s.y[o, i] = -log1p(s.y[o, i]) * s.part_q[o, i]
        for o, i in each(1, lanes):
            s.x[o, i] = -log1p(s.part_mean[o, i])

    return terms


def _jsd_value(target: Target, dtype: str) -> Any:
    """Build the sums of `beta KL(t || m) + (1 - beta) KL(p || m)`, in `mean` (of the student) and `sum_q`.

    They replace the student's logits by `u = log(p / m)` and the teacher's by `e^(p - max)`.
    """
    T = tilelang_language()

    terms = _jsd_terms(target, dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def value(s, p, q, beta, row, begin, vocabulary, masked):
        for u in steps(unroll):
            terms(s, p, q, beta, row, begin + u * lanes, vocabulary, masked)
            for o, i in each(1, lanes):
                s.mean[o, i] = s.mean[o, i] + s.e[o, i] * s.x[o, i]
                s.sum_q[o, i] = s.sum_q[o, i] + s.y[o, i]
            for o, i in each(1, lanes):
                if not masked or begin + u * lanes + i < vocabulary:
                    p[row, begin + u * lanes + i] = s.x[o, i]
                    q[row, begin + u * lanes + i] = s.e[o, i]

    return value


def _jsd_gradient(target: Target, dtype: str) -> Any:
    """Build `(1 - beta) p (u - E_p[u])`, from the results of the sweep for the value."""
    T = tilelang_language()

    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def write(s, p, q, coef, beta, row, begin, vocabulary, masked):
        for u in steps(unroll):
            for o, i in each(1, lanes):
                if not masked or begin + u * lanes + i < vocabulary:
                    p[row, begin + u * lanes + i] = (
                        (coef[row] * (1 - beta) / s.row_sum_p[o])
                        * q[row, begin + u * lanes + i]
                        * (p[row, begin + u * lanes + i] - s.row_mean[o] / s.row_sum_p[o])
                    )

    return write


_GRADIENTS = {"reverse": _reverse_gradient, "forward": _forward_gradient, "jsd": _jsd_gradient}
