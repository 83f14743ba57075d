"""A real SGLang server on localhost, in an environment of its own that is installed once and kept."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from opd.config.servers import ServerGroupConfig
from opd.pipelines.launch.started_server import StartedServer

CPU_SERVER = Path(__file__).resolve().parents[2] / "examples" / "served" / "cpu_server"
INSTALL_SECONDS, START_SECONDS = 900, 500


@functools.cache
def installing() -> Future[str | None]:
    """The installation, begun in the background; its result as `install` gives it."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="sglang-install")
    try:
        return executor.submit(install)
    finally:
        executor.shutdown(wait=False)


def install(server: Path = CPU_SERVER) -> str | None:
    """Why the server of that folder cannot be installed here; `None` once it is."""
    environment = os.environ | {"PYTHON": sys.executable}
    try:
        done = subprocess.run(
            ["bash", str(server / "install.sh")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"its installation took more than {INSTALL_SECONDS} seconds"
    if done.returncode == 0:
        return None
    return f"it cannot be installed: {done.stderr.strip().splitlines()[-1:]}"


class SGLangServer:
    """One server on one port, behind the guard that a run's own servers have; killed and started again as
    tests please.
    """

    start_seconds = START_SECONDS

    def __init__(
        self, model: Path, log: Path, plugins: str = "opd_hidden_states", **arguments: bool | int | str
    ) -> None:
        self.model, self.log = model, log
        self._group = ServerGroupConfig(
            command=["bash", str(CPU_SERVER / "serve.sh")],
            arguments={"context-length": 256, **arguments},
            environment={"PYTHON": sys.executable, "SGLANG_PLUGINS": plugins},
        )
        self._server = StartedServer("sglang", self._group, 0, model, log)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        return self._server.url

    def processes(self) -> dict[int, str]:
        """Command lines of its processes, by id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                own = (folder / "environ").read_bytes().split(b"\0")
                if f"OPD_HIDDEN_FOLDER={self._server._hidden}".encode() in own:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        return found

    def launch(self) -> None:
        """Begin to start; `wait` until it serves."""
        self._server.start()

    def wait(self) -> None:
        """Until it serves; raises with the end of its log if it does not."""
        deadline = time.monotonic() + self.start_seconds
        while not self._server.look():
            if self._server.status() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self._server.last_words()}")
            time.sleep(0.3)

    def control(self, path: str, **body: object) -> dict:
        """The answer to one of the server's own verbs."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else {}

    def load(self, model: Path, version: str) -> None:
        """Serve the weights of the folder `model` from now on; refused until aborted requests are gone."""
        deadline = time.monotonic() + 120
        while True:
            try:
                self.control("/update_weights_from_disk", model_path=str(model), weight_version=version)
                return
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def end(self) -> None:
        """End it and all it has started."""
        self._server.ask_to_end()
        self._server.wait(60)

    def kill(self) -> None:
        """Kill it and all it has started, at once; it can be launched again at its port."""
        guard = self._server._guard
        left: set[str] = set()
        if guard is not None:
            with contextlib.suppress(ProcessLookupError):
                left = _shared_memory(guard.pid)  # which nobody is left to remove
                os.killpg(guard.pid, signal.SIGKILL)
        self.end()
        for path in left:
            Path(path).unlink(missing_ok=True)


def _shared_memory(group: int) -> set[str]:
    """Files that processes of a group have mapped."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                found |= set(re.findall(r"/dev/shm/\S+", (folder / "maps").read_text()))
    return found


Server = TypeVar("Server", bound=SGLangServer)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """`server`, ready; it is gone when the block ends."""
    server.launch()
    try:
        server.wait()
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def sglang_server(
    model: Path, folder: Path, arguments: Mapping[str, bool | int | str] = types.MappingProxyType({})
) -> Iterator[SGLangServer]:
    """A running server of the Hugging Face folder `model`; it is gone when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with running(SGLangServer(model, folder / "sglang.log", **arguments)) as server:
        yield server
