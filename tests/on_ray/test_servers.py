"""Servers that are actors of a cluster: ready, started again where they were, and gone with the run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_runs import ended, settings
from watched import is_alive, wait_until

pytest.importorskip("ray")

LITTLE = Path(__file__).parents[1] / "servers" / "little_server.py"
DRIVER = """
import logging, sys
from pathlib import Path
from opd.config import Recipe
from opd.config.teachers import SGLangTeacherConfig
from opd.pipelines.launch.ray.server import servers_of
from opd.pipelines.launch.ray.trainer import open_worker_group
from opd.pipelines.records.run_folder import RunFolder
from opd.ranks import Ranks
from opd.rollout.preemption import Preemption

logging.basicConfig(filename=sys.argv[2] + ".log")
recipe = Recipe.model_validate_json(sys.argv[1])
wanted = {"sort": (recipe.teachers["sort"], Path(sys.argv[3]))}
with RunFolder.create(Path(sys.argv[2]), recipe) as folder:
    with open_worker_group(recipe, folder, Preemption(5.0)) as group:
        for line in sys.stdin:  # each is a stage, or a trainer that was started anew
            with servers_of(recipe, group.role_actors("server"), Ranks(), folder.server_logs) as servers:
                config = servers.serve_models(wanted)["sort"]
                print("at", *config.urls, flush=True)
                sys.stdin.readline()
                print("trouble", servers.group_trouble(config.urls), flush=True)
"""


class Driver:
    """A process that runs `script` and starts two little servers on a cluster of its own."""

    def __init__(self, folder: Path, script: str, model: Path, changes: dict) -> None:
        self.folder, self.out = folder, folder / "run"
        group = {
            "count": 2,
            "command": [sys.executable, str(LITTLE)],
            "arguments": {"pids": str(folder)},
            "start_seconds": 60,
        }
        recipe = settings(folder) | {"servers": {"own": group}} | changes
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, json.dumps(recipe), str(self.out), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        )

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            first, *words = line.split()
            if first == word:
                return words
        raise AssertionError("the driver has ended")

    def actor(self, name: str) -> list[int]:
        """The processes it has had, the newest last."""
        lines = (self.out / "logs" / f"{name}.log").read_text().splitlines()
        return [int(line.split()[-1]) for line in lines if f"{name} is process" in line]


class StageDriver(Driver):
    """A process with the actors of a run, which serves a teacher in stage after stage."""

    def __init__(self, folder: Path) -> None:
        sort = {"type": "sglang", "path": str(folder / "sort"), "servers": "own"}
        changes = {
            "domains": {"sort": settings(folder)["domains"]["sort"]},
            "teachers": {"sort": sort},
            "launch": {"type": "ray"},
        }
        super().__init__(folder, DRIVER, folder / "sort", changes)

    def urls(self) -> list[str]:
        """Of a new stage."""
        self.tell("")
        return self.hear("at")

    def trouble(self) -> str:
        """What the stage ends with."""
        self.tell("")
        return " ".join(self.hear("trouble"))

    def server(self, url: str) -> list[int]:
        """Processes of the server there, and of what it has started."""
        own, child, _ = (self.folder / url.rpartition(":")[2]).read_text().split()
        return [int(own), int(child)]


@pytest.fixture
def driver(tmp_path) -> Iterator[StageDriver]:
    made = StageDriver(tmp_path)
    with made.process:
        yield made
        made.process.kill()


def assert_nothing_is_left(driver: StageDriver, pids: list[int]) -> None:
    assert ended(pids)
    shared = [Path("/dev/shm", file.read_text().split()[2]) for file in driver.folder.glob("[0-9]*")]
    wait_until(lambda: not any(file.exists() for file in shared))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_on_nodes_are_started_again_where_they_were_and_end_with_the_run(driver):
    first, second = urls = driver.urls()
    before = [pid for url in urls for pid in driver.server(url)]
    os.kill(before[0], signal.SIGKILL)  # its actor starts it again
    wait_until(lambda: driver.server(first)[0] != before[0])
    os.kill(driver.actor("server-1")[-1], signal.SIGKILL)  # Ray starts that again, and it is asked again
    wait_until(lambda: driver.server(second)[0] != before[2])
    assert not is_alive(before[2])
    assert driver.trouble() == "None"
    assert driver.urls() == urls  # of the next stage: they are there already
    now = [pid for url in urls for pid in driver.server(url)]
    assert not set(now) & set(before)
    assert driver.trouble() == "None"
    assert (driver.out / "logs" / "servers" / "own-1.log").exists()
    said = Path(f"{driver.out}.log").read_text()
    assert "server own-0 ended with exit status 137; it is started again" in said
    assert "server own-1: its actor is gone; Ray starts it again, and it its server" in said
    actors = [pid for name in ("server-0", "server-1", "trainer") for pid in driver.actor(name)]
    assert driver.process.stdin is not None
    driver.process.stdin.close()
    assert driver.process.wait(120) == 0
    assert_nothing_is_left(driver, [*before, *now, *actors])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_on_nodes_are_gone_when_the_run_is_killed(driver):
    pids = [pid for url in driver.urls() for pid in driver.server(url)]
    driver.process.kill()
    assert_nothing_is_left(driver, pids)
