"""Send requests to several servers of one model: balanced, bounded, retried.

This module also finds URLs that lead to one server. `UrlsFile` reads the URLs of servers that come while a
run works: a file with one on a line, which is read again and again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from opd.config.base import is_url
from opd.errors import OpdError
from opd.loop_thread import LoopThread
from opd.served.http_client import (
    HTTPClient,
    PoolOptions,
    RefusedError,
    Server,
    UnavailableError,
    refusal_advice,
)
from opd.untrusted import safe_excerpt

_log = logging.getLogger(__name__)
T = TypeVar("T")

NEAR = 0.25
"""Fraction of a server's `max_in_flight_tokens`. A server whose cache has the beginning of a request is
preferred while its load exceeds the least load by no more than this.
"""
QUIET = 1.0
"""Seconds without an answer in which a server may have been exchanged behind a proxy's open connection."""


@dataclass(slots=True, kw_only=True)
class RequestFailures:
    """Failures of one request."""

    bad_answers: int = 0
    since: float | None = None
    """Time of its first failure."""


@dataclass(slots=True)
class _Call(RequestFailures):
    """One request with all its attempts."""

    tokens: int
    attempt: Callable[[Server], Awaitable[Any]]
    tried: list[Server] = field(default_factory=list)
    """Servers that have it now, or had it last."""


