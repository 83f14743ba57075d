"""A folder of blobs that is its own index: a file's name is its key, its time stamp is its last use.

    folder/v1/
        blobs/KEY                 whole blobs, never changed
        partial/KEY.XXXXXXXX      being written; locked (`flock`) while their writer lives
        quarantine/KEY.XXXXXXXX   blobs that failed their checksum; the first to go when room is needed
        leases                    who uses what
        usage                     the sum of all bytes; its lock is the folder's, held briefly

There is no second copy of the truth that could disagree with the files: `usage` only saves adding up. It is
never below the true sum, and is computed anew when the folder is opened or its own checksum is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from opd.errors import StorageError
from opd.storage.blobs import KEY_BYTES
from opd.storage.files import fsync_folder, open_plain
from opd.storage.leases import LeaseTable

_BLOCK = 4096
_LOCK_TIMEOUT = 120.0
_SCANS = 16
"""Looks at the folder before a blob gets no room; others may use blobs between a look and the eviction."""
_MOST_USED = 1 << 60
_USAGE = struct.Struct("<QQ")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def footprint(size: int) -> int:
    """Bytes of disk that a file of `size` bytes takes: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def disk_full(error: OSError) -> bool:
    """Whether the disk, the user's share of it, or the process's file size limit is used up."""
    return error.errno in _FULL


