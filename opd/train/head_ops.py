"""The operations on a student's head, wherever it is: whole, or its vocabulary spread over ranks.

The teachers' heads are whole on every rank; beside a student's shard each is cut at the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opd.kernels import ops, vocab_parallel
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard


def linear_logprobs(hidden: Tensor, head: Head | HeadShard, ids: Tensor, **options: Any) -> Tensor:
    """`opd.kernels.ops.linear_logprobs`."""
    if isinstance(head, HeadShard):
        return vocab_parallel.linear_logprobs(hidden, head, ids, **options)
    return ops.linear_logprobs(hidden, head, ids, **options)


def linear_logprobs_entropy(
    hidden: Tensor, head: Head | HeadShard, ids: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`opd.kernels.ops.linear_logprobs_entropy`."""
    if isinstance(head, HeadShard):
        return vocab_parallel.linear_logprobs_entropy(hidden, head, ids, **options)
    return ops.linear_logprobs_entropy(hidden, head, ids, **options)


def linear_kl(
    hidden: Tensor, head: Head | HeadShard, teacher_hidden: Tensor, teacher: Head, **options: Any
) -> Tensor:
    """`opd.kernels.ops.linear_kl`."""
    if isinstance(head, HeadShard):
        return vocab_parallel.linear_kl(hidden, head, teacher_hidden, head.like(teacher), **options)
    return ops.linear_kl(hidden, head, teacher_hidden, teacher, **options)


def linear_mixture_kl(
    hidden: Tensor,
    head: Head | HeadShard,
    teacher_hiddens: Sequence[Tensor],
    teachers: Sequence[Head],
    weights: Sequence[float],
    **options: Any,
) -> Tensor:
    """`opd.kernels.ops.linear_mixture_kl`."""
    if isinstance(head, HeadShard):
        cut = [head.like(teacher) for teacher in teachers]
        return vocab_parallel.linear_mixture_kl(hidden, head, teacher_hiddens, cut, weights, **options)
    return ops.linear_mixture_kl(hidden, head, teacher_hiddens, teachers, weights, **options)
