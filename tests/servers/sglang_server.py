"""A real SGLang server on localhost, in an environment of its own that is installed once and kept."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from seaweedfs import free_ports

CPU_SERVER = Path(__file__).resolve().parents[2] / "examples" / "sglang_teachers" / "cpu_server"
INSTALL_SECONDS, START_SECONDS = 900, 500


@functools.cache
def installing() -> Future[str | None]:
    """The installation, begun in the background; its result as `install` gives it."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="sglang-install")
    try:
        return executor.submit(install)
    finally:
        executor.shutdown(wait=False)


def install() -> str | None:
    """Why the server cannot be installed here; `None` once it is."""
    environment = os.environ | {"PYTHON": sys.executable}
    try:
        done = subprocess.run(
            ["bash", str(CPU_SERVER / "install.sh")],
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
    """One server process on one port; killed and started again as tests please."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self.model, self.log, self.arguments = model, log, arguments
        self.port = free_ports(1)[0][0]
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Begin to start; `wait` until it serves."""
        command = ["bash", str(CPU_SERVER / "serve.sh"), str(self.model), str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--context-length", "256", *self.arguments],
                env=os.environ | {"PYTHON": sys.executable},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it serves; raises with the end of its log if it does not."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{self.url}/ready", timeout=5),
            ):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server did not start: {self.log.read_text(errors='replace')[-3000:]}"
                )
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
        """End the process and those it started, and remove their shared memory."""
        process, self._process = self._process, None
        if process is not None:
            subprocess.run(["bash", str(CPU_SERVER / "end.sh"), str(process.pid)], check=True)
            process.wait()

    def kill(self) -> None:
        """Kill the process and those it started, at once."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def sglang_server(model: Path, folder: Path, *arguments: str) -> Iterator[SGLangServer]:
    """A running server of the Hugging Face folder `model`; it is gone when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    server = SGLangServer(model, folder / "sglang.log", *arguments)
    server.launch()
    try:
        server.wait()
        yield server
    finally:
        server.end()
