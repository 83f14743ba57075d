"""A rollout engine that outlives its engines: every token is in the log before anyone sees it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from opd.errors import OpdError, RanksError, RolloutError
from opd.protocols import RolloutEngine, SentBytesCounter, TokenLog
from opd.rollout.dispatch import Dispatch
from opd.rollout.engine_pool import DEFAULT_POLICY, EngineHealth, EnginePool, RetryPolicy
from opd.rollout.preemption import WRITE_SPEED, Preemption, Suspendable
from opd.rollout.request_state import NOTHING_LEFT, Recovery, RequestState, StopStrings
from opd.rollout.streams import Streaming
from opd.types import Chunk, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

ENGINE_COUNTS = {
    "prefilled_tokens": "prefilled_tokens",
    "kv_restored_tokens": "restored_tokens",
    "kept_tokens": "kept_tokens",
}
"""Counter -> attribute of an engine that grows with it."""


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
        self._listeners: list[set[str]] = []
        self._dispatch = Dispatch(self._pool, self._state)
        self._preemption, self._kv = preemption or Preemption(), recovery.kv
        self._counted = self._count_engines()
        self._received = self._received_bytes()

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._pool.version

    @property
    def is_replaying(self) -> bool:
        """True if the next chunk is there already. After a resume these are the log's."""
        return self._state.has_chunks

    @property
    def engines(self) -> list[RolloutEngine]:
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
        for asked in list(self._listeners):
            asked.update(request.uid for request in requests)
        unfinished, recovered = self._state.add_requests(requests, self._pool.version)
        if recovered:
            self._restore_kv()
        self._dispatch.add_requests(unfinished)

    def begin_noting(self) -> set[str]:
        """Return a set that takes the uids of all requests from now on, until `end_noting`."""
        asked: set[str] = set()
        self._listeners.append(asked)
        return asked

    def end_noting(self, asked: set[str]) -> None:
        """Let `asked` be as it is."""
        self._listeners = [one for one in self._listeners if one is not asked]

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
        previous, self._received = self._received, self._received_bytes()
        if self._received > previous:
            self.counters["received_bytes"] += self._received - previous
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

    def _received_bytes(self) -> int:
        return sum(int(getattr(engine, "received_bytes", 0)) for engine in self._pool.engines)

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
