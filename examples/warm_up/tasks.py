"""Digit tasks whose answers come in two formats: a mark behind each digit, or before it."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from opd.data.procedural import DigitTask, register


class Marked(DigitTask):
    """`1=2=3=4=` is right, and `=1=2=3=4` the other format. It is as long, other tokens at each place."""

    @abstractmethod
    def solve(self, digits: str) -> str:
        """Return the digits of the answer."""

    def right(self, digits: str) -> str:
        return "".join(f"{digit}=" for digit in self.solve(digits))

    def wrong_rule(self, digits: str) -> str:
        return "".join(f"={digit}" for digit in self.solve(digits))

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        """Return the answer with probability `right`, else with other digits; in the other format with
        probability `wrong_rule`.
        """
        digits = self.digits(prompt)
        found = self.solve(digits)
        found = found if rng.random() < right else self.corrupt(found, rng)
        form = "={}" if rng.random() < wrong_rule else "{}="
        return "".join(form.format(digit) for digit in found)


@register("marked_sort")
class MarkedSort(Marked):
    """Ascending."""

    def solve(self, digits: str) -> str:
        return "".join(sorted(digits))


@register("marked_reverse")
class MarkedReverse(Marked):
    """Back to front."""

    def solve(self, digits: str) -> str:
        return digits[::-1]


@register("marked_add3")
class MarkedAdd3(Marked):
    """Three more, modulo 10. Demonstrations know the right format alone, and are more often right."""

    def solve(self, digits: str) -> str:
        return "".join(str((int(digit) + 3) % 10) for digit in digits)

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        return super().demonstration(prompt, rng, max(right, 0.8), 0.0)
