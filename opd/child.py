"""Start, talk to and end child processes, and run untrusted computations within limits.

Parent and child each have an end of a socket pair. A message on it is a line of JSON. Text that a child
prints is no message. If the parent is gone, also after kill -9, its end is closed, and a child that called
`listen` ends.

A `LimitedProcess` computes untrusted input for us, one request after another. A chat template, a formula or a
regular expression may take hours or all memory inside a library, where no thread can be stopped. Such a
process has no secrets in its environment, a limit of processor seconds a request, and a limit of memory. It
ends when it exceeds one, and the next request starts another. If the kernel supports it, the process changes
no file, and starts and reaches nothing. It computes `answer(request)` of a module, which takes and returns
JSON, after the module's `prepare()`: the imports, which count against no limit.

This file is also the program of such a process. An interpreter that has no `opd` loads it by its path, so it
imports nothing of `opd` before it has found it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

PARENT = "OPD_PARENT"
"""Environment variable of a child: the descriptor of its end."""
MOST = 1 << 26
"""Default limit of a message, in bytes."""
LONGEST = 1 << 24
"""Limit of an answer of a `LimitedProcess`, in bytes."""
_PASSED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_PIECE = 1 << 16
_LOOK = 1.0
"""Seconds between two checks whether the peer is alive."""


class Channel:
    """One end of the socket pair between a parent and its child. Threads may send concurrently."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._turn, self._heard = end, threading.Lock(), bytearray()

    def send_message(self, message: object, **options: Any) -> None:
        """Send `message`. Raises `OSError` if the peer is gone. `options` go to `json.dumps`."""
        data = json.dumps(message, **options).encode() + b"\n"
        with self._turn:
            self._end.sendall(data)

    def receive_message(self, seconds: float | None = None, most: int = MOST) -> bytes | None:
        """Return the next message as unchecked JSON, or `None` if none is complete after `seconds`. Raises
        `EOFError` if no message can come any more, or if it has more than `most` bytes.
        """
        looked, until = 0, None if seconds is None else time.monotonic() + seconds
        while (end := self._heard.find(b"\n", looked)) < 0:
            looked = len(self._heard)
            # The child was killed before it had read everything, or this end is closed.
            with contextlib.suppress(OSError, ValueError):
                if until is not None and not wait_readable(self._end, max(0.0, until - time.monotonic())):
                    return None
                self._heard += self._end.recv(_PIECE)
            if len(self._heard) == looked or looked > most:
                raise EOFError
        if end > most:
            raise EOFError
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line

    def hang_up(self) -> None:
        """Send no more. The peer reads the end and may still send."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def wait_closed(self, seconds: float) -> bool:
        """Return whether the other end's holders, who send nothing, have closed it within `seconds`."""
        with contextlib.suppress(ValueError):  # this end is closed already
            return wait_readable(self._end, seconds)
        return True

    def close(self) -> None:
        """Close this end in both directions."""
        self._end.close()


def wait_readable(end: socket.socket, seconds: float) -> bool:
    """Return whether data arrives within `seconds`, or the other end is closed."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def above_standard(number: int) -> int:
    """Move a descriptor above the standard streams' numbers, because a process may have closed its own."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)


