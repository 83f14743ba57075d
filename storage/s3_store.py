"""The store on S3: ranged GETs over kept-alive connections into the caller's buffer, the rest through s3fs.

s3fs reads through asyncio and copies every body at least twice, which costs several times the CPU of the
transfer itself. Here a body goes from the socket straight into its buffer.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from opd.errors import StorageError, needs_extra, reason_of
from opd.redact import hide_secret
from opd.storage.object_store import (
    MIB,
    Chunks,
    FsspecStore,
    RangeRequest,
    StoreOptions,
    TransientError,
    chunks_of,
    skip_bytes,
    with_retries,
)
from opd.untrusted import bounded_integer, object_path

_WAITS = sys.platform == "linux"
"""`SO_RCVTIMEO` has one form on every system of this kind."""


class ResponseBody:
    """The rest of a response, from its buffer first and then from the socket itself.

    A plain socket fills a full block in one system call, which waits in the kernel. If this thread woke up
    for every few packets, it would compete with all others for each. TLS gives a record at a time.
    """

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._file: Any = response.fp
        self._socket = connection.sock if _WAITS and type(connection.sock) is socket.socket else None
        self._timeout = None if self._socket is None else self._socket.gettimeout()
        self._direct = False

    def read_into(self, view: memoryview) -> int:
        """Fill `view`, or some of it. Return 0 at the end of the body. `OSError` on a time-out."""
        if self._direct:
            return self._wait_for(view)
        received = self._file.readinto1(view)
        if self._socket is not None and received < len(view):  # the buffer is empty
            self._socket.settimeout(None)  # the kernel measures the time from here on
            self._direct = True
        return received

    def _wait_for(self, view: memoryview) -> int:
        assert self._socket is not None
        started = time.monotonic()
        while True:
            try:
                return self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing at all came in a while
                if time.monotonic() - started > (self._timeout or 0.0):
                    raise TimeoutError from None

    def restore_timeout(self) -> None:
        """Restore the socket's time-out."""
        if self._direct:
            assert self._socket is not None
            self._socket.settimeout(self._timeout)


_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_REFUSED = (400, 401, 403)
_STALE = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "InvalidToken", "ExpiredTokenException")


