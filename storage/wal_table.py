"""What a log of tokens says: the payloads of its frames, and the requests and tokens that they add up to.

Every payload is a multiple of 8 bytes. A request is known by a number that its `OPEN` frame gives it.
Appending a chunk costs a few vectorised operations; the tokens are sorted by request only when someone
asks for them. Memory: 24 bytes a token of every request that has not been retired.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from opd.errors import StorageError
from opd.types import Chunk, LoggedRequest, RolloutRequest, SamplingParams, Status


class FrameKind(IntEnum):
    """What a frame's payload holds."""

    OPEN = 1
    STEP = 2
    CLOSE = 3
    RETIRE = 4


TOKEN = np.dtype(
    [
        ("request", "<u4"),
        ("position", "<i4"),
        ("token", "<i4"),
        ("logprob", "<f4"),
        ("version", "<i4"),
        ("flags", "<u4"),
    ]
)
"""One token, 24 bytes: its request's number, position in the response, id, log-probability, version and
flags, of which none has a meaning."""
RAW = np.dtype("V24")
"""The same 24 bytes without fields: numpy moves these ten times faster."""
WORDS = TOKEN.itemsize // 4
"""Every field is one 32-bit word; `[B, WORDS]` of `<i4` are the same bytes without a view's checks."""
END_OF_REQUEST = np.dtype([("request", "<u4"), ("status", "<u4")])
MAX_NUMBER = (1 << 32) - 2

STATUSES = (Status.PENDING, Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)
STATUS_CODES = {status: code for code, status in enumerate(STATUSES)}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_OPEN = struct.Struct("<IIII")
_CLOSE = struct.Struct("<IIII")
_NO_REASON = 0xFFFF_FFFF


class Opening(NamedTuple):
    """The content of an `OPEN` frame."""

    number: int
    request: RolloutRequest
    metadata: dict[str, Any]


class Closing(NamedTuple):
    """The content of a `CLOSE` frame."""

    number: int
    status: Status
    reason: str | None


