"""The standard streams of a command: no secret gets into them, and nobody's code takes them away."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
from collections.abc import Iterator, Mapping
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
    """Let what this process prints and logs, tracebacks included, hold no secret."""
    guarded: dict[int, GuardedStream] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            guarded[id(stream)] = guarded[id(getattr(sys, f"__{name}__"))] = GuardedStream(stream)
            setattr(sys, name, guarded[id(stream)])
    _move_handlers(guarded)


@contextlib.contextmanager
def streams_into(file: TextIO) -> Iterator[None]:
    """Print and log into `file` in the block, and no secret."""
    before = {id(getattr(sys, name)) for name in ("stdout", "stderr", "__stdout__", "__stderr__")}
    ours = GuardedStream(file)
    moved = _move_handlers(dict.fromkeys(before, ours))
    try:
        with contextlib.redirect_stdout(ours), contextlib.redirect_stderr(ours):
            yield
    finally:
        for handler, stream in moved.items():
            handler.setStream(stream)


def _move_handlers(streams: Mapping[int, GuardedStream]) -> dict[logging.StreamHandler, Any]:
    """Give the loggers of libraries, which keep the stream that they find when they are imported, the one
    that takes its place in `streams`, by the `id` of the old one. Returns what each handler had.
    """
    moved = {}
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            stream = getattr(handler, "stream", None)
            if stream is not None and id(stream) in streams and isinstance(handler, logging.StreamHandler):
                moved[handler] = handler.setStream(streams[id(stream)])
    return moved


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
