"""The served rollout engine: SGLang workers stream tokens with log-probabilities and take new weights."""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import OpdError, RolloutError
from opd.foreign import decoding, shown
from opd.rollout.batch import Limits, queue_requests
from opd.rollout.sglang_workers import Workers
from opd.rollout.streams import Streaming
from opd.served.http_pool import PoolOptions, RefusedError, Server, Trouble, UnavailableError
from opd.served.sglang_answers import most_bytes
from opd.types import Chunk, RolloutRequest, Status

if TYPE_CHECKING:
    from torch import Tensor

    from opd.rollout.sglang_workers import Push


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message of a stream brought of one request."""

    uid: str
    start: int
    """Response position of its first token."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finished: Status | None = None


class MessageReader:
    """Reads the messages of one request: cumulative or not, tokens in groups, several versions."""

    def __init__(
        self,
        uid: str,
        start: int,
        versions: Mapping[str, int],
        vocabulary: int,
        stop_ids: Collection[int] = (),
    ) -> None:
        """`stop_ids`: a response that ends with one of them is complete, also where it is as long as it may
        be; servers call that its length.
        """
        self.uid, self._start, self._versions, self._vocabulary = uid, start, versions, vocabulary
        self._stop_ids, self._last = stop_ids, -1
        self.seen = 0
        """Tokens of this attempt so far."""
        self.cached_tokens = 0

    def read(self, line: bytes) -> Piece | None:
        """The new part of one line; `None` if there is none. Raises `UnavailableError` if it is wrong."""
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            return None
        with decoding(self._unreadable):
            return self._read(json.loads(line[5:])["meta_info"])

    def _unreadable(self, cause: str) -> UnavailableError:
        return UnavailableError(f"a message of {self.uid} is not readable ({cause})", answered=True)

    def _read(self, meta: dict[str, Any]) -> Piece:
        entries = meta.get("output_token_logprobs") or []
        total = int(meta.get("completion_tokens", len(entries)))
        fresh = entries[self.seen :] if len(entries) == total else entries
        if self.seen + len(fresh) != total:
            raise UnavailableError(f"tokens of {self.uid} are missing", answered=True)
        self.cached_tokens = int(meta.get("cached_tokens") or 0)
        piece = self._piece(fresh, meta)
        self.seen = total
        return piece

    def _piece(self, fresh: list[Any], meta: dict[str, Any]) -> Piece:
        ids, logprobs = [int(e[1]) for e in fresh], np.array([e[0] for e in fresh], dtype=np.float64)
        if any(not 0 <= token < self._vocabulary for token in ids) or not np.isfinite(logprobs).all():
            raise UnavailableError(
                f"{self.uid} got a token outside the vocabulary or a log-probability that is not finite",
                answered=True,
            )
        spans = meta.get("weight_versions") or []
        versions = [self._version(spans, meta, self.seen + place) for place in range(len(ids))]
        finished = _STATUS.get((meta.get("finish_reason") or {}).get("type", ""))
        self._last = ids[-1] if ids else self._last
        if finished is Status.TRUNCATED and self._last in self._stop_ids:
            finished = Status.COMPLETED
        return Piece(self.uid, self._start + self.seen, ids, logprobs.tolist(), versions, finished)

    def _version(self, spans: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], place: int) -> int:
        name = next(
            (s["version"] for s in spans if s["start"] <= place < s["end"]), meta.get("weight_version")
        )
        if name not in self._versions:
            raise UnavailableError(
                f"{self.uid} was sampled with unknown weights {shown(name)}", answered=True
            )
        return self._versions[str(name)]