def encode_open(number: int, request: RolloutRequest, metadata: Mapping[str, Any]) -> bytes:
    """Number and prompt of a request in binary, the rest as JSON. Raises `StorageError` for what JSON cannot
    hold.
    """
    try:
        own = f'"uid":{_JSON.encode(request.uid)},"seed":{int(request.seed)},"metadata":{_document(metadata)}'
        text = f'{{{own},"sampling":{_sampling_text(request.sampling)}}}'.encode("ascii")
    except (TypeError, ValueError) as error:
        raise StorageError(
            f"request {request.uid}: its metadata cannot be written as JSON ({error}); give plain values"
        ) from None
    prompt = np.ascontiguousarray(request.prompt_ids, dtype="<i4").tobytes()
    head = _OPEN.pack(number, len(text), len(prompt) // 4, 0)
    return head + _padded(text) + _padded(prompt)


def _document(metadata: Mapping[str, Any]) -> str:
    """As JSON; mostly the requests of a batch share it."""
    if all(type(key) is type(value) is str for key, value in metadata.items()):
        return _words(tuple(metadata.items()))
    return _JSON.encode(dict(metadata))


@lru_cache(maxsize=64)
def _words(pairs: tuple[tuple[str, str], ...]) -> str:
    return _JSON.encode(dict(pairs))


@lru_cache(maxsize=64)
def _sampling_text(sampling: SamplingParams) -> str:
    """As JSON; the requests of a batch share it."""
    return _JSON.encode(
        {
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": int(sampling.top_k),
            "max_new_tokens": int(sampling.max_new_tokens),
            "stop_ids": [int(token) for token in sampling.stop_ids],
        }
    )


def decode_open(payload: memoryview) -> Opening:
    """What `encode_open` wrote."""
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
    return Opening(number, RolloutRequest(uid, prompt, parameters, int(document["seed"])), metadata)


def encode_close(number: int, status: Status, reason: str | None) -> bytes:
    """How a request ended outside a chunk, and why."""
    text = b"" if reason is None else reason.encode("utf-8", "surrogatepass")
    length = _NO_REASON if reason is None else len(text)
    return _CLOSE.pack(number, STATUS_CODES[status], length, 0) + _padded(text)


def decode_close(payload: memoryview) -> Closing:
    """What `encode_close` wrote."""
    number, code, length, _ = _CLOSE.unpack_from(payload)
    reason = None
    if length != _NO_REASON:
        reason = bytes(payload[_CLOSE.size : _CLOSE.size + length]).decode("utf-8", "surrogatepass")
    return Closing(number, STATUSES[code], reason)


def encode_retire(numbers: list[int]) -> bytes:
    """The numbers of requests that the log may forget; an odd count is filled up by repeating the last."""
    even = numbers + numbers[-1:] * (len(numbers) % 2)
    return np.array(even, dtype="<u4").tobytes()


def decode_retire(payload: memoryview) -> list[int]:
    """What `encode_retire` wrote, perhaps with the last number twice."""
    return np.frombuffer(payload, dtype="<u4").tolist()


def _round_up(length: int) -> int:
    return -(-length // 8) * 8


def _padded(data: bytes) -> bytes:
    return data.ljust(_round_up(len(data)), b"\0")


_SORT_AT = 1 << 18


@dataclass(slots=True)
class Entry:
    """One request that has not been retired."""

    number: int
    slot: int
    request: RolloutRequest
    metadata: dict[str, Any]
    status: Status = Status.PENDING
    failure: str | None = None
    chunks: list[np.ndarray] = field(default_factory=list)
    """Arrays of `TOKEN`, in order of position, without those that are still unsorted in the table."""

    def records(self) -> np.ndarray:
        """[R] of `TOKEN`: everything sorted so far."""
        if len(self.chunks) != 1:
            self.chunks = [_join(self.chunks)]
        return self.chunks[0]


class RequestTable:
    """Requests by uid and by number. Not safe for several threads: its owner locks."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._slots: list[Entry | None] = []
        self._free: list[int] = []
        self.lengths = np.zeros(64, dtype=np.int64)
        """[slots]: tokens of each request, sorted or not."""
        self.numbers = np.zeros(64, dtype=np.uint32)
        self.is_open = np.zeros(64, dtype=bool)
        self._sorted = np.zeros(64, dtype=np.int64)
        self._unsorted: list[np.ndarray] = []
        self._unsorted_tokens = 0
        self.next_number = 0
        self.prompt_bytes = 0

    def __len__(self) -> int:
        return len(self._by_uid)

    def __contains__(self, uid: str) -> bool:
        return uid in self._by_uid

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_uid)

    def entry(self, uid: str) -> Entry | None:
        return self._by_uid.get(uid)

    def slot(self, uid: str) -> int | None:
        entry = self._by_uid.get(uid)
        return None if entry is None else entry.slot

    @property
    def live_bytes(self) -> int:
        """About what a snapshot of the table takes."""
        return int(self.lengths.sum()) * TOKEN.itemsize + self.prompt_bytes + 512 * len(self._by_uid)

    def open(self, opening: Opening) -> None:
        """Add a request without tokens. Raises `StorageError` if its uid is there already."""
        uid = opening.request.uid
        if uid in self._by_uid:
            raise StorageError(f"request {uid} is in the log already; continue it, or retire it first")
        if opening.number in self._by_number or opening.number > MAX_NUMBER:
            raise StorageError(f"request {uid} has a number that is taken; the log is of a faulty program")
        slot = self._free.pop() if self._free else self._new_slot()
        entry = Entry(opening.number, slot, opening.request, opening.metadata)
        self._by_uid[uid] = self._by_number[opening.number] = self._slots[slot] = entry
        self.lengths[slot] = self._sorted[slot] = 0
        self.numbers[slot] = opening.number
        self.is_open[slot] = True
        self.next_number = max(self.next_number, opening.number + 1)
        self.prompt_bytes += opening.request.prompt_ids.nbytes

    def close(self, closing: Closing) -> None:
        """End a request; one that has been retired is passed over."""
        entry = self._by_number.get(closing.number)
        if entry is not None:
            entry.status, entry.failure = closing.status, closing.reason
            self.is_open[entry.slot] = False

    def retire(self, numbers: Iterable[int]) -> None:
        """Forget requests; those not there are passed over."""
        entries = [self._by_number[n] for n in dict.fromkeys(numbers) if n in self._by_number]
        if len(entries) == len(self._by_number):
            self._unsorted, self._unsorted_tokens = [], 0
        elif entries:
            self.sort()  # or the tokens of the forgotten would wait in memory
        for entry in entries:
            del self._by_uid[entry.request.uid], self._by_number[entry.number]
            self._slots[entry.slot] = None
            self._free.append(entry.slot)
            self.lengths[entry.slot] = self._sorted[entry.slot] = 0
            self.is_open[entry.slot] = False
            self.prompt_bytes -= entry.request.prompt_ids.nbytes

    def add(self, records: np.ndarray) -> None:
        """Take over `[B]` of `TOKEN`, or the same as `[B, WORDS]`; the caller keeps `lengths` right."""
        self._unsorted.append(records)
        self._unsorted_tokens += len(records)
        if self._unsorted_tokens >= _SORT_AT:
            self.sort()

    def add_read(self, records: np.ndarray) -> None:
        """Take over `[B]` of `TOKEN` read from a file, and count them."""
        self.add(records)
        self.sort()
        self.lengths[: len(self._slots)] = self._sorted[: len(self._slots)]

    def find(self, uid: str) -> LoggedRequest | None:
        """All that is known of a request, in arrays of its own."""
        entry = self._by_uid.get(uid)
        if entry is None:
            return None
        self.sort()
        records = entry.records()
        return LoggedRequest(
            request=entry.request,
            metadata=entry.metadata,
            token_ids=records["token"].astype(np.int32),
            logprobs=records["logprob"].astype(np.float32),
            policy_versions=records["version"].astype(np.int32),
            status=entry.status,
            failure=entry.failure,
        )

    def sort(self) -> None:
        """Give every waiting token to its request. Raises `StorageError` if positions do not follow on."""
        if not self._unsorted:
            return
        records = _join(self._unsorted)
        self._unsorted, self._unsorted_tokens = [], 0
        slots = self._slots_of(records["request"])
        if (slots < 0).any():  # retired in the meantime
            records, slots = records.view(RAW)[slots >= 0].view(TOKEN), slots[slots >= 0]
        counts = np.bincount(slots, minlength=len(self._slots))
        starts = np.concatenate([[0], np.cumsum(counts)])
        offset = records["position"] - self._sorted[slots]
        if ((offset < 0) | (offset >= counts[slots])).any():
            raise StorageError(
                "the log's tokens do not follow on one another; it was written by a faulty program"
            )
        in_order = np.empty(len(records), TOKEN)
        in_order["position"] = -1
        in_order.view(RAW)[starts[slots] + offset] = records.view(RAW)
        if (in_order["position"] < 0).any():
            raise StorageError("the log holds a token twice; it was written by a faulty program")
        for slot in np.flatnonzero(counts).tolist():
            entry = self._slots[slot]
            assert entry is not None
            entry.chunks.append(_join([in_order[starts[slot] : starts[slot + 1]]]))
        self._sorted[: len(counts)] += counts

    def _slots_of(self, numbers: np.ndarray) -> np.ndarray:
        """[B] int64: the slot of each request number, -1 if there is no such request."""
        if not len(numbers) or not self._by_number:
            return np.full(len(numbers), -1, dtype=np.int64)
        known = np.array(sorted(self._by_number), dtype=np.uint32)
        slots = np.array([self._by_number[n].slot for n in known.tolist()], dtype=np.int64)
        low, high = int(known[0]), int(known[-1])
        if high - low > 16 * len(numbers) + 65536:
            at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
            return np.where(known[at] == numbers, slots[at], -1)
        dense = np.full(high - low + 2, -1, dtype=np.int64)
        dense[known - low] = slots
        inside = (numbers >= low) & (numbers <= high)
        return dense[np.where(inside, numbers.astype(np.int64) - low, -1)]

    def _new_slot(self) -> int:
        slot = len(self._slots)
        self._slots.append(None)
        if slot == len(self.lengths):
            for name in ("lengths", "numbers", "is_open", "_sorted"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        return slot


def _join(chunks: list[np.ndarray]) -> np.ndarray:
    """One array of its own with the `TOKEN` records of all `chunks`."""
    if not chunks:
        return np.empty(0, TOKEN)
    return np.concatenate([chunk.view(RAW).reshape(-1) for chunk in chunks]).view(TOKEN)


_REQUEST, _POSITION, _TOKEN, _LOGPROB, _VERSION, _FLAGS = range(WORDS)


class StepFrame(NamedTuple):
    """One chunk, checked and in the form in which it is stored."""

    records: np.ndarray
    """[B, WORDS] of `<i4`: the bytes of `[B]` of `TOKEN`."""
    closings: list[Closing]

    @property
    def payload(self) -> bytes:
        if not self.closings:
            return self.records.tobytes()
        ends = [(closing.number, STATUS_CODES[closing.status]) for closing in self.closings]
        return self.records.tobytes() + np.array(ends, dtype=END_OF_REQUEST).tobytes()


class StepEncoder:
    """Checks chunks against a table. Consecutive ones mostly name the same requests: those are looked
    up once.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._uids: list[str] | None = None
        self._slots = np.zeros(0, dtype=np.int64)
        self._template = np.zeros((0, WORDS), dtype="<i4")
        """[B, WORDS]: what one chunk of the same requests shares with the next."""
        self._version = 0
        """The policy version in `template`."""
        self._expected = np.zeros(0, dtype=np.int32)
        """[B]: the position at which each of the requests goes on."""
        self._written = 0
        """Chunks of these requests that the table's lengths do not count yet."""
        self._several = False
        """Whether the newest chunk holds several tokens of a request."""

    def forget(self) -> None:
        """A request is to be opened, ended or retired: count what was written, look everything up again."""
        if self._written:
            self._table.lengths[self._slots] += self._written
            self._written = 0
        self._uids = None

    def wrote_step(self) -> None:
        """The newest chunk is in the log."""
        if self._several:
            np.add.at(self._table.lengths, self._slots, 1)
            self._uids = None
        else:
            self._expected += 1
            self._written += 1

    def step(self, step: Chunk) -> StepFrame:
        """Check and encode a chunk. Raises `StorageError` if it does not continue the log."""
        if not len(step.positions) == len(step.token_ids) == len(step.logprobs) == len(step.uids):
            _refuse_shape(step)
        if step.uids != self._uids:
            self._look_up(step.uids)
        if step.policy_version != self._version:
            self._version = self._checked_version(step.policy_version)
            self._template[:, _VERSION] = self._version
        if step.positions.tobytes() != self._expected.tobytes():
            self._check_positions(step)
        records = self._template.copy()
        records[:, _POSITION] = step.positions
        records[:, _TOKEN] = step.token_ids
        records.view("<f4")[:, _LOGPROB] = step.logprobs
        closings = [self._closing(uid, status) for uid, status in step.finished.items()]
        return StepFrame(records, closings)

    @staticmethod
    def _checked_version(version: int) -> int:
        if not 0 <= version < 1 << 31:
            raise StorageError(f"policy version {version} does not fit into the log; use 0 to 2147483647")
        return version

    def open_number(self, uid: str) -> int:
        """The number of a request that may still take tokens."""
        return int(self._table.numbers[self._open_slot(uid)])

    def _closing(self, uid: str, status: Status) -> Closing:
        if Status(status) is Status.PENDING:
            raise StorageError(f"request {uid} cannot end as pending; say how it ended")
        return Closing(self.open_number(uid), Status(status), None)

    def _look_up(self, uids: list[str]) -> None:
        self.forget()
        entries = list(map(self._table.entry, uids))
        slots = np.fromiter((-1 if entry is None else entry.slot for entry in entries), np.int64, len(uids))
        if (slots < 0).any() or not self._table.is_open[slots].all():
            for uid in uids:
                self._open_slot(uid)  # says which one, and why
        template = np.zeros((len(uids), WORDS), dtype="<i4")
        template[:, _REQUEST] = self._table.numbers[slots].view(np.int32)
        self._uids, self._slots, self._template, self._version = list(uids), slots, template, 0
        self._expected = self._table.lengths[slots].astype(np.int32)
        self._several = len(set(uids)) != len(uids)
        if self._several:
            order = np.argsort(slots, kind="stable")
            first = np.searchsorted(slots[order], slots[order])
            self._expected[order] += (np.arange(len(order)) - first).astype(np.int32)

    def _open_slot(self, uid: str) -> int:
        slot = self._table.slot(uid)
        if slot is None:
            raise StorageError(f"request {uid} is not in the log; open it first")
        if not self._table.is_open[slot]:
            raise StorageError(f"request {uid} has ended and takes no more tokens")
        return slot

    def _check_positions(self, step: Chunk) -> None:
        expected = self._expected
        unequal = np.flatnonzero(np.asarray(step.positions) != expected)
        if not len(unequal):
            return  # the same numbers in another dtype
        wrong = int(unequal[0])
        raise StorageError(
            f"request {step.uids[wrong]} has {expected[wrong]} tokens in the log and was given one for"
            f" position {step.positions[wrong]}; positions must follow on"
        )


def _refuse_shape(step: Chunk) -> None:
    for name in ("positions", "token_ids", "logprobs"):
        given = len(getattr(step, name))
        if given != len(step.uids):
            raise StorageError(f"a chunk has {len(step.uids)} requests and {given} {name}; give one each")
