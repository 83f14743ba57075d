"""An HTTP server in this process that says what a function says, over connections that stay open."""

import contextlib
import http.server
import itertools
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Say = Callable[[str, dict[str, Any]], Any]
"""From path and body to the answer: JSON, bytes as they are, a `Reply`, messages one by one, or `None` if it
knows no such path."""


@dataclass(frozen=True)
class Reply:
    """An answer of another status than 200."""

    status: int
    content: bytes = b'{"error": "closed"}'
    headers: Mapping[str, str] = field(default_factory=dict)


class LittleWeb:
    """It can be killed, and another started at its port."""

    def __init__(self, say: Say, port: int = 0, host: str = "127.0.0.1") -> None:
        self.say = say
        self.connections: set[socket.socket] = set()
        self._server = _Threads((host, port), _answers(self))
        self.port: int = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Its connections break, as those of a process that is gone."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for one in list(self.connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(say: Say, port: int = 0) -> Iterator[str]:
    """The URL of one, gone when the block ends."""
    web = LittleWeb(say, port)
    try:
        yield web.url
    finally:
        web.kill()


class _Threads(http.server.ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False
    request_queue_size = 128

    def handle_error(self, *whom: Any) -> None:
        """Clients go away in the middle, as tests make them do."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*whom)


def _answers(web: LittleWeb) -> type[http.server.BaseHTTPRequestHandler]:
    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            web.connections.add(self.connection)

        def finish(self) -> None:
            web.connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(content) if content and self.command == "POST" else {}
            said = web.say(self.path.partition("?")[0], body)
            with contextlib.suppress(OSError):  # a client that has heard enough
                self._stream(said) if isinstance(said, Iterator) else self._say(said)

        def do_POST(self) -> None:
            self.do_GET()

        def _say(self, said: Any) -> None:
            reply = _reply(said)
            self.send_response(reply.status)
            for name, value in ({"Content-Length": str(len(reply.content))} | dict(reply.headers)).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.content)

        def _stream(self, messages: Iterator[Any]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for message in itertools.chain(map(_bytes_of, messages), [b"[DONE]"]):
                content = b"data: " + message + b"\n\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    return Answers


def _reply(said: Any) -> Reply:
    if said is None:
        return Reply(404)
    return said if isinstance(said, Reply) else Reply(200, _bytes_of(said))


def _bytes_of(said: Any) -> bytes:
    """What is no number becomes null, as with real servers."""
    import orjson

    return said if isinstance(said, bytes) else orjson.dumps(said)
