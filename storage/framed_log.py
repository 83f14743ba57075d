"""One log of frames, for data that must not be lost once acknowledged: the token log, the log of episodes.

    000000000007.wal         frames, appended; opening the log begins a new one
    000000000007.snapshot    in the place of every file up to that number

A frame is a kind, a number and a payload of the owner's, checked. A write cut short by a crash is dropped.
Durable bytes that are broken are damage, named with file and byte. This module has the bytes, the files of a
log, the system calls, and reading, which any process may do at any time. One process writes
(`framed_log_writer.py`).

File header, 64 bytes: magic (8), format (4), kind (4: 0 segment, 1 snapshot), identity of the log (16),
sequence (8), first LSN (8), time of writing (8, for people), reserved (4), CRC-32 of the 60 bytes before (4).

Frame header, 40 bytes: magic (4), kind (2), reserved (2), payload bytes (4), count (4: the owner's, such as
tokens), LSN (8), durable LSN (8), checksum of the payload (4), checksum of the 36 bytes before (4). These are
the lower half of XXH3-64, and in files of format 1 CRC-32. Both begin with the CRC-32 of the log's identity,
so that a frame of another log never fits. All little-endian, all lengths multiples of 8.

The log sequence number (LSN) counts frames and grows by one. A frame's durable LSN is the last frame known to
be on the disk when it was written. If a later frame proves that a broken one was on the disk, the bytes were
damaged. If not, they are a write that a crash may leave, and the log ends before them.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar
from zlib import crc32

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from opd.errors import RunFolderError, StorageError, limit_fix
from opd.storage.files import FileLock, MappedFile, fsync_folder, open_plain, read_plain
from opd.untrusted import convert_decode_errors

FORMAT = 2
FILE_MAGIC = b"OPDWAL\r\n"
FRAME_MAGIC = 0xF57A_0D1E
FRAME_BYTES = 40
HEADER_BYTES = 64
MAX_LSN = 1 << 62
"""Limit of a file's first frame. No log comes near it, and later frames still have numbers."""
MAX_PAYLOAD = (1 << 32) - 8
END = 5
"""The last frame of a file: a closed log, or a complete snapshot. All other kinds are the owner's."""

_FILE = struct.Struct("<8sII16sQQdI")
_FRAME = struct.Struct("<IHHIIQQI")
_CRC = struct.Struct("<I")
_MAGIC_BYTES = _CRC.pack(FRAME_MAGIC)


class Frame(NamedTuple):
    """Position of a complete, checked frame in its file."""

    kind: int
    count: int
    lsn: int
    durable: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The first 64 bytes of a segment or a snapshot."""

    sequence: int
    first_lsn: int
    """LSN of a segment's first frame. The frames of a snapshot count from 0. The log goes on with this."""
    log_id: bytes
    is_snapshot: bool = False
    written_at: float = 0.0
    """Seconds since 1970 by the writer's clock. Nothing depends on it."""
    format: int = FORMAT

    def encode(self) -> bytes:
        head = _FILE.pack(
            FILE_MAGIC,
            self.format,
            int(self.is_snapshot),
            self.log_id,
            self.sequence,
            self.first_lsn,
            self.written_at,
            0,
        )
        return head + _CRC.pack(crc32(head))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> FileHeader | None:
        """Return the header at the start of `data`, of any format, or `None` if the bytes are not one."""
        head = bytes(data[: _FILE.size])
        if len(data) < HEADER_BYTES or _CRC.unpack_from(data, _FILE.size)[0] != crc32(head):
            return None
        magic, version, kind, log_id, sequence, first_lsn, written_at, _ = _FILE.unpack(head)
        if magic != FILE_MAGIC or first_lsn > MAX_LSN or not version:
            return None
        return cls(sequence, first_lsn, log_id, bool(kind), written_at, version)


def _frame_digest(data: bytes | memoryview, salt: int) -> int:
    return xxh3_64_intdigest(data, salt) & 0xFFFF_FFFF


_DIGESTS: dict[int, Callable[[bytes | memoryview, int], int]] = {1: crc32, FORMAT: _frame_digest}


