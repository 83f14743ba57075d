"""The optimisers of a student on Megatron-Core: torch's AdamW on full slices, or Megatron-Core's own.

Megatron-Core's shards float32 copies and moments of slices over the data-parallel ranks once more
(Rajbhandari et al. 2020, "ZeRO", stage 1). It is written for CUDA only.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.config.train import OptimConfig
from opd.megatron.module import inside_megatron
from opd.train.optimizer import build_adamw

WEIGHT = "param"
"""The field that holds the weights in the optimiser's own precision."""


class MegatronOptimizer(ABC):
    """AdamW over the parameters of one rank. Gradients are in `main_grad`."""

    steps = 0
    """Updates so far."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """Return the L2 norm of the full gradient, after reduction. All ranks call it together."""

    @abstractmethod
    def step(self, lr: float, scale: float) -> None:
        """Multiply the gradient of the last `gradient_norm` by `scale` and update the weights."""

    @abstractmethod
    def full_values(self, name: str, key: str) -> Tensor:
        """Return `WEIGHT` (in the optimiser's precision) or a moment of a parameter, for this tensor-parallel
        rank. The data-parallel ranks call it together.
        """

    @abstractmethod
    def resume_after(self, steps: int) -> None:
        """Continue after `steps` updates. `set_values` then sets all weights and, if `steps`, the moments."""

    @abstractmethod
    def set_values(self, name: str, key: str, value: Tensor) -> None:
        """Set a value that `full_values` returns. The model's weights stay unchanged."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Free the optimiser's own gradients."""

    @abstractmethod
    def master_weights(self) -> Iterable[Tensor]:
        """Return the weights in the optimiser's precision, if it keeps a copy."""

    @abstractmethod
    def moment_tensors(self) -> Iterable[Tensor]:
        """Return the optimiser's state other than weights."""


@dataclass(frozen=True, slots=True)
class Slices:
    """A rank's slices of a student, and the ranks that have the rest."""

    parameters: Mapping[str, nn.Parameter]
    """Parameters of this rank, by name."""
    cut: Mapping[str, bool]
    """True if tensor-parallel ranks have different slices of the parameter; otherwise all have the same."""
    tensor: dist.ProcessGroup
    """The tensor-parallel ranks."""
    stages: dist.ProcessGroup | None = None
    """The ranks with the other layers; `None`: all layers are here."""
    again: str | None = None
    """A parameter that another stage also has."""
    experts: Collection[str] = ()
    """Parameters of experts, all of them cut."""
    sharing: dist.ProcessGroup | None = None
    """The ranks with the other experts; `None`: all experts are here."""


class SlicedAdamW(MegatronOptimizer):
    """Every rank has the full state of its slices.

    Args:
        float32: Keep the weights in float32 too, whatever the model's dtype.
    """

    def __init__(self, slices: Slices, optim: OptimConfig, *, float32: bool) -> None:
        self._slices = slices
        self._parameters = parameters = slices.parameters
        self._masters: Mapping[str, Tensor] = parameters
        if float32:
            self._masters = {name: parameter.detach().float() for name, parameter in parameters.items()}
        self._optimizer = build_adamw(self._masters, optim)

    def gradient_norm(self) -> float:
        slices = self._slices
        squares = torch.zeros(3, dtype=torch.float32, device=next(iter(self._masters.values())).device)
        for name, parameter in self._parameters.items():
            if name != slices.again:
                kind = 2 if name in slices.experts else int(slices.cut[name])
                squares[kind] += main_gradient(parameter).float().square().sum()
        total, cut, experts = (part.clone() for part in squares.split(1))
        if slices.sharing is not None:
            dist.all_reduce(experts, group=slices.sharing)
        cut += experts
        dist.all_reduce(cut, group=slices.tensor)
        total += cut
        if slices.stages is not None:
            dist.all_reduce(total, group=slices.stages)
        return float(total.sqrt())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            master.grad = (main_gradient(parameter) * scale).to(master.dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.steps += 1
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def full_values(self, name: str, key: str) -> Tensor:
        master = self._masters[name]
        return master.detach() if key == WEIGHT else self._optimizer.state[master][key]

    def resume_after(self, steps: int) -> None:
        self.steps = steps
        self._optimizer.state.clear()
        for master in self._masters.values() if steps else ():
            self._optimizer.state[master] = {"step": torch.tensor(float(steps), device=master.device)}

    @torch.no_grad()
    def set_values(self, name: str, key: str, value: Tensor) -> None:
        master = self._masters[name]
        if key == WEIGHT:
            master.copy_(value)
        else:
            self._optimizer.state[master][key] = value.to(master.device, master.dtype)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def master_weights(self) -> Iterable[Tensor]:
        return self._masters.values() if self._masters is not self._parameters else ()

    def moment_tensors(self) -> Iterable[Tensor]:
        return _state_tensors(self._optimizer)


class DistributedAdamW(MegatronOptimizer):
    """Megatron-Core's `DistributedOptimizer`. Each data-parallel rank keeps and updates its share of a slice
    in float32, and gathers the others' results.

    Args:
        buffers: Megatron-Core's data-parallel module, made for a distributed optimiser.
        slices: This rank's slices; all are in `buffers`.
        groups: Megatron-Core's process groups. `None`: its own.
    """

    def __init__(self, buffers: Any, slices: Slices, optim: OptimConfig, groups: Any = None) -> None:
        self._parameters = slices.parameters
        self._device = next(iter(slices.parameters.values())).device
        for name, parameter in slices.parameters.items():  # by this it knows what ranks share
            setattr(parameter, "tensor_model_parallel", slices.cut[name])  # noqa: B010
            setattr(parameter, "shared", name == slices.again)  # noqa: B010
        with inside_megatron(self._device):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

            settings = OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.beta1,
                adam_beta2=optim.beta2,
                adam_eps=optim.eps,
                clip_grad=0.0,  # `MegatronBackend.step` checks the norm before
                bf16=buffers.config.bf16,
                use_distributed_optimizer=True,
            )
            # No overrides: by default it leaves norms and biases out of the weight decay, unlike the other
            # back ends.
            self._all: Any = get_megatron_optimizer(
                settings,
                [buffers],
                config_overrides={},
                use_gloo_process_groups=groups is None,
                pg_collection=groups,
            )
        # One of shared experts, over the ranks that have the same ones, and one of all else.
        self._inner = {
            name: next(one for one in self._all.chained_optimizers if _has_parameter(one, parameter))
            for name, parameter in slices.parameters.items()
        }

    def gradient_norm(self) -> float:
        with inside_megatron(self._device):
            self._all.prepare_grads()
            return float(self._all.get_grad_norm())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        for group in self._all.param_groups:
            group["lr"] = lr
        if scale != 1.0:
            for master in self.master_weights():
                assert master.grad is not None
                master.grad.mul_(scale)
        with inside_megatron(self._device):
            self._all.step_with_ready_grads()
        self.steps += 1

    @torch.no_grad()
    def full_values(self, name: str, key: str) -> Tensor:
        parameter, inner = self._parameters[name], self._inner[name]
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._device)
        share = self._local_share(name)
        if share is not None:
            start, end, master = share
            flat[start:end] = master if key == WEIGHT else inner.optimizer.state[master][key]
        dist.all_reduce(flat, group=inner.data_parallel_group)
        return flat.view(parameter.shape)

    def resume_after(self, steps: int) -> None:
        self.steps = steps
        for one in self._all.chained_optimizers:
            one.optimizer.state.clear()
            for group in one.optimizer.param_groups if _counts_in_groups(one) else ():
                group["step"] = steps
        for name, one in self._inner.items() if steps else ():
            share = None if _counts_in_groups(one) else self._local_share(name)
            if share is not None:
                one.optimizer.state[share[2]] = {"step": torch.tensor(float(steps))}

    @torch.no_grad()
    def set_values(self, name: str, key: str, value: Tensor) -> None:
        share = self._local_share(name)
        if share is None:
            return
        start, end, master = share
        part = value.view(-1)[start:end]
        if key == WEIGHT:
            master.copy_(part)
        else:
            self._inner[name].optimizer.state[master][key] = part.to(master, copy=True)

    def _local_share(self, name: str) -> tuple[int, int, Tensor] | None:
        """The range of elements of a parameter that this rank updates, and its float32 copy of them."""
        parameter, inner = self._parameters[name], self._inner[name]
        if parameter not in inner.model_param_group_index_map:
            return None
        share = inner._get_model_param_range_map(parameter)["param"]
        group, index = inner.model_param_group_index_map[parameter]
        return share.start, share.end, inner.param_groups[group]["params"][index]

    def zero_grad(self) -> None:
        self._all.zero_grad()

    def master_weights(self) -> Iterable[Tensor]:
        return [weight for one in self._all.chained_optimizers for weight in one.get_parameters()]

    def moment_tensors(self) -> Iterable[Tensor]:
        return [part for one in self._all.chained_optimizers for part in _state_tensors(one.optimizer)]


def _has_parameter(inner: Any, parameter: nn.Parameter) -> bool:
    """Return whether one of Megatron-Core's optimisers has a `parameter` in its buffers, on any rank."""
    return any(parameter in buffer.param_index_map for buffer in inner.buffers)


def _counts_in_groups(inner: Any) -> bool:
    """Return whether an optimiser counts steps in its groups. torch's AdamW has them in its state."""
    return not isinstance(inner.optimizer, torch.optim.AdamW)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the state's tensors. Some optimisers count steps elsewhere, in numbers."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def main_gradient(parameter: Tensor) -> Tensor:
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]
