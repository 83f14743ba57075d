"""Many right answers to one prompt: its digits, in whatever order."""

from __future__ import annotations

import numpy as np

from opd.data.procedural import DigitTask, register


@register("any")
class AnyOrder(DigitTask):
    """The digits of the prompt in any order; the label is the ascending one."""

    def right(self, digits: str) -> str:
        return "".join(sorted(digits))

    def wrong_rule(self, digits: str) -> str:
        return digits[:-1] + digits[0]

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        """The digits in a random order; all demonstrations are right."""
        return "".join(rng.permutation(list(self.digits(prompt))))


def same_digits(sample) -> float:
    """Has the answer the digits of the label, in whatever order?"""
    return float(sorted(sample.text) == sorted(sample.label))
