"""A rollout engine that outlives its engines: every token is in the log before anyone sees it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError, RolloutError
from opd.protocols import RolloutEngine, TokenLog
from opd.rollout.dispatch import Dispatch
from opd.rollout.engine_pool import EngineHealth, EnginePool, RetryPolicy
from opd.rollout.ledger import Keeping, Ledger, StopStrings
from opd.rollout.preemption import WRITE_SPEED, KVStore, Preemption, Suspendable
from opd.types import Chunk, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_POLICY = RetryPolicy()
ENGINE_COUNTS = {"prefilled_tokens": "prefilled_tokens", "kv_restored_tokens": "restored_tokens"}
"""Counter -> attribute of an engine that grows with it."""


class FaultTolerantRollout:
    """Implements `opd.protocols.RolloutEngine` over other engines and a token log.

    Whatever interrupts a request (its engine raises, hangs, aborts it, is preempted, or this process dies and
    another opens the same log), it continues on a live engine after the tokens that are logged: these are
    never sampled again, and each keeps the policy version it was sampled with. `generate` tells what the log
    held first, as chunks like any other, so that its caller sees every response whole.

    Because nothing is thrown away, an interruption does not favour short responses. With the noise a function
    of (seed, uid, position), a resumed response is moreover the one that would have been written undisturbed.

    One embedded engine runs in the caller's thread. Several engines, or one with a step time-out, run in
    threads of their own.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        log: TokenLog | None = None,
        *,
        policy: RetryPolicy = DEFAULT_POLICY,
        describe: Callable[[RolloutRequest], Mapping[str, Any]] = lambda request: {},
        stops: StopStrings | None = None,
        preemption: Preemption | None = None,
        kv: KVStore | None = None,
        revive: Callable[[int], RolloutEngine] | None = None,
        note: Callable[[str], None] = lambda text: None,
        accept_newer: bool = False,
        owner: str | None = None,
    ) -> None:
        """`describe`: metadata to log with a request. `stops`: strings that end a response beside its
        stop ids. `kv`: where keys and values go when the rollout is preempted; without it they are
        rebuilt by prefill. `revive(i)`: a new engine with the current weights in place of engine `i`, which
        failed. `note`: one line for the person who watches. `accept_newer`: take tokens from the log that
        later weights wrote than the engine holds: asynchronous rollouts leave such when a run goes back to
        its last checkpoint. `owner`: whose requests they are; what another has logged is refused.

        Raises `RolloutError` if there is no engine, or if they hold different policy versions.
        """
        self.counters: Counter[str] = Counter()
        """Since the last `take_counters`; `requests` = `completed` + `truncated` + `failed` + `aborted` once
        calls have run to their end."""
        self.failures: dict[str, str] = {}
        """Why requests of the newest call failed."""
        self._pool = EnginePool(engines, policy, revive)
        self._keeping = Keeping(log, describe, stops, self.counters, self.failures, accept_newer, owner)
        self._preemption, self._kv, self._note = preemption, kv, note
        self._active: weakref.ref[Dispatch] | None = None
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
        """What each engine has done so far, by index."""
        return list(self._pool.health)

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """Every token of `requests` from response position `len(prefix_ids)` on: first what the log holds,
        then what the engines write, each step in the log before it is yielded.

        The iterator raises `RolloutError` for a request that no engine can serve, while the rollout is paused
        (nothing is lost by that), and when the policy has nothing left to try; `PreemptedError` when the run
        is to stop; `StorageError` if the log cannot be written. Raises `RolloutError` at once for requests
        the log knows otherwise, or if an earlier call is still in flight.
        """
        earlier = self._active() if self._active is not None else None
        if earlier is not None and earlier.is_open:
            raise RolloutError(
                "an earlier generate call is still in flight; exhaust or close its iterator before"
                " starting another."
            )
        self.failures.clear()
        ledger = Ledger(requests, self._keeping, self._pool.version)
        if ledger.recovered:
            self._restore()
        self._counted = self._count_engines()  # others may have used the engines in the meantime
        dispatch = Dispatch(self._pool, ledger, self.counters, self._between_steps, self._count_call)
        self._active = weakref.ref(dispatch)
        return dispatch

    def pause(self) -> None:
        """Stop sampling between two chunks; requests in flight stay where they are."""
        self._pool.pause()

    def flush(self) -> None:
        """Drop every cached key and value. Those in the store stay: they are only restored to the very
        weights that computed them.
        """
        for engine in self._pool.engines:
            engine.flush()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Push `weights` to every engine; returns the digest they all hold. An engine that refuses serves no
        more until `revive` replaces it. Raises `RolloutError` if none took them or two hold different ones.
        """
        return self._pool.update_weights(weights, version)

    def resume(self) -> None:
        """Continue sampling."""
        self._pool.resume()

    def suspend(self) -> None:
        """Make room: pause, keep keys and values of requests in flight if there is a store, release them."""
        self._pool.pause()
        suspendable = self._suspendable()
        if self._kv is not None:
            self._save(self._kv, suspendable)
        for engine in suspendable.values():
            engine.release()
        self.counters["suspensions"] += 1

    def wake(self) -> None:
        """Go on after `suspend`: restore keys and values if they were kept, and resume."""
        self._restore()
        self._pool.resume()

    def take_counters(self) -> dict[str, float]:
        """The counters since they were last taken, for the metrics. `prefilled_tokens` were computed, and
        `kv_restored_tokens` taken from kept keys and values instead, by engines that say so.
        """
        counters = {name: float(value) for name, value in self.counters.items()}
        self.counters.clear()
        return counters

    def _count_engines(self) -> dict[str, int]:
        engines = self._pool.engines
        return {
            name: sum(int(getattr(engine, attribute, 0)) for engine in engines)
            for name, attribute in ENGINE_COUNTS.items()
        }

    def _count_call(self) -> None:
        """Add what engines did in the call that is over."""
        counts = self._count_engines()
        grown = {name: count - self._counted[name] for name, count in counts.items()}
        self.counters.update({name: count for name, count in grown.items() if count > 0})

    def _between_steps(self) -> None:
        asked = self._preemption
        if asked is None or not asked.pending:
            return
        self.suspend()
        self._note("made room: keys and values released")
        asked.wait()
        asked.check()
        self.wake()
        self._note("goes on")

    def _suspendable(self) -> dict[int, Suspendable]:
        return {i: engine for i, engine in enumerate(self._pool.engines) if isinstance(engine, Suspendable)}

    def _save(self, store: KVStore, engines: Mapping[int, Suspendable]) -> None:
        """Keep keys and values, unless the grace period is too short: they can be computed again."""
        tensors = {
            f"{index}.{name}": tensor
            for index, engine in engines.items()
            for name, tensor in engine.snapshot().items()
        }
        size = sum(tensor.nbytes for tensor in tensors.values())
        remaining = self._preemption.remaining() if self._preemption is not None else None
        if not tensors or (remaining is not None and size / WRITE_SPEED > remaining / 2):
            store.clear()
            return
        store.save(tensors)
        self.counters["kv_saved_bytes"] += size

    def _restore(self) -> None:
        """Give kept keys and values back to their engines; whoever finds none prefills."""
        tensors = self._kv.load() if self._kv is not None else None
        if self._kv is None or not tensors:
            self._note("keys and values are computed again from the tokens")
            return
        for index, engine in self._suspendable().items():
            start = f"{index}."
            own = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
            if not own:
                continue
            try:
                count = engine.restore(own)
            except OpdError as error:
                self._note(f"engine {index} prefills: {error}")
                continue
            self.counters["kv_restored_sequences"] += count
            self._note(f"engine {index} restored keys and values of {count} sequences")
        self._kv.clear()
