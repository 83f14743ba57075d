"""The body of a response, from the socket into the caller's buffer in few calls of the system."""

from __future__ import annotations

import http.client
import socket
import struct
import sys
import time
from typing import Any

_WAITS = sys.platform == "linux"
"""`SO_RCVTIMEO` has one form on every system of this kind."""


class ResponseBody:
    """What is left of a response, from its buffer first and then from the socket itself.

    A plain socket fills a whole block in one call of the system, which waits in the kernel: woken for every
    few packets, this thread would take turns with all others for each. TLS gives a record at a time.
    """

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._file: Any = response.fp
        self._socket = connection.sock if _WAITS and type(connection.sock) is socket.socket else None
        self._timeout = None if self._socket is None else self._socket.gettimeout()
        self._direct = False

    def read_into(self, view: memoryview) -> int:
        """Fill `view`, or some of it; 0 where the body ends. Raises `OSError` if nothing comes in time."""
        if self._direct:
            return self._wait_for(view)
        received = self._file.readinto1(view)
        if self._socket is not None and received < len(view):  # the buffer is empty
            self._socket.settimeout(None)  # the kernel keeps the time from here on
            self._direct = True
        return received

    def _wait_for(self, view: memoryview) -> int:
        assert self._socket is not None
        begin = time.monotonic()
        while True:
            try:
                return self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing at all came in a while
                if time.monotonic() - begin > (self._timeout or 0.0):
                    raise TimeoutError from None

    def end(self) -> None:
        """Leave the socket as it was."""
        if self._direct:
            assert self._socket is not None
            self._socket.settimeout(self._timeout)


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Let reads that wait in the kernel come back with what they have, to see how fast it comes."""
    if _WAITS:
        whole, millionths = divmod(max(1000, int(seconds * 1e6)), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, millionths))
