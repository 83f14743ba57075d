"""The engines of a rollout: retry policy, engines that can serve now, and weight sync over all.

An engine at work is advanced in the caller's thread or in one of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from opd.errors import OpdError, RolloutError, reason_of
from opd.protocols import RolloutEngine
from opd.retry import Retry
from opd.types import Chunk, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 4
"""Chunks that a threaded engine may be ahead of the log."""
POLL = 0.05
"""Seconds between two checks of a waiting thread for a stop."""
IDLE = 0.001
"""Seconds between two checks for requests, in a thread whose engine has nothing in flight."""


@dataclass(frozen=True, slots=True)
class Event:
    """One chunk of an engine at work, or what came in its place."""

    result: Chunk | Exception | None
    """Tokens, the error, or None if nothing was in flight any more."""
    number: int
    """Number of the newest submission that the engine knew of."""
    refused: bool = False
    """True if the error is a refusal of a request."""


class RunningEngine:
    """One engine at work, advanced by the caller of `next_event`. Requests join those in flight there."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._orders: deque[tuple[Sequence[RolloutRequest], Collection[str]]] = deque()
        """Requests to submit and to abort. The engine gets them between two chunks."""
        self._open: set[str] = set()
        self._number = 0
        self.busy_since: float | None = None
        """Monotonic time at which the chunk in progress began. `None` between chunks, and for a chunk that
        blocks the caller."""
        self.done = False
        """True if the engine is free again."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue `requests` for the engine."""
        self._orders.append((requests, ()))

    def abort(self, uids: Collection[str]) -> None:
        self._orders.append(((), uids))

    def next_event(self) -> Event:
        refused = False
        try:
            while self._orders:
                requests, aborted = self._orders.popleft()
                if aborted:
                    self._engine.abort(aborted)
                    self._open.difference_update(aborted)
                if requests:
                    self._number, refused = self._number + 1, True
                    self._engine.submit(requests)
                    self._open.update(request.uid for request in requests)
                    refused = False
            chunk = self._engine.next_chunk()
        except Exception as error:
            if not isinstance(error, RolloutError):  # otherwise it refuses a request, or is paused
                self._open, refused = set(), False  # a failed engine has nothing in flight
            return Event(error, self._number, refused)
        self._open = self._open.difference(chunk.finished) if chunk is not None else set()
        return Event(chunk, self._number)

    def stop(self) -> None:
        """Release the engine and abort its requests in flight."""
        with suppress(Exception):  # a dead engine has nothing in flight
            self._engine.abort(self._open)
        self.done = True


@dataclass(slots=True)
class EngineCall:
    """One engine at work for a rollout, from its first request until it has none, or fails."""

    engine: int
    source: RunningEngine
    open: dict[str, int] = field(default_factory=dict)
    """Requests that have not ended -> the number of their submission."""
    dropped: bool = False
    """True if a request was dropped before its end. Later chunks of it are ignored."""
    submissions: int = 0
    tokens: int = 0


