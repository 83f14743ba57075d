"""Child processes: how one is started, what is said to and by it, and how it ends; and those within limits.

Parent and child have an end each of a socket pair, on which a message is a line of JSON. What a child prints
is no message. When the parent is gone, also after kill -9, its end is closed: whoever `listen`s ends by that.

A `LimitedProcess` computes for us what nobody trusts, one request after another. A chat template, a formula
or a regular expression may take hours or all memory, in the middle of what a library computes, where no
thread can be stopped. Such a process has no secrets in its environment, so many seconds of processor time a
request, and so much memory; what goes beyond ends it, and the next request starts another. Where the kernel
can see to it, it changes no file, and starts and reaches nothing. What is computed is `answer(request)` of a
module, which takes and returns what JSON can hold, after its `prepare()`: the imports, which count against no
limit.

This file is also the program of such a process, and an interpreter that has no `opd` loads it by its path: it
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
"""Variable of a child's environment: the descriptor of its end."""
MOST = 1 << 26
"""Bytes of a message, unless who hears it says otherwise."""
LONGEST = 1 << 24
"""Bytes of an answer of a `LimitedProcess`."""
_PASSED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_PIECE = 1 << 16
_LOOK = 1.0
"""Seconds between two looks at whether the other one lives."""


class Channel:
    """One end of the socket pair between a parent and its child. Threads may speak side by side."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._turn, self._heard = end, threading.Lock(), bytearray()

    def say(self, message: Any, **options: Any) -> None:
        """Send `message`. Raises `OSError` if nobody is there to hear it. `options`: of `json.dumps`."""
        data = json.dumps(message, **options).encode() + b"\n"
        with self._turn:
            self._end.sendall(data)

    def hear(self, seconds: float | None = None, most: int = MOST) -> bytes | None:
        """The next message as JSON that nobody has looked at; `None` if none is whole after `seconds`. Raises
        `EOFError` once none can come any more, and where it has more than `most` bytes.
        """
        looked, until = 0, None if seconds is None else time.monotonic() + seconds
        while (end := self._heard.find(b"\n", looked)) < 0:
            looked = len(self._heard)
            # A child that was killed before it had read all; an end that is closed here.
            with contextlib.suppress(OSError, ValueError):
                if until is not None and not stirs(self._end, max(0.0, until - time.monotonic())):
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
        """Say no more: the other one hears the end, and may still speak."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def over(self, seconds: float) -> bool:
        """Whether all who have the other end, which say nothing, have closed it within `seconds`."""
        with contextlib.suppress(ValueError):  # this end is closed already
            return stirs(self._end, seconds)
        return True

    def close(self) -> None:
        """Neither speak nor hear any more."""
        self._end.close()


def stirs(end: socket.socket, seconds: float) -> bool:
    """Whether something comes within `seconds`, or the other end is closed."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def above_standard(number: int) -> int:
    """Move a descriptor to a number that is no standard stream's: a process may have closed its own."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)


class Child:
    """A process that `command` begins, with nothing to read. Raises `OSError` if it cannot be begun.

    Args:
        command: Program and arguments.
        environment: All of it; by default this process's own.
        log: Where it prints; by default where this process does.
        apart: In a session of its own: Ctrl-C is for this process alone.
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
        own = {**(os.environ if environment is None else environment), PARENT: str(theirs.fileno())}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    env=own,
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
        """Its exit status; `None` while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status, once it has ended; `None` if it has not within `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, if it runs, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.channel.close()
        self.wait()


def parent_channel() -> Channel | None:
    """To the process that started this one as its `Child`; `None` in any other. Children of this one do not
    inherit it.
    """
    number = os.environ.pop(PARENT, None)
    with contextlib.suppress(OSError, ValueError):  # what is no socket is somebody else's variable
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
    """Give `hear` what the other one says, in the thread that is returned. When that one is gone, this
    process ends at once, in the middle of whatever it does, unless `ended` does something else; so it does
    where `hear` fails. `lives`: whether the other one is there, whoever else has its end.
    """

    def attend() -> None:
        try:
            with contextlib.suppress(EOFError):
                while (message := channel.hear(_LOOK)) is not None or lives():
                    if message is not None:
                        hear(message)
        finally:
            ended()

    thread = threading.Thread(target=attend, name="opd listens", daemon=True)
    thread.start()
    return thread


class LimitedProcess:
    """One such process, started at the first request and after one that ended it; threads take turns."""

    def __init__(self, module: str, memory: int) -> None:
        """`module`: the full name of the one with `answer` and `prepare`. `memory`: bytes beside what the
        process takes once it is prepared.
        """
        self.owner = os.getpid()
        self._module = module
        self._memory = memory
        self._lock = threading.Lock()
        self._child: Child | None = None
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any], seconds: float) -> bytes | None:
        """The answer, as JSON that nobody has looked at; `None` if the process ended over the request, or
        would have answered with more than `LONGEST` bytes. `seconds` of processor time. One that somebody
        else ended, such as the kernel where memory ran out, is started again, and asked once more.
        """
        with self._lock:
            if self._child is not None and self._child.status() is not None:
                self._end()
            answer, killed = self._asked([seconds, request])
            if answer is None and killed:
                answer, _ = self._asked([seconds, request])
            return answer

    def _asked(self, message: list[Any]) -> tuple[bytes | None, bool]:
        """The answer; and where there is none, whether the process was ended by another one."""
        child, ready = self._child, self._child is not None
        with contextlib.suppress(EOFError, OSError):
            child = child or self._start()
            ready = ready or child.channel.hear() is not None
            child.channel.say(message)
            return child.channel.hear(most=LONGEST), False
        status = None if child is None else child.wait(1.0)
        killed = status in (-signal.SIGKILL, -signal.SIGTERM)  # not one that answers with too much
        self._end()
        if not ready and not killed:  # it would look like a request that takes too long
            from opd.errors import OpdError

            raise OpdError(
                f"the process that computes {self._module} ended with status {status} before it was ready;"
                f" look at what `{sys.executable} -c 'import {self._module}'` says."
            )
        return None, killed

    def _start(self) -> Child:
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        around = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        # -P: the modules beside this file are not the libraries of their names.
        command = [sys.executable, "-P", __file__, around, self._module, str(self._memory)]
        self._child = Child(command, environment, subprocess.DEVNULL, apart=True)
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def close(self) -> None:
        """End the process, if there is one; a later request starts another."""
        if self.owner == os.getpid():  # a forked process ends nothing of its parent's
            self._end()


def _answer_within_limits(around: str, name: str, memory: int) -> None:
    """Answer what comes until nobody is there to ask; the rest of the file is who asks."""
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
    channel.say("ready")
    while (data := channel.hear(most=1 << 40)) is not None:
        seconds, request = json.loads(data)
        # Nothing answers this signal: it ends the process, in the middle of whatever a library computes.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = module.answer(request)
        except MemoryError:
            answer = {"error": f"a MemoryError: it may take {memory >> 20} MiB"}
        except Exception as error:  # what is asked raises what it likes
            answer = {"error": f"{type(error).__name__}: {str(error)[:400]}".removesuffix(": ")}
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.say(answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # who asked is gone
        _answer_within_limits(sys.argv[1], sys.argv[2], int(sys.argv[3]))
