"""An HTTP proxy on localhost that does to requests what networks and overloaded stores do."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

PIECE = 64 * 1024


@dataclass
class Fault:
    """What happens to the next `times` requests that match, in place of the plain answer.

    `kind`: "status" (answers `status` and `code` without asking the server), "reset", "short" and "stall"
    (after `after` bytes of the body the connection is reset, ended, or falls silent), "flip" (bit 0 of byte
    `after` of the body is changed).
    """

    kind: str
    times: int = 1
    after: int = 0
    status: int = 503
    code: str = "SlowDown"
    method: str = "GET"
    path: str = ""
    """Part of the request's path; empty matches every one."""

    def matches(self, method: str, target: str) -> bool:
        return self.times > 0 and method == self.method and self.path in target


@dataclass
class Request:
    method: str
    target: str
    head: bytes
    length: int
    wants_continue: bool = False


@dataclass
class FaultProxy:
    """Relays to `upstream`; `faults` are used up in order; `bytes_per_second` limits all answers together."""

    upstream: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    bytes_per_second: float | None = None
    requests: int = 0
    body_bytes: int = 0
    """Bytes of bodies sent to clients."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)
    _listener: socket.socket | None = None
    _held: socket.socket | None = None
    """Bound and never listening: nobody else is given the port while this proxy is away."""
    _port: int = 0
    _free_at: float = 0.0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def inject(self, kind: str, **options: object) -> None:
        with self._lock:
            self.faults.append(Fault(kind, **options))  # type: ignore[arg-type]

    def start(self) -> None:
        if self._held is None:
            self._held = _bound(0)
            self._port = self._held.getsockname()[1]
        listener = self._listener = _bound(self._port)
        listener.listen(64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections and break the open ones; `start` comes back on the same port."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            _reset(one)

    def close(self) -> None:
        """Stop for good and let the port go."""
        self.stop()
        if self._held is not None:
            self._held.close()

    def away_for(self, seconds: float) -> None:
        """Be unreachable from now on, for so long."""
        self.stop()
        timer = threading.Timer(seconds, self.start)
        timer.daemon = True
        timer.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = None
        try:
            server = socket.create_connection(self.upstream)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            incoming, answers = client.makefile("rb"), server.makefile("rb")
            with incoming, answers:
                while (request := _read_request(incoming)) is not None:
                    if not self._relay(request, (client, incoming), (server, answers)):
                        return
        except (OSError, ValueError):
            return
        finally:
            for one in (client, server):
                if one is not None:
                    with self._lock:
                        self._open.discard(one)
                    one.close()

    def _relay(self, request: Request, client: tuple, server: tuple) -> bool:
        """One request and its answer; False if the connection is of no more use."""
        if request.wants_continue:
            client[0].sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        fault = self._take(request)
        body = client[1].read(request.length)
        if fault is not None and fault.kind == "status":
            client[0].sendall(_answer(fault))
            return True
        server[0].sendall(request.head + body)
        head = _read_head(server[1])
        while b" 100 " in head.split(b"\r\n", 1)[0]:
            head = _read_head(server[1])
        client[0].sendall(head)
        if request.method == "HEAD" or b" 204 " in head[:16] or b" 304 " in head[:16]:
            return True
        chunked, length = b"transfer-encoding: chunked" in head.lower(), _content_length(head)
        if chunked:
            for chunk in _read_chunks(server[1]):
                client[0].sendall(chunk)
            return True
        return self._send_body(client[0], server[1], length, fault)

    def _send_body(self, client: socket.socket, answers: object, length: int, fault: Fault | None) -> bool:
        done = 0
        while done < length:
            end = length
            if fault is not None and fault.kind in ("reset", "short", "stall"):
                end = min(length, fault.after)
            if done >= end:
                return self._break(client, fault)
            piece = bytearray(answers.read(min(PIECE, end - done)))  # type: ignore[attr-defined]
            if fault is not None and fault.kind == "flip" and done <= fault.after < done + len(piece):
                piece[fault.after - done] ^= 1
            self._throttle(len(piece))
            client.sendall(piece)
            done += len(piece)
            with self._lock:
                self.body_bytes += len(piece)
        return True

    def _break(self, client: socket.socket, fault: Fault | None) -> bool:
        if fault is not None and fault.kind == "reset":
            _reset(client)
        elif fault is not None and fault.kind == "stall":
            with contextlib.suppress(OSError):
                client.recv(1)  # until the client gives up
        return False

    def _take(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests += 1
            for fault in self.faults:
                if fault.matches(request.method, request.target):
                    fault.times -= 1
                    return fault
        return None

    def _throttle(self, count: int) -> None:
        if self.bytes_per_second is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.bytes_per_second
            wait = self._free_at - time.monotonic()
        if wait > 0.002:
            time.sleep(wait)


@contextlib.contextmanager
def fault_proxy(upstream: tuple[str, int]) -> Iterator[FaultProxy]:
    """A running proxy."""
    proxy = FaultProxy(upstream)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()


def _bound(port: int) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(("127.0.0.1", port))
    return one


def _read_head(file: object) -> bytes:
    readline: Callable[[], bytes] = file.readline  # type: ignore[attr-defined]
    lines = [readline()]
    while lines[-1] not in (b"\r\n", b""):
        lines.append(readline())
    if lines[-1] == b"":
        raise ValueError("the connection ended")
    return b"".join(lines)


def _read_request(file: object) -> Request | None:
    try:
        head = _read_head(file)
    except ValueError:
        return None
    lines = head.split(b"\r\n")
    method, target, _ = lines[0].decode().split(" ")
    plain = [line for line in lines if not line.lower().startswith(b"expect:")]
    return Request(
        method, target, b"\r\n".join(plain), _content_length(head), wants_continue=len(plain) < len(lines)
    )


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _read_chunks(file: object) -> Iterator[bytes]:
    """Each chunk as it comes: an answer may be a stream."""
    while True:
        size = file.readline()  # type: ignore[attr-defined]
        yield size + file.read(int(size, 16) + 2)  # type: ignore[attr-defined]
        if int(size, 16) == 0:
            return


def _answer(fault: Fault) -> bytes:
    body = f"<Error><Code>{fault.code}</Code><Message>{fault.code}</Message></Error>".encode()
    head = (
        f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RD)  # wakes its thread, whose close then resets the connection
