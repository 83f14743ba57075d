"""The operations of `opd.kernels.ops` on heads whose vocabulary is sharded over a process group.

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

from opd.kernels import checks, chunked
from opd.kernels.chunked import TokenNotes
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

    def shard_like(self, head: Head) -> HeadShard:
        """Return this rank's rows of a full `head`, split at the same tokens as this one. They are views, so
        gradients reach its parameters. Raises `ValueError` if the vocabularies differ."""
        if head.vocabulary != self.vocabulary:
            raise ValueError(
                f"the heads have {head.vocabulary} and {self.vocabulary} tokens; student and teacher must"
                " have one vocabulary"
            )
        start = sum(self.sizes[: dist.get_rank(self.group)])
        rows = slice(start, start + self.head.vocabulary)
        return HeadShard(_rows_of(head, rows), self.sizes, self.group)

    @property
    def vocabulary(self) -> int:
        """Number of logits over all ranks."""
        return sum(self.sizes)

    @property
    def columns(self) -> GroupColumns:
        """This rank's columns of the logits."""
        return GroupColumns(self.group, sum(self.sizes[: dist.get_rank(self.group)]), self.head.vocabulary)


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
    student_hidden: Tensor,
    student: HeadShard,
    teacher_hidden: Tensor,
    teacher: HeadShard,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    counted: Tensor | None = None,
    notes: TokenNotes | None = None,
    chunk: int = 1024,
) -> Tensor:
    """`opd.kernels.ops.linear_kl` `[T]`. The student shard's weight and bias get their rows' gradient."""
    _check_shards(student, teacher)
    checks.check_pair(student_hidden, student.head, teacher_hidden, teacher.head)
    checks.check_divergence(kind, beta)
    weighed = _check_tokens(student_hidden, weight, temperature, chunk)
    checks.check_finite_hidden("teacher", teacher_hidden.detach(), weighed)
    values = chunked.linear_kl(
        _OnAllRanks.apply(student_hidden, student.group),
        student.head,
        teacher_hidden,
        teacher.head,
        kind=kind,
        beta=beta,
        temperature=temperature,
        weight=None if weight is None else weight.detach(),
        counted=counted,
        notes=notes,
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
    counted: Tensor | None = None,
    notes: TokenNotes | None = None,
    chunk: int = 1024,
) -> Tensor:
    """`opd.kernels.ops.linear_mixture_kl` `[T]`."""
    heads = [teacher.head for teacher in teachers]
    _check_shards(student, *teachers)
    checks.check_hidden("student", student_hidden, student.head)
    checks.check_mixture(teacher_hiddens, heads, weights)
    checks.check_same_tokens(student_hidden, teacher_hiddens[0])
    weighed = _check_tokens(student_hidden, weight, temperature, chunk)
    for i, hidden in enumerate(teacher_hiddens):
        checks.check_finite_hidden(f"teacher {i}", hidden.detach(), weighed)
    values = chunked.linear_mixture_kl(
        _OnAllRanks.apply(student_hidden, student.group),
        student.head,
        teacher_hiddens,
        heads,
        weights,
        temperature=temperature,
        weight=None if weight is None else weight.detach(),
        counted=counted,
        notes=notes,
        chunk=chunk,
        row_kernel=partial(divergence_, columns=student.columns),
        columns=student.columns,
    )
    checks.check_finite_result("divergence", values.detach())
    return values


def linear_logprobs(
    hidden: Tensor, shard: HeadShard, ids: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> Tensor:
    """`opd.kernels.ops.linear_logprobs` of `ids` (`[N]` or `[N, K]`) in the full vocabulary."""
    everywhere, ids, options = _token_inputs(hidden, shard, ids, temperature, chunk)
    values = chunked.linear_logprobs(everywhere, shard.head, ids, **options)
    checks.check_finite_result("log-probability", values.detach())
    return values


def linear_logprobs_entropy(
    hidden: Tensor, shard: HeadShard, ids: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """`opd.kernels.ops.linear_logprobs_entropy`."""
    everywhere, ids, options = _token_inputs(hidden, shard, ids, temperature, chunk)
    values, entropy = chunked.linear_logprobs_entropy(everywhere, shard.head, ids, **options)
    checks.check_finite_result("log-probability", values.detach())
    return values, entropy


@torch.no_grad()
def linear_topk(
    hidden: Tensor, shard: HeadShard, k: int, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor, Tensor]:
    """`opd.kernels.ops.linear_topk`: ids in the full vocabulary, log-probabilities, tail probability."""
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
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Checked hidden states with a gradient summed over the ranks, ids, and options of the operation."""
    checks.check_hidden("given", hidden, shard.head)
    ids = checks.checked_ids(ids, len(hidden), shard.vocabulary)
    _check_tokens(hidden, None, temperature, chunk, name="given")
    options = {"temperature": temperature, "chunk": chunk, "columns": shard.columns}
    return _OnAllRanks.apply(hidden, shard.group), ids, options


def _check_shards(*shards: HeadShard) -> None:
    """Require that every rank holds the same tokens of all heads."""
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
    """Run the checks of every operation. Return the mask of counted tokens, or None for all."""
    checks.check_scalars(temperature, chunk)
    checks.check_token_weight(weight, len(hidden))
    counted = None if weight is None else weight != 0
    checks.check_finite_hidden(name, hidden.detach(), counted)
    return counted
