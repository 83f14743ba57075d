"""Plain operations with `[T, V]` tensors and autograd, the reference for the fast ones.

It computes in float32, or in float64 if any input is. Names and arguments equal those of
`opd.kernels.chunked`; `chunk` is ignored. Call through `opd.kernels.ops`, which checks inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opd.kernels.chunked import TokenNotes
from opd.kernels.divergences import DIVERGENCES
from opd.kernels.head import Head, statistics_dtype
from opd.kernels.token_classes import TokenClasses


def linear_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    kind: str,
    beta: float,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
    counted: Tensor | None = None,
    notes: TokenNotes | None = None,
) -> Tensor:
    """See `opd.kernels.ops.linear_kl`."""
    dtype = statistics_dtype(student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    rows = _counted_rows(student_hidden, weight)
    student = _head_logprobs(student_hidden[rows], student_head, temperature, dtype)
    if notes is not None:
        _fill_notes(notes, rows, student.detach())
    with torch.no_grad():
        teacher = _head_logprobs(teacher_hidden[rows], teacher_head, temperature, dtype)
    return _scatter_rows(DIVERGENCES[kind].formula(student, teacher, beta), rows, len(student_hidden))


def linear_class_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    classes: tuple[TokenClasses, TokenClasses],
    *,
    kind: str,
    beta: float,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
) -> Tensor:
    """See `opd.kernels.ops.linear_class_kl`."""
    dtype = statistics_dtype(student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    rows = _counted_rows(student_hidden, weight)

    def class_logprobs(hidden: Tensor, head: Head, vocabulary: TokenClasses) -> Tensor:
        logprobs = _head_logprobs(hidden[rows], head, temperature, dtype)[:, vocabulary.ids].log_softmax(1)
        summed = logprobs.new_zeros(len(logprobs), vocabulary.count)
        return summed.index_add(1, vocabulary.classes, logprobs.exp()).log()

    student = class_logprobs(student_hidden, student_head, classes[0])
    with torch.no_grad():
        teacher = class_logprobs(teacher_hidden, teacher_head, classes[1])
    return _scatter_rows(DIVERGENCES[kind].formula(student, teacher, beta), rows, len(student_hidden))


def linear_mixture_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[Head],
    weights: Sequence[float],
    *,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
    counted: Tensor | None = None,
    notes: TokenNotes | None = None,
) -> Tensor:
    """See `opd.kernels.ops.linear_mixture_kl`."""
    tensors = [
        student_hidden,
        student_head.weight,
        *teacher_hiddens,
        *(head.weight for head in teacher_heads),
    ]
    dtype = statistics_dtype(*tensors)
    rows = _counted_rows(student_hidden, weight)
    student = _head_logprobs(student_hidden[rows], student_head, temperature, dtype)
    if notes is not None:
        _fill_notes(notes, rows, student.detach())
    with torch.no_grad():
        parts = [
            _head_logprobs(hidden[rows], head, temperature, dtype) + math.log(share)
            for hidden, head, share in zip(teacher_hiddens, teacher_heads, weights, strict=True)
        ]
        mixture = torch.stack(parts).logsumexp(dim=0)
    return _scatter_rows(DIVERGENCES["reverse"].formula(student, mixture, 0.5), rows, len(student_hidden))


def linear_logprobs(hidden: Tensor, head: Head, ids: Tensor, *, temperature: float, chunk: int) -> Tensor:
    """See `opd.kernels.ops.linear_logprobs`."""
    logprobs = _head_logprobs(hidden, head, temperature, statistics_dtype(hidden, head.weight))
    return _gather_ids(logprobs, ids)


def linear_logprobs_entropy(
    hidden: Tensor, head: Head, ids: Tensor, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """See `opd.kernels.ops.linear_logprobs_entropy`."""
    logprobs = _head_logprobs(hidden, head, temperature, statistics_dtype(hidden, head.weight))
    return _gather_ids(logprobs, ids), -(logprobs.exp() * logprobs).sum(dim=1)


@torch.no_grad()
def linear_topk(
    hidden: Tensor, head: Head, k: int, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `opd.kernels.ops.linear_topk`."""
    return _topk_and_tail(_head_logprobs(hidden, head, temperature, statistics_dtype(hidden, head.weight)), k)


@torch.no_grad()
def geometric_floor(
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[Head],
    weights: Sequence[float] | Sequence[Tensor],
    *,
    temperature: float,
    chunk: int,
) -> Tensor:
    """See `opd.kernels.ops.geometric_floor`."""
    dtype = statistics_dtype(*teacher_hiddens, *(head.weight for head in teacher_heads))
    parts = [
        (share.unsqueeze(1) if isinstance(share, Tensor) else share)
        * _head_logprobs(hidden, head, temperature, dtype)
        for hidden, head, share in zip(teacher_hiddens, teacher_heads, weights, strict=True)
    ]
    return -torch.stack(parts).sum(dim=0).logsumexp(dim=1)


def _topk_and_tail(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    top, ids = logprobs.topk(k, dim=1)
    return ids, top, logprobs.exp().scatter(1, ids, 0).sum(dim=1)


def _head_logprobs(hidden: Tensor, head: Head, temperature: float, dtype: torch.dtype) -> Tensor:
    return (head.logits(hidden.to(dtype)) / temperature).log_softmax(dim=1)


def _gather_ids(logprobs: Tensor, ids: Tensor) -> Tensor:
    matrix = ids.long().unsqueeze(1) if ids.ndim == 1 else ids.long()
    return logprobs.gather(1, matrix).reshape(ids.shape)


def _fill_notes(notes: TokenNotes, rows: Tensor, logprobs: Tensor) -> None:
    notes.logprobs[rows] = _gather_ids(logprobs, notes.ids[rows]).squeeze(1).to(notes.logprobs.dtype)
    notes.entropy[rows] = -(logprobs.exp() * logprobs).sum(dim=1).to(notes.entropy.dtype)


def _counted_rows(hidden: Tensor, weight: Tensor | None) -> Tensor:
    """Return indices of the tokens whose weight is not zero."""
    if weight is None:
        return torch.arange(len(hidden), device=hidden.device)
    return weight.nonzero().squeeze(1)


def _scatter_rows(values: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """Return `[tokens]` with `values` at `rows`, zero elsewhere."""
    return values.new_zeros(tokens).index_put((rows,), values)