def salt_of(log_id: bytes) -> int:
    """Return the start value of every checksum of a log's frames."""
    return crc32(log_id)


def frame_header(kind: int, payload: Sequence, count: int, lsn: int, durable: int, salt: int) -> bytes:
    """Return the 40 bytes before `payload`, a sequence of byte objects that are written one after another."""
    if len(payload) == 1:
        (data,) = payload
        length, checksum = len(data), xxh3_64_intdigest(data, salt) & 0xFFFF_FFFF
    else:
        digest, length = xxh3_64(seed=salt), 0
        for part in payload:
            digest.update(part)
            length += len(part)
        checksum = digest.intdigest() & 0xFFFF_FFFF
    head = _FRAME.pack(FRAME_MAGIC, kind, 0, length, count, lsn, durable, checksum)
    return head + _CRC.pack(xxh3_64_intdigest(head, salt) & 0xFFFF_FFFF)


def scan_frames(data: memoryview, start: int, first_lsn: int, header: FileHeader) -> Iterator[Frame]:
    """Yield every frame of a file with `header` from `start` on, in order, up to the first one that is cut,
    broken or out of sequence.
    """
    unpack, unpack_crc, lsn, size = _FRAME.unpack_from, _CRC.unpack_from, first_lsn, len(data)
    salt, digest = salt_of(header.log_id), _DIGESTS[header.format]
    while start + FRAME_BYTES <= size:
        magic, kind, _, length, count, frame_lsn, durable, checksum = unpack(data, start)
        payload = start + FRAME_BYTES
        end = payload + length
        if (
            magic != FRAME_MAGIC
            or frame_lsn != lsn
            or durable > lsn
            or end > size
            or unpack_crc(data, payload - 4)[0] != digest(data[start : payload - 4], salt)
            or checksum != digest(data[payload:end], salt)
        ):
            return
        yield Frame(kind, count, lsn, durable, start, end)
        start, lsn = end, lsn + 1


def find_trailing_frames(data: memoryview, offset: int, lsn: int, header: FileHeader) -> tuple[int, bool]:
    """Count the complete frames with later numbers after `offset`, where the frame `lsn` was expected and not
    found. Return also whether one of them says that the missing frame had reached the disk.
    """
    tail, salt, digest = bytes(data[offset:]), salt_of(header.log_id), _DIGESTS[header.format]
    frames, proves_loss, at = 0, False, tail.find(_MAGIC_BYTES)
    budget = 4 * len(tail)  # heads made to name the same payload again and again: that is damage
    while at >= 0:
        step = 4
        if at + FRAME_BYTES <= len(tail):
            _, _, _, length, _, frame_lsn, _, _ = _FRAME.unpack_from(tail, at)
            sealed = _CRC.unpack_from(tail, at + FRAME_BYTES - 4)[0]
            fits = at + FRAME_BYTES + length <= len(tail)  # no payload is read of a frame cut short
            if fits and sealed == digest(tail[at : at + FRAME_BYTES - 4], salt):
                budget -= FRAME_BYTES + length
            if budget < 0:
                return frames, True
            frame = next(scan_frames(memoryview(tail), at, frame_lsn, header), None)
            if frame is not None and frame_lsn > lsn:
                frames += 1
                proves_loss = proves_loss or frame.durable >= lsn
                step = frame.end - frame.start
        at = tail.find(_MAGIC_BYTES, at + step)
    return frames, proves_loss


