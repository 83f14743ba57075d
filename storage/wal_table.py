"""The content of a log of tokens: its frames' payloads, and the requests and tokens that they add up to.

Every payload is a multiple of 8 bytes. A request is known by a number that its `OPEN` frame gives it.
Appending a chunk costs a few vectorised operations. Memory: 12 to 24 bytes a token of every request that has
not been retired (`transcript.py`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from opd.errors import StorageError
from opd.storage.logged_choices import check_choices, encode_choices, mask_counts
from opd.storage.transcript import MisplacedTokenError, Tokens, Transcript
from opd.types import Chunk, ExpertSpan, LoggedRequest, RolloutRequest, SamplingParams, Status


class FrameKind(IntEnum):
    """The kind of a frame's payload."""

    OPEN = 1
    CHUNK = 2
    CLOSE = 3
    RETIRE = 4
    CHOICES = 6
    """Expert choices of the frame of tokens that follows (`logged_choices.py`). 5 is `framed_log.END`."""
    MASKS = 7
    """Sampling masks of the same."""


TOKEN = np.dtype(
    [
        ("request", "<u4"),
        ("position", "<i4"),
        ("token", "<i4"),
        ("logprob", "<f4"),
        ("version", "<i4"),
        ("kept", "<u4"),
    ]
)
"""A token, 24 bytes: request number, position, id, log-probability, version, ids in its mask (0: none)."""
RAW = np.dtype("V24")
"""The same 24 bytes without fields: numpy moves these ten times faster."""
END_OF_REQUEST = np.dtype([("request", "<u4"), ("status", "<u4")])
MAX_NUMBER = (1 << 32) - 2

STATUSES = (Status.PENDING, Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)
STATUS_CODES = {status: code for code, status in enumerate(STATUSES)}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_OPEN = struct.Struct("<IIII")
_CLOSE = struct.Struct("<IIII")
_NO_REASON = 0xFFFF_FFFF


class OpenPayload(NamedTuple):
    number: int
    request: RolloutRequest
    metadata: dict[str, Any]


class ClosePayload(NamedTuple):
    number: int
    status: Status
    reason: str | None


