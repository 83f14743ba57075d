"""The served rollout engine: workers stream tokens with log-probabilities and load new weights.

A server kind's requests are in its dialect (`opd/rollout/sglang_engine.py`, `opd/rollout/vllm_engine.py`).
Everything else is the same for all kinds, and here.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from opd.config import Recipe
from opd.config.servers import Argument
from opd.config.train import LoRAConfig
from opd.errors import OpdError, RolloutError
from opd.models.stored_form import StoredForm
from opd.ranks import Ranks
from opd.rollout.batch import EngineLimits, queue_requests
from opd.rollout.served_messages import MessagePart, MessageReader, chunks_of, is_message
from opd.rollout.served_workers import Push, Read, Verbs, Workers
from opd.rollout.streams import Streaming
from opd.served.http_client import HTTPClient, PoolOptions, RefusedError, Server, UnavailableError
from opd.served.http_pool import RequestFailures
from opd.served.routed_experts import FLAG, ServedRouting
from opd.types import Chunk, RolloutRequest, SamplingParams, Status

NEVER = -1e30
"""Added to the logit of a row of the head that is no token."""


def never_sampled(model: ServedModel) -> dict[str, float]:
    """Logit bias by token."""
    return {str(token): NEVER for token in range(model.vocabulary, model.rows or 0)}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the workers serve."""

    vocabulary: int
    """Tokens of the tokenizer. Others are never sent or accepted."""
    max_sequence: int
    """Prompt plus response tokens of a request."""
    rows: int | None = None
    """Rows of the model's head, if there are more than tokens. Rows beyond the tokens are never sampled."""
    config: Mapping[str, Any] | None = None
    """The student's Hugging Face configuration, to be compared with the workers'."""
    files: StoredForm | None = None
    """The form of its files, if that is not its module's: new weights go to workers by the names in files."""


class Dialect(ABC):
    """The generation requests of one kind of server."""

    path: ClassVar[str]
    reader: ClassVar[type[MessageReader]]
    gives_experts: ClassVar[bool] = False
    """Whether answers may have expert choices."""
    routing: ServedRouting | None = None
    """The routed blocks whose choices are wanted."""

    @abstractmethod
    def check_request(self, request: RolloutRequest) -> None:
        """Raise `RolloutError` if the server cannot serve it, or not give the log-probabilities we need."""

    @abstractmethod
    def request_body(self, request: RolloutRequest, written: Sequence[int]) -> dict[str, Any]:
        """Body of the request to continue after the prompt and `written`."""

    @abstractmethod
    def most_bytes(self, request: RolloutRequest) -> int:
        """Most bytes of one line of a good answer."""


