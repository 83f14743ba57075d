"""The operations of `opd.kernels.ops` on heads whose vocabulary is spread over a process group.

Every rank holds some rows of the head's weight, all tokens' hidden states, and gets every result: tensor
parallelism over the vocabulary (Shoeybi et al. 2019, section 3). Each chunk's maxima, sums and partial sums
are all-reduced, a few numbers per token; logits and the weight's gradient never leave their rank. The
gradient of the hidden states is all-reduced once, in the backward.

All ranks must call the same operation with the same tokens and options and send the same upstream gradient,
as they do when what follows is computed alike on all of them. Results and errors are then the same on every
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opd.kernels import checks, chunked
from opd.kernels.rows import divergence_
from opd.kernels.vocab_shard import HeadShard

__all__ = [
    "HeadShard",
    "geometric_floor",
    "linear_kl",
    "linear_logprobs",
    "linear_logprobs_entropy",
    "linear_mixture_kl",
    "linear_topk",
]


class _OnAllRanks(torch.autograd.Function):
    """Hidden states that every rank has: the identity, whose gradient is the sum of what the ranks' columns
    give."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        narrow = gradient.dtype in (torch.bfloat16, torch.float16)
        total = gradient.to(torch.float32 if narrow else gradient.dtype, copy=True)
        total = total.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None


def linear_kl(
    student_hidden: Tensor,
    student: HeadShard,
    teacher_hidden: Tensor,
    teacher: HeadShard,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    chunk: int = 1024,
) -> Tensor:
    """`opd.kernels.ops.linear_kl` `[T]`; the student shard's weight and bias get their rows' gradient."""
    _check_shards(student, teacher)
    checks.check_pair(student_hidden, student.head, teacher_hidden, teacher.head)
    checks.check_divergence(kind, beta)
    counted = _check_tokens(student_hidden, weight, temperature, chunk)
    checks.check_finite_hidden("teacher", teacher_hidden.detach(), counted)
    values = chunked.linear_kl(
        _OnAllRanks.apply(student_hidden, student.group),
        student.head,
        teacher_hidden,
        teacher.head,
        kind=kind,
        beta=beta,
        temperature=temperature,
        weight=None if weight is None else weight.detach(),
        chunk=chunk,
        row_kernel=partial(divergence_, columns=student.columns),
        columns=student.columns,
    )
    checks.check_finite_result("divergence", values.detach())
    return values


def linear_mixture_kl(
    student_hidden: Tensor,
    student: HeadShard,
    teacher_hiddens: Sequence[Tensor],
    teachers: Sequence[HeadShard],
    weights: Sequence[float],
    *,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    chunk: int = 1024,
) -> Tensor:
    """`opd.kernels.ops.linear_mixture_kl` `[T]`."""
    heads = [teacher.head for teacher in teachers]
    _check_shards(student, *teachers)
    checks.check_hidden("student", student_hidden, student.head)
    checks.check_mixture(teacher_hiddens, heads, weights)
    checks.check_same_tokens(student_hidden, teacher_hiddens[0])
    counted = _check_tokens(student_hidden, weight, temperature, chunk)
    for i, hidden in enumerate(teacher_hiddens):
        checks.check_finite_hidden(f"teacher {i}", hidden.detach(), counted)
    values = chunked.linear_mixture_kl(
        _OnAllRanks.apply(student_hidden, student.group),
        student.head,
        teacher_hiddens,
        heads,
        weights,
        temperature=temperature,
        weight=None if weight is None else weight.detach(),
        chunk=chunk,
        row_kernel=partial(divergence_, columns=student.columns),
        columns=student.columns,
    )
    checks.check_finite_result("divergence", values.detach())
    return values


def linear_logprobs(
    hidden: Tensor, shard: HeadShard, ids: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> Tensor:
    """`opd.kernels.ops.linear_logprobs` of `ids` (`[N]` or `[N, K]`) in the whole vocabulary."""
    everywhere, options = _token_inputs(hidden, shard, ids, temperature, chunk)
    values = chunked.linear_logprobs(everywhere, shard.head, ids, **options)
    checks.check_finite_result("log-probability", values.detach())
    return values


def linear_logprobs_entropy(
    hidden: Tensor, shard: HeadShard, ids: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """`opd.kernels.ops.linear_logprobs_entropy`."""
    everywhere, options = _token_inputs(hidden, shard, ids, temperature, chunk)
    values, entropy = chunked.linear_logprobs_entropy(everywhere, shard.head, ids, **options)
    checks.check_finite_result("log-probability", values.detach())
    return values, entropy


@torch.no_grad()
def linear_topk(
    hidden: Tensor, shard: HeadShard, k: int, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor, Tensor]:
    """`opd.kernels.ops.linear_topk`: ids in the whole vocabulary, log-probabilities, tail probability."""
    checks.check_hidden("given", hidden, shard.head)
    _check_tokens(hidden, None, temperature, chunk, name="given")
    checks.check_k(k, shard.vocabulary)
    options = {"temperature": temperature, "chunk": chunk, "columns": shard.columns}
    ids, logprobs, tail = chunked.linear_topk(hidden, shard.head, k, **options)
    checks.check_finite_result("log-probability", logprobs)
    return ids, logprobs, tail


def geometric_floor(
    teacher_hiddens: Sequence[Tensor],
    teachers: Sequence[HeadShard],
    weights: Sequence[float],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """`opd.kernels.ops.geometric_floor` `[T]`."""
    heads = [teacher.head for teacher in teachers]
    checks.check_mixture(teacher_hiddens, heads, weights)
    _check_shards(*teachers)
    checks.check_scalars(temperature, chunk)
    for i, hidden in enumerate(teacher_hiddens):
        checks.check_finite_hidden(f"teacher {i}", hidden.detach())
    options = {"temperature": temperature, "chunk": chunk, "columns": teachers[0].columns}
    values = chunked.geometric_floor(teacher_hiddens, heads, weights, **options)
    checks.check_finite_result("geometric floor", values)
    return values


def _token_inputs(
    hidden: Tensor, shard: HeadShard, ids: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, dict[str, Any]]:
    """Checked hidden states whose gradient is summed over the ranks, and the chunked operation's options."""
    checks.check_hidden("given", hidden, shard.head)
    checks.check_ids(ids, len(hidden), shard.vocabulary)
    _check_tokens(hidden, None, temperature, chunk, name="given")
    options = {"temperature": temperature, "chunk": chunk, "columns": shard.columns}
    return _OnAllRanks.apply(hidden, shard.group), options


def _check_shards(*shards: HeadShard) -> None:
    """Every rank must hold the same tokens of all heads."""
    for shard in shards[1:]:
        checks.check_vocabularies(shards[0].vocabulary, shard.vocabulary)
        if shard.sizes != shards[0].sizes or shard.group != shards[0].group:
            raise ValueError(
                f"the heads are spread over the ranks as {shards[0].sizes} and {shard.sizes} rows; cut them "
                "at the same tokens over the same group"
            )


def _check_tokens(
    hidden: Tensor, weight: Tensor | None, temperature: float, chunk: int, name: str = "student"
) -> Tensor | None:
    """The checks every operation shares; returns which tokens count, if not all."""
    checks.check_scalars(temperature, chunk)
    checks.check_token_weight(weight, len(hidden))
    counted = None if weight is None else weight != 0
    checks.check_finite_hidden(name, hidden.detach(), counted)
    return counted
