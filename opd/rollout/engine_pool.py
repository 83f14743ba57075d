"""The engines of a rollout: how long a failing one is trusted, which serve now, and weight sync over all.

One `generate` call on one engine, read in this thread or from a thread of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from opd.errors import OpdError, RolloutError
from opd.protocols import RolloutEngine
from opd.retry import Retry
from opd.types import Chunk

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 4
"""Decode steps a threaded engine may be ahead of the log."""
POLL = 0.05
"""Seconds between two looks of a waiting thread at whether it should stop."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine raised."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine has no more steps."""


Event = Chunk | Failed | Ended


class Source(Protocol):
    """Where the steps of a call come from."""

    @property
    def done(self) -> bool:
        """Whether the engine is free again."""
        ...

    def busy_since(self) -> float | None:
        """Monotonic time at which the step in progress began; `None` between steps."""
        ...

    def stop(self) -> None:
        """Ask for no more steps."""
        ...


@dataclass(slots=True)
class Call:
    """Requests given to one engine together."""

    engine: int
    requests: list[str]
    """Uids."""
    source: Source
    open: set[str] = field(default_factory=set)
    """Requests that have not ended."""
    over: set[str] = field(default_factory=set)
    """Requests that ended without this engine's knowing: nothing it still says of them is heard."""
    tokens: int = 0

    def leave(self, uids: Iterable[str]) -> list[str]:
        """Hear no more of those of `uids` that are still open here; returns them."""
        gone = self.open.intersection(uids)
        self.open -= gone
        self.over |= gone
        return list(gone)

    def tell(self, engine: object, ended: Iterable[str]) -> None:
        """As `leave`, and let the engine know, if it can be told."""
        abort = getattr(engine, "abort", None)
        gone = self.leave(ended)
        if abort is not None:
            abort(gone)

    def due(self, step: Chunk) -> Chunk:
        """`step` without what is over."""
        if not self.over:
            return step
        keep = [row for row, uid in enumerate(step.uids) if uid not in self.over]
        return step.part(keep, {u: status for u, status in step.finished.items() if u not in self.over})


class InlineSource:
    """Steps computed when they are asked for."""

    def __init__(self, steps: Iterator[Chunk]) -> None:
        self._steps = steps
        self.done = False

    def take(self) -> Event:
        """The next event."""
        try:
            return next(self._steps)
        except StopIteration:
            self.done = True
            return Ended()
        except Exception as error:
            self.stop()
            return Failed(error)

    def busy_since(self) -> float | None:
        """Never: a step in progress holds the caller."""
        return None

    def stop(self) -> None:
        """Close the engine's iterator."""
        self.done = True
        _close(self._steps)


class Gate:
    """Lets threads step only while it is open; `close` returns once nobody is in a step."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self._sources: list[ThreadSource] = []

    def watch(self, source: ThreadSource) -> None:
        """Include `source` in what `close` waits for."""
        self._sources = [s for s in self._sources if not s.done] + [source]

    def close(self, patience: float) -> None:
        """Hold every thread between two steps; one that does not get there within `patience` seconds is asked
        to stop, and its engine fails.
        """
        self.opened.clear()
        until = time.monotonic() + patience
        for source in self._sources:
            if not source.stepping.acquire(timeout=max(0.0, until - time.monotonic())):
                source.stop()
                continue
            source.stepping.release()


class ThreadSource:
    """Steps computed in a thread of their own and put, with `key`, into a shared inbox."""

    def __init__(
        self, steps: Iterator[Chunk], inbox: queue.SimpleQueue[tuple[object, Event]], gate: Gate
    ) -> None:
        self._steps, self._inbox, self._gate = steps, inbox, gate
        self._stop = threading.Event()
        self._permits = threading.Semaphore(AHEAD)
        self._began: float | None = None
        self.stepping = threading.Lock()
        """Held during a step."""
        self.key: object = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="rollout-engine")

    def start(self, key: object) -> None:
        """Begin; every event arrives as `(key, event)`."""
        self.key = key
        self._gate.watch(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the engine is free again."""
        return not self._thread.is_alive()

    def busy_since(self) -> float | None:
        """Monotonic time at which the step in progress began."""
        return self._began

    def taken(self) -> None:
        """The reader has taken an event from the inbox."""
        self._permits.release()

    def stop(self) -> None:
        """Ask the thread to end after the step in progress, and let the engine's iterator go."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._permits.acquire(timeout=POLL):
                continue
            event = self._step()
            if event is None:
                self._permits.release()
                self._gate.opened.wait(POLL)
                continue
            if not isinstance(event, Chunk):
                if self._stop.is_set():
                    event = (
                        None  # it was paused or left in the middle of a step: that is no failure of its own
                    )
                break
            self._inbox.put((self.key, event))
        else:
            event = None
        # Closed first: whoever hears of the end may give the engine its next requests at once.
        _close(self._steps)
        if event is not None:
            self._inbox.put((self.key, event))

    def _step(self) -> Event | None:
        """The next event; `None` while the gate is closed."""
        with self.stepping:
            if not self._gate.opened.is_set():
                return None
            self._began = time.monotonic()
            try:
                return next(self._steps)
            except StopIteration:
                return Ended()
            except Exception as error:
                return Failed(error)
            finally:
                self._began = None


def words(error: BaseException) -> str:
    """Why something failed, for people."""
    text = str(error).rstrip(".")
    return text if isinstance(error, OpdError | TimeoutError) else f"{type(error).__name__}: {text}"


def _close(steps: Iterator[Chunk]) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()


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