class Gate:
    """Lets threads ask for chunks only while it is open. `close` returns once no chunk is in progress."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self._sources: list[ThreadSource] = []

    def add_source(self, source: ThreadSource) -> None:
        """Include `source` in the threads that `close` waits for."""
        self._sources = [s for s in self._sources if not s.done] + [source]

    def close(self, patience: float) -> None:
        """Hold every thread between two chunks. A thread that does not get there within `patience` seconds is
        asked to stop, and its engine fails.
        """
        self.opened.clear()
        until = time.monotonic() + patience
        for source in self._sources:
            if not source.chunk_lock.acquire(timeout=max(0.0, until - time.monotonic())):
                source.stop()
                continue
            source.chunk_lock.release()


class ThreadSource(RunningEngine):
    """One engine at work in a thread of its own. Every event is put, with `key`, into a shared inbox."""

    def __init__(
        self, engine: RolloutEngine, inbox: queue.SimpleQueue[tuple[object, Event]], gate: Gate
    ) -> None:
        super().__init__(engine)
        self._inbox, self._gate = inbox, gate
        self._stop = threading.Event()
        self.permits = threading.Semaphore(AHEAD)
        """The reader releases one for each event it takes from the inbox."""
        self.chunk_lock = threading.Lock()
        """Held while a chunk is in progress."""
        self.key: object = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="rollout-engine")

    def start(self, key: object) -> None:
        """Start the thread. Every event arrives as `(key, event)`."""
        self.key = key
        self._gate.add_source(self)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the chunk in progress and to release the engine."""
        self._stop.set()

    def _run(self) -> None:
        event = None
        while not self._stop.is_set():
            if not self.permits.acquire(timeout=POLL):
                continue
            event = self._next_event()
            if event is None:
                self.permits.release()
                self._gate.opened.wait(POLL)
            elif isinstance(event.result, Exception):
                break
            else:
                self._inbox.put((self.key, event))
        stopped = self._stop.is_set()
        super().stop()
        # The receiver of the failure may give the engine its next requests at once. An engine that was paused
        # or stopped in the middle of a chunk has not failed.
        if event is not None and isinstance(event.result, Exception) and not stopped:
            self._inbox.put((self.key, event))

    def _next_event(self) -> Event | None:
        """Return the next event, or None while the gate is closed or there is nothing to do."""
        with self.chunk_lock:
            if not self._gate.opened.is_set():
                return None
            if not (self._open or self._orders):
                time.sleep(IDLE)
                return None
            self.busy_since = time.monotonic()
            try:
                return self.next_event()
            finally:
                self.busy_since = None


def describe_error(error: BaseException) -> str:
    """Describe an error for people."""
    if isinstance(error, OpdError | TimeoutError) or not str(error).strip():
        return reason_of(error)
    return f"{type(error).__name__}: {reason_of(error)}"


ENGINES = Retry(attempts=3, pause=0.2, longest=30.0)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Attempts before a request, or an engine, is given up. Times in seconds."""

    retry: Retry = ENGINES
    """How often in a row a request may fail without a new token, and an engine's rest after a failure."""
    chunk_timeout: float | None = None
    """An engine that gives no chunk for so long gets no requests until it answers again."""
    silence_limit: float = 600.0
    """Time until the requests are given up if every engine is at a chunk that does not end."""
    deadline: float | None = None
    """Time a request may take, from its submission. It ends long responses more often than short ones, so it
    is a safety net, not a way to save time."""
    exhausted: Literal["raise", "fail"] = "raise"
    """When nothing is left to try: "raise" leaves the request open in the log, so that a restart goes on with
    it. "fail" closes it as failed with the reason, and the others go on."""
    revive: Callable[[int], RolloutEngine] | None = None
    """Returns a new engine with the current weights in place of engine `i`, which failed."""


DEFAULT_POLICY = RetryPolicy()


@dataclass(slots=True)
class EngineHealth:
    """Counts and state of one engine."""

    tokens: int = 0
    failures: int = 0
    in_a_row: int = 0
    """Failures since its last token."""
    resting_until: float = 0.0
    """Monotonic seconds, until which it gets no requests."""
    stale: bool = False
    """True if it missed a weight update. It serves again only with weights of the current version."""
    last_error: str | None = None

    def record_chunk(self, tokens: int) -> None:
        """Record a chunk of `tokens` tokens. The first one ends a row of failures."""
        if tokens:
            self.tokens += tokens
            self.in_a_row = 0

    def record_failure(self, now: float, error: BaseException, policy: RetryPolicy) -> None:
        """Record a failure at `now`. Its rest doubles with every failure in a row."""
        self.failures += 1
        self.in_a_row += 1
        self.last_error = describe_error(error)
        self.resting_until = now + policy.retry.pause_seconds(self.in_a_row)


PAUSE_PATIENCE = 60.0
"""Seconds a pause waits for chunks in progress when the policy has no chunk time-out."""


@runtime_checkable
class RecoverableEngine(Protocol):
    """An engine that is rebuilt elsewhere after a failure, while others go on."""

    @property
    def is_recovering(self) -> bool:
        """True while it is being rebuilt. It gets no requests then."""
        ...

    def report_failure(self, error: BaseException) -> None:
        """Record that a call failed with `error`."""
        ...


