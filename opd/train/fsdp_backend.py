"""FSDP2 (`fully_shard`): a Hugging Face model's weights, gradients and optimiser state spread over the ranks.

Zhao et al. 2023, "PyTorch FSDP": every rank keeps 1/N of each tensor, gathers a layer for the time it
computes and gives its gradient back summed.

`ContextBackend` shares each sequence among ranks, and the samples among groups of such ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.models.causal_lm import CausalLM
from opd.models.context_parallel import ContextParallel, TokenShare, shared_hidden
from opd.models.sharded import cut, local_part, whole
from opd.ranks import Ranks
from opd.storage.tensors import Piece, copied, part_of, shape_of
from opd.train.backend import Saved, State, TorchBackend, Training, cost_of, optimizer_fields, state_of
from opd.train.packing import Shares
from opd.train.terms import MetricSums, linear_logprobs
from opd.types import MicroBatch


class FSDPBackend(TorchBackend):
    """A `TorchBackend` on several ranks, each of which writes and reads its own pieces of a checkpoint.

    `compute_dtype`: what layers compute in, while weights and optimiser state keep the model's dtype.
    """

    lockstep = True

    def __init__(
        self,
        model: CausalLM,
        training: Training,
        data: Ranks,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = compute_dtype or model.dtype
        self._sharding = data
        self.root = cut(model, data, compute_dtype)
        super().__init__(model, training, data)

    def _own_weights(self) -> Iterable[Tensor]:
        return ()  # FSDP2 knows where its parts lie

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        return self.root(compute)

    def backward(self, loss: Tensor, last: bool) -> None:
        del last
        # FSDP2 takes the mean over the ranks. The weights of the loss hold the normaliser of the whole step,
        # so the sum is meant; a sum of its own it has for NCCL alone.
        (loss * self._sharding.size).backward()

    def _clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the student, whole, in the dtype it computes in; all ranks walk together."""
        for name, tensor in self.model.weights():
            found = whole(tensor)
            yield name, found.to(self._dtype) if found.is_floating_point() else found

    def state(self) -> State:
        """This rank's pieces; the first has what all ranks have whole, too."""
        return {"model": self._pieces(self.model.weights()), "optimizer": self._pieces(self._moments())}

    def _pieces(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | Piece]:
        found: dict[str, Tensor | Piece] = {}
        for name, tensor in tensors:
            local, first = local_part(tensor.detach())
            if local.numel() if isinstance(tensor, DTensor) else self._sharding.main:
                found[name] = copied(local, tensor.shape, first)
        return found

    @torch.no_grad()
    def load_state(self, state: Saved) -> None:
        saved, own = state["model"], dict(self.model.weights())
        by_name = optimizer_fields(state["optimizer"], self._parameters)
        self.model.load_weights((name, _read_like(saved, name, own.get(name))) for name in saved)
        for name, fields in by_name.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = state_of(
                parameter, {key: _read_like(fields.saved, f"{name}/{key}", parameter) for key in fields}
            )


def _read_like(saved: Mapping[str, Tensor], name: str, own: Tensor | None) -> Tensor:
    """The tensor `name` of a checkpoint, of which each rank reads its share where it is cut as `own` is."""
    if not isinstance(own, DTensor) or shape_of(saved, name) != tuple(own.shape):
        return saved[name]
    room = torch.empty_like(own)
    local, first = local_part(room)
    part_of(saved, name, first, local)
    return room


class ContextBackend(FSDPBackend):
    """An `FSDPBackend` whose ranks share the tokens of each micro-batch in rows of `together` ranks; the rows
    share the samples.

    Ranks of a row are given the same samples and make the same calls; loss, gradient, metrics and
    log-probabilities are those of one rank alone, but for the order of sums. Terms see this rank's response
    tokens, and `MicroBatch.kept` says which they are.

    Args:
        ranks: All that share the weights; `together` divides their number.
    """

    def __init__(
        self,
        model: CausalLM,
        training: Training,
        ranks: Ranks,
        together: int,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, training, ranks, compute_dtype)
        rows = [range(first, first + together) for first in range(0, ranks.size, together)]
        columns = [range(place, ranks.size, together) for place in range(together)]
        row, self.data = ranks.one_of(rows, "context"), ranks.one_of(columns, "data")
        if row.group is None:
            raise ValueError("ranks have no process group; use TorchBackend for one rank")
        self.shares = Shares(self.data, cost_of(model))
        self._context = ContextParallel(row.group)

    def _loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        own = self._own(micro.input_ids, micro.position_ids, micro.cu_seqlens)
        return super()._loss(own_rows(micro, own), sums)

    def sum_shared(self, values: Tensor) -> Tensor:
        return self._context.sum(values)

    def _everyones(self, sums: MetricSums) -> MetricSums:
        return MetricSums.merged(self._sharding.gather_json(sums.parts(), "the metrics of a step"))

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
    names = ("targets", "advantages", "policy_weight", "kl_weight", "ce_weight")
    streams = {name: getattr(micro, name)[kept] for name in names}
    for name in ("old_logprobs", "ref_logprobs", "importance", "values", "returns"):
        if (given := getattr(micro, name)) is not None:
            streams[name] = given[kept]
    return replace(micro, rows=local, kept=kept, **streams)
