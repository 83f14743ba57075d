"""One tile of both models' logits, computed in registers: what every fused kernel begins with."""

# No `from __future__ import annotations` where kernels are defined: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
from dataclasses import dataclass
from typing import Any, NamedTuple

from opd.kernels.tilelang_statistics import MASKED
from opd.kernels.tilelang_target import CPU, CUDA, Target, language


@dataclass(frozen=True)
class TileShape:
    """The part of the product that one block computes, and how it is staged."""

    tokens: int
    columns: int
    depth: int
    stages: int
    threads: int


# On the GPU two float32 accumulators 128 x 128 over 256 threads take 128 registers a thread, and three stages
# of two bf16 operands 96 KiB of shared memory, which the two products use one after the other.
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


class Logits(NamedTuple):
    """A kernel's macros and buffers' shapes for one tile of tempered logits of both models."""

    shape: TileShape
    buffer: Any
    each: Any
    compute: Any
    """`(hidden, weight, bias, (factor, cap), capped, width, token, column, vocabulary, z)`."""


def tile_logits(target: Target, problem: Problem) -> Logits:
    """`z = factor (h W^T + b)`, or `cap tanh` of it, for one tile; `MASKED` beyond the vocabulary."""
    T = language()

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
