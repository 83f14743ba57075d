"""Any store fsspec knows. The base of the S3 store, which replaces reading and writing by faster ways."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from opd.errors import StorageError
from opd.foreign import decoding, object_path, shown, whole
from opd.storage.object_store import (
    Chunks,
    ObjectStore,
    Request,
    StoreOptions,
    TransientError,
    chunks_of,
    with_retries,
)

T = TypeVar("T")


class FsspecStore(ObjectStore):
    """Objects below a URL such as `memory://` or `gs://`, through its fsspec file system."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        super().__init__(url, options)
        self._root = self.url.partition("://")[2].rstrip("/")
        self._made: Any = None
        self._making = threading.Lock()

    def connect(self) -> None:
        """Make the file system now; `StorageError` if there is none for this protocol."""
        self._root = self.fs._strip_protocol(self.url).rstrip("/")

    @property
    def fs(self) -> Any:
        """The file system, made when it is first needed."""
        with self._making:
            if self._made is None:
                self._made = self._make_filesystem()
            return self._made

    def size(self, path: str) -> int:
        size = self._ask(path, "looked up", lambda: self.fs.info(self._key(path))["size"])
        with decoding(lambda cause: StorageError(f"{self.name(path)} cannot be looked up: {cause}.")):
            return whole(size, 0, 2**63, "its size")

    def exists(self, path: str) -> bool:
        def look() -> bool:
            try:
                return self.fs.info(self._key(path))["type"] == "file"
            except FileNotFoundError:
                return False

        return self._ask(path, "looked up", look)

    def list(self, prefix: str = "") -> list[str]:
        folder = self._key(prefix) if prefix else self._root
        found = self._ask(prefix, "listed", lambda: self.fs.find(folder))
        start = len(self._root) + 1 if self._root else 0
        # Where a store marks folders by empty objects, the folder itself is among the found.
        names = [name for name in found if name[start:] and not name.endswith("/")]
        if stray := [name for name in names if not name.startswith(f"{folder}/" if folder else "")]:
            raise StorageError(
                f"{self.name(prefix)} was listed with {shown(stray[0])!r}, which lies elsewhere."
            )
        return sorted(object_path(name[start:]) for name in names)

    def delete(self, path: str) -> None:
        def remove() -> None:
            try:
                self.fs.rm_file(self._key(path))
            except FileNotFoundError:
                return

        self._ask(path, "deleted", remove)

    def put(self, path: str, data: bytes | Chunks) -> None:
        def write() -> None:
            file = self.fs.open(self._key(path), "wb")
            try:
                for chunk in chunks_of(data):
                    file.write(chunk)
            except BaseException:
                file.discard()
                raise
            file.close()

        self._ask(path, "written", write)

    def _read(self, request: Request) -> None:
        def read() -> None:
            data = self.fs.cat_file(self._key(request.path), start=request.start, end=request.stop)
            self._count(len(data))
            if len(data) != request.stop - request.start:
                raise TransientError(f"only {len(data)} bytes came")
            for wanted in request.ranges:
                wanted.into[:] = data[wanted.start - request.start : wanted.stop - request.start]

        self._ask(request.path, f"read (bytes {request.start}-{request.stop})", read)

    def _key(self, path: str) -> str:
        object_path(path)
        return f"{self._root}/{path}" if self._root else path

    def _ask(self, path: str, what: str, request: Callable[[], T]) -> T:
        """The result of `request`, repeated while it fails in a way that may pass."""
        where = f"{self.name(path)} cannot be {what}"

        def attempt() -> T:
            try:
                with decoding(lambda cause: StorageError(f"{where}: its answer has another form ({cause}).")):
                    return request()
            except (StorageError, TransientError):
                raise
            except FileNotFoundError as error:
                raise self._missing(path) from error
            except PermissionError as error:
                raise StorageError(
                    f"{where}: access was refused ({error}); check the credentials."
                ) from error
            except (OSError, *self._transient()) as error:
                said = shown(" ".join(str(error).split()), 300)
                raise TransientError(said or type(error).__name__) from error

        return with_retries(self.options, where, attempt)

    def _make_filesystem(self) -> Any:
        import fsspec

        try:
            return fsspec.core.url_to_fs(self.url)[0]
        except (ValueError, ImportError) as error:
            raise StorageError(f"{self.url} cannot be opened: {error}.") from error

    def _transient(self) -> tuple[type[BaseException], ...]:
        """What else, beside `OSError`, the file system raises for faults that may pass."""
        return ()
