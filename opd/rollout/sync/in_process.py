"""Weights for an engine of the same process: handed over, never copied on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from opd.errors import RolloutError
from opd.models.causal_lm import WeightsDigest
from opd.rollout.sync.parcel import Parcel, Tell, Weights

if TYPE_CHECKING:
    from torch import Tensor


class InProcess:
    """Both ends. One receiver walks the sender's own iterator, so that nothing is in memory twice."""

    def __init__(self) -> None:
        self._weights: Iterator[tuple[str, Tensor]] | None = None

    def send(self, weights: Weights, version: int, tell: Tell) -> tuple[str, Sequence[str]]:
        """See `WeightSender`. Raises `RolloutError` for a second receiver."""
        digest = WeightsDigest()
        self._weights = digest.watch(weights)
        held = tell(Parcel("in_process", version))()
        return digest.hex(), held

    def receive(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReceiver`: the trainer's own tensors."""
        weights, self._weights = self._weights, None
        if weights is None:
            raise RolloutError(
                f"version {parcel.version} was already taken; in one process each engine needs a push of its"
                " own."
            )
        return weights

    def close(self) -> None:
        """Nothing is held."""
