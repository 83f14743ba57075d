"""Fused kernels: hidden states and head weights of one tile -> logits in registers -> their results.

One block computes one tile of tokens times one tile of the vocabulary, for student and teacher, and never
writes logits. There is no loop over the vocabulary inside a block, so a compiler's pipelining cannot lose a
running statistic. Tiles are combined afterwards.

`fused_kl` needs `5 * 4 * T * V / 128` bytes beyond its inputs on a GPU, a thirteenth of one model's logits in
bf16. `logits_gradient` recomputes the product and writes the gradient at the student's logits once, in the
inputs' dtype, for the two library matmuls that make `dH` and `dW` of it. `opd.kernels.chunked` trains faster,
because it computes every product once. These kernels take the least memory.
"""

# No `from __future__ import annotations` with kernels: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.kernels import chunked
from opd.kernels.checks import check_divergence, check_pair
from opd.kernels.divergences import MAX_LOG_RATIO
from opd.kernels.head import Head
from opd.kernels.tilelang_rows import MASKED, divergence_
from opd.kernels.tilelang_target import (
    CPU,
    CUDA,
    Target,
    build_kernel,
    elementary_functions,
    target_of,
    tilelang_language,
)
from opd.kernels.tilelang_tokens import ROWS


@dataclass(frozen=True)
class TileShape:
    """The part of the product that one block computes, and its staging."""

    tokens: int
    columns: int
    depth: int
    stages: int
    threads: int


# On the GPU two float32 accumulators 128 x 128 over 256 threads take 128 registers a thread. Three stages of
# two bf16 operands take 96 KiB of shared memory, which the two products use one after the other.
SHAPES = {CPU.name: TileShape(8, 32, 32, 1, 1), CUDA.name: TileShape(128, 128, 64, 3, 256)}


@dataclass(frozen=True)
class KernelProblem:
    """Compilation key of a fused kernel; tokens and vocabulary stay open."""

    dtype: str
    """Dtype of hidden states and weights: `float32` or `float16` on a CPU, `bfloat16` or `float16` on a
    GPU."""
    student_width: int
    teacher_width: int
    student_capped: bool
    teacher_capped: bool


class Logits(NamedTuple):
    """A kernel's macros and buffers' shapes for one tile of tempered logits of both models."""

    shape: TileShape
    buffer: Any
    each: Any
    compute: Any
    """`(hidden, weight, bias, (factor, cap), capped, width, token, column, vocabulary, z)`."""


def tile_logits(target: Target, problem: KernelProblem) -> Logits:
    """Compute `z = factor (h W^T + b)`, or `cap tanh` of it, for one tile; `MASKED` beyond the vocabulary."""
    T = tilelang_language()

    shape, each, buffer = SHAPES[target.name], target.lane_loop(T), target.lane_buffer(T)
    stage = T.alloc_local if target.is_cpu else T.alloc_shared
    pipelined = T.serial if target.is_cpu else lambda count: T.Pipelined(count, num_stages=shape.stages)
    options = {} if target.is_cpu else {"policy": T.GemmWarpPolicy.FullRow}

    @T.macro
    def compute(hidden, weight, bias, scalars, capped, width, token, column, vocabulary, z):
        # Separate buffers for each call: two pipelined loops must not share one. The numbers come as a tuple
        # because a macro renames a kernel's arguments that it is given one by one.
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


class Totals(NamedTuple):
    """Statistics of a tile's tokens, `[tokens]` each."""

    max_p: Any
    max_q: Any
    sum_p: Any
    sum_q: Any
    mean: Any
    """Divided by `sum_p`."""
    coef: Any


def tile_statistics(target: Target, problem: KernelProblem) -> Any:
    """Build the kernel for statistics of each vocabulary tile, which `opd.kernels.tilelang_fused` combines.

    Arguments: student hidden `[T, Ds]`, weight `[V, Ds]`, bias `[V]`; teacher hidden `[T, Dt]`, weight
    `[V, Dt]`, bias `[V]`; partial `[5, tiles, T]` (written: both maxima, both sums of exponentials,
    `sum e^(p - max_p) d`, the student first); factor and cap of the student, of the teacher. For KL(t || p)
    exchange the models.
    """
    T = tilelang_language()

    exp, logits = elementary_functions("float32").exp, tile_logits(target, problem)
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


