"""Gymnasium's environments in words; with the extra `gymnasium`, else what is said without it."""

import asyncio
import importlib.util
import json
from functools import partial

import pytest

from opd.config.environments import EnvironmentConfig
from opd.config.recipe import DomainConfig
from opd.environments import gymnasium as adapter
from opd.environments.protocol import Action, Task, environment_class
from opd.environments.world import World
from opd.errors import MissingExtraError, RolloutError

HERE = importlib.util.find_spec("gymnasium") is not None
needs = pytest.mark.skipif(not HERE, reason="needs the extra gymnasium")
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


@pytest.fixture
def taxi():
    import gymnasium

    found = (one for one in gymnasium.registry.values() if one.name == "Taxi")
    names = ["south", "north", "east", "west", "pick up", "drop off"]
    newest = max(found, key=lambda one: one.version).id  # it warns of an older one
    return {"id": newest, "kwargs": {"render_mode": "ansi"}, "actions": names}


def play(params, texts, label=7):
    """What is said first, and the steps."""
    config = EnvironmentConfig.model_validate({"type": "gymnasium", "params": params, "attempts": 1})
    made = partial(environment_class(config, "a"), **params)

    async def act():
        world = World(made, Task("a/0", "play", [], label, {}, 5), config, "a")
        first = await world.reset()
        steps = [await world.step(Action(text, turn=turn)) for turn, text in enumerate(texts)]
        await world.close()
        return first, steps

    return asyncio.run(act())


@pytest.mark.skipif(HERE, reason="the extra is installed")
def test_without_the_extra_its_name_is_said():
    with pytest.raises(MissingExtraError, match=r"opd\[gymnasium\]"):
        adapter.Gymnasium("FrozenLake-v1").reset(Task("a/0", "", [], None, {}, 0))


@pytest.mark.parametrize(
    ("code", "word"),
    [
        *(("30", "[gray "), ("37", "[white "), ("38", "["), ("39", "["), ("29", "[")),
        *(("40", "[gray "), ("41", "[red "), ("47", "[white "), ("48", "["), ("1;32", "[green ")),
        *(("", "]"), ("0", "]"), ("1", "["), ("33;44", "[yellow ")),
    ],
)
def test_colours_of_a_terminal_are_named(code, word):
    assert adapter._COLOUR.sub(adapter._name_colour, f"a\x1b[{code}mb") == f"a{word}b"


def test_tasks_are_written_as_a_source(tmp_path):
    path = tmp_path / "tasks.jsonl"
    adapter.main([str(path), "--prompt", "Cross the lake.", "--tasks", "3", "--seed", "5"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["label"] for row in rows] == [5, 6, 7]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Cross the lake.\n\nTask 5."}]
    assert DomainConfig.model_validate({"source": str(path), "environment": {"type": "gymnasium"}})


@needs
def test_the_lake_is_crossed_by_names_and_numbers():
    way = ["I go down.", "1", "not left but RIGHT", "2.", "down", "now 2"]
    first, steps = play(LAKE, way)
    assert first == "[red S]FFF\nFHFH\nFFFH\nHFFG\n\nWrite one of: left, down, right, up."
    assert steps[0].observation == "(Down)\nSFFF\n[red F]HFH\nFFFH\nHFFG"
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert (first, steps) == play(LAKE, way)


@needs
def test_what_is_no_action_moves_nothing():
    texts = ["", "fly", "4", "-1", "upwards", "2.5", "I take 17", "down"]
    _, steps = play(LAKE, texts)
    assert [step.observation for step in steps[:-1]] == ["Write one of: left, down, right, up."] * 7
    assert steps[-1].observation.startswith("(Down)\nSFFF\n[red F]HFH")


@needs
def test_the_label_is_the_seed_and_else_the_tasks_own(taxi):
    _, one = play(taxi, ["pick up"], label=1)
    assert play(taxi, ["pick up"], label=1)[1] == one
    firsts = {play(taxi, [], label=seed)[0] for seed in range(6)}  # 5 is the task's own
    assert len(firsts) == 6
    assert all("[blue " in first and "[magenta " in first and "[yellow " in first for first in firsts)
    assert play(taxi, [], label="x") == play(taxi, [], label=True) == play(taxi, [], label=5)


@needs
def test_observations_that_nobody_draws_are_json():
    first, steps = play({"id": "Blackjack-v1", "actions": ["stick", "hit"]}, ["stick"], label=3)
    assert all(isinstance(number, int) for number in json.loads(first.split("\n")[0]))
    assert steps[0].done
    assert steps[0].reward in (-1.0, 0.0, 1.0)
    cut = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "max_episode_steps": 2}}
    _, steps = play(cut, ["3", "3"])
    assert steps[-1].observation == "0"
    assert (steps[-1].done, steps[-1].info) == (True, {"cut": True})


@needs
def test_an_environment_of_texts():
    import gymnasium

    class Echo(gymnasium.Env):
        action_space = gymnasium.spaces.Text(8)
        observation_space = gymnasium.spaces.Text(8)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"say{self.np_random.integers(10)}", {}

        def step(self, action):
            return action, float(action == "abc"), True, False, {}

    gymnasium.register("opd/Echo-v0", entry_point=Echo)
    try:
        first, steps = play({"id": "opd/Echo-v0"}, ["a b", "x" * 9, " abc\n"])
    finally:
        gymnasium.registry.pop("opd/Echo-v0")
    assert first.startswith("say")
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    assert "Text(1, 8" in steps[0].observation


@needs
@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"id": "MountainCarContinuous-v0"}, r"has actions Box.*neither texts nor a few"),
        ({"id": "FrozenLake-v1", "actions": ["left", "right"]}, r"has 4 actions; params.actions names 2"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b", "c", "A"]}, r"a name of its own"),
        ({"id": "NoSuchLake-v1"}, r"NoSuchLake"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(params, said):
    with pytest.raises(RolloutError, match=said):
        play(params, [])
