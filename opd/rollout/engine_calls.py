"""One `generate` call on one engine, read in this thread or from a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from opd.errors import OpdError
from opd.types import Chunk

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