def tile_results(target: Target, problem: KernelProblem, kind: str, gradient: bool) -> Any:
    """Build the kernel that needs the totals of a row first: the gradient at the student's logits, or the
    terms of the Jensen-Shannon divergence.

    Arguments: as `tile_statistics` up to the biases; totals `[5, T]` as its partial, of full rows, `mean`
    divided by the student's sum; coef `[T]` (read for the gradient only); results (written); beta; factors,
    caps. `results` is `coef * d divergence / d z` `[T, V]` in the problem's dtype, or `[2, tiles, T]` float32
    with `sum e^(p - max_p) log(p / m)` and `sum e^(q - max_q) log(t / m)`.
    """
    T = tilelang_language()

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
                # Tokens beyond the last repeat it and are not written.
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


def _reverse_terms(logits: Logits, gradient: bool) -> Any:
    """Replace `p` by `p (d - E_p[d])`."""
    T = tilelang_language()

    exp, shape = elementary_functions("float32").exp, logits.shape

    @T.macro
    def write(p, q, row, beta):
        for i, j in logits.each(shape.tokens, shape.columns):
            q[i, j] = p[i, j] - q[i, j] - row.mean[i]
        for i, j in logits.each(shape.tokens, shape.columns):
            p[i, j] = exp(p[i, j]) / row.sum_p[i] * q[i, j]

    return write


def _forward_terms(logits: Logits, gradient: bool) -> Any:
    """Replace `p` by `p - t`."""
    T = tilelang_language()

    exp, shape = elementary_functions("float32").exp, logits.shape

    @T.macro
    def write(p, q, row, beta):
        for i, j in logits.each(shape.tokens, shape.columns):
            p[i, j] = exp(p[i, j]) / row.sum_p[i] - exp(q[i, j]) / row.sum_q[i]

    return write


def _jsd_terms(logits: Logits, gradient: bool) -> Any:
    """Replace `p` and `q` by a token's terms of the two means, or `p` by the gradient."""
    T = tilelang_language()

    exp, expm1, log1p = elementary_functions("float32")
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


_TERMS = {"reverse": _reverse_terms, "forward": _forward_terms, "jsd": _jsd_terms}


CPU_DTYPES = (torch.float32, torch.float16)
# In float32 a GPU's matrix units would round the operands to 10 bits.
CUDA_DTYPES = (torch.bfloat16, torch.float16)


class KernelScores(NamedTuple):
    """Divergences, and the statistics for their gradient."""

    values: Tensor
    """[T] float32."""
    totals: Tensor
    """[5, T] float32: both maxima, both sums of exponentials, the mean; student first."""


class _ModelArrays(NamedTuple):
    arrays: tuple[Tensor, Tensor, Tensor]
    scalars: tuple[float, float]
    capped: bool


