"""One call of a fault-tolerant rollout: requests go to engines, and come back until each has ended."""

from __future__ import annotations

import math
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from opd.errors import OpdError, RolloutError
from opd.rollout.engine_pool import Call, EnginePool, Event, Failed, InlineSource, ThreadSource, words
from opd.rollout.ledger import ENDS, Ledger
from opd.types import Chunk, Status

LOOK = 0.1
"""Seconds between two looks at time-outs, deadlines and preemption while no step arrives."""


class Dispatch(Iterator[Chunk]):
    """Iterator over the chunks of a call; closing or dropping it lets the engines go."""

    def __init__(
        self,
        pool: EnginePool,
        ledger: Ledger,
        counters: Counter[str],
        between: Callable[[], None],
        at_end: Callable[[], None],
    ) -> None:
        """`between` runs before every step and may raise; `at_end` once, when no more steps come."""
        self._pool, self._ledger, self._counters = pool, ledger, counters
        self._between, self._at_end = between, at_end
        self._inbox: queue.SimpleQueue[tuple[object, Event]] = queue.SimpleQueue()
        self._calls: dict[int, Call] = {}
        # Those that go on come first: cached keys and values are restored from the first slot on.
        resumed = set(ledger.resumed)
        self._pending = deque(sorted(ledger.unfinished, key=lambda uid: uid not in resumed))
        self._limit = len(self._pending)
        """Most requests given to an engine at once; halved while engines fail without giving a token."""
        self._fruitless = 0
        self._patience = math.ceil(math.log2(max(1, self._limit))) + pool.policy.retry.attempts
        """Failures in a row without a token that are borne: enough to find one bad request among all."""
        self._strikes: Counter[str] = Counter()
        self._lengths: dict[str, int] = {}
        self._began = self._served = time.monotonic()
        """`_served`: when an engine was last free, resting or at work."""
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether steps may still come."""
        return self._open

    def __next__(self) -> Chunk:
        """The next step. Raises `RolloutError` while paused, when nothing is left to try, or for a request
        that cannot be served; `StorageError` if the log cannot be written.
        """
        while self._open:
            self._between()
            if self._pool.paused:
                raise RolloutError("the engine is paused; call resume() before the next chunk.")
            if (step := self._ledger.take()) is not None:
                return step
            if not self._pending and not any(call.open for call in self._calls.values()):
                self.close()
                break
            if self._pending:
                self._assign()
            self._listen()
            if (step := self._ledger.take()) is not None:
                return step
        raise StopIteration

    def close(self) -> None:
        """Let every engine go; requests in flight stay open in the log."""
        if self._open:
            self._open = False
            for index in list(self._calls):
                self._let_go(index)
            self._at_end()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    def _assign(self) -> None:
        """Give waiting requests to engines that are free."""
        idle = [index for index in self._pool.ready() if index not in self._calls]
        share = min(self._limit, math.ceil(len(self._pending) / max(1, len(idle))))
        for index in idle:
            batch = [self._pending.popleft() for _ in range(min(share, len(self._pending)))]
            if batch:
                self._start(index, batch)
        if not self._calls:
            self._wait()

    def _wait(self) -> None:
        """No engine can serve now."""
        seconds, now, limit = self._pool.next_return(), time.monotonic(), self._pool.policy.silence_limit
        if seconds is None:
            error: Exception = RolloutError("no engine holds the current weights; restart with --resume.")
        elif seconds == 0 and now - self._served > limit:
            error = TimeoutError(f"no engine has answered for {limit:g} s")
        else:
            self._served = now if seconds else self._served
            self._check_deadline()
            time.sleep(min(max(seconds, 0.001), LOOK))
            return
        self._give_up(list(self._pending), error)

    def _start(self, index: int, uids: list[str]) -> None:
        """Ask engine `index` for `uids`."""
        requests = [self._ledger.ask(uid) for uid in uids]
        for request in requests:
            length = len(request.prefix_ids)
            if length > self._lengths.get(request.uid, -1):
                self._lengths[request.uid] = length
                self._strikes.pop(request.uid, None)
        call = Call(index, uids, InlineSource(iter(())), set(uids))
        try:
            steps = self._pool.take(index).generate(requests)
        except RolloutError as error:
            if not self._pool.health[index].stale:
                # The engine works and says that the request cannot be served: nobody else could.
                self.close()
                raise
            self._failed(call, error)
            return
        except Exception as error:
            self._failed(call, error)
            return
        self._calls[index] = call
        self._served = time.monotonic()
        if self._pool.threaded:
            call.source = thread = ThreadSource(steps, self._inbox, self._pool.gate)
            thread.start(call)
        else:
            call.source = InlineSource(steps)

    def _listen(self) -> None:
        """Handle what engines say next."""
        if not self._calls:
            return
        if not self._pool.threaded:
            self._check_deadline()
            for call in list(self._calls.values()):
                assert isinstance(call.source, InlineSource)
                self._handle(call, call.source.take())
            return
        over = [call for call in self._calls.values() if call.source.done]
        try:
            key, event = self._inbox.get(timeout=LOOK)
        except queue.Empty:
            for call in over:
                self._failed(call, TimeoutError("it was in a step that a pause could not wait for"))
            self._check_time_outs()
        else:
            assert isinstance(key, Call)
            assert isinstance(key.source, ThreadSource)
            key.source.taken()
            if self._calls.get(key.engine) is key:
                self._handle(key, event)
        self._check_deadline()

    def _handle(self, call: Call, event: Event) -> None:
        if isinstance(event, Chunk):
            self._take(call, call.due(event))
        elif isinstance(event, Failed):
            self._failed(call, event.error)
        elif call.open:
            self._failed(call, RuntimeError(f"the engine ended without finishing {min(call.open)}"))
        else:
            self._calls.pop(call.engine)
            self._limit = min(2 * self._limit, len(self._ledger.requests))

    def _take(self, call: Call, step: Chunk) -> None:
        """A chunk of an engine."""
        call.tokens += len(step.uids)
        self._pool.health[call.engine].heard(time.monotonic(), len(step.uids))
        if step.uids:
            self._fruitless = 0
        step, early = self._ledger.stopped(step)
        if early:
            call.tell(self._pool.engines[call.engine], early)
        if not step.finished:
            self._ledger.accept(step)
            return
        ends = {uid: status for uid, status in step.finished.items() if status in ENDS}
        stopped = [uid for uid in step.finished if uid not in ends]
        call.open.difference_update(step.finished)
        self._ledger.accept(step if not stopped else replace(step, finished=ends))
        self._return(stopped)
        if call.over and not call.open:
            self._let_go(call.engine)  # what it still writes is not wanted

    def _return(self, uids: list[str]) -> None:
        """Requests that an engine stopped before their end go to the end of the queue."""
        self._counters["interrupted_requests"] += len(uids)
        for uid in uids:
            self._strikes[uid] += 1
            if self._strikes[uid] > self._pool.policy.retry.attempts:
                error = RolloutError(f"engines stopped it {self._strikes[uid]} times without a new token")
                self._give_up([uid], error)
            else:
                self._pending.append(uid)

    def _failed(self, call: Call, error: BaseException) -> None:
        """An engine raised, was too slow, or ended too early: its requests go on elsewhere."""
        self._counters["engine_failures"] += 1
        self._pool.failed(call.engine, error)
        self._let_go(call.engine)
        uids = [uid for uid in call.requests if uid in call.open]
        self._counters["interrupted_requests"] += len(uids)
        if isinstance(error, RolloutError) and not self._pool.has_other(call.engine):
            self._give_up([*uids, *self._pending], error)
            return
        self._pending.extendleft(reversed(uids))
        if call.tokens:
            return
        self._fruitless += 1
        self._limit = max(1, len(call.requests) // 2)
        if len(call.requests) == 1 and uids:
            self._strikes[uids[0]] += 1
            if self._strikes[uids[0]] >= self._pool.policy.retry.attempts:
                self._fruitless, self._limit = 0, len(self._ledger.requests)
                self._give_up(uids, error)
                return
        if self._fruitless > self._patience:
            others = [uid for other in self._calls.values() for uid in other.open]
            self._give_up(list(dict.fromkeys([*self._pending, *others])), error)

    def _give_up(self, uids: list[str], error: BaseException) -> None:
        """Nothing is left to try for `uids`: raise, or close them as failed."""
        if self._pool.policy.exhausted == "raise":
            self.close()
            if isinstance(error, OpdError):
                raise error
            raise RolloutError(
                f"request {uids[0]!r} and {len(uids) - 1} more cannot be finished: {words(error)}; what was"
                " written is kept, so mend the engine and restart with --resume."
            ) from error
        waiting = set(uids)
        self._pending = deque(uid for uid in self._pending if uid not in waiting)
        for uid in uids:
            self._ledger.close(uid, Status.FAILED, words(error))
        for call in self._calls.values():
            call.leave(uids)

    def _check_time_outs(self) -> None:
        limit = self._pool.policy.step_timeout
        if limit is None:
            return
        for call in list(self._calls.values()):
            since = call.source.busy_since()
            if since is not None and time.monotonic() - since > limit:
                self._counters["engine_timeouts"] += 1
                self._failed(call, TimeoutError(f"no tokens in {limit:g} s"))

    def _check_deadline(self) -> None:
        limit = self._pool.policy.deadline
        if limit is not None and time.monotonic() - self._began > limit:
            in_flight = [uid for call in self._calls.values() for uid in call.requests if uid in call.open]
            late = list(dict.fromkeys([*in_flight, *self._pending]))
            self._counters["deadlines"] += len(late)
            for index in list(self._calls):
                self._let_go(index)
            self._give_up(late, TimeoutError(f"not finished within the deadline of {limit:g} s"))

    def _let_go(self, index: int) -> None:
        """Stop reading from an engine; it serves again once its step in progress is over."""
        call = self._calls.pop(index, None)
        if call is not None:
            call.source.stop()
            self._pool.occupy(index, call.source)
