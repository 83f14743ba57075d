"""Processes that compute for us what nobody trusts, one request after another, within limits.

A chat template, a formula or a regular expression may take hours or all memory, in the middle of what a
library computes, where no thread can be stopped. Such a process has no secrets in its environment, so many
seconds of processor time a request, and so much memory; what goes beyond ends it, and the next request starts
another. Where the kernel can see to it, it changes no file, and starts and reaches nothing. It ends with the
process that asks.

What is computed is `answer(request)` of a module, which takes and returns what JSON can hold, after its
`prepare()`: the imports, which count against no limit. This file is also
the program that such a process runs, and imports nothing of `opd` before it has found it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

LONGEST = 1 << 24
"""Bytes of an answer."""
_PASSED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_LENGTH = struct.Struct("<Q")
_REQUEST = 1 << 40


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
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any], seconds: float) -> bytes | None:
        """The answer, as JSON that nobody has looked at; `None` if the process ended over the request, or
        would have answered with more than `LONGEST` bytes. `seconds` of processor time. One that somebody
        else ended, such as the kernel where memory ran out, is started again, and asked once more.
        """
        data = json.dumps({"seconds": seconds, "request": request}).encode()
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            answer, killed = self._asked(data)
            if answer is None and killed:
                answer, _ = self._asked(data)
            return answer

    def _asked(self, data: bytes) -> tuple[bytes | None, bool]:
        """The answer; and where there is none, whether the process was ended by another one."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = None
        with contextlib.suppress(BrokenPipeError):
            _send(process.stdin, data)
            answer = _received(process.stdout, LONGEST)
        if answer is not None:
            return answer, False
        with contextlib.suppress(subprocess.TimeoutExpired):  # of one that answers with too much
            process.wait(1.0)
        killed = process.returncode in (-signal.SIGKILL, -signal.SIGTERM)
        self._end()
        return None, killed

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        around = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        self._process = subprocess.Popen(
            # -P: the modules beside this file are not the libraries of their names.
            [sys.executable, "-P", __file__, around, self._module, str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            process.wait()

    def close(self) -> None:
        """End the process, if there is one; a later request starts another."""
        if self.owner == os.getpid():  # a forked process ends nothing of its parent's
            self._end()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _received(pipe: IO[bytes], most: int) -> bytes | None:
    """The next message; `None` at the end, or where it is longer than `most` bytes."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size or _LENGTH.unpack(head)[0] > most:
        return None
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    return data if len(data) == size else None


def _serve(around: str, name: str, memory: int) -> None:
    """Answer what comes on the standard input until it ends; the rest of the file is who asks."""
    import importlib
    import resource

    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b", buffering=0) as nothing:  # what is printed is no answer
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
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
    while (data := _received(requests, _REQUEST)) is not None:
        asked = json.loads(data)
        # Nothing answers this signal: it ends the process, in the middle of whatever a library computes.
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            answer = module.answer(asked["request"])
        except MemoryError:
            answer = {"error": f"a MemoryError: it may take {memory >> 20} MiB"}
        except Exception as error:  # what is asked raises what it likes
            answer = {"error": f"{type(error).__name__}: {str(error)[:400]}".removesuffix(": ")}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, json.dumps(answer).encode())


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