class LogIO:
    """Files of the operating system: the real one. Every method raises `OSError` as the system does."""

    def lock(self, path: Path) -> FileLock:
        """Become the only writer. Raises `StorageError` naming the process that is."""
        lock = FileLock(path)
        try:
            lock.acquire()
        except RunFolderError as error:
            raise StorageError(f"{error}; a log has one writer at a time") from None
        return lock

    def file_names(self, folder: Path) -> list[str]:
        """Return the names of the files in `folder`, in no order."""
        return os.listdir(folder)

    def make_folder(self, folder: Path) -> None:
        """Make `folder` and its parents, if they do not exist, and flush their names."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            fsync_folder(path.parent)

    def read(self, path: Path) -> memoryview:
        """Copy the bytes of a file as they are now. Its writer may change its size meanwhile."""
        return memoryview(read_plain(path))

    def map_file(self, path: Path) -> memoryview:
        """Map a file whose size does not change any more, in pages that all processes share. If a writer cuts
        the file, reading the lost bytes would end the process with SIGBUS.
        """
        descriptor = open_plain(path)
        try:
            size = os.fstat(descriptor).st_size
            if size == 0:
                return memoryview(b"")
            mapped = MappedFile(descriptor, size, shared=True)
            if not mapped.load():
                raise OSError(errno.EIO, "the disk cannot read all of it", str(path))
            return np.asarray(mapped).data
        finally:
            os.close(descriptor)

    def create(self, path: Path) -> int:
        """Open a new, empty file for appending. A dead writer's file of that name is emptied."""
        return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def append(self, file: int, buffers: list) -> None:
        """Write all of `buffers`, at most 1,024 byte objects, one after another at the end."""
        missing = sum([len(part) for part in buffers]) - os.writev(file, buffers)
        if missing:
            unwritten = memoryview(b"".join(buffers))[-missing:]
            while unwritten:
                unwritten = unwritten[os.write(file, unwritten) :]

    def reserve(self, file: int, start: int, count: int) -> None:
        """Write zeros from byte `start` on, behind the appended bytes. Appending goes over them, and then a
        sync has neither a new size nor new blocks of the file to write.
        """
        while count:
            written = os.pwrite(file, bytes(count), start)
            start, count = start + written, count - written

    def truncate_file(self, file: int, size: int) -> None:
        """End the file after `size` bytes, to give back reserved bytes."""
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Return when everything appended is on the disk."""
        os.fdatasync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Return when every rename and removal in `folder` is on the disk."""
        fsync_folder(folder)

    def clock(self) -> float:
        """Return seconds since 1970, for people to read. Nothing depends on it."""
        return time.time()


TEMPORARY = ".tmp"
_NAME = re.compile(r"(\d{12})\.(wal|snapshot)")


class LogFile(NamedTuple):
    """One file of a log whose header has been checked."""

    path: Path
    data: memoryview
    header: FileHeader


@dataclass(slots=True)
class LogLayout:
    """The files of a log in the order in which they are read."""

    files: list[LogFile]
    obsolete: list[str]
    """Unfinished files, and those that the newest snapshot replaces."""
    last_sequence: int
    """The highest number of any file, 0 in an empty folder."""
    damage: str | None = None
    """One sentence on the first file that does not belong. It and later files are not in `files`."""


def file_name(sequence: int, *, snapshot: bool = False) -> str:
    """Return `000000000007.wal`, or `.snapshot` for one that replaces every segment up to that one."""
    return f"{sequence:012d}.{'snapshot' if snapshot else 'wal'}"


def read_layout(folder: Path, io: LogIO) -> LogLayout:
    """Find and open the files of the log in `folder`. Raises `StorageError` if one is of a newer format."""
    names = sorted(io.file_names(folder))
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    snapshots = [int(match[1]) for match in matches if match[2] == "snapshot"]
    base = max(snapshots, default=0)
    segments = [int(match[1]) for match in matches if match[2] == "wal" and int(match[1]) > base]
    current = [file_name(base, snapshot=True)] if snapshots else []
    current += [file_name(sequence) for sequence in segments]
    last_segment = file_name(segments[-1]) if segments else None  # a writer may be at work in it
    unfinished = [
        name for name in names if name.endswith(TEMPORARY) and _NAME.fullmatch(name.removesuffix(TEMPORARY))
    ]
    obsolete = [match[0] for match in matches if match[0] not in current] + unfinished
    layout = LogLayout([], obsolete, max((int(match[1]) for match in matches), default=0))
    sequence = base
    for name in current:
        path = folder / name
        data = io.read(path) if name == last_segment else io.map_file(path)
        header = FileHeader.decode(data)
        if header is None:
            layout.damage = f"{path} at byte 0: the file's header is damaged"
            break
        if fault := _file_fault(path, header, sequence, layout):
            layout.damage = f"{path} at byte 0: {fault}"
            break
        sequence = header.sequence
        layout.files.append(LogFile(path, data, header))
    return layout