def fused_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> KernelScores:
    """The per-token divergence `[T]` of `opd.kernels.ops.score_kl`, with the statistics of its gradient.

    Raises `TypeError` for dtypes that the machine's fused kernels do not take, `ValueError` for shapes and
    options that do not fit together, `RuntimeError` without TileLang or a compiler.
    """
    check_pair(student_hidden, student_head, teacher_hidden, teacher_head)
    check_divergence(kind, beta)
    target = target_of(student_hidden)
    student, teacher = (
        _model_arrays(student_hidden, student_head, temperature),
        _model_arrays(teacher_hidden, teacher_head, temperature),
    )
    tokens, columns = len(student_hidden), SHAPES[target.name].columns
    tiles = -(-student_head.vocabulary // columns)
    partial = student_hidden.new_empty((5, tiles, tokens), dtype=torch.float32)
    # KL(t || p) has the statistics of KL(p || t) with the roles exchanged.
    first, second = (teacher, student) if kind == "forward" else (student, teacher)
    if tokens:
        kernel = build_kernel(tile_statistics, target, _kernel_problem(first, second))
        kernel(*first.arrays, *second.arrays, partial, *first.scalars, *second.scalars)
    totals, values = _combine_tiles(partial)
    if kind == "forward":
        totals = totals[[1, 0, 3, 2, 4]]
    if kind == "jsd" and tokens:
        terms = torch.empty_like(partial[:2])
        kernel = build_kernel(tile_results, target, _kernel_problem(student, teacher), kind, False)
        unused = totals[0]
        kernel(
            *student.arrays, *teacher.arrays, totals, unused, terms, beta, *student.scalars, *teacher.scalars
        )
        from_student, from_teacher = terms.double().sum(dim=1) / totals[2:4]
        totals[4] = from_student
        values = beta * from_teacher + (1 - beta) * from_student
    return KernelScores(values.float().clamp_min_(0), totals)


def logits_gradient(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    totals: Tensor,
    coef: Tensor,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """`coef * d divergence / d z` `[T, V]` at the tempered logits `z`, in the dtype of the hidden states.

    `totals` are those of `fused_kl` on the same inputs, `coef` `[T]` the loss gradient at each divergence. A
    softcap's slope is not included.
    """
    target = target_of(student_hidden)
    student, teacher = (
        _model_arrays(student_hidden, student_head, temperature),
        _model_arrays(teacher_hidden, teacher_head, temperature),
    )
    shape = (len(student_hidden), student_head.vocabulary)
    gradient = torch.empty(shape, dtype=student_hidden.dtype, device=student_hidden.device)
    if len(student_hidden):
        kernel = build_kernel(tile_results, target, _kernel_problem(student, teacher), kind, True)
        arrays = (*student.arrays, *teacher.arrays, totals.contiguous(), coef.float().contiguous(), gradient)
        kernel(*arrays, beta, *student.scalars, *teacher.scalars)
    return gradient


def _combine_tiles(partial: Tensor) -> tuple[Tensor, Tensor]:
    """Return totals `[5, T]` and `KL(first || second)` `[T]` from the tiles' statistics `[5, tiles, T]`.

    It uses float64, because the numbers are few.
    """
    max_p, max_q, sum_p, sum_q, mean = partial.double()
    if partial.shape[2] == 0:
        return partial.new_empty((5, 0)), partial.new_empty(0)
    total_max_p, total_max_q = max_p.amax(dim=0), max_q.amax(dim=0)
    x, y = max_p - total_max_p, max_q - total_max_q
    total_p, total_q = (sum_p * x.exp()).sum(dim=0), (sum_q * y.exp()).sum(dim=0)
    total_mean = ((mean + sum_p * (x - y)) * x.exp()).sum(dim=0) / total_p
    totals = torch.stack((total_max_p, total_max_q, total_p, total_q, total_mean)).float()
    return totals, total_mean - (total_p / total_q).log()


def check_width(width: int, target: Target) -> None:
    """Require a width for a GPU, which copies 16 bytes at a time, and whose pipeline needs more than one
    step.
    """
    depth = SHAPES[target.name].depth
    if not target.is_cpu and (width <= depth or width % 8):
        raise ValueError(
            f"fused kernels on a GPU take hidden states wider than {depth}, in steps of 8, not of width "
            f"{width}; use OPD_KERNELS=chunked"
        )


def _model_arrays(hidden: Tensor, head: Head, temperature: float) -> _ModelArrays:
    """Return one model's arrays `[T, D]`, `[V, D]`, `[V]`, and the numbers of its logits."""
    allowed = CPU_DTYPES if hidden.device.type == "cpu" else CUDA_DTYPES
    weight = head.weight.detach()[: head.vocabulary]
    if hidden.dtype not in allowed or weight.dtype != hidden.dtype:
        names = " or ".join(map(str, allowed))
        raise TypeError(
            f"hidden states are {hidden.dtype} and the head is {weight.dtype}; give fused kernels {names}"
        )
    check_width(head.hidden_size, target_of(hidden))
    if head.bias is None:
        bias = torch.zeros(head.vocabulary, device=hidden.device)
    else:
        bias = head.bias.detach()[: head.vocabulary].float()
    factor = head.scale / (head.softcap or temperature)
    cap = (head.softcap or 0.0) / temperature
    return _ModelArrays(
        (hidden.detach().contiguous(), weight.contiguous(), bias), (factor, cap), head.softcap is not None
    )


def _kernel_problem(first: _ModelArrays, second: _ModelArrays) -> KernelProblem:
    dtype = str(first.arrays[0].dtype).removeprefix("torch.")
    return KernelProblem(
        dtype, first.arrays[0].shape[1], second.arrays[0].shape[1], first.capped, second.capped
    )


def score_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    kind: str,
    beta: float,
    temperature: float,
    chunk: int,
) -> Tensor:
    """See `opd.kernels.ops.score_kl`."""
    models = (student_hidden, student_head, teacher_hidden, teacher_head)
    if kind not in _TERMS:
        return chunked.score_kl(*models, kind=kind, beta=beta, temperature=temperature, chunk=chunk)
    return fused_kl(*models, kind=kind, beta=beta, temperature=temperature).values


OPERATIONS = {
    "linear_kl": partial(chunked.linear_kl, row_kernel=divergence_, token_rows=ROWS),
    "linear_logprobs": partial(chunked.linear_logprobs, token_rows=ROWS),
    "linear_logprobs_entropy": partial(chunked.linear_logprobs_entropy, token_rows=ROWS),
    "linear_mixture_kl": partial(chunked.linear_mixture_kl, row_kernel=divergence_, token_rows=ROWS),
    "logits_kl": partial(chunked.logits_kl, row_kernel=divergence_),
    "score_kl": score_kl,
}
"""The operations with compiled kernels; the others are those of `opd.kernels.chunked`."""
