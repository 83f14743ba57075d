"""The folder of a node's cache: a file for each blob, their names, their bytes on disk, and eviction.

    folder/v3/
        blobs/HH/KEY    one blob (`blobs.py`) under its key in hex; its mtime is the time of its last use
        new/            blobs being written, each locked (`flock`) by its writer
        index           LMDB: bytes of disk by key, of what is being written, and of all
        lock            held by whoever reads or changes the index
        users           locked, shared, by every process that has the cache open
        leases          which keys are in use (`leases.py`)

A rename publishes a blob, an unlink evicts it, and a process that has it mapped keeps its bytes. The index
adds up what the files say. It has no checksums, so it is trusted only while the cache is open: a process that
opens a cache which nobody else has open makes the index anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import secrets
import shutil
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

from opd.storage.blobs import KEY_BYTES
from opd.storage.files import open_plain, write_at
from opd.storage.leases import LeaseTable

BLOCK = 4096
_INDEX_BYTES = 1 << 30
"""Limit of the index. A blob takes 100 bytes or so."""
_SCANS = 16
"""Scans of the cache before a blob is refused: others may use blobs between a scan and the eviction."""
_LITTLE = 256 * 1024
"""Free bytes of a disk that counts as full."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_A_FILE = (errno.EISDIR, errno.ENXIO)
"""A link, a pipe or a folder is in the place of a blob."""
_NUMBER = struct.Struct("<Q")
_USED, _WRITING = b"used", b"writing "


def disk_full(error: OSError) -> bool:
    """Return whether the disk, the user's quota, or the process's file size limit is used up."""
    return error.errno in _FULL


