"""Heads whose vocabulary is sharded over a process group, and the operations `opd.kernels.ops` runs on them.

Every rank holds some rows of the head's weight and all tokens' hidden states, and gets every result: tensor
parallelism over the vocabulary (Shoeybi et al. 2019, section 3). Each chunk's maxima, sums and partial sums
are all-reduced, a few numbers per token. Logits and the weight's gradient never leave their rank. The
gradient of the hidden states is all-reduced once, in the backward.

All ranks must call the same operation with the same tokens and options and send the same upstream gradient,
for example by computing everything after it alike. Results and errors are then the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opd.kernels import chunked
from opd.kernels.divergences import Columns, divergence_
from opd.kernels.head import Head

# Below every logit, and finite: a filler of top-k from a rank with fewer than k rows.
NOT_A_LOGIT = -1e30


@dataclass(frozen=True, eq=False)
class HeadShard:
    """One rank's rows of a head. `HeadShard.split_head` makes it from a full head."""

    head: Head
    """This rank's rows, without padding."""
    sizes: tuple[int, ...]
    """Rows of every rank of the group, in the order of ranks and of the vocabulary."""
    group: dist.ProcessGroup | None

    @classmethod
    def split_head(cls, head: Head, group: dist.ProcessGroup | None = None) -> HeadShard:
        """Return this rank's share of a full `head` that every rank has. It is a view, so gradients reach its
        parameters. Raises `ValueError` for more ranks than tokens."""
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if world > head.vocabulary:
            raise ValueError(f"a vocabulary of {head.vocabulary} tokens cannot be cut into {world} parts")
        bounds = [head.vocabulary * i // world for i in range(world + 1)]
        rows = slice(bounds[rank], bounds[rank + 1])
        sizes = tuple(stop - start for start, stop in pairwise(bounds))
        return cls(_rows_of(head, rows), sizes, group)

    def shard_like(self, head: AnyHead) -> HeadShard:
        """Return this rank's rows of a full `head`, split at the same tokens as this one. They are views, so
        gradients reach its parameters. A shard must be split so already. Raises `ValueError` if it is not,
        or if the vocabularies differ."""
        if head.vocabulary != self.vocabulary:
            raise ValueError(
                f"the heads have {head.vocabulary} and {self.vocabulary} tokens; student and teacher must"
                " have one vocabulary"
            )
        if isinstance(head, Head):
            start = sum(self.sizes[: dist.get_rank(self.group)])
            rows = slice(start, start + self.head.vocabulary)
            return HeadShard(_rows_of(head, rows), self.sizes, self.group)
        if head.sizes != self.sizes or head.group != self.group:
            raise ValueError(
                f"the heads are spread over the ranks as {self.sizes} and {head.sizes} rows; cut them at the"
                " same tokens over the same group"
            )
        return head

    @property
    def vocabulary(self) -> int:
        """Number of logits over all ranks."""
        return sum(self.sizes)

    @property
    def weight(self) -> Tensor:
        """`[V / ranks, D]`, this rank's rows."""
        return self.head.weight

    @property
    def hidden_size(self) -> int:
        """Width `D` of its hidden states."""
        return self.head.hidden_size

    @property
    def columns(self) -> GroupColumns:
        """This rank's columns of the logits."""
        return GroupColumns(self.group, sum(self.sizes[: dist.get_rank(self.group)]), self.head.vocabulary)


AnyHead = Head | HeadShard


def _rows_of(head: Head, rows: slice) -> Head:
    """Return a head with some of its rows, as views."""
    bias, total = (None if full is None else full[rows] for full in (head.bias, head.total))
    return replace(head, weight=head.weight[rows], bias=bias, total=total, vocab_size=None)


class GroupColumns(Columns):
    """The columns `offset` to `offset + width` of the logits. The group's other ranks have the rest."""

    def __init__(self, group: dist.ProcessGroup | None, offset: int, width: int) -> None:
        self.group, self.offset, self.width = group, offset, width

    def kernel_blocks(self, logits: Tensor) -> Iterator[slice]:
        """Yield one block: every block costs messages, and the ranks must agree on their number."""
        yield slice(0, len(logits))

    def reduce_max(self, values: Tensor) -> Tensor:
        """Return all-reduced maxima."""
        values = values.contiguous()
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def reduce_sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return all-reduced sums, in one message."""
        joined = torch.cat(values, dim=1)
        dist.all_reduce(joined, group=self.group)
        return joined.split([value.shape[1] for value in values], dim=1)

    def gather_values(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return the value of each token from the rank that holds it."""
        places, mine = self._local_columns(ids)
        (picked,) = self.reduce_sum(values.gather(1, places).masked_fill_(~mine, 0))
        return picked

    def scatter_add_(self, values: Tensor, ids: Tensor, added: Tensor) -> None:
        """Add only to tokens of this rank."""
        places, mine = self._local_columns(ids)
        values.scatter_add_(1, places, added.masked_fill(~mine, 0))

    def global_topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Merge every rank's best. Tokens of equal value follow the order of ranks."""
        count = min(k, self.width)
        top = values.new_full((len(values), k), NOT_A_LOGIT)
        ids = torch.zeros(len(values), k, dtype=torch.int64, device=values.device)
        top[:, :count], ids[:, :count] = values.topk(count, dim=1)
        ids += self.offset
        tops, all_ids = (self._from_all(tensor) for tensor in (top, ids))
        best, order = torch.sort(tops, dim=1, descending=True, stable=True)
        return best[:, :k], all_ids.gather(1, order[:, :k])

    def clear_ids_(self, values: Tensor, ids: Tensor) -> Tensor:
        """Clear only tokens of this rank."""
        places, mine = self._local_columns(ids)
        # x - x is exactly 0, and ids of other ranks add 0 to column 0.
        return values.scatter_add_(1, places, values.gather(1, places).neg_().masked_fill_(~mine, 0))

    def _local_columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return each id's column on this rank (0 if it has none) and a mask of its own ids."""
        places = ids - self.offset
        mine = (places >= 0) & (places < self.width)
        return places.where(mine, 0), mine

    def _from_all(self, tensor: Tensor) -> Tensor:
        """Return every rank's `[R, k]` side by side."""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim=1)


