"""Megatron-Core: a student's layers and vocabulary cut over tensor-parallel ranks, its samples over others.

Shoeybi et al. 2019, "Megatron-LM". Gradients go through Megatron-Core's own data-parallel buffers and
`finalize_model_grads`, in float32; the optimiser is torch's AdamW on whole slices, or
Megatron-Core's own, which cuts their float32 copies and moments over the data-parallel ranks once more
(Rajbhandari et al. 2020, "ZeRO", stage 1). Megatron-Core writes that one for CUDA alone.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.config.train import OptimConfig, TrainConfig
from opd.errors import ConfigError, ModelError
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.megatron.form import HEAD, MegatronForm, from_megatron, head_shard, pieces, to_megatron
from opd.megatron.module import MegatronModule, inside_megatron, megatron_core, model_parallel
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backend import (
    MOMENTS,
    Backend,
    Saved,
    State,
    Training,
    adamw,
    check_names,
    not_finite,
    optimizer_fields,
)

WEIGHT = "param"
"""The field that holds the weights in the optimiser's own precision."""

Fields = dict[str, dict[str, Tensor]]
"""`WEIGHT` and, after a first step, the moments: each by Megatron-Core's names of the parameters, in float32,
as large as the parameter is on this tensor-parallel rank."""


class MegatronOptimizer(ABC):
    """AdamW over the parameters of one rank, whose gradients are in `main_grad`."""

    steps = 0
    """Updates so far."""

    @abstractmethod
    def norm(self) -> float:
        """The L2 norm of the whole gradient, after it was reduced; all ranks call it together."""

    @abstractmethod
    def step(self, lr: float, scale: float) -> None:
        """Multiply the gradient of the last `norm` by `scale` and update the weights."""

    @abstractmethod
    def fields(self) -> Fields:
        """What a checkpoint needs; the data-parallel ranks call it together."""

    @abstractmethod
    def load(self, fields: Fields, steps: int) -> None:
        """Go on from `fields`, after `steps` updates. Weights of the model itself are not touched."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Let go of gradients of its own."""


