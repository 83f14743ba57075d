"""FSDP2 (`fully_shard`): a Hugging Face model's weights, gradients and optimiser state spread over the ranks.

Zhao et al. 2023, "PyTorch FSDP". Every rank keeps 1/N of each tensor, gathers a layer while it computes, and
reduces its gradient.

`ContextBackend` shares each sequence among ranks, and the samples among groups of such ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.errors import TrainingError
from opd.models.causal_lm import CausalLM, local_shard
from opd.models.context_parallel import ContextParallel, TokenShare, shared_hidden
from opd.models.converted_folder import FP8Weights
from opd.models.expert_parallel import ExpertParallel, experts_are_shared
from opd.models.routing import RoutedTokens
from opd.models.sharded import close_up, gather_full, local_part, shard_model
from opd.ranks import Ranks
from opd.storage.tensors import Saved, TensorPiece, copy_to_host, optimizer_fields, part_of, shape_of
from opd.train.backend import TrainingSettings, cost_of
from opd.train.offload import BackendTensors
from opd.train.optimizer import state_of
from opd.train.packing import Shares
from opd.train.plan import context_size, divisors
from opd.train.shared_sequences import SharedSequences, context_of
from opd.train.terms import MetricSums
from opd.train.torch_backend import TorchBackend
from opd.types import Sample


class FSDPBackend(TorchBackend):
    """A `TorchBackend` on several ranks. Each rank writes and reads its own shards of a checkpoint.

    `compute_dtype` is the layers' dtype; weights and optimiser state keep the model's. With `quantize` the
    sharded weights of the layers' matrices are the numbers of FP8, and the optimiser trains masters beside
    them. A matrix is gathered to be rounded, because a block may lie on several ranks.
    """

    lockstep = True

    def __init__(
        self,
        model: CausalLM,
        training: TrainingSettings,
        data: Ranks,
        compute_dtype: torch.dtype | None = None,
        expert_parallel: ExpertParallel = "auto",
    ) -> None:
        self._dtype = compute_dtype or model.dtype
        self._sharding = data
        self._fp8 = FP8Weights(model.module.config) if training.quantize else None
        pieces = training.batch.sequence_chunk is not None
        self.root = shard_model(model, data, compute_dtype, expert_parallel, pieces=pieces)
        super().__init__(model, training, data)

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimiser updates: masters of those that are rounded."""
        parameters, rounded = super()._trained_parameters(), set[str]()
        if self._fp8 is not None:
            rounded.update(self._fp8.names & parameters.keys())
        self._shadows = {name: parameters[name] for name in parameters if name in rounded}
        masters = {name: nn.Parameter(one.detach().clone()) for name, one in self._shadows.items()}
        self._round_masters(masters)
        return parameters | masters

    @torch.no_grad()
    def _round_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Set the weights that are rounded to the numbers of their masters. All ranks call it together."""
        for name, shadow in self._shadows.items():
            assert self._fp8 is not None
            local, first = local_part(masters[name].detach())
            if local.ndim > 2:  # a rank has whole experts
                numbers = self._fp8.numbers(name, local) if local.numel() else local
            else:
                whole = self._fp8.numbers(name, gather_full(masters[name].detach()))
                numbers = whole.view(-1)[first : first + local.numel()].view_as(local)
            local_shard(shadow.detach()).copy_(numbers)

    def zero_grad(self) -> None:
        super().zero_grad()
        for shadow in self._shadows.values():
            shadow.grad = None

    def step(self, lr: float) -> dict[str, float]:
        for name, shadow in self._shadows.items():  # straight through
            self._parameters[name].grad, shadow.grad = shadow.grad, None
        metrics = super().step(lr)
        self._round_masters(self._parameters)
        return metrics

    def local_tensors(self) -> BackendTensors:
        tensors, shadows = super().local_tensors(), self._shadows
        gradients = [one.grad for one in shadows.values() if one.grad is not None]
        masters = [self._parameters[name] for name in shadows]
        return replace(
            tensors, weights=[*tensors.weights, *masters], gradients=[*tensors.gradients, *gradients]
        )

    def compile_layers(self, asked: bool | Literal["auto"], begun: bool | None) -> bool:
        if asked is True and experts_are_shared(self.model.module):
            raise TrainingError(
                "train.compile is true, and layers whose experts ranks share are not compiled; set it to"
                " auto, or train.expert_parallel to 1."
            )
        return not experts_are_shared(self.model.module) and super().compile_layers(asked, begun)

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        assert self.root is not None
        return self.root(compute)

    def backward(self, loss: Tensor, last: bool) -> None:
        del last
        # FSDP2 averages over the ranks, but the loss weights already hold the normaliser of the whole step.
        # Undo it here: FSDP2 has a sum of its own for NCCL only.
        (loss * self._sharding.size).backward()

    def gradient_total(self) -> AbstractContextManager[Tensor | None]:
        """Yield None. A full `[V, D]` on every rank for the step would take the memory that sharding saves,
        so one reduction per micro-batch is the price.
        """
        return nullcontext(None)

    def _clip_gradient(self) -> float:
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the student, unsharded, in its compute dtype. All ranks iterate together."""
        self.reload_weights()
        for name, tensor in self.model.weights():
            full = gather_full(tensor)
            yield name, full.to(self._dtype) if full.is_floating_point() else full

    def _copy_model(self) -> dict[str, Tensor | TensorPiece]:
        """Return this rank's shards. The first rank adds tensors that all ranks have unsharded."""
        masters = {name: self._parameters[name] for name in self._shadows}
        return self._copy_tensors((name, masters.get(name, one)) for name, one in self.model.weights())

    def _follow_weights(self) -> None:
        assert self.root is not None
        self._round_masters(self._parameters)
        close_up(self.root)  # else the next pass takes what was gathered before

    def _copy_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | TensorPiece]:
        shards: dict[str, Tensor | TensorPiece] = {}
        for name, tensor in tensors:
            local, first = local_part(tensor.detach())
            if local.numel() if isinstance(tensor, DTensor) else self._sharding.is_main:
                shards[name] = copy_to_host(local, tensor.shape, first)
        return shards

    @torch.no_grad()
    def load_state(self, state: Saved) -> None:
        saved, tensors = state["model"], dict(self.model.weights())
        by_name = optimizer_fields(state["optimizer"], self._parameters)
        self._reload_tensors("weights", "moments")
        self.model.load_weights((name, _read_like(saved, name, tensors.get(name))) for name in saved)
        for name, shadow in self._shadows.items():
            local_shard(self._parameters[name].detach()).copy_(local_shard(shadow.detach()))
        self._round_masters(self._parameters)
        for name, fields in by_name.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = state_of(
                parameter, {key: _read_like(fields.saved, f"{name}/{key}", parameter) for key in fields}
            )
        self._load_average(state, _read_like)


