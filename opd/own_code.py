"""Code of the user's own while it runs: its faults in a sentence, and what it cannot take from this process.

It may close, fork, exit and start threads: the standard streams stay open, what it forks ends where its call
ends, the files of this process stay this process's, and what a thread of it raises is a line of the log.
"""

from __future__ import annotations

import contextlib
import fcntl
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
"""Where Python's own modules are, and below it what is installed."""


@contextlib.contextmanager
def calling(what: str, error: type[OpdError]) -> Iterator[None]:
    """Around a call of the user's own code, `what`: anything it raises becomes one sentence of `error`.

    Whatever its values do when they are read counts as its own, too: look at them inside. An exit is no end
    of the command. An `OpdError`, which what it calls may raise, passes as it is, and so do a want of memory
    and Ctrl-C.
    """
    try:
        with confined(what):
            yield
    except (OpdError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as cause:
        if type(cause).__name__ == "OutOfMemoryError":  # torch's, without importing it
            raise
        fault = error(f"{what} {raised(cause)}; mend it.")
        fault.of_own_code = True
        raise fault from cause


@contextlib.contextmanager
def confined(what: str) -> Iterator[None]:
    """Around code of the user's own, `what` in sentences: in this process the block ends as it would without.

    A process that is forked in it ends with it: with status 0, that of `sys.exit`, or 1 and a line that says
    what was raised. Raises `OSError` in the block for `os.closerange`, and after it if it has closed what it
    cannot have opened.
    """
    process = os.getpid()
    _CLOSERANGE.install()
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _thread_failed
    guards = _open_guards()
    with streams_kept():
        _calls.append(what)
        try:
            yield
        except BaseException as cause:
            if os.getpid() != process:
                _leave(what, cause)
            raise
        finally:
            if os.getpid() != process:
                os._exit(0)
            _calls.remove(what)
    _refuse_closed(guards)


_calls: list[str] = []
"""What runs now."""


def _leave(what: str, cause: BaseException) -> NoReturn:
    """End a forked process as Python would."""
    if isinstance(cause, SystemExit) and (cause.code is None or isinstance(cause.code, int)):
        os._exit((cause.code or 0) & 0xFF)
    with contextlib.suppress(OSError):
        os.write(2, redact(f"opd: warning: a process that {what} forked {raised(cause)}\n").encode())
    os._exit(1)


class _Closerange:
    """`os.closerange` for code of the user's own. It is meant for forked processes: here it would close logs,
    locks and connections under the hands of those who use them, and libraries abort the process.
    """

    def __init__(self) -> None:
        self._close, self._process = os.closerange, os.getpid()

    def install(self) -> None:
        if os.closerange is not self:
            self._close, self._process = os.closerange, os.getpid()
            os.closerange = self

    def __call__(self, first: int, after: int, /) -> None:
        if os.getpid() == self._process and not _is_of_libraries(sys._getframe(1).f_code.co_filename):
            raise OSError(
                f"os.closerange({first}, {after}) would close files of this process that others use; close"
                " what you have opened"
            )
        self._close(first, after)


_CLOSERANGE = _Closerange()
_opening = threading.Lock()
_guards: list[tuple[int, int, int]] = []
"""Descriptors that nobody uses, with device and inode: the lowest that was free, and one from 64 on."""


def _open_guards() -> list[tuple[int, int, int]]:
    """The guards, opened (again) if they are not open."""
    with _opening:
        _guards[:] = [guard for guard in _guards if _still_open(guard)]
        if len(_guards) < 2:
            for number, *_ in _guards:
                os.close(number)
            _guards.clear()
            with contextlib.suppress(OSError):  # no more files may be opened: whoever needs one says so
                low = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                for number in (low, fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 64)):
                    found = os.fstat(number)
                    _guards.append((number, found.st_dev, found.st_ino))
        return list(_guards)


def _still_open(guard: tuple[int, int, int]) -> bool:
    number, *identity = guard
    try:
        found = os.fstat(number)
    except OSError:
        return False
    return [found.st_dev, found.st_ino] == identity


def _refuse_closed(guards: list[tuple[int, int, int]]) -> None:
    closed = [str(guard[0]) for guard in guards if not _still_open(guard)]
    if closed:
        raise OSError(
            f"closed file descriptor {' and '.join(closed)}, which it had not opened; close what you have"
            " opened"
        )


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """What a thread of the user's own raised, in one line of the log, and once for each place. Threads of
    others have their traceback.
    """
    cause = failed.exc_value
    if cause is None or _own_frame(cause) is None or _has_frame_of_opd(cause):
        threading.__excepthook__(failed)
        return
    said = raised(cause)
    if said in _told_of:
        return
    _told_of.add(said)
    by = f", while {_calls[-1]} ran," if _calls else ""
    name = "a thread" if failed.thread is None else f"the thread {told(failed.thread.name)}"
    text = f"{name} of code of yours{by} {said}; nobody waits for what it does: catch that there"
    if any(not isinstance(handler, logging.NullHandler) for handler in _handlers()):
        _log.warning("%s", text)
    elif sys.stderr is not None:
        print(f"opd: warning: {redact(text)}", file=sys.stderr, flush=True)


_told_of: set[str] = set()


def _handlers() -> Iterator[logging.Handler]:
    """Of the loggers that hear `_log`."""
    logger: logging.Logger | None = _log
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def raised(cause: BaseException) -> str:
    """`raised KeyError: 'a' (my_code.py:12)`: what, and the innermost line of the user's own."""
    frame = _own_frame(cause)
    at = f" ({os.path.basename(frame.filename)}:{frame.lineno})" if frame is not None else ""
    return f"raised {named(cause)}{at}"


def named(cause: BaseException) -> str:
    """`KeyError: 'a'`, or the type alone of an error that has no words."""
    words = told(cause)
    return f"{type(cause).__name__}: {words}" if words else type(cause).__name__


def _own_frame(cause: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that is neither opd's nor a library's."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = (one for one in reversed(frames) if not (_is_of_libraries(one.filename) or is_of_opd(one.filename)))
    return next(own, None)


def _has_frame_of_opd(cause: BaseException) -> bool:
    return any(is_of_opd(frame.filename) for frame in traceback.extract_tb(cause.__traceback__))


def _is_of_libraries(file: str) -> bool:
    parts = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
    return file.startswith((_LIBRARIES, "<frozen ")) or any(part in file for part in parts)


def told(value: object, form: Callable[[Any], str] = str) -> str:
    """`form(value)` on one line; what the user's own makes of itself may raise, too."""
    try:
        return " ".join(str.__str__(form(value)).split())
    except KeyboardInterrupt:
        raise
    except BaseException:  # of `__str__` or `__repr__`
        return f"a {type(value).__name__} that cannot be shown"


def is_of_opd(file: str) -> bool:
    """Whether `file` is part of this package: `opd/rollout/x.py`, or `pipelines/x.py` behind its link."""
    here = os.path.dirname(os.path.abspath(__file__))
    links = [
        os.path.realpath(os.path.join(here, name)) for name in ("pipelines", "teachers", "storage", "kernels")
    ]
    return os.path.realpath(file).startswith(
        tuple(root + os.sep for root in (os.path.realpath(here), *links))
    )
