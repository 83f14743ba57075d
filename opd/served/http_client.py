"""Requests to one server: JSON over pooled connections, and their errors.

Runs in an asyncio loop. The pool (`http_pool.py`) chooses the server and the number of tries.
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

from opd.errors import ConfigError, OpdError, needs_extra
from opd.redact import hide_secret
from opd.retry import Retry
from opd.untrusted import MAX_DEPTH, depth_exceeds, safe_excerpt

if TYPE_CHECKING:
    import aiohttp

_log = logging.getLogger(__name__)


class UnavailableError(Exception):
    """No usable answer this time. Another attempt, or another server, may give one."""

    def __init__(self, reason: str, *, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered
        """Whether the server answered something. Such failures have a limit of their own."""


class RefusedError(Exception):
    """The server understood and declined. A retry changes nothing."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def refusal_advice(refusal: RefusedError, otherwise: str) -> str:
    """Return the fix for a refusal: for a redirect or a missing page a special one, else `otherwise`."""
    if 300 <= refusal.status < 400:
        return "give the URL of the server itself, since a redirect is never followed"
    router = "give the URL of a server of this kind itself, not of a router before some"
    return router if refusal.status == HTTPStatus.NOT_FOUND else otherwise


SERVERS = Retry(attempts=5, pause=0.25, longest=8.0)


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits of a request."""

    timeout: float = 300.0
    """Seconds one attempt may take, from the first byte sent to the last received."""
    connect_timeout: float = 5.0
    unreachable: float = 180.0
    """Seconds without any answer after which a request fails. A restarted server needs a minute or more."""
    retry: Retry = SERVERS
    """Limit of bad answers (5xx, not JSON, incomplete) to a request, and the rest of a failed server."""
    hedge_after: float | None = None
    """Seconds without an answer after which a copy goes to another server. The first answer counts."""


IDENTITY = ("host", "port", "startup_time")
"""Facts that identify a server: `startup_time` is the time of each part of its start, to many digits."""
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)
"""In the metrics of a server that gives no other identity."""
CONTROL_BYTES = 8 * 2**20
"""Most bytes of an answer that is about a server and not about tokens."""
_READ = 2**16
"""Bytes of an answer of which an error may show some: more, so that no secret is cut unseen."""
SAID_IN_JSON = ("/generate", "/v1/completions", "/weights_checker", "/weight_checker")
"""Paths that must answer with JSON. Other POST requests may be answered by a line of text."""
RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a later attempt may succeed."""


@dataclass(slots=True, eq=False)
class Server:
    """One URL and the state of its server."""

    url: str
    in_flight: int = 0
    """Tokens of the requests it works on."""
    failures: int = 0
    """Failures in a row."""
    bad_answers: int = 0
    """Failures of these that were answers."""
    resting_until: float = 0.0
    """On the monotonic clock."""
    admitted: bool = False
    """Whether it was checked since it was last away."""
    process: str | None = None
    """Identity of the process that was checked, if the server gives one."""
    doubted: bool = False
    """Whether it may be another process since then: there is a new connection to it, or it was quiet."""
    answered: float = 0.0
    """Time of its last good answer, on the monotonic clock."""
    late: bool = False
    """Whether it came while others worked. Then it must prove to be another one than they."""
    last_error: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is checked."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Servers and limits of a pool."""

    urls: Sequence[str]
    api_key_env: str | None = None
    """Environment variable that holds the key. The key itself is never logged or shown."""
    max_in_flight_tokens: int = 65_536
    """Limit per server. More wait here, so that a server's queue stays short."""
    patience: Patience = field(default_factory=Patience)
    more: Callable[[], list[str]] = list
    """Returns URLs of servers that have come since the last call. Called whenever a server is chosen."""
    given_up: Callable[[], OpdError | None] = lambda: None
    """Returns the reason why the servers will not be started again, or `None`. Called when one fails."""
    look_at: str = "its URL and key"
    """Settings to check when a server is not the expected one."""
    revive: str = "mend or start it and continue with --resume"
    """Fix for servers that do not answer."""
    api_key: str = field(default="", repr=False)
    """The key of servers that the run has started. It replaces that of `api_key_env`."""
    rank: int = 0
    """Number of this client among the `ranks` that share the servers."""
    ranks: int = 1


