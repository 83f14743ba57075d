"""The seams of the system: what an engine, a teacher, a trainer and an estimator must do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from opd.types import (
    Chunk,
    LoggedRequest,
    RolloutRequest,
    Sample,
    SampleGroup,
    Status,
    TeacherTargets,
)

if TYPE_CHECKING:
    from torch import Tensor

    from opd.kernels.head import Head


@runtime_checkable
class Resident(Protocol):
    """Who holds much memory in this process."""

    def resident(self) -> dict[str, int]:
        """Bytes of the device's memory that each of its parts takes now."""
        ...


@runtime_checkable
class CountsSent(Protocol):
    """An engine that is sent less than all tensors that it is given."""

    def take_sent_bytes(self) -> int | None:
        """Bytes of weights that have travelled since it was asked last; `None` if those are all tensors."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """An engine that gives its device's memory back while there is nothing to write."""

    def sleep(self) -> None:
        """Pause, and hold neither weights nor keys and values until `update_weights`."""
        ...


class RolloutEngine(Protocol):
    """Writes responses with the student's current weights.

    Its unit is one request: each begins when it comes and ends when it ends, and what is in flight together
    is decoded together. `opd.rollout.streams` makes `generate` of `submit`, `step` and `abort`.

    Weight sync is always `pause -> flush -> update_weights -> verify -> resume`; the version only grows.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin `requests` with the next step, beside what is in flight.

        Raises `RolloutError`, and begins none, if one of them cannot be served or is in flight already.
        """
        ...

    def step(self) -> Chunk | None:
        """The next tokens of what is in flight, those that became known together; `None` if nothing is.

        Raises `RolloutError` while paused, by which nothing is lost. After any other error nothing is in
        flight any more.
        """
        ...

    def abort(self, uids: Collection[str]) -> None:
        """Let these go: no later step says anything of them. Those that are not in flight do not matter."""
        ...

    def pause(self) -> None:
        """Stop sampling between two chunks; requests in flight stay where they are."""
        ...

    def flush(self) -> None:
        """Drop every cached key and value, so that nothing computed with old weights is used again."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Copy `weights` in place and return the digest of what the engine now holds, by
        `opd.models.causal_lm.WeightsDigest(quick=True)`.

        Raises `RolloutError` if the engine is not paused or `version` does not grow.
        """
        ...

    def resume(self) -> None:
        """Continue sampling."""
        ...


class TokenLog(Protocol):
    """Every token of a rollout, durable before anyone else sees it.

    A call that returns has been acknowledged: what it wrote is there after a restart, as far as the log's
    sync policy promises. Positions of a request grow by one; a closed request takes no more tokens. Raises
    `StorageError` when it cannot write, and from then on for every write: nothing is acknowledged after that.
    """

    def open(self, request: RolloutRequest, metadata: Mapping[str, Any]) -> None:
        """Log a new request. Opening a uid that is in the log already is an error."""
        ...

    def append(self, step: Chunk) -> None:
        """Log the tokens of a chunk, and the end of those requests it finished, as one commit."""
        ...

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        """End a request outside a chunk: aborted, failed, or ended by a stop string."""
        ...

    def find(self, uid: str) -> LoggedRequest | None:
        """What is known of a request; `None` if it was never opened or has been retired."""
        ...

    def retire(self, uids: Iterable[str]) -> None:
        """The caller has made durable use of these requests; the log may forget them."""
        ...


class Teacher(Protocol):
    """A frozen model that says what it would have written at each position of a student's response."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """Identity of its weights; part of every cache key."""
        ...

    def score(self, samples: Sequence[Sample]) -> TeacherTargets:
        """Targets for the response tokens of `samples`, concatenated in order: `[N, ...]`."""
        ...

    def load_head(self) -> Head:
        """Bring the head into memory. The schedule keeps at most one resident."""
        ...


class AdvantageEstimator(Protocol):
    """Turns the rewards of one group into per-token advantages; never runs a model."""

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """One `[R]` float32 array per sample of `group`, in its order."""
        ...
