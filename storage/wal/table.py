"""What a log knows, in memory: its requests and their tokens, ready to be asked for.

Appending a decode step costs a few vectorised operations; the tokens are sorted by request only when someone
asks for them. Memory: 24 bytes a token of every request that has not been retired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.errors import StorageError
from opd.storage.wal.records import ENVIRONMENT, MAX_NUMBER, RAW, TOKEN, Closing, Opening
from opd.types import LoggedRequest, RolloutRequest, Status

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
            self.lengths[entry.slot] = 0
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
            loss_mask=(records["flags"] & ENVIRONMENT) == 0,
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
