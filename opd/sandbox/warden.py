"""The program beside a command: starts it within limits, watches its processes, ends them all, and reports.

In bubblewrap it is process 1 of a namespace of its own. The command cannot end it, and its end ends
everything. Without bubblewrap it adopts the command's orphans and ends them too. With a container it is
outside: its command is the engine's client, and its last act is to remove the container.

Imports only the standard library, and runs with `python -I -S`. Its job is JSON in a descriptor. The report
is a number of bytes, JSON of that size, then the kept parts of the two standard outputs.
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

if __name__ == "__main__":  # if imported, no folder of opd may come before packages of its name
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import lockdown  # pyright: ignore[reportMissingImports]

LENGTH = struct.Struct("<I")
_TICK = 0.1
"""Seconds between two checks of memory, processes and disk."""
_DRAINED = 1 << 26
"""Bytes of output that a command may write beyond the kept ones."""
_DEEPEST = 128
"""Most levels of folders that are counted. Each is open twice meanwhile."""
_CLIENTS = 16
"""Processes of a container's engine besides those in the container."""
_GRACE = 2.0
"""Seconds in which the client's processes end by themselves, once a container is removed."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Output:
    """The first bytes of a stream. For a container, the bytes behind the line `marker`, with which its
    command starts. Bytes before it are the engine's.
    """

    def __init__(self, fd: int, most: int, marker: bytes = b"") -> None:
        self.fd, self.kept, self.lost = fd, bytearray(), 0
        self.since, self.before = None if marker else time.monotonic(), b""
        self._most, self._marker = most, marker

    @property
    def has_begun(self) -> bool:
        """True once the command has started."""
        return self.since is not None

    def read_available(self) -> bool:
        """Read the available bytes. Returns False at the end."""
        data = os.read(self.fd, 1 << 16)
        has_data = bool(data)
        if not self.has_begun:
            self.before, begun, data = (self.before + data).partition(self._marker)
            self.since = time.monotonic() if begun else None
            self.before = self.before[-(1 << 14) :]
        space = self._most - len(self.kept)
        self.kept += data[:space]
        self.lost += max(0, len(data) - space)
        return has_data


def _live_descendants(most: int | None = None) -> list[int]:
    """Return this process's live descendants, at most `most` of them."""
    descendants, waiting = [], [os.getpid()]
    while waiting and (most is None or len(descendants) <= most):
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(child) for child in file.read().split()]
                    descendants += children
                    waiting += children
    return descendants


