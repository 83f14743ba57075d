"""A disk in memory that forgets: what `LogIO` promises and no more.

Written bytes may be lost until their file is synced: any sector of them may come back as it was before, or as
that up to some byte, and the file may end anywhere between its synced size and its new one. Names may be lost
until the folder is synced: any subset of the creations, renames (both halves) and removals since may have
happened. A sync that fails leaves the bytes readable and never writes them out.
"""

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opd.storage.framed_log import LogIO

SECTOR = 512


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    on_disk: bytearray = field(default_factory=bytearray)
    """What a power cut cannot take; what was there before where a failed sync lost bytes for good."""
    end: int = 0
    """Where the next append goes; zeros may have been reserved behind it."""
    dirty: list[tuple[int, int]] = field(default_factory=list)
    """Byte ranges written since the last sync."""

    def write(self, data: bytes, at: int) -> None:
        self.data.extend(bytes(max(0, at + len(data) - len(self.data))))
        self.data[at : at + len(data)] = data
        self.dirty.append((at, at + len(data)))

    def resize(self, size: int) -> None:
        """What the disk holds, cut or filled up with zeros."""
        self.on_disk = self.on_disk[:size] + bytes(max(0, size - len(self.on_disk)))


class NoLock:
    def release(self) -> None:
        """There is nobody else."""


class SimulatedDisk(LogIO):
    """One folder. `after` is called after every operation, and in the middle of every append."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.names_now: dict[str, File] = {}
        for name, data in (files or {}).items():
            self.names_now[name] = File(bytearray(data), bytearray(data))
        self.names_on_disk = dict(self.names_now)
        self._pending: list[tuple[str, File | None]] = []
        self._handles: dict[int, File] = {}
        self._next = 3
        self.after: Callable[[], None] = lambda: None
        self.fail_in: int | None = None
        """Let the operation fail that comes after this many others; `None` for never."""

    def lock(self, path: Path) -> NoLock:  # type: ignore[override]
        return NoLock()

    def make_folder(self, folder: Path) -> None:
        return None

    def file_names(self, folder: Path) -> list[str]:
        return list(self.names_now)

    def read(self, path: Path) -> memoryview:
        if path.name not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        return memoryview(bytes(self.names_now[path.name].data))

    map_file = read

    def create(self, path: Path) -> int:
        self._may_fail(errno.ENOSPC)
        file = File()
        self._rename_entry(path.name, file)
        self._next += 1
        self._handles[self._next] = file
        self.after()
        return self._next

    def append(self, file: int, buffers: list) -> None:
        data, target = b"".join(bytes(part) for part in buffers), self._handles[file]
        half, end = len(data) // 2, target.end
        target.write(data[:half], end)
        target.end = end + half
        self.after()
        self._may_fail(errno.ENOSPC)
        target.write(data[half:], end + half)
        target.end = end + len(data)
        self.after()

    def reserve(self, file: int, start: int, count: int) -> None:
        for part in (count // 2, count - count // 2):
            self._may_fail(errno.ENOSPC)
            self._handles[file].write(bytes(part), start)
            start += part
            self.after()

    def truncate_file(self, file: int, size: int) -> None:
        self._may_fail(errno.EIO)
        target = self._handles[file]
        del target.data[size:]
        target.dirty = [(start, min(stop, size)) for start, stop in target.dirty if start < size]
        self.after()

    def sync(self, file: int) -> None:
        target = self._handles[file]
        dirty, target.dirty = target.dirty, []
        target.resize(len(target.data))
        self._may_fail(errno.EIO)
        for start, stop in dirty:
            target.on_disk[start:stop] = target.data[start:stop]
        self.after()

    def close(self, file: int) -> None:
        del self._handles[file]

    def rename(self, source: Path, target: Path) -> None:
        self._may_fail(errno.EIO)
        self._rename_entry(target.name, self.names_now[source.name])
        self._rename_entry(source.name, None)
        self.after()

    def remove(self, path: Path) -> None:
        self._rename_entry(path.name, None)
        self.after()

    def sync_folder(self, folder: Path) -> None:
        self._may_fail(errno.EIO)
        self.names_on_disk, self._pending = dict(self.names_now), []
        self.after()

    def _may_fail(self, code: int) -> None:
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                raise OSError(code, os.strerror(code))

    def _rename_entry(self, name: str, file: File | None) -> None:
        self._pending.append((name, file))
        if file is None:
            self.names_now.pop(name, None)
        else:
            self.names_now[name] = file

    def power_cut(self, rng: random.Random) -> dict[str, bytes]:
        """One of the states in which the disk may be found after the power goes now."""
        mood = rng.random()
        names = dict(self.names_on_disk)
        for name, file in self._pending:
            if mood < 0.1 or (mood > 0.2 and rng.random() < 0.5):
                if file is None:
                    names.pop(name, None)
                else:
                    names[name] = file
        return {name: _torn(file, rng) for name, file in names.items()}


def _torn(file: File, rng: random.Random) -> bytes:
    safe, size = len(file.on_disk), len(file.data)
    if safe == size and not file.dirty:
        return bytes(file.on_disk)
    mood = rng.random()
    end = safe if mood < 0.1 else size if mood < 0.4 else rng.randint(min(safe, size), max(safe, size))
    image = bytearray(max(safe, size))
    image[:safe] = file.on_disk
    lossy = rng.random() < 0.6
    for start, stop in file.dirty:
        for sector in range(start // SECTOR, -(-stop // SECTOR)):
            first, last = max(sector * SECTOR, start), min((sector + 1) * SECTOR, stop)
            if lossy and rng.random() < 0.4:
                last = first if rng.random() < 0.5 else rng.randint(first, last)
            image[first:last] = file.data[first:last]
    return bytes(image[:end])
