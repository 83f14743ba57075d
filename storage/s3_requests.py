"""Signed ranged GETs, and HEADs, over kept-alive connections, straight into the caller's buffer.

s3fs reads through asyncio and copies every body at least twice, which costs several times the CPU of the
transfer itself. Here a body goes from the socket into the buffer it is wanted in.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from opd.errors import StorageError
from opd.redact import hide
from opd.storage.s3_body import ResponseBody, limit_waits
from opd.storage.store_faults import StoreOptions, TransientError

_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_REFUSED = (400, 401, 403)
_STALE = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "InvalidToken", "ExpiredTokenException")


class S3Requests:
    """Requests that read from one bucket. Safe between threads; `close` gives the connections back."""

    def __init__(self, bucket: str, endpoint: str | None, region: str, options: StoreOptions) -> None:
        """`endpoint` is an `http(s)://` URL, addressed by path; `None` is AWS, addressed by host."""
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
        connection, response = self._response("GET", key, wanted)
        whole = False
        try:
            self._accept(response, start, length)
            self._receive(connection, response, into, length)
            whole = True
        finally:
            if whole:
                self._give_back(connection)
            else:
                connection.close()

    def size(self, key: str) -> int:
        """Bytes of the object. Raises as `read` does."""
        connection, response = self._response("HEAD", key, {})
        done = False
        try:
            if response.status != 200:
                self._refuse(response, 0)
            response.read()
            size = int(response.headers.get("Content-Length", ""))
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
        """Look the credentials up anew at the next request."""
        with self._lock:
            self._session = None

    def close(self) -> None:
        """Close the idle connections; later requests open new ones."""
        with self._lock:
            idle = self._idle[:]
            self._idle.clear()
        _close_all(idle)

    def _response(
        self, method: str, key: str, extra: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        url = f"{self._base}/{quote(key, safe='/-_.~')}"
        headers = self._signed(method, url, {**extra, "Accept-Encoding": "identity"})
        while True:
            connection, kept = self._connection()
            try:
                if not kept:
                    connection.timeout = self.options.connect_seconds
                    connection.connect()
                    connection.sock.settimeout(self.options.stall_seconds)
                    limit_waits(connection.sock, self.options.stall_seconds / 4)
                connection.request(method, urlsplit(url).path, headers=headers)
                return connection, connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise StorageError(f"the certificate is not trusted ({error.verify_message})") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not kept:
                    raise TransientError(_cause(error)) from error
                self.close()  # the server closes connections that were idle for long: no fault

    def _signed(self, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method=method, url=url, headers=headers)
        credentials = self._credentials()
        if credentials is not None:
            frozen = credentials.get_frozen_credentials()
            hide(frozen.secret_key)
            hide(frozen.token)
            S3SigV4Auth(frozen, "s3", self._region).add_auth(request)
        return dict(request.headers.items())

    def _credentials(self) -> Any:
        from botocore.session import Session

        with self._lock:
            if self._session is None:
                self._session = Session()
            session = self._session
            return session.get_credentials()

    def _accept(self, response: http.client.HTTPResponse, start: int, length: int) -> None:
        """Raise unless the response's body is the range that was asked for."""
        if response.status == 206:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                raise TransientError(f"another range came ({response.headers.get('Content-Range')})")
            if int(found[2]) + 1 - start < length:
                raise StorageError(f"the object ends at byte {int(found[2]) + 1}; publish the model again")
        elif response.status != 200 or start or response.length != length:
            self._refuse(response, start)
        if response.length != length:
            raise TransientError(f"a body of {response.length} bytes came where {length} were asked for")

    def _refuse(self, response: http.client.HTTPResponse, start: int) -> None:
        if response.status == 416:
            raise StorageError(f"the object ends before byte {start}; publish the model again")
        if response.status == 200:
            raise StorageError("the server ignores ranges; use a store that serves them")
        code = _error_code(response)
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

    def _receive(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        into: Sequence[memoryview],
        length: int,
    ) -> None:
        """Read the body; `BrokenError`, with what came, if it breaks off or nearly stops."""
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
            raise BrokenError(f"{_cause(error)} after {done} of {length} bytes", done) from error
        body.end()
        response.length = 0
        response.read()  # at the end: lets the connection take the next request

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it has served before."""
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
    """The credentials were right once; asking for them again may help."""


class BrokenError(TransientError):
    """A body that broke off after `received` bytes, which are in the buffer."""

    def __init__(self, cause: str, received: int) -> None:
        super().__init__(cause)
        self.received = received


def _error_code(response: http.client.HTTPResponse) -> str:
    """`<Code>` of S3's error body."""
    try:
        body = response.read(4096)
    except (OSError, http.client.HTTPException):
        return ""
    found = re.search(rb"<Code>([A-Za-z0-9]+)</Code>", body)
    return found[1].decode() if found else ""


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return " ".join(str(error).split()) or type(error).__name__


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()
