"""The single-process back end: a Hugging Face model, AdamW, exact accumulation over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from opd.config.train import BatchConfig
from opd.kernels.head import Head
from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import CausalLM
from opd.models.long_sequence import LayerMemory
from opd.ranks import Ranks
from opd.train.backend import Backend, Training, adamw, optimizer_fields, state_of, update
from opd.train.packing import of_packed
from opd.types import Sample


class TorchBackend(Backend):
    """Owns the student's weights and its optimiser state.

    Args:
        model: The student; trained in place.
        training: How it is trained.
        data: The ranks that share the samples.
    """

    def __init__(self, model: CausalLM, training: Training, data: Ranks | None = None) -> None:
        super().__init__(training, data, model)
        self.model = model
        self._memory = layer_memory(training.batch)
        self._max_grad_norm = training.optim.max_grad_norm
        self._parameters = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
        self._optimizer = adamw(self._parameters, training.optim)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.model.hidden(input_ids, position_ids, cu_seqlens, self._memory)

    def head(self) -> Head:
        return self.model.head()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient is not finite; the weights are untouched then.
        """
        return update(self, self._optimizer, self._clip(), lr)

    def _clip(self) -> float:
        """The global norm of the gradient, which is scaled down to the limit."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the student, in a fixed order."""
        return self.model.weights()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything `load_state` needs to continue bit for bit: the files `model` and `optimizer`."""
        optimizer: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                optimizer[f"{name}/{key}"] = value.detach().clone()
        return {"model": {n: t.detach().clone() for n, t in self.weights()}, "optimizer": optimizer}

    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from what `state` returned.

        Raises `CheckpointError` if it belongs to another model.
        """
        by_name = optimizer_fields(state["optimizer"], self._parameters)
        self.model.load_weights(state["model"].items())
        for name, fields in by_name.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = state_of(parameter, fields)


def layer_memory(batch: BatchConfig) -> LayerMemory:
    """What `batch` says about the memory of a forward pass."""
    return LayerMemory(batch.recompute_layers, batch.sequence_chunk)


@torch.no_grad()
def response_logprobs(
    model: CausalLM, samples: Sequence[Sample], temperature: float, batch: BatchConfig
) -> list[np.ndarray]:
    """`[R]` float32 log-probabilities of each sample's response under `model`, at `temperature`."""

    def one_pass(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
        hidden = model.hidden(input_ids, position_ids, cu_seqlens, layer_memory(batch))[rows]
        targets = input_ids[rows + 1]
        return linear_logprobs(hidden, model.head(), targets, temperature=temperature, chunk=batch.kl_chunk)

    return of_packed(samples, batch.max_tokens, model.device, one_pass)
