"""The one verb of weight sync, whatever the transport: pause, flush, push, verify, resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.rollout.sync.parcel import Answers, Parcel, WeightReceiver, Weights, WeightSender


class Target(Protocol):
    """An engine that takes new weights, in this process or in another."""

    def pause(self) -> None: ...

    def flush(self) -> None: ...

    def receive(self, parcel: Parcel) -> Callable[[], str]:
        """Begin to receive; calling the result waits, and gives the digest of what the engine then holds."""
        ...

    def resume(self) -> None: ...


class LocalTarget:
    """An engine of this process, as a `Target`: it receives when it is waited for."""

    def __init__(self, engine: RolloutEngine, receiver: WeightReceiver) -> None:
        self._engine, self._receiver = engine, receiver

    def pause(self) -> None:
        self._engine.pause()

    def flush(self) -> None:
        self._engine.flush()

    def receive(self, parcel: Parcel) -> Callable[[], str]:
        return lambda: self._engine.update_weights(self._receiver.receive(parcel), parcel.version)

    def resume(self) -> None:
        self._engine.resume()


def sync_weights(targets: Sequence[Target], sender: WeightSender, weights: Weights, version: int) -> str:
    """Give every target `weights` under `version`; returns their digest.

    Raises `RolloutError` if a target holds other weights than were sent, and whatever transport or engine
    raise. The targets stay paused then: none of them samples a token with weights that nobody knows.
    """
    for target in targets:
        target.pause()
    for target in targets:
        target.flush()

    def tell(parcel: Parcel) -> Answers:
        begun = [target.receive(parcel) for target in targets]
        return lambda: [wait() for wait in begun]

    sent, held = sender.send(weights, version, tell)
    for place, digest in enumerate(held):
        if digest != sent:
            raise RolloutError(
                f"after the push of version {version} engine {place} holds other weights than the trainer;"
                " restart with --resume."
            )
    for target in targets:
        target.resume()
    return sent
