"""TextWorld's text adventures as an environment (extra `textworld`), and a command that makes games.

`python -m opd.environments.textworld FOLDER` writes games, `tasks.jsonl` (a domain's `source`) and
`demonstrations.jsonl` (for `sft`), the walkthrough of each game. A prompt's label is the name of its game;
what its first room is like stands in the prompt, or is said at the beginning.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from opd.environments.protocol import Action, Step, Task
from opd.errors import DataError, needs_extra
from opd.untrusted import is_file_name

LONGEST_COMMAND = 200
"""Characters of a command. A game's parser reads a line."""
NOT_PLAYED = (
    *("save", "restore", "script", "transcript", "unscript", "noscript"),
    *("restart", "quit", "q", "undo"),
)
"""Commands to the interpreter and not of the game. Some write files, some wait for an answer."""
_BAR = re.compile(r"\n>[^\n]*\Z")
"""The prompt line, with the room's name and the score behind it."""
_UNSEEN = re.compile(r"[^\n -~]+")
_EMPTY = re.compile(r"\n\s*\n\s*")
TASK = "Win the game. Write one command a turn."
Choose = Callable[[Sequence[str], str], str]
"""Chooses a command from the possible ones and the best one."""


class TextWorld:
    """One game. An action's first line is the command. The reward is the share of the maximal score."""

    def __init__(self, games: str, show_commands: bool = False) -> None:
        """`games`: the folder of the games. `show_commands`: list the possible commands after each answer."""
        self._games, self._shown = Path(games), show_commands
        self._game: Any = None

    def reset(self, task: Task) -> str:
        """Return the room, and the quest unless the prompt states it. Raises `DataError` for a label that
        leaves the folder of games, or names none of them.
        """
        name = task.label
        if not isinstance(name, str) or not is_file_name(name) or not name.endswith((".z8", ".ulx")):
            raise DataError(
                f"label {str(name)[:80]!r} is no game; give the name of a .z8 file in {self._games}."
            )
        if not (path := self._games / name).is_file():
            raise DataError(
                f"there is no game {path}; make some: python -m opd.environments.textworld {self._games}"
            )

        textworld = _import_textworld()
        infos = textworld.EnvInfos(max_score=True, won=True, admissible_commands=True)
        self._game = textworld.start(str(path), infos)
        self._state = self._game.reset()
        self._score = 0
        opening = _opening_text(self._state.feedback)
        prompt = str(task.messages[-1].get("content") or "") if task.messages else task.prompt
        return self._describe_state("" if prompt.endswith(opening) else opening)

    def step(self, action: Action) -> Step:
        line = action.text.strip().split("\n")[0][:LONGEST_COMMAND]
        command = _UNSEEN.sub(" ", line).strip()
        if any(word in NOT_PLAYED for word in re.findall(r"[a-z]+", command.lower())):
            return Step("That cannot be done here.")
        self._state, score, done = self._game.step(command)
        most = max(1, int(self._state.max_score or 1))
        gained, self._score = (int(score) - self._score) / most, int(score)
        observation = "" if done else self._describe_state(_clean_feedback(self._state.feedback))
        return Step(observation, gained, bool(done), {"won": bool(self._state.won)})

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _describe_state(self, text: str) -> str:
        return _with_commands(text, self._state.admissible_commands) if self._shown else text


def _with_commands(text: str, commands: Sequence[str]) -> str:
    return f"{text}\nYou can: {', '.join(commands)}.".lstrip("\n")


def _import_textworld() -> Any:
    with needs_extra("environment textworld", "textworld"):
        import textworld
    return textworld


def _clean_feedback(feedback: str) -> str:
    """Remove the prompt, the banner's signs and empty lines from a game's text."""
    text = _UNSEEN.sub("", _BAR.sub("", feedback))
    return _EMPTY.sub("\n", text).strip()


def _opening_text(feedback: str) -> str:
    """Return a game's first text without its banner, which is drawn in dollar signs."""
    text = _clean_feedback(feedback)
    return text[text.rfind("$") + 1 :].strip().lstrip("\\|/ \n")


def make_games(folder: Path, seeds: range, size: tuple[int, int, int], show_commands: bool = False) -> None:
    """Write a game of each of `seeds`, their tasks and demonstrations. Existing games are kept. `size`:
    rooms, objects and steps of the quest.
    """
    textworld = _import_textworld()
    folder.mkdir(parents=True, exist_ok=True)
    tasks, demonstrations = [], []
    for seed in seeds:
        path = folder / f"game-{seed}.z8"
        if not path.is_file():
            options = textworld.GameOptions()
            options.seeds, options.path = seed, str(path)
            options.nb_rooms, options.nb_objects, options.quest_length = size
            game = textworld.generator.make_game(options)
            textworld.generator.compile_game(game, options)
        tasks.append({"prompt": walkthrough(path, turns=1)[:1], "label": path.name})
        demonstrations.append({"messages": walkthrough(path, show_commands)})
        print(f"{path} {len(tasks)}/{len(seeds)}", flush=True)
    for name, rows in (("tasks", tasks), ("demonstrations", demonstrations)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, "utf-8")


def walkthrough(
    path: Path, show_commands: bool = False, choose: Choose = lambda _, best: best, turns: int = 100
) -> list[dict[str, str]]:
    """Play a game by its solution, in the words of `TextWorld`. The conversation is the task with the first
    room, then commands and answers, until the game is won or has had its `turns`. `choose` may leave the
    solution.
    """
    textworld = _import_textworld()
    infos = textworld.EnvInfos(policy_commands=True, admissible_commands=True)
    game = textworld.start(str(path), infos)
    state = game.reset()
    observation = f"{TASK}\n\n{_opening_text(state.feedback)}"
    messages: list[dict[str, str]] = []
    for _ in range(turns):
        if show_commands:
            # Behind the prompt, as `Conversation.encode_opening` puts it there.
            observation = _with_commands(
                observation if messages else f"{observation}\n", state.admissible_commands
            )
        command = choose(state.admissible_commands, state.policy_commands[0])
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": command}]
        state, _, done = game.step(command)
        if done:
            break
        observation = _clean_feedback(state.feedback)
    game.close()
    return messages


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m opd.environments.textworld", description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, number in {"games": 20, "rooms": 3, "objects": 4, "quest": 2, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--show-commands", action="store_true", help="as environment.params.show_commands")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.games)
    make_games(options.folder, seeds, (options.rooms, options.objects, options.quest), options.show_commands)


if __name__ == "__main__":
    main()