class ServedEngine(Streaming):
    """Implements `opd.protocols.RolloutEngine` on servers of one model, which are its workers.

    The requests of one session go to one worker, which has their beginning in its prefix cache, unless that
    worker has much more to do than another. Of the requests with one prompt, the first goes ahead. If a
    worker fails, its requests continue on another after the tokens that have arrived. Paused requests free
    their cache and rebuild it with the new weights. Each token knows its version.
    """

    def __init__(self, dialect: Dialect, workers: Workers, model: ServedModel) -> None:
        self._dialect, self._workers = dialect, workers
        self._limits = EngineLimits(model.vocabulary, model.max_sequence)
        self._arrived: queue.SimpleQueue[tuple[object, MessagePart] | BaseException] = queue.SimpleQueue()
        """Message parts, each with its request's token from `_left`."""
        self._left: dict[str, object] = {}
        """Requests in flight. Each has a token of its own, because its uid may come again."""
        self._tasks: dict[object, asyncio.Task[None]] = {}
        """Reading tasks, by that token. Used in the event loop only."""
        self._chunks: Iterator[Chunk] = iter(())
        self._ended: dict[str, Status] = {}
        self._homes = SessionWorkers()
        """Used in the event loop only."""
        self.cached_tokens = 0
        """Prompt tokens that workers had in their prefix cache so far."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._workers.version

    @property
    def adapters(self) -> bool:
        """True if it is sent adapters alone, with the digest of their base."""
        return self._workers.verbs.adapters

    @property
    def paused(self) -> bool:
        """True while sampling is stopped."""
        return self._workers.paused

    def record_experts(self, routing: ServedRouting) -> None:
        """Give the expert choices of every position from now on. Raises `RolloutError` if these servers give
        none. Those of a kind that does are looked at before their first weights.
        """
        if not self._dialect.gives_experts:
            raise RolloutError(
                "rollout.replay_experts is true, and these servers' streams have no expert choices; take"
                " rollout.engine sglang or torch, or set it to auto or false."
            )
        self._dialect.routing = routing
        self._workers.verbs.records_experts = True

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Send `requests` to the workers. Raises `RolloutError`, and sends none, if one cannot be served."""
        ended = queue_requests(requests, self._limits, {*self._left, *self._ended}).ended
        for request in requests:
            self._dialect.check_request(request)
        self._ended |= ended
        groups: dict[bytes, list[tuple[object, RolloutRequest]]] = {}
        for request in requests:
            if request.uid not in ended:
                name = self._left[request.uid] = object()
                prompt = np.asarray(request.prompt_ids, dtype=np.int32).tobytes()
                groups.setdefault(prompt, []).append((name, request))
        if groups:
            self._workers.event_loop.start(self._stream_all(list(groups.values())))

    def next_chunk(self) -> Chunk | None:
        """Return the tokens that have arrived of one policy version. Waits for the first, and returns None if
        nothing is in flight.

        Raises `RolloutError` when no worker is left, which ends everything in flight, or while paused.
        """
        while (chunk := next(self._chunks, None)) is None:
            if not self._ended and not self._left:
                return None
            pieces = [MessagePart(uid, 0, [], [], [], status) for uid, status in self._ended.items()]
            self._ended.clear()
            self._chunks = chunks_of(pieces or self._next_messages(), self._workers.version)
        return chunk

    def abort(self, uids: Collection[str]) -> None:
        """Abort the requests `uids`. Closing its stream ends a request on its worker."""
        gone = set(uids)
        self._chunks = iter([chunk.without_requests(gone) for chunk in self._chunks])
        names = {name for uid in gone if (name := self._left.pop(uid, None)) is not None}
        self._ended = {uid: status for uid, status in self._ended.items() if uid not in gone}
        if names:
            self._workers.event_loop.start(self._cancel_tasks(names))

    def pause(self) -> None:
        """Stop sampling on every worker. Requests in flight stay, without their cache."""
        self._workers.pause()

    def flush(self) -> None:
        """Drop every cached key and value."""
        self._workers.flush()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Push `weights` to every worker, verify each, and return the digest. A worker that is away gets them
        before it works again.

        Raises `RolloutError` if the engine is not paused, `version` does not grow, or a worker holds other
        weights afterwards.
        """
        return self._workers.update_weights(weights, version)

    @property
    def received_bytes(self) -> int:
        """See `Workers`."""
        return self._workers.received_bytes

    def take_sent_bytes(self) -> int | None:
        """See `Workers.take_sent_bytes`."""
        return self._workers.take_sent_bytes()

    def resume(self) -> None:
        """Continue sampling."""
        self._workers.resume()

    def sleep(self) -> None:
        """Pause, and have the workers free weights, keys and values and graphs, until `update_weights`.

        The workers must belong to this engine alone, and end with it, because no other process knows that
        they sleep. Raises `RolloutError` while requests are in flight, because they and the workers would be
        lost.
        """
        if self._left or self._ended:
            raise RolloutError("requests are being decoded; the engine can sleep once none is in flight.")
        self._workers.sleep()

    def close(self) -> None:
        """End the requests in flight and the connections. The workers keep running."""
        self.abort(list(self._left))
        self._workers.close()

    def _next_messages(self) -> list[MessagePart]:
        """Return all parts that have arrived, waiting for the first."""
        pieces: list[MessagePart] = []
        while not pieces or not self._arrived.empty():
            if not pieces and self._workers.paused and self._arrived.empty():
                raise RolloutError("the engine is paused; call resume() before the next chunk.")
            arrived = self._arrived.get()
            if isinstance(arrived, BaseException):
                self.abort(list(self._left))
                raise arrived
            name, piece = arrived
            if self._left.get(piece.uid) is name:
                pieces.append(piece)
                if piece.finished is not None:
                    del self._left[piece.uid]
        return pieces

    async def _cancel_tasks(self, names: set[object]) -> None:
        for name in names:
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()

    async def _stream_all(self, groups: list[list[tuple[object, RolloutRequest]]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(self._stream_group(group))
        except BaseExceptionGroup as group:
            errors: list[BaseException] = []
            pending: list[BaseException] = [group]
            while pending:
                error = pending.pop()
                if isinstance(error, BaseExceptionGroup):
                    pending.extend(error.exceptions)
                else:
                    errors.append(error)
            # One error, if possible one that is meant for the user.
            self._arrived.put(next((error for error in errors if isinstance(error, OpdError)), errors[0]))

    async def _stream_group(self, group: list[tuple[object, RolloutRequest]]) -> None:
        cached = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for index, (name, request) in enumerate(group):
                if index == 1:
                    await cached.wait()
                if self._left.get(request.uid) is name:
                    task = self._tasks[name] = tasks.create_task(self._stream_request(name, request, cached))
                    task.add_done_callback(lambda _: cached.set())  # also of a task cancelled before it began
                else:
                    cached.set()

    async def _stream_request(self, name: object, request: RolloutRequest, cached: asyncio.Event) -> None:
        """Stream one response to its end, on as many workers as it takes."""
        written = [int(token) for token in request.prefix_ids]
        trouble = RequestFailures()
        try:
            while True:
                try:
                    if await self._attempt_stream(name, request, written, cached):
                        return
                except UnavailableError as failure:
                    self._workers.pool.note_failure(trouble, failure)
                except RefusedError as refusal:
                    raise RolloutError(f"request {request.uid!r}: {refusal}; check the request.") from None
        finally:
            self._tasks.pop(name, None)

    async def _attempt_stream(
        self, name: object, request: RolloutRequest, written: list[int], cached: asyncio.Event
    ) -> bool:
        """Stream after `written`, which grows. Returns True if the response has ended. It has not if a pause,
        or the model's own end, ended the stream. Then the next attempt continues with the newest weights.
        """
        workers, dialect, sampling = self._workers, self._dialect, request.sampling
        tokens = len(request.prompt_ids) + sampling.max_new_tokens
        session = request.session or _prompt_session(request)
        vocabulary, stops = self._limits.vocab_size, sampling.stop_ids
        stream = dialect.reader(request.uid, len(written), workers.versions, vocabulary, stops)
        body = dialect.request_body(request, written)
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(
                workers.pool.lease(tokens, [], self._homes.get_worker(session))
            )
            # Lease first: a request that waited afterwards could reach workers that are paused meanwhile.
            pauses = await workers.until_open()
            due, newest = workers.version, workers.target_weights
            workers.verbs.name_weights(newest, body, stream)
            arriving = await stack.enter_async_context(self._open_stream(server, request, body))
            self._homes.set_worker(session, server)
            begun = False
            async for line in arriving:
                if not begun and is_message(line):
                    begun = True
                    stream.weights = stream.weights or await workers.verbs.weights_of(server)
                    if workers.verbs.pause_ends_streams and workers.pauses != pauses:
                        return False  # it may have begun before or after the pause
                piece = stream.read(line)
                if piece is None:
                    continue
                if piece.finished is Status.ABORTED:
                    if workers.verbs.pause_ends_streams and workers.pauses != pauses:
                        return False
                    raise UnavailableError(f"{server.url} aborted {request.uid}", answered=True)
                if min(piece.versions, default=due) < due:
                    # The worker was restarted unnoticed. It gets the newest weights before more requests.
                    raise UnavailableError(f"{server.url} has lost version {due}", answered=True)
                written += piece.token_ids
                due_part = self._with_experts(_as_asked(piece, written, sampling), request, written, server)
                self._arrived.put((name, due_part))
                cached.set()
                if piece.finished is None:
                    continue
                self.cached_tokens += stream.cached_tokens
                if due_part.finished is None and not stream.seen:
                    raise UnavailableError(f"{server.url} wrote nothing of {request.uid}", answered=True)
                return due_part.finished is not None
        raise UnavailableError(f"{server.url} ended the stream of {request.uid} early", answered=False)

    def _with_experts(
        self, piece: MessagePart, request: RolloutRequest, written: Sequence[int], server: Server
    ) -> MessagePart:
        """Return `piece`, the last of `written`, with its expert choices read. Raises `UnavailableError` for
        wrong ones, and `RolloutError` if a whole response comes without those that are wanted.
        """
        routing = self._dialect.routing
        if routing is None:
            return piece
        if piece.experts is not None:
            positions = len(request.prompt_ids) + len(written) - 1
            return replace(piece, span=routing.read_span(piece.experts, request.routed, positions))
        if piece.finished is not None:
            raise RolloutError(
                f"{server.url} gave a response without its expert choices, which rollout.replay_experts true"
                f" asks for; start it with --{FLAG}, or set it to auto or false."
            )
        return piece

    @asynccontextmanager
    async def _open_stream(
        self, server: Server, request: RolloutRequest, body: dict[str, Any]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the lines of `server`'s answer. Raises as `HTTPClient.stream_lines`, and `UnavailableError`
        if the named adapter is missing, because the server was restarted unnoticed.
        """
        workers, most = self._workers, self._dialect.most_bytes(request)
        lines = 1024 + 8 * request.sampling.max_new_tokens
        try:
            async with workers.pool.stream_lines(server, self._dialect.path, body, most, lines) as arriving:
                yield arriving
        except RefusedError as refusal:
            if not workers.verbs.adapters or refusal.status != HTTPStatus.NOT_FOUND:
                raise
            raise UnavailableError(f"{server.url} has lost its adapter", answered=True) from None


