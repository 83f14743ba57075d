"""Requests to several servers of one model: balanced, bounded, retried.

JSON over pooled connections, by an asyncio loop in a thread of its own for callers that are not asynchronous.
One attempt at one server, and what can go wrong there, is a function; which server and how often, the pool's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from opd.errors import ConfigError, MissingExtraError, OpdError
from opd.foreign import MAX_DEPTH, depth_exceeds, shown
from opd.redact import hide
from opd.retry import Retry

if TYPE_CHECKING:
    import aiohttp

_log = logging.getLogger(__name__)


class UnavailableError(Exception):
    """No usable answer this time: another attempt, or another server, may give one."""

    def __init__(self, reason: str, *, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered
        """Whether the server was there and answered something: it is asked only so often."""


class RefusedError(Exception):
    """The server understood and declined: asking again changes nothing."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def advice(refusal: RefusedError, otherwise: str) -> str:
    """What to do about a refusal; of a page that is not there something else than `otherwise`."""
    router = "give the URL of a server of this kind itself, not of a router before some"
    return router if refusal.status == HTTPStatus.NOT_FOUND else otherwise


SERVERS = Retry(attempts=5, pause=0.25, longest=8.0)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is tried."""

    timeout: float = 300.0
    """Seconds one attempt may take, from the first byte sent to the last received."""
    connect_timeout: float = 5.0
    unreachable: float = 180.0
    """Seconds without any answer after which a request is given up: a server that is restarted needs a
    minute or more."""
    retry: Retry = SERVERS
    """Bad answers (status 5xx, not JSON, incomplete) to one request before it is given up, and how long a
    server that failed is left alone."""
    hedge_after: float | None = None
    """Seconds without an answer after which a copy goes to another server; the first answer counts."""


NEAR = 0.25
"""Of a server's `max_in_flight_tokens`: with so many more than the least loaded has, the one that has a
request's beginning in its cache is still the better one."""
IDENTITY = ("host", "port", "startup_time")
"""What a server alone says of it: `startup_time`, how long each part of its start took, to many digits."""
CONTROL_BYTES = 8 * 2**20
"""Most bytes of an answer that is about a server and not about tokens."""
_READ = 2**16
"""Bytes of an answer of which an error may show some: more, so that no secret is cut before it is known."""
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
    bad_answers: int = 0
    """Those of the failures that were answers."""
    resting_until: float = 0.0
    """On the monotonic clock."""
    admitted: bool = False
    """Whether it was checked since it was last away."""
    late: bool = False
    """Whether it came while others worked, and must prove to be another one than they."""
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
    more: Callable[[], list[str]] = list
    """URLs of servers that have come since it was asked last; asked whenever a server is chosen."""
    given_up: Callable[[], OpdError | None] = lambda: None
    """Why whoever has started the servers will not start them again; asked when one fails."""
    look_at: str = "its URL and key"
    """Where the cause is when a server is not the one that is meant."""


@dataclass(slots=True)
class PoolCounters:
    """What happened so far."""

    requests: int = 0
    retries: int = 0
    hedges: int = 0


