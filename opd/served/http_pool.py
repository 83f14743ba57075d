"""Requests to several servers of one model: balanced, bounded, retried."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError, MissingExtraError, OpdError
from opd.served.faults import Patience, RefusedError, UnavailableError, pause

if TYPE_CHECKING:
    import aiohttp

RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that a later attempt may not meet."""


@dataclass(slots=True, eq=False)
class Server:
    """One URL and what is known of it."""

    url: str
    in_flight: int = 0
    """Tokens of the requests it works on."""
    failures: int = 0
    """In a row."""
    resting_until: float = 0.0
    """On the monotonic clock."""
    admitted: bool = False
    """Whether it was checked since it was last away."""
    last_error: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is checked."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Who is asked, and how much at once."""

    urls: Sequence[str]
    api_key_env: str | None = None
    """Environment variable that holds the key. The key itself is never logged or shown."""
    max_in_flight_tokens: int = 65_536
    """Per server; more wait here, so that a server's queue stays short."""
    patience: Patience = field(default_factory=Patience)


@dataclass(slots=True)
class PoolCounters:
    """What happened since the counters were last taken."""

    requests: int = 0
    retries: int = 0
    hedges: int = 0
    sent_tokens: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class _Call:
    """One request, however often it is tried."""

    path: str
    body: dict[str, Any]
    tokens: int
    check: Callable[[dict[str, Any]], Any]
    asked: list[Server] = field(default_factory=list)
    """Servers that have it now, or had it last."""
    bad_answers: int = 0
    since: float | None = None
    """When it failed first."""


class HTTPPool:
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
        self.owner, self.options, self._error, self._admit = owner, options, error, admit
        self.servers = [Server(url.rstrip("/")) for url in options.urls]
        self.counters = PoolCounters()
        self._headers = _headers(owner, options.api_key_env)
        self._rng = random.Random()
        self._freed = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, path: str, body: dict[str, Any], tokens: int, check: Callable[[dict[str, Any]], Any]
    ) -> Any:
        """`check(answer)` of the first server that answers well.

        `check` raises `UnavailableError` for an answer that another attempt may mend, and an `OpdError` for
        one that must stop the run. Raises the pool's error when patience is over or the request is refused.
        """
        self.counters.requests += 1
        call = _Call(path, body, tokens, check)
        while True:
            try:
                return await self._hedged(call)
            except RefusedError as refusal:
                raise self._error(f"{self.owner}: {refusal}; check the request and the server.") from None
            except UnavailableError as trouble:
                self._bear(call, trouble)

    def _bear(self, call: _Call, trouble: UnavailableError) -> None:
        """Note a failed attempt. Raises the pool's error when it was one too many."""
        limits, now = self.options.patience, time.monotonic()
        call.bad_answers += trouble.answered
        call.since = call.since or now
        if call.bad_answers >= limits.attempts or now - call.since > limits.unreachable:
            names = ", ".join(server.url for server in self.servers)
            raise self._error(
                f"{self.owner}: no usable answer from {names} in the {now - call.since:.0f} seconds after the"
                f" first failure ({trouble}); mend or start it and continue with --resume."
            )
        self.counters.retries += 1

    async def ask(self, server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One attempt at one server. Raises `UnavailableError` or `RefusedError`."""
        import aiohttp

        session = self._open_session()
        try:
            async with session.request(method, server.url + path, json=body) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            what = (
                "timed out" if isinstance(trouble, TimeoutError) else f"{type(trouble).__name__}: {trouble}"
            )
            raise UnavailableError(f"{server.url}{path} {what}", answered=False) from None
        self.counters.received_bytes += len(content)
        where = f"{server.url}{path} answered {answer.status}"
        if answer.status in RETRIED:
            raise UnavailableError(where, answered=True)
        if answer.status >= 400:
            raise RefusedError(f"{where} {_excerpt(content)}".rstrip())
        try:
            return json.loads(content) if content else None
        except ValueError:
            if method == "POST" and path != "/generate":
                return None  # some control requests answer with a line of text
            raise UnavailableError(f"{where} with something that is not JSON", answered=True) from None

    @asynccontextmanager
    async def stream(self, server: Server, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The open answer to a streaming request; its reads may raise what aiohttp raises."""
        import aiohttp

        limits = self.options.patience
        # A stream may last as long as it likes, as long as something comes now and then.
        quiet = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.connect_timeout, sock_read=limits.timeout
        )
        async with self._open_session().post(server.url + path, json=body, timeout=quiet) as answer:
            if answer.status in RETRIED:
                raise UnavailableError(f"{server.url}{path} answered {answer.status}", answered=True)
            if answer.status >= 400:
                text = _excerpt(await answer.read())
                raise RefusedError(f"{server.url}{path} answered {answer.status} {text}".rstrip())
            yield answer

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

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
        path, body, tokens, check = call.path, call.body, call.tokens, call.check
        server = await self._take(tokens, call.asked)
        call.asked.append(server)
        self.counters.sent_tokens += tokens
        try:
            if not server.admitted:
                await self._check(server)
            found = check(await self.ask(server, "POST", path, body))
        except UnavailableError as trouble:
            self._failed(server, trouble)
            raise
        else:
            server.failures = 0
            return found
        finally:
            server.in_flight -= tokens
            async with self._freed:
                self._freed.notify_all()

    async def _take(self, tokens: int, asked: list[Server]) -> Server:
        """The server with the fewest tokens in flight that is not resting and has room; waits for one. One
        that was asked already comes last.
        """
        while True:
            now = time.monotonic()
            ready = [s for s in self.servers if s.resting_until <= now]
            free = [s for s in ready if self._has_room(s, tokens)]
            if free:
                # Among equals by chance: requests of one moment must not all go to the first.
                server = min(free, key=lambda s: (s in asked, s.in_flight, self._rng.random()))
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
            server.failures += 1
            server.resting_until = time.monotonic() + pause(server.failures, self._rng)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            limits = self.options.patience
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=limits.timeout, sock_connect=limits.connect_timeout),
                headers=self._headers,
            )
        return self._session


def _headers(owner: str, variable: str | None) -> dict[str, str]:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise MissingExtraError("a served model", "sglang") from None
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"{owner}: api_key_env names the environment variable {variable}, which is not set;"
            " export it or leave api_key_env out."
        )
    return {"Authorization": f"Bearer {key}"}


def _excerpt(content: bytes) -> str:
    return " ".join(content[:300].decode(errors="replace").split())


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
