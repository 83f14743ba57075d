"""Row kernels: logits of a block of tokens -> divergence and its gradient, in place.

Every function overwrites its arguments, holds no state and treats each row alone. All subtract the row's
maximum first, so nothing overflows at any finite logit, and none forms a log-probability where a difference
of shifted logits will do, so that values near zero keep their absolute precision. See README.md for the
derivations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Per thread. 2^17 float32 are 512 KiB: the few passes of a row kernel over one block stay in a core's
# second-level cache.
BLOCK_ELEMENTS = 1 << 17
# Beyond this log-ratio one of the two probabilities is below e^-80 and adds nothing to float32 or float64
# sums of the Jensen-Shannon divergence; the bound keeps exp of the ratio finite.
MAX_LOG_RATIO = 80.0


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Cut the rows of `logits` `[R, V]` into blocks that fit a CPU's cache; one block on other devices."""
    rows, vocabulary = logits.shape
    elements = BLOCK_ELEMENTS * torch.get_num_threads() if logits.device.type == "cpu" else logits.numel()
    step = max(1, elements // vocabulary)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def shift_(logits: Tensor) -> Tensor:
    """Subtract each row's maximum in place; returns it as `[R, 1]`."""
    largest = logits.amax(dim=1, keepdim=True)
    logits.sub_(largest)
    return largest


def log_softmax_(logits: Tensor) -> Tensor:
    """Replace the logits `[R, V]` by their log-probabilities; returns the same tensor."""
    shift_(logits)
    return logits.sub_(logits.exp().sum(dim=1, keepdim=True).log_())


def divergence_(student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None) -> Tensor:
    """Divergence of each row `[R]` between two blocks of logits `[R, V]`, both overwritten.

    With `coef` `[R]`, `student` is left holding `coef * d divergence / d student logits`.
    """
    column = None if coef is None else coef.unsqueeze(1)
    if kind == "reverse":
        value = _reverse_kl_(student, teacher, column)
    elif kind == "forward":
        value = _forward_kl_(student, teacher, column)
    else:
        value = _jsd_(student, teacher, beta, column)
    # A divergence is never negative; rounding may say so by a few 1e-8. NaN passes through.
    return value.squeeze(1).clamp_min_(0)


def _reverse_kl_(student: Tensor, teacher: Tensor, coef: Tensor | None) -> Tensor:
    """KL(p || t) = E_p[d] - log(l_s / l_t) with d the difference of shifted logits; g = p (d - E_p[d])."""
    shift_(student)
    shift_(teacher)
    scratch = torch.exp(teacher)
    sum_t = scratch.sum(dim=1, keepdim=True)
    difference = torch.sub(student, teacher, out=teacher)
    exp_s = student.exp_()
    sum_s = exp_s.sum(dim=1, keepdim=True)
    mean = torch.mul(exp_s, difference, out=scratch).sum(dim=1, keepdim=True).div_(sum_s)
    if coef is not None:
        student.mul_(difference.sub_(mean)).mul_(coef / sum_s)
    return mean - (sum_s / sum_t).log_()


def _forward_kl_(student: Tensor, teacher: Tensor, coef: Tensor | None) -> Tensor:
    """KL(t || p) = E_t[d] - log(l_t / l_s) with d = teacher - student; g = p - t."""
    shift_(student)
    shift_(teacher)
    exp_s = torch.exp(student)
    sum_s = exp_s.sum(dim=1, keepdim=True)
    difference = torch.sub(teacher, student, out=student)
    exp_t = teacher.exp_()
    sum_t = exp_t.sum(dim=1, keepdim=True)
    mean = difference.mul_(exp_t).sum(dim=1, keepdim=True).div_(sum_t)
    if coef is not None:
        torch.mul(exp_s, coef / sum_s, out=student).addcmul_(exp_t, coef / sum_t, value=-1)
    return mean - (sum_t / sum_s).log_()


def _jsd_(student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None) -> Tensor:
    """beta KL(t || m) + (1 - beta) KL(p || m); g = (1 - beta) p (u - E_p[u]) with u = log(p / m).

    In the log-ratio r = log p - log t: u = -log(1 + beta (e^-r - 1)), log(t / m) = -log(1 + (1-beta) (e^r -
    1)).
    """
    shift_(student)
    shift_(teacher)
    exp_s, exp_t = torch.exp(student), torch.exp(teacher)
    sum_s, sum_t = exp_s.sum(dim=1, keepdim=True), exp_t.sum(dim=1, keepdim=True)
    ratio = student.sub_(teacher).sub_((sum_s / sum_t).log_()).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_t_over_m = torch.expm1(ratio, out=teacher).mul_(1 - beta).log1p_().neg_()
    mean_t = exp_t.mul_(log_t_over_m).sum(dim=1, keepdim=True).div_(sum_t)
    log_p_over_m = ratio.neg_().expm1_().mul_(beta).log1p_().neg_()
    mean_s = torch.mul(exp_s, log_p_over_m, out=teacher).sum(dim=1, keepdim=True).div_(sum_s)
    if coef is not None:
        log_p_over_m.sub_(mean_s).mul_(exp_s).mul_((1 - beta) * coef / sum_s)
    return beta * mean_t + (1 - beta) * mean_s


def token_statistics_(logits: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `ids` `[R, K]` and the entropy `[R]` (zeros unless asked for); overwrites
    `logits`."""
    shift_(logits)
    picked = logits.gather(1, ids)
    exp = torch.exp(logits)
    total = exp.sum(dim=1, keepdim=True)
    log_total = total.log()
    if not entropy:
        return picked.sub_(log_total), torch.zeros_like(log_total).squeeze(1)
    mean = exp.mul_(logits).sum(dim=1, keepdim=True).div_(total)
    return picked.sub_(log_total), log_total.sub_(mean).squeeze(1).clamp_min_(0)


def token_gradient_(logits: Tensor, ids: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> None:
    """Replace `logits` `[R, V]` by the gradient of `sum(grad_logprobs * logprobs) + grad_entropy *
    entropy`.

    `d log p_a / d z_v = [v = a] - p_v` and `d H / d z_v = -p_v (log p_v + H)`.
    """
    log_softmax_(logits)
    probs = torch.exp(logits)
    spread = grad_logprobs.sum(dim=1, keepdim=True).neg_()
    if grad_entropy is None:
        torch.mul(probs, spread, out=logits)
    else:
        negative_entropy = torch.mul(probs, logits).sum(dim=1, keepdim=True)
        column = grad_entropy.unsqueeze(1)
        logits.sub_(negative_entropy).mul_(-column).add_(spread).mul_(probs)
    logits.scatter_add_(1, ids, grad_logprobs)
