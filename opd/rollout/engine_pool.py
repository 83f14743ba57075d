"""The engines of a rollout: how long a failing one is trusted, which serve now, and weight sync over all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.retry import Retry
from opd.rollout.engine_calls import Gate, Source

if TYPE_CHECKING:
    from torch import Tensor


ENGINES = Retry(attempts=3, pause=0.2, longest=30.0)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is tried before a request, or an engine, is given up. Times in seconds."""

    retry: Retry = ENGINES
    """Times in a row a request may fail on its own without a new token; how long an engine rests after a
    failure."""
    quarantine_after: int = 3
    """Failures in a row after which the rest counts as quarantine."""
    step_timeout: float | None = None
    """An engine that gives no chunk for so long is left alone until it answers again."""
    silence_limit: float = 600.0
    """When every engine is in a step that does not end: time until the requests are given up."""
    deadline: float | None = None
    """Time a request may take, from the call of `generate`. It ends long responses more often than short
    ones: a safety net, not a way to save time."""
    exhausted: Literal["raise", "fail"] = "raise"
    """When nothing is left to try: raise and leave the request open in the log, so that a restart goes on
    with it, or close it as failed with the reason and go on with the others."""


@dataclass(slots=True)
class EngineHealth:
    """What one engine has done so far."""

    tokens: int = 0
    failures: int = 0
    in_a_row: int = 0
    """Failures since its last token."""
    quarantines: int = 0
    resting_until: float = 0.0
    """Monotonic seconds."""
    last_heard: float | None = None
    """Monotonic seconds of its last chunk: chunks are its heartbeat."""
    stale: bool = False
    """It missed a weight update, and serves again only with weights of the current version."""
    last_error: str | None = None

    def heard(self, now: float, tokens: int) -> None:
        """It gave a step of `tokens` tokens at `now`."""
        self.last_heard = now
        if tokens:
            self.tokens += tokens
            self.in_a_row = 0

    def failed(self, now: float, error: BaseException, policy: RetryPolicy) -> None:
        """It failed at `now`: give it a rest that doubles with every failure in a row."""
        self.failures += 1
        self.in_a_row += 1
        self.last_error = f"{type(error).__name__}: {error}"
        if self.in_a_row == policy.quarantine_after:
            self.quarantines += 1
        self.resting_until = now + policy.retry.seconds(self.in_a_row)

    def rests(self, now: float) -> bool:
        """Whether it is to be left alone at `now`."""
        return now < self.resting_until


PAUSE_PATIENCE = 60.0
"""Seconds a pause waits for chunks in progress when the policy has no step time-out."""


@runtime_checkable
class Returning(Protocol):
    """An engine that is brought back elsewhere after a failure, while others go on."""

    @property
    def recovering(self) -> bool:
        """Whether it is on its way back: it gets no requests then."""
        ...

    def failed(self, error: BaseException) -> None:
        """A call failed with `error`."""
        ...


class EnginePool:
    """Engines by index, with the health of each. A single engine without a time-out runs in the caller's
    thread; otherwise each call has its own.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        policy: RetryPolicy,
        revive: Callable[[int], RolloutEngine] | None,
    ) -> None:
        """Raises `RolloutError` if there is no engine, or if they hold different policy versions."""
        versions = {engine.policy_version for engine in engines}
        if len(versions) != 1:
            raise RolloutError(
                f"a rollout needs at least one engine and one policy version, but {len(engines)} engines hold"
                f" the versions {sorted(versions)}; push the same weights to all of them first."
            )
        self.engines = list(engines)
        self.health = [EngineHealth() for _ in engines]
        self.version = versions.pop()
        self.policy = policy
        self.paused = False
        self.threaded = len(self.engines) > 1 or policy.step_timeout is not None
        self.gate = Gate()
        self._revive = revive
        self._occupied: dict[int, Source] = {}

    def occupy(self, index: int, source: Source) -> None:
        """Engine `index` is not free before `source` is done."""
        self._occupied[index] = source

    def ready(self) -> list[int]:
        """Engines that can take requests now."""
        now = time.monotonic()
        self._occupied = {
            i: source for i, source in self._occupied.items() if not (source.done or self._replaceable(i))
        }
        free = [i for i in self._alive() if not self.health[i].rests(now) and i not in self._occupied]
        return [i for i in free if not _recovering(self.engines[i])]

    def next_return(self) -> float | None:
        """Seconds until an engine may serve again; `None` if none ever will."""
        alive = self._alive()
        now = time.monotonic()
        return max(0.0, min(self.health[i].resting_until for i in alive) - now) if alive else None

    def take(self, index: int) -> RolloutEngine:
        """Engine `index`, rebuilt first if it failed and can be rebuilt. Raises `RolloutError` if what was
        rebuilt holds another policy version.
        """
        if self._revive is not None and self._replaceable(index):
            self.engines[index] = self._revive(index)
            self.health[index].stale = False
        held = self.engines[index].policy_version
        if held != self.version:
            self.health[index].stale = True
            raise RolloutError(
                f"engine {index} holds policy version {held} where {self.version} is due; push the current"
                " weights to it."
            )
        return self.engines[index]

    def failed(self, index: int, error: BaseException) -> None:
        """Engine `index` failed; let it rest, and see to its return."""
        engine = self.engines[index]
        if isinstance(engine, Returning):
            engine.failed(error)
        self.health[index].failed(time.monotonic(), error, self.policy)

    def has_other(self, index: int) -> bool:
        """Whether there is an engine beside `index`, or a new one in its place, that may yet serve."""
        return self._revive is not None or any(i != index for i in self._alive())

    def pause(self) -> None:
        """Stop sampling everywhere, between two chunks."""
        self.paused = True
        self.gate.close(self.policy.step_timeout or PAUSE_PATIENCE)
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        """Go on sampling."""
        for engine in self.engines:
            engine.resume()
        self.paused = False
        self.gate.opened.set()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Push `weights` to every engine and return the digest they hold.

        An engine that refuses them no longer serves until it is rebuilt. Raises `RolloutError` if none took
        them or if two hold different weights afterwards.
        """
        if len(self.engines) == 1:
            digest = self.engines[0].update_weights(weights, version)
            self.version, self.health[0].stale = version, False
            return digest
        pushed = list(weights)
        digests: dict[int, str] = {}
        errors: list[Exception] = []
        for index, engine in enumerate(self.engines):
            try:
                digests[index] = engine.update_weights(pushed, version)
                self.health[index].stale = False
            except Exception as error:
                errors.append(error)
                self.health[index].stale = True
                self.failed(index, error)
        if not digests:
            raise errors[0]
        self.version = version
        first, *others = digests
        for index in others:
            if digests[index] != digests[first]:
                raise RolloutError(
                    f"after the push of version {version} engine {index} holds other weights than engine"
                    f" {first}; replace one of them."
                )
        return digests[first]

    def _replaceable(self, index: int) -> bool:
        """Whether a new engine takes its place: then a step in which it hangs is not waited for."""
        health = self.health[index]
        return self._revive is not None and (health.in_a_row > 0 or health.stale)

    def _alive(self) -> list[int]:
        return [i for i, health in enumerate(self.health) if not health.stale or self._revive is not None]


def _recovering(engine: RolloutEngine) -> bool:
    return isinstance(engine, Returning) and engine.recovering
