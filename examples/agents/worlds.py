"""Two worlds for small agents: a number that is found by asking, and a table that is looked up."""

from __future__ import annotations

import random

from opd.environments.protocol import Action, Step, Task


class Guess:
    """A number in `12-47` is hidden; a guess is answered with `<` (it is lower), `>` or `=`."""

    def reset(self, task: Task) -> None:
        self.number = int(task.label)

    def step(self, action: Action) -> Step:
        try:
            guess = int(action.text)
        except ValueError:
            return Step("!")
        if guess == self.number:
            return Step(reward=1.0, done=True)
        return Step("<" if self.number < guess else ">")


class Table:
    """Digits stand under letters; `?c` is answered with the digit under c, and `=12` is the answer to `c+f`.

    The table is another one for every question, and nowhere but here.
    """

    def reset(self, task: Task) -> None:
        draw = random.Random(task.seed)
        self.digits = {letter: draw.randrange(10) for letter in LETTERS}
        self.letters = str(task.label)

    def step(self, action: Action) -> Step:
        verb, rest = action.text[:1], action.text[1:]
        if verb == "?" and rest in self.digits:
            return Step(str(self.digits[rest]))
        if verb == "=":
            right = rest == str(sum(self.digits[letter] for letter in self.letters))
            return Step(reward=float(right), done=True)
        return Step("!")


LETTERS = "abcdefghijklmnopqrst"
