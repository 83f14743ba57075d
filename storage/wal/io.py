"""Everything a log asks of the operating system, in one small object.

Tests put a simulated disk in its place and enumerate what a power cut may leave. What the log relies on:
`append`, `reserve` and `cut` may be lost, cut short or reordered until `sync` of that file returns; `rename`
and `remove` may be lost or reordered until `sync_folder` returns; a file's bytes and its name are two things.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from opd.errors import RunFolderError, StorageError
from opd.storage.files import FileLock, fsync_folder, open_plain, read_plain


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
        """The bytes of a file whose size does not change any more; pages come and go as they are needed. Of a
        file that its writer cuts, the bytes that are gone would end the process with SIGBUS.
        """
        descriptor = open_plain(path)
        try:
            size = os.fstat(descriptor).st_size
            if size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
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
