"""Responses that servers stream, request by request, as the decode steps of an engine."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.foreign import decoding, shown
from opd.served.http_client import UnavailableError
from opd.types import DecodeStep, Status


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


def decode_steps(pieces: Sequence[Piece], current: int) -> Iterator[DecodeStep]:
    """`pieces` as steps of at most one token a request and one version each, in the order of every request's
    own tokens. A request that ends without a new token ends in a step of version `current` without tokens.
    """
    waiting: dict[str, deque[tuple[Piece, int]]] = {}
    for piece in pieces:
        places = waiting.setdefault(piece.uid, deque())
        places.extend((piece, place) for place in range(len(piece.token_ids)))
    ends = {piece.uid: piece.finished for piece in pieces if piece.finished is not None}
    while any(waiting.values()):
        heads = [places[0] for places in waiting.values() if places]
        version = min(piece.versions[place] for piece, place in heads)
        chosen = [(piece, place) for piece, place in heads if piece.versions[place] == version]
        for piece, _ in chosen:
            waiting[piece.uid].popleft()
        uids = [piece.uid for piece, _ in chosen]
        done = {uid: ends.pop(uid) for uid in uids if uid in ends and not waiting[uid]}
        yield _step(uids, chosen, version, done)
    if ends:
        yield _step([], [], current, ends)


def _step(
    uids: list[str], chosen: list[tuple[Piece, int]], version: int, finished: dict[str, Status]
) -> DecodeStep:
    return DecodeStep(
        uids,
        np.array([piece.start + place for piece, place in chosen], dtype=np.int32),
        np.array([piece.token_ids[place] for piece, place in chosen], dtype=np.int32),
        np.array([piece.logprobs[place] for piece, place in chosen], dtype=np.float32),
        version,
        finished,
    )
