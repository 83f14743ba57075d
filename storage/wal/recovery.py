"""Reading a log: the longest prefix that is whole, and what lies after it. Any process may, at any time."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from opd.errors import StorageError
from opd.foreign import decoding
from opd.storage.wal.frames import (
    FRAME_BYTES,
    HEADER_BYTES,
    Frame,
    FrameKind,
    LogFile,
    LogIO,
    look_beyond,
    read_layout,
    salt_of,
    scan,
)
from opd.storage.wal.records import (
    END_OF_REQUEST,
    STATUSES,
    TOKEN,
    Closing,
    decode_close,
    decode_open,
    decode_retire,
)
from opd.storage.wal.table import RequestTable
from opd.types import LoggedRequest

_TOKENS_AT_ONCE = 1 << 18
"""Tokens that wait, as views of the file, to be sorted together."""


@dataclass(slots=True)
class LogReport:
    """What was found on reading a log."""

    folder: str
    files: list[str] = field(default_factory=list)
    """The files read, oldest first."""
    stored_bytes: int = 0
    frames: int = 0
    requests: int = 0
    tokens: int = 0
    """Tokens of the requests that have not been retired."""
    clean: bool = True
    """The last writer closed the log; False after a crash, or while a writer is at work."""
    cut_file: str | None = None
    """The file that ends in the middle of a write. What is cut off was not known to be on the disk."""
    cut_offset: int = 0
    cut_bytes: int = 0
    cut_frames: int = 0
    """Whole frames after the cut: a power cut may keep later writes without earlier ones."""
    damage: str | None = None
    """One sentence: where bytes that had been durable are broken or missing. Nothing after them is used."""


@dataclass(slots=True)
class Recovered:
    """A log as read from its files, and what a writer needs to go on."""

    table: RequestTable
    report: LogReport
    log_id: bytes | None = None
    last_sequence: int = 0
    """The highest number of any file; the next segment's is one more."""
    durable_lsn: int = 0
    """Frames up to this one are proven to be on the disk; the first frame of a log has number 1."""
    tail: bytes = b""
    """The frames after `durable_lsn` as they lie in the last file."""
    tail_frames: int = 0
    obsolete: list[str] = field(default_factory=list)
    """Unfinished files, and those that the newest snapshot replaces."""

    @property
    def next_lsn(self) -> int:
        return self.durable_lsn + 1 + self.tail_frames


def recover(folder: Path, io: LogIO) -> Recovered:
    """Read the log in `folder`. Raises `StorageError` if a file is of a newer format or the tokens make no
    sense, and `OSError` as the system does. Damage is not an error here: it is in the report, and reading
    ends before it.
    """
    layout = read_layout(folder, io)
    found = Recovered(RequestTable(), LogReport(str(folder)), obsolete=layout.obsolete)
    found.last_sequence = layout.last_sequence
    report = found.report
    for file, following in zip_longest(layout.files, layout.files[1:]):
        limit = None if following is None else following.header.first_lsn
        _read_file(file, limit, found)
        if report.damage:
            break
    report.damage = report.damage or layout.damage
    report.clean = report.clean and report.damage is None
    report.requests = len(found.table)
    report.tokens = int(found.table.lengths.sum())
    return found


def _read_file(file: LogFile, limit: int | None, found: Recovered) -> None:
    """Take in one file, up to the frame with which the file after it begins."""
    header, report = file.header, found.report
    report.files.append(file.path.name)
    report.stored_bytes += len(file.data)
    first = 0 if header.is_snapshot else header.first_lsn
    until = None if header.is_snapshot else limit
    replay, starts, durable, ended = Replay(found), array("Q"), 0, False
    end = HEADER_BYTES
    with decoding(lambda cause: _no_log(file, starts[-1], cause)):
        for frame in scan(file.data, HEADER_BYTES, first, salt_of(header.log_id)):
            ended, end, durable = frame.kind == FrameKind.END, frame.end, max(durable, frame.durable)
            starts.append(frame.start)
            if until is None or frame.lsn < until:
                replay.take(file.data, frame)
        replay.end()
    content = len(starts) - ended
    found.log_id, found.durable_lsn = header.log_id, header.first_lsn - 1
    if header.is_snapshot:
        if not ended or end != len(file.data):
            report.damage = f"{file.path} at byte {end}: the snapshot is damaged"
        elif limit not in (None, header.first_lsn):
            report.damage = f"{file.path}: the segment after it does not continue it"
        report.clean = ended
    elif limit is None:
        report.clean = ended
        _judge_end(file, end, first + len(starts), ended, found)
        found.durable_lsn = max(found.durable_lsn, durable)
        stop = starts[content] if ended else end
        _keep_tail(file, starts[:content], stop, found)
    elif first + content < limit:
        report.damage = f"{file.path} at byte {end}: frame {first + len(starts)} is damaged or missing"