def _file_fault(path: Path, header: FileHeader, sequence: int, layout: LogLayout) -> str | None:
    """Return the reason why a file does not continue the log whose last file has the number `sequence`."""
    if header.format > FORMAT:
        raise StorageError(
            f"{path} was written in format {header.format} by a newer version, and this one reads up to"
            f" format {FORMAT}; upgrade opd to use it"
        )
    own_name = file_name(header.sequence, snapshot=header.is_snapshot)
    if path.name != own_name:
        return f"the file's header says that it is {own_name}"
    if layout.files and layout.files[0].header.log_id != header.log_id:
        return "the file belongs to another log"
    if not header.is_snapshot and header.sequence != sequence + 1:
        return f"{file_name(sequence + 1)}, which comes before it, is missing"
    return None


_ATTEMPTS = 20


@dataclass(slots=True)
class FrameReport:
    """Results of reading a log."""

    folder: str
    files: list[str] = field(default_factory=list)
    """The files read, oldest first."""
    stored_bytes: int = 0
    frames: int = 0
    clean: bool = True
    """The last writer closed the log. False after a crash, or while a writer is at work."""
    cut_file: str | None = None
    """The file that ends in the middle of a write. The bytes cut off were not known to be on the disk."""
    cut_offset: int = 0
    cut_bytes: int = 0
    cut_frames: int = 0
    """Whole frames after the cut: a power cut may keep later writes without earlier ones."""
    damage: str | None = None
    """One sentence on durable bytes that are broken or missing. Nothing after them is used."""


class Replay(Protocol):
    """Consumes the frames of a log, to restore the state at which they were written."""

    @property
    def report(self) -> FrameReport: ...

    def apply_frame(self, frame: Frame, payload: memoryview) -> None:
        """Apply the next frame. Raises `ValueError` for nonsense, as `convert_decode_errors` expects."""
        ...

    def end_file(self) -> None:
        """Note the end of one file's frames."""
        ...


@dataclass(slots=True)
class LogRecovery:
    """State from which a writer goes on with a log."""

    report: FrameReport
    log_id: bytes | None = None
    last_sequence: int = 0
    """The highest number of any file. The next segment's is one more."""
    durable_lsn: int = 0
    """Frames up to this one are proven to be on the disk. The first frame of a log has number 1."""
    tail: bytes = b""
    """The frames after `durable_lsn` as they lie in the last file."""
    tail_frames: int = 0
    outdated: bool = False
    """The last file is of an older format: its frames do not fit into a new one unchanged."""
    obsolete: list[str] = field(default_factory=list)
    """Unfinished files, and those that the newest snapshot replaces."""

    @property
    def next_lsn(self) -> int:
        return self.durable_lsn + 1 + self.tail_frames


R = TypeVar("R", bound=Replay)


def recover_log(folder: Path, io: LogIO, replay: Replay) -> LogRecovery:
    """Read the log in `folder`. Raises `StorageError` if a file is of a newer format or a payload makes no
    sense, and `OSError` as the system does. Damage is not an error here: it is in the report, and reading
    ends before it.
    """
    layout = read_layout(folder, io)
    recovery = LogRecovery(replay.report, obsolete=layout.obsolete, last_sequence=layout.last_sequence)
    report = recovery.report
    for file, following in zip_longest(layout.files, layout.files[1:]):
        limit = None if following is None else following.header.first_lsn
        _read_file(file, limit, recovery, replay)
        if report.damage:
            break
    report.damage = report.damage or layout.damage
    report.clean = report.clean and report.damage is None
    return recovery


