"""A head whose vocabulary is spread over a process group, and what the row kernels ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from opd.kernels.head import Head
from opd.kernels.rows import Columns

# Below every logit, and finite: what a rank with fewer than k rows offers for a top-k.
NOT_A_LOGIT = -1e30


@dataclass(frozen=True, eq=False)
class HeadShard:
    """One rank's rows of a head: made by `HeadShard.gather_sizes` or `HeadShard.cut`."""

    head: Head
    """This rank's rows, without those that are padding."""
    sizes: tuple[int, ...]
    """Rows of every rank of the group, in the order of ranks and of the vocabulary."""
    group: dist.ProcessGroup | None

    @classmethod
    def gather_sizes(cls, head: Head, group: dist.ProcessGroup | None = None) -> HeadShard:
        """A shard of the rows this rank holds; the ranks' rows follow one another. A collective call.

        Raises `ValueError`, on all ranks, if their widths, scales or softcaps differ.
        """
        mine = [head.vocabulary, head.hidden_size, head.scale, head.softcap or 0.0]
        numbers = torch.tensor(mine, dtype=torch.float64, device=head.weight.device)
        everyone = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, numbers, group=group)
        forms = {tuple(numbers[1:].tolist()) for numbers in everyone}
        if len(forms) > 1:
            raise ValueError(
                f"the ranks' parts of a head differ in (width, scale, softcap): {sorted(forms)}; cut one "
                "head into parts"
            )
        return cls(head, tuple(int(numbers[0]) for numbers in everyone), group)

    @classmethod
    def cut(cls, head: Head, group: dist.ProcessGroup | None = None) -> HeadShard:
        """This rank's share of a whole `head` that every rank has: views, so gradients reach its
        parameters. Raises `ValueError` for more ranks than tokens."""
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if world > head.vocabulary:
            raise ValueError(f"a vocabulary of {head.vocabulary} tokens cannot be cut into {world} parts")
        bounds = [head.vocabulary * i // world for i in range(world + 1)]
        rows = slice(bounds[rank], bounds[rank + 1])
        bias = None if head.bias is None else head.bias[rows]
        part = replace(head, weight=head.weight[rows], bias=bias, vocab_size=None)
        sizes = tuple(stop - start for start, stop in pairwise(bounds))
        return cls(part, sizes, group)

    def like(self, head: Head) -> HeadShard:
        """This rank's rows of a whole `head`, at the tokens where this one is cut: views, so gradients reach
        its parameters. Raises `ValueError` if the vocabularies differ."""
        if head.vocabulary != self.vocabulary:
            raise ValueError(
                f"the heads have {head.vocabulary} and {self.vocabulary} tokens; student and teacher must"
                " have one vocabulary"
            )
        start = sum(self.sizes[: dist.get_rank(self.group)])
        rows = slice(start, start + self.head.vocabulary)
        bias = None if head.bias is None else head.bias[rows]
        part = replace(head, weight=head.weight[rows], bias=bias, vocab_size=None)
        return HeadShard(part, self.sizes, self.group)

    @property
    def vocabulary(self) -> int:
        """Number of logits over all ranks."""
        return sum(self.sizes)

    @property
    def columns(self) -> GroupColumns:
        """This rank's place among the columns of the logits."""
        return GroupColumns(self.group, sum(self.sizes[: dist.get_rank(self.group)]), self.head.vocabulary)


class GroupColumns(Columns):
    """The columns `offset` to `offset + width` of the logits, the rest being on the group's other ranks."""

    def __init__(self, group: dist.ProcessGroup | None, offset: int, width: int) -> None:
        self.group, self.offset, self.width = group, offset, width

    def blocks(self, logits: Tensor) -> Iterator[slice]:
        """One block: every block costs its messages, and the ranks must agree on their number."""
        yield slice(0, len(logits))

    def max(self, values: Tensor) -> Tensor:
        """All-reduced maxima."""
        values = values.contiguous()
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """All-reduced sums, in one message."""
        together = torch.cat(values, dim=1)
        dist.all_reduce(together, group=self.group)
        return together.split([value.shape[1] for value in values], dim=1)

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        """The rank that holds a token gives its value, the others zero."""
        places, mine = self._places(ids)
        (picked,) = self.sum(values.gather(1, places).masked_fill_(~mine, 0))
        return picked

    def scatter_add_(self, values: Tensor, ids: Tensor, added: Tensor) -> None:
        """Only tokens this rank holds get something."""
        places, mine = self._places(ids)
        values.scatter_add_(1, places, added.masked_fill(~mine, 0))

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best of every rank's best; tokens of equal value in the order of ranks."""
        found = min(k, self.width)
        top = values.new_full((len(values), k), NOT_A_LOGIT)
        ids = torch.zeros(len(values), k, dtype=torch.int64, device=values.device)
        top[:, :found], ids[:, :found] = values.topk(found, dim=1)
        ids += self.offset
        tops, all_ids = (self._from_all(tensor) for tensor in (top, ids))
        best, order = torch.sort(tops, dim=1, descending=True, stable=True)
        return best[:, :k], all_ids.gather(1, order[:, :k])

    def clear_(self, values: Tensor, ids: Tensor) -> Tensor:
        """Only tokens this rank holds are cleared."""
        places, mine = self._places(ids)
        # x - x is exactly 0; ids that are elsewhere add 0 to column 0.
        return values.scatter_add_(1, places, values.gather(1, places).neg_().masked_fill_(~mine, 0))

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Each id's column on this rank (0 where it has none) and whether it has one."""
        places = ids - self.offset
        mine = (places >= 0) & (places < self.width)
        return places.where(mine, 0), mine

    def _from_all(self, tensor: Tensor) -> Tensor:
        """Every rank's `[R, k]` side by side."""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim=1)
