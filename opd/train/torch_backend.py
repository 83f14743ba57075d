"""Back ends whose ranks call a Hugging Face model. `TorchBackend` trains it with AdamW of this process.

The layers of a `MastersBackend` compute with 16-bit or FP8 weights, and the optimiser trains float32 masters
(Micikevicius et al. 2017, "Mixed Precision Training"). An update is smaller than half a rounding of the
weight in 16 bits, so it is added to a master in float32. This is the arithmetic of FSDP2's mixed precision on
a world of one (`fsdp_backend.py`), without hooks and messages around every layer. With `quantize` the layers'
matrices hold the numbers of FP8, and their gradient is the masters' (straight through; Bengio et al. 2013).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from opd.errors import TrainingError
from opd.kernels.head import Head, summed_gradients
from opd.kernels.verification import accept_kernel
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM, tensors_of
from opd.models.converted_folder import FP8Weights
from opd.models.long_sequence import LayerMemory
from opd.models.routing import ExpertRouting, RoutedTokens, Router, find_routers
from opd.models.sharded import ForwardRoot
from opd.ranks import Ranks
from opd.storage.tensors import Saved, State, TensorPiece, optimizer_fields
from opd.train.backend import Backend, TrainingSettings
from opd.train.offload import BackendTensors, copy_mapped
from opd.train.optimizer import MovingAverage, build_adamw, not_finite, state_of
from opd.train.routers import ExpertLoad

log = logging.getLogger(__name__)


class WholeModelBackend(Backend):
    """A back end whose student is a `CausalLM` that each rank calls unsharded."""

    _dtype: torch.dtype | None = None
    """Of floating-point `weights`, if they are rounded."""

    def __init__(self, model: CausalLM, training: TrainingSettings, data: Ranks | None = None) -> None:
        super().__init__(training, data, model)
        self.model = model
        self._memory = LayerMemory(training.batch.recompute_layers, training.batch.sequence_chunk)
        self._max_grad_norm = training.optim.max_grad_norm

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, routed: RoutedTokens | None = None
    ) -> Tensor:
        return self.model.hidden(input_ids, position_ids, cu_seqlens, self._memory, routed)

    def _try_routing(self) -> ExpertRouting | str:
        """Return the model's routed blocks, or why they cannot be used, as the end of a sentence."""

        def find() -> Tensor:
            _ = self.model.routing  # its first use runs a few tokens
            return torch.zeros(())

        self.reload_weights()
        self.run(find)
        return self.model.routing or self.model.unroutable or "has no experts"

    def _find_routing(self) -> str | None:
        found = self._try_routing()
        if isinstance(found, str):
            return found
        self.routing = found
        return None

    def _find_routers(self) -> tuple[ExpertRouting, list[Router]] | str:
        found = self._try_routing()
        if isinstance(found, str):
            return found
        routers = find_routers(self.model.module, found)
        return routers if isinstance(routers, str) else (found, routers)

    def _balance_experts(self, load: ExpertLoad) -> None:
        """Move what routers add to their scores, by the `load` of the step."""
        if self._balance_rate and self.routing is not None:
            assert self.routing.corrections is not None
            load.balance(self.routing.corrections, self._balance_rate)

    def head(self) -> Head:
        return self.model.head()

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        if not isinstance(self.model, AdaptedLM):
            return self.weights()
        self.reload_weights()
        return self.model.merged_weights(self._dtype)


