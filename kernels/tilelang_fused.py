"""Fused kernels: hidden states and head weights of one tile -> logits in registers -> what is wanted of them.

One block computes one tile of tokens times one tile of the vocabulary, for student and teacher, and never
writes logits. There is no loop over the vocabulary inside a block, so no running statistic can be lost to a
compiler's pipelining; tiles are combined afterwards. `opd.kernels.tilelang_score` calls these.
"""

# No `from __future__ import annotations` where kernels are defined: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
from typing import Any, NamedTuple

from opd.kernels.rows import MAX_LOG_RATIO
from opd.kernels.tilelang_logits import Logits, Problem, tile_logits
from opd.kernels.tilelang_math import functions
from opd.kernels.tilelang_target import Target, language


class Totals(NamedTuple):
    """What is known of a tile's tokens, `[tokens]` each."""

    max_p: Any
    max_q: Any
    sum_p: Any
    sum_q: Any
    mean: Any
    """Divided by `sum_p`."""
    coef: Any


def tile_statistics(target: Target, problem: Problem) -> Any:
    """Statistics of each vocabulary tile, for `opd.kernels.tilelang_score` to combine.

    Arguments: student hidden `[T, Ds]`, weight `[V, Ds]`, bias `[V]`; teacher hidden `[T, Dt]`, weight
    `[V, Dt]`, bias `[V]`; partial `[5, tiles, T]` (written: both maxima, both sums of exponentials,
    `sum e^(p - max_p) d`, the student first); factor and cap of the student, of the teacher. For KL(t || p)
    exchange the models.
    """
    T = language()

    exp, logits = functions("float32").exp, tile_logits(target, problem)
    shape, each, buffer = logits.shape, logits.each, logits.buffer
    tokens, vocabulary, tiles = T.dynamic("tokens"), T.dynamic("vocabulary"), T.dynamic("tiles")

    @T.prim_func
    def statistics(
        student: T.Tensor((tokens, problem.student_width), problem.dtype),
        student_weight: T.Tensor((vocabulary, problem.student_width), problem.dtype),
        student_bias: T.Tensor((vocabulary,), "float32"),
        teacher: T.Tensor((tokens, problem.teacher_width), problem.dtype),
        teacher_weight: T.Tensor((vocabulary, problem.teacher_width), problem.dtype),
        teacher_bias: T.Tensor((vocabulary,), "float32"),
        partial: T.Tensor((5, tiles, tokens), "float32"),
        student_factor: T.float32,
        student_cap: T.float32,
        teacher_factor: T.float32,
        teacher_cap: T.float32,
    ):
        with T.Kernel(tiles, T.ceildiv(tokens, shape.tokens), threads=shape.threads) as (tile, group):
            p = buffer((shape.tokens, shape.columns), "float32")
            q = buffer((shape.tokens, shape.columns), "float32")
            e = buffer((shape.tokens, shape.columns), "float32")
            max_p, max_q, sum_p, sum_q, mean = (buffer((shape.tokens,), "float32") for _ in range(5))
            token, column = group * shape.tokens, tile * shape.columns
            logits.compute(
                student, student_weight, student_bias, (student_factor, student_cap), problem.student_capped,
                problem.student_width, token, column, vocabulary, p,
            )  # fmt: skip
            logits.compute(
                teacher, teacher_weight, teacher_bias, (teacher_factor, teacher_cap), problem.teacher_capped,
                problem.teacher_width, token, column, vocabulary, q,
            )  # fmt: skip
            T.reduce_max(p, max_p, dim=1)
            T.reduce_max(q, max_q, dim=1)
            for i, j in each(shape.tokens, shape.columns):
                p[i, j] = p[i, j] - max_p[i]
                q[i, j] = q[i, j] - max_q[i]
            for i, j in each(shape.tokens, shape.columns):
                e[i, j] = exp(q[i, j])
            T.reduce_sum(e, sum_q, dim=1)
            for i, j in each(shape.tokens, shape.columns):
                e[i, j] = exp(p[i, j])
            T.reduce_sum(e, sum_p, dim=1)
            for i, j in each(shape.tokens, shape.columns):
                e[i, j] = e[i, j] * (p[i, j] - q[i, j])
            T.reduce_sum(e, mean, dim=1)
            for i in each(shape.tokens):
                if token + i < tokens:
                    partial[0, tile, token + i] = max_p[i]
                    partial[1, tile, token + i] = max_q[i]
                    partial[2, tile, token + i] = sum_p[i]
                    partial[3, tile, token + i] = sum_q[i]
                    partial[4, tile, token + i] = mean[i]

    return statistics