def _read_like(saved: Mapping[str, Tensor], name: str, like: Tensor | None) -> Tensor:
    """Read the tensor `name` of a checkpoint. If `like` is sharded, each rank reads its share."""
    if not isinstance(like, DTensor) or shape_of(saved, name) != tuple(like.shape):
        return saved[name]
    tensor = torch.empty_like(like)
    local, first = local_part(tensor)
    part_of(saved, name, first, local)
    return tensor


class ContextBackend(SharedSequences, FSDPBackend):
    """An `FSDPBackend` whose ranks share the tokens of each micro-batch in rows of `row_size` ranks. The rows
    share the samples.

    Args:
        ranks: All ranks that share the weights. `row_size` divides their number. `auto` takes as many as the
            step needs when its samples are dealt out, see `context_size`.
    """

    def __init__(
        self,
        model: CausalLM,
        training: TrainingSettings,
        ranks: Ranks,
        row_size: int | Literal["auto"],
        compute_dtype: torch.dtype | None = None,
        expert_parallel: ExpertParallel = "auto",
    ) -> None:
        super().__init__(model, training, ranks, compute_dtype, expert_parallel)
        self._chooses = row_size == "auto"
        sizes = divisors(ranks.size) if row_size == "auto" else [row_size]
        self._meshes: dict[int, tuple[ContextParallel | None, Ranks, Shares]] = {}
        """By size of a row: the group that shares this rank's sequences (None for a group of one), the group
        that shares the samples, and the shares over the latter."""
        for size in sizes:
            context, data = None, ranks
            if size > 1:
                rows = [range(first, first + size) for first in range(0, ranks.size, size)]
                columns = [range(first, ranks.size, size) for first in range(size)]
                context, data = context_of(ranks.one_of(rows, "context")), ranks.one_of(columns, "data")
            self._meshes[size] = context, data, Shares(data, cost_of(self.model))
        self._use_size(sizes[-1])

    def _use_size(self, row_size: int) -> None:
        self._size = row_size
        self._context, self.data, self.shares = self._meshes[row_size]

    def assign_samples(self, samples: Sequence[Sample]) -> None:
        if self._chooses:
            longest = max((len(s.prompt_ids) + len(s.response_ids) for s in samples), default=0)
            self._use_size(context_size(longest, self._sharding.size, self.max_tokens))
        super().assign_samples(samples)

    def own_metrics(self) -> dict[str, float]:
        return super().own_metrics() | ({"context_parallel": float(self._size)} if self._chooses else {})

    def _merge_metrics(self, sums: MetricSums) -> MetricSums:
        return MetricSums.merge_ranks(self._sharding.gather_json(sums.raw_sums(), "the metrics of a step"))

    def _local_hidden(self, share: TokenShare, routed: RoutedTokens | None = None) -> Tensor:
        assert self._context is not None
        here = None if routed is None else routed.select(share.places)
        return shared_hidden(self.model, share, self._context, self._memory, here)
