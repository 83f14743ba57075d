"""TextWorld's games as environments; with the extra `textworld`, else what is said without it."""

import asyncio
import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest

from opd.config.environments import EnvironmentConfig
from opd.environments import textworld
from opd.environments.protocol import Action, Task, environment_class
from opd.environments.world import World
from opd.errors import MissingExtraError, RolloutError

HERE = importlib.util.find_spec("textworld") is not None
CONFIG = EnvironmentConfig(type="textworld", params={"games": "games"}, attempts=1)


def task(label: object) -> Task:
    return Task("a/0", "", [{"role": "user", "content": "play"}], label, {}, 0)


@pytest.mark.parametrize("label", ["../x.z8", "/etc/passwd", "a/b.z8", None, 3, "x.py", "gone.z8"])
def test_a_label_that_is_no_game_is_refused(tmp_path, label):
    made = partial(environment_class(CONFIG, "a"), games=str(tmp_path))
    with pytest.raises(RolloutError, match=r"is no game|there is no game"):
        asyncio.run(World(made, task(label), CONFIG, "a").reset())


def test_what_a_game_says_is_cleaned():
    banner = "\n\n  ____ \n| $$ \\| $$  \\$$ \\$$$$$$ \n\n"
    said = f"{banner}Welcome! Go north.\n\n\n-= Hall =-\nA hall.\x1b[0m\n\n>    -= Hall =-0/1"
    assert textworld._opening_text(said) == "Welcome! Go north.\n-= Hall =-\nA hall.[0m"
    assert textworld._clean_feedback("\nYou take it.\n\n\n>   -= Hall =-0/2") == "You take it."


@pytest.mark.skipif(HERE, reason="the extra is installed")
def test_without_the_extra_its_name_is_said(tmp_path):
    (tmp_path / "a.z8").touch()
    with pytest.raises(MissingExtraError, match="textworld"):
        textworld.TextWorld(str(tmp_path)).reset(task("a.z8"))


@pytest.mark.skipif(not HERE, reason="needs the extra textworld")
def test_the_walkthrough_wins_a_game_that_was_made_here(tmp_path: Path, monkeypatch):
    textworld.main([str(tmp_path), "--games", "1", "--seed", "3"])
    row = json.loads((tmp_path / "tasks.jsonl").read_text())
    shown = json.loads((tmp_path / "demonstrations.jsonl").read_text())["messages"]
    commands = [one["content"] for one in shown if one["role"] == "assistant"]
    assert row["label"] == "game-3.z8"
    assert "$" not in row["prompt"][0]["content"]

    async def play(commands):
        made = partial(textworld.TextWorld, games=str(tmp_path), show_commands=True)
        world = World(made, task(row["label"]), CONFIG, "a")
        first = await world.reset()
        steps = [await world.step(Action(text, turn=turn)) for turn, text in enumerate(commands)]
        await world.close()
        return first, steps

    first, steps = asyncio.run(play(commands))
    assert "You can:" in first
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert sum(step.reward for step in steps) == 1.0
    assert steps[-1].info == {"won": True}
    _, odd = asyncio.run(play(["", "xyzzy\nquit", "\x00 drop it \x1b[2J", "look " * 1000]))
    assert not any(step.done for step in odd)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    _, refused = asyncio.run(play(["save", " Script", "look. save", "quit", "restart", *commands]))
    assert [step.observation for step in refused[:5]] == ["That cannot be done here."] * 5
    assert refused[-1].done
    assert sorted(tmp_path.iterdir()) == before
    again = asyncio.run(play(commands))
    assert (first, steps) == again
