"""Sequences shared by ranks that also share weights: each trains on its tokens of every micro-batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from opd.models.causal_lm import CausalLM
from opd.models.context_parallel import ContextParallel, TokenShare, shared_hidden
from opd.ranks import Ranks
from opd.train.backend import Training
from opd.train.fsdp_backend import FSDPBackend
from opd.train.head_ops import linear_logprobs
from opd.train.shares import Shares
from opd.train.student_rows import MetricSums
from opd.types import MicroBatch


class ContextBackend(FSDPBackend):
    """An `FSDPBackend` whose ranks share the tokens of each micro-batch in place of the samples.

    Every rank is given the same samples and makes the same calls; loss, gradient, metrics and
    log-probabilities are those of one rank alone, but for the order of sums. Terms see this rank's response
    tokens, and `MicroBatch.kept` says which they are.

    Args:
        context: The ranks that share sequences and weights.
    """

    def __init__(
        self,
        model: CausalLM,
        training: Training,
        context: Ranks,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if context.group is None:
            raise ValueError("context has no process group; use TorchBackend for one rank")
        super().__init__(model, training, context, compute_dtype)
        self.data = Ranks()  # samples are shared with nobody
        self.shares = Shares(self.data)
        self.context = context
        self._context = ContextParallel(context.group)

    def _loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        own = self._own(micro.input_ids, micro.position_ids, micro.cu_seqlens)
        return super()._loss(own_rows(micro, own), sums)

    def _everyones(self, sums: MetricSums) -> MetricSums:
        return MetricSums.merged(self.context.gather_json(sums.parts(), "the metrics of a step"))

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Last hidden states [t, D] of this rank's tokens."""
        return shared_hidden(
            self.model, self._own(input_ids, position_ids, cu_seqlens), self._context, self._memory
        )

    def _packed_logprobs(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, rows: Tensor
    ) -> Tensor:
        own = self._own(input_ids, position_ids, cu_seqlens)
        local, kept = own_places(rows, own)
        mine = linear_logprobs(
            shared_hidden(self.model, own, self._context, self._memory)[local],
            self.head(),
            input_ids[rows[kept] + 1],
            temperature=self.temperature,
            chunk=self._batch.kl_chunk,
        )
        whole = torch.zeros(len(rows), dtype=mine.dtype, device=mine.device)
        whole[kept] = mine
        return self._context.sum(whole)

    def _own(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> TokenShare:
        return self._context.share(input_ids, position_ids, cu_seqlens.tolist())


def own_places(rows: Tensor, own: TokenShare) -> tuple[Tensor, Tensor]:
    """Of packed positions `rows` [N] those this rank has: places in its tokens [M], and in `rows` [M]."""
    order = torch.argsort(own.places)
    sorted_places = own.places[order]
    found = torch.searchsorted(sorted_places, rows).clamp(max=len(sorted_places) - 1)
    kept = torch.nonzero(sorted_places[found] == rows)[:, 0]
    return order[found[kept]], kept


def own_rows(micro: MicroBatch, own: TokenShare) -> MicroBatch:
    """`micro` with this rank's response tokens alone; `rows` become places in its tokens."""
    local, kept = own_places(micro.rows, own)
    names = ("targets", "advantages", "old_logprobs", "policy_weight", "kl_weight", "ce_weight")
    streams = {name: getattr(micro, name)[kept] for name in names}
    for name in ("ref_logprobs", "importance"):
        if (given := getattr(micro, name)) is not None:
            streams[name] = given[kept]
    return replace(micro, rows=local, kept=kept, **streams)
