"""Which files make up a log: names, the newest snapshot, the segments after it, and what is left over."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from opd.errors import StorageError
from opd.storage.wal.frames import FORMAT, FileHeader
from opd.storage.wal.io import LogIO

LOCK = "LOCK"
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


def salt_of(log_id: bytes) -> int:
    """Where every CRC of a log's frames starts from."""
    return crc32(log_id)


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
