"""`opd run` with real SGLang and vLLM servers of its own: however it ends, nothing of them is left."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import served_models as models
from real_servers import GROUPS, require_sglang, require_vllm
from recipes import write_recipe
from watched import wait_until

MARK = "OPD_TEST_SERVED_RUN"
SECONDS = 1500
pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * SECONDS)]  # three servers are started, on a CPU


@dataclass
class Run:
    """One `opd run` and everything that it has started, which carries a mark of its own."""

    recipe: Path
    out: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    hidden: set[Path] = field(default_factory=set)
    """Folders of hidden states that its servers had."""
    shared: set[Path] = field(default_factory=set)
    """Shared memory that its processes had."""

    def start(self, told: str | None = None, *more: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        if told is not None:
            environment[models.TOLD_VARIABLE] = told
        command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(self.recipe)]
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                [*command, "--out", str(self.out), *more],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's jobs ignore it
            )

    @property
    def _errors(self) -> Path:
        return self.out.parent / "errors.txt"

    def said(self) -> str:
        """The end of what the newest process has said."""
        return self._errors.read_text()[-3000:]

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit status, once it has ended."""
        return process.wait(SECONDS)

    def whole(self) -> None:
        """Run it to a good end; it is interrupted if the test is."""
        process = self.start()
        try:
            assert self.ended(process) == 0, self.said()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(300)

    def processes(self) -> dict[int, str]:
        """Command lines of those that live, by id; what they have of hidden states and shared memory is
        noted.
        """
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                own = (folder / "environ").read_bytes().split(b"\0")
                if f"{MARK}={self.mark}".encode() in own:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
                    maps = (folder / "maps").read_text(errors="replace")
                    self.shared |= {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}
                    self.hidden |= {Path(os.fsdecode(v[18:])) for v in own if v[:18] == b"OPD_HIDDEN_FOLDER="}
        return found

    def ports(self) -> set[int]:
        """Those that its servers were given, as their command lines say."""
        said = "\n".join(self.processes().values()).replace("\0", " ")
        return {int(port) for port in re.findall(r"(?:launch_server|api_server) .*--port (\d+)", said)}


@pytest.fixture
def run(request, vllm_models, tmp_path) -> Iterator[Run]:
    """A merge: the student writes on one server, the teachers are on two others, one of them of vLLM. Its
    parameter is the launch.
    """
    launch = getattr(request, "param", "local")
    if launch == "ray":
        pytest.importorskip("ray")
    require_sglang()
    require_vllm()
    group, other = GROUPS["sglang"], GROUPS["vllm"]
    digits = {"digits": 3}
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={"path": str(vllm_models["a"])},
        base=None,
        domains={
            "sort": {"source": "procedural:sort", "params": digits, "prompts": 50},
            "add3": {"source": "procedural:add3", "params": digits, "prompts": 50},
        },
        servers={"student": group, "teacher": group, "other": other},
        launch={"type": launch},
        teachers={
            "sort": {"type": "sglang", "servers": "teacher", "path": str(vllm_models["b"])},
            "add3": {"type": "vllm", "servers": "other", "path": str(vllm_models["b"])},
        },
        rollout={
            "engine": {"type": "sglang", "servers": "student"},
            "top_k": 1,
            "max_new_tokens": 6,
            "max_sequence": 32,
        },
        distill={"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 1, "to_batch": models.TOLD},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 4, "curve_prompts": 4},
    )
    made = Run(recipe, tmp_path / "run")
    yield made
    for pid in made.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def assert_nothing_is_left(run: Run, ports: set[int]) -> None:
    wait_until(lambda: not run.processes(), SECONDS)  # after kill -9 its guards are still ending what it had
    assert [folder for folder in run.hidden if folder.exists()] == []
    assert [piece for piece in run.shared if piece.exists()] == []
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()


def reached(run: Run, process: subprocess.Popen[bytes], file: Path) -> set[int]:
    """Wait until the run is in the middle of its merge; returns its servers' ports."""
    wait_until(lambda: file.exists() or process.poll() is not None, SECONDS)
    assert process.poll() is None, run.said()
    ports = run.ports()
    assert len(ports) == 3
    assert run.hidden
    return ports


@pytest.mark.parametrize("run", ["local", "ray"], indirect=True)
def test_a_run_that_ends_well_or_fails_leaves_nothing(run):
    """It fails at its second batch and is gone with all it has; then it goes on to its end."""
    failing = run.start("fail")
    assert run.ended(failing) == 2, run.said()
    assert "the second batch is not to be learnt from" in run.said()
    assert_nothing_is_left(run, run.ports())
    going_on = run.start(None, "--resume")
    ports: set[int] = set()

    def seen() -> bool:
        ports.update(run.ports())
        return going_on.poll() is not None

    wait_until(seen, SECONDS)
    assert going_on.returncode == 0
    assert (run.out / "merged" / "model.safetensors").exists()
    assert len(ports) == 3
    assert_nothing_is_left(run, ports)


def test_an_interrupted_run_leaves_nothing(run, tmp_path):
    process = run.start(str(tmp_path / "here"))
    ports = reached(run, process, tmp_path / "here")
    process.send_signal(signal.SIGINT)
    assert run.ended(process) == 130, run.said()
    assert "--resume" in run.said()
    assert_nothing_is_left(run, ports)


@pytest.mark.parametrize("run", ["local", "ray"], indirect=True)
def test_a_killed_run_leaves_nothing_and_goes_on(run, tmp_path):
    process = run.start(str(tmp_path / "here"))
    ports = reached(run, process, tmp_path / "here")
    process.kill()
    process.wait()
    assert_nothing_is_left(run, ports)
    going_on = run.start(None, "--resume")
    assert run.ended(going_on) == 0, run.said()
    assert (run.out / "merged" / "model.safetensors").exists()
    assert_nothing_is_left(run, ports)
