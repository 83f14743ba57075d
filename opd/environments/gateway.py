"""A server on loopback with OpenAI's API. It sends agents' requests to the shared engine.

One serves the episodes of a batch, each with a key of its own. It trusts no input: sizes and times are
bounded, and no body is read without a valid key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from opd.environments.branches import Branches, BranchTurn, ClientAnswer
from opd.environments.gateway_requests import MOST_BODY, AgentRequest, RefusedRequestError, read_request
from opd.errors import needs_extra, reason_of
from opd.loop_thread import LoopThread
from opd.models.token_ids import decode_ids
from opd.rollout.request_state import StopStrings
from opd.rollout.requests import CLOSING_SECONDS
from opd.storage.transcript import Tokens
from opd.types import Status
from opd.untrusted import escape_controls

if TYPE_CHECKING:
    from aiohttp import web
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_UNHEARD = logging.getLogger(f"{__name__}.malformed")
"""For malformed HTTP, for which aiohttp would log a traceback each time."""
_UNHEARD.addHandler(logging.NullHandler())
_UNHEARD.propagate = False

READING = 30.0
"""Seconds that a request may take to arrive, head and body each."""
LINGERING = 2.0
"""Seconds for which further input is discarded, so that a client reads why it was refused."""
MOST_CONNECTIONS = 8192
STARTING = 60.0
"""Seconds that the server may take to listen."""


def require_server() -> None:
    """Raise `MissingExtraError` if the server's package is missing."""
    with needs_extra("an agent of your own", "agents"):
        import aiohttp  # noqa: F401


