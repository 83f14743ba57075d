"""Open requests and the engines they are at: who gets which, and what follows when an engine fails."""

from __future__ import annotations

import math
import queue
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from opd.errors import OpdError, RanksError, RolloutError
from opd.rollout.engine_pool import EngineCall, EnginePool, Event, RunningEngine, ThreadSource, describe_error
from opd.rollout.request_state import ENDS, RequestState
from opd.types import Chunk, RolloutRequest, Status

LOOK = 0.1
"""Seconds between two looks at time-outs, deadlines and preemption while no chunk arrives."""


class BadRequestSearch:
    """Finds a request on which engines fail, so that it does not end the others.

    If an engine fails without a token, engines get half as many requests at a time, until one fails with a
    single request. Each such failure is a strike of that request. A new token clears its strikes.
    """

    def __init__(self, attempts: int) -> None:
        """`attempts`: strikes at which a request is given up."""
        self._attempts = attempts
        self.batch_limit = math.inf
        """Most requests at an engine at once. Below infinity a search is going on."""
        self._failures = 0
        """Failures of engines in a row, without a token of any."""
        self._strikes: Counter[str] = Counter()
        self._lengths: dict[str, int] = {}
        """Request -> its tokens when it was last submitted."""

    def forget_failures(self) -> None:
        self._failures, self.batch_limit = 0, math.inf

    def drop_requests(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._strikes.pop(uid, None)
            self._lengths.pop(uid, None)

    def record_submission(self, request: RolloutRequest) -> None:
        """Record how many tokens `request` has as it goes to an engine."""
        length = len(request.prefix_ids)
        if length > self._lengths.get(request.uid, -1):
            self._lengths[request.uid] = length
            self._strikes.pop(request.uid, None)

    def record_tokens(self) -> None:
        """Record that an engine gave tokens."""
        self._failures = 0

    def record_success(self, open_count: int) -> None:
        """Record that an engine ended all its requests. It may get more, of `open_count` that are open."""
        self.batch_limit = 2 * self.batch_limit if 2 * self.batch_limit < open_count else math.inf

    def record_failure(self, uids: list[str], open_uids: Collection[str]) -> list[str]:
        """Record that an engine failed with `uids`, without a token. Return the requests to give up."""
        self._failures += 1
        self.batch_limit = max(1, len(uids) // 2)
        if len(uids) == 1:
            self._strikes[uids[0]] += 1
            if self._strikes[uids[0]] >= self._attempts:
                self.forget_failures()
                return uids
        # Enough to find one bad request among all.
        too_many = self._failures > math.ceil(math.log2(len(open_uids))) + self._attempts
        return list(open_uids) if too_many else []

    def record_stop(self, uid: str) -> int | None:
        """Record that an engine stopped `uid` before its end. Return how often, if it is to be given up."""
        self._strikes[uid] += 1
        return self._strikes[uid] if self._strikes[uid] > self._attempts else None


class Dispatch:
    """Open requests, and the engines they are at. `next_chunk` moves both on.

    A request waits (`_pending`), is at one engine (`EngineCall.open`), and leaves when it has ended. When an
    engine fails (it raises, is silent for too long, or ends too early):

    1. `EnginePool.record_failure` lets it rest, twice as long each time. It may be rebuilt after that.
    2. Its requests return to the front of the queue, and go with their logged tokens to the next free engine.
       If it refused them and no other engine can come, all requests are given up.
    3. If it gave no token, a request may be the cause, which `BadRequestSearch` finds. This one is given up.

    To give up is to raise, or to close these requests as failed: `RetryPolicy.exhausted`.
    """

    def __init__(self, pool: EnginePool, state: RequestState) -> None:
        self._pool, self._state, self._counters = pool, state, state.counters
        self._inbox: queue.SimpleQueue[tuple[object, Event]] = queue.SimpleQueue()
        self._calls: dict[int, EngineCall] = {}
        self._pending: deque[str] = deque()
        """Requests that wait for an engine."""
        self._began: dict[str, float] = {}
        """Open requests, and the monotonic time at which each was submitted, for the deadline."""
        self._search = BadRequestSearch(pool.policy.retry.attempts)
        self.session_engines: dict[str, int] = {}
        """Session -> the engine of several that generates its turns, and may hold their keys and values."""
        self._last_served = time.monotonic()
        """Time at which an engine was last free, resting or at work, for the silence limit."""

    def add_requests(self, uids: Sequence[str]) -> None:
        """Queue `uids`, which the request state knows, behind the waiting ones."""
        now = time.monotonic()
        if not self._began:
            self._last_served = now
            self._search.forget_failures()
        self._pending += uids
        self._began |= dict.fromkeys(uids, now)

    def abort(self, uids: Collection[str]) -> None:
        """Abort the requests `uids`. They stay open in the log."""
        self._state.drop_requests(uids)
        self._drop_requests(uids)

    @property
    def is_busy(self) -> bool:
        """True if there may be more chunks."""
        return bool(self._began) or self._state.has_chunks

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk, if one has come.

        Raises `RolloutError` when nothing is left to try, or for a request that cannot be served. Raises
        `StorageError` if the log cannot be written. Nothing is open any more then.
        """
        if (chunk := self._state.next_chunk()) is not None:
            return chunk
        try:
            if self._pending:
                self._assign_requests()
            if self._calls and self._pool.threaded:
                self._poll_threads()
            elif self._calls:
                self._check_deadline()
                for call in list(self._calls.values()):
                    self._handle_event(call, call.source.next_event())
        except BaseException:
            self.abort(list(self._began))
            raise
        return self._state.next_chunk()

    def _drop_requests(self, uids: Collection[str]) -> None:
        """Remove requests that have ended or were aborted."""
        dropped = set(uids)
        for uid in dropped:
            self._began.pop(uid, None)
        self._search.drop_requests(dropped)
        self._pending = deque(uid for uid in self._pending if uid not in dropped)
        for call in list(self._calls.values()):
            if aborted := call.open.keys() & dropped:
                call.dropped = True
                call.open = {uid: number for uid, number in call.open.items() if uid not in aborted}
                call.source.abort(aborted)
            if not call.open:
                self._release_engine(call)

    def _assign_requests(self) -> None:
        """Give waiting requests to engines: to free ones, and to those at work up to an equal share. While a
        bad request is being searched for, only to free ones.
        """
        loads: dict[int, int] = {}
        for index in self._pool.ready_engines():
            call = self._calls.get(index)
            if call is None or (self._search.batch_limit == math.inf and not self._pool.health[index].stale):
                loads[index] = len(call.open) if call is not None else 0
        share = math.ceil((len(self._pending) + sum(loads.values())) / max(1, len(loads)))
        limit = int(min(self._search.batch_limit, share))
        batches: dict[int, list[str]] = {index: [] for index in loads}
        others: deque[str] = deque()
        for uid in self._pending:  # first the turns of sessions, to the engines of their earlier turns
            index = self.session_engines.get(self._state.requests[uid].session, -1)
            if index in loads and loads[index] + len(batches[index]) < limit:
                batches[index].append(uid)
            else:
                others.append(uid)
        self._pending = others
        for index, batch in batches.items():
            while self._pending and loads[index] + len(batch) < limit:
                batch.append(self._pending.popleft())
            if batch:
                self._submit_requests(index, batch)
        if not self._calls:
            self._wait_for_engine()

    def _wait_for_engine(self) -> None:
        """Wait, because no engine can serve now."""
        seconds, now, limit = self._pool.next_return(), time.monotonic(), self._pool.policy.silence_limit
        if seconds is None:
            error: Exception = RolloutError("no engine holds the current weights; restart with --resume.")
        elif seconds == 0 and now - self._last_served > limit:
            error = TimeoutError(f"no engine has answered for {limit:g} s")
        else:
            self._last_served = now if seconds else self._last_served
            self._check_deadline()
            time.sleep(min(max(seconds, 0.001), LOOK))
            return
        self._give_up(list(self._pending), error)

    def _submit_requests(self, index: int, uids: list[str]) -> None:
        requests = [self._state.resumed_request(uid) for uid in uids]
        for request in requests:
            self._search.record_submission(request)
        if len(self._pool.engines) > 1:
            self.session_engines |= {request.session: index for request in requests if request.continues}
        self._last_served = time.monotonic()
        if (call := self._calls.get(index)) is None:
            try:
                engine = self._pool.get_engine(index)
            except Exception as error:
                self._handle_failure(
                    EngineCall(index, RunningEngine(self._pool.engines[index]), dict.fromkeys(uids, 0)), error
                )
                return
            if self._pool.threaded:
                source = ThreadSource(engine, self._inbox, self._pool.gate)
                call = EngineCall(index, source)
                source.start(call)
            else:
                call = EngineCall(index, RunningEngine(engine))
            self._calls[index] = call
        call.submissions += 1
        call.open |= dict.fromkeys(uids, call.submissions)
        call.source.submit(requests)

    def _poll_threads(self) -> None:
        """Handle the next event of the engines in threads, if one comes within `LOOK` seconds."""
        over = [call for call in self._calls.values() if call.source.done]
        try:
            key, event = self._inbox.get(timeout=LOOK)
        except queue.Empty:
            for call in over:
                self._handle_failure(call, TimeoutError("it was at a chunk that a pause could not wait for"))
            self._check_time_outs()
        else:
            assert isinstance(key, EngineCall)
            assert isinstance(key.source, ThreadSource)
            key.source.permits.release()
            if self._calls.get(key.engine) is key:
                self._handle_event(key, event)
        self._check_deadline()

    def _handle_event(self, call: EngineCall, event: Event) -> None:
        """Log the chunk of an event and end its requests, or handle its failure."""
        chunk, number = event.result, event.number
        if chunk is None:
            if call.open and number == call.submissions:
                error = RuntimeError(f"the engine ended without finishing {min(call.open)}")
                self._handle_failure(call, error)
            return
        if isinstance(chunk, Exception):
            if event.refused:
                raise chunk  # the engine works, and says that no engine could serve the request
            self._handle_failure(call, chunk)
            return
        if call.dropped:  # the chunk may hold requests that were over, or submitted again, when it was made
            late = {uid for uid in (*chunk.uids, *chunk.finished) if call.open.get(uid, number + 1) > number}
            chunk = chunk.without_requests(late) if late else chunk
        call.tokens += len(chunk.uids)
        self._pool.health[call.engine].record_chunk(len(chunk.uids))
        if chunk.uids:
            self._search.record_tokens()
        chunk, early = self._state.apply_stops(chunk)
        ends = {uid: status for uid, status in chunk.finished.items() if status in ENDS}
        stopped = [uid for uid in chunk.finished if uid not in ends]
        self._state.log_chunk(chunk if not stopped else replace(chunk, finished=ends))
        if not chunk.finished:
            return
        for uid in chunk.finished.keys() - early:
            call.open.pop(uid, None)
        self._drop_requests(ends)
        self._counters["interrupted_requests"] += len(stopped)
        for uid in stopped:
            if (times := self._search.record_stop(uid)) is not None:
                error = RolloutError(f"engines stopped it {times} times without a new token")
                self._give_up([uid], error)
            else:
                self._pending.append(uid)
        if not call.open:
            self._search.record_success(len(self._began))
            self._release_engine(call)

    def _handle_failure(self, call: EngineCall, error: BaseException) -> None:
        """Handle an engine that raised, was too slow or ended too early. Its requests go on elsewhere."""
        self._counters["engine_failures"] += 1
        self._pool.record_failure(call.engine, error)
        self._release_engine(call)
        uids = list(call.open)
        self._counters["interrupted_requests"] += len(uids)
        # An engine that refuses once refuses again, and ranks that are out of step stay so.
        if isinstance(error, RolloutError | RanksError) and not self._pool.has_other(call.engine):
            self._give_up([*uids, *self._pending], error)
            return
        self._pending.extendleft(reversed(uids))
        if not call.tokens and (hopeless := self._search.record_failure(uids, self._began)):
            self._give_up(hopeless, error)

    def _give_up(self, uids: list[str], error: BaseException) -> None:
        """Raise, or close `uids` as failed, because nothing is left to try."""
        if self._pool.policy.exhausted == "raise":
            if isinstance(error, OpdError):
                raise error
            raise RolloutError(
                f"request {uids[0]!r} and {len(uids) - 1} more cannot be finished: {describe_error(error)};"
                " what was written is kept, so mend the engine and restart with --resume."
            ) from error
        for uid in uids:
            self._state.close_request(uid, Status.FAILED, describe_error(error))
        self._drop_requests(uids)

    def _check_time_outs(self) -> None:
        limit = self._pool.policy.chunk_timeout
        if limit is None:
            return
        for call in list(self._calls.values()):
            since = call.source.busy_since
            if since is not None and time.monotonic() - since > limit:
                self._counters["engine_timeouts"] += 1
                self._handle_failure(call, TimeoutError(f"no tokens in {limit:g} s"))

    def _check_deadline(self) -> None:
        limit, now = self._pool.policy.deadline, time.monotonic()
        if limit is not None and (late := [uid for uid, at in self._began.items() if now - at > limit]):
            self._counters["deadlines"] += len(late)
            self._give_up(late, TimeoutError(f"not finished within the deadline of {limit:g} s"))

    def _release_engine(self, call: EngineCall) -> None:
        """Stop reading from an engine. It serves again once its chunk in progress is over."""
        if self._calls.get(call.engine) is call:
            del self._calls[call.engine]
            call.source.stop()
            self._pool.occupied[call.engine] = call.source