def read_concurrently(
    folder: str | os.PathLike[str], io: LogIO, make_replay: Callable[[], R]
) -> tuple[R, LogRecovery]:
    """Read the log in `folder` while another process may write it. Damage is in the report. Raises
    `StorageError` if there is no log, it is of a newer format, or its files cannot be read.
    """
    path, last_damage = Path(folder), None
    for attempt in range(_ATTEMPTS):
        is_last, replay = attempt == _ATTEMPTS - 1, make_replay()
        try:
            names = sorted(io.file_names(path))
            recovery = recover_log(path, io, replay)
        except StorageError:
            raise
        except FileNotFoundError as error:  # its writer has just replaced this file by a snapshot
            if is_last or not path.is_dir():
                raise StorageError(f"there is no log in {path} ({error.strerror}); check the path") from error
            continue
        except OSError as error:
            mend = limit_fix(error, "check its disk and permissions")
            raise StorageError(
                f"the log in {path} cannot be read ({error.strerror or error}); {mend}"
            ) from error
        # A frame may become complete while the bytes after it are examined: only lasting faults are damage.
        damage = recovery.report.damage
        if damage is None or (damage == last_damage and names == sorted(io.file_names(path))):
            break
        last_damage = damage
    if not recovery.report.files and recovery.report.damage is None:
        raise StorageError(f"there is no log in {path}; check the path")
    return replay, recovery  # pyright: ignore[reportPossiblyUnbound, reportReturnType] - one attempt at least


def _read_file(file: LogFile, limit: int | None, recovery: LogRecovery, replay: Replay) -> None:
    """Replay one file, up to the first frame of the next file."""
    header, report = file.header, recovery.report
    report.files.append(file.path.name)
    report.stored_bytes += len(file.data)
    first = 0 if header.is_snapshot else header.first_lsn
    until = None if header.is_snapshot else limit
    starts, durable, ended = array("Q"), 0, False
    end = HEADER_BYTES

    def no_log(cause: str) -> StorageError:
        return StorageError(
            f"{file.path} at byte {starts[-1]}: up to here it holds what no log does ({cause}); restore the"
            " file from a copy"
        )

    with convert_decode_errors(no_log):
        for frame in scan_frames(file.data, HEADER_BYTES, first, header):
            ended, end, durable = frame.kind == END, frame.end, max(durable, frame.durable)
            starts.append(frame.start)
            if until is None or frame.lsn < until:
                report.frames += not ended
                if not ended:
                    replay.apply_frame(frame, file.data[frame.start + FRAME_BYTES : end])
        replay.end_file()
    content = len(starts) - ended
    recovery.log_id, recovery.durable_lsn = header.log_id, header.first_lsn - 1
    if header.is_snapshot:
        if not ended or end != len(file.data):
            report.damage = f"{file.path} at byte {end}: the snapshot is damaged"
        elif limit not in (None, header.first_lsn):
            report.damage = f"{file.path}: the segment after it does not continue it"
        report.clean = ended
    elif limit is None:
        report.clean = ended
        _judge_end(file, end, first + len(starts), ended, report)
        recovery.durable_lsn = max(recovery.durable_lsn, durable)
        recovery.outdated = header.format < FORMAT
        # Keep the frames not proven to be on the disk.
        unproven = recovery.durable_lsn + 1 - first
        if unproven < content:
            stop = starts[content] if ended else end
            recovery.tail = bytes(file.data[starts[unproven] : stop])
            recovery.tail_frames = content - unproven
    elif first + content < limit:
        report.damage = f"{file.path} at byte {end}: frame {first + len(starts)} is damaged or missing"


def _judge_end(file: LogFile, end: int, lsn: int, ended: bool, report: FrameReport) -> None:
    """Decide whether the bytes after the last complete frame of the last file are a write cut short, or
    damage. Zeros at the end are neither, because they were reserved.
    """
    count = len(bytes(file.data[end:]).rstrip(b"\0"))
    if count == 0:
        return
    frames, proves_loss = find_trailing_frames(file.data, end, lsn, file.header)
    if ended:
        report.damage = f"{file.path} at byte {end}: {count} bytes follow the end of the log"
    elif proves_loss:
        report.damage = f"{file.path} at byte {end}: frame {lsn} is damaged, and it had been written out"
    else:
        report.cut_file, report.cut_offset = file.path.name, end
        report.cut_bytes, report.cut_frames = count, frames
