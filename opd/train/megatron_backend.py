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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.config.train import OptimConfig, TrainConfig
from opd.errors import ConfigError, ModelError
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.megatron.form import (
    HEAD,
    Cut,
    Elements,
    MegatronForm,
    Piece,
    assemble,
    head_shard,
    parts_of,
    pieces,
    read_elements,
)
from opd.megatron.module import MegatronModule, inside_megatron, megatron_core, model_parallel
from opd.models.causal_lm import CausalLM
from opd.models.sharded import Stored, need_room, read_together, width_of
from opd.ranks import Ranks
from opd.storage.tensors import Piece as TensorPiece
from opd.storage.tensors import copied, part_of
from opd.train.backend import (
    MOMENTS,
    Backend,
    Saved,
    State,
    Training,
    adamw,
    check_tensors,
    moments_of,
    not_finite,
    optimizer_fields,
)

WEIGHT = "param"
"""The field that holds the weights in the optimiser's own precision."""


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
    def whole(self, name: str, key: str) -> Tensor:
        """`WEIGHT`, in the optimiser's precision, or a moment of a parameter, as large as that is on this
        tensor-parallel rank; the data-parallel ranks call it together.
        """

    @abstractmethod
    def resume(self, steps: int) -> None:
        """Go on after `steps` updates, once `put` has set all weights and, after any, moments."""

    @abstractmethod
    def put(self, name: str, key: str, value: Tensor) -> None:
        """Set what `whole` gives. Weights of the model itself are not touched."""

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

    def whole(self, name: str, key: str) -> Tensor:
        own = self._own[name]
        return own.detach() if key == WEIGHT else self._optimizer.state[own][key]

    def resume(self, steps: int) -> None:
        self.steps = steps
        self._optimizer.state.clear()
        for own in self._own.values() if steps else ():
            self._optimizer.state[own] = {"step": torch.tensor(float(steps), device=own.device)}

    @torch.no_grad()
    def put(self, name: str, key: str, value: Tensor) -> None:
        own = self._own[name]
        if key == WEIGHT:
            own.copy_(value)
        else:
            self._optimizer.state[own][key] = value.to(own.device, own.dtype)

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
    def whole(self, name: str, key: str) -> Tensor:
        parameter = self._parameters[name]
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._device)
        mine = self._share(parameter)
        if mine is not None:
            start, end, own = mine
            flat[start:end] = own if key == WEIGHT else self._inner.optimizer.state[own][key]
        dist.all_reduce(flat, group=self._inner.data_parallel_group)
        return flat.view(parameter.shape)

    def resume(self, steps: int) -> None:
        self.steps = steps
        inner = self._inner.optimizer
        inner.state.clear()
        if not isinstance(inner, torch.optim.AdamW):  # others count in the group
            for group in inner.param_groups:
                group["step"] = steps
        elif steps:
            for share in filter(None, map(self._share, self._parameters.values())):
                inner.state[share[2]] = {"step": torch.tensor(float(steps))}

    @torch.no_grad()
    def put(self, name: str, key: str, value: Tensor) -> None:
        mine = self._share(self._parameters[name])
        if mine is None:
            return
        start, end, own = mine
        part = value.view(-1)[start:end]
        if key == WEIGHT:
            own.copy_(part)
        else:
            self._inner.optimizer.state[own][key] = part.to(own, copy=True)

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
    """The back end on Megatron-Core. Each rank reads its slices of a model or checkpoint, and writes its
    pieces of Hugging Face's tensors, which any back end reads.

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
        if model.unread is not None:
            numbers = model.parameter_count // tensor_parallel
            each = (compute_dtype or model.dtype).itemsize + (4 if compute_dtype is None else 8)
            need_room(model, ranks, numbers, each)  # gradients are float32, and perhaps masters
        self._ranks, self._stack = ranks, ExitStack()
        self._group = self._stack.enter_context(model_parallel(tensor_parallel))
        # The ranks at this one's place in the other tensor-parallel groups have other samples.
        places = [range(place, ranks.size, tensor_parallel) for place in range(tensor_parallel)]
        super().__init__(training, ranks.one_of(places, "data"), model)
        self._vocabulary = model.vocabulary
        self._device = model.device
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.weights()}
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
        self._where = {cut.source: piece for piece in self._pieces(first=True) for cut in piece.cuts}
        self._max_grad_norm = training.optim.max_grad_norm
        self._buffers = self._data_parallel(distributed)
        self._keeps_float32 = compute_dtype is not None
        self._optimizer = self._open_optimizer(training.optim, distributed)
        if model.unread is None:
            self._take(partial(part_of, dict(model.weights())))
        else:
            read_together(model, ranks, self._read)

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

    def _pieces(self, *, first: bool = False) -> list[Piece]:
        """Of this rank's parameters, or of those of the `first` tensor-parallel rank."""
        found = pieces(self._form, 0 if first else self._group.rank(), self._group.size())
        return [piece for piece in found if piece.name in self._parameters]

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

    def gathered(self) -> AbstractContextManager[Tensor]:
        """Megatron-Core's own float32 buffer, over which the ranks sum at the end."""
        return nullcontext(_gradient(self._parameters[_EMBEDDING if self._form.tied else HEAD]))

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
        walk together, one tensor at a time.
        """
        own = {piece.name: piece for piece in self._pieces()}
        for name, shape in self._shapes.items():
            yield name, self._gathered(name, own[self._where[name].name])[: shape[0]]

    @torch.no_grad()
    def _gathered(self, source: str, piece: Piece) -> Tensor:
        """A whole tensor from every rank's part of it; rows of padding may follow."""
        part, axis = self._parameters[piece.name].detach(), 0
        if not piece.split:
            return part
        if piece.name not in (_EMBEDDING, HEAD):  # of which ranks have as many rows each, with their padding
            cut, part = parts_of(piece, part)[source]
            axis = cut.axis
        parts = [torch.empty_like(part) for _ in range(self._group.size())]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts, dim=axis)

    @torch.no_grad()
    def state(self) -> State:
        """This rank's pieces of Hugging Face's tensors; the first has what all ranks have whole, too."""
        files: dict[str, dict[str, Tensor | TensorPiece]] = {"model": {}, "optimizer": {}}
        for piece in self._pieces():
            for key in (WEIGHT, *MOMENTS) if self._optimizer.steps else (WEIGHT,):
                values = self._optimizer.whole(piece.name, key)
                if key == WEIGHT and not self._keeps_float32:
                    values = values.to(self._parameters[piece.name].dtype)
                for source, (cut, part) in parts_of(piece, values).items():
                    if key == WEIGHT:
                        self._keep(files["model"], source, piece, cut, part)
                    else:
                        self._keep(files["optimizer"], f"{source}/{key}", piece, cut, part)
        if self._optimizer.steps and self._ranks.main:
            step = torch.tensor(float(self._optimizer.steps))
            files["optimizer"] |= {f"{name}/step": step.clone() for name in self._shapes}
        return files

    def _keep(
        self, kept: dict[str, Tensor | TensorPiece], name: str, piece: Piece, cut: Cut, part: Tensor
    ) -> None:
        shape = self._shapes[cut.source]
        if not piece.split:
            if self._ranks.main:
                kept[name] = part.to("cpu", copy=True)
            return
        rows, first = (part, cut.start) if cut.axis == 0 else self._own_rows(part)
        # Data-parallel ranks have the same rows, and each writes a part of them.
        flat, (low, high) = rows.reshape(-1), self._data_part(rows.numel())
        if high > low:
            kept[name] = copied(flat[low:high], shape, first * width_of(shape) + low)

    def _data_part(self, count: int) -> tuple[int, int]:
        """Of `count` elements that all data-parallel ranks have, those that this one writes."""
        each = -(-count // self.data.size)
        return min(self.data.rank * each, count), min((self.data.rank + 1) * each, count)

    def _own_rows(self, columns: Tensor) -> tuple[Tensor, int]:
        """This rank's rows of a tensor, of which all have `columns` [R, C / ranks]: a part
        [r, C] that lies in one piece in the whole, and the number of its first row.
        """
        ranks, (rows, width) = self._group.size(), columns.shape
        each = -(-rows // ranks)
        sizes = [min(each, max(0, rows - rank * each)) for rank in range(ranks)]
        mine = sizes[self._group.rank()]
        found = columns.new_empty(ranks * mine, width)
        dist.all_to_all_single(found, columns.contiguous(), [mine] * ranks, sizes, group=self._group)
        return found.view(ranks, mine, width).transpose(0, 1).reshape(mine, -1), self._group.rank() * each

    def load_state(self, state: Saved) -> None:
        saved, moments = state["model"], state["optimizer"]
        fields = optimizer_fields(moments, self._shapes)
        check_tensors(saved, self._shapes, f"a {self._form.family} on Megatron-Core")
        if not fields:
            self._take(partial(part_of, saved))
            return
        check_tensors(moments, moments_of(self._shapes), "the optimiser of this run")
        steps = int(next(iter(fields.values()))["step"])
        self._take(partial(part_of, saved), partial(part_of, moments), steps)

    def _read(self, stored: Stored) -> None:
        def elements(name: str, first: int, into: Tensor) -> None:
            stored.read([name], width_of(self._shapes[name]), first, into)

        self._take(elements)

    @torch.no_grad()
    def _take(self, weights: Elements, moments: Elements | None = None, steps: int = 0) -> None:
        """Read this rank's slices of weights and moments, a parameter at a time."""
        self._optimizer.resume(steps)
        for piece in self._pieces():
            value = self._assembled(piece, weights)
            self._parameters[piece.name].copy_(value)
            self._optimizer.put(piece.name, WEIGHT, value)
            if moments is not None:
                for key in MOMENTS:
                    self._optimizer.put(piece.name, key, self._assembled(piece, moments, f"/{key}"))

    def _assembled(self, piece: Piece, elements: Elements, field: str = "") -> Tensor:
        """[..] float32: a parameter from elements of Hugging Face's tensors, or from a `field` of them."""

        def of_field(name: str, first: int, into: Tensor) -> None:
            elements(name + field, first, into)

        return assemble(piece, self._form, read_elements(self._shapes, of_field, self._device))

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
