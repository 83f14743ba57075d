"""Fused kernels: hidden states and head weights of one tile -> logits in registers -> what is wanted of them.

One block computes one tile of tokens times one tile of the vocabulary, for student and teacher, and never
writes logits. There is no loop over the vocabulary inside a block, so no running statistic can be lost to a
compiler's pipelining; tiles are combined afterwards. `opd.kernels.tilelang_score` calls these.
"""

# No `from __future__ import annotations` where kernels are defined: TileLang evaluates their annotations.
from dataclasses import dataclass
from typing import Any, NamedTuple

from opd.kernels.rows import MAX_LOG_RATIO
from opd.kernels.tilelang_math import functions
from opd.kernels.tilelang_statistics import MASKED
from opd.kernels.tilelang_target import CPU, CUDA, Target


@dataclass(frozen=True)
class TileShape:
    """The part of the product that one block computes, and how it is staged."""

    tokens: int
    columns: int
    depth: int
    stages: int
    threads: int


# Two float32 accumulators 128 x 128 over 256 threads: 128 registers each thread, and three stages of two bf16
# operands fill 192 KiB of shared memory (two pipelines of 96 KiB).
SHAPES = {CPU.name: TileShape(8, 32, 32, 1, 1), CUDA.name: TileShape(128, 128, 64, 3, 256)}


@dataclass(frozen=True)
class Problem:
    """What a fused kernel is compiled for; tokens and vocabulary stay open."""

    dtype: str
    """Of hidden states and weights: `float32` or `float16` on a CPU, `bfloat16` or `float16` on a GPU."""
    student_width: int
    teacher_width: int
    student_capped: bool
    teacher_capped: bool


class Totals(NamedTuple):
    """What is known of a tile's tokens, `[tokens]` each."""

    max_p: Any
    max_q: Any
    sum_p: Any
    sum_q: Any
    mean: Any
    """Divided by `sum_p`."""
    coef: Any


class Logits(NamedTuple):
    """A kernel's macros and buffers' shapes for one tile of tempered logits of both models."""

    shape: TileShape
    buffer: Any
    each: Any
    compute: Any
    """`(hidden, weight, bias, (factor, cap), capped, width, token, column, vocabulary, z)`."""


def _logits(target: Target, problem: Problem) -> Logits:
    """`z = factor (h W^T + b)`, or `cap tanh` of it, for one tile; `MASKED` beyond the vocabulary."""
    import tilelang.language as T

    shape, each, buffer = SHAPES[target.name], target.lane_loop(T), target.lane_buffer(T)
    stage = T.alloc_local if target.is_cpu else T.alloc_shared
    pipelined = T.serial if target.is_cpu else lambda count: T.Pipelined(count, num_stages=shape.stages)
    options = {} if target.is_cpu else {"policy": T.GemmWarpPolicy.FullRow}

    @T.macro
    def compute(hidden, weight, bias, scalars, capped, width, token, column, vocabulary, z):
        # Buffers of their own for each call: two pipelined loops must not share one. The numbers come as a
        # tuple because a macro renames the kernel's arguments that it is given one by one.
        a = stage((shape.tokens, shape.depth), problem.dtype)
        b = stage((shape.columns, shape.depth), problem.dtype)
        T.clear(z)
        for k in pipelined(T.ceildiv(width, shape.depth)):
            T.copy(hidden[token : token + shape.tokens, k * shape.depth : (k + 1) * shape.depth], a)
            T.copy(weight[column : column + shape.columns, k * shape.depth : (k + 1) * shape.depth], b)
            T.gemm(a, b, z, transpose_B=True, **options)
        for i, j in each(shape.tokens, shape.columns):
            if column + j < vocabulary:
                z[i, j] = (z[i, j] + bias[column + j]) * scalars[0]
                if capped:
                    z[i, j] = T.tanh(z[i, j]) * scalars[1]
            else:
                z[i, j] = MASKED

    return Logits(shape, buffer, each, compute)


def tile_statistics(target: Target, problem: Problem) -> Any:
    """Statistics of each vocabulary tile, for `opd.kernels.tilelang_score` to combine.

    Arguments: student hidden `[T, Ds]`, weight `[V, Ds]`, bias `[V]`; teacher hidden `[T, Dt]`, weight
    `[V, Dt]`, bias `[V]`; partial `[5, tiles, T]` (written: both maxima, both sums of exponentials,
    `sum e^(p - max_p) d`, the student first); factor and cap of the student, of the teacher. For KL(t || p)
    exchange the models.
    """
    import tilelang.language as T

    exp, logits = functions("float32").exp, _logits(target, problem)
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
    import tilelang.language as T

    logits = _logits(target, problem)
    shape, each, buffer = logits.shape, logits.each, logits.buffer
    tokens, vocabulary, tiles = T.dynamic("tokens"), T.dynamic("vocabulary"), T.dynamic("tiles")
    result_shape = (tokens, vocabulary) if gradient else (2, tiles, tokens)
    columns = T.ceildiv(vocabulary, shape.columns) if gradient else tiles
    terms = _jsd_terms(logits) if kind == "jsd" else None
    pair = _KL_GRADIENT[kind](logits) if kind != "jsd" else None

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
            if kind == "jsd":
                terms(p, q, row, beta, gradient)
            else:
                pair(p, q, row)
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


def _reverse(logits: Logits) -> Any:
    """`p` becomes `p (d - E_p[d])`."""
    import tilelang.language as T

    exp, shape = functions("float32").exp, logits.shape

    @T.macro
    def write(p, q, row):
        for i, j in logits.each(shape.tokens, shape.columns):
            q[i, j] = p[i, j] - q[i, j] - row.mean[i]
        for i, j in logits.each(shape.tokens, shape.columns):
            p[i, j] = exp(p[i, j]) / row.sum_p[i] * q[i, j]

    return write


def _forward(logits: Logits) -> Any:
    """`p` becomes `p - t`."""
    import tilelang.language as T

    exp, shape = functions("float32").exp, logits.shape

    @T.macro
    def write(p, q, row):
        for i, j in logits.each(shape.tokens, shape.columns):
            p[i, j] = exp(p[i, j]) / row.sum_p[i] - exp(q[i, j]) / row.sum_q[i]

    return write


_KL_GRADIENT = {"reverse": _reverse, "forward": _forward}


def _jsd_terms(logits: Logits) -> Any:
    """`p` and `q` become a token's terms of the two means, or `p` the gradient."""
    import tilelang.language as T

    exp, expm1, log1p = functions("float32")
    each, shape = logits.each, logits.shape
    low, high = T.float32(-MAX_LOG_RATIO), T.float32(MAX_LOG_RATIO)

    @T.macro
    def terms(p, q, row, beta, gradient):
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