class SlicedAdamW(MegatronOptimizer):
    """Every data-parallel rank has the whole state of its slices.

    Args:
        parameters: Of this rank, by name.
        optim: AdamW settings.
        cut: Of which parameters tensor-parallel ranks have different slices; all hold the same of others.
        group: The tensor-parallel ranks.
        float32: Keep the weights in float32 too, whatever the model's dtype.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optim: OptimConfig,
        cut: Mapping[str, bool],
        group: dist.ProcessGroup,
        *,
        float32: bool,
    ) -> None:
        self._parameters, self._cut, self._group = parameters, cut, group
        self._own: Mapping[str, Tensor] = parameters
        if float32:
            self._own = {name: parameter.detach().float() for name, parameter in parameters.items()}
        self._optimizer = adamw(self._own, optim)

    def norm(self) -> float:
        squares = torch.zeros(2, dtype=torch.float32, device=next(iter(self._own.values())).device)
        for name, parameter in self._parameters.items():
            squares[int(self._cut[name])] += _gradient(parameter).float().square().sum()
        cut = squares[1:].clone()
        dist.all_reduce(cut, group=self._group)
        return float((squares[0] + cut[0]).sqrt())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        for name, parameter in self._parameters.items():
            own = self._own[name]
            own.grad = (_gradient(parameter) * scale).to(own.dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.steps += 1
        for name, parameter in self._parameters.items():
            if self._own[name] is not parameter:
                parameter.copy_(self._own[name])

    def fields(self) -> Fields:
        found: Fields = {WEIGHT: {name: own.detach().float() for name, own in self._own.items()}}
        states = {name: self._optimizer.state.get(own, {}) for name, own in self._own.items()}
        if self.steps:
            found |= {key: {name: state[key] for name, state in states.items()} for key in MOMENTS}
        return found

    @torch.no_grad()
    def load(self, fields: Fields, steps: int) -> None:
        self.steps = steps
        for name, own in self._own.items():
            own.copy_(fields[WEIGHT][name])
            if steps:
                moments = {key: fields[key][name].to(own.device, own.dtype) for key in MOMENTS}
                self._optimizer.state[own] = moments | {"step": torch.tensor(float(steps), device=own.device)}

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


class DistributedAdamW(MegatronOptimizer):
    """Megatron-Core's `DistributedOptimizer`: of each slice a data-parallel rank keeps and updates its share,
    in float32, and gathers the others' results.

    Args:
        buffers: Megatron-Core's data-parallel module, made for a distributed optimiser.
        parameters: Of this rank, by name; all are in `buffers`.
        optim: AdamW settings.
        cut: As of `SlicedAdamW`.
    """

    def __init__(
        self,
        buffers: Any,
        parameters: Mapping[str, nn.Parameter],
        optim: OptimConfig,
        cut: Mapping[str, bool],
    ) -> None:
        self._parameters = parameters
        self._device = next(iter(parameters.values())).device
        for name, parameter in parameters.items():  # by this it knows what tensor-parallel ranks share
            parameter.tensor_model_parallel = cut[name]  # pyright: ignore[reportAttributeAccessIssue]
        with inside_megatron(self._device):
            self._inner = _optimizer_of_ranks(buffers, optim)

    def norm(self) -> float:
        with inside_megatron(self._device):
            self._inner.prepare_grads()
            return float(self._inner.get_grad_norm())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        for group in self._inner.param_groups:
            group["lr"] = lr
        if scale != 1.0:
            for own in self._inner.get_parameters():
                own.grad.mul_(scale)
        with inside_megatron(self._device):
            self._inner.step_with_ready_grads()
        self.steps += 1

    @torch.no_grad()
    def fields(self) -> Fields:
        found: Fields = {key: {} for key in (WEIGHT, *MOMENTS)[: None if self.steps else 1]}
        for name, parameter in self._parameters.items():
            mine = self._share(parameter)
            for key, whole in found.items():
                flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._device)
                if mine is not None:
                    start, end, own = mine
                    flat[start:end] = own if key == WEIGHT else self._inner.optimizer.state[own][key]
                dist.all_reduce(flat, group=self._inner.data_parallel_group)
                whole[name] = flat.view(parameter.shape)
        return found

    @torch.no_grad()
    def load(self, fields: Fields, steps: int) -> None:
        self.steps = steps
        inner = self._inner.optimizer
        counts = isinstance(inner, torch.optim.AdamW)  # others count in the group
        for name, parameter in self._parameters.items():
            mine = self._share(parameter)
            if mine is None:
                continue
            start, end, own = mine
            own.copy_(fields[WEIGHT][name].view(-1)[start:end])
            if steps:
                inner.state[own] = {key: fields[key][name].view(-1)[start:end].to(own) for key in MOMENTS}
            if steps and counts:
                inner.state[own]["step"] = torch.tensor(float(steps))
        if not counts:
            for group in inner.param_groups:
                group["step"] = steps

    def _share(self, parameter: nn.Parameter) -> tuple[int, int, Tensor] | None:
        """Which elements of `parameter` this rank updates, and its float32 copy of them."""
        if parameter not in self._inner.model_param_group_index_map:
            return None
        share = self._inner._get_model_param_range_map(parameter)["param"]
        group, place = self._inner.model_param_group_index_map[parameter]
        return share.start, share.end, self._inner.param_groups[group]["params"][place]

    def zero_grad(self) -> None:
        self._inner.zero_grad()


def _optimizer_of_ranks(buffers: Any, optim: OptimConfig) -> Any:
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
        clip_grad=0.0,  # here the norm is looked at before a step is taken
        bf16=buffers.config.bf16,
        use_distributed_optimizer=True,
    )
    # No overrides: by default it leaves norms and biases out of the weight decay, unlike the other back ends.
    whole: Any = get_megatron_optimizer(settings, [buffers], config_overrides={})
    [of_dense] = whole.chained_optimizers  # of a model without experts
    return of_dense


def _gradient(parameter: Tensor) -> Tensor:
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]


_EMBEDDING = "embedding.word_embeddings.weight"


class MegatronBackend(Backend):
    """The back end on Megatron-Core. Checkpoints hold whole Hugging Face tensors, which any back end reads.

    Args:
        model: The student as it begins; its weights are copied, it may be dropped.
        training: How it is trained.
        ranks: All ranks; `train.tensor_parallel` neighbours share a model and its samples.
        train: How it is cut, and by which optimiser it learns.
        compute_dtype: What layers compute in, while the optimiser keeps weights in float32.
    """

    def __init__(
        self,
        model: CausalLM,
        training: Training,
        ranks: Ranks,
        *,
        train: TrainConfig,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises `ModelError` if the model has no place on Megatron-Core or cannot be cut into that many,
        `ConfigError` if the optimiser does not run here.
        """
        tensor_parallel = train.tensor_parallel
        distributed = _distributed(train, model.device)
        self._form = _form(model, tensor_parallel)
        self._ranks, self._stack = ranks, ExitStack()
        self._group = self._stack.enter_context(model_parallel(tensor_parallel))
        # The ranks at this one's place in the other tensor-parallel groups have other samples.
        places = [range(place, ranks.size, tensor_parallel) for place in range(tensor_parallel)]
        super().__init__(training, ranks.one_of(places, "data"), model)
        self._vocabulary = model.vocabulary
        self._device = model.device
        self._order = [name for name, _ in model.weights()]
        dtype = compute_dtype or model.dtype
        self._module = MegatronModule(self._form, self._group, dtype, model.device, trained=True)
        padding = model.module.get_input_embeddings().padding_idx
        if padding is not None:
            words = self._module.module.embedding.word_embeddings
            words.register_forward_hook(partial(_constant_padding, padding))
        self._parameters = dict(self._module.parameters())
        if not self._form.tied:
            rows = self._form.padded_vocabulary(tensor_parallel) // tensor_parallel
            shape = (rows, self._form.hidden_size)
            self._parameters[HEAD] = nn.Parameter(torch.empty(shape, dtype=dtype, device=model.device))
        weights = dict(model.weights())
        self._load(weights)
        self._max_grad_norm = training.optim.max_grad_norm
        self._buffers = self._data_parallel(distributed)
        self._keeps_float32 = compute_dtype is not None
        self._optimizer = self._open_optimizer(training.optim, distributed)
        self._optimizer.load({WEIGHT: self._slices(weights)}, 0)

    def _open_optimizer(self, optim: OptimConfig, distributed: bool) -> MegatronOptimizer:
        cut = {piece.name: piece.split for piece in self._pieces()}
        if distributed:
            return DistributedAdamW(self._buffers, self._parameters, optim, cut)
        return SlicedAdamW(self._parameters, optim, cut, self._group, float32=self._keeps_float32)

    def _data_parallel(self, distributed: bool) -> Any:
        """Megatron-Core's gradient buffers of all parameters, the head's among them."""
        megatron_core()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        whole = nn.Module()
        whole.add_module("decoder", self._module.module)
        if not self._form.tied:
            whole.register_parameter("head", self._parameters[HEAD])
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed
        )
        with inside_megatron(self._device):
            return DistributedDataParallel(self._module.module.config, settings, whole)

    def _pieces(self) -> list[Any]:
        return [
            piece
            for piece in pieces(self._form, self._group.rank(), self._group.size())
            if piece.name in self._parameters
        ]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def hidden_size(self) -> int:
        return self._form.hidden_size

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self._module.run(input_ids, position_ids, cu_seqlens)

    def head(self) -> Head | HeadShard:
        rows = self._parameters[_EMBEDDING if self._form.tied else HEAD]
        shard = head_shard(rows, self._form, self._vocabulary, self._group)
        return shard if self._group.size() > 1 else shard.head

    def backward(self, loss: Tensor, last: bool) -> None:
        del last
        with inside_megatron(self._device):
            loss.backward()

    def reduce(self) -> None:
        """Sum over the data-parallel ranks, and what tensor-parallel ranks have of the heads' norms."""
        from megatron.core.distributed import finalize_model_grads

        with inside_megatron(self._device):
            finalize_model_grads([self._buffers])

    def zero_grad(self) -> None:
        self._buffers.zero_grad_buffer()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient is not finite; the weights are untouched then.
        """
        norm = self._optimizer.norm()
        if not math.isfinite(norm):
            self.zero_grad()
            raise not_finite(norm)
        self._optimizer.step(lr, min(1.0, self._max_grad_norm / (norm + 1e-6)))
        self.zero_grad()
        return {"lr": lr, "grad_norm": norm}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the student by Hugging Face's names, whole, in the dtype it computes in; all ranks
        walk together.
        """
        whole = self._whole({name: parameter.detach() for name, parameter in self._parameters.items()})
        for name in self._order:
            yield name, whole[name]

    def _whole(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by Hugging Face's names, from every rank's slices."""
        shards: list[dict[str, Tensor]] = [{} for _ in range(self._group.size())]
        for name, tensor in mine.items():
            parts = [torch.empty_like(tensor) for _ in shards]
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
            for shard, part in zip(shards, parts, strict=True):
                shard[name] = part
        return from_megatron(self._form, shards)

    def state(self) -> State:
        """On the first rank the files `model` and `optimizer`, with whole tensors; elsewhere nothing."""
        fields = self._optimizer.fields()
        kept = fields.pop(WEIGHT)
        model = self._whole(kept) if self._keeps_float32 else dict(self.weights())
        optimizer: dict[str, Tensor] = {}
        for key, values in fields.items():
            optimizer |= {f"{name}/{key}": tensor for name, tensor in self._whole(values).items()}
        if fields:
            step = torch.tensor(float(self._optimizer.steps))
            optimizer |= {f"{name}/step": step.clone() for name in self._order}
        if not self._ranks.main:
            return {}
        files = {"model": model, "optimizer": optimizer}
        return {
            file: {n: t.to("cpu", copy=True).contiguous() for n, t in tensors.items()}
            for file, tensors in files.items()
        }

    def load_state(self, state: Saved) -> None:
        fields = optimizer_fields(state["optimizer"], dict.fromkeys(self._order))
        check_names(state["model"], self._order, f"a {self._form.family} on Megatron-Core")
        self._load(state["model"])
        mine = {WEIGHT: self._slices(state["model"])}
        if fields:
            for key in MOMENTS:
                mine[key] = self._slices({name: values[key] for name, values in fields.items()})
        steps = int(next(iter(fields.values()))["step"]) if fields else 0
        self._optimizer.load(mine, steps)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        mine = self._slices(weights)
        for name, parameter in self._parameters.items():
            parameter.copy_(mine[name])

    def _slices(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return to_megatron(self._form, weights, self._group.rank(), self._group.size())

    def close(self) -> None:
        self._stack.close()


def _distributed(train: TrainConfig, device: torch.device) -> bool:
    """Whether Megatron-Core's distributed optimiser is meant; it takes tensors of CUDA's types alone."""
    on_cuda = torch.empty(0, device=device).type().startswith("torch.cuda.")
    if train.distributed_optimizer and not on_cuda:
        raise ConfigError(
            "train.distributed_optimizer needs a GPU: Megatron-Core's optimiser refuses tensors of a"
            f" {device.type}; leave it out."
        )
    return on_cuda if train.distributed_optimizer is None else train.distributed_optimizer


def _form(model: CausalLM, tensor_parallel: int) -> MegatronForm:
    form = MegatronForm.from_config(model.module.config)
    if form.experts:
        raise ModelError(
            f"a student of model_type {form.family} has experts, which train.backend megatron does not train;"
            " set train.backend to torch or deepspeed."
        )
    form.check_divisible(tensor_parallel)
    return form


def _constant_padding(padding: int, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """As in `nn.Embedding`: the row of the padding token gets no gradient from where it is read."""
    return torch.where((inputs[0] == padding).unsqueeze(-1), output.detach(), output)