class CommandUsage:
    """Memory, processes and disk of a command."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self._page = resource.getpagesize()
        self._clients = _CLIENTS if job["kind"] == "container" else 0
        self._depth = _namespace_depth("self") if self._clients else -1

    def exceeded_quota(self, begun: bool) -> str | None:
        """Return the exceeded quota, if any. Before `begun` the control group is not the command's."""
        memory = count = 0
        most = self._job["processes"]
        pids = _live_descendants(most + self._clients)
        if len(pids) > most + self._clients:
            return "processes"
        for pid in pids:
            if self._clients and _namespace_depth(pid) <= self._depth:
                continue  # the engine's own
            if self._clients and begun and self._job["grouped"] and _killed_for_memory(pid):
                return "memory"
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
        """Return True if the files exceed their number or size. No link is followed, because a command may
        put one anywhere at any time.
        """
        self._size, self._files = self._deleted_bytes(), 0
        for folder in self._job["filled"]:
            with contextlib.suppress(OSError):  # it was removed meanwhile
                if self._exceeds_disk(folder, None, 0):
                    return True
        return False

    def _exceeds_disk(self, name: str, above: int | None, depth: int) -> bool:
        if depth > _DEEPEST:
            return True
        folder_fd = _open_folder(name, above)
        try:
            with os.scandir(folder_fd) as entries:
                for entry in entries:
                    self._files += 1
                    try:
                        status = _stat_entry(entry, folder_fd)
                        self._size += status.st_blocks * 512
                        if self._size > self._job["disk"] or self._files > self._job["files"]:
                            return True
                        is_folder = stat.S_ISDIR(status.st_mode)
                        if is_folder and self._exceeds_disk(entry.name, folder_fd, depth + 1):
                            return True
                    except OSError as error:  # it was removed meanwhile, or no more can be opened
                        if error.errno in (errno.EMFILE, errno.ENFILE):
                            return True
        finally:
            os.close(folder_fd)
        return self._size > self._job["disk"]

    @staticmethod
    def _deleted_bytes() -> int:
        """Bytes of deleted files that a process still has open."""
        sizes: dict[tuple[int, int], int] = {}
        for pid in _live_descendants():
            with contextlib.suppress(OSError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        file = os.stat(f"/proc/{pid}/fd/{number}")
                        if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                            sizes[file.st_dev, file.st_ino] = file.st_blocks * 512
        return sum(sizes.values())


def _open_folder(name: str, above: int | None) -> int:
    """Open a folder of `above`, changing its permissions if needed. Raises `OSError`."""
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except PermissionError:
        path_fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            if not stat.S_ISDIR(os.fstat(path_fd).st_mode):
                raise
            os.chmod(f"/proc/self/fd/{path_fd}", 0o700)
        finally:
            os.close(path_fd)
        return os.open(name, _FOLDER, dir_fd=above)


def _stat_entry(entry: os.DirEntry[str], folder: int) -> os.stat_result:
    """Stat an entry of an open folder, even if the folder's permissions show only its names."""
    try:
        return entry.stat(follow_symlinks=False)
    except PermissionError:
        os.fchmod(folder, 0o700)
        return entry.stat(follow_symlinks=False)


def _namespace_depth(pid: int | str) -> int:
    """Number of pid namespaces that a process is in, or 0 once it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return next((len(line.split()) - 1 for line in file if line.startswith("NSpid:")), 0)
    return 0


def _killed_for_memory(pid: int) -> bool:
    """Return True if the kernel has killed a process of this one's control group for its memory."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            events = f"/sys/fs/cgroup{path}/memory.events"
            if "memory" in controllers.split(","):
                events = f"/sys/fs/cgroup/memory{path}/memory.oom_control"
            with contextlib.suppress(OSError), open(events) as counts:
                if any(line.split()[0] == "oom_kill" and line.split()[1] != "0" for line in counts):
                    return True
    return False


def _start_command(job: Mapping[str, Any], output: int, error: int) -> int:
    """Start the command's process, in a session of its own."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.dup2(job["stdin"], 0)
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.closerange(3, 1 << 16)
        if job["kind"] == "container":
            # The engine's client, which starts the container of the command.
            if job["uid"]:
                _chown_tree(job["home"], job["uid"])
            lockdown.end_with_parent()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.execve(job["command"][0], job["command"], job["environment"])
        os.chdir(job["home"])
        os.umask(0o022)
        for path in job["writes"][:2] if job["uid"] else ():
            _chown_tree(path, job["uid"])
        lockdown.confine(job)
        lockdown.limit_processes(job["processes"] + job["others"])
        if job["kind"] == "process":
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


def _chown_tree(folder: str, uid: int) -> None:
    """Make `uid` the owner of all of `folder`."""
    os.lchown(folder, uid, uid)
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(above, name), uid, uid)


def _await_command(job: dict[str, Any], child: int, outputs: list[Output]) -> str | None:
    """Read the command's output until it ends. Returns the quota for which it must be ended, if any."""
    usage, start = CommandUsage(job), time.monotonic()
    ended = os.pidfd_open(child)
    by_fd = {output.fd: output for output in outputs}
    waiting = select.poll()
    for fd in (ended, *by_fd):
        waiting.register(fd, select.POLLIN)
    waiting.register(job["alive"], 0)  # hung up when the caller has ended
    look = time.monotonic() + _TICK
    while True:
        until = _command_deadline(job, outputs[0], start)
        for fd, _ in waiting.poll(1000 * max(0.0, min(until, look) - time.monotonic())):
            if fd == job["alive"]:
                os._exit(_end_command(job, child, outputs[0].has_begun))
            if fd == ended:
                return "disk" if usage.exceeded_quota(False) == "disk" else None
            if not by_fd[fd].read_available():
                waiting.unregister(fd)
        now = time.monotonic()
        if sum(output.lost for output in outputs) > _DRAINED:
            return "output"
        if now >= _command_deadline(job, outputs[0], start):
            return "wall"
        if now >= look:
            exceeded = usage.exceeded_quota(outputs[0].has_begun)
            if exceeded:
                return exceeded
            # Counting many files takes time of its own.
            look = time.monotonic() + _TICK + 2 * (time.monotonic() - now)


def _command_deadline(job: Mapping[str, Any], output: Output, start: float) -> float:
    """Time by which the command must have ended, or a container's must have begun."""
    return start + job["starting"] if output.since is None else output.since + job["seconds"]


def _end_command(job: dict[str, Any], child: int, begun: bool) -> int:
    """Kill the command and its descendants. Returns its status as `os.waitstatus_to_exitcode` has it. A
    container is removed first. It is removed once more if that failed or its command had not `begun`, because
    its client may have been making it.
    """
    if job["kind"] != "container":
        return _kill_tree(child)
    removed = _run_engine(job, "remove") is not None
    status = _kill_tree(child, _GRACE if removed and begun else 0.0)
    job["left"] = not (removed and begun) and _run_engine(job, "remove") is None
    return status


def _run_engine(job: Mapping[str, Any], action: str) -> bytes | None:
    """Return the engine's output, or None if it fails or takes too long."""
    import subprocess

    words, options = job[action], {"env": job["environment"], "cwd": "/", "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(words, capture_output=True, timeout=job["answering"], check=True, **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _kill_tree(child: int, grace: float = 0.0) -> int:
    """Kill it and all descendants, unless they end within `grace` seconds. Returns its status."""
    status, until = 0, time.monotonic() + grace
    while True:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process starts no other
            for pid in _live_descendants() if time.monotonic() >= until else ():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        try:
            ended, how = os.waitpid(-1, os.WNOHANG)
            while ended:
                status = os.waitstatus_to_exitcode(how) if ended == child else status
                ended, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        time.sleep(0.001)


def _drain_pipes(outputs: list[Output]) -> None:
    """Read the rest of the pipes, which have no writers any more."""
    for output in outputs:
        os.set_blocking(output.fd, False)
        with contextlib.suppress(BlockingIOError):
            while output.read_available():
                pass


def _container_end(job: dict[str, Any], killed_by: str | None, outputs: list[Output]) -> str | None:
    """Return the reason of the end of a container's command, after asking its engine too."""
    if killed_by is None:
        _drain_pipes(outputs)
    if killed_by not in (None, "wall") or not outputs[0].has_begun:
        return killed_by
    state = (_run_engine(job, "inspect") or b"").split()
    if len(state) != 2:
        job["unsaid"] = None if killed_by else "it does not say how its command ended"
        return killed_by or "sandbox"
    return "memory" if state[0] == b"true" and (killed_by or state[1] != b"0") else killed_by


def _container_fault(
    job: Mapping[str, Any], killed_by: str | None, outputs: list[Output], begun: bool
) -> str | None:
    """Return the engine's last words if a container's command did not run, or may still run."""
    if begun:
        return "the container cannot be removed" if job["left"] else job.get("unsaid")
    if killed_by is None:
        lines = outputs[1].before.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it says nothing"
    return {
        "wall": f"no container starts within {job['starting']:g} s",
        "sandbox": "its client was killed",
    }.get(killed_by)


def main() -> None:
    """Do the job in the descriptor that the first word names."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job = json.load(file)
    lockdown.adopt_orphans()
    lockdown.hide()
    pipes, contained = [os.pipe() for _ in range(2)], job["kind"] == "container"
    outputs = [Output(read, job["output"], job["token"].encode()) for read, _ in pipes]
    child, begun = _start_command(job, pipes[0][1], pipes[1][1]), True
    try:
        for _, write in pipes:
            os.close(write)
        killed_by = _await_command(job, child, outputs)
        if contained:
            killed_by = _container_end(job, killed_by, outputs)
            begun = outputs[0].has_begun  # before the reads during its end
    finally:
        status = _end_command(job, child, begun)
    _drain_pipes(outputs)
    if contained and status < 0:
        killed_by = killed_by or "sandbox"
    fault = _container_fault(job, killed_by, outputs, begun) if contained else None
    report = {
        "exit": None if killed_by else status,
        "killed_by": killed_by,
        "fault": fault,
        "sizes": [len(output.kept) for output in outputs],
        "cut": sum(output.lost for output in outputs),
    }
    head = json.dumps(report).encode()
    message = LENGTH.pack(len(head)) + head + bytes(outputs[0].kept) + bytes(outputs[1].kept)
    with os.fdopen(job["report"], "wb") as file:
        file.write(message)


if __name__ == "__main__":
    main()
