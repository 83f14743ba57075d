"""A server of rewards on loopback, which answers what it is told to, and misbehaves when it is told to."""

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, dict[str, Any]], Any]
"""From path and body to what is answered: JSON, bytes as they are, or (status, content)."""


def completion(text: str | None) -> dict[str, Any]:
    """A chat completion that says `text`."""
    message = {"role": "assistant", "content": text}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}


@dataclass
class RewardServer:
    """`faults` are used up in order, one a request; then `answer` is asked."""

    answer: Answer
    faults: list[str] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    """Path, body and headers of every request."""
    most: int = 0
    """Requests that were worked on at once."""
    port: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length) or b"{}")
        with self._lock:
            self.asked.append((handler.path, body, dict(handler.headers)))
            self._now += 1
            self.most = max(self.most, self._now)
            fault = self.faults.pop(0) if self.faults else None
        try:
            if fault is None:
                self._answer(handler, body)
            else:
                self._fail(handler, fault, body)
        finally:
            with self._lock:
                self._now -= 1

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        said = self.answer(handler.path, body)
        status, content = said if isinstance(said, tuple) else (200, said)
        send(handler, content if isinstance(content, bytes) else json.dumps(content).encode(), status)

    def _fail(self, handler: BaseHTTPRequestHandler, fault: str, body: dict[str, Any]) -> None:
        kind, _, what = fault.partition(" ")
        whole = json.dumps(self.answer(handler.path, body)).encode()
        if kind == "status":
            send(handler, b"something is wrong", int(what))
        elif kind == "says":
            send(handler, what.encode())
        elif kind == "huge":
            send(handler, b'{"x": "' + b"a" * 2**23 + b'"}')
        elif kind == "elsewhere":
            send(handler, b"", 307, {"Location": what})
        elif kind == "packed":
            send(handler, gzip.compress(whole), 200, {"Content-Encoding": "gzip"})
        elif kind == "slow":
            self.stopped.wait(60)
        elif kind == "longer":  # more is promised than comes, and the connection ends
            send(handler, whole[:-2], 200, {"Content-Length": str(len(whole))})
            handler.connection.shutdown(socket.SHUT_RDWR)
        elif kind in ("shorter", "boasts"):
            odd = {"shorter": {"Content-Length": str(len(whole) - 5)}, "boasts": {"X-Said": "b" * 60_000}}
            send(handler, whole, 200, odd[kind])
        elif kind == "closes":
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            raise AssertionError(kind)


def send(
    handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """One answer; `headers` win over those it would have."""
    handler.send_response(status)
    for name, value in (
        {"Content-Length": str(len(content)), "Connection": "close"} | (headers or {})
    ).items():
        handler.send_header(name, value)
    handler.end_headers()
    with contextlib.suppress(OSError):  # who does not read it to its end
        handler.wfile.write(content)
    handler.close_connection = True


@contextlib.contextmanager
def reward_server(answer: Answer) -> Iterator[RewardServer]:
    """A server on a free port."""
    server = RewardServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            server.serve(self)

        def log_message(self, *said: object) -> None:
            del said

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *whom: object) -> None:
            del whom  # a client that has left

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            listener.shutdown()
            thread.join()
