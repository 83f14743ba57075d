"""What every way of sending weights has in common: who sends, who receives, and what is said in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterable[tuple[str, "Tensor"]]
"""Named tensors, walked once."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Weights of one version, ready to be received."""

    transport: str
    version: int
    where: Mapping[str, Any] = field(default_factory=dict)
    """What a receiver of this transport needs to find them; JSON-able."""


Answers = Callable[[], Sequence[str]]
"""Waits until every receiver has taken the weights; what each of them then holds, as a digest."""
Tell = Callable[[Parcel], Answers]
"""Has every receiver begin to receive, without waiting for it."""


class WeightSender(Protocol):
    """The trainer's end of a transport."""

    def send(self, weights: Weights, version: int, tell: Tell) -> tuple[str, Sequence[str]]:
        """Walk `weights` once and bring them to every receiver that `tell` reaches.

        Returns the digest of what was sent (`weights_digest`) and the receivers' own. Nothing of this version
        is kept for them afterwards.
        """
        ...

    def close(self) -> None:
        """Give back what the transport holds. A second call changes nothing."""
        ...


class WeightReceiver(Protocol):
    """An engine's end of a transport."""

    def receive(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """The weights of `parcel`, in the sender's order. A tensor may be overwritten or unmapped as soon as
        the next one is asked for: copy it. Raises `RolloutError` if they are not there or not whole.
        """
        ...


def buckets(weights: Weights, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of together at most `nbytes`; a larger one is alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