class SessionWorkers:
    """Session -> the worker that served it last and has its beginning in its cache."""

    MOST = 65_536
    """Most sessions. The least recently used ones are dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Server] = OrderedDict()

    def get_worker(self, session: str) -> Server | None:
        """Return the session's worker, or None if it is unknown."""
        return self._known.get(session)

    def set_worker(self, session: str, server: Server) -> None:
        """Record that `server` works on `session`."""
        self._known[session] = server
        self._known.move_to_end(session)
        if len(self._known) > self.MOST:
            self._known.popitem(last=False)


def _as_asked(piece: MessagePart, written: Sequence[int], sampling: SamplingParams) -> MessagePart:
    """Return `piece`, the last of `written`, without an end that its request does not know.

    SGLang also stops at the ends of its model, whatever a request says, unless it says that no token is one.
    """
    if piece.finished is not Status.COMPLETED or (written and written[-1] in sampling.stop_ids):
        return piece
    return replace(piece, finished=Status.TRUNCATED if len(written) >= sampling.max_new_tokens else None)


def _prompt_session(request: RolloutRequest) -> str:
    """Return a session name for the request's prompt."""
    prompt = np.asarray(request.prompt_ids, dtype=np.int32).tobytes()
    return hashlib.blake2b(prompt, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class StudentForm:
    """Facts about the student that an engine needs besides its workers' model."""

    folder: Path
    """A Hugging Face folder of its form."""
    dtype: str
    """Data type of its weights."""
    cuts: bool
    """True if a `top_p` or `top_k` leaves tokens out."""


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """The entry points of a server program's file, as `PROGRAM`, for rollouts with its servers."""

    open: Callable[[PoolOptions, ServedModel, Push, StudentForm, Ranks], ServedEngine]
    """Opens an engine whose workers hold nothing before the first push. The ranks open theirs together."""
    verbs: Callable[[ServedModel, bool], Verbs]
    """Verbs by model and `StudentForm.cuts`, to inspect workers without an engine."""
    read: Read
    lacks: Callable[[HTTPClient, Server, LoRAConfig], Awaitable[str | None]]
    """Returns the flags that adapters need and a server was not started with, or None."""
    started_with: Callable[[Recipe], dict[str, Argument]]
    """Returns the start arguments for a recipe's servers."""
    loads: str = ""
    """Begins the paths of the requests that load and unload adapters."""


def program_named(name: str) -> WorkerProgram:
    """Return the program of `opd/rollout/NAME_engine.py`."""
    return import_module(f"opd.rollout.{name}_engine").PROGRAM
