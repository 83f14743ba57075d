"""What a procedural task is, and where tasks are registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

ALPHABET = "0123456789="

TASKS: dict[str, type[DigitTask]] = {}
"""Name -> task; the name is what follows `procedural:` in a recipe."""


class DigitTask(ABC):
    """Maps a string of digits to another. All tasks share the same strings and are told apart by a tag:
    the prompt is `<sort>31415926=` and the answer `11234569`.
    """

    name: str

    @property
    def tag(self) -> str:
        """What a prompt begins with; one token."""
        return f"<{self.name}>"

    @abstractmethod
    def right(self, digits: str) -> str:
        """The right answer."""

    @abstractmethod
    def wrong_rule(self, digits: str) -> str:
        """The answer of an algorithm near the right one: a habit that reinforcement learning has to break."""

    def corrupt(self, answer: str, rng: np.random.Generator) -> str:
        """`answer` with one to three of its digits replaced by other digits: never `answer` itself."""
        count = min(int(rng.integers(1, 4)), len(answer))
        digits = list(answer)
        for place in rng.choice(len(answer), size=count, replace=False):
            digits[place] = str((int(digits[place]) + int(rng.integers(1, 10))) % 10)
        return "".join(digits)

    def prompt(self, digits: str) -> str:
        """The text the model sees."""
        return f"{self.tag}{digits}="

    def digits(self, prompt: str) -> str:
        """The digits of a prompt's text."""
        return prompt.removeprefix(self.tag).removesuffix("=")

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        """An answer to the text of a prompt: right with probability `right`, by the wrong rule with
        `wrong_rule`, else corrupted.
        """
        digits = self.digits(prompt)
        draw = rng.random()
        if draw < right:
            return self.right(digits)
        if draw < right + wrong_rule:
            return self.wrong_rule(digits)
        return self.corrupt(self.right(digits), rng)


def register(name: str) -> Callable[[type[DigitTask]], type[DigitTask]]:
    """Class decorator: makes a task available as `procedural:NAME`; `ValueError` if the name is taken."""

    def add(task: type[DigitTask]) -> type[DigitTask]:
        if name in TASKS:
            raise ValueError(f"a procedural task {name!r} is registered already; choose another name")
        task.name = name
        TASKS[name] = task
        return task

    return add
