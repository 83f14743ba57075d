"""Little servers in processes of their own, which are killed as any other and started again at their ports.

    python little_processes.py DIALECT MODEL FOLDER SETTINGS...

There is one server for each of SETTINGS, JSON of attributes to set. `FOLDER/NUMBER.json` has its process and
port. All are forks of a process that has done nothing but import, so a start takes no time.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from little_models import LittleSGLang, LittleVLLM
from watched import wait_until

KINDS = {"sglang": LittleSGLang, "vllm": LittleVLLM}
AWAY = 0.5
"""Seconds until a server that ended is started again."""
_DIE_WITH_PARENT = 1


def place_of(folder: Path, number: int) -> dict[str, int]:
    """Process and port of a server."""
    return json.loads((folder / f"{number}.json").read_text())


def received(url: str) -> int:
    """Bytes of weights that a server was given since its start."""
    with urllib.request.urlopen(f"{url}/received", timeout=60) as answer:
        return json.load(answer)["bytes"]


@contextlib.contextmanager
def little_processes(
    kind: str, model: Path, folder: Path, settings: list[dict[str, Any]]
) -> Iterator[list[str]]:
    """Their URLs, in the block."""
    folder.mkdir()
    command = [sys.executable, __file__, kind, str(model), str(folder), *map(json.dumps, settings)]
    leader = subprocess.Popen(command)
    try:
        places = [folder / f"{number}.json" for number in range(len(settings))]
        wait_until(lambda: leader.poll() is not None or all(place.exists() for place in places), 120)
        assert leader.poll() is None
        yield [f"http://127.0.0.1:{place_of(folder, number)['port']}" for number in range(len(settings))]
    finally:
        leader.kill()  # and with it its forks
        leader.wait()


def _serve(kind: str, model: Path, port: int, settings: dict[str, Any]) -> None:
    assert ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL) == 0
    server = KINDS[kind](model, port)
    for name, value in settings.items():
        setattr(server, name, value)
    threading.Event().wait()


def main() -> None:
    kind, model, folder, *settings = sys.argv[1:]
    ports: dict[int, int] = {}
    for number in range(len(settings)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports[number] = free.getsockname()[1]
    running: dict[int, int] = {}
    due = dict.fromkeys(ports, 0.0)
    while True:
        for number in [number for number, at in due.items() if time.monotonic() >= at]:
            del due[number]
            pid = os.fork()
            if pid == 0:
                _serve(kind, Path(model), ports[number], json.loads(settings[number]))
            running[pid] = number
            whole = Path(folder, f".{number}")
            whole.write_text(json.dumps({"pid": pid, "port": ports[number]}))
            whole.replace(Path(folder, f"{number}.json"))
        time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):  # none is left
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                due[running.pop(pid)] = time.monotonic() + AWAY


if __name__ == "__main__":
    main()
