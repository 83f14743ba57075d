"""The divergences over the whole vocabulary, each in one entry of `DIVERGENCES`: its name, its formula, its
row form.

The formula is what every kernel is tested against in float64, and what `OPD_KERNELS=reference`
differentiates. The row form is what the chunked operations run: it overwrites both blocks of logits and
leaves the gradient in the student's. All subtract the row's maximum first, so nothing overflows at any finite
logit, and none forms a log-probability where a difference of shifted logits will do, so that values near zero
keep their absolute precision. README.md has the derivations. A kernel in TileLang or Triton may have some of
them; the others are these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.kernels.rows import ALL_COLUMNS, MAX_LOG_RATIO, Columns, shift_both_


@dataclass(frozen=True)
class Divergence:
    """One divergence between a student `p` and a teacher `t`."""

    formula: Callable[[Tensor, Tensor, float], Tensor]
    """`(log p, log t, beta) -> [T]` of log-probabilities `[T, V]`, written plainly for autograd."""
    rows: Callable[[Tensor, Tensor, float, Tensor | None, Columns], Tensor]
    """`(student, teacher, beta, coef, columns) -> [R, 1]` of logits `[R, V]`, both overwritten; with `coef`
    `[R, 1]` the student's are left as `coef * d divergence / d student logits`."""
    uses_beta: bool = False
    """Whether `beta`, strictly between 0 and 1, changes it."""


def divergence_(
    student: Tensor,
    teacher: Tensor,
    kind: str,
    beta: float,
    coef: Tensor | None,
    /,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """Divergence of each row `[R]` between two chunks of logits `[R, V]`, both overwritten.

    With `coef` `[R]`, `student` is left holding `coef * d divergence / d student logits`.
    """
    values = student.new_empty(len(student))
    rows = DIVERGENCES[kind].rows
    for block in columns.blocks(student):
        column = None if coef is None else coef[block].unsqueeze(1)
        values[block] = rows(student[block], teacher[block], beta, column, columns).squeeze(1)
    # A divergence is never negative; rounding may say so by a few 1e-8. NaN passes through.
    return values.clamp_min_(0)


def _reverse_kl(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return (student.exp() * (student - teacher)).sum(dim=1)


def _forward_kl(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(dim=1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    from_teacher = (teacher.exp() * (teacher - mixture)).sum(dim=1)
    from_student = (student.exp() * (student - mixture)).sum(dim=1)
    return beta * from_teacher + (1 - beta) * from_student


def _reverse_kl_(
    student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns
) -> Tensor:
    """KL(p || t) = E_p[d] - log(l_s / l_t) with d the difference of shifted logits; g = p (d - E_p[d])."""
    shift_both_(student, teacher, columns)
    scratch = torch.exp(teacher)
    sum_t = scratch.sum(dim=1, keepdim=True)
    difference = torch.sub(student, teacher, out=teacher)
    exp_s = student.exp_()
    sum_s = exp_s.sum(dim=1, keepdim=True)
    mean = torch.mul(exp_s, difference, out=scratch).sum(dim=1, keepdim=True)
    sum_s, sum_t, mean = columns.sum(sum_s, sum_t, mean)
    mean = mean / sum_s
    if coef is not None:
        student.mul_(difference.sub_(mean)).mul_(coef / sum_s)
    return mean - (sum_s / sum_t).log_()


def _forward_kl_(
    student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns
) -> Tensor:
    """KL(t || p) = E_t[d] - log(l_t / l_s) with d = teacher - student; g = p - t."""
    shift_both_(student, teacher, columns)
    exp_s = torch.exp(student)
    sum_s = exp_s.sum(dim=1, keepdim=True)
    difference = torch.sub(teacher, student, out=student)
    exp_t = teacher.exp_()
    sum_t = exp_t.sum(dim=1, keepdim=True)
    mean = difference.mul_(exp_t).sum(dim=1, keepdim=True)
    sum_s, sum_t, mean = columns.sum(sum_s, sum_t, mean)
    if coef is not None:
        torch.mul(exp_s, coef / sum_s, out=student).addcmul_(exp_t, coef / sum_t, value=-1)
    return mean / sum_t - (sum_t / sum_s).log_()


def _jsd_(student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns) -> Tensor:
    """beta KL(t || m) + (1 - beta) KL(p || m); g = (1 - beta) p (u - E_p[u]) with u = log(p / m).

    In the log-ratio r = log p - log t: u = -log(1 + beta (e^-r - 1)), log(t / m) = -log(1 + (1-beta) (e^r -
    1)).
    """
    shift_both_(student, teacher, columns)
    exp_s, exp_t = torch.exp(student), torch.exp(teacher)
    sum_s, sum_t = columns.sum(exp_s.sum(dim=1, keepdim=True), exp_t.sum(dim=1, keepdim=True))
    ratio = student.sub_(teacher).sub_((sum_s / sum_t).log_()).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_t_over_m = torch.expm1(ratio, out=teacher).mul_(1 - beta).log1p_().neg_()
    mean_t = exp_t.mul_(log_t_over_m).sum(dim=1, keepdim=True)
    log_p_over_m = ratio.neg_().expm1_().mul_(beta).log1p_().neg_()
    mean_s = torch.mul(exp_s, log_p_over_m, out=teacher).sum(dim=1, keepdim=True)
    mean_t, mean_s = columns.sum(mean_t, mean_s)
    mean_t, mean_s = mean_t / sum_t, mean_s / sum_s
    if coef is not None:
        log_p_over_m.sub_(mean_s).mul_(exp_s).mul_((1 - beta) * coef / sum_s)
    return beta * mean_t + (1 - beta) * mean_s


DIVERGENCES = {
    "reverse": Divergence(_reverse_kl, _reverse_kl_),
    "forward": Divergence(_forward_kl, _forward_kl_),
    "jsd": Divergence(_jsd, _jsd_, uses_beta=True),
}
"""By the name that `distill.loss.kind` gives them: the same names as in `opd.config.distill`."""