class Child:
    """A child process that runs `command` without standard input. Raises `OSError` if it cannot start.

    Args:
        command: Program and arguments.
        environment: All of it. Default: the environment of this process.
        log: Where it prints. Default: where this process prints.
        apart: Give it its own session, so that Ctrl-C reaches this process alone.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: IO[bytes] | int | None = None,
        *,
        apart: bool = False,
    ) -> None:
        ends = socket.socketpair()
        ours, theirs = (socket.socket(fileno=above_standard(end.detach())) for end in ends)
        self.channel = Channel(ours)
        variables = {**(os.environ if environment is None else environment), PARENT: str(theirs.fileno())}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=apart,
                )
        except BaseException:
            ours.close()
            raise
        self.pid = self._process.pid

    def status(self) -> int | None:
        """Return the exit status, or `None` while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit status once it has ended, or `None` if it runs longer than `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def send_signal(self, number: int) -> None:
        """Send the process a signal if it runs."""
        self._process.send_signal(number)

    def kill_process(self) -> None:
        """Kill the process if it runs, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.channel.close()
        self.wait()


def parent_channel() -> Channel | None:
    """Return the channel to the process that started this one as its `Child`, or `None` in any other process.
    Children of this process do not inherit it.
    """
    number = os.environ.pop(PARENT, None)
    with contextlib.suppress(OSError, ValueError):  # a variable of somebody else: its number is no socket
        if number is not None:
            os.set_inheritable(int(number), False)
            return Channel(socket.socket(fileno=int(number)))
    return None


def listen(
    channel: Channel,
    hear: Callable[[bytes], Any] = lambda message: None,
    ended: Callable[[], Any] = lambda: os._exit(1),
    lives: Callable[[], bool] = lambda: True,
) -> threading.Thread:
    """Pass messages of the peer to `hear` in the returned thread. If the peer is gone or `hear` fails, this
    process ends at once, in the middle of any work. Give `ended` to do something else. `lives` tells whether
    the peer exists, even if another process holds its end.
    """

    def receive_all() -> None:
        try:
            with contextlib.suppress(EOFError):
                while (message := channel.receive_message(_LOOK)) is not None or lives():
                    if message is not None:
                        hear(message)
        finally:
            ended()

    thread = threading.Thread(target=receive_all, name="opd listens", daemon=True)
    thread.start()
    return thread


class LimitedProcess:
    """One process with limits. It starts at the first request, and again after a request that ended it.
    Threads wait for each other.
    """

    def __init__(self, module: str, memory: int) -> None:
        """`module`: full name of the module with `answer` and `prepare`. `memory`: bytes the process may take
        beyond those it has after `prepare`.
        """
        self.owner = os.getpid()
        self._module = module
        self._memory = memory
        self._lock = threading.Lock()
        self._child: Child | None = None
        atexit.register(self.close)

    def request_answer(self, request: Mapping[str, object], seconds: float) -> bytes | None:
        """Return the answer as unchecked JSON, or `None` if the request ended the process. An answer of more
        than `LONGEST` bytes also gives `None`. `seconds` is processor time. If somebody else ended the
        process, such as the kernel for want of memory, it starts again and the request is sent again.
        """
        with self._lock:
            if self._child is not None and self._child.status() is not None:
                self._end_child()
            answer, killed = self._exchange_message([seconds, request])
            if answer is None and killed:
                answer, _ = self._exchange_message([seconds, request])
            return answer

    def _exchange_message(self, message: list[Any]) -> tuple[bytes | None, bool]:
        """Return the answer, and if there is none, whether another process ended this one."""
        child, ready = self._child, self._child is not None
        with contextlib.suppress(EOFError, OSError):
            child = child or self._start_child()
            ready = ready or child.channel.receive_message() is not None
            child.channel.send_message(message)
            return child.channel.receive_message(most=LONGEST), False
        status = None if child is None else child.wait(1.0 if ready else 10.0)  # a busy machine ends it late
        killed = status in (-signal.SIGKILL, -signal.SIGTERM)  # not after an answer that is too large
        self._end_child()
        if not ready and not killed:  # it would look like a request that takes too long
            from opd.errors import OpdError

            raise OpdError(
                f"the process that computes {self._module} ended with status {status} before it was ready;"
                f" look at what `{sys.executable} -c 'import {self._module}'` says."
            )
        return None, killed

    def _start_child(self) -> Child:
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        around = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        # -P: the modules beside this file are not the libraries of their names.
        command = [sys.executable, "-P", __file__, around, self._module, str(self._memory)]
        self._child = Child(command, environment, subprocess.DEVNULL, apart=True)
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill_process()

    def close(self) -> None:
        """End the process, if there is one. A later request starts another."""
        if self.owner == os.getpid():  # a forked process does not end its parent's child
            self._end_child()


def _answer_within_limits(around: str, name: str, memory: int) -> None:
    """Answer requests until nobody is there to send them. The rest of the file is the client."""
    import importlib
    import resource

    channel = parent_channel()
    assert channel is not None
    sys.path.append(around)
    module = importlib.import_module(name)
    module.prepare()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + memory
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(soft, most), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from opd.lockdown import refuse_calls, restrict_files

    restrict_files(["/"])
    refuse_calls()
    channel.send_message("ready")
    while (data := channel.receive_message(most=1 << 40)) is not None:
        seconds, request = json.loads(data)
        # Nothing handles this signal: it ends the process, in the middle of any library's computation.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = module.answer(request)
        except MemoryError:
            answer = {"error": f"a MemoryError: it may take {memory >> 20} MiB"}
        except Exception as error:  # a request may raise anything
            answer = {"error": f"{type(error).__name__}: {str(error)[:400]}".removesuffix(": ")}
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send_message(answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the client is gone
        _answer_within_limits(sys.argv[1], sys.argv[2], int(sys.argv[3]))
