"""The bytes of a log: one header a file, then frames; which files make up a log; the calls of the system.

File header, 64 bytes: magic (8), format (4), kind (4: 0 segment, 1 snapshot), identity of the log (16),
sequence (8), first LSN (8), time of writing (8, for people), reserved (4), CRC-32 of the 60 bytes before (4).

Frame header, 40 bytes: magic (4), kind (2), reserved (2), payload bytes (4), count (4: the owner's, such as
tokens), LSN (8), durable LSN (8), checksum of the payload (4), checksum of the 36 bytes before (4). These are
the lower half of XXH3-64, and in files of format 1 CRC-32; both begin with the CRC-32 of the log's identity,
so that a frame of another log never fits. All little-endian, all lengths multiples of 8.

The log sequence number (LSN) counts frames and grows by one. A frame's durable LSN says which frames were
known to be on the disk when it was written: if a later frame proves that a broken one was, the bytes were
damaged; if not, they are what a crash may leave of a write, and the log ends before them.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from opd.errors import RunFolderError, StorageError
from opd.storage.files import FileLock, MappedFile, fsync_folder, open_plain, read_plain

FORMAT = 2
FILE_MAGIC = b"OPDWAL\r\n"
FRAME_MAGIC = 0xF57A_0D1E
FRAME_BYTES = 40
HEADER_BYTES = 64
MAX_LSN = 1 << 62
"""Of a file's first frame: no log comes near it, and what follows still has a number."""
MAX_PAYLOAD = (1 << 32) - 8
END = 5
"""The kind of a frame that nothing follows in its file: the log was closed, or the snapshot is complete. All
other kinds are the owner's.
"""

_FILE = struct.Struct("<8sII16sQQdI")
_FRAME = struct.Struct("<IHHIIQQI")
_CRC = struct.Struct("<I")
_MAGIC_BYTES = _CRC.pack(FRAME_MAGIC)


class Frame(NamedTuple):
    """Where a whole, checked frame lies in its file."""

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
    """LSN of a segment's first frame. The frames of a snapshot count from 0; the log goes on with this."""
    log_id: bytes
    is_snapshot: bool = False
    written_at: float = 0.0
    """Seconds since 1970 by the writer's clock; nothing depends on it."""
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
        """The header at the start of `data`, of whatever format; `None` if the bytes are not one."""
        head = bytes(data[: _FILE.size])
        if len(data) < HEADER_BYTES or _CRC.unpack_from(data, _FILE.size)[0] != crc32(head):
            return None
        magic, version, kind, log_id, sequence, first_lsn, written_at, _ = _FILE.unpack(head)
        if magic != FILE_MAGIC or first_lsn > MAX_LSN or not version:
            return None
        return cls(sequence, first_lsn, log_id, bool(kind), written_at, version)


def _digest(data: bytes | memoryview, salt: int) -> int:
    return xxh3_64_intdigest(data, salt) & 0xFFFF_FFFF


_DIGESTS: dict[int, Callable[[bytes | memoryview, int], int]] = {1: crc32, FORMAT: _digest}


def salt_of(log_id: bytes) -> int:
    """Where every checksum of a log's frames starts from."""
    return crc32(log_id)


def frame_header(kind: int, payload: Sequence, count: int, lsn: int, durable: int, salt: int) -> bytes:
    """The 40 bytes before `payload`, given as objects of bytes that are written one after another."""
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


def scan(data: memoryview, start: int, first_lsn: int, header: FileHeader) -> Iterator[Frame]:
    """Every frame of a file with `header` from `start` on, in order, up to the first one that is cut, broken
    or out of sequence.
    """
    unpack, unpack_crc, lsn, size = _FRAME.unpack_from, _CRC.unpack_from, first_lsn, len(data)
    salt, digest = salt_of(header.log_id), _DIGESTS[header.format]
    while start + FRAME_BYTES <= size:
        magic, kind, _, length, count, found, durable, checksum = unpack(data, start)
        payload = start + FRAME_BYTES
        end = payload + length
        if (
            magic != FRAME_MAGIC
            or found != lsn
            or durable > lsn
            or end > size
            or unpack_crc(data, payload - 4)[0] != digest(data[start : payload - 4], salt)
            or checksum != digest(data[payload:end], salt)
        ):
            return
        yield Frame(kind, count, lsn, durable, start, end)
        start, lsn = end, lsn + 1


class Beyond(NamedTuple):
    """What lies after the place where a log's frames stop making sense."""

    frames: int
    """Whole frames with later sequence numbers."""
    proves_loss: bool
    """One of them says that the frame missing at that place had reached the disk."""


