"""The operations with compiled row kernels: chunked matmuls from the library, TileLang between them.

Same names and arguments as `opd.kernels.chunked`; operations without a compiled kernel are that module's own.
Call them through `opd.kernels.ops`, which checks inputs, with `OPD_KERNELS=tilelang`.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from opd.kernels import chunked
from opd.kernels.chunked import (
    geometric_floor,
    linear_logprobs,
    linear_logprobs_entropy,
    linear_topk,
    selective_log_softmax,
    topk_log_probs,
)
from opd.kernels.head import Head
from opd.kernels.tilelang_fused import fused_kl
from opd.kernels.tilelang_rows import divergence_

__all__ = [
    "geometric_floor",
    "linear_kl",
    "linear_logprobs",
    "linear_logprobs_entropy",
    "linear_mixture_kl",
    "linear_topk",
    "logits_kl",
    "score_kl",
    "selective_log_softmax",
    "topk_log_probs",
]

linear_kl = partial(chunked.linear_kl, row_kernel=divergence_)
linear_mixture_kl = partial(chunked.linear_mixture_kl, row_kernel=divergence_)
logits_kl = partial(chunked.logits_kl, row_kernel=divergence_)


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
    options = {"kind": kind, "beta": beta, "temperature": temperature}
    return fused_kl(student_hidden, student_head, teacher_hidden, teacher_head, **options).values