@dataclass(slots=True, eq=False)
class Session:
    """State of one episode in the gateway."""

    branches: Branches
    in_flight: int = 0
    quiet: float = field(default_factory=time.monotonic)
    """Time of the last answer. The agent itself is at work since then."""
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Gateway:
    """Serves agents. Use it as a context manager.

    Args:
        tokenizer: The student's.
        submit: Called in the server's thread with a session, a turn for the engine, and a callback. Any
            thread may call that with the tokens so far and the turn's status if it has ended.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        submit: Callable[[Session, BranchTurn, Callable[[Tokens, Status | None], None]], None],
    ) -> None:
        """Raises `MissingExtraError`."""
        require_server()
        self._tokenizer, self._submit = tokenizer, submit
        self._sessions: dict[bytes, Session] = {}
        """By digest of the key."""
        self._executor = ThreadPoolExecutor(1, "gateway")
        """Renders templates and encodes text, so that no client waits while another's megabytes are accepted.
        """
        self._begun: set[Any] = set()
        """Connections whose first request has come."""
        self._open = 0
        self._loop = LoopThread("gateway")
        try:
            self.url = self._loop.start(self._start_server()).result(STARTING)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit_session(self, session: Session) -> str:
        """Return a key for an episode, valid until `expel_session`."""
        key = f"opd-{secrets.token_urlsafe(32)}"
        self._sessions[_key_digest(key)] = session
        return key

    def expel_session(self, key: str) -> None:
        """Make `key` invalid."""
        self._sessions.pop(_key_digest(key), None)

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._loop.run(self._stop_server())
        self._loop.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _start_server(self) -> str:
        from aiohttp import web

        app = web.Application(client_max_size=MOST_BODY, middlewares=[self._make_guard(web)])
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/chat/completions", partial(self._answer_request, chat=True))
        app.router.add_post("/v1/completions", partial(self._answer_request, chat=False))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_UNHEARD,
            handler_cancellation=True,
            auto_decompress=False,
            shutdown_timeout=0.1,
            lingering_time=LINGERING,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: self._new_connection(loop), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def _stop_server(self) -> None:
        if hasattr(self, "_server"):
            # Python 3.11 leaks a connection that was accepted when the server is closed: its task asserts
            # that the server is open. So nothing more is accepted, and these tasks run first.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening)
            for _ in range(3):
                await asyncio.sleep(0)
            self._server.close()
        if hasattr(self, "_runner"):
            server = self._runner.server

            def open_transports() -> list[Any]:
                return [] if server is None else [one.transport for one in server.connections]

            # The clean-up forgets a connection whose answer nobody has read yet, and leaves it open.
            transports = open_transports()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._runner.cleanup(), CLOSING_SECONDS)
            for _ in range(5):  # the loop closes sockets in its next round, and may have accepted some more
                for transport in (*transports, *open_transports()):
                    if transport is not None:
                        transport.abort()
                await asyncio.sleep(0)

    def _new_connection(self, loop: asyncio.AbstractEventLoop) -> asyncio.Protocol:
        """Return a connection whose first request has to come in time."""
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= MOST_CONNECTIONS:
            return _RejectedConnection()
        handler: Any = server()

        def check_begun() -> None:
            if handler not in self._begun and handler.transport is not None:
                handler.transport.abort()
            self._begun.discard(handler)

        loop.call_later(READING, check_begun)
        return handler

    def _make_guard(self, web: Any) -> Any:
        """Check the key before a body is read, and turn errors into error objects."""

        @web.middleware
        async def guard(request: web.Request, handler: Callable[..., Awaitable[Any]]) -> Any:
            self._begun.add(request.protocol)
            try:
                session = self._find_session(request)
                session.in_flight += 1
                try:
                    return await handler(request)
                finally:
                    session.in_flight -= 1
                    session.quiet = time.monotonic()
            except RefusedRequestError as error:
                return _refusal_response(web, error)
            except web.HTTPException as error:
                refusal = RefusedRequestError(f"{error.reason}.", "not_found", status=error.status)
                return _refusal_response(web, refusal)
            except asyncio.CancelledError:
                raise
            except ConnectionError:  # nobody reads this answer, but raising would log a traceback
                return _refusal_response(web, RefusedRequestError("the client has gone.", "gone"))
            except Exception as error:
                _log.exception("gateway: %s failed (%s)", escape_controls(request.path, ""), reason_of(error))
                return _refusal_response(
                    web, RefusedRequestError("the gateway failed.", "internal", status=500)
                )

        return guard

    def _find_session(self, request: web.Request) -> Session:
        """Return the session of the request's key. Raises `RefusedRequestError`."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_key_digest(key.strip())) if scheme.lower() == "bearer" else None
        if session is None:
            raise RefusedRequestError(
                "the key is none of an episode that is open; use the api_key that the agent was called with.",
                "invalid_api_key",
                status=401,
            )
        return session

    async def _list_models(self, request: web.Request) -> Any:
        from aiohttp import web

        branches = self._find_session(request).branches
        model = {"id": "student", "object": "model", "created": 0, "owned_by": "opd"}
        return web.json_response(
            {"object": "list", "data": [{**model, "max_model_len": branches.max_tokens}]}, dumps=_dump_json
        )

    async def _answer_request(self, request: web.Request, chat: bool) -> Any:
        from aiohttp import web

        session = self._find_session(request)
        body, loop = await _read_body(request), asyncio.get_running_loop()
        agent_request = await loop.run_in_executor(self._executor, read_request, body, chat)
        placed = asyncio.ensure_future(self._assign_turns(session, agent_request))
        try:
            turns = await asyncio.shield(placed)
        except asyncio.CancelledError:  # the next equal request gets these turns
            placed.add_done_callback(_free_turns)
            raise
        answer = _Answer(agent_request, turns, session.branches, self._tokenizer, self._executor)
        try:
            if not agent_request.stream:
                return web.json_response(await answer.full_answer(), dumps=_dump_json)
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await response.prepare(request)
            async for event in answer.stream_events():
                await response.write(f"data: {_dump_json(event)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        except BaseException:  # the client has gone: the next equal request gets these turns
            _free_turns(placed)
            raise

    async def _assign_turns(self, session: Session, request: AgentRequest) -> list[BranchTurn]:
        """Return the turns that answer `request`, all sent to the engine. Must not be cancelled: a turn that
        was made but never sent would block the next equal request.
        """
        loop = asyncio.get_running_loop()
        async with session.placing:
            turns, new = await loop.run_in_executor(self._executor, session.branches.assign_turns, request)
            for turn in turns:
                turn.live |= request.stream or bool(request.stops)
            for turn in new:
                self._submit(session, turn, partial(self._loop.call_soon, turn.set_tokens))
        return turns


class _RejectedConnection(asyncio.Protocol):
    """Closes the connection."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


class _Answer:
    """The answer to a request from its turns, in the form of OpenAI's API."""

    def __init__(
        self,
        request: AgentRequest,
        turns: Sequence[BranchTurn],
        branches: Branches,
        tokenizer: PreTrainedTokenizerBase,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._request, self._turns, self._branches = request, turns, branches
        self._decode, self._executor = partial(decode_ids, tokenizer), executor
        digest = hashlib.sha256(turns[0].uid.encode()).hexdigest()[:24]
        self.name = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{digest}"
        self._stops = StopStrings(request.stops, self._decode) if request.stops else None
        self._kind = "chat.completion" if request.is_chat else "text_completion"

    async def full_answer(self) -> dict[str, Any]:
        """Return the answer, once all turns have ended."""
        choices = []
        for index, turn in enumerate(self._turns):
            while not self._has_ended(turn):
                await _wait_for_change(turn)
            answer = await self._answer_turn(turn, index)
            choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish}
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            if answer.calls:
                message |= {"content": answer.text or None, "tool_calls": answer.calls}
            choice |= {"message": message} if self._request.is_chat else {"text": answer.text}
            choice["logprobs"] = self._logprob_fields(turn, 0, len(turn.tokens))
            if self._request.ids:
                choice["token_ids"] = turn.tokens.token_ids.tolist()
            choices.append(choice)
        return {**self._answer_head(self._kind), "choices": choices, "usage": self._token_usage()}

    async def stream_events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in chunks."""
        kind = "chat.completion.chunk" if self._request.is_chat else self._kind
        head = self._answer_head(kind)
        for index, turn in enumerate(self._turns):
            pieces = _TextStream(self._decode, self._request.stops)
            first: dict[str, Any] = {"role": "assistant", "content": ""} if self._request.is_chat else {}
            if first:
                yield {**head, "choices": [{"index": index, "delta": first, "finish_reason": None}]}
            done = 0
            while not self._has_ended(turn):
                ids = turn.tokens.token_ids
                text = "" if self._request.calls else pieces.next_text(ids.tolist())
                if text:
                    yield {
                        **head,
                        "choices": [self._choice_delta(index, turn, done, len(ids), {"content": text})],
                    }
                    done = len(ids)
                await _wait_for_change(turn)
            answer = await self._answer_turn(turn, index, pieces.text)
            delta: dict[str, Any] = {"content": answer.text[len(pieces.text) :]}
            if answer.calls:
                delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(answer.calls)]
            last = self._choice_delta(index, turn, done, len(turn.tokens), delta)
            yield {**head, "choices": [{**last, "finish_reason": answer.finish}]}
        if self._request.usage:
            yield {**head, "choices": [], "usage": self._token_usage()}

    async def _answer_turn(self, turn: BranchTurn, index: int, streamed: str = "") -> ClientAnswer:
        loop, answer_turn = asyncio.get_running_loop(), self._branches.answer_turn
        return await loop.run_in_executor(
            self._executor, answer_turn, self._request, turn, self.name, index, streamed
        )

    def _has_ended(self, turn: BranchTurn) -> bool:
        if self._stops is not None:
            turn.stop_at(self._stops)
        return turn.status is not None

    def _choice_delta(
        self, index: int, turn: BranchTurn, start: int, end: int, delta: dict[str, Any]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        choice |= {"delta": delta} if self._request.is_chat else {"text": delta["content"]}
        choice["logprobs"] = self._logprob_fields(turn, start, end)
        if self._request.ids:
            choice["token_ids"] = turn.tokens.token_ids[start:end].tolist()
        return choice

    def _answer_head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.name, "object": kind, "created": int(time.time()), "model": self._request.model}
        return head | (
            {"prompt_token_ids": self._turns[0].context_tokens().tolist()} if self._request.ids else {}
        )

    def _token_usage(self) -> dict[str, int]:
        prompt, written = len(self._turns[0].context_tokens()), sum(len(turn.tokens) for turn in self._turns)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _logprob_fields(self, turn: BranchTurn, start: int, end: int) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        texts = [self._decode([one]) for one in turn.tokens.token_ids[start:end].tolist()]
        values = turn.tokens.logprobs[start:end].tolist()
        if not self._request.is_chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": None}
        pairs = zip(texts, values, strict=True)
        content = [
            {"token": text, "logprob": value, "bytes": None, "top_logprobs": []} for text, value in pairs
        ]
        return {"content": content, "refusal": None}


class _TextStream:
    """Streams text, without half a character and without a possible beginning of a stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self.text = ""
        """Text returned so far."""
        self._decoded = ""
        """Text of the tokens decoded so far."""
        self._start = self._read = 0
        """First token to decode, with a few before that later text depends on, and number of tokens decoded.
        """

    def next_text(self, ids: list[int]) -> str:
        """Return the new text of the tokens `ids`. The newest is left out, because it may end the turn."""
        ids = ids[:-1]
        earlier, now = self._decode(ids[self._start : self._read]), self._decode(ids[self._start :])
        if not now.startswith(earlier) or now.endswith("\ufffd") or len(now) == len(earlier):
            return ""
        self._decoded += now[len(earlier) :]
        self._start, self._read = self._read, len(ids)
        withheld = max((_stop_overlap(self._decoded, stop) for stop in self._stops), default=0)
        new = self._decoded[len(self.text) : len(self._decoded) - withheld]
        self.text += new
        return new


def _free_turns(placed: asyncio.Future[list[BranchTurn]]) -> None:
    """Free these turns, because their client has gone."""
    if not placed.cancelled() and placed.exception() is None:
        for turn in placed.result():
            turn.claimed = False


def _stop_overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    most = min(len(stop) - 1, len(text))
    return next((count for count in range(most, 0, -1) if text.endswith(stop[:count])), 0)


async def _wait_for_change(turn: BranchTurn) -> None:
    await turn.changed.wait()
    turn.changed.clear()


async def _read_body(request: web.Request) -> bytes:
    """Read the full body. Raises `RefusedRequestError` if it is too large, or comes too slowly."""
    from aiohttp import web

    large = RefusedRequestError(f"the body has more than {MOST_BODY:,} bytes.", "too_large", status=413)
    if (request.content_length or 0) > MOST_BODY:
        raise large
    try:
        return await asyncio.wait_for(request.read(), READING)
    except web.HTTPRequestEntityTooLarge:
        raise large from None
    except TimeoutError:
        raise RefusedRequestError(
            f"the body took longer than {READING:g} s.", "timeout", status=408
        ) from None


def _refusal_response(web: Any, error: RefusedRequestError) -> Any:
    response = web.json_response(error.error_object, status=error.status, dumps=_dump_json)
    if error.status in (401, 408, 413):
        response.force_close()
    return response


def _dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