def _no_log(file: LogFile, start: int, cause: str) -> StorageError:
    return StorageError(
        f"{file.path} at byte {start}: up to here it holds what no log does ({cause}); restore the"
        " file from a copy"
    )


def _judge_end(file: LogFile, end: int, lsn: int, ended: bool, found: Recovered) -> None:
    """Say whether the bytes after the last whole frame of the last file are a write cut short, or damage.
    Zeros at the end are neither: they were reserved.
    """
    rest = len(bytes(file.data[end:]).rstrip(b"\0"))
    if rest == 0:
        return
    report = found.report
    beyond = look_beyond(file.data, end, lsn, salt_of(file.header.log_id))
    if ended:
        report.damage = f"{file.path} at byte {end}: {rest} bytes follow the end of the log"
    elif beyond.proves_loss:
        report.damage = f"{file.path} at byte {end}: frame {lsn} is damaged, and it had been written out"
    else:
        report.cut_file, report.cut_offset = file.path.name, end
        report.cut_bytes, report.cut_frames = rest, beyond.frames


def _keep_tail(file: LogFile, starts: array[int], stop: int, found: Recovered) -> None:
    """Keep the frames not proven to be on the disk; `starts` is where each lies, `stop` their end."""
    first = found.durable_lsn + 1 - file.header.first_lsn
    if first < len(starts):
        found.tail = bytes(file.data[starts[first] : stop])
        found.tail_frames = len(starts) - first


class Replay:
    """Brings the table to where it was when the frames were written, one frame after another."""

    def __init__(self, found: Recovered) -> None:
        self._table, self._report = found.table, found.report
        self._tokens: list[memoryview] = []
        self._waiting = 0

    def take(self, data: memoryview, frame: Frame) -> None:
        """The next frame, in `data`."""
        table, payload = self._table, frame.start + FRAME_BYTES
        self._report.frames += frame.kind != FrameKind.END
        if frame.kind == FrameKind.STEP:
            split = payload + frame.tokens * TOKEN.itemsize
            if split > frame.end:
                raise ValueError(f"{frame.tokens} tokens in {frame.end - payload} bytes")
            self._tokens.append(data[payload:split])
            self._waiting += frame.tokens
            if self._waiting >= _TOKENS_AT_ONCE:
                self.end()
            if split < frame.end:
                for number, code in np.frombuffer(data[split : frame.end], END_OF_REQUEST).tolist():
                    table.close(Closing(number, STATUSES[code], None))
        elif frame.kind == FrameKind.OPEN:
            table.open(decode_open(data[payload : frame.end]))
        elif frame.kind == FrameKind.CLOSE:
            table.close(decode_close(data[payload : frame.end]))
        elif frame.kind == FrameKind.RETIRE:
            self.end()
            table.retire(decode_retire(data[payload : frame.end]))

    def end(self) -> None:
        """Give the tokens that wait to their requests."""
        if self._tokens:
            self._table.add_read(np.frombuffer(b"".join(self._tokens), dtype=TOKEN))
            self._tokens, self._waiting = [], 0


_ATTEMPTS = 20


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
    """Read the log in `folder`. Damage is in the report, not an error. Raises `StorageError` if there is no
    log, it is of a newer format, or its files cannot be read.
    """
    place, io = Path(folder), io or LogIO()
    told = None
    for attempt in range(_ATTEMPTS):
        last = attempt == _ATTEMPTS - 1
        try:
            before = sorted(io.names(place))
            found = recover(place, io)
        except StorageError:
            raise
        except FileNotFoundError as error:  # its writer has just put a snapshot in the place of this file
            if last or not place.is_dir():
                raise StorageError(
                    f"there is no log in {place} ({error.strerror}); check the path"
                ) from error
            continue
        except OSError as error:
            raise StorageError(f"the log in {place} cannot be read ({error.strerror or error})") from error
        # A frame may become whole while the bytes after it are looked at: damage is what stays.
        damage = found.report.damage
        if damage is None or (damage == told and before == sorted(io.names(place))):
            break
        told = damage
    if not found.report.files and found.report.damage is None:
        raise StorageError(f"there is no log in {place}; check the path")
    return LogContents(found.table, found.report)
