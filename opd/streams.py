"""The standard streams of a command: no secret gets into them, and nobody's code takes them away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from opd.redact import redact

_duplicates: dict[int, int] = {}
"""Of the standard streams, where the process has found them."""


class GuardedStream:
    """A text stream that writes no secret; everything else of it is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Stays open: what the command still has to say goes here, whoever else is done with it."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_streams() -> None:
    """Let what this process prints, tracebacks included, hold no secret."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Standard output and error are open after the block, though the user's own code in it closes them.

    Else the next file that is opened would get their number, and what is printed.
    """
    for number in (1, 2):
        if number not in _duplicates:
            with contextlib.suppress(OSError):  # closed from the beginning
                _duplicates[number] = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 64)
    try:
        yield
    finally:
        for number, name in ((1, "stdout"), (2, "stderr")):
            if number in _duplicates and _is_closed(number):
                os.dup2(_duplicates[number], number)
            stream = getattr(sys, name)
            if stream is not None and _cannot_write(stream) and not _is_closed(number):
                file = open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, name, GuardedStream(file))


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _cannot_write(stream: TextIO) -> bool:
    try:
        return stream.closed
    except ValueError:  # its buffer was taken from it
        return True
