"""Several calls of one engine at once: what a later one asks for is decoded together with what is in flight.

A batch with long-tailed lengths ends with a few long responses and an engine that is nearly empty; here the
next batch's requests join them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from opd.protocols import RolloutEngine
from opd.rollout.engine_calls import part_of
from opd.rollout.transcript import Tokens, Transcript
from opd.types import DecodeStep, RolloutRequest

LOOK = 0.005
"""Seconds after which a call that waits looks whether another still drives the engine."""


class Turnstile:
    """Lets one thread in at a time; `between` gets in before the next `step`, however fast steps follow."""

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """For the writer: one decode step."""
        with self._door:
            self._room.acquire()
        try:
            yield
        finally:
            self._room.release()

    @contextmanager
    def between(self) -> Iterator[None]:
        """For the learner: what must not happen during a decode step."""
        with self._door, self._room:
            yield


class StoppedError(Exception):
    """Nobody wants more steps."""


class _Call:
    """One caller's requests, and the steps that wait for it."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self.requests = {request.uid: request for request in requests}
        self.open = set(self.requests)
        self.inbox: deque[DecodeStep] = deque()
        self.error: BaseException | None = None
        self._given = {request.uid: len(request.prefix_ids) for request in requests}
        self._written = Transcript({request.uid: _prefix(request) for request in requests})

    def take(self, step: DecodeStep) -> None:
        """A step that holds only this caller's requests."""
        self._written.add(step)
        self._written.end(step.finished)
        self.open.difference_update(step.finished)
        self.inbox.append(step)

    def unfinished(self) -> list[RolloutRequest]:
        """What an engine is to go on with, after the tokens that were written."""
        waiting = [self.requests[uid] for uid in self.requests if uid in self.open]
        return [
            replace(request, prefix_ids=self._written.tokens(request.uid).token_ids)
            if self._written.length(request.uid) > self._given[request.uid]
            else request
            for request in waiting
        ]


class JoinedCalls:
    """Stands before one engine and lets several threads call `generate` at once.

    The engine has one call at a time, which whoever waits drives. For a newcomer it is closed between two
    steps and begun again with everything unfinished, each response after its tokens: where that is when new
    weights come, whose keys and values have to be computed anyway, it costs nothing.

    Args:
        engine: What writes.
        turnstile: Every use of the engine is one `step` of it.
    """

    def __init__(self, engine: RolloutEngine, turnstile: Turnstile) -> None:
        self._engine, self._turnstile = engine, turnstile
        self._changed = threading.Condition()
        self._calls: list[_Call] = []
        self._steps: Iterator[DecodeStep] | None = None
        self._again = False
        """Whether the engine's call must be begun again: a caller came or went."""
        self._driven = self._stopped = False

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[DecodeStep]:
        """The steps of `requests` alone. Raises what the engine raises, and `StoppedError` after `stop`."""
        call = _Call(requests)
        with self._changed:
            self._calls.append(call)
            self._again = True
        return self._follow(call)

    def stop(self) -> None:
        """Let no call go on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let the engine go, once no thread calls any more."""
        self._end()

    def _follow(self, call: _Call) -> Iterator[DecodeStep]:
        try:
            while True:
                if self._wait_or_drive(call):
                    self._drive()
                while call.inbox:
                    yield call.inbox.popleft()
                if call.error is not None:
                    raise call.error
                if not call.open:
                    return
        finally:
            with self._changed:
                self._calls.remove(call)
                self._again = self._again or bool(call.open)
                self._changed.notify_all()

    def _wait_or_drive(self, call: _Call) -> bool:
        """Whether `call` is to drive the engine now: nobody else does, and nothing waits for it."""
        with self._changed:
            while True:
                if self._stopped:
                    raise StoppedError
                if call.inbox or call.error is not None or not call.open:
                    return False
                if not self._driven:
                    self._driven = True
                    return True
                self._changed.wait(LOOK)

    def _drive(self) -> None:
        """One decode step, dealt out to its callers."""
        try:
            with self._turnstile.step():
                step = self._next()
                with self._changed:
                    self._deal(step)
                    over = step is None or not (self._again or any(call.open for call in self._calls))
                if over:
                    self._finish()
        except BaseException as error:
            with self._changed:
                for call in self._calls:
                    call.error = error
        finally:
            with self._changed:
                self._driven = False

    def _next(self) -> DecodeStep | None:
        with self._changed:
            calls = list(self._calls) if self._again or self._steps is None else None
            self._again = False
        if calls is not None:
            self._end()
            requests = [request for call in calls for request in call.unfinished()]
            self._steps = iter(self._engine.generate(requests))
        assert self._steps is not None
        return next(self._steps, None)

    def _deal(self, step: DecodeStep | None) -> None:
        if step is None:  # the engine has no more, whatever is missing
            for call in self._calls:
                call.open.clear()
            self._changed.notify_all()
        elif len(self._calls) == 1 and not self._again:
            self._calls[0].take(step)
        else:
            for call in self._calls:
                rows = [row for row, uid in enumerate(step.uids) if uid in call.requests]
                ended = {uid: status for uid, status in step.finished.items() if uid in call.requests}
                if rows or ended:
                    call.take(part_of(step, rows, ended))
            if step.finished:
                self._changed.notify_all()

    def _finish(self) -> None:
        """Let the engine's call run to its end: everything asked for is there."""
        if self._steps is not None:
            next(self._steps, None)
        self._end()

    def _end(self) -> None:
        """Close the engine's call."""
        steps, self._steps = self._steps, None
        close = getattr(steps, "close", None)
        if close is not None:
            close()


def _prefix(request: RolloutRequest) -> Tokens:
    """The tokens a request begins with, of which only the ids are known."""
    ids = request.prefix_ids
    zeros = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
    return Tokens(np.asarray(ids, np.int32), *zeros, np.ones(len(ids), np.bool_))
