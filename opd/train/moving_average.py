"""The exponential moving average of what a back end trains: a teacher that changes slowly.

Tarvainen and Valpola 2017, "Mean teachers are better role models". After each optimiser step
`average = decay * average + (1 - decay) * weight`, from the weights of the stage's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from opd.errors import CheckpointError
from opd.models.causal_lm import held_bytes, local_shard

_STEPS = "steps since the stage's start"


class MovingAverage:
    """A copy of `parameters`, by name, that `update` moves towards them. Each rank has its own part.

    Args:
        parameters: What learns, in the precision of the optimiser.
        decay: Share of the average that an update leaves. 0 copies the parameters.
        every: Steps between two updates.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, every: int = 1) -> None:
        self.decay, self.every = decay, every
        self.steps = 0
        """Since the stage's start."""
        self._parameters = parameters
        self.tensors = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        """By the name of the parameter, of its shape and dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return held_bytes(self.tensors.values())

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the parameters, which a step has changed, if it is time."""
        self.steps += 1
        if self.steps % self.every:
            return
        averages, weights = self._parts()
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of average and parameters, bit for bit. One tensor more is in memory."""
        for average, weight in zip(*self._parts(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds, by name."""
        yield from self.tensors.items()
        if self.every > 1:
            yield _STEPS, torch.tensor(self.steps)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor], read: Callable[[str, Tensor], Tensor]) -> None:
        """Take the values of a checkpoint: `read(name, like)`. Raises `CheckpointError` for other names or
        shapes.
        """
        names = {*self.tensors, *([_STEPS] if self.every > 1 else [])}
        if saved.keys() != names:
            odd = min(saved.keys() ^ names)
            raise CheckpointError(
                f"the moving average of a checkpoint and the trained weights differ in {odd}; go on with the"
                " recipe that wrote it."
            )
        for name, tensor in self.tensors.items():
            value = read(name, tensor)
            if value.shape != tensor.shape:
                raise CheckpointError(
                    f"the moving average of {name} in a checkpoint is {list(value.shape)}, the weight"
                    f" {list(tensor.shape)}; go on with the recipe that wrote it."
                )
            local_shard(tensor).copy_(local_shard(value))
        self.steps = int(saved[_STEPS]) if self.every > 1 else 0

    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of averages and weights."""
        weights = [local_shard(parameter.detach()) for parameter in self._parameters.values()]
        return [local_shard(tensor) for tensor in self.tensors.values()], weights