class _OnAllRanks(torch.autograd.Function):
    """Hidden states that every rank has: the identity, whose gradient is summed over the ranks' columns."""

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
    student_hidden: Tensor, student: HeadShard, teacher_hidden: Tensor, teacher: AnyHead, **options: Any
) -> Tensor:
    """`opd.kernels.chunked.linear_kl` `[T]`. The student shard's weight and bias get their rows' gradient."""
    return chunked.linear_kl(
        _OnAllRanks.apply(student_hidden, student.group),
        student.head,
        teacher_hidden,
        student.shard_like(teacher).head,
        row_kernel=partial(divergence_, columns=student.columns),
        columns=student.columns,
        **options,
    )


def linear_mixture_kl(
    student_hidden: Tensor,
    student: HeadShard,
    teacher_hiddens: Sequence[Tensor],
    teachers: Sequence[AnyHead],
    weights: Sequence[float],
    **options: Any,
) -> Tensor:
    """`opd.kernels.chunked.linear_mixture_kl` `[T]`."""
    return chunked.linear_mixture_kl(
        _OnAllRanks.apply(student_hidden, student.group),
        student.head,
        teacher_hiddens,
        [student.shard_like(teacher).head for teacher in teachers],
        weights,
        row_kernel=partial(divergence_, columns=student.columns),
        columns=student.columns,
        **options,
    )


def linear_logprobs(hidden: Tensor, shard: HeadShard, ids: Tensor, **options: Any) -> Tensor:
    """`opd.kernels.chunked.linear_logprobs` of `ids` (`[N]` or `[N, K]`) in the full vocabulary."""
    everywhere = _OnAllRanks.apply(hidden, shard.group)
    return chunked.linear_logprobs(everywhere, shard.head, ids, columns=shard.columns, **options)


def linear_logprobs_entropy(
    hidden: Tensor, shard: HeadShard, ids: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`opd.kernels.chunked.linear_logprobs_entropy`."""
    everywhere = _OnAllRanks.apply(hidden, shard.group)
    return chunked.linear_logprobs_entropy(everywhere, shard.head, ids, columns=shard.columns, **options)


def linear_topk(hidden: Tensor, shard: HeadShard, k: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`opd.kernels.chunked.linear_topk`: ids in the full vocabulary, log-probabilities, tail probability."""
    return chunked.linear_topk(hidden, shard.head, k, columns=shard.columns, **options)


def geometric_floor(
    teacher_hiddens: Sequence[Tensor],
    teachers: Sequence[HeadShard],
    weights: Sequence[float] | Sequence[Tensor],
    **options: Any,
) -> Tensor:
    """`opd.kernels.chunked.geometric_floor` `[T]`."""
    heads = [teachers[0].shard_like(teacher).head for teacher in teachers]
    columns = teachers[0].columns
    return chunked.geometric_floor(teacher_hiddens, heads, weights, columns=columns, **options)
