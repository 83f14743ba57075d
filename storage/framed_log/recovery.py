"""Reading a log: the longest prefix that is whole, and what lies after it. Any process may, at any time."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol, TypeVar

from opd.errors import StorageError
from opd.foreign import decoding
from opd.storage.framed_log.frames import (
    END,
    FORMAT,
    FRAME_BYTES,
    HEADER_BYTES,
    Frame,
    LogFile,
    LogIO,
    look_beyond,
    read_layout,
    scan,
)

_ATTEMPTS = 20


@dataclass(slots=True)
class FrameReport:
    """What was found on reading a log."""

    folder: str
    files: list[str] = field(default_factory=list)
    """The files read, oldest first."""
    stored_bytes: int = 0
    frames: int = 0
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


class Replay(Protocol):
    """What the frames of a log are given to, to be brought to where it was when they were written."""

    @property
    def report(self) -> FrameReport: ...

    def take(self, frame: Frame, payload: memoryview) -> None:
        """The next frame. What makes no sense raises `ValueError`, as `foreign.decoding` takes it."""
        ...

    def end_file(self) -> None:
        """The frames of one file have been given."""
        ...


@dataclass(slots=True)
class Recovered:
    """What a writer needs to go on with a log."""

    report: FrameReport
    log_id: bytes | None = None
    last_sequence: int = 0
    """The highest number of any file; the next segment's is one more."""
    durable_lsn: int = 0
    """Frames up to this one are proven to be on the disk; the first frame of a log has number 1."""
    tail: bytes = b""
    """The frames after `durable_lsn` as they lie in the last file."""
    tail_frames: int = 0
    outdated: bool = False
    """The last file is of an older format: its frames do not fit into a new one as they are."""
    obsolete: list[str] = field(default_factory=list)
    """Unfinished files, and those that the newest snapshot replaces."""

    @property
    def next_lsn(self) -> int:
        return self.durable_lsn + 1 + self.tail_frames


R = TypeVar("R", bound=Replay)


def recover(folder: Path, io: LogIO, replay: Replay) -> Recovered:
    """Read the log in `folder`. Raises `StorageError` if a file is of a newer format or a payload makes no
    sense, and `OSError` as the system does. Damage is not an error here: it is in the report, and reading
    ends before it.
    """
    layout = read_layout(folder, io)
    found = Recovered(replay.report, obsolete=layout.obsolete, last_sequence=layout.last_sequence)
    report = found.report
    for file, following in zip_longest(layout.files, layout.files[1:]):
        limit = None if following is None else following.header.first_lsn
        _read_file(file, limit, found, replay)
        if report.damage:
            break
    report.damage = report.damage or layout.damage
    report.clean = report.clean and report.damage is None
    return found


def read_beside_writer(
    folder: str | os.PathLike[str], io: LogIO, begin: Callable[[], R]
) -> tuple[R, Recovered]:
    """Read the log in `folder` while another process may write it; `begin` makes what frames are given to.
    Damage is in the report. Raises `StorageError` if there is no log, it is of a newer format, or its files
    cannot be read.
    """
    place, told = Path(folder), None
    for attempt in range(_ATTEMPTS):
        last, replay = attempt == _ATTEMPTS - 1, begin()
        try:
            before = sorted(io.names(place))
            found = recover(place, io, replay)
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
    return replay, found  # pyright: ignore[reportPossiblyUnbound, reportReturnType] - one attempt at least


def _read_file(file: LogFile, limit: int | None, found: Recovered, replay: Replay) -> None:
    """Take in one file, up to the frame with which the file after it begins."""
    header, report = file.header, found.report
    report.files.append(file.path.name)
    report.stored_bytes += len(file.data)
    first = 0 if header.is_snapshot else header.first_lsn
    until = None if header.is_snapshot else limit
    starts, durable, ended = array("Q"), 0, False
    end = HEADER_BYTES
    with decoding(lambda cause: _no_log(file, starts[-1], cause)):
        for frame in scan(file.data, HEADER_BYTES, first, header):
            ended, end, durable = frame.kind == END, frame.end, max(durable, frame.durable)
            starts.append(frame.start)
            if until is None or frame.lsn < until:
                report.frames += not ended
                if not ended:
                    replay.take(frame, file.data[frame.start + FRAME_BYTES : end])
        replay.end_file()
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
    beyond = look_beyond(file.data, end, lsn, file.header)
    if ended:
        report.damage = f"{file.path} at byte {end}: {rest} bytes follow the end of the log"
    elif beyond.proves_loss:
        report.damage = f"{file.path} at byte {end}: frame {lsn} is damaged, and it had been written out"
    else:
        report.cut_file, report.cut_offset = file.path.name, end
        report.cut_bytes, report.cut_frames = rest, beyond.frames


def _keep_tail(file: LogFile, starts: array[int], stop: int, found: Recovered) -> None:
    """Keep the frames not proven to be on the disk; `starts` is where each lies, `stop` their end."""
    found.outdated = file.header.format < FORMAT
    first = found.durable_lsn + 1 - file.header.first_lsn
    if first < len(starts):
        found.tail = bytes(file.data[starts[first] : stop])
        found.tail_frames = len(starts) - first