class TorchBackend(WholeModelBackend):
    """Owns the student's weights and its optimiser state.

    Args:
        model: The student; trained in place.
    """

    root: ForwardRoot | None = None
    """The module whose forward gathers the weights, if they are sharded."""
    average: MovingAverage | None = None
    """Of the weights that learn, if a teacher asks for it."""
    updates = 0
    """How often this process has changed the weights: their version."""

    def __init__(self, model: CausalLM, training: TrainingSettings, data: Ranks | None = None) -> None:
        super().__init__(model, training, data)
        self._parameters = self._trained_parameters()
        if training.shelf is not None:
            copy_mapped(model.module.parameters())
        self._optimizer = build_adamw(self._parameters, training.optim)

    def compile_layers(self, asked: bool | Literal["auto"], begun: bool | None) -> bool:
        wanted = begun if asked == "auto" else asked
        self.model.compiled = None
        if self.routing is not None and asked is True:
            raise TrainingError(
                "train.compile is true, and layers with replayed choices of experts are not compiled; set"
                " it to auto, or rollout.replay_experts to false."
            )
        routed = self.routing is not None or self._router_losses is not None
        if routed or wanted is False or (wanted is None and self.device.type != "cuda"):
            return False
        from opd.models.compiled_layers import compile_fault, compiled_layers, stays_plain

        if wanted is None and stays_plain():
            return False
        self.reload_weights()
        name = type(self.model.module).__name__
        log.info("the layers of %s are compiled and proven: minutes, the first time on a machine", name)
        fault = compile_fault(self.model, self.run)
        if self.together.any_rank(fault is not None, "the check of compiled layers"):
            fault = fault or "fail their check on another rank"
            if asked is True:
                raise TrainingError(
                    f"train.compile is true, and compiled layers of {name} {fault}; set it to auto or false."
                )
            return accept_kernel(
                f"compiled layers of {name}", fault, f"on {self.device}", "the layers' own code is"
            )
        self.model.compiled = compiled_layers
        return True

    def own_metrics(self) -> dict[str, float]:
        metrics = super().own_metrics()
        if self.model.compiled is None:
            return metrics
        from opd.models.compiled_layers import layer_graphs

        return metrics | {"compiled_graphs": float(layer_graphs().count)}

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimiser updates, by name."""
        return {n: p for n, p in self.model.module.named_parameters() if p.requires_grad}

    def gradient_total(self) -> AbstractContextManager[Tensor | None]:
        return summed_gradients(self.model.module)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient is not finite; the weights are untouched then.
        """
        norm = self._clip_gradient()
        self._reload_tensors("moments")
        if not math.isfinite(norm):
            self.zero_grad()
            raise not_finite(norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        if self._load is not None:
            self._balance_experts(self._load)
        self.updates += 1
        if self.average is not None:
            self.average.update()
        self.measured()  # the peak of the step's memory
        self.zero_grad()
        return {"lr": lr, "grad_norm": norm}

    def _clip_gradient(self) -> float:
        """Clip the gradient. Return its global norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm))

    def local_tensors(self) -> BackendTensors:
        parameters, buffers = tensors_of(self.model.module)
        if self.model.borrowed is not None:  # others compute with it while this one is away
            borrowed = set(self.model.borrowed.parameters)
            buffers += [one for one in parameters if one in borrowed]
            parameters = [one for one in parameters if one not in borrowed]
        return BackendTensors(
            tuple(parameters),
            [p.grad for p in self._parameters.values() if p.grad is not None],
            [value for state in self._optimizer.state.values() for value in state.values()],
            tuple(buffers),
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the student, in a fixed order."""
        self.reload_weights()
        return self.model.weights()

    def keep_average(self, decay: float, every: int = 1) -> None:
        """Keep the `MovingAverage` of the weights that learn, from now on and in checkpoints. Raises
        `TrainingError` for weights in 16 bits, which would lose what a step changes of it.
        """
        kept = self.average
        if kept is not None and (kept.decay, kept.every) == (decay, every):
            return
        narrow = next((p.dtype for p in self._parameters.values() if p.dtype.itemsize < 4), None)
        if narrow is not None:
            raise TrainingError(
                f"a moving average of weights that learn in {str(narrow).removeprefix('torch.')} would stand"
                " still; set train.precision to mixed."
            )
        self.reload_weights()
        self.average = MovingAverage(self._parameters, decay, every)
        self.files = (*Backend.files, "average")

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Compute with the moving average while the block runs. Then the weights have their bits again."""
        assert self.average is not None
        self.reload_weights()
        try:
            self.average.swap()
            self._follow_weights()
            yield
        finally:
            self.average.swap()
            self._follow_weights()

    def _follow_weights(self) -> None:
        """Have the layers compute with the weights, whose values others have changed."""

    def _copy_model(self) -> dict[str, Tensor | TensorPiece]:
        """Return a host copy of this rank's part of the weights, as the optimiser has them."""
        return self._copy_tensors(self.model.weights())

    def state(self) -> State:
        self.reload_weights()
        model = self._copy_model()
        self.offload_state()  # offloaded first, so both need not be on the device at once
        moments = self._copy_tensors(self._named_moments())
        average = {} if self.average is None else {"average": self._copy_tensors(self.average.state())}
        return {"model": model, "optimizer": moments, **average}

    def _copy_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | TensorPiece]:
        """Return a host copy of this rank's part of `tensors`."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}

    def _named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimiser's state of each parameter, as `NAME/FIELD`."""
        self._reload_tensors("moments")
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                yield f"{name}/{key}", value

    def load_state(self, state: Saved) -> None:
        by_name = optimizer_fields(state["optimizer"], self._parameters)
        self._reload_tensors("weights", "moments")
        self.model.load_weights(state["model"].items())
        for name, fields in by_name.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = state_of(parameter, fields)
        self._load_average(state, lambda saved, name, like: saved[name])

    def _load_average(
        self, state: Saved, read: Callable[[Mapping[str, Tensor], str, Tensor], Tensor]
    ) -> None:
        """Continue with the average of a checkpoint, and count the change of all weights."""
        self.updates += 1
        if self.average is not None:
            saved = state["average"]
            self.average.load(saved, lambda name, like: read(saved, name, like))


