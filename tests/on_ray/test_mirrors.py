"""New weights for servers on a cluster, through its object store: whole, then what has changed; whole again
after a kill; and nothing of them is left.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_runs import ended, settings
from test_servers import Driver
from watched import is_alive, wait_until

pytest.importorskip("ray")

DRIVER = """
import asyncio, json, logging, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from opd.config import Recipe
from opd.config.teachers import SGLangEngineConfig
from opd.models.causal_lm import weights_digest
from opd.pipelines.launch.ray.server import put_weights
from opd.pipelines.launch.ray.server import servers_of
from opd.pipelines.launch.ray.trainer import open_worker_group
from opd.pipelines.records.run_folder import RunFolder
from opd.ranks import Ranks
from opd.rollout.delta_push import DeltaPush
from opd.rollout.preemption import Preemption
from opd.served.http_client import Server, UnavailableError

logging.basicConfig(filename=sys.argv[2] + ".log", level=logging.INFO)
recipe = Recipe.model_validate_json(sys.argv[1])
model, read = Path(sys.argv[3]), {}
own = [("b", torch.randn(3000, 1000).bfloat16()), ("a", torch.randn(7)), ("none", torch.zeros(0, 3))]

async def reads(ask, server, name, folder):
    held = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    read[server.url] = weights_digest([(name, held[name]) for name, _ in own], quick=True)

async def push_all(push, urls, prepared):
    loads = [push.load(None, Server(url), "v", prepared) for url in urls]
    return await asyncio.gather(*loads, return_exceptions=True)

with RunFolder.create(Path(sys.argv[2]), recipe) as folder:
    with open_worker_group(recipe, folder, Preemption(5.0)) as group:
        with servers_of(recipe, group.role_actors("server"), Ranks(), folder.server_logs) as servers:
            wanted = {"student": (recipe.rollout.engine, model)}
            config = servers.serve_models(wanted, any_weights=True)["student"]
            receivers = servers.mirrors_by_url(config)
            push = DeltaPush(receivers, put_weights, reads, model, 1 << 20)
            print("at", *config.urls, flush=True)
            version = 0
            for line in sys.stdin:
                word = line.strip()
                if word == "wrong":
                    receivers[config.urls[0]].change(receivers[config.urls[0]].held())
                    try:
                        receivers[config.urls[0]].settle("0" * 32)
                    except Exception as error:
                        print("said", type(error).__name__, error, flush=True)
                    continue
                own[0][1].view(-1)[version::100] += 1
                before, version = push.sent_bytes, version + 1
                done = asyncio.run(push_all(push, config.urls, push.prepare(own, version)))
                due = weights_digest(own, quick=True)
                right = [read.get(url) == due for url in config.urls]
                errors = [type(error).__name__ for error in done if isinstance(error, BaseException)]
                print("pushed", push.sent_bytes - before, *right, *errors, flush=True)
"""


class PushDriver(Driver):
    """A process that pushes weights to its servers when told."""

    def __init__(self, folder: Path) -> None:
        changes = {
            "rollout": settings(folder)["rollout"] | {"engine": {"type": "sglang", "servers": "own"}},
            "launch": {"type": "ray", "teachers": 0, "step_timeout": 60},
        }
        super().__init__(folder, DRIVER, folder / "base", changes)

    def push(self) -> tuple[int, list[str]]:
        """Bytes that were sent, whether each server has read what it was to, and errors."""
        self.tell("push")
        size, *words = self.hear("pushed")
        return int(size), words

    def server(self, url: str) -> int:
        """The process of the server there."""
        return int((self.folder / url.rpartition(":")[2]).read_text().split()[0])

    def mirrors(self) -> set[Path]:
        """Folders that servers which live were given."""
        found = set()
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                own = file.read_bytes().split(b"\0")
            except OSError:
                continue
            for line in own:
                if line.startswith(b"OPD_WEIGHTS_FOLDERS=") and self._is_own(own):
                    found |= {Path(os.fsdecode(p)) for p in line.partition(b"=")[2].split(b":")}
        return found

    def _is_own(self, environment: list[bytes]) -> bool:
        return f"OPD_TEST_MIRRORS={self.folder}".encode() in environment


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Iterator[PushDriver]:
    monkeypatch.setenv("OPD_TEST_MIRRORS", str(tmp_path))
    made = PushDriver(tmp_path)
    with made.process:
        yield made
        made.process.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_are_sent_what_has_changed_and_everything_after_a_kill(driver):
    first, second = driver.hear("at")
    both, whole = ["True", "True"], 6_000_000
    size, words = driver.push()
    assert words == both
    assert whole < size < 2.5 * whole  # once for both, if they were at it at the same time
    for _ in range(2):
        size, words = driver.push()
        assert words == both
        assert 0 < size < whole / 20
    before = driver.mirrors()
    assert len(before) == 4
    assert sum((folder / "model.safetensors").exists() for folder in before) == 2
    driver.tell("wrong")
    assert driver.hear("said")[0] == "RolloutError"
    size, words = driver.push()
    assert words == both
    assert whole < size < 1.2 * whole  # to the one whose weights were not proved

    killed = driver.actor("server-1")[-1], driver.server(second)
    os.kill(killed[0], signal.SIGKILL)  # Ray starts it again, and it its server
    wait_until(lambda: not is_alive(killed[1]))
    size, words = driver.push()
    assert words in (both, ["True", "False", "UnavailableError"])
    wait_until(lambda: driver.server(second) != killed[1])
    while words != both:
        size, words = driver.push()
    after = driver.mirrors()
    assert sum((folder / "model.safetensors").exists() for folder in after) == 2
    assert not [folder for folder in before - after if folder.exists()]
    size, words = driver.push()
    assert words == both
    assert size < whole / 20

    os.kill(driver.server(first), signal.SIGKILL)  # its actor starts it again, with the same folder
    said = Path(f"{driver.out}.log")
    wait_until(lambda: "it is started again" in said.read_text())
    wait_until(lambda: driver.push()[1] == both)
    pids = [driver.server(url) for url in (first, second)]
    assert driver.process.stdin is not None
    driver.process.stdin.close()
    assert driver.process.wait(120) == 0
    assert ended(pids)
    wait_until(lambda: not any(folder.exists() for folder in before | after))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mirrors_are_gone_when_the_run_is_killed(driver):
    urls = driver.hear("at")
    assert driver.push()[1] == ["True", "True"]
    folders, pids = driver.mirrors(), [driver.server(url) for url in urls]
    assert sum((folder / "model.safetensors").exists() for folder in folders) == 2
    driver.process.kill()
    assert ended(pids)
    wait_until(lambda: not any(folder.exists() for folder in folders))
