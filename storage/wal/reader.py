"""What a log of tokens says: its frames brought back into a table, by its writer or beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opd.storage.framed_log import Frame, FrameReport, LogIO, Recovered, read_beside_writer, recover
from opd.storage.wal.records import (
    END_OF_REQUEST,
    STATUSES,
    TOKEN,
    Closing,
    FrameKind,
    decode_close,
    decode_open,
    decode_retire,
)
from opd.storage.wal.table import RequestTable
from opd.types import LoggedRequest

_TOKENS_AT_ONCE = 1 << 18
"""Tokens that wait, as views of the file, to be sorted together."""


@dataclass(slots=True)
class LogReport(FrameReport):
    """What was found on reading a log of tokens."""

    requests: int = 0
    tokens: int = 0
    """Tokens of the requests that have not been retired."""


class LogReplay:
    """Brings the table to where it was when the frames were written, one frame after another."""

    def __init__(self, folder: Path) -> None:
        self.table = RequestTable()
        self.report = LogReport(str(folder))
        self._tokens: list[memoryview] = []
        self._waiting = 0

    def take(self, frame: Frame, payload: memoryview) -> None:
        """See `framed_log.Replay`."""
        table = self.table
        if frame.kind == FrameKind.STEP:
            split = frame.count * TOKEN.itemsize
            if split > len(payload):
                raise ValueError(f"{frame.count} tokens in {len(payload)} bytes")
            self._tokens.append(payload[:split])
            self._waiting += frame.count
            if self._waiting >= _TOKENS_AT_ONCE:
                self._sort()
            if split < len(payload):
                for number, code in np.frombuffer(payload[split:], END_OF_REQUEST).tolist():
                    table.close(Closing(number, STATUSES[code], None))
        elif frame.kind == FrameKind.OPEN:
            table.open(decode_open(payload))
        elif frame.kind == FrameKind.CLOSE:
            table.close(decode_close(payload))
        elif frame.kind == FrameKind.RETIRE:
            self._sort()
            table.retire(decode_retire(payload))

    def end_file(self) -> None:
        """See `framed_log.Replay`."""
        self._sort()
        self.report.requests = len(self.table)
        self.report.tokens = int(self.table.lengths.sum())

    def _sort(self) -> None:
        """Give the tokens that wait to their requests."""
        if self._tokens:
            self.table.add_read(np.frombuffer(b"".join(self._tokens), dtype=TOKEN))
            self._tokens, self._waiting = [], 0


class LogContents:
    """What a log held at one moment: a prefix of what its writer had acknowledged or was about to."""

    def __init__(self, table: RequestTable, report: LogReport) -> None:
        self._table = table
        self.report = report

    def uids(self) -> list[str]:
        """The requests that have not been retired, in the order in which they were opened."""
        return list(self._table)

    def find(self, uid: str) -> LoggedRequest | None:
        """What is known of a request; `None` if it is not in the log."""
        return self._table.find(uid)

    def requests(self) -> dict[str, LoggedRequest]:
        """Every request that has not been retired, by uid."""
        return {uid: logged for uid in self._table if (logged := self._table.find(uid)) is not None}


def read_log(folder: str | os.PathLike[str], *, io: LogIO | None = None) -> LogContents:
    """Read the log in `folder`, without a lock: any process may, at any time, also while another one writes.
    Damage is in the report, not an error. Raises `StorageError` if there is no log, it is of a newer format,
    or its files cannot be read.
    """
    replay, _ = read_beside_writer(folder, io or LogIO(), lambda: LogReplay(Path(folder)))
    return LogContents(replay.table, replay.report)


def recover_log(folder: Path, io: LogIO) -> tuple[LogReplay, Recovered]:
    """What a writer goes on from; see `framed_log.recover`."""
    replay = LogReplay(folder)
    return replay, recover(folder, io, replay)
