"""What a command says: its standard streams, which nobody's code takes away, and what is logged under `opd`.

No secret gets into either.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from opd.redact import redact

_duplicates: dict[int, int] = {}
"""Of the standard streams, where the process has found them."""
_written: dict[int, int] = {}
"""Characters that each thread has printed, by its identity, which a later thread may have again."""


class GuardedStream:
    """A text stream that writes no secret; everything else of it is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        _written[thread] = _written.get(thread, 0) + len(text)
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


def written_by(thread: int | None) -> int:
    """Characters that the thread of this identity, and those that had it before, have printed."""
    return _written.get(thread or 0, 0)


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


class Logged(logging.Handler):
    """While it is open, `say` gets every record that is logged under `opd`, its text without secrets: to show
    it, or to send it to the process that does.

    For a process with no logging of its own. What is shown reaches no root handler then: code of the user's
    own that calls `logging.warning` makes one, and lines would come twice.
    """

    def __init__(self, say: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say
        self._logger = logging.getLogger("opd")

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        told = copy.copy(record)
        told.msg, told.args, told.exc_info, told.exc_text = redact(record.getMessage()), None, None, None
        try:
            self._say(told)
        except Exception:
            self.handleError(told)

    def __enter__(self) -> Logged:
        self._before = self._logger.level, self._logger.propagate
        if not self._logger.isEnabledFor(logging.INFO):
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)
        self.close()


def as_words(record: logging.LogRecord) -> tuple[str, int, str]:
    """Logger, level and text, for another process."""
    return record.name, record.levelno, record.getMessage()


def log_again(logger: str, level: int, text: str, stage: str) -> None:
    """Log what `stage` has logged in a process of its own."""
    logging.getLogger(logger).log(level, "%s", text, extra={"stage": stage})


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
