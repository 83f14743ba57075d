"""Exit statuses of commands and their last messages. Importable without torch."""

from __future__ import annotations

import _thread
import contextlib
import os
import resource
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NoReturn

from opd.child import PARENT
from opd.errors import OpdError, PreemptedError, RanksError
from opd.output import guard_streams
from opd.redact import redact
from opd.untrusted import escape_unprintable
from opd.user_code import is_of_opd, safe_text

ERROR, INTERRUPTED, BROKEN_PIPE, PREEMPTED = 2, 130, 141, 143
_LONGEST = 1200
"""Characters of a sentence. A path of thousands would hide the error."""
_ADDRESS_SPACE = 1280 * 2**20
"""Bytes that torch and its libraries need before there is a model. 0.9 GiB were measured."""
_CACHE_MAPS = 2 * 2**30
"""Bytes of address space, not of memory, of the cache's index and one of its segments."""
_UNWIND = 5
"""Seconds in which a command without a handler closes its files after SIGTERM, repeated every second."""


_COMMAND = "OPD_COMMAND"
_GOING_ON = ("--resume", "--accept-changed-code", "--accept-changed-settings")


@contextlib.contextmanager
def record_command(words: Sequence[str]) -> Iterator[None]:
    """Store the command line for this process and its children while the block runs."""
    earlier = os.environ.get(_COMMAND)
    if PARENT not in os.environ:  # else this is a child process of the command
        command = shlex.join(["opd", *(word for word in words if word not in _GOING_ON)])
        os.environ[_COMMAND] = command.replace("\0", "")  # no environment can hold it; refused later
    try:
        yield
    finally:
        os.environ.pop(_COMMAND, None)
        if earlier is not None:
            os.environ[_COMMAND] = earlier


def resume_command(switches: str) -> str:
    """Return the command line of this run, with `switches` added."""
    return f"{os.environ.get(_COMMAND, 'the same command and')} {switches}"


def run_command(command: Callable[[], int], *, resumes: bool, last: bool = False) -> int:
    """Run `command` and return the exit status.

    It is the command's own, or 2 for a user's or system's error, 1 for a bug (with its traceback), 130 for
    Ctrl-C, 141 if nobody reads the output, 143 for SIGTERM. `resumes`: a stopped command continues with
    `--resume`. `last`: the process ends with it.
    """
    guard_streams()
    with _no_false_success(resumes, last) as statuses:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):  # not a terminal's or a file's
                stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        with _handle_sigterm() as stopped:
            try:
                status = command()
            except BaseException as error:
                status = PREEMPTED if stopped else _error_status(error, resumes)
            # Whatever the result: a library may have caught the exit in the middle of an import.
            if stopped:
                _print_stopped("asked to stop, and did" + _resume_hint(resumes))
                status = PREEMPTED
        statuses.append(status)
        return status


def _print_stopped(sentence: str) -> None:
    """Print `sentence`, unless this is a rank. Its parent prints it then, whichever stops first."""
    launching = sys.modules.get("opd.pipelines.launch.supervisor")  # nothing is imported on the way out
    if PARENT not in os.environ and (launching is None or launching.parent() is None):
        _print_error(sentence)


def _error_status(error: BaseException, resumes: bool) -> int:
    """Print `error` and return the exit status for it."""
    if isinstance(error, PreemptedError):
        _print_stopped(str(error))
        return PREEMPTED
    if isinstance(error, KeyboardInterrupt):
        _print_error("interrupted" + ("; continue with --resume" * resumes))
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the flush at exit goes nowhere
        return BROKEN_PIPE
    if isinstance(error, SystemExit):  # from a callee: the command itself returns
        where = traceback.extract_tb(error.__traceback__)[-1]
        _print_error(
            "error: "
            + _exit_message(f"sys.exit({safe_text(error.code, repr)})", where.filename, where.lineno, resumes)
        )
        return ERROR
    from opd.pipelines.launch.machine import known_error

    understood = known_error(error, resumes=resumes)
    if understood is not None:
        report_error(understood)
        return ERROR
    traceback.print_exception(error)
    _print_error(
        "this is a bug, in opd or in code of yours that the traceback names last; if it is ours, report it"
        " with the traceback, what `opd --version` says and the recipe (--dry-run prints it)"
    )
    return 1


def _resume_hint(resumes: bool) -> str:
    return "; a run that has begun continues with --resume" if resumes else ""


def _exit_message(by: str, file: str, line: int | None, resumes: bool) -> str:
    at = f"{os.path.basename(file)}:{line}"
    return f"the command was ended by {by} in {at}; take it out there{_resume_hint(resumes)}"