def look_beyond(data: memoryview, offset: int, lsn: int, header: FileHeader) -> Beyond:
    """Look for whole frames after `offset`, where the frame numbered `lsn` was expected and not found."""
    rest, salt, digest = bytes(data[offset:]), salt_of(header.log_id), _DIGESTS[header.format]
    frames, proves, at = 0, False, rest.find(_MAGIC_BYTES)
    budget = 4 * len(rest)  # heads made to name the same payload again and again: that is damage
    while at >= 0:
        step = 4
        if at + FRAME_BYTES <= len(rest):
            _, _, _, length, _, found, _, _ = _FRAME.unpack_from(rest, at)
            sealed = _CRC.unpack_from(rest, at + FRAME_BYTES - 4)[0]
            whole = at + FRAME_BYTES + length <= len(rest)  # of a frame cut short no payload is read
            if whole and sealed == digest(rest[at : at + FRAME_BYTES - 4], salt):
                budget -= FRAME_BYTES + length
            if budget < 0:
                return Beyond(frames, True)
            frame = next(scan(memoryview(rest), at, found, header), None)
            if frame is not None and found > lsn:
                frames += 1
                proves = proves or frame.durable >= lsn
                step = frame.end - frame.start
        at = rest.find(_MAGIC_BYTES, at + step)
    return Beyond(frames, proves)


class LogIO:
    """The real one: files of the operating system. Every method raises `OSError` as the system does."""

    def lock(self, path: Path) -> FileLock:
        """Become the only writer, or raise `StorageError` naming the process that is."""
        lock = FileLock(path)
        try:
            lock.acquire()
        except RunFolderError as error:
            raise StorageError(f"{error}; a log has one writer at a time") from None
        return lock

    def names(self, folder: Path) -> list[str]:
        """The names of the files in `folder`, in no order."""
        return os.listdir(folder)

    def make_folder(self, folder: Path) -> None:
        """Make `folder` and its parents, if they are not there, and flush their names."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            fsync_folder(path.parent)

    def read(self, path: Path) -> memoryview:
        """A copy of the bytes of a file as they are now. Its writer may change its size meanwhile."""
        return memoryview(read_plain(path))

    def map(self, path: Path) -> memoryview:
        """The bytes of a file whose size does not change any more, in pages that all processes share. Of a
        file that its writer cuts, the bytes that are gone would end the process with SIGBUS.
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
        """Open a new, empty file for appending; what a dead writer left under that name is emptied."""
        return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def append(self, file: int, buffers: list) -> None:
        """Write all of `buffers`, at most 1,024 objects of bytes, one after another behind what was appended
        before.
        """
        missing = sum([len(part) for part in buffers]) - os.writev(file, buffers)
        if missing:
            rest = memoryview(b"".join(buffers))[-missing:]
            while rest:
                rest = rest[os.write(file, rest) :]

    def reserve(self, file: int, start: int, count: int) -> None:
        """Put zeros behind what was appended, from byte `start` on. Appending goes over them, and then a sync
        has neither a new size nor new blocks of the file to write.
        """
        while count:
            written = os.pwrite(file, bytes(count), start)
            start, count = start + written, count - written

    def cut(self, file: int, size: int) -> None:
        """Give back what was reserved and not used: the file ends after `size` bytes."""
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
        """Seconds since 1970, for people to read; nothing depends on it."""
        return time.time()


TEMPORARY = ".tmp"
_NAME = re.compile(r"(\d{12})\.(wal|snapshot)")


class LogFile(NamedTuple):
    """One file of a log whose header has been checked."""

    path: Path
    data: memoryview
    header: FileHeader


@dataclass(slots=True)
class Layout:
    """The files of a log in the order in which they are read."""

    files: list[LogFile]
    obsolete: list[str]
    """Unfinished files, and those that the newest snapshot replaces."""
    last_sequence: int
    """The highest number of any file; 0 in an empty folder."""
    damage: str | None = None
    """One sentence on the first file that does not belong; it and those after it are not in `files`."""


def file_name(sequence: int, *, snapshot: bool = False) -> str:
    """`000000000007.wal`, or `.snapshot` for one that replaces every segment up to that one."""
    return f"{sequence:012d}.{'snapshot' if snapshot else 'wal'}"


def read_layout(folder: Path, io: LogIO) -> Layout:
    """Find and open the files of the log in `folder`. Raises `StorageError` if one is of a newer format."""
    names = sorted(io.names(folder))
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    snapshots = [int(match[1]) for match in matches if match[2] == "snapshot"]
    base = max(snapshots, default=0)
    segments = [int(match[1]) for match in matches if match[2] == "wal" and int(match[1]) > base]
    kept = [file_name(base, snapshot=True)] if snapshots else []
    kept += [file_name(sequence) for sequence in segments]
    last_segment = file_name(segments[-1]) if segments else None  # a writer may be at work in it
    unfinished = [
        name for name in names if name.endswith(TEMPORARY) and _NAME.fullmatch(name.removesuffix(TEMPORARY))
    ]
    obsolete = [match[0] for match in matches if match[0] not in kept] + unfinished
    layout = Layout([], obsolete, max((int(match[1]) for match in matches), default=0))
    sequence = base
    for name in kept:
        path = folder / name
        data = io.read(path) if name == last_segment else io.map(path)
        header = FileHeader.decode(data)
        fault = _fault(path, header, sequence, layout)
        if fault or header is None:
            layout.damage = f"{path} at byte 0: {fault}"
            break
        sequence = header.sequence
        layout.files.append(LogFile(path, data, header))
    return layout


def _fault(path: Path, header: FileHeader | None, sequence: int, layout: Layout) -> str | None:
    """Why a file does not continue the log whose last file has the number `sequence`."""
    if header is None:
        return "the file's header is damaged"
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
