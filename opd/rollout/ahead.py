"""Batches generated ahead of the learner, in threads of their own. Their requests are decoded in one batch.

The learner takes batch `k` after `k` updates, so its weights are version `k`. A batch may begin at most
`max_ahead` updates early. So no token is older than `max_ahead` versions when it is learnt from, whatever the
speed of either side. This is the admission rule of AReaL (2505.24298, section 5.1), counted in batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.rollout.collect import SamplingEngine
from opd.rollout.streams import More, StoppedError, Stream, Streams, as_list, with_note
from opd.types import RolloutRequest, SampleGroup


class RolloutAhead:
    """Generate batch after batch with `write(self, index)` and hold each until it is taken, in order.

    Errors of the writer are raised in `pop_batch`. The learner calls the engine's other verbs. New weights go
    in after `wait` (between batches, so each token of a batch has one version) or under `lock.between_chunks`
    (in the middle of responses). Everything else happens under `idle_engine`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        write: Callable[[SamplingEngine, int], list[SampleGroup]],
        first: int,
        max_ahead: int = 1,
        *,
        joined: bool = False,
        agree: Callable[[int], int] = lambda begun: begun,
    ) -> None:
        """Start at once with batch `first`, which is also the learner's version. `write` samples everything
        through the `generate` it is given. If `joined`, a batch begins as soon as its age allows, each in a
        thread of its own. Otherwise batches run one at a time. `agree` returns the largest value of all
        ranks, if they write a batch together. Raises `RolloutError` if `max_ahead` is below 1.
        """
        if max_ahead < 1:
            raise RolloutError(f"max_ahead must be at least 1, not {max_ahead}; for 0 write in turn.")
        self._write, self._max_ahead = write, max_ahead
        self._most_writing = max_ahead + 1 if joined else 1
        self._streams = Streams(engine)
        self.lock = self._streams.lock
        self._changed = threading.Condition()
        self._version = self._next = first
        self._writing: dict[int, threading.Thread] = {}
        self._agree = agree
        self._held = 0
        """Number of learners that let no batch begin."""
        self._owed = 0
        """Batches below this index begin all the same."""
        self._stopped = False
        self._ready: dict[int, list[SampleGroup]] = {}
        self._errors: dict[int, BaseException] = {}
        self._begun: dict[int, set[str]] = {}
        """Requests that have begun and were not taken, by batch."""
        with self._changed:
            self._begin_due()

    @property
    def pending_uids(self) -> set[str]:
        """Uids of the requests that have begun and were not taken. Read it between chunks."""
        with self._changed:
            return set().union(*self._begun.values())

    def pop_batch(self, index: int) -> list[SampleGroup]:
        """Return batch `index` once it is written. Raises the writer's error."""
        self.wait(index)
        with self._changed:
            self._begun.pop(index, None)
            return self._ready.pop(index)

    def wait(self, index: int) -> None:
        """Return once batch `index` is written. Raises the writer's error.

        If `max_ahead` is 1, the engine then rests until `on_weights_updated(index)`.
        """
        with self._changed:
            while index not in self._ready:
                failed = min(self._errors, default=index + 1)
                if failed <= index:
                    raise self._errors[failed]
                self._changed.wait()

    def on_weights_updated(self, version: int) -> None:
        """Tell that the learner has reached `version` and that the engine has its weights."""
        with self._changed:
            self._version = version
            self._begin_due()

    @contextmanager
    def idle_engine(self) -> Iterator[None]:
        """Wait until no batch is being written, and let none begin while the block runs.

        A batch that another rank has begun is written first, because that rank would wait for this share.
        """
        with self._changed:
            self._held += 1
            begun = self._next
        try:
            owed = self._agree(begun)
            with self._changed:
                self._owed = max(self._owed, owed)
                self._begin_due()
                self._changed.wait_for(lambda: not self._writing and (self._next >= owed or self._is_over))
            yield
        finally:
            with self._changed:
                self._held -= 1
                self._begin_due()

    def close(self) -> None:
        """Stop between two chunks. Requests in flight stay in the log, if there is one."""
        with self._changed:
            self._stopped = True
            threads = list(self._writing.values())
        self._streams.stop()
        for thread in threads:
            thread.join()
        self._streams.close()

    @property
    def _is_over(self) -> bool:
        """True if no more batches will begin."""
        return self._stopped or bool(self._errors)

    def _begin_due(self) -> None:
        """Begin the batches that are due. The caller holds the lock."""
        while (
            not self._is_over
            and (not self._held or self._next < self._owed)
            and len(self._writing) < self._most_writing
            and self._next - self._version <= self._max_ahead
        ):
            index = self._next
            self._next += 1
            thread = threading.Thread(target=self._run, args=(index,), name="rollout", daemon=True)
            self._writing[index] = thread
            thread.start()

    def _run(self, index: int) -> None:
        groups: list[SampleGroup] | None = None
        failure: BaseException | None = None
        try:
            groups = self._write(_AheadBatch(self._streams, partial(self._note_requests, index)), index)
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
                self._begin_due()
                self._changed.notify_all()

    def _note_requests(self, index: int, requests: Sequence[RolloutRequest]) -> None:
        with self._changed:
            self._begun.setdefault(index, set()).update(request.uid for request in requests)


@dataclass(frozen=True, slots=True)
class _AheadBatch:
    """The `generate` that one batch is written through."""

    streams: Streams
    note: Callable[[Sequence[RolloutRequest]], None]

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Stream:
        requests = as_list(requests)
        self.note(requests)
        return self.streams.generate(requests, with_note(more, self.note))
