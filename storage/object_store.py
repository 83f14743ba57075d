"""A store of objects below one URL: ranged reads into a buffer, complete or absent writes, faults and
retries. A folder is a store, and so is any store that fsspec knows. The S3 store (`s3_store.py`) replaces
reading and writing by faster ways.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote

from opd.errors import StorageError, limit_fix
from opd.retry import Retry
from opd.storage.files import atomic_file, open_plain
from opd.untrusted import (
    bounded_integer,
    convert_decode_errors,
    core_count,
    object_path,
    ranks_here,
    require_memory,
    safe_excerpt,
)

T = TypeVar("T")
MIB = 2**20
STORES = Retry(attempts=10, pause=0.1, longest=5.0)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Time-outs, retries and sizes of requests. The defaults outlast a store that is away for ten seconds."""

    retry: Retry = STORES
    connect_seconds: float = 5.0
    stall_seconds: float = 10.0
    """A transfer slower than `least_bytes_per_second` for this long has failed."""
    least_bytes_per_second: int = 16 * 1024
    write_seconds: float = 60.0
    """Longest time an upload of one part (16 MiB) or a request about an object may take."""
    chunk_bytes: int = 16 * MIB
    """Most bytes of one ranged read."""
    threads: int = 4
    """Ranges read at the same time."""
    rereads: int = 3
    """Number of times a block with a wrong checksum is read again."""
    endpoint: str | None = None
    """S3 endpoint. Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the AWS configuration, else AWS."""


class TransientError(Exception):
    """A fault that may pass by itself. Its text is the cause, in a few words."""


def with_retries(options: StoreOptions, fault: str, attempt: Callable[[], T]) -> T:
    """Return the result of `attempt`, which is called again while it raises `TransientError`.

    Raises `StorageError` ("FAULT: cause; ...") when the attempts are used up.
    """

    def used_up(error: TransientError, seconds: float) -> StorageError:
        return StorageError(
            f"{fault}: {error}, {options.retry.attempts} times in {seconds:.1f} s; check that the store is"
            " reachable and healthy, then run the command again, a run with --resume."
        )

    return options.retry.call(attempt, TransientError, used_up)


MAX_GAP = 64 * 1024
"""Bytes between two ranges of one object that are read and dropped rather than skipped by a new request."""


@dataclass(frozen=True, slots=True)
class Range:
    """`len(into)` bytes of the object `path`, from byte `start` on."""

    path: str
    start: int
    into: memoryview
    """Writable, contiguous, of bytes."""

    @property
    def stop(self) -> int:
        return self.start + len(self.into)


class RangeRequest:
    """Neighbouring ranges of one object, in order, that one request reads."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = ranges
        self.path, self.start, self.stop = ranges[0].path, ranges[0].start, ranges[-1].stop

    def target_views(self) -> list[memoryview]:
        """Return targets of the bytes `start ... stop - 1`. Gaps go into unused memory."""
        views, at = [], self.start
        for wanted in self.ranges:
            if wanted.start > at:
                views.append(memoryview(bytearray(wanted.start - at)))
            views.append(wanted.into)
            at = wanted.stop
        return views


def join_ranges(ranges: Sequence[Range], size: int) -> list[RangeRequest]:
    """Merge neighbours among `ranges`, in their order, into requests of about `size` bytes.

    A run of neighbours is cut at ends of ranges, as near as possible to every multiple of `size`. So its
    requests are equally large, and as many as `size` needs.
    """
    groups: list[list[Range]] = []
    edge = 0  # target end of the last request
    for wanted in ranges:
        middle = (wanted.start + wanted.stop) // 2
        last = groups[-1][-1] if groups else None
        near = last and last.path == wanted.path and 0 <= wanted.start - last.stop <= MAX_GAP
        if near and middle <= edge:
            groups[-1].append(wanted)
            continue
        groups.append([wanted])
        edge = edge if near else wanted.start
        while edge < middle:
            edge += size
    return [RangeRequest(group) for group in groups]


def skip_bytes(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return `views` without their first `done` bytes."""
    remaining = []
    for view in views:
        if done < len(view):
            remaining.append(view[done:])
        done = max(0, done - len(view))
    return remaining


LEAST_BYTES = 2 * MIB
"""Least bytes of one request, if more are wanted. Below this, requests cost more than their bytes."""

Chunks = Callable[[], Iterator[bytes | memoryview]]
"""Yields the content of an object again at every call, in chunks, so that a write can be repeated."""


