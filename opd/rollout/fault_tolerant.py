"""A rollout engine that outlives its engines: every token is in the log before anyone sees it.

Requests go to engines, and return to the queue until each has ended.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from opd.errors import OpdError, RanksError, RolloutError
from opd.protocols import RolloutEngine, SentBytesCounter, TokenLog
from opd.rollout.engine_pool import (
    DEFAULT_POLICY,
    EngineCall,
    EngineHealth,
    EnginePool,
    Event,
    RetryPolicy,
    RunningEngine,
    ThreadSource,
    describe_error,
)
from opd.rollout.preemption import WRITE_SPEED, Preemption, Suspendable
from opd.rollout.request_state import ENDS, NOTHING_LEFT, Recovery, RequestState, StopStrings
from opd.rollout.streams import Streaming
from opd.types import Chunk, RolloutRequest, Status

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

ENGINE_COUNTS = {
    "prefilled_tokens": "prefilled_tokens",
    "kv_restored_tokens": "restored_tokens",
    "kept_tokens": "kept_tokens",
}
"""Counter -> attribute of an engine that grows with it."""

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

    def reset(self) -> None:
        """Forget failures of engines."""
        self._failures, self.batch_limit = 0, math.inf

    def drop_requests(self, uids: Iterable[str]) -> None:
        """Forget requests that are over."""
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
                self.reset()
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

    When an engine dies (it raises, is silent for too long, or ends too early):

    1. `EnginePool.record_failure` lets it rest, twice as long each time. It may be rebuilt after that.
    2. Its requests return to the front of the queue, and go with their logged tokens to the next free engine.
       If it refused them and no other engine can come, all requests are given up.
    3. If it gave no token, a request may be the cause, which `BadRequestSearch` finds. This one is given up.

    To give up is to raise, or to close these requests as failed: `RetryPolicy.exhausted`.
    """

    def __init__(self, pool: EnginePool, state: RequestState, counters: Counter[str]) -> None:
        self._pool, self._state, self._counters = pool, state, counters
        self._inbox: queue.SimpleQueue[tuple[object, Event]] = queue.SimpleQueue()
        self._calls: dict[int, EngineCall] = {}
        """Engines at work."""
        self._pending: deque[str] = deque()
        """Requests that wait for an engine."""
        self._began: dict[str, float] = {}
        """Open requests, and the monotonic time at which each was submitted, for the deadline."""
        self._search = BadRequestSearch(pool.policy.retry.attempts)
        self.session_engines: dict[str, int] = {}
        """Session -> the one of several engines that generates its turns, and may hold keys and values of
        them."""
        self._last_served = time.monotonic()
        """Time at which an engine was last free, resting or at work, for the silence limit."""

    def add_requests(self, uids: Sequence[str]) -> None:
        """Queue `uids`, which the request state knows, behind the waiting ones."""
        now = time.monotonic()
        if not self._began:
            self._last_served = now
            self._search.reset()
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
        """Submit `uids` to engine `index`."""
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
        if not isinstance(chunk, Chunk):
            if chunk is not None and event.refused:
                raise chunk  # the engine works, and says that no engine could serve the request
            if chunk is not None:
                self._handle_failure(call, chunk)
            elif call.open and number == call.submissions:
                error = RuntimeError(f"the engine ended without finishing {min(call.open)}")
                self._handle_failure(call, error)
            return
        if call.dropped:  # the chunk may hold requests that were over, or submitted again, when it was made
            late = {uid for uid in (*chunk.uids, *chunk.finished) if call.open.get(uid, number + 1) > number}
            chunk = chunk.without_requests(late) if late else chunk
        call.tokens += len(chunk.uids)
        self._pool.health[call.engine].record_chunk(time.monotonic(), len(chunk.uids))
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