def tile_results(target: Target, problem: Problem, kind: str, gradient: bool) -> Any:
    """What needs the totals of a row first: the gradient at the student's logits, or the terms of the
    Jensen-Shannon divergence.

    Arguments: as `tile_statistics` up to the biases; totals `[5, T]` as its partial, of whole rows, `mean`
    divided by the student's sum; coef `[T]` (read for the gradient alone); results (written); beta; factors,
    caps. `results` is `coef * d divergence / d z` `[T, V]` in the problem's dtype, or `[2, tiles, T]` float32
    with `sum e^(p - max_p) log(p / m)` and `sum e^(q - max_q) log(t / m)`.
    """
    T = language()

    logits = tile_logits(target, problem)
    shape, each, buffer = logits.shape, logits.each, logits.buffer
    tokens, vocabulary, tiles = T.dynamic("tokens"), T.dynamic("vocabulary"), T.dynamic("tiles")
    result_shape = (tokens, vocabulary) if gradient else (2, tiles, tokens)
    columns = T.ceildiv(vocabulary, shape.columns) if gradient else tiles
    terms = _TERMS[kind](logits, gradient)

    @T.prim_func
    def results_of_tile(
        student: T.Tensor((tokens, problem.student_width), problem.dtype),
        student_weight: T.Tensor((vocabulary, problem.student_width), problem.dtype),
        student_bias: T.Tensor((vocabulary,), "float32"),
        teacher: T.Tensor((tokens, problem.teacher_width), problem.dtype),
        teacher_weight: T.Tensor((vocabulary, problem.teacher_width), problem.dtype),
        teacher_bias: T.Tensor((vocabulary,), "float32"),
        totals: T.Tensor((5, tokens), "float32"),
        coef: T.Tensor((tokens,), "float32"),
        results: T.Tensor(result_shape, problem.dtype if gradient else "float32"),
        beta: T.float32,
        student_factor: T.float32,
        student_cap: T.float32,
        teacher_factor: T.float32,
        teacher_cap: T.float32,
    ):
        with T.Kernel(columns, T.ceildiv(tokens, shape.tokens), threads=shape.threads) as (tile, group):
            p = buffer((shape.tokens, shape.columns), "float32")
            q = buffer((shape.tokens, shape.columns), "float32")
            row = Totals(*(buffer((shape.tokens,), "float32") for _ in range(6)))
            token, column = group * shape.tokens, tile * shape.columns
            logits.compute(
                student, student_weight, student_bias, (student_factor, student_cap), problem.student_capped,
                problem.student_width, token, column, vocabulary, p,
            )  # fmt: skip
            logits.compute(
                teacher, teacher_weight, teacher_bias, (teacher_factor, teacher_cap), problem.teacher_capped,
                problem.teacher_width, token, column, vocabulary, q,
            )  # fmt: skip
            for i in each(shape.tokens):
                # Tokens beyond the last repeat it; nothing of theirs is written.
                row.max_p[i] = totals[0, T.min(token + i, tokens - 1)]
                row.max_q[i] = totals[1, T.min(token + i, tokens - 1)]
                row.sum_p[i] = totals[2, T.min(token + i, tokens - 1)]
                row.sum_q[i] = totals[3, T.min(token + i, tokens - 1)]
                row.mean[i] = totals[4, T.min(token + i, tokens - 1)]
                row.coef[i] = coef[T.min(token + i, tokens - 1)]
            for i, j in each(shape.tokens, shape.columns):
                p[i, j] = p[i, j] - row.max_p[i]
                q[i, j] = q[i, j] - row.max_q[i]
            terms(p, q, row, beta)
            if gradient:
                for i, j in each(shape.tokens, shape.columns):
                    if token + i < tokens and column + j < vocabulary:
                        results[token + i, column + j] = p[i, j] * row.coef[i]
            else:
                T.reduce_sum(p, row.max_p, dim=1)
                T.reduce_sum(q, row.max_q, dim=1)
                for i in each(shape.tokens):
                    if token + i < tokens:
                        results[0, tile, token + i] = row.max_p[i]
                        results[1, tile, token + i] = row.max_q[i]

    return results_of_tile


def _reverse(logits: Logits, gradient: bool) -> Any:
    """`p` becomes `p (d - E_p[d])`."""
    T = language()

    exp, shape = functions("float32").exp, logits.shape

    @T.macro
    def write(p, q, row, beta):
        for i, j in logits.each(shape.tokens, shape.columns):
            q[i, j] = p[i, j] - q[i, j] - row.mean[i]
        for i, j in logits.each(shape.tokens, shape.columns):
            p[i, j] = exp(p[i, j]) / row.sum_p[i] * q[i, j]

    return write


def _forward(logits: Logits, gradient: bool) -> Any:
    """`p` becomes `p - t`."""
    T = language()

    exp, shape = functions("float32").exp, logits.shape

    @T.macro
    def write(p, q, row, beta):
        for i, j in logits.each(shape.tokens, shape.columns):
            p[i, j] = exp(p[i, j]) / row.sum_p[i] - exp(q[i, j]) / row.sum_q[i]

    return write


def _jsd(logits: Logits, gradient: bool) -> Any:
    """`p` and `q` become a token's terms of the two means, or `p` the gradient."""
    T = language()

    exp, expm1, log1p = functions("float32")
    each, shape = logits.each, logits.shape
    low, high = T.float32(-MAX_LOG_RATIO), T.float32(MAX_LOG_RATIO)

    @T.macro
    def terms(p, q, row, beta):
        ratio, u, e = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
        for i, j in each(shape.tokens, shape.columns):
            ratio = p[i, j] - q[i, j] - T.log(row.sum_p[i] / row.sum_q[i])
            ratio = T.Select(ratio < low, low, T.Select(ratio > high, high, ratio))
            e = exp(p[i, j])
            u = expm1(-ratio) * beta
            u = -log1p(u)
            if gradient:
                p[i, j] = (1 - beta) * e / row.sum_p[i] * (u - row.mean[i])
            else:
                p[i, j] = e * u
                u = expm1(ratio) * (1 - beta)
                u = -log1p(u)
                q[i, j] = exp(q[i, j]) * u

    return terms


_TERMS = {"reverse": _reverse, "forward": _forward, "jsd": _jsd}
