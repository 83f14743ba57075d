"""Stands between a run and one server it has started: when the run is gone, so is the server, and all of it.

`python -I server_guard.py SECONDS COMMAND...`, as an `opd.child.Child` apart. Nothing is said on its channel.
When the run closes its end, or is gone, also after kill -9, the server is to end; SIGTERM asks for the same,
and SECONDS later force is used. When the last process has closed the guard's end, the server is gone, and all
it had. What the server has started itself counts as the server, whichever group or session it is in, and so
does the shared memory that it leaves behind, with the folder of hidden states that nobody has fetched.
Folders into which others write weights for it are made before it starts, and go with it; they are locked
meanwhile, so that those of a guard that was killed with all others are known to be nobody's.

It is two processes: what starts it may end its own children by force, as Ray's workers do when they end, and
the one that has the server is none of these. It ends the server when the other is gone.

Knows the standard library alone: it is run by its path, and must cost a server neither seconds nor memory.
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
"""Seconds between two looks at the shared memory of a server that runs."""
ORPHANS = 2.0
"""Seconds for what a server leaves running."""
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)
_SHARED = "/dev/shm/"


def _prctl(option, value):
    with contextlib.suppress(OSError, AttributeError):  # not on Linux: what is left is the channel
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants():
    """Process ids of everything below this process; the dead that nobody has read are left out.

    One whose first thread has ended looks dead while others of its threads end: it still has its children.
    """
    children, dead = {}, set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(name))
                if state == "Z" and len(os.listdir(f"/proc/{name}/task")) == 1:
                    dead.add(int(name))
    found, ahead = [], [os.getpid()]
    while ahead:
        own = children.get(ahead.pop(), [])
        found += own
        ahead += own
    return [process for process in found if process not in dead]


def _shared_memory(processes):
    """Files of shared memory that these have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as file:
            found.update(
                path
                for line in file
                if (path := line.rstrip("\n").partition(_SHARED)[2]) and not path.endswith(" (deleted)")
            )
    return {_SHARED + name for name in found}


def _end_all(server, grace, left):
    """Ask the server to end, which then ends what it has started; see to it that nothing of it is left.

    It alone is asked: a server whose parts end by themselves takes that for a crash, and what tidies up
    behind its parts needs a moment after them. `left`: files of shared memory that it had mapped before.
    """
    left |= _shared_memory(_descendants())
    with contextlib.suppress(ProcessLookupError):
        server.terminate()
    until = time.monotonic() + grace
    while (processes := _descendants()) and time.monotonic() < until + 20.0:
        left |= _shared_memory(processes)
        gone = server.poll() is not None
        until = min(until, time.monotonic() + ORPHANS) if gone else until
        if time.monotonic() >= until:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # what this process was left with
    if left:
        left -= _shared_memory(name for name in os.listdir("/proc") if name.isdigit())  # others use it, too
    for path in left:
        with contextlib.suppress(OSError):
            os.unlink(path)
    _forget_folders()


def _forget_folders():
    """Remove what was written for others, or by them."""
    folder = os.environ.get("OPD_HIDDEN_FOLDER", "")
    if os.path.basename(folder).startswith("opd-hidden-"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in _weights_folders():
        with contextlib.suppress(OSError):  # under another name first: who writes there finds it no more
            os.rename(folder, folder + "-gone")
        for path in (folder, folder + "-gone"):
            shutil.rmtree(path, ignore_errors=True)


def _weights_folders():
    """Those for the server's weights."""
    folders = os.environ.get("OPD_WEIGHTS_FOLDERS", "").split(os.pathsep)
    return [folder for folder in folders if os.path.basename(folder).startswith("opd-weights-")]


def _make_folders():
    """Those for the server's weights, locked for as long as this process lives."""
    for folder in _weights_folders():
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(FileExistsError):  # of this server, before it was started again
                    os.mkdir(folder, 0o700)
                held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(held, fcntl.LOCK_SH)
                if os.path.exists(folder):  # or somebody has taken it for one that is nobody's
                    break
                os.close(held)


def main():
    """Stand before the process that guards: pass on what it is asked, and its status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No `Event`: set by a handler while the thread that it interrupts waits for it, it blocks for ever.
    door, asked = os.getpid(), []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    channel = int(os.environ.pop("OPD_PARENT"))
    child = os.fork()
    if child == 0:
        sys.exit(guard(channel, door, asked, float(sys.argv[1]), sys.argv[2:]))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    if asked:
        os.kill(child, signal.SIGTERM)
    os.close(channel)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def guard(channel, door, asked, grace, command):
    """Start the server of `command`, and end it once SIGTERM comes, `channel` ends, or the process `door`.

    `asked`: what the handler of SIGTERM appends to.
    """
    _prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != door:
        return 0  # it has ended before it could be followed
    _prctl(_SUBREAPER, 1)
    _make_folders()
    try:
        # Should this guard itself be killed, its server does not live on.
        server = subprocess.Popen(command, preexec_fn=lambda: _prctl(_PDEATHSIG, signal.SIGKILL))
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", flush=True)
        _forget_folders()
        return 127

    def watch():
        with contextlib.suppress(OSError):
            while os.read(channel, 1):
                pass
        asked.append(True)

    threading.Thread(target=watch, daemon=True).start()
    # One that is killed has no time to tidy up, and nobody can ask it then what it had mapped.
    mapped, look = set(), 0.0
    while server.poll() is None and not asked:
        time.sleep(0.1)
        if time.monotonic() >= look:
            look = time.monotonic() + LOOK
            mapped |= _shared_memory(_descendants())
    status = server.returncode
    _end_all(server, grace, mapped)
    return 0 if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
