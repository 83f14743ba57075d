"""Reverse KL(p || t) from the `K` most likely tokens of the teacher.

`S` is the support, `r_v = log p_v - log t_v`, and the *tail* is everything outside `S` as one bucket of
masses `p_tail = 1 - sum_S p` and `t_tail`, with `b = log p_tail - log t_tail`.

| form | value | gradient |
|---|---|---|
| `truncated` | `sum_S p r`: can be negative | biased; not 0 where p == t: it pushes mass out of `S` |
| `tail` | `sum_S p r + p_tail b`: a lower bound on the KL | that bound's |
| `hybrid` | tail, plus `r_a - b` for a sampled token `a` outside `S`: unbiased | exact in expectation |

The hybrid's gradient. The KL's is `sum_v grad p_v (r_v + 1)`: exact on `S`, and outside of it the expectation
of the score function `(r_a + 1) grad log p_a` over sampled tokens. Because `sum_v grad p_v = 0`, a constant
may be taken off every coefficient. With `b + 1` the part on `S`, `sum_S grad p_v (r_v - b)`, is just the tail
bucket's gradient, and the sampled part is `(r_a - b) grad log p_a`: same expectation as with `(r_a + 1)`,
much less noise, and exactly 0 for every sample where p == t. Dropping the constant on one side only would
bias it, as `sum_S grad p` is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from opd.errors import ConfigError
from opd.losses.kl_estimators import check_same_shape, with_gradient


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the hybrid form needs to know about the tokens the student sampled."""

    student_logprobs: Tensor
    """[N] float32, carries the gradient."""
    teacher_logprobs: Tensor
    """[N] float32."""
    outside: Tensor
    """[N] bool: True where the sampled token is not in the teacher's support (see `outside_support`)."""
    importance: Tensor | None = None
    """[N] `p / mu`, detached, for tokens sampled from `mu` rather than the student; `None` is on-policy."""


def outside_support(ids: Tensor, support: Tensor) -> Tensor:
    """[N] bool: whether the token `ids` [N] is missing from its `support` [N, K]."""
    return (support != ids.unsqueeze(-1)).all(dim=-1)


def topk_reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    form: Literal["tail", "hybrid", "truncated"],
    sampled: SampledTokens | None = None,
) -> Tensor:
    """Per-token divergence [N], nats, with the gradient in the table above.

    `student_logprobs` [N, K] (with gradient) and `teacher_logprobs` [N, K] are log-probabilities of the
    support under the full softmax, at the sampling temperature: neither is renormalised over the support.
    `sampled` is needed by `hybrid` only. Raises `ValueError` for different shapes and `ConfigError` for an
    unknown form or a hybrid without sampled tokens.
    """
    check_same_shape(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    teacher_logprobs = teacher_logprobs.detach()
    if form == "truncated":
        return (student_logprobs.exp() * (student_logprobs - teacher_logprobs)).sum(-1)
    if form == "tail":
        return _tail(student_logprobs, teacher_logprobs)[0]
    if form != "hybrid":
        raise ConfigError(f"top-k form {form!r} is unknown; use tail, hybrid or truncated")
    if sampled is None:
        raise ConfigError("the hybrid top-k form needs the sampled tokens' log-probabilities; pass `sampled`")
    bucket, log_ratio = _tail(student_logprobs, teacher_logprobs)
    return bucket + _sampled_correction(sampled, log_ratio)


def _tail(student_logprobs: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Tail-bucket divergence [N] and the bucket's log-ratio `b` [N], detached."""
    probs = student_logprobs.exp()
    ratios = (student_logprobs - teacher_logprobs).detach()
    tail = _tail_mass(probs.detach())
    log_ratio = tail.log() - _tail_mass(teacher_logprobs.exp()).log()
    value = (probs.detach() * ratios).sum(-1) + tail * log_ratio
    # The gradient as sum_S grad p (r - b): where p == t every coefficient is 0, however 1 - sum p is rounded.
    return with_gradient(value, (probs * (ratios - log_ratio.unsqueeze(-1))).sum(-1)), log_ratio


def _tail_mass(probs: Tensor) -> Tensor:
    """[N] mass outside the support; rounding may leave it at 0 or below: at least one unit of rounding."""
    return (1.0 - probs.sum(-1)).clamp(min=torch.finfo(probs.dtype).eps)


def _sampled_correction(sampled: SampledTokens, log_ratio: Tensor) -> Tensor:
    """[N] `r_a - b`, gradient `(r_a - b) grad log p_a`, for sampled tokens outside the support; else 0."""
    logprobs = sampled.student_logprobs
    check_same_shape(
        student_logprobs=logprobs,
        teacher_logprobs=sampled.teacher_logprobs,
        outside=sampled.outside,
        importance=sampled.importance,
        support_rows=log_ratio,
    )
    excess = (logprobs - sampled.teacher_logprobs).detach() - log_ratio
    if sampled.importance is not None:
        excess = excess * sampled.importance.detach()
    excess = torch.where(sampled.outside, excess, 0.0)
    return with_gradient(excess, excess * logprobs)
