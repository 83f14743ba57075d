"""Requests to several servers of one model: balanced, bounded, retried.

An asyncio loop in a thread of its own serves callers that are not asynchronous.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from opd.errors import OpdError
from opd.served.http_client import HTTPClient, PoolOptions, RefusedError, Server, UnavailableError

T = TypeVar("T")
CANCEL_ROUNDS, CANCEL_SECONDS = 10, 0.5
"""How often, and how many seconds apart, what still runs is cancelled before it is left behind."""


class LoopThread:
    """Runs coroutines until it is closed. The thread never keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work`; cancelling the future cancels it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the loop is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. An interrupt of the caller cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread. A second call changes nothing."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for _ in range(CANCEL_ROUNDS):
        if not others:
            return
        for task in others:
            task.cancel()
        # Once is not enough: a cancellation that meets a time-out at the same moment is lost.
        done, others = await asyncio.wait(others, timeout=CANCEL_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()


@dataclass(slots=True, kw_only=True)
class Trouble:
    """How often one request has failed."""

    bad_answers: int = 0
    since: float | None = None
    """When it failed first."""


@dataclass(slots=True)
class _Call(Trouble):
    """One request, however often it is tried."""

    path: str
    body: dict[str, Any]
    tokens: int
    check: Callable[[dict[str, Any]], Any]
    most: int
    asked: list[Server] = field(default_factory=list)
    """Servers that have it now, or had it last."""


class HTTPPool(HTTPClient):
    """JSON over pooled connections. Everything but the constructor belongs to one event loop.

    A server that fails rests for a while, longer each time, and is checked by `admit` before it works again.
    A request goes to the server with the fewest tokens in flight and moves on when that one fails.

    Args:
        owner: Begins every error, such as "teacher math".
        options: Servers and limits.
        error: Class of the errors raised.
        admit: Checks a server; raises an `OpdError` if it must never be used.
    """

    def __init__(
        self,
        owner: str,
        options: PoolOptions,
        error: type[OpdError],
        admit: Callable[[Server], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(owner, options)
        self._error, self._admit = error, admit
        self.servers = [Server(url.rstrip("/")) for url in options.urls]
        self._rng = random.Random()
        self._freed = asyncio.Condition()
        self._trouble_since: float | None = None
        """When a server failed first since one last answered well."""

    @property
    def trouble(self) -> str:
        """What is wrong with the servers that failed last; empty if none did."""
        return "; ".join(f"{s.url}: {s.last_error}" for s in self.servers if s.failures and s.last_error)

    async def post(
        self, path: str, body: dict[str, Any], tokens: int, check: Callable[[dict[str, Any]], Any], most: int
    ) -> Any:
        """`check(answer)` of the first server that answers well, with at most `most` bytes.

        `check` raises `UnavailableError` for an answer that another attempt may mend, and an `OpdError` for
        one that must stop the run. Raises the pool's error when patience is over or the request is refused.
        """
        self.counters.requests += 1
        call = _Call(path, body, tokens, check, most)
        while True:
            try:
                return await self._hedged(call)
            except RefusedError as refusal:
                raise self._error(f"{self.owner}: {refusal}; check the request and the server.") from None
            except UnavailableError as trouble:
                self.bear(call, trouble)

    def bear(self, call: Trouble, trouble: UnavailableError) -> None:
        """Note a failed attempt. Raises the pool's error when it was one too many."""
        limits, now = self.options.patience, time.monotonic()
        call.bad_answers += trouble.answered
        call.since = call.since or now
        # Servers that always fail are tried by one request after another: their failures count together.
        since = min(call.since, self._trouble_since or now)
        all_bad = all(server.bad_answers >= limits.retry.attempts for server in self.servers)
        if all_bad or call.bad_answers >= limits.retry.attempts or now - since > limits.unreachable:
            names = ", ".join(server.url for server in self.servers)
            raise self._error(
                f"{self.owner}: no usable answer from {names} in the {now - since:.0f} seconds after the"
                f" first failure ({trouble}); mend or start it and continue with --resume."
            )
        self.counters.retries += 1

    async def _hedged(self, call: _Call) -> Any:
        after = self.options.patience.hedge_after
        if after is None or len(self.servers) == 1:
            return await self._once(call)
        call.asked.clear()
        first = asyncio.ensure_future(self._once(call))
        done, _ = await _wait([first], after)
        if done:
            return first.result()
        self.counters.hedges += 1
        return await _first_success([first, asyncio.ensure_future(self._once(call))])

    async def _once(self, call: _Call) -> Any:
        async with self.lease(call.tokens, call.asked) as server:
            return call.check(await self.ask(server, "POST", call.path, call.body, call.most))

    @asynccontextmanager
    async def lease(
        self, tokens: int, asked: list[Server], preferred: Server | None = None
    ) -> AsyncIterator[Server]:
        """A server to give `tokens` to, once one has room; it is added to `asked`. An `UnavailableError` of
        the block counts as its failure, a block that ends well as its success.
        """
        server = await self._take(tokens, asked, preferred)
        asked.append(server)
        try:
            if not server.admitted:
                await self._check(server)
            yield server
        except UnavailableError as trouble:
            self._failed(server, trouble)
            raise
        else:
            server.failures = server.bad_answers = 0
            self._trouble_since = None
        finally:
            server.in_flight -= tokens
            async with self._freed:
                self._freed.notify_all()

    async def _take(self, tokens: int, asked: list[Server], preferred: Server | None) -> Server:
        """`preferred`, or the server with the fewest tokens in flight, that is not resting and has room;
        waits for one. One that was asked already comes last.
        """
        while True:
            now = time.monotonic()
            ready = [s for s in self.servers if s.resting_until <= now]
            free = [s for s in ready if self._has_room(s, tokens)]
            if free:
                # Among equals by chance: requests of one moment must not all go to the first.
                server = min(
                    free, key=lambda s: (s in asked, s is not preferred, s.in_flight, self._rng.random())
                )
                server.in_flight += tokens
                return server
            ends = [s.resting_until - now for s in self.servers if s.resting_until > now]
            async with self._freed:
                try:
                    await asyncio.wait_for(self._freed.wait(), min(ends, default=None))
                except TimeoutError:
                    continue

    def _has_room(self, server: Server, tokens: int) -> bool:
        # A request above the limit runs alone rather than never; so does the trial of one that came back.
        if server.failures and server.in_flight:
            return False
        return not server.in_flight or server.in_flight + tokens <= self.options.max_in_flight_tokens

    async def _check(self, server: Server) -> None:
        async with server.lock:
            if server.resting_until > time.monotonic():
                raise UnavailableError(server.last_error, answered=False)
            if not server.admitted and self._admit is not None:
                try:
                    await self._admit(server)
                except RefusedError as refusal:
                    raise self._error(f"{self.owner}: {refusal}; check its URL and key.") from None
            server.admitted = True

    def _failed(self, server: Server, trouble: UnavailableError) -> None:
        server.admitted = False
        server.last_error = str(trouble)
        if server.resting_until <= time.monotonic():  # many requests that fail at once are one failure
            self._trouble_since = self._trouble_since or time.monotonic()
            server.failures += 1
            server.bad_answers += trouble.answered
            server.resting_until = time.monotonic() + self.options.patience.retry.seconds(server.failures)


async def _wait(tasks: list[asyncio.Future], seconds: float | None) -> tuple[set, set]:
    try:
        return await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


async def _first_success(copies: list[asyncio.Future]) -> Any:
    """The result of the first copy that has one; the other is cancelled, so that it is answered once."""
    pending = set(copies)
    try:
        while True:
            done, pending = await _wait(list(pending), None)
            well = [copy for copy in done if copy.exception() is None]
            if well or not pending:
                return (well or list(done))[0].result()
    finally:
        for copy in pending:
            copy.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