@runtime_checkable
class LockstepEngine(Protocol):
    """An engine whose model ranks share: no rank makes a pass without the others."""

    def drain(self) -> None:
        """Make the passes that other ranks need, until no rank has anything left. Called when nothing is left
        here.

        Raises `RanksError` if one of them has stopped.
        """
        ...

    def stop_passes(self) -> None:
        """Stop generating here, whatever is left, and let no rank wait for this one."""
        ...


class EnginePool:
    """Engines by index, with the health of each. A single engine without a time-out runs in the caller's
    thread. Otherwise each has its own thread while it is at work.
    """

    def __init__(self, engines: Sequence[RolloutEngine], policy: RetryPolicy = DEFAULT_POLICY) -> None:
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
        self.threaded = len(self.engines) > 1 or policy.chunk_timeout is not None
        self.gate = Gate()
        self.occupied: dict[int, RunningEngine] = {}
        """Engines that are not free until their source is done."""

    def ready_engines(self) -> list[int]:
        """Engines that can take requests now."""
        now = time.monotonic()
        for index, source in list(self.occupied.items()):
            if source.done or self._is_replaceable(index):
                del self.occupied[index]
        ready = []
        for index in self._alive_engines():
            engine = self.engines[index]
            recovering = isinstance(engine, RecoverableEngine) and engine.is_recovering
            if index not in self.occupied and not recovering and now >= self.health[index].resting_until:
                ready.append(index)
        return ready

    def next_return(self) -> float | None:
        """Seconds until an engine may serve again; `None` if none ever will."""
        alive = self._alive_engines()
        now = time.monotonic()
        return max(0.0, min(self.health[i].resting_until for i in alive) - now) if alive else None

    def get_engine(self, index: int) -> RolloutEngine:
        """Return engine `index`, rebuilt first if it failed and can be rebuilt. Raises `RolloutError` if the
        rebuilt engine holds another policy version.
        """
        if self.policy.revive is not None and self._is_replaceable(index):
            self.engines[index] = self.policy.revive(index)
            self.health[index].stale = False
        version = self.engines[index].policy_version
        if version != self.version:
            self.health[index].stale = True
            raise RolloutError(
                f"engine {index} holds policy version {version} where {self.version} is due; push the current"
                " weights to it."
            )
        return self.engines[index]

    def record_failure(self, index: int, error: BaseException) -> None:
        """Record that engine `index` failed: let it rest, and start its return."""
        engine = self.engines[index]
        if isinstance(engine, RecoverableEngine):
            engine.report_failure(error)
        self.health[index].record_failure(time.monotonic(), error, self.policy)

    def has_other(self, index: int) -> bool:
        """Return True if another engine, or a new one in place of `index`, may yet serve."""
        return self.policy.revive is not None or any(i != index for i in self._alive_engines())

    def drain(self) -> None:
        """See `LockstepEngine`. Engines that hold full models have nothing to do."""
        for engine in self.engines:
            if isinstance(engine, LockstepEngine):
                engine.drain()

    def stop_passes(self) -> None:
        """See `LockstepEngine`."""
        for engine in self.engines:
            if isinstance(engine, LockstepEngine):
                engine.stop_passes()

    def pause(self) -> None:
        """Stop sampling everywhere, between two chunks."""
        self.paused = True
        self.gate.close(self.policy.chunk_timeout or PAUSE_PATIENCE)
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()
        self.paused = False
        self.gate.opened.set()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Push `weights` to every engine and return the digest they hold.

        An engine that refuses them no longer serves until it is rebuilt. Raises `RolloutError` if none took
        them, or if two hold different weights afterwards.
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
                self.record_failure(index, error)
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

    def _is_replaceable(self, index: int) -> bool:
        """Return True if a new engine takes its place. Then nothing waits for a hanging chunk."""
        health = self.health[index]
        return self.policy.revive is not None and (health.in_a_row > 0 or health.stale)

    def _alive_engines(self) -> list[int]:
        return [
            i for i, health in enumerate(self.health) if not health.stale or self.policy.revive is not None
        ]
