"""Interfaces of the system: engine, teacher, trainer and estimator."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from opd.types import Chunk, LoggedRequest, RolloutRequest, Sample, SampleGroup, Status, TeacherTargets

if TYPE_CHECKING:
    from torch import Tensor

    from opd.kernels.head import Head


@runtime_checkable
class Resident(Protocol):
    """An object that holds much memory in this process."""

    def resident(self) -> dict[str, int]:
        """Return the bytes of the device's memory that each of its parts takes now."""
        ...


@runtime_checkable
class SentBytesCounter(Protocol):
    """An engine that transfers fewer bytes than the tensors it gets."""

    def take_sent_bytes(self) -> int | None:
        """Return the bytes of weights transferred since the last call, or `None` if those are all tensors."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that frees its device's memory while there is nothing to generate."""

    def sleep(self) -> None:
        """Pause, and hold neither weights nor keys and values until `update_weights`."""
        ...


class RolloutEngine(Protocol):
    """Generates responses with the student's current weights.

    Its unit is one request. Each begins when it comes and ends when it ends, and all requests in flight are
    decoded as one batch. `opd.rollout.streams` makes `generate` of `submit`, `next_chunk` and `abort`.

    Weight sync is always `pause -> flush -> update_weights -> verify -> resume`. The version only grows.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin `requests` with the next chunk, in addition to those in flight.

        Raises `RolloutError`, and begins none, if one of them cannot be served or is in flight already.
        """
        ...

    def next_chunk(self) -> Chunk | None:
        """Return the next tokens of the requests in flight, those that became known at once, or `None` if
        none is.

        Raises `RolloutError` while paused, which loses nothing. After any other error nothing is in flight
        any more.
        """
        ...

    def abort(self, uids: Collection[str]) -> None:
        """Abort these requests: no later chunk mentions them. Requests that are not in flight are ignored."""
        ...

    def pause(self) -> None:
        """Stop sampling between two chunks. Requests in flight stay where they are."""
        ...

    def flush(self) -> None:
        """Drop every cached key and value, so that nothing computed with old weights is used again."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Copy `weights` in place and return the digest of the engine's weights after that, by
        `opd.models.causal_lm.WeightsDigest(quick=True)`.

        Raises `RolloutError` if the engine is not paused or `version` does not grow.
        """
        ...

    def resume(self) -> None:
        """Continue sampling."""
        ...


class TokenLog(Protocol):
    """A log of every token of a rollout, durable before anyone else sees the token.

    A call that returns has been acknowledged: its record is there after a restart, as far as the log's sync
    policy promises. Positions of a request grow by one. A closed request takes no more tokens. Raises
    `StorageError` when it cannot write, and from then on for every write: nothing is acknowledged after that.
    """

    def open(self, request: RolloutRequest, metadata: Mapping[str, object]) -> None:
        """Log a new request. Opening a uid that is in the log already is an error."""
        ...

    def append(self, chunk: Chunk) -> None:
        """Log the tokens of a chunk, and the end of the requests it finished, as one commit."""
        ...

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        """End a request outside a chunk: aborted, failed, or ended by a stop string."""
        ...

    def find(self, uid: str) -> LoggedRequest | None:
        """Return the logged state of a request, or `None` if it was never opened or has been retired."""
        ...

    def retire(self, uids: Iterable[str]) -> None:
        """Let the log forget these requests, because the caller has made durable use of them."""
        ...


class Teacher(Protocol):
    """A model that predicts each position of a student's response: frozen, or the student of a step."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """Identity of its weights, part of every cache key."""
        ...

    def score(self, samples: Sequence[Sample]) -> TeacherTargets:
        """Return the targets for the response tokens of `samples`, concatenated in order: `[N, ...]`."""
        ...

    def load_head(self) -> Head:
        """Bring the head into memory. The schedule keeps one resident, or those of one mixture."""
        ...


class AdvantageEstimator(Protocol):
    """Turns the rewards of one group into per-token advantages. Never runs a model."""

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """Return one `[R]` float32 array per sample of `group`, in its order."""
        ...
