"""The messages of a server's stream, read into parts of a response and chunks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.served.http_client import RETRIED, RefusedError, UnavailableError
from opd.types import Chunk, ExpertSpan, Status
from opd.untrusted import convert_decode_errors, safe_excerpt


@dataclass(frozen=True, slots=True)
class MessagePart:
    """The tokens of one request in one message of a stream."""

    uid: str
    start: int
    """Response position of its first token."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finished: Status | None = None
    experts: Any = None
    """Expert choices of the response as the server gives them, with its last tokens."""
    span: ExpertSpan | None = None
    """The same, read."""


@dataclass(frozen=True, slots=True)
class MessageContent:
    entries: Sequence[tuple[Any, Any]]
    """Log-probability and token id of each new token."""
    finished: str | None
    """The servers' word for why it has ended, or None if it goes on."""
    weights: Callable[[int], Any]
    """Returns the server's name of the weights that sampled the token at an index of this attempt."""
    experts: Any = None
    """Expert choices, if the message has them."""


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
        """`stop_ids` complete a response, even at its maximal length, which servers report as "length"."""
        self.uid, self._start, self._versions, self._vocabulary = uid, start, versions, vocabulary
        self._stop_ids, self._last = stop_ids, -1
        self.seen = 0
        """Tokens of this attempt so far."""
        self.cached_tokens = 0
        self.weights: str | None = None
        """Name of the weights of the attempt, if messages do not name them for each token."""
        self.base: str | None = None
        """The messages' name for the base, if the attempt's weights are adapters on it."""

    def read(self, line: bytes) -> MessagePart | None:
        """Return the new part in one line, or None if there is none. Raises `UnavailableError` if the line is
        wrong, and `RefusedError` for an error that no later attempt changes.
        """
        if not is_message(line):
            return None
        with convert_decode_errors(self._unreadable_error):
            content = self._parse_message(json.loads(line[5:]))
            return None if content is None else self._read_tokens(content)

    @abstractmethod
    def _parse_message(self, message: object) -> MessageContent | None:
        """Read a message, or return None if it is about no tokens. May raise any error that
        `convert_decode_errors` handles, `UnavailableError` and `RefusedError`.
        """

    def _refuse_error(self, message: Any) -> None:
        """Raise `UnavailableError` for a message that reports an error. Raise `RefusedError` if its status
        says that a retry changes nothing.
        """
        if "error" not in message:
            return
        error, reason = message["error"], f"the server says {safe_excerpt(message['error'], 300)}"
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500 and code not in RETRIED:
            raise RefusedError(reason, code)
        raise UnavailableError(f"{self.uid}: {reason}", answered=True)

    def _unreadable_error(self, cause: str) -> UnavailableError:
        return UnavailableError(f"a message of {self.uid} is not readable ({cause})", answered=True)

    def _read_tokens(self, content: MessageContent) -> MessagePart:
        ids = [int(token) for _, token in content.entries]
        logprobs = np.array([value for value, _ in content.entries], dtype=np.float64)
        if any(not 0 <= token < self._vocabulary for token in ids) or not np.isfinite(logprobs).all():
            raise UnavailableError(
                f"{self.uid} got a token outside the vocabulary or a log-probability that is not finite",
                answered=True,
            )
        versions = [self._lookup_version(content.weights(self.seen + index)) for index in range(len(ids))]
        finished = _STATUS.get(content.finished or "")
        self._last = ids[-1] if ids else self._last
        if finished is Status.TRUNCATED and self._last in self._stop_ids:
            finished = Status.COMPLETED
        start, values = self._start + self.seen, logprobs.tolist()
        piece = MessagePart(self.uid, start, ids, values, versions, finished, content.experts)
        self.seen += len(ids)
        return piece

    def _lookup_version(self, name: Any) -> int:
        if name not in self._versions:
            raise UnavailableError(
                f"{self.uid} was sampled with unknown weights {safe_excerpt(name)}", answered=True
            )
        return self._versions[str(name)]


def is_message(line: bytes) -> bool:
    """Return True if a line of a stream holds a message."""
    return line.startswith(b"data:") and line[5:].strip() != b"[DONE]"


_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def chunks_of(pieces: Sequence[MessagePart], current: int) -> Iterator[Chunk]:
    """Yield `pieces` as one chunk for each version. Requests that end without a new token are in one of
    version `current`.
    """
    versions = sorted({version for piece in pieces for version in piece.versions})
    ends = {piece.uid: piece.finished for piece in pieces if piece.finished is not None}
    last = {piece.uid: piece.versions[-1] for piece in pieces if piece.versions}
    spans = {piece.uid: piece.span for piece in pieces if piece.span is not None}
    for version in versions:
        rows = [
            (piece.uid, piece.start + index, piece.token_ids[index], piece.logprobs[index])
            for piece in pieces
            for index, of_token in enumerate(piece.versions)
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
            expert_spans=[
                (uid, spans.pop(uid)) for uid in dict.fromkeys(uids) if uid in spans and last[uid] == version
            ],
        )
    if ends or spans:
        nothing = np.zeros(0, dtype=np.int32)
        left = list(spans.items())
        yield Chunk([], nothing, nothing, np.zeros(0, dtype=np.float32), current, ends, expert_spans=left)
