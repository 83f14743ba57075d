"""Guard one server of a run: when the run is gone, so is the server, with everything it started.

`python -I server_guard.py SECONDS COMMAND...` runs as an `opd.child.Child` apart, without messages on its
channel. The server is to end when the run closes its end or is gone, also after kill -9. SIGTERM does the
same, and SECONDS later force is used. When the last process has closed the guard's end, the server is gone.

The server's own children count as the server, whatever their group or session. So does the shared memory that
it leaves behind, and the folder of unfetched hidden states. Folders for its new weights are made before it
starts, and go with it. They are locked meanwhile, so that folders of a killed guard are known as ownerless.

It is two processes. The starter may end its own children by force, as Ray's workers do when they end, and the
process with the server is not its child. It ends the server when the other is gone. It uses the standard
library alone. It is run by its path, and must cost a server neither seconds nor memory.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

LOOK = 5.0
"""Seconds between two looks at the shared memory of a running server."""
ORPHANS = 2.0
"""Seconds for processes that a server leaves running."""
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)
_SHARED = "/dev/shm/"


def _prctl(option, value):
    with contextlib.suppress(OSError, AttributeError):  # not on Linux: the channel remains
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendant_pids():
    """Return the process ids of everything below this process, without unreaped dead ones.

    A process whose first thread has ended looks dead while its other threads end, but still has children.
    """
    children, dead = {}, set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(name))
                if state == "Z" and len(os.listdir(f"/proc/{name}/task")) == 1:
                    dead.add(int(name))
    descendants, parents = [], [os.getpid()]
    while parents:
        of_one = children.get(parents.pop(), [])
        descendants += of_one
        parents += of_one
    return [process for process in descendants if process not in dead]


def _shared_memory(processes):
    """Return the files of shared memory that these processes have mapped."""
    paths = set()
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as file:
            for line in file:
                name = line.rstrip("\n").partition(_SHARED)[2]
                if name and not name.endswith(" (deleted)"):
                    paths.add(_SHARED + name)
    return paths


def _end_server(server, grace, mapped):
    """Ask the server to end, and remove everything that is left of it.

    Only the server itself is asked. If its children ended by themselves, it would take that for a crash. Its
    cleanup needs a moment after them. `mapped`: files of shared memory that it had mapped before.
    """
    mapped |= _shared_memory(_descendant_pids())
    with contextlib.suppress(ProcessLookupError):
        server.terminate()
    until = time.monotonic() + grace
    while (processes := _descendant_pids()) and time.monotonic() < until + 20.0:
        mapped |= _shared_memory(processes)
        gone = server.poll() is not None
        until = min(until, time.monotonic() + ORPHANS) if gone else until
        if time.monotonic() >= until:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # processes that this one inherited
    if mapped:
        mapped -= _shared_memory(name for name in os.listdir("/proc") if name.isdigit())  # others use it, too
    for path in mapped:
        with contextlib.suppress(OSError):
            os.unlink(path)
    _remove_folders()


def _remove_folders():
    """Remove the folders of hidden states and of weights."""
    folder = os.environ.get("OPD_HIDDEN_FOLDER", "")
    if os.path.basename(folder).startswith("opd-hidden-"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in _weights_folders():
        with contextlib.suppress(OSError):  # rename first, so that writers no longer find it
            os.rename(folder, folder + "-gone")
        for path in (folder, folder + "-gone"):
            shutil.rmtree(path, ignore_errors=True)


def _weights_folders():
    folders = os.environ.get("OPD_WEIGHTS_FOLDERS", "").split(os.pathsep)
    return [folder for folder in folders if os.path.basename(folder).startswith("opd-weights-")]


def _make_folders():
    """Make the folders for the server's weights, locked as long as this process lives."""
    for folder in _weights_folders():
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(FileExistsError):  # of this server, before its restart
                    os.mkdir(folder, 0o700)
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if os.path.exists(folder):  # or somebody removed it as ownerless
                    break
                os.close(descriptor)


def main():
    """Run the outer process: pass on SIGTERM, and return the guard's status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No `Event`: if a handler sets it while the interrupted thread waits for it, it blocks for ever.
    door, stops = os.getpid(), []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(True))
    channel = int(os.environ.pop("OPD_PARENT"))
    child = os.fork()
    if child == 0:
        sys.exit(guard_server(channel, door, stops, float(sys.argv[1]), sys.argv[2:]))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    if stops:
        os.kill(child, signal.SIGTERM)
    os.close(channel)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def guard_server(channel, door, stops, grace, command):
    """Start the server of `command`. End it on SIGTERM, or when `channel` or the process `door` ends.

    `stops`: the list that the SIGTERM handler appends to.
    """
    _prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != door:
        return 0  # it ended before it could be followed
    _prctl(_SUBREAPER, 1)
    _make_folders()
    try:
        # If this guard itself is killed, its server ends too.
        server = subprocess.Popen(command, preexec_fn=lambda: _prctl(_PDEATHSIG, signal.SIGKILL))
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", flush=True)
        _remove_folders()
        return 127

    def await_close():
        with contextlib.suppress(OSError):
            while os.read(channel, 1):
                pass
        stops.append(True)

    threading.Thread(target=await_close, daemon=True).start()
    # A killed server cannot clean up, and its mappings can no longer be read.
    mapped, look = set(), 0.0
    while server.poll() is None and not stops:
        time.sleep(0.1)
        if time.monotonic() >= look:
            look = time.monotonic() + LOOK
            mapped |= _shared_memory(_descendant_pids())
    status = server.returncode
    _end_server(server, grace, mapped)
    return 0 if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
