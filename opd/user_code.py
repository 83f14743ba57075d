"""Run user code: its faults become a sentence, and it cannot take this process down.

It may fork, exit, start threads and close the standard streams. The streams stay open. A process it forks
ends with its call. An error in one of its threads becomes a line of the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from opd.errors import OpdError
from opd.output import streams_kept
from opd.redact import redact

_log = logging.getLogger(__name__)
_LIBRARIES = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
"""Folder of Python's own modules, and below it of installed packages."""


@contextlib.contextmanager
def call_user_code(label: str, error: type[OpdError]) -> Iterator[None]:
    """Call user code, described by `label`: anything it raises becomes one sentence of `error`.

    Errors on reading its values count too, so look at them inside the block. An exit does not end the
    command. An `OpdError` from a function it calls passes as it is, and so do a want of memory and Ctrl-C.
    """
    try:
        with confine_user_code(label):
            yield
    except (OpdError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as cause:
        if type(cause).__name__ == "OutOfMemoryError":  # torch's, without importing it
            raise
        fault = error(f"{label} {describe_raise(cause)}; mend it.")
        fault.of_own_code = True
        raise fault from cause


@contextlib.contextmanager
def confine_user_code(label: str) -> Iterator[None]:
    """Confine user code, described by `label` in sentences, to the block.

    A process that is forked in it ends with it: with status 0, that of `sys.exit`, or 1 and a line with the
    error.
    """
    process = os.getpid()
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _thread_failed
    with streams_kept():
        _calls.append(label)
        try:
            yield
        except BaseException as cause:
            if os.getpid() != process:
                _exit_fork(label, cause)
            raise
        finally:
            if os.getpid() != process:
                os._exit(0)
            _calls.remove(label)


_calls: list[str] = []
"""Descriptions of the calls that run now."""


def _exit_fork(label: str, cause: BaseException) -> NoReturn:
    """End a forked process as Python would."""
    if isinstance(cause, SystemExit) and (cause.code is None or isinstance(cause.code, int)):
        os._exit((cause.code or 0) & 0xFF)
    with contextlib.suppress(OSError):
        os.write(2, redact(f"opd: warning: a process that {label} forked {describe_raise(cause)}\n").encode())
    os._exit(1)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Log an error of a user's thread in one line, once a place. Other threads keep their traceback."""
    cause = failed.exc_value
    frames = [] if cause is None else traceback.extract_tb(cause.__traceback__)
    if cause is None or _user_frame(cause) is None or any(is_of_opd(frame.filename) for frame in frames):
        threading.__excepthook__(failed)
        return
    message = describe_raise(cause)
    if message in _told_of:
        return
    _told_of.add(message)
    by = "".join(
        f", while {label} ran," for label in _calls[-1:]
    )  # another thread may end its call meanwhile
    name = "a thread" if failed.thread is None else f"the thread {safe_text(failed.thread.name)}"
    text = f"{name} of code of yours{by} {message}; nobody waits for what it does: catch that there"
    if any(not isinstance(handler, logging.NullHandler) for handler in _log_handlers()):
        _log.warning("%s", text)
    elif sys.stderr is not None:
        print(f"opd: warning: {redact(text)}", file=sys.stderr, flush=True)


_told_of: set[str] = set()


def _log_handlers() -> Iterator[logging.Handler]:
    """Yield the handlers of the loggers that receive records of `_log`."""
    logger: logging.Logger | None = _log
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


_LONGEST = 1000
"""Limit of an error text in characters: some repeat all their arguments."""


def describe_raise(cause: BaseException) -> str:
    """Return `raised KeyError: 'a' (my_code.py:12)`: the error and the innermost line of user code."""
    frame = _user_frame(cause)
    at = f" ({os.path.basename(frame.filename)}:{frame.lineno})" if frame is not None else ""
    return f"raised {describe_error(cause)}{at}"


def describe_error(cause: BaseException) -> str:
    """Return `KeyError: 'a'`, or the type alone of an error without text."""
    words = safe_text(cause)
    return f"{type(cause).__name__}: {words}" if words else type(cause).__name__


def _user_frame(cause: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame that is neither opd's nor a library's."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        of_library = frame.filename.startswith((_LIBRARIES, "<frozen ")) or any(
            f"{os.sep}{folder}{os.sep}" in frame.filename for folder in ("site-packages", "dist-packages")
        )
        if not of_library and not is_of_opd(frame.filename):
            return frame
    return None


def safe_text(value: object, form: Callable[[Any], str] = str) -> str:
    """Return `form(value)` on one line. User code may raise here, too."""
    try:
        words = " ".join(str.__str__(form(value)).split())
        return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    except KeyboardInterrupt:
        raise
    except BaseException:  # of `__str__` or `__repr__`
        return f"a {type(value).__name__} that cannot be shown"


def is_of_opd(file: str) -> bool:
    """Return whether `file` is in this package: `opd/rollout/x.py`, or `pipelines/x.py` behind its link."""
    folder = os.path.dirname(os.path.abspath(__file__))
    links = [
        os.path.realpath(os.path.join(folder, name))
        for name in ("pipelines", "teachers", "storage", "kernels")
    ]
    return os.path.realpath(file).startswith(
        tuple(root + os.sep for root in (os.path.realpath(folder), *links))
    )