@dataclass(slots=True)
class PoolCounters:
    """Events so far."""

    requests: int = 0
    retries: int = 0
    hedges: int = 0


class HTTPClient:
    """Everything but the constructor belongs to one event loop. Raises `ConfigError` if a key is missing."""

    def __init__(self, owner: str, options: PoolOptions) -> None:
        self.owner, self.options = owner, options
        self.counters = PoolCounters()
        self._headers = _auth_headers(owner, options)
        if self._headers and any("@" in url for url in options.urls):
            raise ConfigError(
                f"{owner} has both a password in a URL and api_key_env; a server takes one of them, leave the"
                " other out."
            )
        self._session: aiohttp.ClientSession | None = None

    async def request_json(
        self,
        server: Server,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        most: int = CONTROL_BYTES,
    ) -> Any:
        """Make one attempt at one server. Return a JSON object of at most `most` bytes, or `None` for another
        answer to a control request. Raises `UnavailableError` or `RefusedError`.
        """
        where, content = await self.request_bytes(server, method, path, body, most)
        due = method == "GET" or path in SAID_IN_JSON
        if _is_page(content):
            raise UnavailableError(f"{where} with a page of HTML in place of JSON", answered=True)
        try:
            # Hidden states are megabytes of numbers: in another thread, so that other answers go on.
            answer = await asyncio.to_thread(parse_json, content) if content else None
        except ValueError:
            if not due:
                return None
            raise UnavailableError(f"{where} with something that is not JSON", answered=True) from None
        if isinstance(answer, dict):
            return answer
        if not due:
            return None
        raise UnavailableError(f"{where} with something that is no JSON object", answered=True)

    async def request_bytes(
        self, server: Server, method: str, path: str, body: dict[str, Any] | None, most: int
    ) -> tuple[str, bytes]:
        """Make one attempt at one server. Return its URL and status, for errors, and at most `most` bytes.
        Raises `UnavailableError` or `RefusedError`.
        """
        import aiohttp

        session = self._open_session()
        try:
            async with session.request(
                method, server.url + path, json=body, allow_redirects=False, trace_request_ctx=server
            ) as answer:
                content = await _read_body(answer, most)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            broken = _failure_text(trouble, self.options.patience.timeout)
            raise UnavailableError(f"{server.url}{path} {broken}", answered=False) from None
        where = f"{server.url}{path} answered {answer.status}"
        if answer.status in RETRIED:
            raise UnavailableError(where, answered=True)
        if answer.status >= 300:
            raise _refused_error(where, answer, content)
        if len(content) > most:
            raise UnavailableError(f"{where} with more than the {most} bytes that are due", answered=True)
        return where, content

    @asynccontextmanager
    async def stream_lines(
        self, server: Server, path: str, body: dict[str, Any], most: int, lines: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the lines of a streaming answer: `lines` of `most` bytes, at most.

        Raises `UnavailableError` or `RefusedError`, in the block too.
        """
        import aiohttp

        limits = self.options.patience
        # A stream may last as long as it likes, as long as a line comes now and then: see `_stream_lines`.
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
                    content = await _read_body(answer, CONTROL_BYTES)
                    raise _refused_error(f"{where} answered {answer.status}", answer, content)
                yield _stream_lines(answer, most, lines, limits.timeout)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            raise UnavailableError(
                f"{where} {_failure_text(trouble, limits.timeout)}", answered=False
            ) from None

    async def server_identity(self, server: Server) -> str:
        """Return the same string for two URLs of one server, or the URL if it does not tell."""
        try:
            return await self._reported_identity(server) or server.url
        except UnavailableError:
            return server.url

    async def process_identity(self, server: Server) -> str | None:
        """Return another string after each start of a server, if it gives one. Raises `UnavailableError`."""
        answer = await self._reported_identity(server)
        if answer is not None:
            return answer
        try:
            _, content = await self.request_bytes(server, "GET", "/metrics", None, CONTROL_BYTES)
        except RefusedError:
            return None
        identity = _STARTED.search(content)
        return None if identity is None else f"started {safe_excerpt(identity[1].decode(errors='replace'))}"

    async def _reported_identity(self, server: Server) -> str | None:
        try:
            answer: dict[str, Any] = (
                await self.request_json(server, "GET", "/server_info?config_format=json") or {}
            )
        except RefusedError:
            return None
        config = answer.get("vllm_config")
        if isinstance(config, dict) and config.get("instance_id"):
            return f"vllm {safe_excerpt(config['instance_id'])}"
        return json.dumps([answer.get(name) for name in IDENTITY]) if answer.get("startup_time") else None

    async def close(self) -> None:
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
                trace_configs=[_trace_connections()],
            )
        return self._session


def _trace_connections() -> aiohttp.TraceConfig:
    """Return a trace that notes new connections: those to a process that is gone are gone with it."""
    import aiohttp

    async def note_connection(session: Any, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.doubted = True

    config = aiohttp.TraceConfig()
    config.on_connection_create_end.append(note_connection)
    return config


def _auth_headers(owner: str, options: PoolOptions) -> dict[str, str]:
    with needs_extra("a served model", "sglang"):
        import aiohttp  # noqa: F401
        import orjson  # noqa: F401
    variable, key = options.api_key_env, options.api_key
    if variable is None and not key:
        return {}
    key = key or os.environ.get(variable or "", "")
    if not key:
        raise ConfigError(
            f"{owner}: api_key_env names the environment variable {variable}, which is not set;"
            " export it or leave api_key_env out."
        )
    hide_secret(key)
    return {"Authorization": f"Bearer {key}"}


def parse_json(content: bytes) -> Any:
    """Parse JSON. Raises `ValueError` if it is none, or nested too deep to be walked through. Hidden states
    are larger and are not walked through, because nothing but their numbers is read from there.
    """
    import orjson

    value = orjson.loads(content)
    if len(content) <= CONTROL_BYTES and depth_exceeds(value, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return value


def _is_page(content: bytes) -> bool:
    return content.lstrip()[:1] == b"<"


def _answer_excerpt(content: bytes) -> str:
    if _is_page(content):
        return "with a page of HTML"
    return safe_excerpt(" ".join(content[:_READ].decode(errors="replace").split()), 300)


def _refused_error(where: str, answer: aiohttp.ClientResponse, content: bytes) -> RefusedError:
    leads = answer.headers.get("Location")
    if answer.status < 400 and leads is not None:
        # Never followed: the request and the key are meant for the URL of the recipe alone.
        return RefusedError(f"{where}, a redirect to {safe_excerpt(leads, 300)}", answer.status)
    return RefusedError(f"{where} {_answer_excerpt(content)}".rstrip(), answer.status)


async def _read_body(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body, or its beginning: little more than `most` bytes, whatever the server sends."""
    parts: list[bytes] = []
    size = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most:
            break
    return b"".join(parts)


def _failure_text(trouble: Exception, timeout: float) -> str:
    if isinstance(trouble, TimeoutError):
        return f"timed out: `timeout` is {timeout:g} s"
    message = safe_excerpt(trouble, 300).replace(" ssl:default", "")  # aiohttp adds it for plain HTTP too
    return f"failed ({type(trouble).__name__}: {message})"  # it may contain a server's own bytes


async def _stream_lines(
    answer: aiohttp.ClientResponse, most: int, lines: int, seconds: float
) -> AsyncIterator[bytes]:
    """Yield lines of any length up to `most`, because cumulative messages grow with the response. A line with
    content must come within each `seconds`: otherwise single bytes could go on for ever.
    """
    tail, where, until = b"", str(answer.url), time.monotonic() + seconds
    async for content in answer.content.iter_any():
        *complete, tail = (tail + content).split(b"\n")
        lines -= len(complete)
        if lines < 0 or max(map(len, (tail, *complete))) > most:
            raise UnavailableError(f"{where} streams more than is due", answered=True)
        says = any(map(bytes.strip, complete))
        if not says and time.monotonic() > until:
            raise UnavailableError(f"{where} has streamed no message for {seconds:g} s", answered=True)
        for line in complete:
            yield line
        if says:
            until = time.monotonic() + seconds
    if tail:
        yield tail