class FaultTolerantRollout(Streaming):
    """Implements `opd.protocols.RolloutEngine` over other engines and a token log.

    A request may be interrupted: its engine raises, hangs, aborts it, is preempted, or this process dies and
    another opens the same log. It continues on a live engine after its logged tokens. These are never sampled
    again, and each keeps the policy version it was sampled with. Logged tokens come first, as chunks like any
    other, so the caller sees every response in full.

    Because nothing is thrown away, an interruption does not favour short responses. The noise is a function
    of (seed, uid, position). So a resumed response is the one that would have been sampled undisturbed.
    """

    def __init__(
        self,
        engines: EnginePool | Sequence[RolloutEngine],
        log: TokenLog | None = None,
        *,
        policy: RetryPolicy = DEFAULT_POLICY,
        stops: StopStrings | None = None,
        preemption: Preemption | None = None,
        recovery: Recovery = NOTHING_LEFT,
    ) -> None:
        """`engines` may be a pool with a policy of its own. `stops`: strings that end a response besides its
        stop ids.

        Raises `RolloutError` if there is no engine, or if they hold different policy versions.
        """
        self._pool = engines if isinstance(engines, EnginePool) else EnginePool(engines, policy)
        self._state = RequestState(log, stops, recovery)
        self.counters = self._state.counters
        """Since the last `take_counters`. `requests` = `completed` + `truncated` + `failed` + `aborted` once
        all have ended."""
        self.failures = self._state.failures
        """Reasons of failed requests, by uid, since no request was open."""
        self._dispatch = Dispatch(self._pool, self._state, self.counters)
        self._preemption, self._kv = preemption or Preemption(), recovery.kv
        self._counted = self._count_engines()

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._pool.version

    @property
    def engines(self) -> list[RolloutEngine]:
        """The engines, by index."""
        return list(self._pool.engines)

    @property
    def health(self) -> list[EngineHealth]:
        """Counts and state of each engine, by index."""
        return list(self._pool.health)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin `requests`, or continue their logged tokens. Every token from response position
        `len(prefix_ids)` on comes in chunks, first the logged ones.

        Raises `RolloutError` for requests that differ from the log's, and `StorageError` if it cannot be
        written. `next_chunk` raises for a request that no engine can serve.
        """
        if not self._dispatch.is_busy:
            self._counted = self._count_engines()  # others may have used the engines in the meantime
        unfinished, recovered = self._state.add_requests(requests, self._pool.version)
        if recovered:
            self._restore_kv()
        self._dispatch.add_requests(unfinished)

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk, which is already in the log, or None if no request is open.

        Raises `RolloutError` for a request that no engine can serve, while the rollout is paused (nothing is
        lost by that), and when the policy has nothing left to try. Raises `PreemptedError` when the run is to
        stop, and `StorageError` if the log cannot be written.
        """
        preemption = self._preemption
        while self._dispatch.is_busy:
            if preemption.needs_action:
                self.suspend()
                _log.info("made room: keys and values released")
                preemption.wait()
                preemption.check()
                self.wake()
                _log.info("goes on")
            if self._pool.paused:
                raise RolloutError("the engine is paused; call resume() before the next chunk.")
            try:
                chunk = self._dispatch.next_chunk()
            except RanksError:  # another rank has stopped, perhaps because the whole run is to stop
                preemption.check()
                raise
            finally:
                if not self._dispatch.is_busy:
                    self._count_work()
            if chunk is not None:
                return chunk
        return None

    def drain(self) -> None:
        """See `EnginePool.drain`. Raises `PreemptedError` too."""
        try:
            self._pool.drain()
        except RanksError:
            self._preemption.check()
            raise

    def stop_passes(self) -> None:
        """See `EnginePool.stop_passes`."""
        self._pool.stop_passes()

    def abort(self, uids: Collection[str]) -> None:
        """Abort the requests `uids`. They stay open in the log."""
        if self._dispatch.is_busy:
            self._dispatch.abort(uids)
            self._count_work()

    def pause(self) -> None:
        """Stop sampling between two chunks. Requests in flight stay where they are."""
        self._pool.pause()

    def flush(self) -> None:
        """Drop every cached key and value. Those in the store stay, because they are restored only to the
        same weights that computed them.
        """
        for engine in self._pool.engines:
            engine.flush()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Push `weights` to every engine and return the digest they all hold. An engine that refuses them no
        longer serves until `revive` replaces it. Raises `RolloutError` if none took them or two hold
        different ones.
        """
        self._dispatch.session_engines.clear()
        digest = self._pool.update_weights(weights, version)
        size = getattr(weights, "nbytes", 0)  # as `sync_weights` hands them over
        for engine in self._pool.engines:
            if isinstance(engine, SentBytesCounter) and (sent_bytes := engine.take_sent_bytes()) is not None:
                size = sent_bytes
        if size > 0:
            self.counters["pushed_bytes"] += size
        return digest

    def resume(self) -> None:
        """Continue sampling."""
        self._pool.resume()

    def suspend(self) -> None:
        """Make room: pause, save keys and values of requests in flight if there is a store, release them."""
        self._pool.pause()
        suspendable = self._suspendable_engines()
        if self._kv is not None:
            tensors = {
                f"{index}.{name}": tensor
                for index, engine in suspendable.items()
                for name, tensor in engine.snapshot().items()
            }
            size = sum(tensor.nbytes for tensor in tensors.values())
            remaining = self._preemption.seconds_left()
            if not tensors or (remaining is not None and size / WRITE_SPEED > remaining / 2):
                self._kv.clear()  # the grace period is too short; they can be computed again
            else:
                self._kv.save(tensors)
                self.counters["kv_saved_bytes"] += size
        for engine in suspendable.values():
            engine.release()
        self.counters["suspensions"] += 1

    def wake(self) -> None:
        """Continue after `suspend`: restore saved keys and values, if any, and resume."""
        self._restore_kv()
        self._pool.resume()

    def take_counters(self) -> dict[str, float]:
        """Return the counters since the last call, for the metrics. `prefilled_tokens` were computed.
        `kv_restored_tokens` came from saved keys and values. `kept_tokens` came from those of an earlier
        turn, for engines that report it.
        """
        if self._dispatch.is_busy:
            self._count_work()
        counters = {name: float(value) for name, value in self.counters.items()}
        self.counters.clear()
        return counters

    def _count_engines(self) -> dict[str, int]:
        engines = self._pool.engines
        return {
            name: sum(int(getattr(engine, attribute, 0)) for engine in engines)
            for name, attribute in ENGINE_COUNTS.items()
        }

    def _count_work(self) -> None:
        """Add the engines' work since the last count."""
        previous, self._counted = self._counted, self._count_engines()
        for name, count in self._counted.items():
            if count > previous[name]:
                self.counters[name] += count - previous[name]

    def _suspendable_engines(self) -> dict[int, Suspendable]:
        return {i: engine for i, engine in enumerate(self._pool.engines) if isinstance(engine, Suspendable)}

    def _restore_kv(self) -> None:
        """Restore saved keys and values to their engines. An engine that finds none prefills."""
        tensors = self._kv.load() if self._kv is not None else None
        if self._kv is None or not tensors:
            _log.info("keys and values are computed again from the tokens")
            return
        for index, engine in self._suspendable_engines().items():
            start = f"{index}."
            engine_kv = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
            if not engine_kv:
                continue
            try:
                count = engine.restore(engine_kv)
            except OpdError as error:
                _log.info("engine %d prefills: %s", index, error)
                continue
            self.counters["kv_restored_sequences"] += count
            _log.info("engine %d restored keys and values of %d sequences", index, count)
        self._kv.clear()
