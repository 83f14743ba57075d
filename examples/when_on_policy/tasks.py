"""The studies' own tasks: running sums, whose writers err, digits in any order, and answers in two ways."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from opd.data.procedural import DigitTask, register

MODULUS = 5


class RunningSum(DigitTask):
    """Digit `t` of the answer is the sum of the first `t` digits of the prompt, modulo 5."""

    recovers: bool
    """Whether what follows a wrong digit is of the true sum, and not of what was written."""

    def right(self, digits: str) -> str:
        return "".join(str(total % MODULUS) for total in accumulate(map(int, digits)))

    def wrong_rule(self, digits: str) -> str:
        return "".join(str(int(digit) % MODULUS) for digit in digits)

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        """An answer in which *each digit* is right with probability `right`; there is no wrong rule."""
        written: list[int] = []
        true = last = 0
        for digit in map(int, self.digits(prompt)):
            true = (true + digit) % MODULUS
            last = true if self.recovers else (last + digit) % MODULUS
            if rng.random() >= right:
                last = (last + int(rng.integers(1, MODULUS))) % MODULUS
            written.append(last)
        return "".join(map(str, written))


@register("recover")
class Recover(RunningSum):
    """Goes on from the true sum."""

    recovers = True


@register("follow")
class Follow(RunningSum):
    """Goes on from what was written."""

    recovers = False


def digit(sample, place: int) -> float:
    """1 if the digit at `place` is right, 0 if it is wrong or missing."""
    label = sample.label
    return float(sample.text[place : place + 1] == label[place])


def last(sample) -> float:
    """Is the last digit right, and the answer of the right length?"""
    return digit(sample, len(sample.label) - 1) * (len(sample.text) == len(sample.label))


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


class TwoWays(DigitTask):
    """Many answers are right; demonstrations have two ways: the prompt's digits, or `wrong_rule`, which
    is as right.
    """

    def right(self, digits: str) -> str:
        return digits


@register("parity_like")
class ParityLike(TwoWays):
    """At each place any digit that is odd where that of the prompt is: the prompt's own, or four more."""

    def wrong_rule(self, digits: str) -> str:
        return "".join(str((int(digit) + 4) % 10) for digit in digits)


@register("half_like")
class HalfLike(TwoWays):
    """At each place any digit of the same half (below five or not): the prompt's own, or two more in it."""

    def wrong_rule(self, digits: str) -> str:
        return "".join(str(int(digit) // 5 * 5 + (int(digit) + 2) % 5) for digit in digits)


def _same(sample, kind: Callable[[int], int]) -> float:
    """Has the answer as many digits as the label, each of the same kind?"""
    found, label = ([kind(int(d)) for d in text if d.isdigit()] for text in (sample.text, sample.label))
    return float(found == label and len(sample.text) == len(sample.label))


def same_parity(sample) -> float:
    """Is each digit odd where that of the label is?"""
    return _same(sample, lambda digit: digit % 2)


def same_half(sample) -> float:
    """Is each digit in the same half as that of the label?"""
    return _same(sample, lambda digit: digit // 5)


@register("known")
class Known(DigitTask):
    """Nine minus each digit; demonstrations are always right."""

    def right(self, digits: str) -> str:
        return "".join(str(9 - int(digit)) for digit in digits)

    def wrong_rule(self, digits: str) -> str:
        return digits

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        return self.right(self.digits(prompt))


class Eight(DigitTask):
    """Each digit and eight, modulo 10."""

    def brief(self, digits: str) -> str:
        """The results alone."""
        return "".join(str((int(digit) + 8) % 10) for digit in digits)

    def full(self, digits: str) -> str:
        """Counted up to, all digits by one at a time."""
        return "".join(str((int(digit) + more) % 10) for more in range(9) for digit in digits)


@register("brief")
class Brief(Eight):
    """One digit for each; the wrong rule is the other style."""

    def right(self, digits: str) -> str:
        return self.brief(digits)

    def wrong_rule(self, digits: str) -> str:
        return self.full(digits)


@register("full")
class Full(Eight):
    """The digits nine times over, of which the last are the results; the wrong rule is the other style."""

    def right(self, digits: str) -> str:
        return self.full(digits)

    def wrong_rule(self, digits: str) -> str:
        return self.brief(digits)


def tenth(sample) -> float:
    """0.1 for a right answer."""
    return 0.1 * (sample.text == sample.label)


@register("rounds")
class Rounds(DigitTask):
    """The digits 16 times over, each time one more, modulo 10; the wrong rule takes one away."""

    def right(self, digits: str) -> str:
        return self._counted(digits, 1)

    def wrong_rule(self, digits: str) -> str:
        return self._counted(digits, -1)

    def _counted(self, digits: str, step: int) -> str:
        return "".join(str((int(d) + step * time) % 10) for time in range(16) for d in digits)
