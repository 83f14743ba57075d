"""In-place row operations on logits: divergences over the whole vocabulary, and single tokens.

Each divergence is one entry of `DIVERGENCES`: its name, its formula, its row form. Tests compare every kernel
with the formula in float64, and `OPD_KERNELS=reference` differentiates it. The chunked operations run the row
form. It overwrites both blocks of logits and leaves the gradient in the student's. Kernels in TileLang or
Triton may replace some row forms.

Functions ending in `_` overwrite their arguments, hold no state and treat each row alone. All subtract the
row's maximum first, so nothing overflows at any finite logit. They use a difference of shifted logits instead
of a log-probability if possible, so values near zero keep their absolute precision. README.md has the
derivations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Per thread. 2^17 float32 are 512 KiB: the few passes of a row kernel over one block stay in a core's
# second-level cache.
BLOCK_ELEMENTS = 1 << 17
# On another device: 256 MiB. The passes' temporaries stay small beside a chunk, and each launch is long
# compared to its start.
BLOCK_ELEMENTS_DEVICE = 1 << 26
# Beyond this log-ratio one of the two probabilities is below e^-80 and adds nothing to float32 or float64
# sums of the Jensen-Shannon divergence. The bound keeps exp of the ratio finite.
MAX_LOG_RATIO = 80.0


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Split the rows of `logits` `[R, V]` into blocks that fit a CPU's cache, or of 256 MiB on other devices.

    With several threads no block has one row unless all are one row. Threads share the sum of a lone row,
    with other rounding than that of a row among others.
    """
    rows, vocabulary = logits.shape
    threads = torch.get_num_threads()
    elements = BLOCK_ELEMENTS * threads if logits.device.type == "cpu" else BLOCK_ELEMENTS_DEVICE
    step = max(min(threads, 2), elements // vocabulary)
    start = 0
    while start < rows:
        stop = rows if rows - start <= step + 1 else start + step
        yield slice(start, stop)
        start = stop


class Columns:
    """The columns of the vocabulary in a block of logits `[R, V]`; here all.

    A rank with a part of the vocabulary overrides each method (`opd.kernels.vocab_parallel`). The row kernels
    below then give the result of one rank with all columns.
    """

    def kernel_blocks(self, logits: Tensor) -> Iterator[slice]:
        """Yield the blocks of rows for a row kernel."""
        return row_blocks(logits)

    def reduce_max(self, values: Tensor) -> Tensor:
        """Return the maximum `[R, K]` over all ranks of each rank's values."""
        return values

    def reduce_sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the sums `[R, 1]` or `[R, K]` over all ranks of each rank's values."""
        return values

    def gather_values(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return `values` `[R, V]` at the token ids `[R, K]`, on every rank."""
        return values.gather(1, ids)

    def scatter_add_(self, values: Tensor, ids: Tensor, added: Tensor) -> None:
        """Add `added` `[R, K]` to `values` `[R, V]` at the token ids `[R, K]`."""
        values.scatter_add_(1, ids, added)

    def global_topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` largest `values` and their token ids `[R, k]`, on every rank."""
        top, ids = values.topk(k, dim=1)
        return top, ids

    def clear_ids_(self, values: Tensor, ids: Tensor) -> Tensor:
        """Set `values` `[R, V]` to zero at the token ids `[R, K]`."""
        return values.scatter_(1, ids, 0)


ALL_COLUMNS = Columns()


def subtract_max_(logits: Tensor, columns: Columns = ALL_COLUMNS) -> Tensor:
    """Subtract each row's maximum in place. Return it as `[R, 1]`."""
    largest = columns.reduce_max(logits.amax(dim=1, keepdim=True))
    logits.sub_(largest)
    return largest


def subtract_both_max_(student: Tensor, teacher: Tensor, columns: Columns) -> None:
    """`subtract_max_` of two blocks, with one message between ranks."""
    both = [logits.amax(dim=1, keepdim=True) for logits in (student, teacher)]
    largest = columns.reduce_max(torch.cat(both, dim=1))
    student.sub_(largest[:, :1])
    teacher.sub_(largest[:, 1:])


def log_softmax_(logits: Tensor, columns: Columns = ALL_COLUMNS) -> Tensor:
    """Replace the logits `[R, V]` by their log-probabilities. Return the same tensor."""
    subtract_max_(logits, columns)
    (total,) = columns.reduce_sum(logits.exp().sum(dim=1, keepdim=True))
    return logits.sub_(total.log())


class RowKernel(Protocol):
    """Turns a chunk's logits into divergences and gradient. `opd.kernels.divergences.divergence_` is the one
    in PyTorch.

    A compiled kernel with the same signature may replace it (see `opd.kernels.chunked.linear_kl`).
    """

    def __call__(
        self, student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, /
    ) -> Tensor:
        """Return values `[R]` of contiguous float32 or float64 logits `[R, V]` of one dtype, both
        overwritten.

        With `coef` `[R]`, `student` must be left holding `coef * d value / d student`. Without it `student`
        may hold anything. `R` is any number of rows from 1 to the chunk's size. The kernel does its own
        blocking, and a row's result must not depend on the other rows. NaN must pass through to the values.
        Only a kernel that declares to round is given an option: `rounded` `[R, V]` bfloat16, which receives
        the gradient instead of `student`. It may be `first_halves(student)`.
        """
        ...


def first_halves(logits: Tensor) -> Tensor:
    """Return `[R, V]` bfloat16 in the first half of each row of contiguous float32 `logits` `[R, V]`."""
    return logits.view(torch.bfloat16)[:, : logits.shape[1]]


def token_statistics_(
    logits: Tensor, ids: Tensor, entropy: bool, columns: Columns = ALL_COLUMNS
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `ids` `[R, K]` and the entropy `[R]` (zeros unless requested). Overwrites
    `logits`."""
    subtract_max_(logits, columns)
    picked = columns.gather_values(logits, ids)
    exp = torch.exp(logits)
    total = exp.sum(dim=1, keepdim=True)
    mean = exp.mul_(logits).sum(dim=1, keepdim=True) if entropy else torch.zeros_like(total)
    total, mean = columns.reduce_sum(total, mean)
    log_total = total.log()
    values = picked.sub_(log_total)
    if not entropy:
        return values, mean.squeeze(1)
    return values, log_total.sub_(mean / total).squeeze(1).clamp_min_(0)


def token_gradient_(
    logits: Tensor,
    ids: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    columns: Columns = ALL_COLUMNS,
    rounded: Tensor | None = None,
) -> None:
    """Replace `logits` `[R, V]` by the gradient of `sum(grad_logprobs * logprobs) + grad_entropy * entropy`.
    With `rounded` `[R, V]` bfloat16, which may share their memory, the gradient goes there.

    `d log p_a / d z_v = [v = a] - p_v` and `d H / d z_v = -p_v (log p_v + H)`.
    """
    log_softmax_(logits, columns)
    probs = torch.exp(logits)
    spread = grad_logprobs.sum(dim=1, keepdim=True).neg_()
    if grad_entropy is None:
        torch.mul(probs, spread, out=logits)
    else:
        (negative_entropy,) = columns.reduce_sum(torch.mul(probs, logits).sum(dim=1, keepdim=True))
        column = grad_entropy.unsqueeze(1)
        logits.sub_(negative_entropy).mul_(-column).add_(spread).mul_(probs)
    columns.scatter_add_(logits, ids, grad_logprobs)
    if rounded is not None:
        rounded.copy_(logits.to(torch.bfloat16))  # not in place: the two may share memory


@dataclass(frozen=True)
class Divergence:
    """One divergence between a student `p` and a teacher `t`."""

    formula: Callable[[Tensor, Tensor, float], Tensor]
    """`(log p, log t, beta) -> [T]` of log-probabilities `[T, V]`, written plainly for autograd."""
    rows: Callable[[Tensor, Tensor, float, Tensor | None, Columns], Tensor]
    """`(student, teacher, beta, coef, columns) -> [R, 1]` of logits `[R, V]`, both overwritten. With `coef`
    `[R, 1]` the student's are left as `coef * d divergence / d student logits`."""
    uses_beta: bool = False
    """`beta`, strictly between 0 and 1, changes it."""


def divergence_(
    student: Tensor,
    teacher: Tensor,
    kind: str,
    beta: float,
    coef: Tensor | None,
    /,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """Return the divergence of each row `[R]` between two chunks of logits `[R, V]`, both overwritten.

    With `coef` `[R]`, `student` is left holding `coef * d divergence / d student logits`.
    """
    values = student.new_empty(len(student))
    rows = DIVERGENCES[kind].rows
    for block in columns.kernel_blocks(student):
        column = None if coef is None else coef[block].unsqueeze(1)
        values[block] = rows(student[block], teacher[block], beta, column, columns).squeeze(1)
    # A divergence is never negative, but rounding may give a few -1e-8. NaN passes through.
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


def _skew_reverse(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return (student.exp() * (student - mixture)).sum(dim=1)


def _skew_forward(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return (teacher.exp() * (teacher - mixture)).sum(dim=1)


def _reverse_kl_(
    student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns
) -> Tensor:
    """KL(p || t) = E_p[d] - log(l_s / l_t) with d the difference of shifted logits; g = p (d - E_p[d])."""
    subtract_both_max_(student, teacher, columns)
    scratch = torch.exp(teacher)
    sum_t = scratch.sum(dim=1, keepdim=True)
    difference = torch.sub(student, teacher, out=teacher)
    exp_s = student.exp_()
    sum_s = exp_s.sum(dim=1, keepdim=True)
    mean = torch.mul(exp_s, difference, out=scratch).sum(dim=1, keepdim=True)
    sum_s, sum_t, mean = columns.reduce_sum(sum_s, sum_t, mean)
    mean = mean / sum_s
    if coef is not None:
        student.mul_(difference.sub_(mean)).mul_(coef / sum_s)
    return mean - (sum_s / sum_t).log_()


def _forward_kl_(
    student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns
) -> Tensor:
    """KL(t || p) = E_t[d] - log(l_t / l_s) with d = teacher - student; g = p - t."""
    subtract_both_max_(student, teacher, columns)
    exp_s = torch.exp(student)
    sum_s = exp_s.sum(dim=1, keepdim=True)
    difference = torch.sub(teacher, student, out=student)
    exp_t = teacher.exp_()
    sum_t = exp_t.sum(dim=1, keepdim=True)
    mean = difference.mul_(exp_t).sum(dim=1, keepdim=True)
    sum_s, sum_t, mean = columns.reduce_sum(sum_s, sum_t, mean)
    if coef is not None:
        torch.mul(exp_s, coef / sum_s, out=student).addcmul_(exp_t, coef / sum_t, value=-1)
    return mean / sum_t - (sum_t / sum_s).log_()


def _log_ratio_(student: Tensor, teacher: Tensor, columns: Columns) -> tuple[Tensor, ...]:
    """Return exp of both shifted logits, their sums, and log(p / t), bounded, in the memory of `student`."""
    subtract_both_max_(student, teacher, columns)
    exp_s, exp_t = torch.exp(student), torch.exp(teacher)
    sum_s, sum_t = columns.reduce_sum(exp_s.sum(dim=1, keepdim=True), exp_t.sum(dim=1, keepdim=True))
    ratio = student.sub_(teacher).sub_((sum_s / sum_t).log_()).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return exp_s, exp_t, sum_s, sum_t, ratio


def _jsd_(student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns) -> Tensor:
    """beta KL(t || m) + (1 - beta) KL(p || m); g = (1 - beta) p (u - E_p[u]) with u = log(p / m).

    In the log-ratio r = log p - log t: u = -log(1 + beta (e^-r - 1)), log(t / m) = -log(1 + (1-beta) (e^r -
    1)).
    """
    exp_s, exp_t, sum_s, sum_t, ratio = _log_ratio_(student, teacher, columns)
    log_t_over_m = torch.expm1(ratio, out=teacher).mul_(1 - beta).log1p_().neg_()
    mean_t = exp_t.mul_(log_t_over_m).sum(dim=1, keepdim=True)
    log_p_over_m = ratio.neg_().expm1_().mul_(beta).log1p_().neg_()
    mean_s = torch.mul(exp_s, log_p_over_m, out=teacher).sum(dim=1, keepdim=True)
    mean_t, mean_s = columns.reduce_sum(mean_t, mean_s)
    mean_t, mean_s = mean_t / sum_t, mean_s / sum_s
    if coef is not None:
        log_p_over_m.sub_(mean_s).mul_(exp_s).mul_((1 - beta) * coef / sum_s)
    return beta * mean_t + (1 - beta) * mean_s


def _skew_reverse_(
    student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns
) -> Tensor:
    """KL(p || m) with m = beta t + (1 - beta) p; h = log(p / m) - (1 - beta) p / m, g = p (h - E_p[h])."""
    exp_s, _, sum_s, _, ratio = _log_ratio_(student, teacher, columns)
    log_share = ratio.neg_().expm1_().mul_(beta).log1p_().neg_()  # log(p / m)
    (total,) = columns.reduce_sum(torch.mul(exp_s, log_share, out=teacher).sum(dim=1, keepdim=True))
    if coef is not None:
        slope = log_share.sub_(torch.exp(log_share, out=teacher), alpha=1 - beta)
        (mean,) = columns.reduce_sum(torch.mul(exp_s, slope, out=teacher).sum(dim=1, keepdim=True))
        slope.sub_(mean / sum_s).mul_(exp_s).mul_(coef / sum_s)
    return total / sum_s


def _skew_forward_(
    student: Tensor, teacher: Tensor, beta: float, coef: Tensor | None, columns: Columns
) -> Tensor:
    """KL(t || m) with m = beta t + (1 - beta) p; g = (1 - beta) p (E_p[t / m] - t / m)."""
    exp_s, exp_t, sum_s, sum_t, ratio = _log_ratio_(student, teacher, columns)
    log_share = ratio.expm1_().mul_(1 - beta).log1p_().neg_()  # log(t / m)
    parts = exp_t.mul_(log_share), torch.exp(log_share, out=teacher).mul_(exp_s)
    total, mean = columns.reduce_sum(*(part.sum(dim=1, keepdim=True) for part in parts))
    if coef is not None:
        log_share.exp_().neg_().add_(mean / sum_s).mul_(exp_s).mul_((1 - beta) * coef / sum_s)
    return total / sum_t


DIVERGENCES = {
    "reverse": Divergence(_reverse_kl, _reverse_kl_),
    "forward": Divergence(_forward_kl, _forward_kl_),
    "jsd": Divergence(_jsd, _jsd_, uses_beta=True),
    "skew_reverse": Divergence(_skew_reverse, _skew_reverse_, uses_beta=True),
    "skew_forward": Divergence(_skew_forward, _skew_forward_, uses_beta=True),
}
"""By the name in `distill.loss.kind`; the same names as in `opd.config.rl`."""
