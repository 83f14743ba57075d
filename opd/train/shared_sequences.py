"""Context parallelism for any back end: ranks share the tokens of each micro-batch.

Ranks of a row get the same samples and make the same calls. Loss, gradient, metrics and log-probabilities
equal those of one rank alone, except for the order of sums. Terms see this rank's response tokens.
`MicroBatch.kept` says which they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from opd.models.context_parallel import ContextParallel, TokenShare
from opd.models.routing import RoutedTokens
from opd.ranks import Ranks
from opd.train.backend import Backend
from opd.train.packing import teacher_runs
from opd.train.terms import MetricSums
from opd.types import MicroBatch


def context_of(row: Ranks) -> ContextParallel:
    """Return the context group of a row of ranks."""
    if row.group is None:
        raise ValueError("ranks have no process group; use TorchBackend for one rank")
    return ContextParallel(row.group)


class SharedSequences(Backend):
    """A mixin before a back end in the order of bases. Every rank of `_context` has a share of each sequence.
    If `_context` is `None`, this rank has all of it.
    """

    _context: ContextParallel | None

    @abstractmethod
    def _local_hidden(self, share: TokenShare, routed: RoutedTokens | None = None) -> Tensor:
        """Return the last hidden states `[t, D]` of this rank's tokens. `routed` has those of all ranks."""

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, routed: RoutedTokens | None = None
    ) -> Tensor:
        """Return the last hidden states `[t, D]` of this rank's tokens."""
        share = self._local_share(input_ids, position_ids, cu_seqlens)
        if share is None:
            return super().hidden(input_ids, position_ids, cu_seqlens, routed)
        return self._local_hidden(share, routed)

    def sum_shared(self, values: Tensor) -> Tensor:
        return values if self._context is None else self._context.sum_ranks(values)

    def _micro_loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        share = self._local_share(micro.input_ids, micro.position_ids, micro.cu_seqlens)
        if share is None:
            return super()._micro_loss(micro, sums)
        return super()._micro_loss(local_rows(micro, share), sums)

    def _packed_values(
        self,
        compute: Callable[..., Tensor],
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        rows: Tensor,
        routed: RoutedTokens | None = None,
        **masks: Tensor,
    ) -> Tensor:
        share = self._local_share(input_ids, position_ids, cu_seqlens)
        if share is None or self._context is None:
            return super()._packed_values(compute, input_ids, position_ids, cu_seqlens, rows, routed, **masks)
        local, kept = local_indices(rows, share)
        masks = {name: values[kept] for name, values in masks.items()}
        computed = compute(self._local_hidden(share, routed)[local], input_ids[rows[kept] + 1], **masks)
        values = computed.new_zeros(len(rows))
        values[kept] = computed
        return self._context.sum_ranks(values)

    def _local_share(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> TokenShare | None:
        if self._context is None:
            return None
        return self._context.local_share(input_ids, position_ids, cu_seqlens.tolist())


def local_indices(rows: Tensor, share: TokenShare) -> tuple[Tensor, Tensor]:
    """Return this rank's part of packed `rows` `[N]`: indices into its tokens and into `rows`, `[M]`."""
    order = torch.argsort(share.places)
    sorted_places = share.places[order]
    nearest = torch.searchsorted(sorted_places, rows).clamp(max=len(sorted_places) - 1)
    kept = torch.nonzero(sorted_places[nearest] == rows)[:, 0]
    return order[nearest[kept]], kept


def local_rows(micro: MicroBatch, share: TokenShare) -> MicroBatch:
    """Return `micro` with this rank's response tokens only. `rows` become indices into its tokens."""
    local, kept = local_indices(micro.rows, share)
    runs = teacher_runs(micro.samples, kept)
    return replace(micro, rows=local, kept=kept, runs=runs, counted=None, **micro.select_rows(kept))
