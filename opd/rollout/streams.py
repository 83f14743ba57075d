"""One engine, any number of streams. The reader that waits for tokens advances the engine for all.

This is the only place that distributes chunks to the streams of their requests.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.types import Chunk, RolloutRequest

LOOK = 0.005
"""Seconds between a waiting stream's checks that another still advances the engine."""


class StepLock:
    """Lets one thread in at a time. `between` gets in before the next `step`, however fast steps follow."""

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lock for one chunk."""
        with self._door:
            self._room.acquire()
        try:
            yield
        finally:
            self._room.release()

    @contextmanager
    def step_if_free(self) -> Iterator[bool]:
        """As `step`, but without waiting. Yields True if it got in."""
        free = self._room.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._room.release()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the lock between chunks, for the learner."""
        with self._door, self._room:
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
        if asked := more(idle):
            note(asked)
        return asked

    return note_requests


class StoppedError(Exception):
    """Raised because no more chunks are wanted."""


class _Inbox:
    """The open requests of one stream, and its waiting chunks."""

    def __init__(self, requests: Sequence[RolloutRequest], more: More | None) -> None:
        self.open = {request.uid for request in requests}
        self.chunks: deque[Chunk] = deque()
        self.more = more


class Stream(Iterator[Chunk]):
    """The chunks of the requests of one call. Closing or dropping it aborts requests that have not ended."""

    def __init__(self, streams: Streams, inbox: _Inbox) -> None:
        self._streams, self._inbox = streams, inbox
        self._open = True

    def __next__(self) -> Chunk:
        """Return the next chunk. Raises the engine's error, `RolloutError` while it is paused, by which
        nothing is lost, and `StoppedError` after `Streams.stop`.
        """
        chunk = self._streams._next_chunk(self._inbox) if self._open else None
        if chunk is None:
            self._open = False
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Abort the requests that have not ended."""
        if self._open:
            self._open = False
            self._streams._close_inbox(self._inbox)

    def __del__(self) -> None:
        self.close()


class Streams:
    """Wraps an engine. Any thread may open, read and close streams at any time. Every use of the engine is
    one `step` of the lock `steps`.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.steps = StepLock()
        self._changed = threading.Condition()
        self._inboxes: list[_Inbox] = []
        self._leaving: deque[_Inbox] = deque()
        """Streams that were closed while the engine was in use."""
        self._broke: BaseException | None = None
        """The engine's last error."""
        self._driven = self._stopped = False

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Stream:
        """Stream the chunks of one request, or of several, which join those in flight, and of requests that
        `more` adds while the stream is read.

        Raises errors of `RolloutEngine.submit`, and `StoppedError` after `stop`.
        """
        asked = as_list(requests)
        inbox = _Inbox(asked, more)
        self._submit_requests(inbox, asked)
        return Stream(self, inbox)

    def _submit_requests(self, inbox: _Inbox, asked: Sequence[RolloutRequest]) -> None:
        with self.steps.step():
            if self._stopped:
                raise StoppedError
            self._let_go()
            if asked:
                self._engine.submit(asked)
                inbox.open.update(request.uid for request in asked)
                if inbox not in self._inboxes:
                    self._inboxes.append(inbox)

    def _ask_more(self, inbox: _Inbox) -> None:
        """Begin the further requests of the stream's reader."""
        if inbox.more is not None:
            asked = inbox.more(not inbox.open and not inbox.chunks)
            if asked is None:
                inbox.more = None
            elif asked:
                self._submit_requests(inbox, asked)

    def stop(self) -> None:
        """End all streams."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Abort all requests, once no thread reads any more."""
        with self.steps.step():
            self._leaving += self._inboxes
            self._let_go()

    def _next_chunk(self, inbox: _Inbox) -> Chunk | None:
        while True:
            self._ask_more(inbox)
            with self._changed:
                if self._stopped:
                    raise StoppedError
                if inbox.chunks:
                    return inbox.chunks.popleft()
                if not inbox.open:
                    if inbox.more is None:
                        return None
                    continue
                if self._driven:
                    self._changed.wait(LOOK)
                    continue
                self._driven = True
            try:
                self._advance_engine(inbox)
            finally:
                self._driven = False

    def _advance_engine(self, inbox: _Inbox) -> None:
        """Advance the engine by one chunk and distribute it."""
        with self.steps.step():
            try:
                self._let_go()
                chunk = self._engine.step()
                self._broke = self._broke if chunk is None else None
            except BaseException as error:
                self._broke = error
                raise
            if chunk is None:  # nothing is in flight, whatever is missing
                raise self._broke or RolloutError(
                    f"the engine ended without finishing request {min(inbox.open)}; restart with --resume."
                )
            self._route_chunk(chunk)
            self._let_go()

    def _route_chunk(self, chunk: Chunk) -> None:
        if len(self._inboxes) == 1:
            parts = [(self._inboxes[0], chunk)]
        else:
            owner = {uid: inbox for inbox in self._inboxes for uid in inbox.open}
            told = dict.fromkeys((*chunk.uids, *chunk.finished))
            if stranger := next((uid for uid in told if uid not in owner), None):
                raise RolloutError(f"the engine spoke of request {stranger!r}, which nobody asked for.")
            rows: dict[_Inbox, list[int]] = {owner[uid]: [] for uid in told}
            for row, uid in enumerate(chunk.uids):
                rows[owner[uid]].append(row)
            ended = {uid: (owner[uid], status) for uid, status in chunk.finished.items()}
            parts = [
                (
                    inbox,
                    chunk.select_rows(own, {uid: how for uid, (who, how) in ended.items() if who is inbox}),
                )
                for inbox, own in rows.items()
            ]
        for inbox, part in parts:
            inbox.open.difference_update(part.finished)
            inbox.chunks.append(part)
        if chunk.finished:
            self._inboxes = [inbox for inbox in self._inboxes if inbox.open]
            with self._changed:
                self._changed.notify_all()

    def _close_inbox(self, inbox: _Inbox) -> None:
        """Abort the requests of `inbox`, here or in the thread that uses the engine now."""
        self._leaving.append(inbox)
        with self.steps.step_if_free() as free:
            if free:
                self._let_go()

    def _let_go(self) -> None:
        while self._leaving:
            inbox = self._leaving.popleft()
            if inbox in self._inboxes:
                self._inboxes.remove(inbox)
                self._engine.abort(inbox.open)


class Streaming:
    """Gives an engine `generate`, over its own `submit`, `step` and `abort`."""

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