def on_disk(size: int) -> int:
    """Return the bytes of disk that a file of `size` bytes takes, in whole blocks."""
    return -(-size // BLOCK) * BLOCK


class NewBlob(NamedTuple):
    """A blob that is being written: an open, locked file without a name in the cache."""

    key: bytes
    path: Path
    descriptor: int
    size: int
    """Bytes of the whole blob."""

    def write(self, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write `parts`, one after another, from byte `offset` on. Raises `OSError`."""
        for part in parts:
            write_at(self.descriptor, offset, part)
            offset += len(part)


class CacheFiles:
    """The blobs of a cache within a quota, shared by the processes and threads of a node."""

    def __init__(
        self, folder: str | os.PathLike[str], quota_bytes: int, kept_since: int | None = None
    ) -> None:
        """Remove files of dead writers and evict down to `quota_bytes`. Raises `OSError`.

        Blobs used after `kept_since` (Unix time in ns) are never evicted.
        """
        self.root = Path(folder) / "v3"
        self.quota_bytes = quota_bytes
        self.evictions = 0
        self._kept_since = kept_since
        self._candidates: deque[tuple[bytes, int]] = deque()
        """Keys and times of their last use, oldest first. Read and changed under the lock."""
        for path in (self.root, self.root / "blobs", self.root / "new"):
            if path.is_symlink():  # it would be followed
                raise OSError(errno.ENXIO, f"{path.name} is a link", str(path))
            path.mkdir(parents=True, exist_ok=True)
        self._users = -1
        self.leases = LeaseTable(self.root / "leases")
        self._users = open_plain(self.root / "users", os.O_RDWR | os.O_CREAT)
        try:
            with self._lock_index():
                try:
                    fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    alone = False  # another process has the cache open
                else:
                    alone = True  # and nobody can open it until `LOCK_SH` is taken
                if alone:
                    self._make_index()
                fcntl.flock(self._users, fcntl.LOCK_SH)
            with self.open_index() as txn:
                self._sweep_unfinished(txn)
                self._free_bytes(txn, 0)
        except BaseException:
            self.close()
            raise

    def blob_path(self, key: bytes) -> Path:
        """Return the path of the blob of `key`, which may not exist."""
        name = key.hex()
        return self.root / f"blobs/{name[:2]}/{name}"

    def open_blob(self, key: bytes) -> int | None:
        """Return a descriptor of the blob of `key`, or `None` if there is no file. Raises `OSError`."""
        try:
            return open_plain(self.blob_path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            return None

    def mark_used(self, descriptor: int) -> None:
        """Record that an open blob is used now. Raises `OSError`."""
        now = time.time_ns()
        os.utime(descriptor, ns=(now, now))

    def has_blob(self, key: bytes) -> bool:
        """Return whether there is a blob of `key`, and record that it is used now. Raises `OSError`."""
        descriptor = self.open_blob(key)
        if descriptor is None:
            return False
        try:
            self.mark_used(descriptor)
        finally:
            os.close(descriptor)
        return True

    def used_bytes(self) -> int:
        """Return the bytes of disk that all blobs take, unfinished ones included. Raises `OSError`."""
        with self.open_index() as txn:
            return _read_number(txn, _USED)

    def reserve_blobs(self, wanted: Sequence[tuple[bytes, int]]) -> list[NewBlob | None]:
        """Begin a blob for each key and size, or `None` if leases or the disk leave no capacity.

        Raises `OSError`.
        """
        blobs: list[NewBlob | None] = []
        try:
            with self.open_index() as txn:
                evicts = True
                for key, size in wanted:
                    need = on_disk(size)
                    if evicts and need <= self.quota_bytes:
                        evicts = self._free_bytes(txn, need)
                    blobs.append(self._begin_blob(txn, key, size) if self._fits_quota(txn, need) else None)
        except BaseException as error:
            for blob in filter(None, blobs):
                _drop_blob(blob)
            if not (isinstance(error, OSError) and disk_full(error)):
                raise
            return [None] * len(wanted)
        return blobs

    def publish_blobs(self, written: Sequence[NewBlob]) -> None:
        """Give written blobs their names, unless another writer of the same key was first.

        Raises `OSError`, and then none of them has its name.
        """
        published: list[Path] = []
        try:
            with self.open_index() as txn:
                for blob in written:
                    _set_size(txn, _WRITING + blob.path.name.encode(), None)
                    path = self.blob_path(blob.key)
                    if path.is_file() and not path.is_symlink():
                        blob.path.unlink()
                        continue
                    self.mark_used(blob.descriptor)
                    try:
                        os.rename(blob.path, path)
                    except FileNotFoundError:
                        path.parent.mkdir(exist_ok=True)
                        os.rename(blob.path, path)
                    published.append(path)
                    _set_size(txn, blob.key, on_disk(blob.size))
        except BaseException:  # the index is full: a blob it does not count must not stay
            for path in published:
                path.unlink(missing_ok=True)
            raise
        for blob in written:
            os.close(blob.descriptor)

    def discard_blobs(self, blobs: Sequence[NewBlob]) -> None:
        """Give up blobs that could not be written."""
        for blob in blobs:
            _drop_blob(blob)
        if blobs:
            with contextlib.suppress(OSError), self.open_index() as txn:  # or a later sweep does it
                self._sweep_unfinished(txn)

    def remove_blob(self, key: bytes, inode: int) -> None:
        """Remove a damaged blob, unless another one has taken its place. Raises `OSError`."""
        with self.open_index() as txn, contextlib.suppress(FileNotFoundError):
            path = self.blob_path(key)
            if path.lstat().st_ino == inode:
                path.unlink()
                _set_size(txn, key, None)

    def close(self) -> None:
        """End all leases of this object and let the folder go."""
        self.leases.close()
        if self._users >= 0:
            os.close(self._users)
            self._users = -1

    def __del__(self) -> None:
        if getattr(self, "_users", -1) >= 0:
            os.close(self._users)

    @contextlib.contextmanager
    def open_index(self) -> Iterator[lmdb.Transaction]:
        """Hold the lock and yield a transaction on the index, which an error undoes. Raises `OSError`."""
        with self._lock_index(), self._open_transaction() as txn:
            yield txn

    @contextlib.contextmanager
    def _lock_index(self) -> Iterator[None]:
        """Hold the lock, against other processes and against other threads of this one."""
        descriptor = open_plain(self.root / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _open_transaction(self) -> Iterator[lmdb.Transaction]:
        """Open the index for one transaction: nothing of LMDB's is left open for a fork to copy."""
        path = self.root / "index"
        with contextlib.suppress(FileNotFoundError):
            os.close(open_plain(path))  # LMDB would follow a link, or wait for a pipe
        options = {"subdir": False, "lock": False, "sync": False, "metasync": False, "readahead": False}
        try:
            with (
                lmdb.open(str(path), map_size=_INDEX_BYTES, **options) as environment,
                environment.begin(write=True) as txn,
            ):
                yield txn
        except lmdb.Error as error:
            full = isinstance(error, lmdb.MapFullError) or _free_space(path) < _LITTLE
            raise OSError(errno.ENOSPC if full else errno.EIO, f"the cache's index: {error}") from error

    def _make_index(self) -> None:
        """Rebuild the index from the files' sizes, without unfinished blobs. Under the lock."""
        (self.root / "index").unlink(missing_ok=True)
        shutil.rmtree(self.root.with_name("v2"), ignore_errors=True)  # of opd 0.2.0
        for path in (self.root / "new").iterdir():
            path.unlink()
        with self._open_transaction() as txn:
            for folder in filter(Path.is_symlink, (self.root / "blobs").iterdir()):
                folder.unlink()
            for path in (self.root / "blobs").glob("??/*"):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and re.fullmatch(r"[0-9a-f]{64}", path.name):
                    _set_size(txn, bytes.fromhex(path.name), on_disk(status.st_size))

    def _begin_blob(self, txn: lmdb.Transaction, key: bytes, size: int) -> NewBlob:
        path = self.root / "new" / secrets.token_hex(8)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # a sweep, which needs the index, cannot have come before
        blob = NewBlob(key, path, descriptor, size)
        try:
            _set_size(txn, _WRITING + path.name.encode(), on_disk(size), key)
        except BaseException:
            _drop_blob(blob)
            raise
        return blob

    def _fits_quota(self, txn: lmdb.Transaction, need: int) -> bool:
        return _read_number(txn, _USED) + need <= self.quota_bytes

    def _free_bytes(self, txn: lmdb.Transaction, need: int) -> bool:
        """Evict the least recently used blobs until `need` bytes fit. Return whether they do."""
        scanned = False
        for _ in range(_SCANS):
            used_since = False
            while self._candidates and not self._fits_quota(txn, need):
                used_since |= self._evict_blob(txn, *self._candidates.popleft())
            if self._fits_quota(txn, need) or (scanned and not used_since):
                break  # the remaining blobs are leased or unfinished
            self._sweep_unfinished(txn)
            self._candidates, scanned = self._by_last_use(txn), True
        return self._fits_quota(txn, need)

    def _evict_blob(self, txn: lmdb.Transaction, key: bytes, last_use: int) -> bool:
        """Remove a candidate unless it is leased. Return whether it stays because it was used since."""
        with self.leases.try_exclusive(key) as free, contextlib.suppress(FileNotFoundError):
            path = self.blob_path(key)
            if path.lstat().st_mtime_ns != last_use:
                return True
            if free:
                path.unlink()
                _set_size(txn, key, None)
                self.evictions += 1
        return False

    def _by_last_use(self, txn: lmdb.Transaction) -> deque[tuple[bytes, int]]:
        """Return evictable blobs, the oldest use first. Files that somebody removed leave the index."""
        blobs, gone, now = [], [], time.time_ns()
        for key in _entry_names(txn):
            if len(key) != KEY_BYTES:
                continue
            try:
                used = self.blob_path(key).lstat().st_mtime_ns
            except FileNotFoundError:
                gone.append(key)
                continue
            if self._kept_since is None or not self._kept_since <= used <= now:
                blobs.append((used, key))
        for key in gone:
            _set_size(txn, key, None)
        return deque((key, used) for used, key in sorted(blobs))

    def _sweep_unfinished(self, txn: lmdb.Transaction) -> None:
        """Remove files of dead writers."""
        for name in [name for name in _entry_names(txn) if name.startswith(_WRITING)]:
            path = self.root / "new" / name.removeprefix(_WRITING).decode()
            with contextlib.suppress(FileNotFoundError):
                descriptor = open_plain(path)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    continue
                finally:
                    os.close(descriptor)
            key = bytes(txn.get(name, b""))[_NUMBER.size :]
            _set_size(txn, name, None)
            if txn.get(key) is None:
                with contextlib.suppress(FileNotFoundError):  # or its writer died after the rename
                    _set_size(txn, key, on_disk(self.blob_path(key).lstat().st_size))


def _entry_names(txn: lmdb.Transaction) -> list[bytes]:
    return [bytes(name) for name in txn.cursor().iternext(values=False)]


def _read_number(txn: lmdb.Transaction, name: bytes) -> int:
    return _NUMBER.unpack_from(txn.get(name, bytes(8)))[0]


def _set_size(txn: lmdb.Transaction, name: bytes, size: int | None, key: bytes = b"") -> None:
    """Set the bytes of disk that `name` takes, `None` to remove it, and update the sum."""
    old_size = _read_number(txn, name)
    if size is None:
        txn.delete(name)
    else:
        txn.put(name, _NUMBER.pack(size) + key)
    txn.put(_USED, _NUMBER.pack(max(0, _read_number(txn, _USED) - old_size + (size or 0))))


def _drop_blob(blob: NewBlob) -> None:
    with contextlib.suppress(OSError):
        blob.path.unlink()
    with contextlib.suppress(OSError):
        os.close(blob.descriptor)


def _free_space(path: Path) -> int:
    """Return the bytes by which a file may grow, on its disk and within the process's limit."""
    limit, free = resource.getrlimit(resource.RLIMIT_FSIZE)[0], shutil.disk_usage(path.parent).free
    size = path.stat().st_size if path.exists() else 0
    return free if limit == resource.RLIM_INFINITY else min(free, limit - size)