@dataclass(frozen=True, slots=True)
class Partial:
    """A blob being written: `descriptor` is open for writing and locked, `size` bytes are reserved."""

    key: bytes
    path: Path
    descriptor: int
    size: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A file that may go, as the last scan saw it."""

    path: Path
    key: bytes | None
    """None in quarantine: nothing holds it."""
    last_use: int
    """Its modification time, in nanoseconds."""


class BlobFolder:
    """Room, names and removal of blobs, shared by the processes and threads of a node."""

    def __init__(self, folder: str | os.PathLike[str], quota_bytes: int) -> None:
        """Sweep what dead writers left and evict down to `quota_bytes`. Raises `OSError`."""
        self.root = Path(folder) / "v1"
        self.quota_bytes = quota_bytes
        self.evictions = 0
        self._candidates: deque[_Candidate] = deque()
        self._blobs, self._partial, self._quarantine = (
            self.root / name for name in ("blobs", "partial", "quarantine")
        )
        for path in (self._blobs, self._partial, self._quarantine):
            path.mkdir(parents=True, exist_ok=True)
        self.leases = LeaseTable(self.root / "leases")
        with self._locked():
            self._scan()
            self._make_room(0)

    def path(self, key: bytes) -> Path:
        """Where the whole blob of `key` is, if there is one."""
        return self._blobs / key.hex()

    def used_bytes(self) -> int:
        """Bytes of disk under this folder, blobs being written and quarantine included."""
        with self._locked():
            return self._used()

    def begin(self, key: bytes, size: int) -> Partial | None:
        """Reserve room for a blob of `size` bytes; None if quota and leases, or the disk, leave none."""
        path = self._partial / f"{key.hex()}.{secrets.token_hex(4)}"
        with self._locked():
            if not self._make_room(footprint(size)):
                return None
            self._add_used(footprint(size))
            # Made, locked and as large as it will be before anybody can look: a scan counts all of it.
            partial = Partial(
                key, path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), size
            )
            try:
                fcntl.flock(partial.descriptor, fcntl.LOCK_EX)
                os.ftruncate(partial.descriptor, size)
            except OSError as error:
                self._drop(partial)
                if disk_full(error):
                    return None
                raise
        return partial

    def publish(self, partial: Partial) -> None:
        """Give a written blob its name, unless another writer of the same key was first."""
        with self._locked():
            target = self.path(partial.key)
            if target.exists():
                self._drop(partial)
                return
            self.touch(partial.descriptor)
            os.rename(partial.path, target)
            os.close(partial.descriptor)

    def discard(self, partial: Partial) -> None:
        """Give up a blob that could not be written."""
        with self._locked():
            self._drop(partial)

    def flush_names(self) -> None:
        """Make the names of all published blobs durable."""
        fsync_folder(self._blobs)

    def quarantine(self, key: bytes, descriptor: int) -> None:
        """Take the blob open at `descriptor` out of service, unless it has been replaced since."""
        path = self.path(key)
        with self._locked(), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                os.rename(path, self._quarantine / f"{key.hex()}.{secrets.token_hex(4)}")

    @staticmethod
    def touch(file: int | Path) -> None:
        """Note that a blob is used now."""
        now = time.time_ns()
        os.utime(file, ns=(now, now))

    def _make_room(self, need: int) -> bool:
        """Evict what was not used for longest until `need` bytes fit in the quota. Under the lock."""
        if need > self.quota_bytes:
            return False
        scans, outdated = 0, True
        while self._used() + need > self.quota_bytes:
            if self._candidates:
                outdated |= self._evict(self._candidates.popleft())
            elif not outdated or scans == _SCANS:
                return False  # what is left is leased or being written
            else:
                self._scan()
                scans, outdated = scans + 1, False
        return True

    def _evict(self, candidate: _Candidate) -> bool:
        """Remove a candidate unless it is leased, gone already, or was used after the scan. Returns the last:
        then its place in the order is another one.

        Whatever is not among the candidates was used after the scan, so this order is the true one.
        """
        try:
            found = candidate.path.stat()
        except FileNotFoundError:
            return False
        if found.st_mtime_ns != candidate.last_use:
            return True
        if candidate.key is None:
            candidate.path.unlink()
        else:
            with self.leases.exclusive(candidate.key) as free:
                if not free:
                    return False
                candidate.path.unlink()
        self._add_used(-footprint(found.st_size))
        self.evictions += candidate.key is not None
        return False

    def _scan(self) -> None:
        """Sweep dead writers' files, add up all bytes, and order the candidates. Under the lock."""
        used = sum(_sweep_or_size(path) for path in list(self._partial.iterdir()))
        found: list[_Candidate] = []
        for folder in (self._quarantine, self._blobs):
            for entry in os.scandir(folder):
                key = _key(entry.name) if folder is self._blobs else None
                if folder is self._blobs and key is None:
                    continue  # nothing of ours
                status = entry.stat(follow_symlinks=False)
                used += footprint(status.st_size)
                found.append(_Candidate(Path(entry.path), key, status.st_mtime_ns))
        found.sort(key=lambda candidate: (candidate.key is not None, candidate.last_use))
        self._candidates = deque(found)
        self._write_used(used)

    def _drop(self, partial: Partial) -> None:
        partial.path.unlink(missing_ok=True)
        os.close(partial.descriptor)
        self._add_used(-footprint(partial.size))

    def _used(self) -> int:
        """The sum of all bytes, as the last holder of the lock left it. Under the lock."""
        data = os.pread(self._usage, _USAGE.size, 0)
        if len(data) == _USAGE.size:
            used, check = _USAGE.unpack(data)
            if used <= _MOST_USED and check == xxhash.xxh3_64_intdigest(data[:8]):
                return used
        self._scan()
        return self._used()

    def _add_used(self, size: int) -> None:
        self._write_used(max(0, self._used() + size))

    def _write_used(self, used: int) -> None:
        check = xxhash.xxh3_64_intdigest(used.to_bytes(8, "little"))
        os.pwrite(self._usage, _USAGE.pack(used, check), 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder's exclusive lock. Opened each time, so that it excludes threads and forks as well."""
        descriptor = open_plain(self.root / "usage", os.O_RDWR | os.O_CREAT)
        try:
            _wait_for_lock(descriptor, self.root)
            self._usage = descriptor
            yield
        finally:
            os.close(descriptor)


def _wait_for_lock(descriptor: int, root: Path) -> None:
    """Take the lock; holders are brief and a dead one has lost it, so a long wait means a stopped one."""
    deadline = time.monotonic() + _LOCK_TIMEOUT
    pause = 1e-5
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the cache {root} has been locked for {_LOCK_TIMEOUT:.0f} s;"
                    " continue or end the stopped process that uses it"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)


def _sweep_or_size(path: Path) -> int:
    """Remove a partial blob whose writer is dead, that is, which nobody holds locked; else its footprint."""
    descriptor = open_plain(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return 0
    except BlockingIOError:
        return footprint(os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _key(name: str) -> bytes | None:
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(name)
        if len(key) == KEY_BYTES:
            return key
    return None
