"""Batches written ahead of the learner, in a thread of their own.

The learner takes batch `k` when it has made `k` updates: its weights are version `k`. A batch may be begun at
most `max_ahead` updates early, so no token is ever older than `max_ahead` versions when it is learnt from,
whatever either side's speed is (the admission rule of AReaL, 2505.24298, section 5.1, counted in batches).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.rollout.collect import Generates
from opd.types import DecodeStep, RolloutRequest, SampleGroup

POLL = 0.5
"""Seconds after which a waiting learner looks whether the writer is still alive."""


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


class RolloutAhead:
    """Writes batch after batch with `write(self, index)` and keeps them until they are taken, in order.

    Errors of the writer reach the learner in `take`. The engine's other verbs are the learner's: new weights
    go in after `wait` (between batches, each token of which then has one version) or under
    `turnstile.between` (in the middle of responses), everything else under `idle`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        write: Callable[[Generates, int], list[SampleGroup]],
        first: int,
        max_ahead: int = 1,
    ) -> None:
        """Starts at once with batch `first`, which is also the learner's version. `write` samples everything
        through the `generate` it is given. Raises `RolloutError` if `max_ahead` is below 1.
        """
        if max_ahead < 1:
            raise RolloutError(f"max_ahead must be at least 1, not {max_ahead}; for 0 write in turn.")
        self._engine, self._write, self._max_ahead = engine, write, max_ahead
        self.turnstile = Turnstile()
        self._changed = threading.Condition()
        self._version = first
        self._writing = False
        self._held = 0
        """Learners that want no batch begun."""
        self._stopped = False
        self._ready: dict[int, list[SampleGroup]] = {}
        self._error: BaseException | None = None
        self._index = first
        self._untaken: dict[int, set[str]] = {}
        """Requests begun, by batch."""
        self._thread = threading.Thread(target=self._run, args=(first,), name="rollout", daemon=True)
        self._thread.start()

    @property
    def untaken(self) -> set[str]:
        """Uids of the requests that were begun and have not been taken. To be read between steps."""
        return set().union(*self._untaken.values())

    def take(self, index: int) -> list[SampleGroup]:
        """Batch `index`, once it is written. Raises what the writer raised."""
        self.wait(index)
        with self.turnstile.between():
            self._untaken.pop(index, None)
        return self._ready.pop(index)

    def wait(self, index: int) -> None:
        """Return once batch `index` is written; raises what the writer raised.

        With `max_ahead` 1 the engine then rests until `learnt(index)`.
        """
        with self._changed:
            while index not in self._ready:
                if self._error is not None:
                    raise self._error
                if not self._thread.is_alive():
                    raise RolloutError(f"the writer has ended before batch {index}; restart with --resume.")
                self._changed.wait(POLL)

    def learnt(self, version: int) -> None:
        """The learner has reached `version`, and the engine has its weights."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

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
                self._changed.notify_all()

    def close(self) -> None:
        """Stop between two decode steps; what is in flight stays in the log, if there is one."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[DecodeStep]:
        """The engine's decode steps, each inside the turnstile."""
        with self.turnstile.step():
            begun = self._untaken.setdefault(self._index, set())
            begun.update(request.uid for request in requests)
            steps = iter(self._engine.generate(requests))
        while True:
            with self.turnstile.step():
                if self._stopped:
                    raise _StoppedError
                step = next(steps, None)
            if step is None:
                return
            yield step

    def _run(self, first: int) -> None:
        index = first
        try:
            while self._may_begin(index):
                self._index = index
                groups = self._write(self, index)
                with self._changed:
                    self._ready[index] = groups
                    self._writing = False
                    self._changed.notify_all()
                index += 1
        except _StoppedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _may_begin(self, index: int) -> bool:
        """Wait for the learner to be near enough; False if there will be no more batches."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or (not self._held and index - self._version <= self._max_ahead)
            )
            self._writing = not self._stopped
            return self._writing


class _StoppedError(Exception):
    """The learner wants no more."""
