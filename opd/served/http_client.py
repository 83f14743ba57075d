"""JSON over pooled connections: one attempt at one server, and what can go wrong there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError, MissingExtraError
from opd.foreign import shown
from opd.redact import hide
from opd.retry import Retry

if TYPE_CHECKING:
    import aiohttp


class UnavailableError(Exception):
    """No usable answer this time: another attempt, or another server, may give one."""

    def __init__(self, reason: str, *, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered
        """Whether the server was there and answered something: it is asked only so often."""


class RefusedError(Exception):
    """The server understood and declined: asking again changes nothing."""


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
        import aiohttp
        import orjson

        session = self._open_session()
        try:
            async with session.request(method, server.url + path, json=body, allow_redirects=False) as answer:
                content = await _content(answer, most)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            raise UnavailableError(f"{server.url}{path} {_broken(trouble)}", answered=False) from None
        where = f"{server.url}{path} answered {answer.status}"
        if answer.status in RETRIED:
            raise UnavailableError(where, answered=True)
        if answer.status >= 300:
            raise RefusedError(f"{where} {_excerpt(content)}".rstrip())
        if len(content) > most:
            raise UnavailableError(f"{where} with more than the {most} bytes that are due", answered=True)
        try:
            # Hidden states are megabytes of numbers: in another thread, so that other answers go on.
            found = await asyncio.to_thread(orjson.loads, content) if content else None
        except ValueError:
            if method == "POST" and path != "/generate":
                return None  # some control requests answer with a line of text
            raise UnavailableError(f"{where} with something that is not JSON", answered=True) from None
        if isinstance(found, dict):
            return found
        if method == "POST" and path != "/generate":
            return None
        raise UnavailableError(f"{where} with something that is no JSON object", answered=True)

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
                    raise RefusedError(f"{where} answered {answer.status} {text}".rstrip())
                yield _lines(answer, where, most, lines)
        except (aiohttp.ClientError, TimeoutError, OSError) as trouble:
            raise UnavailableError(f"{where} {_broken(trouble)}", answered=False) from None

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


def _broken(trouble: Exception) -> str:
    if isinstance(trouble, TimeoutError):
        return "timed out"
    return f"failed ({type(trouble).__name__}: {trouble})"


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