_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def chunks_of(pieces: Sequence[Piece], current: int) -> Iterator[Chunk]:
    """`pieces` as one chunk for each version; those of a request that ends without a new token in one of
    version `current`.
    """
    versions = sorted({version for piece in pieces for version in piece.versions})
    ends = {piece.uid: piece.finished for piece in pieces if piece.finished is not None}
    last = {piece.uid: piece.versions[-1] for piece in pieces if piece.versions}
    for version in versions:
        rows = [
            (piece.uid, piece.start + place, piece.token_ids[place], piece.logprobs[place])
            for piece in pieces
            for place, of_token in enumerate(piece.versions)
            if of_token == version
        ]
        uids, positions, token_ids, logprobs = zip(*rows, strict=True)
        yield Chunk(
            list(uids),
            np.array(positions, dtype=np.int32),
            np.array(token_ids, dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
            version,
            {uid: ends.pop(uid) for uid in dict.fromkeys(uids) if uid in ends and last[uid] == version},
        )
    if ends:
        nothing = np.zeros(0, dtype=np.int32)
        yield Chunk([], nothing, nothing, np.zeros(0, dtype=np.float32), current, ends)


NEVER = -1e30
"""Added to the logit of a row of the head that is no token."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the workers serve."""

    vocabulary: int
    """Tokens of the tokenizer: others are never sent or taken."""
    max_sequence: int
    """Prompt plus response tokens of a request."""
    rows: int | None = None
    """Rows of the model's head, if there are more than tokens: those beyond are never sampled."""
    config: Mapping[str, Any] | None = None
    """The student's Hugging Face configuration, to be compared with the workers'."""


class SGLangEngine(Streaming):
    """Implements `opd.protocols.RolloutEngine` on SGLang workers of one model.

    The requests of one session go to one worker, which has their beginning in its prefix cache, unless that
    has much more to do than another; of one prompt the first goes ahead. A request whose worker fails goes on
    with another after the tokens that have arrived. Paused requests give their cache back and
    rebuild it with the new weights; each token knows its version.

    Args:
        options: The workers and limits.
        model: What they serve.
        push: How new weights get there; `None` cannot update weights.
        version: Of the weights they hold now; below 0 if they are to be given the first.
    """

    def __init__(
        self, options: PoolOptions, model: ServedModel, push: Push | None = None, version: int = 0
    ) -> None:
        self._workers = Workers(options, push, version, model.config)
        self._limits = Limits(model.vocabulary, model.max_sequence)
        self._never = {str(token): NEVER for token in range(model.vocabulary, model.rows or 0)}
        self._arrived: queue.SimpleQueue[tuple[object, Piece] | BaseException] = queue.SimpleQueue()
        """Pieces, each with the one of `_left` that it is of."""
        self._left: dict[str, object] = {}
        """What is in flight: a name of its own for each request, whose uid may come again."""
        self._tasks: dict[object, asyncio.Task[None]] = {}
        """Who reads, by that name. The event loop's."""
        self._chunks: Iterator[Chunk] = iter(())
        self._ended: dict[str, Status] = {}
        self._homes = Homes()
        """The event loop's."""
        self.cached_tokens = 0
        """Prompt tokens that workers had in their prefix cache so far."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._workers.version

    @property
    def paused(self) -> bool:
        """Whether sampling is stopped."""
        return self._workers.paused

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Send `requests` to the workers. Raises `RolloutError`, and sends none, if one cannot be served."""
        ended = queue_requests(requests, self._limits, {*self._left, *self._ended}).ended
        self._ended |= ended
        groups: dict[bytes, list[tuple[object, RolloutRequest]]] = {}
        for request in requests:
            if request.uid not in ended:
                name = self._left[request.uid] = object()
                prompt = np.asarray(request.prompt_ids, dtype=np.int32).tobytes()
                groups.setdefault(prompt, []).append((name, request))
        if groups:
            self._workers.loop.start(self._stream_all(list(groups.values())))

    def step(self) -> Chunk | None:
        """What has arrived of one policy version, waiting for the first; `None` if nothing is in flight.

        Raises `RolloutError` when no worker is left, which ends everything in flight, or while paused.
        """
        while (chunk := next(self._chunks, None)) is None:
            if not self._ended and not self._left:
                return None
            pieces = [Piece(uid, 0, [], [], [], status) for uid, status in self._ended.items()]
            self._ended.clear()
            self._chunks = chunks_of(pieces or self._take(), self._workers.version)
        return chunk

    def abort(self, uids: Collection[str]) -> None:
        """Let these go: closing its stream ends a request on its worker."""
        gone = set(uids)
        self._chunks = iter([chunk.without(gone) for chunk in self._chunks])
        names = {name for uid in gone if (name := self._left.pop(uid, None)) is not None}
        self._ended = {uid: status for uid, status in self._ended.items() if uid not in gone}
        if names:
            self._workers.loop.start(self._cancel(names))

    def pause(self) -> None:
        """Stop sampling on every worker; requests in flight stay, without their cache."""
        self._workers.pause()

    def flush(self) -> None:
        """Drop every cached key and value."""
        self._workers.flush()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Push `weights` to every worker, verify what each holds, and return the digest. A worker that is
        away gets them before it works again.

        Raises `RolloutError` if the engine is not paused, `version` does not grow, or a worker holds other
        weights afterwards.
        """
        return self._workers.update_weights(weights, version)

    def resume(self) -> None:
        """Continue sampling."""
        self._workers.resume()

    def sleep(self) -> None:
        """Pause, and have the workers give weights, keys and values and graphs back, until `update_weights`.

        They must be of this engine alone, and end with it: nobody else knows that they sleep. Raises
        `RolloutError` while something is in flight: it would be lost, and the workers with it.
        """
        if self._left or self._ended:
            raise RolloutError("requests are being decoded; the engine can sleep once none is in flight.")
        self._workers.sleep()

    def close(self) -> None:
        """End what is in flight and the connections; the workers go on."""
        self.abort(list(self._left))
        self._workers.close()

    def _take(self) -> list[Piece]:
        """What has arrived, waiting for the first."""
        pieces: list[Piece] = []
        while not pieces or not self._arrived.empty():
            if not pieces and self._workers.paused and self._arrived.empty():
                raise RolloutError("the engine is paused; call resume() before the next chunk.")
            found = self._arrived.get()
            if isinstance(found, BaseException):
                self.abort(list(self._left))
                raise found
            name, piece = found
            if self._left.get(piece.uid) is name:
                pieces.append(piece)
                if piece.finished is not None:
                    del self._left[piece.uid]
        return pieces

    async def _cancel(self, names: set[object]) -> None:
        for name in names:
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()

    async def _stream_all(self, groups: list[list[tuple[object, RolloutRequest]]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(self._stream_group(group))
        except BaseExceptionGroup as errors:
            self._arrived.put(_first_error(errors))

    async def _stream_group(self, group: list[tuple[object, RolloutRequest]]) -> None:
        cached = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for place, (name, request) in enumerate(group):
                if place == 1:
                    await cached.wait()
                if self._left.get(request.uid) is name:
                    task = self._tasks[name] = tasks.create_task(self._stream(name, request, cached))
                    task.add_done_callback(lambda _: cached.set())  # also of one let go before it began
                else:
                    cached.set()

    async def _stream(self, name: object, request: RolloutRequest, cached: asyncio.Event) -> None:
        """One response to its end, on as many workers as it takes."""
        written = [int(token) for token in request.prefix_ids]
        trouble = Trouble()
        try:
            while True:
                try:
                    if await self._attempt(name, request, written, cached):
                        return
                except UnavailableError as failure:
                    self._workers.pool.bear(trouble, failure)
                except RefusedError as refusal:
                    raise RolloutError(f"request {request.uid!r}: {refusal}; check the request.") from None
        finally:
            self._tasks.pop(name, None)

    async def _attempt(
        self, name: object, request: RolloutRequest, written: list[int], cached: asyncio.Event
    ) -> bool:
        """Stream after `written`, which grows; whether the response has ended."""
        pool, body = self._workers.pool, request_body(request, written, self._never)
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        due = self._workers.version
        vocabulary, stops = self._limits.vocab_size, request.sampling.stop_ids
        stream = MessageReader(request.uid, len(written), self._workers.versions, vocabulary, stops)
        most, lines = most_bytes(body), 1024 + 8 * request.sampling.max_new_tokens
        session = request.session or _digest(request)
        async with (
            pool.lease(tokens, [], self._homes.of(session)) as server,
            pool.stream(server, "/generate", body, most, lines) as arriving,
        ):
            self._homes.remember(session, server)
            async for line in arriving:
                piece = stream.read(line)
                if piece is None:
                    continue
                if piece.finished is Status.ABORTED:
                    raise UnavailableError(f"{server.url} aborted {request.uid}", answered=True)
                if min(piece.versions, default=due) < due:
                    # It was started again and nobody noticed: it is given the newest weights before more.
                    raise UnavailableError(f"{server.url} has lost version {due}", answered=True)
                written += piece.token_ids
                self._arrived.put((name, piece))
                cached.set()
                if piece.finished is not None:
                    self.cached_tokens += stream.cached_tokens
                    return True
        raise UnavailableError(f"{server.url} ended the stream of {request.uid} early", answered=False)


class Homes:
    """Which worker has the beginning of a session in its cache: the one that worked on it last."""

    MOST = 65_536
    """Sessions; those that were quiet for longest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Server] = OrderedDict()

    def of(self, session: str) -> Server | None:
        """`None` for one that is not known."""
        return self._known.get(session)

    def remember(self, session: str, server: Server) -> None:
        """`server` works on it."""
        self._known[session] = server
        self._known.move_to_end(session)
        if len(self._known) > self.MOST:
            self._known.popitem(last=False)


def _digest(request: RolloutRequest) -> str:
    """A session of its own for each prompt."""
    prompt = np.asarray(request.prompt_ids, dtype=np.int32).tobytes()
    return hashlib.blake2b(prompt, digest_size=16).hexdigest()


def request_body(
    request: RolloutRequest, written: Sequence[int], never: Mapping[str, float]
) -> dict[str, Any]:
    """What a worker is asked to write after the prompt and `written`; `never`: added to logits by token."""
    sampling = request.sampling
    named = f"{request.seed}/{request.uid}".encode()
    return {
        "input_ids": [*map(int, request.prompt_ids), *written],
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens - len(written),
            "stop_token_ids": list(sampling.stop_ids),
            "sampling_seed": int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "big") >> 1,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **({"logit_bias": dict(never)} if never else {}),
        },
        "return_logprob": True,
        "stream": True,
    }


def _first_error(errors: BaseExceptionGroup) -> BaseException:
    """One error of a group, one for the user before any other."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, OpdError)), flat[0])
