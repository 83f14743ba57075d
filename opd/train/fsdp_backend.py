"""FSDP2 (`fully_shard`): a Hugging Face model's weights, gradients and optimiser state spread over the ranks.

Zhao et al. 2023, "PyTorch FSDP": every rank keeps 1/N of each tensor, gathers a layer for the time it
computes and gives its gradient back summed.

`ContextBackend` shares each sequence among the ranks in place of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from opd.errors import ModelError
from opd.models.causal_lm import CausalLM
from opd.models.context_parallel import ContextParallel, TokenShare, shared_hidden
from opd.ranks import Ranks
from opd.train.backend import TorchBackend, Training, optimizer_fields, state_of
from opd.train.packing import Shares
from opd.train.terms import MetricSums, linear_logprobs
from opd.types import MicroBatch


class Root(nn.Module):
    """Runs a function in place of a forward.

    The loss reads the head's weight itself, outside of any module's forward; FSDP2 and ZeRO-3 gather
    weights only around one. Inside this one those of `module` that belong to no layer are whole.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def layers_of(model: CausalLM) -> list[nn.Module]:
    """The decoder's layers. Raises `ModelError` if it has no list of them."""
    lists = [part for part in model.decoder.children() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1:
        raise ModelError(
            f"{type(model.decoder).__name__} has {len(lists)} lists of layers, so its weights cannot be"
            " sharded layer by layer; train it with one rank."
        )
    return list(lists[0])


class FSDPBackend(TorchBackend):
    """A `TorchBackend` on several ranks. Checkpoints hold whole tensors: any number of ranks may go on.

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
        self._root = Root(model.module)
        mesh = init_device_mesh(model.device.type, (data.size,))
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for part in [*layers_of(model), self._root]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        super().__init__(model, training, data)

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        return self._root(compute)

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
            whole = _whole(tensor)
            yield name, whole.to(self._dtype) if whole.is_floating_point() else whole

    def state(self) -> dict[str, dict[str, Tensor]]:
        """On the first rank the files `model` and `optimizer`, with whole tensors; elsewhere nothing."""
        model: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        for name, tensor in self.model.weights():
            self._keep(model, name, tensor)
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                self._keep(optimizer, f"{name}/{key}", value)
        return {"model": model, "optimizer": optimizer} if self._sharding.main else {}

    def _keep(self, kept: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        whole = _whole(tensor.detach())
        if self._sharding.main:
            kept[name] = whole.to("cpu", copy=True)

    @torch.no_grad()
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        by_name = optimizer_fields(state["optimizer"], self._parameters)
        own = dict(self.model.weights())
        self.model.load_weights((n, _like(t, own[n]) if n in own else t) for n, t in state["model"].items())
        for name, fields in by_name.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                key: _like(value, parameter) if value.shape == parameter.shape else value
                for key, value in state_of(parameter, fields).items()
            }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(whole: Tensor, own: Tensor) -> Tensor:
    """`whole`, sharded as `own` is, if it has that shape; every rank has all of it."""
    if not isinstance(own, DTensor) or whole.shape != own.shape:
        return whole
    local = whole.to(own.device)
    return distribute_tensor(local, own.device_mesh, own.placements, src_data_rank=None)


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

    def sum_shared(self, values: Tensor) -> Tensor:
        return self._context.sum(values)

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
    names = ("targets", "advantages", "policy_weight", "kl_weight", "ce_weight")
    streams = {name: getattr(micro, name)[kept] for name in names}
    for name in ("old_logprobs", "ref_logprobs", "importance", "values", "returns"):
        if (given := getattr(micro, name)) is not None:
            streams[name] = given[kept]
    return replace(micro, rows=local, kept=kept, **streams)