class HTTPPool(HTTPClient):
    """A pool of servers of one model. Everything but the constructor belongs to one event loop.

    A server that fails rests for a while, longer each time, and is checked by `admit` before it works again.
    A request goes to the server with the fewest tokens in flight and moves on when that one fails. Ranks that
    share servers divide them: see `share_of`.

    Args:
        owner: Begins every error, such as "teacher math".
        error: Class of the errors raised.
        admit: Checks a server. Raises an `OpdError` if it must never be used.
        watch: Use no answer of `call` that may be of another process than the one that was checked.
    """

    def __init__(
        self,
        owner: str,
        options: PoolOptions,
        error: type[OpdError],
        admit: Callable[[Server], Awaitable[None]] | None = None,
        watch: bool = False,
    ) -> None:
        super().__init__(owner, options)
        self._error, self._admit, self._watch = error, admit, watch
        self.servers = [Server(url.rstrip("/")) for url in options.urls]
        self._rng = random.Random()
        self._freed = asyncio.Event()
        """Set, and replaced by another, once requests that wait for a server are to look again."""
        self._awaited: Counter[str] = Counter()
        """URL -> requests that wait, and whose beginning that server has in its cache."""
        self._trouble_since: float | None = None
        """Time of the first failure since the last good answer."""

    def add_new_servers(self) -> None:
        """Add servers that have come since the last call. They are checked like all before they are used."""
        for url in self.options.more():
            if all(server.url != url.rstrip("/") for server in self.servers):
                self.servers = [*self.servers, Server(url.rstrip("/"), late=True)]
                _log.info("%s: %s has come", self.owner, url)

    async def reset_admission(self) -> None:
        """Have every server checked again before its next request."""
        for server in self.servers:
            server.admitted = False

    @property
    def server_errors(self) -> str:
        """Errors of the servers that failed last, empty if none did."""
        return "; ".join(f"{s.url}: {s.last_error}" for s in self.servers if s.failures and s.last_error)

    async def post_json(
        self, path: str, body: dict[str, Any], tokens: int, check: Callable[[dict[str, Any]], Any], most: int
    ) -> Any:
        """Return `check(answer)` of the first server that answers well, with at most `most` bytes.

        `check` raises `UnavailableError` for an answer that another attempt may fix, and an `OpdError` for
        one that must stop the run. Raises the pool's error when patience is over or the request is refused.
        """

        async def attempt(server: Server) -> Any:
            return check(await self.request_json(server, "POST", path, body, most))

        return await self.call_server(tokens, attempt)

    async def call_server(self, tokens: int, attempt: Callable[[Server], Awaitable[T]]) -> T:
        """Return the result of `attempt` with the first server that succeeds. Raises as `post` does."""
        self.counters.requests += 1
        call = _Call(tokens, attempt)
        while True:
            try:
                return await self._call_hedged(call)
            except RefusedError as refusal:
                raise self._error(f"{self.owner}: {refusal}; check the request and the server.") from None
            except UnavailableError as trouble:
                self.note_failure(call, trouble)

    def note_failure(self, call: RequestFailures, trouble: UnavailableError) -> None:
        """Note a failed attempt. Raises the pool's error if it was one too many, and at once the reason if
        the servers were given up.
        """
        if (reason := self.options.given_up()) is not None:
            raise reason
        limits, now = self.options.patience, time.monotonic()
        call.bad_answers += trouble.answered
        call.since = call.since or now
        # Servers that always fail are tried by one request after another: their failures are added up.
        since = min(call.since, self._trouble_since or now)
        all_bad = all(server.bad_answers >= limits.retry.attempts for server in self.servers)
        if all_bad or call.bad_answers >= limits.retry.attempts or now - since > limits.unreachable:
            names = ", ".join(server.url for server in self.servers)
            raise self._error(
                f"{self.owner}: no usable answer from {names} in the {now - since:.0f} seconds after the"
                f" first failure ({trouble}); {self.options.revive}."
            )
        self.counters.retries += 1

    async def _call_hedged(self, call: _Call) -> Any:
        delay = self.options.patience.hedge_after
        if delay is None or len(self.servers) == 1:
            return await self._call_once(call)
        call.tried.clear()
        first = asyncio.ensure_future(self._call_once(call))
        done, _ = await _wait_first([first], delay)
        if done:
            return first.result()
        self.counters.hedges += 1
        return await _first_success([first, asyncio.ensure_future(self._call_once(call))])

    async def _call_once(self, call: _Call) -> Any:
        async with self.lease(call.tokens, call.tried) as server:
            checked = server.process
            server.doubted |= time.monotonic() - server.answered > QUIET
            answer = await call.attempt(server)
            if self._watch:
                await self._confirm_process(server, checked)
            return answer

    async def _confirm_process(self, server: Server, checked: str | None) -> None:
        """After an answer of the process `checked`, raise `UnavailableError` if it may be another's.

        One request confirms all connections that exist when it is sent.
        """
        if server.doubted:
            async with server.lock:
                if server.doubted:
                    identity = await self.process_identity(server)
                    if identity != server.process:
                        raise _exchanged_error(server)
                    if identity is None:  # without an identity it must prove its weights
                        await self._verify_server(server)
                    server.doubted = False
        if server.process != checked:
            raise _exchanged_error(server)

    @asynccontextmanager
    async def lease(
        self, tokens: int, tried: list[Server], preferred: Server | None = None
    ) -> AsyncIterator[Server]:
        """Lease a server for `tokens` once one has capacity, and add it to `tried`. An `UnavailableError` of
        the block counts as its failure, a block that ends well as its success.
        """
        server = await self._choose_server(tokens, tried, preferred)
        tried.append(server)
        try:
            if not server.admitted:
                await self._check_server(server)
            yield server
        except UnavailableError as trouble:
            self._record_failure(server, trouble)
            raise
        else:
            server.failures = server.bad_answers = 0
            server.answered = time.monotonic()
            self._trouble_since = None
        finally:
            server.in_flight -= tokens
            self._signal_freed()

    async def _choose_server(self, tokens: int, tried: list[Server], preferred: Server | None) -> Server:
        """Wait for a server that is not resting and has capacity. Take the one with the fewest tokens in
        flight, or `preferred` if it has hardly more. A server in `tried` comes last. What a server frees is
        first for the waiting requests that prefer it. Servers of other ranks are for the time when none of
        this rank's own works.
        """
        awaited = False
        try:
            while (server := self._free_server(tokens, tried, preferred)) is None:
                if preferred is not None and not awaited:
                    self._awaited[preferred.url] += 1
                    awaited = True
                now = time.monotonic()
                ends = [s.resting_until - now for s in self.servers if s.resting_until > now]
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(ends, default=None)):  # `wait_for` may lose a cancel
                        await self._freed.wait()
            return server
        finally:
            if awaited and preferred is not None:
                self._awaited[preferred.url] -= 1
                self._signal_freed()  # others may have left its server to it

    def _signal_freed(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    def _free_server(self, tokens: int, tried: list[Server], preferred: Server | None) -> Server | None:
        """Return the server of `_choose_server` with `tokens` more in flight, or `None` if none is free."""
        self.add_new_servers()
        now = time.monotonic()
        ready = [s for s in self.servers if s.resting_until <= now]
        own = [s for s in ready if self._share(s)]
        usable = own if any(not s.failures for s in own) else ready
        free = [s for s in usable if self._has_capacity(s, tokens)]
        free = [s for s in free if s is preferred or not self._awaited[s.url]]
        if not free:
            return None
        # Among equals by chance: requests of one moment must not all go to the first.
        most = min(map(self._load, free)) + NEAR
        near = preferred if preferred in free and self._load(preferred) <= most else None
        server = min(free, key=lambda s: (s in tried, s is not near, self._load(s), self._rng.random()))
        server.in_flight += tokens
        return server

    def _has_capacity(self, server: Server, tokens: int) -> bool:
        # A request above the limit runs alone rather than never, and so does the trial of one that came back.
        if server.failures and server.in_flight:
            return False
        return not server.in_flight or server.in_flight + tokens <= self._limit(server)

    def _share(self, server: Server) -> int:
        options = self.options
        return share_of(self.servers.index(server), len(self.servers), options.rank, options.ranks)

    def _limit(self, server: Server) -> float:
        """Return this rank's part of the server's limit. Of another rank's server it is one of all ranks."""
        return self.options.max_in_flight_tokens * (self._share(server) or 1) / self.options.ranks

    def _load(self, server: Server) -> float:
        return server.in_flight / self._limit(server)

    async def keep_server(self, server: Server, is_right: Callable[[Server], Awaitable[bool]]) -> None:
        """Check a server as before a request, if it was away or `is_right` no more. What is wrong is logged
        once. It is no failure of a request, of which the patience has a limit.
        """
        said = server.last_error
        try:
            async with server.lock:
                server.admitted = server.admitted and await is_right(server)
            if not server.admitted and server.resting_until <= time.monotonic():
                await self._check_server(server)
        except (UnavailableError, RefusedError, OpdError) as error:
            server.admitted, server.last_error = False, str(error)
            server.resting_until = time.monotonic() + self.options.patience.retry.pause_seconds(1)
            if server.last_error != said and not isinstance(error, UnavailableError):
                _log.warning("%s is not used: %s", server.url, error)
        else:
            self._signal_freed()

    async def _check_server(self, server: Server) -> None:
        async with server.lock:
            if server.resting_until > time.monotonic():
                raise UnavailableError(server.last_error, answered=False)
            if not server.admitted:
                if self._watch:  # before the check: an exchange meanwhile shows in the next answer
                    try:
                        server.process = await self.process_identity(server)
                    except UnavailableError as trouble:
                        if not trouble.answered:
                            raise
                        server.process = None  # `admit` reports the fault
                    server.doubted = False
                await self._verify_server(server)
            server.admitted, server.answered = True, time.monotonic()

    async def _verify_server(self, server: Server) -> None:
        try:
            if server.late:
                await self._require_other(server)
            if self._admit is not None:
                await self._admit(server)
        except RefusedError as refusal:
            mend = refusal_advice(refusal, f"check {self.options.look_at}")
            raise self._error(f"{self.owner}: {refusal}; {mend}.") from None

    async def _require_other(self, server: Server) -> None:
        """Drop a server that another URL leads to already."""
        others = [other for other in self.servers if other is not server]
        identity, *theirs = await asyncio.gather(*(self.server_identity(one) for one in (server, *others)))
        if identity not in theirs:
            server.late = False
            return
        self.servers, same = others, others[theirs.index(identity)].url
        _log.warning("%s: %s leads to the server at %s; it is not used", self.owner, server.url, same)
        raise UnavailableError(f"{server.url} leads to the server at {same}", answered=False)

    def _record_failure(self, server: Server, trouble: UnavailableError) -> None:
        server.admitted = False
        server.last_error = str(trouble)
        if server.resting_until <= time.monotonic():  # many requests that fail at once are one failure
            self._trouble_since = self._trouble_since or time.monotonic()
            server.failures += 1
            server.bad_answers += trouble.answered
            server.resting_until = time.monotonic() + self.options.patience.retry.pause_seconds(
                server.failures
            )


def share_of(number: int, servers: int, rank: int, ranks: int) -> int:
    """Return the parts of server `number` that are `rank`'s, of `ranks` parts. All servers in a row are cut
    into equal pieces, one a rank. So few ranks share a server, and each has `servers` parts in all.
    """
    return max(0, min((rank + 1) * servers, (number + 1) * ranks) - max(rank * servers, number * ranks))


def _exchanged_error(server: Server) -> UnavailableError:
    return UnavailableError(f"{server.url} was started again since it was checked", answered=False)


async def _wait_first(tasks: list[asyncio.Future], seconds: float | None) -> tuple[set, set]:
    try:
        return await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


async def _first_success(copies: list[asyncio.Future]) -> Any:
    """Return the result of the first copy that succeeds. Cancel the other: it is answered once."""
    pending = set(copies)
    try:
        while True:
            done, pending = await _wait_first(list(pending), None)
            well = [copy for copy in done if copy.exception() is None]
            if well or not pending:
                return (well or list(done))[0].result()
    finally:
        for copy in pending:
            copy.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def check_distinct(
    wanted: Mapping[str, PoolOptions], error: type[OpdError], models: Mapping[str, str] | None = None
) -> None:
    """Check that no two URLs lead to one server. A server that does not answer, or is too old to tell its
    start time, counts as another.

    Args:
        wanted: Servers by the field that names them, such as `rollout.engine.urls`.
        error: Raised if two URLs lead to one server. It would have the student's weights or another teacher's
            in place of a teacher's, or get verbs of two clients at once, which end it.
        models: Model by field, for servers that are only queried and never updated. Two fields of one model
            may share servers.
    """
    if sum(len(options.urls) for options in wanted.values()) < 2:
        return
    pools = {where: HTTPPool(where, options, error) for where, options in wanted.items()}
    all_servers = [(where, pool, server) for where, pool in pools.items() for server in pool.servers]

    async def read_identities() -> list[str]:
        return await asyncio.gather(*(pool.server_identity(server) for _, pool, server in all_servers))

    loop = LoopThread("distinct-servers")
    try:
        identities = loop.run(read_identities())
    finally:
        for pool in pools.values():
            loop.run(pool.close())
        loop.close()
    models = models or {}
    urls: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for (where, _, server), identity in zip(all_servers, identities, strict=True):
        for other, url in urls[identity]:
            if other == where:
                raise error(f"{where}: {url} and {server.url} lead to one server; give every server once.")
            if other not in models or models[other] != models.get(where):
                raise error(
                    f"{other}: {url} and {where}: {server.url} lead to one server; give each of the two"
                    " servers of its own."
                )
        urls[identity].append((where, server.url))


LOOK = 5.0
"""Seconds between two reads of the file."""
MOST_BYTES, MOST_LINES = 1 << 20, 10_000


class UrlsFile:
    """New lines of a file of URLs since the last read. Lines that begin with `#` are ignored.

    Args:
        path: It may be written later.
        urls: Those that are in use already.
    """

    def __init__(self, path: str | Path, urls: Sequence[str] = ()) -> None:
        self._path = Path(path)
        self._seen = {url.rstrip("/") for url in urls}
        self._due = 0.0
        self._said = ""

    def new_urls(self) -> list[str]:
        """Return new URLs, each once, none before the next read is due. A line that is no URL is logged."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + LOOK
        urls = []
        for number, line in enumerate(self._read_lines()):
            url = line.strip().rstrip("/")
            if not url or url.startswith("#") or url in self._seen:
                continue
            self._seen.add(url)
            if not is_url(url):
                _log.warning(
                    "%s: line %d is no URL of a server: %s", self._path, number + 1, safe_excerpt(url, 100)
                )
            else:
                urls.append(url)
        return urls

    def _read_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as opened:
                content = opened.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            return self._warn_unusable(f"it cannot be read ({error.strerror})")
        lines = content.decode("utf-8", "replace").split("\n")
        if len(content) > MOST_BYTES or len(lines) > MOST_LINES:
            return self._warn_unusable(f"it has more than {MOST_LINES} lines or {MOST_BYTES} bytes")
        return lines[:-1]  # the last line may still be being written

    def _warn_unusable(self, reason: str) -> list[str]:
        if reason != self._said:
            self._said = reason
            _log.warning("%s: no server is taken from it, %s", self._path, reason)
        return []
