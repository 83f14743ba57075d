"""Environments in worker processes say what they say here, also after a worker is gone."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import chatting
import pytest
from exact import check_exact
from test_agents import chat_engine, chat_prompt, chat_sampling
from test_episodes import contents, episodes

from opd.config.environments import EnvironmentConfig
from opd.environments.gymnasium import Gymnasium
from opd.environments.processes import Processes, WorkerError, world_command
from opd.environments.protocol import Action, Task
from opd.environments.world import World
from opd.errors import RolloutError

pytest.importorskip("gymnasium")
LAKE = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi", "is_slippery": True, "map_name": "4x4"}}
CONFIG = EnvironmentConfig(type="gymnasium", params=LAKE, attempts=3)
ACTIONS = ["1", "2", "nothing", "1", "0", "2"]


@pytest.fixture
def pool():
    made = Processes(world_command("gymnasium"), 2)
    yield made
    made.close()


def task(label: int = 0) -> Task:
    return Task(f"a/{label}", "cross", [], label, {}, 7)


async def played(world: World, kill=lambda turn: None) -> list:
    told: list = [await world.reset()]
    for turn, text in enumerate(ACTIONS):
        kill(turn)
        told.append(await world.step(Action(text, turn=turn)))
        if told[-1].done:
            break
    await world.close()
    return told


async def test_many_worlds_in_two_workers_say_what_they_say_here_and_survive_a_worker(pool):
    def here(label: int) -> World:
        return World(partial(Gymnasium, **LAKE), task(label), CONFIG, "a")

    def there(label: int) -> World:
        return World(partial(pool.open, LAKE), task(label), CONFIG, "a")

    ended = []

    def kill(turn: int) -> None:
        if turn == 2 and not ended:  # by the first world that gets there, not by each: it has three attempts
            ended.append(pool._workers[0])
            os.kill(ended[0]._child.pid, signal.SIGKILL)

    one = [await played(here(label)) for label in range(6)]
    other = await asyncio.gather(*[played(there(label)) for label in range(6)])
    killed = await asyncio.gather(*[played(there(label), kill) for label in range(6)])
    assert one == other == killed
    assert ended[0].dead
    assert any(len(told) > 3 for told in one)


def test_each_world_lives_where_there_are_fewest(pool):
    first, second, *more = [pool.assign_worker() for _ in range(4)]
    assert first is not second
    assert more == [first, second]
    for _ in range(2):
        pool.give_back(second)
    assert [pool.assign_worker() for _ in range(2)] == [second, second]


def test_an_environment_that_raises_there_is_a_sentence_here(pool):
    world = World(partial(pool.open, {"id": "Nowhere-v0"}), task(), CONFIG, "a")
    with pytest.raises(RolloutError, match=r"(?s)reset.*Nowhere.*3 times"):
        asyncio.run(world.reset())


async def test_who_stops_waiting_ends_the_worker(pool):
    made = pool.open(LAKE)
    await made.reset(task())
    for worker in pool._workers:
        os.kill(worker._child.pid, signal.SIGSTOP)  # so that it does not answer first
    call = asyncio.ensure_future(made.step(Action("1")))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(WorkerError, match="its process ended"):
        await made.step(Action("1"))
    await made.close()


ENDLESS = """
import gymnasium
class Endless(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Discrete(2)
    def reset(self, **options):
        open("there", "w").close()
        while True:
            pass
gymnasium.register("Endless-v0", Endless)
"""
CALLS_IT = """
import asyncio, os
from opd.environments.processes import Processes, world_command
from opd.environments.protocol import Task
async def call():
    pool = Processes(world_command("gymnasium"), 1)
    asyncio.ensure_future(pool.open({"id": "endless:Endless-v0"}).reset(Task("a/0", "a", [], 0, {}, 7)))
    while not os.path.exists("there"):
        await asyncio.sleep(0.01)
    print(pool._workers[0]._child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(call())
"""


def test_a_worker_at_work_ends_with_a_killed_run(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-c", CALLS_IT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        worker = Path(f"/proc/{int(process.stdout.readline())}/stat")
        process.kill()
    while worker.exists() and " Z " not in worker.read_text():
        time.sleep(0.01)


def test_episodes_of_a_recipe_are_the_same_in_processes():
    def written(**settings):
        tok, engine = chatting.tokenizer(), chat_engine()
        asked = {"params": LAKE, "max_turns": 3, "turn_tokens": 6, **settings}
        groups = episodes("gymnasium", tok, **asked)(engine, [chat_prompt(tok)], 3, chat_sampling(), 0)
        check_exact(groups, engine)
        return contents(groups)

    assert written(processes=1) == written()


@pytest.mark.parametrize("kind", ["tools", "worlds:Sum"])
def test_processes_are_for_plain_built_in_worlds(kind):
    with pytest.raises(ValueError, match="processes is for textworld and gymnasium"):
        EnvironmentConfig(type=kind, processes=2)
