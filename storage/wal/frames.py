"""The bytes of a log: one header a file, then frames. All little-endian, all lengths multiples of 8.

File header, 64 bytes: magic (8), format (4), kind (4: 0 segment, 1 snapshot), identity of the log (16),
sequence (8), first LSN (8), time of writing (8, for people), reserved (4), CRC-32 of the 60 bytes before (4).

Frame header, 40 bytes: magic (4), kind (2), reserved (2), payload bytes (4), token records (4), LSN (8),
durable LSN (8), CRC-32 of the payload (4), CRC-32 of the 36 bytes before (4). Both CRCs start from the CRC of
the log's identity, so that a frame of another log never fits.

The log sequence number (LSN) counts frames and grows by one. A frame's durable LSN says which frames were
known to be on the disk when it was written: if a later frame proves that a broken one was, the bytes were
damaged; if not, they are what a crash may leave of a write, and the log ends before them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

FORMAT = 1
FILE_MAGIC = b"OPDWAL\r\n"
FRAME_MAGIC = 0xF57A_0D1E
FRAME_BYTES = 40
HEADER_BYTES = 64
MAX_LSN = 1 << 62
"""Of a file's first frame: no log comes near it, and what follows still has a number."""
MAX_PAYLOAD = (1 << 32) - 8

_FILE = struct.Struct("<8sII16sQQdI")
_FRAME = struct.Struct("<IHHIIQQI")
_CRC = struct.Struct("<I")
_MAGIC_BYTES = _CRC.pack(FRAME_MAGIC)


class FrameKind(IntEnum):
    """What a frame's payload holds; see `records.py`."""

    OPEN = 1
    STEP = 2
    CLOSE = 3
    RETIRE = 4
    END = 5
    """Nothing follows in this file: the log was closed, or the snapshot is complete."""


class Frame(NamedTuple):
    """Where a whole, checked frame lies in its file."""

    kind: int
    tokens: int
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
        if magic != FILE_MAGIC or first_lsn > MAX_LSN:
            return None
        return cls(sequence, first_lsn, log_id, bool(kind), written_at, version)


def frame_header(kind: int, payload: list, tokens: int, lsn: int, durable: int, salt: int) -> bytes:
    """The 40 bytes before `payload`, given as objects of bytes that are written one after another."""
    checksum, length = salt, 0
    for part in payload:
        checksum = crc32(part, checksum)
        length += len(part)
    head = _FRAME.pack(FRAME_MAGIC, kind, 0, length, tokens, lsn, durable, checksum)
    return head + _CRC.pack(crc32(head, salt))


def scan(data: memoryview, start: int, first_lsn: int, salt: int) -> Iterator[Frame]:
    """Every frame from `start` on, in order, up to the first one that is cut, broken or out of sequence."""
    unpack, unpack_crc, lsn, size = _FRAME.unpack_from, _CRC.unpack_from, first_lsn, len(data)
    while start + FRAME_BYTES <= size:
        magic, kind, _, length, tokens, found, durable, checksum = unpack(data, start)
        payload = start + FRAME_BYTES
        end = payload + length
        if (
            magic != FRAME_MAGIC
            or found != lsn
            or durable > lsn
            or end > size
            or unpack_crc(data, payload - 4)[0] != crc32(data[start : payload - 4], salt)
            or checksum != crc32(data[payload:end], salt)
        ):
            return
        yield Frame(kind, tokens, lsn, durable, start, end)
        start, lsn = end, lsn + 1


class Beyond(NamedTuple):
    """What lies after the place where a log's frames stop making sense."""

    frames: int
    """Whole frames with later sequence numbers."""
    proves_loss: bool
    """One of them says that the frame missing at that place had reached the disk."""


def look_beyond(data: memoryview, offset: int, lsn: int, salt: int) -> Beyond:
    """Look for whole frames after `offset`, where the frame numbered `lsn` was expected and not found."""
    rest = bytes(data[offset:])
    frames, proves, at = 0, False, rest.find(_MAGIC_BYTES)
    budget = 4 * len(rest)  # heads made to name the same payload again and again: that is damage
    while at >= 0:
        step = 4
        if at + FRAME_BYTES <= len(rest):
            _, _, _, length, _, found, _, _ = _FRAME.unpack_from(rest, at)
            sealed = _CRC.unpack_from(rest, at + FRAME_BYTES - 4)[0]
            whole = at + FRAME_BYTES + length <= len(rest)  # of a frame cut short no payload is read
            if whole and sealed == crc32(rest[at : at + FRAME_BYTES - 4], salt):
                budget -= FRAME_BYTES + length
            if budget < 0:
                return Beyond(frames, True)
            frame = next(scan(memoryview(rest), at, found, salt), None)
            if frame is not None and found > lsn:
                frames += 1
                proves = proves or frame.durable >= lsn
                step = frame.end - frame.start
        at = rest.find(_MAGIC_BYTES, at + step)
    return Beyond(frames, proves)
