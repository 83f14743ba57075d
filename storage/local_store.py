"""The embedded store: a folder of the local file system."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from opd.errors import StorageError
from opd.foreign import object_path
from opd.storage.files import atomic_file
from opd.storage.object_store import Chunks, ObjectStore, chunks_of
from opd.storage.ranges import Request, rest
from opd.storage.store_faults import StoreOptions, TransientError, with_retries

_MAX_VIEWS = 1024
"""The system's IOV_MAX."""


class LocalStore(ObjectStore):
    """Objects as files below `folder`; reads go by `preadv` straight into the caller's buffer."""

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        self.folder = folder.expanduser().absolute()
        super().__init__(str(self.folder), options)

    def size(self, path: str) -> int:
        target = self._at(path)
        try:
            found = target.stat()
        except OSError as error:
            raise self._refusal(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{self.name(path)} is no file; publish the model again.")
        return found.st_size

    def exists(self, path: str) -> bool:
        return self._at(path).is_file()

    def list(self, prefix: str = "") -> list[str]:
        root = self._at(prefix) if prefix else self.folder
        found = [entry for entry in root.rglob("*") if entry.is_file() and not _temporary(entry.name)]
        return sorted(entry.relative_to(self.folder).as_posix() for entry in found)

    def delete(self, path: str) -> None:
        target = self._inside(path)
        try:
            target.unlink(missing_ok=True)
        except OSError as error:
            raise self._refusal(path, error) from error

    def put(self, path: str, data: bytes | Chunks) -> None:
        try:
            with atomic_file(self._inside(path)) as file:
                for chunk in chunks_of(data):
                    file.write(chunk)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"{self.name(path)} cannot be written ({error.strerror or error}); free disk space or check"
                " permissions, then run the same command again."
            ) from error

    def _read(self, request: Request) -> None:
        what = f"{self.name(request.path)} bytes {request.start}-{request.stop} cannot be read"
        with_retries(self.options, what, lambda: self._pread(request))

    def _pread(self, request: Request) -> None:
        target = self._at(request.path)
        try:
            descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._refusal(request.path, error) from error
        try:
            at, views = request.start, request.views()
            while at < request.stop:
                received = os.preadv(descriptor, views[:_MAX_VIEWS], at)
                if not received:
                    raise StorageError(
                        f"{self.name(request.path)} ends at byte {at} where bytes"
                        f" {request.start}-{request.stop} were asked for; publish the model again."
                    )
                at, views = at + received, rest(views, received)
                self._count(received)
        except StorageError:
            raise
        except OSError as error:  # a network file system's stale handle, a failing disk
            raise TransientError(error.strerror or str(error)) from error
        finally:
            os.close(descriptor)

    def _at(self, path: str) -> Path:
        return self.folder / object_path(path)

    def _inside(self, path: str) -> Path:
        """Where `path` is written. Raises `StorageError` if a link would take it out of the store."""
        target = self._at(path)
        if not target.parent.resolve().is_relative_to(self.folder.resolve()):
            raise StorageError(
                f"{self.name(path)} would be written outside of {self.url}, where a link leads; remove the"
                " link."
            )
        return target

    def _refusal(self, path: str, error: OSError) -> StorageError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return self._missing(path)
        return StorageError(f"{self.name(path)} cannot be read ({error.strerror}); check its permissions.")


def _temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")
