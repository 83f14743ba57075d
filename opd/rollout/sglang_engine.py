"""The served rollout engine: SGLang workers stream tokens with log-probabilities and take new weights."""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import OpdError, RolloutError
from opd.foreign import decoding, shown
from opd.rollout.batch import Limits, queue_requests
from opd.rollout.sglang_workers import Workers
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


class Stream:
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


class SGLangEngine:
    """Implements `opd.protocols.RolloutEngine` on SGLang workers of one model.

    The responses to one prompt go to one worker, the first of them ahead, so that its prefix cache computes
    the prompt once. A request whose worker fails goes on with another after the tokens that have arrived.
    Paused requests give their cache back and rebuild it with the new weights; each token knows its version.

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
        self._active: _Generation | None = None
        self.cached_tokens = 0
        """Prompt tokens that workers had in their prefix cache, in all calls so far."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._workers.version

    @property
    def paused(self) -> bool:
        """Whether sampling is stopped."""
        return self._workers.paused

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """Stream all `requests`; each step holds what has arrived, one token a request.

        Raises `RolloutError` for a request that cannot be served, before anything is sampled, and if an
        earlier call is still in flight. The iterator raises it when no worker is left, or while paused.
        """
        if self._active is not None and self._active.open:
            raise RolloutError(
                "an earlier generate call is still in flight; exhaust or close its iterator before"
                " starting another."
            )
        ended = queue_requests(requests, self._limits).ended
        self._active = _Generation(self, self._workers, list(requests), ended)
        return self._active

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

    def abort(self, uids: Collection[str]) -> None:
        """Stop these requests of the call in flight; a step reports them as aborted."""
        if self._active is not None:
            self._active.abort(uids)

    def close(self) -> None:
        """End the call in flight and the connections; the workers go on."""
        if self._active is not None:
            self._active.close()
        self._workers.close()


class _Generation(Iterator[Chunk]):
    """One call: a stream a request, read in the background, handed out as steps."""

    def __init__(
        self,
        engine: SGLangEngine,
        workers: Workers,
        requests: list[RolloutRequest],
        ended: dict[str, Status],
    ) -> None:
        self._engine, self._workers = engine, workers
        self._arrived: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()
        self._steps: Iterator[Chunk] = chunks_of(
            [Piece(uid, 0, [], [], [], status) for uid, status in ended.items()], workers.version
        )
        waiting = [request for request in requests if request.uid not in ended]
        self._left = {request.uid for request in waiting}
        self._aborted: set[str] = set()
        self.open = True
        self._work = workers.loop.start(self._stream_all(waiting))

    def __next__(self) -> Chunk:
        while self.open:
            step = next(self._steps, None)
            if step is not None:
                return step
            if not self._left:
                self.close()
                break
            self._steps = chunks_of(self._take(), self._workers.version)
        raise StopIteration

    def close(self) -> None:
        """Let the workers go: closing its stream aborts a request there."""
        self.open = False
        self._work.cancel()

    def abort(self, uids: Collection[str]) -> None:
        """These end with what has arrived."""
        for uid in set(uids) & self._left - self._aborted:
            self._aborted.add(uid)
            self._arrived.put(Piece(uid, 0, [], [], [], Status.ABORTED))

    def _take(self) -> list[Piece]:
        """What has arrived, waiting for the first."""
        pieces, first = [], True
        while first or not self._arrived.empty():
            if first and self._workers.paused and self._arrived.empty():
                raise RolloutError("the engine is paused; call resume() before the next chunk.")
            found = self._arrived.get()
            first = False
            if isinstance(found, BaseException):
                self.close()
                raise found
            if found.uid in self._left and (found.uid not in self._aborted or found.finished is not None):
                pieces.append(found)
                if found.finished is not None:
                    self._left.discard(found.uid)
        return pieces

    async def _stream_all(self, requests: list[RolloutRequest]) -> None:
        groups: dict[bytes, list[RolloutRequest]] = {}
        for request in requests:
            groups.setdefault(np.asarray(request.prompt_ids, dtype=np.int32).tobytes(), []).append(request)
        servers = self._workers.pool.servers
        homes = [servers[place % len(servers)] for place in range(len(groups))]
        try:
            async with asyncio.TaskGroup() as tasks:
                for home, group in zip(homes, groups.values(), strict=True):
                    tasks.create_task(self._stream_group(group, home))
        except BaseExceptionGroup as errors:
            self._arrived.put(_first_error(errors))

    async def _stream_group(self, group: list[RolloutRequest], home: Server) -> None:
        cached = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stream(group[0], home, cached))
            if len(group) > 1:
                await cached.wait()
            for request in group[1:]:
                tasks.create_task(self._stream(request, home, cached))

    async def _stream(self, request: RolloutRequest, home: Server, cached: asyncio.Event) -> None:
        """One response to its end, on as many workers as it takes."""
        written = [int(token) for token in request.prefix_ids]
        trouble = Trouble()
        try:
            while True:
                try:
                    if await self._attempt(request, written, home, cached):
                        return
                except UnavailableError as failure:
                    self._workers.pool.bear(trouble, failure)
                except RefusedError as refusal:
                    raise RolloutError(f"request {request.uid!r}: {refusal}; check the request.") from None
        finally:
            cached.set()

    async def _attempt(
        self, request: RolloutRequest, written: list[int], home: Server, cached: asyncio.Event
    ) -> bool:
        """Stream after `written`, which grows; whether the response has ended."""
        pool, body = self._workers.pool, request_body(request, written, self._engine._never)
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        due = self._workers.version
        vocabulary, stops = self._limits_vocabulary, request.sampling.stop_ids
        stream = Stream(request.uid, len(written), self._workers.versions, vocabulary, stops)
        most, lines = most_bytes(body), 1024 + 8 * request.sampling.max_new_tokens
        async with (
            pool.lease(tokens, [], home) as server,
            pool.stream(server, "/generate", body, most, lines) as arriving,
        ):
            async for line in arriving:
                piece = stream.read(line)
                if piece is None:
                    continue
                if request.uid in self._aborted:
                    return True
                if piece.finished is Status.ABORTED:
                    raise UnavailableError(f"{server.url} aborted {request.uid}", answered=True)
                if min(piece.versions, default=due) < due:
                    # It was started again and nobody noticed: it is given the newest weights before more.
                    raise UnavailableError(f"{server.url} has lost version {due}", answered=True)
                written += piece.token_ids
                self._arrived.put(piece)
                cached.set()
                if piece.finished is not None:
                    self._engine.cached_tokens += stream.cached_tokens
                    return True
        raise UnavailableError(f"{server.url} ended the stream of {request.uid} early", answered=False)

    @property
    def _limits_vocabulary(self) -> int:
        return self._engine._limits.vocab_size


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
