"""The store on S3: reads by ranged GETs into the caller's buffer, everything else through s3fs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from opd.errors import MissingExtraError, StorageError
from opd.foreign import object_path
from opd.storage.fsspec_store import FsspecStore
from opd.storage.object_store import Chunks, chunks_of
from opd.storage.ranges import Request, rest
from opd.storage.s3_requests import BrokenError, ExpiredError, S3Requests
from opd.storage.store_faults import MIB, StoreOptions, TransientError, with_retries

T = TypeVar("T")
MAX_PARTS = 10_000
PART_BYTES = 16 * MIB
"""Of a multipart upload: 10,000 parts, S3's limit, are 156 GiB an object."""


class S3Store(FsspecStore):
    """Objects below `s3://BUCKET/PREFIX`.

    Endpoint, region and credentials come from where every AWS client looks: AWS_ENDPOINT_URL, AWS_REGION,
    AWS_ACCESS_KEY_ID, the configuration files, the machine's role. Without credentials requests are
    anonymous. HTTP proxies are not used. Needs the extra `s3`.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        try:
            import s3fs  # noqa: F401
            from botocore.session import Session
        except ImportError as error:
            raise MissingExtraError(f"{url}", "s3") from error
        bucket, _, self._prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise StorageError(f"{url} names no bucket; write s3://BUCKET/PREFIX.")
        session = Session()
        self._endpoint = options.endpoint or _endpoint(session)
        configured = session.get_config_variable("region") or os.environ.get("AWS_REGION")
        self._region = configured or "us-east-1"
        self._anonymous = session.get_credentials() is None
        super().__init__(url, options)
        self._bucket = bucket
        self._requests = S3Requests(bucket, self._endpoint, self._region, options)

    def size(self, path: str) -> int:
        where = f"{self.name(path)} cannot be looked up"
        renewing = self._renewing(lambda: self._requests.size(self._object(path)))
        return with_retries(self.options, where, lambda: self._explained(path, where, renewing))

    def exists(self, path: str) -> bool:
        where = f"{self.name(path)} cannot be looked up"
        renewing = self._renewing(lambda: self._requests.size(self._object(path)))

        def look() -> bool:
            try:
                renewing()
            except FileNotFoundError:
                return False
            return True

        return with_retries(self.options, where, lambda: self._explained(path, where, look))

    def put(self, path: str, data: bytes | Chunks) -> None:
        parts = _parts(data)
        first, second = next(parts, b""), next(parts, None)
        target = {"Bucket": self._bucket, "Key": self._object(path)}
        if second is None:
            self._ask(path, "written", lambda: self.fs.call_s3("put_object", **target, Body=first))
            return
        begin = self._ask(path, "written", lambda: self.fs.call_s3("create_multipart_upload", **target))
        upload = {**target, "UploadId": begin["UploadId"]}
        try:
            self._upload_parts(path, upload, _chain(first, second, parts))
        except BaseException:
            self._abort(upload)
            raise

    def close(self) -> None:
        super().close()
        self._requests.close()

    def _upload_parts(self, path: str, upload: dict[str, Any], parts: Iterator[bytes]) -> None:
        done, total = [], 0
        for number, part in enumerate(parts, 1):
            if number > MAX_PARTS:
                raise StorageError(f"{self.name(path)} is too large for S3; publish in more shards.")
            total += len(part)
            tag = self._ask(
                path, f"written (part {number})", lambda n=number, p=part: self._part(upload, n, p)
            )
            done.append({"PartNumber": number, "ETag": tag})

        def complete() -> None:
            try:
                self.fs.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": done})
            except FileNotFoundError:
                # Gone because an earlier attempt succeeded and its answer was lost, or aborted by someone.
                if self.fs.info(self._key(path))["size"] != total:
                    raise

        self._ask(path, "written", complete)

    def _part(self, upload: dict[str, Any], number: int, part: bytes) -> str:
        return self.fs.call_s3("upload_part", **upload, PartNumber=number, Body=part)["ETag"]

    def _abort(self, upload: dict[str, Any]) -> None:
        try:
            self.fs.call_s3("abort_multipart_upload", **upload)
        except (OSError, *self._transient()):
            return  # the parts stay until the bucket's rule for unfinished uploads takes them

    def _read(self, request: Request) -> None:
        key = self._object(request.path)
        where = f"{self.name(request.path)} bytes {request.start}-{request.stop} cannot be read"
        at, views = request.start, request.views()

        def read() -> None:
            nonlocal at, views
            received = request.stop - at
            try:
                self._requests.read(key, at, views)
            except BrokenError as error:
                received = error.received
                raise
            except BaseException:
                received = 0
                raise
            finally:
                at, views = at + received, rest(views, received)
                self._count(received)

        attempt = self._renewing(read)
        with_retries(self.options, where, lambda: self._explained(request.path, where, attempt))

    def _renewing(self, request: Callable[[], T]) -> Callable[[], T]:
        """`request`, which looks the credentials up anew, twice at most, when they have expired."""
        refreshed = 0

        def attempt() -> T:
            nonlocal refreshed
            try:
                return request()
            except ExpiredError as error:
                refreshed += 1
                if refreshed > 2:
                    raise PermissionError(f"{error}, also with credentials looked up anew") from error
                self._requests.forget_credentials()
                raise TransientError(str(error)) from error

        return attempt

    def _explained(self, path: str, where: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except StorageError as error:
            raise StorageError(f"{where}: {error}.") from error
        except FileNotFoundError as error:
            raise self._missing(path) from error
        except PermissionError as error:
            raise StorageError(
                f"{where}: {error}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or renew the session."
            ) from error

    def _object(self, path: str) -> str:
        object_path(path)
        return f"{self._prefix}/{path}" if self._prefix else path

    def _make_filesystem(self) -> Any:
        import s3fs

        filesystem = s3fs.S3FileSystem(
            anon=self._anonymous,
            endpoint_url=self._endpoint,
            client_kwargs={"region_name": self._region},
            config_kwargs={
                "connect_timeout": self.options.connect_seconds,
                "read_timeout": self.options.write_seconds,
                "retries": {"total_max_attempts": 1},
                "s3": {"addressing_style": "path" if self._endpoint else "auto"},
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        filesystem.retries = 1  # `with_retries` counts and words the attempts
        return filesystem

    def _transient(self) -> tuple[type[BaseException], ...]:
        from botocore.exceptions import BotoCoreError, ClientError

        return (BotoCoreError, ClientError)


def _endpoint(session: Any) -> str | None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name]
    return session.get_scoped_config().get("endpoint_url")


def _parts(data: bytes | Chunks) -> Iterator[bytes]:
    """`data` in pieces of `PART_BYTES`; the last may be shorter."""
    buffer = bytearray()
    for chunk in chunks_of(data):
        buffer += chunk
        while len(buffer) >= PART_BYTES:
            yield bytes(memoryview(buffer)[:PART_BYTES])
            del buffer[:PART_BYTES]
    if buffer:
        yield bytes(buffer)


def _chain(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest
