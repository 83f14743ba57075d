"""A store of objects below one URL: ranged reads into a buffer, whole or absent writes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from opd.errors import StorageError
from opd.foreign import require_memory
from opd.storage.ranges import Range, Request, join
from opd.storage.store_faults import MIB, StoreOptions

LEAST_BYTES = 2 * MIB
"""Of one request, where more are wanted: below, requests cost more than their bytes."""

Chunks = Callable[[], Iterator[bytes | memoryview]]
"""Makes the content of an object anew at every call, piece by piece, so that a write can be repeated."""


class ObjectStore(ABC):
    """Objects below `url`; paths are relative to it, with `/` between their parts. Safe between threads.

    No path leads anywhere else: stores pass each through `foreign.object_path`. Every method raises
    `StorageError` in one sentence with object, range and cause. Faults that may pass (unreachable, reset,
    stalled, 5xx, short body) are retried first, as `StoreOptions` says.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = url.rstrip("/")
        self.options = options
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._pool: ThreadPoolExecutor | None = None

    @staticmethod
    def open(url: str | Path, *, options: StoreOptions | None = None) -> ObjectStore:
        """The store at `url`: a path, `file://`, `s3://` (extra `s3`), or any other protocol of fsspec.

        S3 takes endpoint, credentials and region from the usual AWS variables and files. Nothing is read
        yet. Raises `StorageError` for an unknown protocol, `MissingExtraError` without s3fs.
        """
        text, chosen = str(url), options or StoreOptions()
        protocol, separator, rest = text.partition("://")
        if not separator or protocol == "file":
            from opd.storage.local_store import LocalStore

            return LocalStore(Path(rest if separator else text), chosen)
        if protocol in ("s3", "s3a"):
            from opd.storage.s3_store import S3Store

            return S3Store(f"s3://{rest}", chosen)
        from opd.storage.fsspec_store import FsspecStore

        other = FsspecStore(text, chosen)
        other.connect()
        return other

    @property
    def bytes_read(self) -> int:
        """Bytes of objects received so far, those read again included."""
        return self._bytes_read

    def name(self, path: str) -> str:
        """The full address of `path`, as errors give it."""
        return f"{self.url}/{path}" if path else self.url

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of the object; `StorageError` if there is none."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether the object is there and whole."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Paths of all objects below the folder `prefix`, sorted; none if there is no such folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove the object; does nothing if it is not there."""

    @abstractmethod
    def put(self, path: str, data: bytes | Chunks) -> None:
        """Write the object, replacing an old one. Afterwards it is durable; before, nobody sees it."""

    @abstractmethod
    def _read(self, request: Request) -> None:
        """Fill the ranges of `request`, with retries."""

    def get(self, path: str, most: int | None = None) -> bytes:
        """The whole object. With `most`, `StorageError` if it has more bytes, before any is read."""
        size = self.size(path)
        if most is not None and size > most:
            raise StorageError(
                f"{self.name(path)} has {size} bytes where at most {most} are read; check the URL, or publish"
                " the model again."
            )
        require_memory(size, self.name(path))
        return self.get_range(path, 0, size)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes `start ... stop - 1` of the object."""
        buffer = bytearray(stop - start)
        self.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Fill `into` with the object's bytes from `start` on; large reads are split and run in parallel."""
        step = self.request_bytes(len(into))
        self.read_ranges(
            [Range(path, start + at, into[at : at + step]) for at in range(0, len(into), step)], None
        )

    def request_bytes(self, wanted: int) -> int:
        """How large requests should be, so that `wanted` bytes keep every thread busy to the end."""
        threads = self.options.threads
        rounds = max(1, -(-wanted // (threads * self.options.chunk_bytes)))
        return max(LEAST_BYTES, -(-wanted // (threads * rounds)))

    def read_range(self, wanted: Range) -> None:
        """Fill one range by one request, in the calling thread: also from inside `arrived`, below."""
        self._read(Request([wanted]))

    def read_ranges(self, ranges: Sequence[Range], arrived: Callable[[Range], None] | None) -> None:
        """Read all `ranges`, by `options.threads` requests at a time; neighbours share a request.

        `arrived` is called with each range that is complete, in the thread that read it, so that checksums
        are computed while others are still under way; it must not wait for another `read_ranges` or
        `read_into`, whose threads may all be waiting like it. When it raises, or a read fails, the first
        error is raised after all running reads have ended: nothing writes into the buffers afterwards.
        """

        def read(request: Request) -> None:
            self._read(request)
            if arrived is not None:
                for wanted in request.ranges:
                    arrived(wanted)

        requests = join(ranges, self.request_bytes(sum(len(wanted.into) for wanted in ranges)))
        if len(requests) <= 1 or self.options.threads <= 1:
            for request in requests:
                read(request)
            return
        pool = self._threads()
        futures: list[Future[None]] = [pool.submit(read, request) for request in requests]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()

    def close(self) -> None:
        """Give back threads and connections. The store can be used again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.options.threads, thread_name_prefix="opd-store")
            return self._pool

    def _count(self, received: int) -> None:
        with self._lock:
            self._bytes_read += received

    def _missing(self, path: str) -> StorageError:
        return StorageError(f"{self.name(path)} does not exist; check the URL, or publish the model again.")


def chunks_of(data: bytes | Chunks) -> Iterator[bytes | memoryview]:
    """The pieces of `data`, once."""
    return iter((data,)) if isinstance(data, bytes) else data()
