"""One engine, any number of streams. The reader that waits for tokens advances the engine for all.

This is the only place that distributes chunks to the streams of their requests.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.types import Chunk, RolloutRequest, Status

LOOK = 0.005
"""Seconds between a waiting stream's checks that another still advances the engine."""


class EngineLock:
    """Lets one thread in at a time. `between_chunks` gets in before the next `use`, however fast chunks
    follow.
    """

    def __init__(self) -> None:
        self._turnstile, self._lock = threading.Lock(), threading.Lock()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the lock for one use of the engine, such as one chunk."""
        with self._turnstile:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def use_if_free(self) -> Iterator[bool]:
        """As `use`, but without waiting. Yields True if it got in."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._lock.release()

    @contextmanager
    def between_chunks(self) -> Iterator[None]:
        """Hold the lock between chunks, for the learner."""
        with self._turnstile, self._lock:
            yield


More = Callable[[bool], Sequence[RolloutRequest] | None]
"""`more(idle) -> requests`: further requests of a stream, called before each of its chunks. Returns None once
there will be no others. With `idle` all its requests have ended, so it may wait for a moment."""


def as_list(requests: RolloutRequest | Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """Return one request, or several, as a list."""
    return [requests] if isinstance(requests, RolloutRequest) else list(requests)


def with_note(more: More | None, note: Callable[[Sequence[RolloutRequest]], None]) -> More | None:
    """Wrap `more` so that `note` gets its requests before they begin."""
    if more is None:
        return None

    def note_requests(idle: bool) -> Sequence[RolloutRequest] | None:
        if requests := more(idle):
            note(requests)
        return requests

    return note_requests


class StoppedError(Exception):
    """Raised because no more chunks are wanted."""


@dataclass(eq=False, slots=True)
class _Inbox:
    """The open requests of one stream, and its waiting chunks. It does not keep a stream that was dropped."""

    open: set[str]
    more: More | None
    chunks: deque[Chunk] = field(default_factory=deque)


class Stream(Iterator[Chunk]):
    """The chunks of the requests of one call. Closing or dropping it aborts requests that have not ended."""

    def __init__(self, streams: Streams, inbox: _Inbox) -> None:
        self._streams, self._inbox = streams, inbox
        self._open = True

    def __next__(self) -> Chunk:
        """Return the next chunk. Advances the engine itself if no other stream's reader does.

        Raises the engine's error, `RolloutError` while it is paused, by which nothing is lost, and
        `StoppedError` after `Streams.stop`.
        """
        streams, inbox = self._streams, self._inbox
        while self._open:
            if inbox.more is not None:
                requests = inbox.more(not inbox.open and not inbox.chunks)
                if requests is None:
                    inbox.more = None
                elif requests:
                    streams._submit_requests(inbox, requests)
            with streams._changed:
                if streams._stopped:
                    raise StoppedError
                if inbox.chunks:
                    return inbox.chunks.popleft()
                if not inbox.open:
                    self._open = inbox.more is not None
                    continue
                if streams._driven:
                    streams._changed.wait(LOOK)
                    continue
                streams._driven = True
            try:
                with streams.lock.use():
                    try:
                        streams._abort_closed()
                        chunk = streams._engine.next_chunk()
                    except BaseException as error:
                        streams._error = error
                        raise
                    if chunk is None:  # nothing is in flight, whatever is missing
                        raise streams._error or RolloutError(
                            f"the engine ended without finishing request {min(inbox.open)}; restart with"
                            " --resume."
                        )
                    streams._error = None
                    streams._route_chunk(chunk)
                    streams._abort_closed()
            finally:
                streams._driven = False
        raise StopIteration

    def close(self) -> None:
        """Abort the requests that have not ended, here or in the thread that uses the engine now."""
        if self._open:
            self._open = False
            self._streams._closed.append(self._inbox)
            with self._streams.lock.use_if_free() as free:
                if free:
                    self._streams._abort_closed()

    __del__ = close

    def abort(self) -> None:
        """Close, and return once the engine has dropped the requests that have not ended."""
        self.close()
        with self._streams.lock.use():
            self._streams._abort_closed()


class Streams:
    """Wraps an engine. Any thread may open, read and close streams. Every use of the engine holds `lock`."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.lock = EngineLock()
        self._changed = threading.Condition()
        self._inboxes: list[_Inbox] = []
        self._closed: deque[_Inbox] = deque()
        """Streams that were closed while the engine was in use."""
        self._error: BaseException | None = None
        """The engine's last error."""
        self._driven = self._stopped = False

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Stream:
        """Stream the chunks of one request, or of several, which join those in flight, and of requests that
        `more` adds while the stream is read.

        Raises errors of `RolloutEngine.submit`, and `StoppedError` after `stop`.
        """
        inbox = _Inbox(set(), more)
        self._submit_requests(inbox, as_list(requests))
        return Stream(self, inbox)

    def _submit_requests(self, inbox: _Inbox, requests: Sequence[RolloutRequest]) -> None:
        with self.lock.use():
            if self._stopped:
                raise StoppedError
            self._abort_closed()
            if requests:
                self._engine.submit(requests)
                inbox.open.update(request.uid for request in requests)
                if inbox not in self._inboxes:
                    self._inboxes.append(inbox)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Abort all requests, once no thread reads any more."""
        with self.lock.use():
            self._closed += self._inboxes
            self._abort_closed()

    def _route_chunk(self, chunk: Chunk) -> None:
        """Put the rows of `chunk` into the inboxes of their requests."""
        if len(self._inboxes) == 1:
            parts = [(self._inboxes[0], chunk)]
        else:
            owner = {uid: inbox for inbox in self._inboxes for uid in inbox.open}
            uids = dict.fromkeys((*chunk.uids, *chunk.finished))
            if stranger := next((uid for uid in uids if uid not in owner), None):
                raise RolloutError(f"the engine spoke of request {stranger!r}, which nobody asked for.")
            rows: dict[_Inbox, list[int]] = {owner[uid]: [] for uid in uids}
            ended: dict[_Inbox, dict[str, Status]] = {inbox: {} for inbox in rows}
            for row, uid in enumerate(chunk.uids):
                rows[owner[uid]].append(row)
            for uid, status in chunk.finished.items():
                ended[owner[uid]][uid] = status
            parts = [(inbox, chunk.select_rows(rows[inbox], ended[inbox])) for inbox in rows]
        for inbox, part in parts:
            inbox.open.difference_update(part.finished)
            inbox.chunks.append(part)
        if chunk.finished:
            self._inboxes = [inbox for inbox in self._inboxes if inbox.open]
            with self._changed:
                self._changed.notify_all()

    def _abort_closed(self) -> None:
        """Abort the requests of closed streams. The caller holds `lock`."""
        while self._closed:
            inbox = self._closed.popleft()
            if inbox in self._inboxes:
                self._inboxes.remove(inbox)
                self._engine.abort(inbox.open)


class Streaming:
    """Gives an engine `generate`, over its own `submit`, `next_chunk` and `abort`."""

    _streams: weakref.ref[Streams] | None = None
    """Streams hold a reference to their engine, and the engine only a weak one to them."""

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Stream:
        """Stream the chunks of one request, or of several: see `Streams.generate`."""
        streams = self._streams() if self._streams is not None else None
        if streams is None:
            streams = Streams(cast("RolloutEngine", self))
            self._streams = weakref.ref(streams)
        return streams.generate(requests, more)