class S3Requests:
    """Requests that read from one bucket. Safe between threads. `close` closes the connections."""

    def __init__(self, bucket: str, endpoint: str | None, region: str, options: StoreOptions) -> None:
        """`endpoint` is an `http(s)://` URL, addressed by path. `None` is AWS, addressed by host."""
        self.options = options
        host = f"https://{bucket}.s3.{region}.amazonaws.com"
        self._base = f"{endpoint.rstrip('/')}/{bucket}" if endpoint else host
        self._region = region
        self._lock = threading.Lock()
        self._session: Any = None
        self._idle: list[http.client.HTTPConnection] = []
        self._tls: ssl.SSLContext | None = None
        weakref.finalize(self, _close_all, self._idle)

    def read(self, key: str, start: int, into: Sequence[memoryview]) -> None:
        """Fill `into`, one after another, with the object's bytes from `start` on, by one request.

        Raises `BrokenError` if only some bytes came, `TransientError` for other faults that may pass,
        `ExpiredError`, `FileNotFoundError`, `PermissionError` or `StorageError` (without the object's name).
        """
        length = sum(map(len, into))
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        connection, response = self._send_request("GET", key, wanted)
        done = False
        try:
            self._check_response(response, start, length)
            self._receive_body(connection, response, into, length)
            done = True
        finally:
            if done:
                self._give_back(connection)
            else:
                connection.close()

    def size(self, key: str) -> int:
        """Return the bytes of the object. Raises as `read` does."""
        connection, response = self._send_request("HEAD", key, {})
        done = False
        try:
            if response.status != 200:
                self._raise_refusal(response, 0)
            response.read()
            size = bounded_integer(int(response.headers.get("Content-Length", "")), 0, 2**63, "the size")
            done = True
            return size
        except ValueError as error:
            raise TransientError("an answer without a size came") from error
        finally:
            if done:
                self._give_back(connection)
            else:
                connection.close()

    def forget_credentials(self) -> None:
        """Load the credentials again at the next request."""
        with self._lock:
            self._session = None

    def close(self) -> None:
        """Close the idle connections. Later requests open new ones."""
        with self._lock:
            idle = self._idle[:]
            self._idle.clear()
        _close_all(idle)

    def _send_request(
        self, method: str, key: str, extra: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        url = f"{self._base}/{quote(key, safe='/-_.~')}"
        headers = self._signed_headers(method, url, {**extra, "Accept-Encoding": "identity"})
        while True:
            connection, is_used = self._get_connection()
            try:
                if not is_used:
                    connection.timeout = self.options.connect_seconds
                    connection.connect()
                    connection.sock.settimeout(self.options.stall_seconds)
                    if _WAITS:  # reads that wait in the kernel return their bytes so far: the speed shows
                        waits = divmod(max(1000, int(self.options.stall_seconds / 4 * 1e6)), 1_000_000)
                        timeval = struct.pack("ll", *waits)
                        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
                connection.request(method, urlsplit(url).path, headers=headers)
                return connection, connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise StorageError(f"the certificate is not trusted ({error.verify_message})") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not is_used:
                    raise TransientError(_error_text(error)) from error
                self.close()  # the server closes connections that were idle for long: no fault

    def _signed_headers(self, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.session import Session

        request = AWSRequest(method=method, url=url, headers=headers)
        with self._lock:
            if self._session is None:
                self._session = Session()
            credentials = self._session.get_credentials()
        if credentials is not None:
            frozen = credentials.get_frozen_credentials()
            hide_secret(frozen.secret_key)
            hide_secret(frozen.token)
            S3SigV4Auth(frozen, "s3", self._region).add_auth(request)
        return dict(request.headers.items())

    def _check_response(self, response: http.client.HTTPResponse, start: int, length: int) -> None:
        """Raise unless the response's body is the requested range."""
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != start:
                raise TransientError(f"another range came ({response.headers.get('Content-Range')})")
            if int(match[2]) + 1 - start < length:
                raise StorageError(f"the object ends at byte {int(match[2]) + 1}; publish the model again")
        elif response.status != 200 or start or response.length != length:
            self._raise_refusal(response, start)
        if response.length != length:
            raise TransientError(f"a body of {response.length} bytes came where {length} were asked for")

    def _raise_refusal(self, response: http.client.HTTPResponse, start: int) -> None:
        if response.status == 416:
            raise StorageError(f"the object ends before byte {start}; publish the model again")
        if response.status == 200:
            raise StorageError("the server ignores ranges; use a store that serves them")
        try:
            match = re.search(rb"<Code>([A-Za-z0-9]+)</Code>", response.read(4096))
        except (OSError, http.client.HTTPException):
            match = None
        code = match[1].decode() if match else ""
        answer = f"the store answered {response.status} {code or response.reason}".rstrip()
        if response.status == 404:
            raise FileNotFoundError(answer)
        if response.status in _AGAIN:
            raise TransientError(answer)
        if response.status in _REFUSED:
            # An answer to HEAD has no body and so no code: the credentials may have expired.
            if not code or code in _STALE:
                raise ExpiredError(answer)
            raise PermissionError(answer)
        raise StorageError(f"{answer}; check endpoint and region (AWS_ENDPOINT_URL, AWS_REGION)")

    def _receive_body(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        into: Sequence[memoryview],
        length: int,
    ) -> None:
        """Read the body. Raises `BrokenError`, with the bytes so far, if it breaks off or nearly stops."""
        body = ResponseBody(connection, response)
        done = mark = 0
        since = time.monotonic()
        try:
            for view in into:
                at = 0
                while at < len(view):
                    received = body.read_into(view[at:])
                    if not received:
                        raise BrokenError(f"the connection ended after {done} of {length} bytes", done)
                    at, done = at + received, done + received
                    seconds = time.monotonic() - since
                    if seconds > self.options.stall_seconds:
                        if done - mark < seconds * self.options.least_bytes_per_second:
                            raise BrokenError(f"only {done - mark} bytes came in {seconds:.1f} s", done)
                        since, mark = since + seconds, done
        except (OSError, http.client.HTTPException) as error:
            raise BrokenError(f"{_error_text(error)} after {done} of {length} bytes", done) from error
        body.restore_timeout()
        response.length = 0
        response.read()  # at the end: lets the connection take the next request

    def _get_connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it has served before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
            address = urlsplit(self._base)
            if address.scheme == "https":
                if self._tls is None:
                    self._tls = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE"))
                tls = http.client.HTTPSConnection(address.netloc, context=self._tls)
                return tls, False
            return http.client.HTTPConnection(address.netloc), False

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if connection.sock is not None and len(self._idle) < 4 * self.options.threads:
                self._idle.append(connection)
                return
        connection.close()


class ExpiredError(Exception):
    """The credentials were right once. Loading them again may help."""


class BrokenError(TransientError):
    """A body that broke off after `received` bytes, which are in the buffer."""

    def __init__(self, cause: str, received: int) -> None:
        super().__init__(cause)
        self.received = received


def _error_text(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return reason_of(error)


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()


T = TypeVar("T")
MAX_PARTS = 10_000
PART_BYTES = 16 * MIB
"""Bytes of a part of a multipart upload: 10,000 parts, S3's limit, are 156 GiB an object."""


class S3Store(FsspecStore):
    """Objects below `s3://BUCKET/PREFIX`.

    Endpoint, region and credentials come from the sources of every AWS client: AWS_ENDPOINT_URL, AWS_REGION,
    AWS_ACCESS_KEY_ID, the configuration files, the machine's role. Without credentials requests are
    anonymous. HTTP proxies are not used. Needs the extra `s3`.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        with needs_extra(url, "s3"):
            import s3fs  # noqa: F401
            from botocore.session import Session
        bucket, _, self._prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise StorageError(f"{url} names no bucket; write s3://BUCKET/PREFIX.")
        session = Session()
        self._endpoint = options.endpoint or _endpoint_url(session)
        configured = session.get_config_variable("region") or os.environ.get("AWS_REGION")
        self._region = configured or "us-east-1"
        self._anonymous = session.get_credentials() is None
        super().__init__(url, options)
        self._bucket = bucket
        self._requests = S3Requests(bucket, self._endpoint, self._region, options)

    def size(self, path: str) -> int:
        where = f"{self.object_address(path)} cannot be looked up"
        renewing = self._renew_credentials(lambda: self._requests.size(self._object_key(path)))
        return with_retries(self.options, where, lambda: self._explain_errors(path, where, renewing))

    def exists(self, path: str) -> bool:
        where = f"{self.object_address(path)} cannot be looked up"
        renewing = self._renew_credentials(lambda: self._requests.size(self._object_key(path)))

        def check_exists() -> bool:
            try:
                renewing()
            except FileNotFoundError:
                return False
            return True

        return with_retries(self.options, where, lambda: self._explain_errors(path, where, check_exists))

    def put(self, path: str, data: bytes | Chunks) -> None:
        parts = _split_upload(data)
        first, second = next(parts, b""), next(parts, None)
        target = {"Bucket": self._bucket, "Key": self._object_key(path)}
        if second is None:
            self._retry_request(path, "written", lambda: self.fs.call_s3("put_object", **target, Body=first))
            return
        created = self._retry_request(
            path, "written", lambda: self.fs.call_s3("create_multipart_upload", **target)
        )
        upload = {**target, "UploadId": created["UploadId"]}
        try:
            self._upload_parts(path, upload, chain([first, second], parts))
        except BaseException:
            # Otherwise the parts stay until the bucket's rule for unfinished uploads takes them.
            with contextlib.suppress(OSError, *self._transient_errors()):
                self.fs.call_s3("abort_multipart_upload", **upload)
            raise

    def close(self) -> None:
        super().close()
        self._requests.close()

    def _upload_parts(self, path: str, upload: dict[str, Any], parts: Iterator[bytes]) -> None:
        done, total = [], 0
        for number, part in enumerate(parts, 1):
            if number > MAX_PARTS:
                raise StorageError(
                    f"{self.object_address(path)} is too large for S3; publish in more shards."
                )
            total += len(part)
            tag = self._retry_request(
                path, f"written (part {number})", lambda n=number, p=part: self._upload_chunk(upload, n, p)
            )
            done.append({"PartNumber": number, "ETag": tag})

        def complete_upload() -> None:
            try:
                self.fs.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": done})
            except FileNotFoundError:
                # Gone because an earlier attempt succeeded and its answer was lost, or aborted by someone.
                if self.fs.info(self._full_key(path))["size"] != total:
                    raise

        self._retry_request(path, "written", complete_upload)

    def _upload_chunk(self, upload: dict[str, Any], number: int, part: bytes) -> str:
        return self.fs.call_s3("upload_part", **upload, PartNumber=number, Body=part)["ETag"]

    def _read(self, request: RangeRequest) -> None:
        key = self._object_key(request.path)
        where = f"{self.object_address(request.path)} bytes {request.start}-{request.stop} cannot be read"
        at, views = request.start, request.target_views()

        def read_remaining() -> None:
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
                at, views = at + received, skip_bytes(views, received)
                self._count_received(received)

        attempt = self._renew_credentials(read_remaining)
        with_retries(self.options, where, lambda: self._explain_errors(request.path, where, attempt))

    def _renew_credentials(self, request: Callable[[], T]) -> Callable[[], T]:
        """Wrap `request`: it loads expired credentials again, twice at most."""
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

    def _explain_errors(self, path: str, where: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except StorageError as error:
            raise StorageError(f"{where}: {error}.") from error
        except FileNotFoundError as error:
            raise self._missing_error(path) from error
        except PermissionError as error:
            raise StorageError(
                f"{where}: {error}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or renew the session."
            ) from error

    def _object_key(self, path: str) -> str:
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

    def _transient_errors(self) -> tuple[type[BaseException], ...]:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        return (BotoCoreError, ClientError, ResponseParserError)


def _endpoint_url(session: Any) -> str | None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name]
    return session.get_scoped_config().get("endpoint_url")


def _split_upload(data: bytes | Chunks) -> Iterator[bytes]:
    """Yield `data` in chunks of `PART_BYTES`. The last may be shorter."""
    buffer = bytearray()
    for chunk in chunks_of(data):
        buffer += chunk
        while len(buffer) >= PART_BYTES:
            yield bytes(memoryview(buffer)[:PART_BYTES])
            del buffer[:PART_BYTES]
    if buffer:
        yield bytes(buffer)
