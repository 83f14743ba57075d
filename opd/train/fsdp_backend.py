"""FSDP2 (`fully_shard`): a Hugging Face model's weights, gradients and optimiser state spread over the ranks.

Zhao et al. 2023, "PyTorch FSDP": every rank keeps 1/N of each tensor, gathers a layer for the time it
computes and gives its gradient back summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backend import Training
from opd.train.optimizer import optimizer_fields, state_of
from opd.train.root import Root, layers_of
from opd.train.torch_backend import TorchBackend


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
