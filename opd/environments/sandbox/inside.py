"""The program beside a command: starts it within limits, watches what it starts, ends it all, and reports.

In bubblewrap it is process 1 of a namespace of its own: what it starts cannot end it, and its end is the end
of everything. Without, it adopts what its command leaves behind and ends that too. Imports the standard
library alone, and runs with `python -I -S`. Its job is JSON in a descriptor; the report is JSON of so many
bytes as the number before it says, then what was kept of the two standard outputs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":  # where it is imported, a folder of opd must not stand before packages of its name
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    import lockdown  # pyright: ignore[reportMissingImports]

LENGTH = struct.Struct("<I")
_TICK = 0.1
"""Seconds between two looks at memory, processes and disk."""
_DRAINED = 1 << 26
"""Bytes of output that a command may write beyond what is kept."""


class Output:
    """The first bytes of a stream."""

    def __init__(self, place: int, most: int) -> None:
        self.place, self.kept, self.lost = place, bytearray(), 0
        self._most = most

    def take(self) -> bool:
        """Read what is there; False at the end."""
        data = os.read(self.place, 1 << 16)
        room = self._most - len(self.kept)
        self.kept += data[:room]
        self.lost += max(0, len(data) - room)
        return bool(data)


def _descendants(most: int | None = None) -> list[int]:
    """All that this process has started and that has not ended, and what these have; `most` of them."""
    found, waiting = [], [os.getpid()]
    while waiting and (most is None or len(found) <= most):
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(child) for child in file.read().split()]
                    found += children
                    waiting += children
    return found


class Usage:
    """What a command's processes and files take."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self._page = resource.getpagesize()

    def over(self) -> str | None:
        """The quota that is used up."""
        memory = count = 0
        most = self._job["processes"]
        pids = _descendants(most)
        if len(pids) > most:
            return "processes"
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/statm") as file:
                    resident, shared = map(int, file.read().split()[1:3])
                memory += (resident - shared) * self._page
                count += len(os.listdir(f"/proc/{pid}/task"))
        if count > most:
            return "processes"
        if memory > self._job["memory"]:
            return "memory"
        return "disk" if self._too_much() else None

    def _too_much(self) -> bool:
        """Whether the files are more or larger than they may be."""
        size, files, waiting = self._deleted(), 0, [self._job["home"]]
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        files += 1
                        found = entry.stat(follow_symlinks=False)
                        size += found.st_blocks * 512
                        if stat.S_ISDIR(found.st_mode):
                            waiting.append(entry.path)
                        if size > self._job["disk"] or files > self._job["files"]:
                            return True
            except PermissionError:  # nothing is kept from being counted
                with contextlib.suppress(OSError):
                    os.chmod(folder, 0o700)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return True
        return size > self._job["disk"]

    @staticmethod
    def _deleted() -> int:
        """Bytes of files that have no name any more, and that a process still has open."""
        found: dict[tuple[int, int], int] = {}
        for pid in _descendants():
            with contextlib.suppress(OSError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        file = os.stat(f"/proc/{pid}/fd/{number}")
                        if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                            found[file.st_dev, file.st_ino] = file.st_blocks * 512
        return sum(found.values())


def _start(job: Mapping[str, Any], output: int, error: int) -> int:
    """The command's process, in a session of its own."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.dup2(job["stdin"], 0)
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.closerange(3, 1 << 16)
        os.chdir(job["home"])
        os.umask(0o022)
        if job["kind"] == "process":
            if job["uid"]:
                for path in job["writes"][:2]:
                    _give(path, job["uid"])
                lockdown.become(job["uid"])
            else:
                lockdown.drop_privileges()
            lockdown.end_with_parent()
        lockdown.limit(job["cpu_seconds"], job["memory"], job["disk"], job["open_files"])
        lockdown.limit_processes(job["processes"] + job["others"])
        if job["landlock"]:
            lockdown.restrict_files(job["reads"], job["writes"])
        if job["seccomp"]:
            lockdown.refuse_calls(processes=True)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvpe(job["command"][0], job["command"], job["environment"])
    except OSError as fault:
        os.write(2, f"{job['command'][0]}: {fault.strerror}\n".encode(errors="replace"))
    except BaseException as fault:
        os.write(2, f"{type(fault).__name__}: {fault}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def _give(folder: str, uid: int) -> None:
    """Let all of `folder` belong to `uid`."""
    os.lchown(folder, uid, uid)
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(above, name), uid, uid)


def _watch(job: Mapping[str, Any], child: int, outputs: list[Output]) -> str | None:
    """Read what the command writes until it ends; why it must be ended, if it must."""
    usage, until = Usage(job), time.monotonic() + job["seconds"]
    ended = os.pidfd_open(child)
    places = {output.place: output for output in outputs}
    waiting = select.poll()
    for place in (ended, *places):
        waiting.register(place, select.POLLIN)
    waiting.register(job["alive"], 0)  # hung up when who asked has ended
    look = time.monotonic() + _TICK
    while True:
        for place, _ in waiting.poll(1000 * max(0.0, min(until, look) - time.monotonic())):
            if place == job["alive"]:
                os._exit(_end(child))
            if place == ended:
                return "disk" if usage.over() == "disk" else None
            if not places[place].take():
                waiting.unregister(place)
        now = time.monotonic()
        over = "wall" if now >= until else usage.over() if now >= look else None
        if sum(output.lost for output in outputs) > _DRAINED:
            return "output"
        if over:
            return over
        if now >= look:
            # A look at many files takes time of its own.
            look = time.monotonic() + _TICK + 2 * (time.monotonic() - now)


def _end(child: int) -> int:
    """Kill the command and whatever it has started; its status as `os.waitstatus_to_exitcode` has it."""
    status = 0
    while True:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped starts no other
            for pid in _descendants():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        try:
            found, how = os.waitpid(-1, os.WNOHANG)
            while found:
                status = os.waitstatus_to_exitcode(how) if found == child else status
                found, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        time.sleep(0.001)


def _drain(outputs: list[Output]) -> None:
    """What is still in the pipes. Nobody writes to them any more."""
    for output in outputs:
        os.set_blocking(output.place, False)
        with contextlib.suppress(BlockingIOError):
            while output.take():
                pass


def main() -> None:
    """Do the job in the descriptor that the first word names."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job = json.load(file)
    lockdown.adopt_orphans()
    lockdown.hide()
    pipes = [os.pipe() for _ in range(2)]
    outputs = [Output(read, job["output"]) for read, _ in pipes]
    child = _start(job, pipes[0][1], pipes[1][1])
    try:
        for _, write in pipes:
            os.close(write)
        killed_by = _watch(job, child, outputs)
    finally:
        status = _end(child)
    _drain(outputs)
    report = {
        "exit": None if killed_by else status,
        "killed_by": killed_by,
        "sizes": [len(output.kept) for output in outputs],
        "cut": sum(output.lost for output in outputs),
    }
    head = json.dumps(report).encode()
    told = LENGTH.pack(len(head)) + head + bytes(outputs[0].kept) + bytes(outputs[1].kept)
    with os.fdopen(job["report"], "wb") as file:
        file.write(told)


if __name__ == "__main__":
    main()
