"""Distillation on the sampled tokens alone: one teacher log-probability per token."""

from __future__ import annotations

from torch import Tensor

from opd.losses.kl_estimators import k2
from opd.losses.shapes import check_same_shape


def sampled_k2(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, importance: Tensor | None = None
) -> Tensor:
    """[N] `(log p - log t)^2 / 2`: on-policy, its expected gradient is exactly that of KL(p || t).

    The value is not an unbiased estimate of the KL; log the mean of `kl_estimators.k1` instead. `importance`
    [N] (`p / mu`, see `surrogate.importance_weights`) keeps the gradient exact for tokens sampled from `mu`.
    The same gradient as `opd.algorithms.opd_term` with discount 0 and coefficient 1, without clipping.
    """
    check_same_shape(
        student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs, importance=importance
    )
    loss = k2(student_logprobs, teacher_logprobs)
    return loss if importance is None else importance.detach() * loss