class HTTPClient:
    """Everything but the constructor belongs to one event loop. Raises `ConfigError` if a key is missing."""

    def __init__(self, owner: str, options: PoolOptions) -> None:
        self.owner, self.options = owner, options
        self.counters = PoolCounters()
        self._headers = _headers(owner, options.api_key_env)
        if self._headers and any("@" in url for url in options.urls):
            raise ConfigError(
                f"{owner} has both a password in a URL and api_key_env; a server takes one of them, leave the"
                " other out."
            )
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        server: Server,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        most: int = CONTROL_BYTES,
    ) -> Any:
        """One attempt at one server: a JSON object of at most `most` bytes, or `None` for another answer to a
        control request. Raises `UnavailableError` or `RefusedError`.
        """
        where, content = await self.fetch(server, method, path, body, most)
        try:
            # Hidden states are megabytes of numbers: in another thread, so that other answers go on.
            found = await asyncio.to_thread(parsed, content) if content else None
        except ValueError:
            if method == "POST" and path != "/generate":
                return None  # some control requests answer with a line of text
            raise UnavailableError(f"{where} with something that is not JSON", answered=True) from None
        if isinstance(found, dict):
            return found
        if method == "POST" and path != "/generate":
            return None
        raise UnavailableError(f"{where} with something that is no JSON object", answered=True)

    async def fetch(
        self, server: Server, method: str, path: str, body: dict[str, Any] | None, most: int
    ) -> tuple[str, bytes]:
        """One attempt at one server: what answered, for errors, and at most `most` bytes. Raises
        `UnavailableError` or `RefusedError`.
        """
        import aiohttp

        session = self._open_session()
        try:
            async with session.request(method, server.url + path, json=body, allow_redirects=False) as answer:
                content = await _content(answer, most)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            broken = _broken(trouble, self.options.patience.timeout)
            raise UnavailableError(f"{server.url}{path} {broken}", answered=False) from None
        where = f"{server.url}{path} answered {answer.status}"
        if answer.status in RETRIED:
            raise UnavailableError(where, answered=True)
        if answer.status >= 300:
            raise RefusedError(f"{where} {_excerpt(content)}".rstrip(), answer.status)
        if len(content) > most:
            raise UnavailableError(f"{where} with more than the {most} bytes that are due", answered=True)
        return where, content

    @asynccontextmanager
    async def stream(
        self, server: Server, path: str, body: dict[str, Any], most: int, lines: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a streaming answer: `lines` of `most` bytes, at most.

        Raises `UnavailableError` or `RefusedError`, in the block too.
        """
        import aiohttp

        limits = self.options.patience
        # A stream may last as long as it likes, as long as something comes now and then.
        quiet = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.connect_timeout, sock_read=limits.timeout
        )
        where = server.url + path
        try:
            async with self._open_session().post(
                where, json=body, timeout=quiet, allow_redirects=False
            ) as answer:
                if answer.status in RETRIED:
                    raise UnavailableError(f"{where} answered {answer.status}", answered=True)
                if answer.status >= 300:
                    text = _excerpt(await _content(answer, CONTROL_BYTES))
                    raise RefusedError(f"{where} answered {answer.status} {text}".rstrip(), answer.status)
                yield _lines(answer, where, most, lines)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            raise UnavailableError(f"{where} {_broken(trouble, limits.timeout)}", answered=False) from None

    async def identity(self, server: Server) -> str:
        """The same for two URLs of one server; the URL where it does not answer, or is too old to tell."""
        try:
            told: dict[str, Any] = await self.ask(server, "GET", "/server_info?config_format=json") or {}
        except (UnavailableError, RefusedError):
            told = {}
        config = told.get("vllm_config")
        if isinstance(config, dict) and config.get("instance_id"):
            return f"vllm {shown(config['instance_id'])}"
        return json.dumps([told[name] for name in IDENTITY]) if told.get("startup_time") else server.url

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            limits = self.options.patience
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=limits.timeout, sock_connect=limits.connect_timeout),
                headers={**self._headers, "Accept-Encoding": "identity"},
                auto_decompress=False,  # a few bytes could become any number of them
            )
        return self._session


def _headers(owner: str, variable: str | None) -> dict[str, str]:
    try:
        import aiohttp  # noqa: F401
        import orjson  # noqa: F401
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
    hide(key)
    return {"Authorization": f"Bearer {key}"}


def parsed(content: bytes) -> Any:
    """The JSON in it; `ValueError` if it is none, or nested deeper than what is walked through may be. Hidden
    states are larger and are not walked through: where their numbers are due lies nothing else.
    """
    import orjson

    found = orjson.loads(content)
    if len(content) <= CONTROL_BYTES and depth_exceeds(found, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return found


def _excerpt(content: bytes) -> str:
    return shown(" ".join(content[:_READ].decode(errors="replace").split()), 300)


async def _content(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or its beginning: little more than `most` bytes, whatever is sent."""
    parts: list[bytes] = []
    size = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most:
            break
    return b"".join(parts)


def _broken(trouble: Exception, timeout: float) -> str:
    if isinstance(trouble, TimeoutError):
        return f"timed out: `timeout` is {timeout:g} s"
    return f"failed ({type(trouble).__name__}: {shown(trouble, 300)})"  # a server's own bytes may be in it


async def _lines(answer: aiohttp.ClientResponse, where: str, most: int, lines: int) -> AsyncIterator[bytes]:
    """Of any length up to `most`: cumulative messages grow with the response."""
    rest = b""
    async for content in answer.content.iter_any():
        *whole, rest = (rest + content).split(b"\n")
        lines -= len(whole)
        if lines < 0 or max(map(len, (rest, *whole))) > most:
            raise UnavailableError(f"{where} streams more than is due", answered=True)
        for line in whole:
            yield line
    if rest:
        yield rest


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

    tokens: int
    attempt: Callable[[Server], Awaitable[Any]]
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

    def add(self, url: str) -> None:
        """A server that has come, if it is another: it is used once it was checked as every other was."""
        if all(server.url != url.rstrip("/") for server in self.servers):
            self.servers = [*self.servers, Server(url.rstrip("/"), late=True)]
            _log.info("%s: %s has come", self.owner, url)

    async def forget(self) -> None:
        """Have every server checked again before its next request."""
        for server in self.servers:
            server.admitted = False

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

        async def attempt(server: Server) -> Any:
            return check(await self.ask(server, "POST", path, body, most))

        return await self.call(tokens, attempt)

    async def call(self, tokens: int, attempt: Callable[[Server], Awaitable[T]]) -> T:
        """What `attempt` makes of the first server with which it ends well; see `post` for what it raises."""
        self.counters.requests += 1
        call = _Call(tokens, attempt)
        while True:
            try:
                return await self._hedged(call)
            except RefusedError as refusal:
                raise self._error(f"{self.owner}: {refusal}; check the request and the server.") from None
            except UnavailableError as trouble:
                self.bear(call, trouble)

    def bear(self, call: Trouble, trouble: UnavailableError) -> None:
        """Note a failed attempt. Raises the pool's error when it was one too many, and at once what the
        servers were given up for.
        """
        if (reason := self.options.given_up()) is not None:
            raise reason
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
            return await call.attempt(server)

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
        """The server with the fewest tokens in flight, or `preferred` where that has hardly more, that is not
        resting and has room; waits for one. One that was asked already comes last.
        """
        while True:
            for url in self.options.more():
                self.add(url)
            now = time.monotonic()
            ready = [s for s in self.servers if s.resting_until <= now]
            free = [s for s in ready if self._has_room(s, tokens)]
            if free:
                # Among equals by chance: requests of one moment must not all go to the first.
                most = min(s.in_flight for s in free) + NEAR * self.options.max_in_flight_tokens
                near = preferred if preferred is not None and preferred.in_flight <= most else None
                server = min(free, key=lambda s: (s in asked, s is not near, s.in_flight, self._rng.random()))
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
            if not server.admitted:
                try:
                    if server.late:
                        await self._require_other(server)
                    if self._admit is not None:
                        await self._admit(server)
                except RefusedError as refusal:
                    mend = advice(refusal, f"check {self.options.look_at}")
                    raise self._error(f"{self.owner}: {refusal}; {mend}.") from None
            server.admitted = True

    async def _require_other(self, server: Server) -> None:
        """Drop a server that another URL leads to already."""
        others = [other for other in self.servers if other is not server]
        own, *theirs = await asyncio.gather(*(self.identity(one) for one in (server, *others)))
        if own not in theirs:
            server.late = False
            return
        self.servers, same = others, others[theirs.index(own)].url
        _log.warning("%s: %s leads to the server at %s; it is not used", self.owner, server.url, same)
        raise UnavailableError(f"{server.url} leads to the server at {same}", answered=False)

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
