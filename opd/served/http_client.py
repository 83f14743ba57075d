"""Requests to one server: JSON over pooled connections, and what can go wrong there.

By an asyncio loop. Which server and how often is the pool's question (`http_pool.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

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
    if 300 <= refusal.status < 400:
        return "give the URL of the server itself, since a redirect is never followed"
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


IDENTITY = ("host", "port", "startup_time")
"""What a server alone says of it: `startup_time`, how long each part of its start took, to many digits."""
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)
"""Among the metrics of a server that says no more of itself."""
CONTROL_BYTES = 8 * 2**20
"""Most bytes of an answer that is about a server and not about tokens."""
_READ = 2**16
"""Bytes of an answer of which an error may show some: more, so that no secret is cut before it is known."""
SAID_IN_JSON = ("/generate", "/v1/completions", "/weights_checker", "/weight_checker")
"""What is posted to be told something; other posted requests may be answered by a line of text."""
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
    process: str | None = None
    """Which process it was when it was checked, if it tells."""
    doubted: bool = False
    """Whether it may be another process since then: there is a new connection to it, or it was quiet."""
    answered: float = 0.0
    """When it last answered well, on the monotonic clock."""
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
    revive: str = "mend or start it and continue with --resume"
    """What to do about servers that do not answer."""
    api_key: str = field(default="", repr=False)
    """The key of servers that the run has started, in place of that of `api_key_env`."""


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
        self._headers = _headers(owner, options)
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
        due = method == "GET" or path in SAID_IN_JSON
        if _is_page(content):
            raise UnavailableError(f"{where} with a page of HTML in place of JSON", answered=True)
        try:
            # Hidden states are megabytes of numbers: in another thread, so that other answers go on.
            found = await asyncio.to_thread(parsed, content) if content else None
        except ValueError:
            if not due:
                return None
            raise UnavailableError(f"{where} with something that is not JSON", answered=True) from None
        if isinstance(found, dict):
            return found
        if not due:
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
            async with session.request(
                method, server.url + path, json=body, allow_redirects=False, trace_request_ctx=server
            ) as answer:
                content = await _content(answer, most)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            broken = _broken(trouble, self.options.patience.timeout)
            raise UnavailableError(f"{server.url}{path} {broken}", answered=False) from None
        where = f"{server.url}{path} answered {answer.status}"
        if answer.status in RETRIED:
            raise UnavailableError(where, answered=True)
        if answer.status >= 300:
            raise _refused(where, answer, content)
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
        # A stream may last as long as it likes, as long as a line comes now and then: see `_lines`.
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
                    content = await _content(answer, CONTROL_BYTES)
                    raise _refused(f"{where} answered {answer.status}", answer, content)
                yield _lines(answer, most, lines, limits.timeout)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            raise UnavailableError(f"{where} {_broken(trouble, limits.timeout)}", answered=False) from None

    async def identity(self, server: Server) -> str:
        """The same for two URLs of one server; the URL where it does not answer, or is too old to tell."""
        try:
            return await self._said(server) or server.url
        except UnavailableError:
            return server.url

    async def process(self, server: Server) -> str | None:
        """Another one after each start of the server; `None` if it does not tell. Raises
        `UnavailableError`.
        """
        said = await self._said(server)
        if said is not None:
            return said
        try:
            _, content = await self.fetch(server, "GET", "/metrics", None, CONTROL_BYTES)
        except RefusedError:
            return None
        found = _STARTED.search(content)
        return None if found is None else f"started {shown(found[1].decode(errors='replace'))}"

    async def _said(self, server: Server) -> str | None:
        try:
            told: dict[str, Any] = await self.ask(server, "GET", "/server_info?config_format=json") or {}
        except RefusedError:
            return None
        config = told.get("vllm_config")
        if isinstance(config, dict) and config.get("instance_id"):
            return f"vllm {shown(config['instance_id'])}"
        return json.dumps([told.get(name) for name in IDENTITY]) if told.get("startup_time") else None

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
                trace_configs=[_watching()],
            )
        return self._session


def _watching() -> aiohttp.TraceConfig:
    """Notes new connections: those to a process that is gone are gone with it."""
    import aiohttp

    async def connected(session: Any, context: Any, made: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.doubted = True

    config = aiohttp.TraceConfig()
    config.on_connection_create_end.append(connected)
    return config


def _headers(owner: str, options: PoolOptions) -> dict[str, str]:
    try:
        import aiohttp  # noqa: F401
        import orjson  # noqa: F401
    except ImportError:
        raise MissingExtraError("a served model", "sglang") from None
    variable, key = options.api_key_env, options.api_key
    if variable is None and not key:
        return {}
    key = key or os.environ.get(variable or "", "")
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


def _is_page(content: bytes) -> bool:
    return content.lstrip()[:1] == b"<"


def _excerpt(content: bytes) -> str:
    if _is_page(content):
        return "with a page of HTML"
    return shown(" ".join(content[:_READ].decode(errors="replace").split()), 300)


def _refused(where: str, answer: aiohttp.ClientResponse, content: bytes) -> RefusedError:
    leads = answer.headers.get("Location")
    if answer.status < 400 and leads is not None:
        # Never followed: what is asked, and the key, are meant for the URL of the recipe alone.
        return RefusedError(f"{where}, a redirect to {shown(leads, 300)}", answer.status)
    return RefusedError(f"{where} {_excerpt(content)}".rstrip(), answer.status)


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
    said = shown(trouble, 300).replace(" ssl:default", "")  # which aiohttp says of plain HTTP too
    return f"failed ({type(trouble).__name__}: {said})"  # a server's own bytes may be in it


async def _lines(
    answer: aiohttp.ClientResponse, most: int, lines: int, seconds: float
) -> AsyncIterator[bytes]:
    """Of any length up to `most`: cumulative messages grow with the response. One that says something comes
    every so many `seconds`: single bytes could for ever.
    """
    rest, where, until = b"", str(answer.url), time.monotonic() + seconds
    async for content in answer.content.iter_any():
        *whole, rest = (rest + content).split(b"\n")
        lines -= len(whole)
        if lines < 0 or max(map(len, (rest, *whole))) > most:
            raise UnavailableError(f"{where} streams more than is due", answered=True)
        says = any(map(bytes.strip, whole))
        if not says and time.monotonic() > until:
            raise UnavailableError(f"{where} has streamed no message for {seconds:g} s", answered=True)
        for line in whole:
            yield line
        if says:
            until = time.monotonic() + seconds
    if rest:
        yield rest
