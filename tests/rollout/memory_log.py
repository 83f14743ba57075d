"""A token log in memory: the contract of `opd.protocols.TokenLog` in its plainest form."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.errors import StorageError
from opd.types import Chunk, LoggedRequest, RolloutRequest, Status


@dataclass
class Entry:
    """One request: a row per token."""

    request: RolloutRequest
    metadata: dict[str, Any]
    rows: list[tuple[int, float, int]] = field(default_factory=list)
    status: Status = Status.PENDING
    failure: str | None = None


class MemoryLog:
    """Implements `TokenLog`, strictly: whatever the contract forbids raises."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.commits = 0
        self.broken = False

    def open(self, request: RolloutRequest, metadata: Mapping[str, Any]) -> None:
        self._commit()
        if request.uid in self.entries or len(request.prefix_ids):
            raise StorageError(f"{request.uid} is open already or has a prefix")
        self.entries[request.uid] = Entry(request, dict(metadata))

    def append(self, chunk: Chunk) -> None:
        self._commit()
        columns = zip(
            chunk.uids,
            chunk.positions.tolist(),
            chunk.token_ids.tolist(),
            chunk.logprobs.tolist(),
            strict=True,
        )
        for uid, position, token, logprob in columns:
            entry = self._pending(uid)
            if position != len(entry.rows):
                raise StorageError(f"{uid}: token {position} where {len(entry.rows)} is due")
            entry.rows.append((token, logprob, chunk.policy_version))
        for uid, status in chunk.finished.items():
            self._pending(uid).status = Status(status)

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        self._commit()
        entry = self._pending(uid)
        entry.status, entry.failure = status, reason

    def find(self, uid: str) -> LoggedRequest | None:
        entry = self.entries.get(uid)
        if entry is None:
            return None
        rows = entry.rows
        return LoggedRequest(
            entry.request,
            entry.metadata,
            np.array([row[0] for row in rows], dtype=np.int32),
            np.array([row[1] for row in rows], dtype=np.float32),
            np.array([row[2] for row in rows], dtype=np.int32),
            entry.status,
            entry.failure,
        )

    def retire(self, uids: Iterable[str]) -> None:
        self._commit()
        for uid in uids:
            self.entries.pop(uid, None)

    def _commit(self) -> None:
        if self.broken:
            raise StorageError("the disk is full")
        self.commits += 1

    def _pending(self, uid: str) -> Entry:
        entry = self.entries.get(uid)
        if entry is None or entry.status is not Status.PENDING:
            raise StorageError(f"{uid} is not open")
        return entry
