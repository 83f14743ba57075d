"""Batches written ahead of the learner, in threads of their own, several of them in one call of the engine.

The learner takes batch `k` when it has made `k` updates: its weights are version `k`. A batch may be begun at
most `max_ahead` updates early, so no token is ever older than `max_ahead` versions when it is learnt from,
whatever either side's speed is (the admission rule of AReaL, 2505.24298, section 5.1, counted in batches).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.rollout.collect import Generates
from opd.rollout.ledger import Tokens, Transcript
from opd.types import Chunk, RolloutRequest, SampleGroup

LOOK = 0.005
"""Seconds after which a call that waits looks whether another still drives the engine."""


class StepLock:
    """Lets one thread in at a time; `between` gets in before the next `step`, however fast steps follow."""

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """For the writer: one chunk."""
        with self._door:
            self._room.acquire()
        try:
            yield
        finally:
            self._room.release()

    @contextmanager
    def between(self) -> Iterator[None]:
        """For the learner: what must not happen while a chunk is written."""
        with self._door, self._room:
            yield


class StoppedError(Exception):
    """Nobody wants more steps."""


class _Call:
    """One caller's requests, and the steps that wait for it."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self.requests = {request.uid: request for request in requests}
        self.open = set(self.requests)
        self.inbox: deque[Chunk] = deque()
        self.error: BaseException | None = None
        self._given = {request.uid: len(request.prefix_ids) for request in requests}
        self._written = Transcript({request.uid: Tokens.prefix(request) for request in requests})

    def take(self, step: Chunk) -> None:
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
        lock: Every use of the engine is one `step` of it.
    """

    def __init__(self, engine: RolloutEngine, lock: StepLock) -> None:
        self._engine, self._lock = engine, lock
        self._changed = threading.Condition()
        self._calls: list[_Call] = []
        self._steps: Iterator[Chunk] | None = None
        self._again = False
        """Whether the engine's call must be begun again: a caller came or went."""
        self._driven = self._stopped = False

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
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

    def _follow(self, call: _Call) -> Iterator[Chunk]:
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
        """One chunk, dealt out to its callers."""
        try:
            with self._lock.step():
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

    def _next(self) -> Chunk | None:
        with self._changed:
            calls = list(self._calls) if self._again or self._steps is None else None
            self._again = False
        if calls is not None:
            self._end()
            requests = [request for call in calls for request in call.unfinished()]
            self._steps = iter(self._engine.generate(requests))
        assert self._steps is not None
        return next(self._steps, None)

    def _deal(self, step: Chunk | None) -> None:
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
                    call.take(step.part(rows, ended))
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


SOON = 0.05
"""Seconds that decoding waits at most for a batch that was begun to ask for its responses."""


class RolloutAhead:
    """Writes batch after batch with `write(self, index)` and keeps them until they are taken, in order.

    Errors of the writer reach the learner in `take`. The engine's other verbs are the learner's: new weights
    go in after `wait` (between batches, each token of which then has one version) or under
    `steps.between` (in the middle of responses), everything else under `idle`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        write: Callable[[Generates, int], list[SampleGroup]],
        first: int,
        max_ahead: int = 1,
        *,
        joined: bool = False,
    ) -> None:
        """Starts at once with batch `first`, which is also the learner's version. `write` samples everything
        through the `generate` it is given. `joined`: a batch is begun as soon as its age allows, while
        earlier ones are being written, each in a thread of its own; else one batch at a time. Raises
        `RolloutError` if `max_ahead` is below 1.
        """
        if max_ahead < 1:
            raise RolloutError(f"max_ahead must be at least 1, not {max_ahead}; for 0 write in turn.")
        self._write, self._max_ahead = write, max_ahead
        self._together = max_ahead + 1 if joined else 1
        self.steps = StepLock()
        self._calls = JoinedCalls(engine, self.steps)
        self._changed = threading.Condition()
        self._version = self._next = first
        self._writing: dict[int, threading.Thread] = {}
        self._unasked: set[int] = set()
        """Batches begun that have asked the engine for nothing yet."""
        self._held = 0
        """Learners that want no batch begun."""
        self._stopped = False
        self._ready: dict[int, list[SampleGroup]] = {}
        self._errors: dict[int, BaseException] = {}
        self._untaken: dict[int, set[str]] = {}
        """Requests begun, by batch."""
        with self._changed:
            self._begin()

    @property
    def untaken(self) -> set[str]:
        """Uids of the requests that were begun and have not been taken. To be read between steps."""
        with self._changed:
            return set().union(*self._untaken.values())

    def take(self, index: int) -> list[SampleGroup]:
        """Batch `index`, once it is written. Raises what the writer raised."""
        self.wait(index)
        with self._changed:
            self._untaken.pop(index, None)
            return self._ready.pop(index)

    def wait(self, index: int) -> None:
        """Return once batch `index` is written; raises what the writer raised.

        With `max_ahead` 1 the engine then rests until `learnt(index)`.
        """
        with self._changed:
            while index not in self._ready:
                failed = min(self._errors, default=index + 1)
                if failed <= index:
                    raise self._errors[failed]
                self._changed.wait()

    def learnt(self, version: int) -> None:
        """The learner has reached `version`, and the engine has its weights.

        Between two chunks the next one waits for the batches that may be begun now.
        """
        with self._changed:
            self._version = version
            self._begin()
            if self._together > 1:
                self._changed.wait_for(lambda: not self._unasked, SOON)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait until no batch is being written, and let none be begun while the block runs."""
        with self._changed:
            self._held += 1
            self._changed.wait_for(lambda: not self._writing)
        try:
            yield
        finally:
            with self._changed:
                self._held -= 1
                self._begin()

    def close(self) -> None:
        """Stop between two chunks; what is in flight stays in the log, if there is one."""
        with self._changed:
            self._stopped = True
            threads = list(self._writing.values())
        self._calls.stop()
        for thread in threads:
            thread.join()
        self._calls.close()

    def _begin(self) -> None:
        """Begin the batches that are due, with the lock held."""
        while (
            not self._stopped
            and not self._held
            and not self._errors
            and len(self._writing) < self._together
            and self._next - self._version <= self._max_ahead
        ):
            index = self._next
            self._next += 1
            self._unasked.add(index)
            thread = threading.Thread(target=self._run, args=(index,), name="rollout", daemon=True)
            self._writing[index] = thread
            thread.start()

    def _run(self, index: int) -> None:
        groups: list[SampleGroup] | None = None
        failure: BaseException | None = None
        try:
            groups = self._write(_Batch(self, index), index)
        except StoppedError:
            pass
        except BaseException as error:
            failure = error
        finally:
            with self._changed:
                if groups is not None:
                    self._ready[index] = groups
                if failure is not None:
                    self._errors[index] = failure
                del self._writing[index]
                self._unasked.discard(index)
                self._begin()
                self._changed.notify_all()

    def _ask(self, index: int, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """What batch `index` asks of the engine."""
        with self._changed:
            self._untaken.setdefault(index, set()).update(request.uid for request in requests)
            steps = self._calls.generate(requests)
            self._unasked.discard(index)
            self._changed.notify_all()
        return steps


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one batch is written through."""

    ahead: RolloutAhead
    index: int

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        return self.ahead._ask(self.index, requests)
