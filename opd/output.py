"""The output of a command: its standard streams, which user code cannot close, and the log of `opd`.

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
"""Duplicates of the standard streams, made where the process found them."""
_written: dict[int, int] = {}
"""Characters printed by each thread, by its identity, which a later thread may have again."""


class GuardedStream:
    """A text stream that writes no secret. Everything else is the stream's own."""

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
        """Flush, but stay open: the command still writes here after other code has closed it."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def written_by(thread: int | None) -> int:
    """Return the characters printed by the thread of this identity, and by earlier threads with it."""
    return _written.get(thread or 0, 0)


def guard_streams() -> None:
    """Remove secrets from all that this process prints and logs, tracebacks included."""
    guarded: dict[int, GuardedStream] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            guarded[id(stream)] = guarded[id(getattr(sys, f"__{name}__"))] = GuardedStream(stream)
            setattr(sys, name, guarded[id(stream)])
    _move_handlers(guarded)


@contextlib.contextmanager
def streams_into(file: TextIO) -> Iterator[None]:
    """Print and log into `file` in the block, without secrets."""
    old_streams = {id(getattr(sys, name)) for name in ("stdout", "stderr", "__stdout__", "__stderr__")}
    ours = GuardedStream(file)
    moved = _move_handlers(dict.fromkeys(old_streams, ours))
    try:
        with contextlib.redirect_stdout(ours), contextlib.redirect_stderr(ours):
            yield
    finally:
        for handler, stream in moved.items():
            handler.setStream(stream)


def _move_handlers(streams: Mapping[int, GuardedStream]) -> dict[logging.StreamHandler, Any]:
    """Move handlers of library loggers, which keep the stream they found on import, to the new stream in
    `streams` by the `id` of the old one. Return the old stream of each handler.
    """
    moved = {}
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            stream = getattr(handler, "stream", None)
            if stream is not None and id(stream) in streams and isinstance(handler, logging.StreamHandler):
                moved[handler] = handler.setStream(streams[id(stream)])
    return moved


class LogForwarder(logging.Handler):
    """While open, passes every record logged under `opd`, its text without secrets, to `say`, which shows it
    or sends it to another process.

    For a process with no logging of its own. A shown record reaches no root handler: user code that calls
    `logging.warning` makes one, and lines would come twice.
    """

    def __init__(self, say: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say
        self._logger = logging.getLogger("opd")

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        copied = copy.copy(record)
        copied.msg, copied.args = redact(record.getMessage()), None
        copied.exc_info = copied.exc_text = None
        try:
            self._say(copied)
        except Exception:
            self.handleError(copied)

    def __enter__(self) -> LogForwarder:
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


def record_fields(record: logging.LogRecord) -> tuple[str, int, str]:
    """Return logger, level and text, for another process."""
    return record.name, record.levelno, record.getMessage()


def log_again(logger: str, level: int, text: str, stage: str) -> None:
    """Log a record that `stage` logged in a process of its own."""
    logging.getLogger(logger).log(level, "%s", text, extra={"stage": stage})


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Keep standard output and error open after the block, even if user code in it closes them.

    Otherwise the next file opened would get their number, and the printed text.
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
    except ValueError:  # its buffer was detached
        return True