@contextlib.contextmanager
def _no_false_success(resumes: bool, last: bool) -> Iterator[list[int]]:
    """Report other code that ends this process by `os._exit` or replaces its program. Its status 0 would look
    like success, so it becomes an error. The block appends the command's own status to the list, and that
    becomes the status of the process, whatever is called `atexit`.
    """
    leave, execute, process = os._exit, (os.execv, os.execve), os.getpid()
    statuses: list[int] = []

    def guarded_exit(status: int) -> NoReturn:
        caller = sys._getframe(1)
        file = caller.f_code.co_filename
        if os.getpid() == process and not is_of_opd(file):  # forked processes end this way
            if not statuses:
                _print_error(f"error: {_exit_message(f'os._exit({status})', file, caller.f_lineno, resumes)}")
            status = statuses[0] if statuses else status or ERROR
            for stream in (sys.stdout, sys.stderr):  # Python flushes them later still
                with contextlib.suppress(AttributeError, ValueError, OSError):
                    stream.flush()
        leave(status)

    def guarded_exec(path: Any, *arguments: Any) -> NoReturn:
        if os.getpid() == process:
            caller = sys._getframe(1)
            while caller.f_back is not None and caller.f_globals is vars(os):  # `os.execlp` and its like
                caller = caller.f_back
            by = f"os.exec of {safe_text(arguments[0], lambda words: words[0])}"
            _print_error(f"error: {_exit_message(by, caller.f_code.co_filename, caller.f_lineno, resumes)}")
            leave(ERROR)
        execute[len(arguments) - 1](path, *arguments)

    os._exit, os.execv, os.execve = guarded_exit, guarded_exec, guarded_exec
    try:
        yield statuses
    finally:
        if not last:
            os._exit, os.execv, os.execve = leave, *execute


def one_line(text: str) -> str:
    """Return `text` on one line, with unprintable characters escaped and the middle of long text left out."""
    words = " ".join(redact(text).split())
    if len(words) > _LONGEST:
        words = f"{words[: _LONGEST // 2]} ... {words[-_LONGEST // 2 :]}"
    return escape_unprintable(words)


def require_address_space(*, cache: bool = False) -> None:
    """Raise `OpdError` if this process may map too little for torch, and for the `cache` of hidden states.
    Call it before torch is imported. Otherwise libraries crash in many ways, or after hours.
    """
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    needed = _ADDRESS_SPACE + _CACHE_MAPS * cache
    if most != resource.RLIM_INFINITY and most < needed:
        whose, way_out = "torch alone needs", ""
        if cache:
            whose, way_out = "torch and the cache of hidden states need", ", or set storage.cache_mb to 0"
        raise OpdError(
            f"this process may take {most >> 20} MiB of address space, and {whose} {needed >> 20}; raise the"
            f" limit (`ulimit -v`){way_out}."
        )


def report_error(error: OpdError) -> None:
    """Print a user's error, or send it to the parent if this is a rank."""
    from opd.pipelines.launch.supervisor import parent

    if (supervisor := parent()) is not None:
        supervisor.send_message("error", type(error).__name__, one_line(str(error)))
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("LOCAL_RANK", "0") != "0":
        from opd.pipelines.launch.local import is_joined

        # Under torchrun all ranks read one recipe and one folder, and all learn of a lost rank: the first one
        # of this machine prints it. An error of one rank alone is its own to print.
        if isinstance(error, RanksError) or not is_joined():
            return
    _print_error(f"error: {error}")


def _print_error(text: str) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed, or its disk is full
        print(f"opd: {one_line(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _handle_sigterm() -> Iterator[list[bool]]:
    """Answer SIGTERM with status 143 if nothing else does: before and between stages, during imports.

    Yields a list that is not empty after the signal.
    """
    stopped: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(*_: object) -> None:
        stopped.append(True)
        raise SystemExit(PREEMPTED)

    over = _exit_deadline(stop)
    handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield stopped
    finally:
        over()
        signal.signal(signal.SIGTERM, handler)


def _exit_deadline(answer: Callable[..., None]) -> Callable[[], None]:
    """Leave with status 143 a while after a SIGTERM that `answer` did not handle. The main thread may be deaf
    to signals (in compiled code, waiting for other ranks), or the exception was swallowed. Returns a function
    that cancels this.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    done = threading.Event()

    def await_signal() -> None:
        with contextlib.suppress(OSError), os.fdopen(ours, "rb", 0) as file:  # somebody may have closed it
            exit_late(file)
            done.wait()  # until then the pipe has a reader

    def exit_late(file: IO[bytes]) -> None:
        while signal.SIGTERM not in (numbers := file.read(64)):
            if not numbers:
                return
        for _ in range(_UNWIND):
            if done.wait(1.0):
                return
            listener = signal.getsignal(signal.SIGTERM)
            # A system signal does not do: a library may have removed Python's handler (Ray does, while it
            # starts and ends), and the signal would end the process.
            _thread.interrupt_main(signal.SIGTERM)
            if listener is not answer:
                return  # a stage handles it now
        if not done.wait(1.0):
            os._exit(PREEMPTED)

    def cancel_deadline() -> None:
        done.set()
        with contextlib.suppress(OSError, ValueError):  # closed already
            signal.set_wakeup_fd(wakeup)
            os.close(theirs)

    # Without a thread the process still leaves if the signal is handled. Later work will report the missing
    # thread.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=await_signal, daemon=True).start()
    return cancel_deadline