def encode_open(number: int, request: RolloutRequest, metadata: Mapping[str, object]) -> bytes:
    """Encode a request: number and prompt in binary, the rest as JSON. Raises `StorageError` if it cannot."""
    try:
        if all(type(key) is type(value) is str for key, value in metadata.items()):
            metadata_text = _pairs_json(tuple(metadata.items()))  # which the requests of a batch mostly share
        else:
            metadata_text = _JSON.encode(dict(metadata))
        uid, seed = _JSON.encode(request.uid), int(request.seed)
        sampling = _sampling_text(request.sampling)
        text = f'{{"uid":{uid},"seed":{seed},"metadata":{metadata_text},"sampling":{sampling}}}'.encode(
            "ascii"
        )
    except (TypeError, ValueError) as error:
        raise StorageError(
            f"request {request.uid}: its metadata cannot be written as JSON ({error}); give plain values"
        ) from None
    prompt = np.ascontiguousarray(request.prompt_ids, dtype="<i4").tobytes()
    head = _OPEN.pack(number, len(text), len(prompt) // 4, 0)
    return head + _pad_bytes(text) + _pad_bytes(prompt)


@lru_cache(maxsize=64)
def _pairs_json(pairs: tuple[tuple[str, str], ...]) -> str:
    return _JSON.encode(dict(pairs))


@lru_cache(maxsize=64)
def _sampling_text(sampling: SamplingParams) -> str:
    """Return `sampling` as JSON. The requests of a batch share it."""
    return _JSON.encode(
        {
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": int(sampling.top_k),
            "max_new_tokens": int(sampling.max_new_tokens),
            "stop_ids": [int(token) for token in sampling.stop_ids],
        }
    )


def decode_open(payload: memoryview) -> OpenPayload:
    """Decode the result of `encode_open`."""
    number, text_bytes, prompt_tokens, _ = _OPEN.unpack_from(payload)
    prompt_at = _OPEN.size + _round_up(text_bytes)
    document = json.loads(bytes(payload[_OPEN.size : _OPEN.size + text_bytes]))
    prompt = np.frombuffer(payload, dtype="<i4", count=prompt_tokens, offset=prompt_at).astype(np.int32)
    uid, metadata, sampling = document["uid"], document["metadata"], document["sampling"]
    if not isinstance(uid, str) or not isinstance(metadata, dict):
        raise ValueError("a request without a uid or metadata")
    parameters = SamplingParams(
        temperature=float(sampling["temperature"]),
        top_p=float(sampling["top_p"]),
        top_k=int(sampling["top_k"]),
        max_new_tokens=int(sampling["max_new_tokens"]),
        stop_ids=tuple(map(int, sampling["stop_ids"])),
    )
    return OpenPayload(number, RolloutRequest(uid, prompt, parameters, int(document["seed"])), metadata)


def encode_close(number: int, status: Status, reason: str | None) -> bytes:
    """Encode the end of a request outside a chunk, and its reason."""
    text = b"" if reason is None else reason.encode("utf-8", "surrogatepass")
    length = _NO_REASON if reason is None else len(text)
    return _CLOSE.pack(number, STATUS_CODES[status], length, 0) + _pad_bytes(text)


def decode_close(payload: memoryview) -> ClosePayload:
    """Decode the result of `encode_close`."""
    number, code, length, _ = _CLOSE.unpack_from(payload)
    reason = None
    if length != _NO_REASON:
        reason = bytes(payload[_CLOSE.size : _CLOSE.size + length]).decode("utf-8", "surrogatepass")
    return ClosePayload(number, STATUSES[code], reason)


def encode_retire(numbers: list[int]) -> bytes:
    """Encode the numbers of requests that the log may forget. An odd count repeats the last."""
    even = numbers + numbers[-1:] * (len(numbers) % 2)
    return np.array(even, dtype="<u4").tobytes()


def decode_retire(payload: memoryview) -> list[int]:
    """Decode the result of `encode_retire`, perhaps with the last number twice."""
    return np.frombuffer(payload, dtype="<u4").tolist()


def _round_up(length: int) -> int:
    return -(-length // 8) * 8


def _pad_bytes(data: bytes) -> bytes:
    return data.ljust(_round_up(len(data)), b"\0")


@dataclass(slots=True)
class RequestEntry:
    """One request that has not been retired, without its tokens."""

    number: int
    request: RolloutRequest
    metadata: dict[str, Any]
    status: Status = Status.PENDING
    failure: str | None = None


class RequestTable:
    """Requests by uid and by number, with their tokens. Not safe for several threads: its owner locks."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.by_uid: dict[str, RequestEntry] = {}
        """Requests that have not been retired, in the order in which they were opened."""
        self._by_number: dict[int, RequestEntry] = {}
        self.next_number = 0
        self._prompt_bytes = 0

    @property
    def live_bytes(self) -> int:
        """About the bytes of a snapshot of the table."""
        tokens = self.transcript.token_count() * TOKEN.itemsize + self.transcript.recorded_bytes()
        return tokens + self._prompt_bytes + 512 * len(self.by_uid)

    def open(self, openings: Sequence[OpenPayload]) -> None:
        """Add requests without tokens. Raises `StorageError` if a uid exists already."""
        for number, request, metadata in openings:
            uid = request.uid
            if uid in self.by_uid:
                raise StorageError(f"request {uid} is in the log already; continue it, or retire it first")
            if number in self._by_number or number > MAX_NUMBER:
                raise StorageError(
                    f"request {uid} has a number that is taken; the log is of a faulty program"
                )
            self.by_uid[uid] = self._by_number[number] = RequestEntry(number, request, metadata)
            self.next_number = max(self.next_number, number + 1)
            self._prompt_bytes += request.prompt_ids.nbytes
        self.transcript.add_requests({opening.request.uid: Tokens.empty() for opening in openings})

    def close(self, closing: ClosePayload) -> None:
        """End a request. A retired one is ignored."""
        entry = self._by_number.get(closing.number)
        if entry is not None:
            entry.status, entry.failure = closing.status, closing.reason

    def retire(self, numbers: Iterable[int]) -> None:
        """Forget requests. Unknown ones are ignored."""
        entries = [self._by_number[n] for n in dict.fromkeys(numbers) if n in self._by_number]
        for entry in entries:
            del self.by_uid[entry.request.uid], self._by_number[entry.number]
            self._prompt_bytes -= entry.request.prompt_ids.nbytes
        self.transcript.drop_requests([entry.request.uid for entry in entries])

    def add_read(
        self, records: np.ndarray, choices: np.ndarray | None = None, masks: np.ndarray | None = None
    ) -> None:
        """Add `[B]` of `TOKEN` read from a file, of any requests, with their expert `choices` [B, L, K] and
        sampling `masks` [B] object. Tokens of retired ones are ignored. Raises `StorageError` if positions do
        not follow on.
        """
        order = np.argsort(records["request"], kind="stable")
        records = records.view(RAW)[order].view(TOKEN)
        ids = records["token"].astype(np.int32)
        logprobs, versions = records["logprob"].astype(np.float32), records["version"].astype(np.int32)
        choices, masks = (None if one is None else one[order] for one in (choices, masks))
        tokens = Tokens(ids, logprobs, versions, choices, sampling_masks=masks)
        starts = np.flatnonzero(np.diff(records["request"], prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(records)]):
            entry = self._by_number.get(int(records["request"][start]))
            if entry is None:
                continue
            uid, rows = entry.request.uid, slice(start, stop)
            if (
                records["position"][rows] - self.transcript.next_position(uid) != np.arange(stop - start)
            ).any():
                raise StorageError(
                    "the log's tokens do not follow on one another; it was written by a faulty program"
                )
            self.transcript.extend_request(uid, tokens.select_rows(rows))

    def add_spans(self, spans: Iterable[tuple[int, ExpertSpan]]) -> None:
        """Add expert choices of requests, by number. Those of retired ones are ignored."""
        for number, span in spans:
            if (entry := self._by_number.get(number)) is not None:
                self.transcript.add_spans(entry.request.uid, (span,))

    def token_records(self, uid: str) -> np.ndarray:
        """Return [R] of `TOKEN`: the tokens of a request in the file's form."""
        tokens = self.transcript.request_tokens(uid)
        records = np.zeros(len(tokens), TOKEN)
        records["request"], records["position"] = self.by_uid[uid].number, np.arange(len(tokens))
        records["token"], records["logprob"], records["version"] = tokens.columns
        if tokens.sampling_masks is not None:
            records["kept"] = mask_counts(tokens.sampling_masks)
        return records

    def requests(self) -> dict[str, LoggedRequest]:
        """Return the state of every request, by uid."""
        return {uid: logged for uid in self.by_uid if (logged := self.find(uid)) is not None}

    def find(self, uid: str) -> LoggedRequest | None:
        """Return the state of a request. Later tokens do not change it."""
        entry = self.by_uid.get(uid)
        if entry is None:
            return None
        tokens = self.transcript.request_tokens(uid)
        return LoggedRequest(
            entry.request,
            entry.metadata,
            *tokens.columns,
            status=entry.status,
            failure=entry.failure,
            expert_choices=tokens.expert_choices,
            expert_spans=tokens.expert_spans,
            sampling_masks=tokens.sampling_masks,
        )


class ChunkEncoder:
    """Checks chunks against a table, and encodes those that continue it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._uids: list[str] | None = None
        self._template = np.zeros(0, TOKEN)
        """[B]: the shared part of chunks of the requests `_uids`."""

    def reset_template(self) -> None:
        """Forget the template, because a request was opened, ended or retired."""
        self._uids = None

    def chunk_records(self, chunk: Chunk) -> np.ndarray:
        """Make `[B]` of `TOKEN`: a chunk in the file's form. Raises `StorageError` if it cannot follow."""
        for name in ("positions", "token_ids", "logprobs"):
            count = len(getattr(chunk, name))
            if count != len(chunk.uids):
                raise StorageError(
                    f"a chunk has {len(chunk.uids)} requests and {count} {name}; give one each"
                )
        if not 0 <= chunk.policy_version < 1 << 31:
            raise StorageError(
                f"policy version {chunk.policy_version} does not fit into the log; use 0 to 2147483647"
            )
        if chunk.uids != self._uids:
            numbers = list(map(self.open_number, chunk.uids))
            self._uids, self._template = list(chunk.uids), np.zeros(len(numbers), TOKEN)
            self._template["request"] = numbers
        try:
            self._table.transcript.check(chunk)
        except MisplacedTokenError as wrong:
            if wrong.due is None:
                raise StorageError(f"request {wrong.uid} is not in the log; open it first") from None
            raise StorageError(
                f"request {wrong.uid} has {wrong.due} tokens in the log and was given one for position"
                f" {wrong.position}; positions must follow on"
            ) from None
        records = self._template.copy()
        records["position"], records["token"] = chunk.positions, chunk.token_ids
        records["logprob"], records["version"] = chunk.logprobs, chunk.policy_version
        if chunk.sampling_masks is not None:
            records["kept"] = mask_counts(chunk.sampling_masks)
        return records

    def chunk_closings(self, chunk: Chunk) -> list[ClosePayload]:
        """Return the ends of requests that the chunk finishes. `StorageError` for an impossible one."""
        for uid, status in chunk.finished.items():
            if Status(status) is Status.PENDING:
                raise StorageError(f"request {uid} cannot end as pending; say how it ended")
        return [
            ClosePayload(self.open_number(uid), Status(status), None)
            for uid, status in chunk.finished.items()
        ]

    def chunk_choices(self, chunk: Chunk, payload: bytes) -> list[bytes]:
        """Return the payloads of the expert choices of a chunk, whose tokens are encoded as `payload`."""
        check_choices(chunk)
        spans = [(self.open_number(uid), span) for uid, span in chunk.expert_spans]
        return list(encode_choices(payload, chunk.expert_choices, spans))

    def open_number(self, uid: str) -> int:
        """Return the number of a request that may still take tokens."""
        entry = self._table.by_uid.get(uid)
        if entry is None:
            raise StorageError(f"request {uid} is not in the log; open it first")
        if entry.status is not Status.PENDING:
            raise StorageError(f"request {uid} has ended and takes no more tokens")
        return entry.number


def encode_chunk(records: np.ndarray, closings: Sequence[ClosePayload]) -> bytes:
    """Encode the tokens `[B]` of `TOKEN` of a chunk and the requests it ends."""
    ends = [(closing.number, STATUS_CODES[closing.status]) for closing in closings]
    return records.tobytes() + np.array(ends, dtype=END_OF_REQUEST).tobytes()
