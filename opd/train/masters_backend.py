"""Layers compute with 16-bit or FP8 weights in one process, the optimiser trains float32 masters.

Micikevicius et al. 2017, "Mixed Precision Training". An update is smaller than half a rounding of the weight
in 16 bits, so it is added to a master in float32. This is the arithmetic of FSDP2's mixed precision on a
world of one (`fsdp_backend.py`), without hooks and messages around every layer. With `quantize` the layers'
matrices hold the numbers of FP8, and their gradient is the masters' (straight through; Bengio et al. 2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from opd.models.causal_lm import CausalLM
from opd.models.converted_folder import FP8Weights
from opd.storage.tensors import Saved, TensorPiece
from opd.train.backend import TrainingSettings
from opd.train.offload import BackendTensors, copy_mapped
from opd.train.torch_backend import TorchBackend


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
