"""The built-in tasks. Each is one right rule and one consistent wrong rule close to it."""

from __future__ import annotations

from itertools import accumulate

from opd.data.procedural.task import DigitTask, register


def _each(digits: str, offset: int, sign: int = 1) -> str:
    """Every digit `d` as `(offset + sign * d) mod 10`."""
    return "".join(str((offset + sign * int(digit)) % 10) for digit in digits)


@register("sort")
class Sort(DigitTask):
    """Ascending; the wrong rule sorts descending."""

    def right(self, digits: str) -> str:
        return "".join(sorted(digits))

    def wrong_rule(self, digits: str) -> str:
        return "".join(sorted(digits, reverse=True))


@register("reverse")
class Reverse(DigitTask):
    """Back to front; the wrong rule leaves the string as it is."""

    def right(self, digits: str) -> str:
        return digits[::-1]

    def wrong_rule(self, digits: str) -> str:
        return digits


@register("add3")
class Add3(DigitTask):
    """Three more, modulo 10, on every digit; the wrong rule adds two."""

    def right(self, digits: str) -> str:
        return _each(digits, 3)

    def wrong_rule(self, digits: str) -> str:
        return _each(digits, 2)


@register("rotate")
class Rotate(DigitTask):
    """Left by two places; the wrong rule moves by one."""

    def right(self, digits: str) -> str:
        return digits[2:] + digits[:2]

    def wrong_rule(self, digits: str) -> str:
        return digits[1:] + digits[:1]


@register("complement")
class Complement(DigitTask):
    """Nine minus each digit; the wrong rule takes them from ten, modulo 10."""

    def right(self, digits: str) -> str:
        return _each(digits, 9, sign=-1)

    def wrong_rule(self, digits: str) -> str:
        return _each(digits, 10, sign=-1)


@register("swap_halves")
class SwapHalves(DigitTask):
    """Second half first; the wrong rule swaps neighbours."""

    def right(self, digits: str) -> str:
        half = len(digits) // 2
        return digits[half:] + digits[:half]

    def wrong_rule(self, digits: str) -> str:
        return "".join(digits[i : i + 2][::-1] for i in range(0, len(digits), 2))


@register("parity")
class Parity(DigitTask):
    """1 for every odd digit, 0 for every even one; the wrong rule marks digits from five up."""

    def right(self, digits: str) -> str:
        return "".join(str(int(digit) % 2) for digit in digits)

    def wrong_rule(self, digits: str) -> str:
        return "".join(str(int(digit) // 5) for digit in digits)


@register("running_sum")
class RunningSum(DigitTask):
    """Sum of the digits so far, modulo 10; the wrong rule sums each digit and its left neighbour only."""

    def right(self, digits: str) -> str:
        return "".join(str(total % 10) for total in accumulate(map(int, digits)))

    def wrong_rule(self, digits: str) -> str:
        before = "0" + digits[:-1]
        return "".join(str((int(a) + int(b)) % 10) for a, b in zip(before, digits, strict=True))


@register("unique")
class Unique(DigitTask):
    """Each digit the first time it appears, so answers differ in length; the wrong rule drops only a digit
    that repeats the one just before it."""

    def right(self, digits: str) -> str:
        return "".join(dict.fromkeys(digits))

    def wrong_rule(self, digits: str) -> str:
        return "".join(d for i, d in enumerate(digits) if i == 0 or digits[i - 1] != d)