def folder_of(url: str | Path) -> Path | None:
    """Return the folder of `url`, a path or `file://`, or `None` if it names another store.

    In `file://` URLs `%20` is a blank, as `Path.as_uri` writes it.
    """
    protocol, separator, path = str(url).partition("://")
    return Path(unquote(path) if separator else protocol) if not separator or protocol == "file" else None


class ObjectStore(ABC):
    """Objects below `url`. Paths are relative to it, with `/` between their parts. Safe between threads.

    No path leads anywhere else: stores pass each through `untrusted.object_path`. Every method raises
    `StorageError` in one sentence with object, range and cause. Faults that may pass (unreachable, reset,
    stalled, 5xx, short body) are retried first, as `StoreOptions` says.
    """

    near: ClassVar[bool] = False
    """Whether its objects are files of this machine, so that copying them saves nothing."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = url.rstrip("/")
        self.options = options
        self._lock = threading.Lock()
        self.bytes_read = 0
        """Bytes of objects received so far, including bytes read again."""
        self._pool: ThreadPoolExecutor | None = None

    @staticmethod
    def open(url: str | Path, *, options: StoreOptions | None = None) -> ObjectStore:
        """Return the store at `url`: a path, `file://`, `s3://` (extra `s3`), or any other protocol of
        fsspec.

        S3 takes endpoint, credentials and region from the usual AWS variables and files. Nothing is read yet.
        Raises `StorageError` for an unknown protocol, `MissingExtraError` without s3fs.
        """
        text, folder = str(url), folder_of(url)
        if folder is not None:
            # Half of this rank's share of the processor, 4 to 16: a file in the page cache is read as fast as
            # cores copy it and compute its checksums.
            threads = max(4, min(16, core_count() // max(1, ranks_here()) // 2))
            return LocalStore(folder, options or StoreOptions(threads=threads))
        chosen = options or StoreOptions()
        protocol, _, path = text.partition("://")
        if protocol in ("s3", "s3a"):
            from opd.storage.s3_store import S3Store

            return S3Store(f"s3://{path}", chosen)
        other = FsspecStore(text, chosen)
        other.connect()
        return other

    def object_address(self, path: str) -> str:
        """Return the full address of `path`, as errors give it."""
        return f"{self.url}/{path}" if path else self.url

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the bytes of the object. Raises `StorageError` if there is none."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether the object exists and is complete."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove the object. Does nothing if it does not exist."""

    @abstractmethod
    def put(self, path: str, data: bytes | Chunks) -> None:
        """Write the object, replacing an old one. Afterwards it is durable. Before, nobody sees it."""

    @abstractmethod
    def _read(self, request: RangeRequest) -> None:
        """Fill the ranges of `request`, with retries."""

    def get(self, path: str, most: int | None = None) -> bytes:
        """Return the full object. With `most`, raise `StorageError` if it has more, before reading."""
        size = self.size(path)
        if most is not None and size > most:
            raise StorageError(
                f"{self.object_address(path)} has {size} bytes where at most {most} are read; check the URL,"
                " or publish the model again."
            )
        require_memory(size, self.object_address(path))
        return self.get_range(path, 0, size)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes `start ... stop - 1` of the object."""
        buffer = bytearray(stop - start)
        self.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Fill `into` with the object's bytes from `start` on. Large reads are split and run in parallel."""
        step = self.request_bytes(len(into))
        self.read_ranges(
            [Range(path, start + at, into[at : at + step]) for at in range(0, len(into), step)], None
        )

    def request_bytes(self, wanted: int) -> int:
        """Return the request size with which `wanted` bytes keep every thread busy to the end."""
        threads = self.options.threads
        rounds = max(1, -(-wanted // (threads * self.options.chunk_bytes)))
        return max(LEAST_BYTES, -(-wanted // (threads * rounds)))

    def read_range(self, wanted: Range) -> None:
        """Fill one range by one request, in the calling thread. `arrived`, below, may call it."""
        self._read(RangeRequest([wanted]))

    def read_ranges(self, ranges: Sequence[Range], arrived: Callable[[Range], None] | None) -> None:
        """Read all `ranges`, by `options.threads` requests at a time. Neighbours share a request.

        `arrived` is called with each complete range, in the thread that read it, so that checksums are
        computed while others are still under way. It must not wait for another `read_ranges` or `read_into`,
        whose threads may all be waiting like it. If it raises, or a read fails, the first error is raised
        after all running reads have ended: nothing writes into the buffers afterwards.
        """

        def read_one(request: RangeRequest) -> None:
            self._read(request)
            if arrived is not None:
                for wanted in request.ranges:
                    arrived(wanted)

        requests = join_ranges(ranges, self.request_bytes(sum(len(wanted.into) for wanted in ranges)))
        if len(requests) <= 1 or self.options.threads <= 1:
            for request in requests:
                read_one(request)
            return
        pool = self._thread_pool()
        futures: list[Future[None]] = [pool.submit(read_one, request) for request in requests]
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
        """Close threads and connections. The store can be used again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _thread_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.options.threads, thread_name_prefix="opd-store")
            return self._pool

    def _count_received(self, received: int) -> None:
        with self._lock:
            self.bytes_read += received

    def _no_file(self, path: str) -> StorageError:
        return StorageError(f"{self.object_address(path)} is no file; publish the model again.")

    def _missing_error(self, path: str) -> StorageError:
        return StorageError(
            f"{self.object_address(path)} does not exist; check the URL, or publish the model again."
        )


def chunks_of(data: bytes | Chunks) -> Iterator[bytes | memoryview]:
    """Return an iterator over the chunks of `data`, once."""
    return iter((data,)) if isinstance(data, bytes) else data()


_MAX_VIEWS = 1024
"""The system's IOV_MAX."""


class LocalStore(ObjectStore):
    """Objects as files below `folder`. `preadv` reads straight into the caller's buffer."""

    near = True

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        self.folder = folder.expanduser().absolute()
        super().__init__(str(self.folder), options)

    def size(self, path: str) -> int:
        target = self._path_of(path)
        try:
            status = target.stat()
        except OSError as error:
            raise self._read_error(path, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise self._no_file(path)
        return status.st_size

    def exists(self, path: str) -> bool:
        return self._path_of(path).is_file()

    def delete(self, path: str) -> None:
        target = self._writable_path(path)
        try:
            target.unlink(missing_ok=True)
        except OSError as error:
            raise self._read_error(path, error) from error

    def put(self, path: str, data: bytes | Chunks) -> None:
        try:
            with atomic_file(self._writable_path(path)) as file:
                for chunk in chunks_of(data):
                    file.write(chunk)
        except StorageError:
            raise
        except OSError as error:
            mend = limit_fix(error, "free disk space or check permissions")
            raise StorageError(
                f"{self.object_address(path)} cannot be written ({error.strerror or error}); {mend}, then run"
                " the command again, a run with --resume."
            ) from error

    def _read(self, request: RangeRequest) -> None:
        fault = f"{self.object_address(request.path)} bytes {request.start}-{request.stop} cannot be read"
        with_retries(self.options, fault, lambda: self._pread_request(request))

    def _pread_request(self, request: RangeRequest) -> None:
        target = self._path_of(request.path)
        try:
            descriptor = open_plain(target, follow=True)  # a pipe put in its place would block
        except OSError as error:
            raise self._read_error(request.path, error) from error
        try:
            at, views = request.start, request.target_views()
            while at < request.stop:
                received = os.preadv(descriptor, views[:_MAX_VIEWS], at)
                if not received:
                    raise StorageError(
                        f"{self.object_address(request.path)} ends at byte {at} where bytes"
                        f" {request.start}-{request.stop} were asked for; publish the model again."
                    )
                at, views = at + received, skip_bytes(views, received)
                self._count_received(received)
        except StorageError:
            raise
        except OSError as error:  # a network file system's stale handle, a failing disk
            raise TransientError(error.strerror or str(error)) from error
        finally:
            os.close(descriptor)

    def _path_of(self, path: str) -> Path:
        return self.folder / object_path(path)

    def _writable_path(self, path: str) -> Path:
        """Return the path to write. Raises `StorageError` if a link would lead out of the store."""
        target = self._path_of(path)
        if not target.parent.resolve().is_relative_to(self.folder.resolve()):
            raise StorageError(
                f"{self.object_address(path)} would be written outside of {self.url}, where a link leads;"
                " remove the link."
            )
        return target

    def _read_error(self, path: str, error: OSError) -> StorageError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return self._missing_error(path)
        if error.errno in (errno.EISDIR, errno.ENXIO):
            return self._no_file(path)
        mend = limit_fix(error, "check its permissions")
        return StorageError(f"{self.object_address(path)} cannot be read ({error.strerror}); {mend}.")


_ELSEWHERE = "give a folder, or s3://BUCKET/PREFIX"


def _error_text(error: BaseException) -> str:
    return safe_excerpt(" ".join(str(error).split()), 300) or type(error).__name__


class FsspecStore(ObjectStore):
    """Objects below a URL such as `memory://` or `gs://`, through its fsspec file system."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        super().__init__(url, options)
        self._root = self.url.partition("://")[2].rstrip("/")
        self._made: Any = None
        self._making = threading.Lock()

    def connect(self) -> None:
        """Make the file system now. Raises `StorageError` if there is none for this protocol."""
        self._root = self.fs._strip_protocol(self.url).rstrip("/")

    @property
    def fs(self) -> Any:
        """The file system, made on first use."""
        with self._making:
            if self._made is None:
                self._made = self._make_filesystem()
            return self._made

    def size(self, path: str) -> int:
        size = self._retry_request(path, "looked up", lambda: self.fs.info(self._full_key(path))["size"])
        with convert_decode_errors(
            lambda cause: StorageError(f"{self.object_address(path)} cannot be looked up: {cause}.")
        ):
            return bounded_integer(size, 0, 2**63, "its size")

    def exists(self, path: str) -> bool:
        def check_exists() -> bool:
            try:
                return self.fs.info(self._full_key(path))["type"] == "file"
            except FileNotFoundError:
                return False

        return self._retry_request(path, "looked up", check_exists)

    def delete(self, path: str) -> None:
        def remove_object() -> None:
            try:
                self.fs.rm_file(self._full_key(path))
            except FileNotFoundError:
                return

        self._retry_request(path, "deleted", remove_object)

    def put(self, path: str, data: bytes | Chunks) -> None:
        def write_chunks() -> None:
            file = self.fs.open(self._full_key(path), "wb")
            try:
                for chunk in chunks_of(data):
                    file.write(chunk)
            except BaseException:
                file.discard()
                raise
            file.close()

        self._retry_request(path, "written", write_chunks)

    def _read(self, request: RangeRequest) -> None:
        def read_bytes() -> None:
            data = self.fs.cat_file(self._full_key(request.path), start=request.start, end=request.stop)
            self._count_received(len(data))
            if len(data) != request.stop - request.start:
                raise TransientError(f"only {len(data)} bytes came")
            for wanted in request.ranges:
                wanted.into[:] = data[wanted.start - request.start : wanted.stop - request.start]

        self._retry_request(request.path, f"read (bytes {request.start}-{request.stop})", read_bytes)

    def _full_key(self, path: str) -> str:
        object_path(path)
        return f"{self._root}/{path}" if self._root else path

    def _retry_request(self, path: str, action: str, request: Callable[[], T]) -> T:
        """Return the result of `request`, repeated while it fails in a way that may pass."""
        where = f"{self.object_address(path)} cannot be {action}"

        def attempt() -> T:
            try:
                with convert_decode_errors(
                    lambda cause: StorageError(f"{where}: its answer has another form ({cause}).")
                ):
                    return request()
            except (StorageError, TransientError):
                raise
            except FileNotFoundError as error:
                raise self._missing_error(path) from error
            except PermissionError as error:
                raise StorageError(
                    f"{where}: access was refused ({error}); check the credentials."
                ) from error
            except (IsADirectoryError, NotADirectoryError) as error:
                raise self._no_file(path) from error
            except (OSError, *self._transient_errors()) as error:
                raise TransientError(_error_text(error)) from error
            except NotImplementedError as error:
                raise StorageError(
                    f"{where}: a store of its protocol cannot do that; {_ELSEWHERE}."
                ) from error
            except Exception as error:
                if type(error).__module__ == "builtins":  # a bug, in the library or here
                    raise
                raise StorageError(f"{where}: {_error_text(error)}; check the URL and the store.") from error

        return with_retries(self.options, where, attempt)

    def _make_filesystem(self) -> Any:
        import fsspec

        # Stores of objects have no folders. On a disk they are made as they are needed.
        folders = {"auto_mkdir": True} if self.url.startswith(("local://", "file://")) else {}
        try:
            return fsspec.core.url_to_fs(self.url, **folders)[0]
        except Exception as error:  # some connect when they are made, each by a library of its own
            raise StorageError(
                f"{self.url} cannot be opened ({_error_text(error)}); check it and the store, or"
                f" {_ELSEWHERE}."
            ) from error

    def _transient_errors(self) -> tuple[type[BaseException], ...]:
        """Return further errors, besides `OSError`, that the file system raises for faults that may pass."""
        return ()
