"""Rows of logits in place: blocks, maxima, log-softmax, and the statistics of single tokens.

Every function overwrites its arguments, holds no state and treats each row alone. All subtract the row's
maximum first, so nothing overflows at any finite logit, and none forms a log-probability where a difference
of shifted logits will do, so that values near zero keep their absolute precision. See README.md for the
derivations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

# Per thread. 2^17 float32 are 512 KiB: the few passes of a row kernel over one block stay in a core's
# second-level cache.
BLOCK_ELEMENTS = 1 << 17
# Beyond this log-ratio one of the two probabilities is below e^-80 and adds nothing to float32 or float64
# sums of the Jensen-Shannon divergence; the bound keeps exp of the ratio finite.
MAX_LOG_RATIO = 80.0


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Cut the rows of `logits` `[R, V]` into blocks that fit a CPU's cache; one block on other devices.

    With several threads no block has one row unless all are one row: threads share the sum of a lone row,
    with other rounding than that of a row among others.
    """
    rows, vocabulary = logits.shape
    threads = torch.get_num_threads()
    elements = BLOCK_ELEMENTS * threads if logits.device.type == "cpu" else logits.numel()
    step = max(min(threads, 2), elements // vocabulary)
    start = 0
    while start < rows:
        stop = rows if rows - start <= step + 1 else start + step
        yield slice(start, stop)
        start = stop


def tempered_copy(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Contiguous logits `[R, V]` divided by the temperature; a lone row is doubled (see `row_blocks`)."""
    copy = torch.empty(max(2, len(logits)), logits.shape[1], dtype=dtype, device=logits.device)
    return copy.copy_(logits).div_(temperature)


class Columns:
    """Which columns of the whole vocabulary a block of logits `[R, V]` holds: here, all.

    A rank that holds a part of the vocabulary overrides each method (`opd.kernels.vocab_parallel`); the row
    kernels below then give what one rank with all columns would.
    """

    def blocks(self, logits: Tensor) -> Iterator[slice]:
        """The blocks of rows that a row kernel works through."""
        return row_blocks(logits)

    def max(self, values: Tensor) -> Tensor:
        """The maximum `[R, K]` over all ranks of what each found in its columns."""
        return values

    def sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The sums `[R, 1]` or `[R, K]` over all ranks of what each found in its columns."""
        return values

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        """`values` `[R, V]` at the token ids `[R, K]`, on every rank."""
        return values.gather(1, ids)

    def scatter_add_(self, values: Tensor, ids: Tensor, added: Tensor) -> None:
        """Add `added` `[R, K]` to `values` `[R, V]` at the token ids `[R, K]`."""
        values.scatter_add_(1, ids, added)

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` largest `values` and their token ids `[R, k]`, on every rank."""
        top, ids = values.topk(k, dim=1)
        return top, ids

    def clear_(self, values: Tensor, ids: Tensor) -> Tensor:
        """Set `values` `[R, V]` to zero at the token ids `[R, K]`."""
        return values.scatter_(1, ids, 0)


ALL_COLUMNS = Columns()


def shift_(logits: Tensor, columns: Columns = ALL_COLUMNS) -> Tensor:
    """Subtract each row's maximum in place; returns it as `[R, 1]`."""
    largest = columns.max(logits.amax(dim=1, keepdim=True))
    logits.sub_(largest)
    return largest


def shift_both_(student: Tensor, teacher: Tensor, columns: Columns) -> None:
    """`shift_` for two blocks, with one message between ranks."""
    both = [logits.amax(dim=1, keepdim=True) for logits in (student, teacher)]
    largest = columns.max(torch.cat(both, dim=1))
    student.sub_(largest[:, :1])
    teacher.sub_(largest[:, 1:])


def log_softmax_(logits: Tensor, columns: Columns = ALL_COLUMNS) -> Tensor:
    """Replace the logits `[R, V]` by their log-probabilities; returns the same tensor."""
    shift_(logits, columns)
    (total,) = columns.sum(logits.exp().sum(dim=1, keepdim=True))
    return logits.sub_(total.log())


class RowKernel(Protocol):
    """What turns a chunk's logits into divergences and gradient; `opd.kernels.divergences.divergence_` is the
    one in PyTorch.

    A compiled kernel with the same signature takes its place (see `opd.kernels.chunked.linear_kl`).
    """

    def __call__(
        self, student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, /
    ) -> Tensor:
        """Values `[R]` of contiguous float32 or float64 logits `[R, V]` of one dtype, both overwritten.

        With `coef` `[R]`, `student` must be left holding `coef * d value / d student`; without it `student`
        may hold anything. `R` is any number of rows from 1 to the chunk's size: the kernel does its own
        blocking, and a row's result must not depend on the other rows. NaN must pass through to the values.

        Only a kernel that is said to round is given an option: `rounded` `[R, V]` bfloat16, where the
        gradient is left in place of `student`; it may be `first_halves(student)`.
        """
        ...


def first_halves(logits: Tensor) -> Tensor:
    """`[R, V]` bfloat16 in the first half of each row of contiguous float32 `logits` `[R, V]`."""
    return logits.view(torch.bfloat16)[:, : logits.shape[1]]


def token_statistics_(
    logits: Tensor, ids: Tensor, entropy: bool, columns: Columns = ALL_COLUMNS
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `ids` `[R, K]` and the entropy `[R]` (zeros unless asked for); overwrites
    `logits`."""
    shift_(logits, columns)
    picked = columns.gather(logits, ids)
    exp = torch.exp(logits)
    total = exp.sum(dim=1, keepdim=True)
    mean = exp.mul_(logits).sum(dim=1, keepdim=True) if entropy else torch.zeros_like(total)
    total, mean = columns.sum(total, mean)
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
) -> None:
    """Replace `logits` `[R, V]` by the gradient of `sum(grad_logprobs * logprobs) + grad_entropy *
    entropy`.

    `d log p_a / d z_v = [v = a] - p_v` and `d H / d z_v = -p_v (log p_v + H)`.
    """
    log_softmax_(logits, columns)
    probs = torch.exp(logits)
    spread = grad_logprobs.sum(dim=1, keepdim=True).neg_()
    if grad_entropy is None:
        torch.mul(probs, spread, out=logits)
    else:
        (negative_entropy,) = columns.sum(torch.mul(probs, logits).sum(dim=1, keepdim=True))
        column = grad_entropy.unsqueeze(1)
        logits.sub_(negative_entropy).mul_(-column).add_(spread).mul_(probs)
    columns.scatter_add_(logits, ids, grad_logprobs)
