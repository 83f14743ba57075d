"""What the messages of a server's stream say of a response, and chunks of it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.foreign import decoding, shown
from opd.served.http_client import RETRIED, RefusedError, UnavailableError
from opd.types import Chunk, Status


@dataclass(frozen=True, slots=True)
class MessagePart:
    """What one message of a stream brought of one request."""

    uid: str
    start: int
    """Response position of its first token."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finished: Status | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What one message says of a response."""

    entries: Sequence[tuple[Any, Any]]
    """Log-probability and token id of each new token."""
    finished: str | None
    """Why it has ended, in the servers' word; `None` if it goes on."""
    weights: Callable[[int], Any]
    """What the server calls the weights that sampled the token at a place of this attempt."""


class MessageReader(ABC):
    """Reads the messages of one request: tokens in groups, of one or several versions."""

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
        self.weights: str | None = None
        """Of the whole attempt, where messages do not say it of each token."""
        self.base: str | None = None
        """What messages call the weights, where those of the attempt are adapters on them."""

    def read(self, line: bytes) -> MessagePart | None:
        """The new part of one line; `None` if there is none. Raises `UnavailableError` if it is wrong, and
        `RefusedError` for what no later attempt changes.
        """
        if not is_message(line):
            return None
        with decoding(self._unreadable):
            told = self._told(json.loads(line[5:]))
            return None if told is None else self._piece(told)

    @abstractmethod
    def _told(self, message: Any) -> Told | None:
        """What a message says; `None` if it is about nothing that is written. May raise what `decoding`
        decodes, `UnavailableError` and `RefusedError`.
        """

    def _refuse_error(self, message: Any) -> None:
        """`UnavailableError` for a message that says what went wrong, `RefusedError` where it says by the
        status that asking again changes nothing.
        """
        if "error" not in message:
            return
        error, said = message["error"], f"the server says {shown(message['error'], 300)}"
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500 and code not in RETRIED:
            raise RefusedError(said, code)
        raise UnavailableError(f"{self.uid}: {said}", answered=True)

    def _unreadable(self, cause: str) -> UnavailableError:
        return UnavailableError(f"a message of {self.uid} is not readable ({cause})", answered=True)

    def _piece(self, told: Told) -> MessagePart:
        ids = [int(token) for _, token in told.entries]
        logprobs = np.array([value for value, _ in told.entries], dtype=np.float64)
        if any(not 0 <= token < self._vocabulary for token in ids) or not np.isfinite(logprobs).all():
            raise UnavailableError(
                f"{self.uid} got a token outside the vocabulary or a log-probability that is not finite",
                answered=True,
            )
        versions = [self._version(told.weights(self.seen + place)) for place in range(len(ids))]
        finished = _STATUS.get(told.finished or "")
        self._last = ids[-1] if ids else self._last
        if finished is Status.TRUNCATED and self._last in self._stop_ids:
            finished = Status.COMPLETED
        piece = MessagePart(self.uid, self._start + self.seen, ids, logprobs.tolist(), versions, finished)
        self.seen += len(ids)
        return piece

    def _version(self, name: Any) -> int:
        if name not in self._versions:
            raise UnavailableError(
                f"{self.uid} was sampled with unknown weights {shown(name)}", answered=True
            )
        return self._versions[str(name)]


def is_message(line: bytes) -> bool:
    """Whether a line of a stream is one that says something."""
    return line.startswith(b"data:") and line[5:].strip() != b"[DONE]"


_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def chunks_of(pieces: Sequence[MessagePart], current: int) -> Iterator[Chunk]:
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
