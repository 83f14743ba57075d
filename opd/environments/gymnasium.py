"""Gymnasium's environments whose observations and actions can be told in words (extra `gymnasium`).

An action is a text, or one of a few: its number or its name is looked for in what the model wrote. A prompt's
label is the seed that the environment is reset with; `python -m opd.environments.gymnasium FILE` writes
prompts with seeds.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.environments.protocol import Action, Step, Task
from opd.errors import ConfigError, needs_extra
from opd.untrusted import escape_controls

_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Names of the codes 30 to 37 (letters) and 40 to 47 (background)."""
_NUMBER = r"(?<![\w.-])-?\d+(?!\w|\.\d)"


class Gymnasium:
    """One episode. With `render_mode: ansi` in `kwargs` the model sees a rendering, else the observation."""

    def __init__(
        self, id: str, kwargs: Mapping[str, Any] | None = None, actions: Sequence[str] | None = None
    ) -> None:
        """`id`: as `gymnasium.make` takes it. `module:NAME` imports the module that registers it. `kwargs`:
        arguments of the environment. `actions`: names of a discrete space's actions, in their order.
        """
        self._id, self._kwargs = id, dict(kwargs or {})
        self._names = None if actions is None else [str(name) for name in actions]
        self._world: Any = None

    def reset(self, task: Task) -> str:
        """Return the first observation and the possible actions. Raises `ConfigError`."""
        with needs_extra("environment gymnasium", "gymnasium"):
            import gymnasium
        self._world = gymnasium.make(self._id, **self._kwargs)
        self._choices = self._action_numbers()
        # A bool is an int as well, and no seed.
        is_seed = type(task.label) is int and task.label >= 0
        observation, _ = self._world.reset(seed=task.label if is_seed else task.seed)
        return "\n\n".join(
            part for part in (self._describe_observation(observation), self._list_actions()) if part
        )

    def step(self, action: Action) -> Step:
        chosen = self._choose_action(action.text)
        if chosen is None:
            return Step(self._list_actions() or f"That is no {self._world.action_space}.")
        observation, reward, over, cut, _ = self._world.step(chosen)
        return Step(
            self._describe_observation(observation), float(reward), bool(over or cut), {"cut": bool(cut)}
        )

    def close(self) -> None:
        if self._world is not None:
            self._world.close()

    def _action_numbers(self) -> dict[str, int]:
        """Action name of a discrete space -> its number. Empty if actions are texts."""
        from gymnasium import spaces

        space = self._world.action_space
        if isinstance(space, spaces.Text) and self._names is None:
            return {}
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"environment {self._id} has actions {space}, which are neither texts nor a few to choose"
                " from (Text, Discrete); wrap it in one that has, or write a class with reset and step."
            )
        first, count = int(space.start), int(space.n)
        names = [str(first + index) for index in range(count)] if self._names is None else self._names
        if len({name.lower() for name in names}) != count:
            raise ConfigError(
                f"environment {self._id} has {count} actions; params.actions names {len(names)}:"
                " give each a name of its own, in their order."
            )
        return {name.lower(): first + index for index, name in enumerate(names)}

    def _list_actions(self) -> str:
        return f"Write one of: {', '.join(self._choices)}." if self._choices else ""

    def _choose_action(self, text: str) -> int | str | None:
        """Return the action that `text` names last, or None."""
        if not self._choices:
            answer = text.strip()
            return answer if self._world.action_space.contains(answer) else None
        # The longest first, because `move left` is not `left`.
        names = sorted(map(re.escape, self._choices), key=len, reverse=True)
        pattern = rf"(?<!\w)(?:{'|'.join(names)})(?!\w)|{_NUMBER}"
        numbers = set(self._choices.values())
        for match in reversed(re.findall(pattern, text.lower())):
            number = self._choices.get(match)
            if number is None and re.fullmatch(_NUMBER, match) and int(match) in numbers:
                number = int(match)
            if number is not None:
                return number
        return None

    def _describe_observation(self, observation: Any) -> str:
        """Return an observation as text: the rendering, else a text as it is, else its values as JSON."""
        if self._world.render_mode == "ansi":
            drawn = self._world.render()
            return escape_controls(_COLOUR.sub(_name_colour, str(drawn))).strip()
        if isinstance(observation, str):
            return escape_controls(observation)
        return json.dumps(_to_json(observation))


def _name_colour(code: re.Match[str]) -> str:
    """Replace a terminal's colour by its name in a bracket, because colour alone may mark a place."""
    numbers = [int(part) for part in code.group(1).split(";") if part]
    if numbers in ([], [0]):
        return "]"
    coloured = [one % 10 for one in numbers if 30 <= one < 38 or 40 <= one < 48]
    return f"[{_COLOURS[coloured[0]]} " if coloured else "["


def _to_json(value: Any) -> Any:
    """Convert numbers, arrays, tuples and dictionaries to JSON."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m opd.environments.gymnasium", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompt", required=True, help="what is to be done; its number comes behind")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first task")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.tasks)
    prompts = {seed: [{"role": "user", "content": f"{options.prompt}\n\nTask {seed}."}] for seed in seeds}
    rows = [json.dumps({"prompt": messages, "label": seed}) + "\n" for seed, messages in prompts.items()]
    options.file.write_text("".join(rows), "utf-8")


if __name__ == "__main__":
    main()