class MastersBackend(TorchBackend):
    """A `TorchBackend` whose layers compute in `compute_dtype`, while trained weights keep the model's dtype.

    The model's parameters are shadows of their masters, copied after every update. Each micro-batch's
    gradient of the shadows is added to that of the masters in their precision. Frozen weights, such as a base
    under adapters, exist once, in `compute_dtype`.
    """

    def __init__(self, model: CausalLM, training: TrainingSettings, compute_dtype: torch.dtype) -> None:
        self._dtype = compute_dtype
        self._fp8 = FP8Weights(model.module.config) if training.quantize else None
        super().__init__(model, training)
        if self._fp8 is not None:
            self._copy_masters()

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the masters. Their shadows replace them in the model."""
        self._shadows: list[nn.Parameter] = []
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.module.named_parameters():
            if parameter.requires_grad:
                masters[name] = nn.Parameter(parameter.data)
                self._shadows.append(parameter)
            parameter.data = parameter.data.to(self._dtype, copy=parameter.requires_grad)
        if self._shelf is not None:
            copy_mapped(masters.values())
        return masters

    @property
    def _masters(self) -> list[nn.Parameter]:
        return list(self._parameters.values())

    def gradient_total(self) -> AbstractContextManager[Tensor | None]:
        """Yield None: the head's gradient is summed with the others, in the precision of the masters."""
        return nullcontext(None)

    @torch.no_grad()
    def _sum_up(self) -> None:
        """Add the gradients of the shadows to those of the masters, and free them."""
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for master, shadow in zip(self._masters, self._shadows, strict=True):
            if shadow.grad is None:
                continue
            if master.grad is None:
                master.grad = shadow.grad.to(master.dtype)
            else:
                sums.append(master.grad)
                added.append(shadow.grad)
            shadow.grad = None
        if sums:
            torch._foreach_add_(sums, added)  # pyright: ignore[reportPrivateImportUsage]

    def backward(self, loss: Tensor, last: bool) -> None:
        super().backward(loss, last)
        self._sum_up()

    def zero_grad(self) -> None:
        super().zero_grad()
        for shadow in self._shadows:
            shadow.grad = None

    def step(self, lr: float) -> dict[str, float]:
        metrics = super().step(lr)
        self._copy_masters()
        return metrics

    @torch.no_grad()
    def _copy_masters(self) -> None:
        shadows, masters = list[Tensor](self._shadows), list[Tensor](self._masters)
        torch._foreach_copy_(shadows, masters)  # pyright: ignore[reportPrivateImportUsage]
        if self._fp8 is None:
            return
        for (name, master), shadow in zip(self._parameters.items(), self._shadows, strict=True):
            if name in self._fp8.names:
                shadow.copy_(self._fp8.numbers(name, master))

    def _follow_weights(self) -> None:
        self._copy_masters()

    def local_tensors(self) -> BackendTensors:
        tensors = super().local_tensors()
        return replace(tensors, weights=[*tensors.weights, *self._masters])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the student, in its compute dtype."""
        for name, tensor in super().weights():
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def _in_place_of_shadows(self) -> Iterator[None]:
        """Make the masters the model's parameters while the block runs."""
        narrow = [shadow.data for shadow in self._shadows]
        try:
            for shadow, master in zip(self._shadows, self._masters, strict=True):
                shadow.data = master.data
            yield
        finally:
            for shadow, data in zip(self._shadows, narrow, strict=True):
                shadow.data = data

    def _copy_model(self) -> dict[str, Tensor | TensorPiece]:
        with self._in_place_of_shadows():
            return super()._copy_model()

    def load_state(self, state: Saved) -> None:
        self._reload_tensors("weights")
        with self._in_place_of_shadows():
            super().load_state(state)
        self._copy_masters()
