"""`reward: math`: mathematical equality, by math-verify, in processes that can be ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from opd.config.rewards import MathReward
from opd.errors import MissingExtraError
from opd.rewards.extract import extracted
from opd.rewards.verifier import Answered, Score, Verifier, compared

_MOST = 4000
"""Characters of a formula, and of the end of a response that is searched for one."""


def require(settings: MathReward) -> None:
    """Raise `MissingExtraError` without math-verify."""
    from importlib.util import find_spec

    if find_spec("math_verify") is None or find_spec("latex2sympy2_extended") is None:
        raise MissingExtraError("the reward math", "verifiers")


def label_text(label: Any) -> str:
    """The formula of a label: what GSM8K has after `####`, what is boxed, or all of it."""
    text = str(label).rpartition("####")[2]
    return (extracted(text, ["boxed"]) or text).strip().strip("$").strip()


def label_fault(settings: MathReward, label: Any) -> str | None:
    """A label that is no number and no formula."""
    if label is None or isinstance(label, bool) or not isinstance(label, str | int | float):
        what = "is missing" if label is None else f"is a {type(label).__name__}"
        return f"{what}; give a number, or a formula as text"
    text = label_text(label)
    if not text or len(text) > _MOST:
        return f"{'has more than 4000 characters' if text else 'is empty'}; give a number or a formula"
    return None


def score(settings: MathReward, answers: Sequence[Answered]) -> list[Score]:
    """1 or 0 each; 0 where nothing is found, or comparing takes too long."""
    found = [_found(settings, answer.text) for answer in answers]
    scores: list[Score] = [0.0] * len(answers)
    requests = {
        place: {"answer": text, "label": label_text(answers[place].label), "digits": settings.digits}
        for place, text in enumerate(found)
        if text is not None
    }
    said = compared(__name__, list(requests.values()), settings.seconds)
    for place, one in zip(requests, said, strict=True):
        scores[place] = float(one.get("equal") is True)
    return scores


def _found(settings: MathReward, text: str) -> str | None:
    """The answer in the form in which math-verify finds it."""
    for way in settings.extract:
        found = extracted(text, [way])
        if found is not None and way in ("whole", "last_line"):
            return found[-_MOST:]
        if found is not None and way == "answer":
            found = _SENTENCE.split(found, maxsplit=1)[0]
        if found is not None:
            return _in_a_box(found) if len(found) <= _MOST else None
    return None


_SENTENCE = re.compile(r"(?<=[\w)}\]$%*])\.[*_]*\s")
"""Where what is said ends, and more is said on its line."""


def _in_a_box(formula: str) -> str:
    return f"\\boxed{{{formula.strip().strip('$')}}}"


def prepare() -> None:
    """In the process that compares."""
    import logging

    import math_verify

    logging.disable()
    math_verify.verify(_parsed(math_verify, "\\boxed{1}"), _parsed(math_verify, "\\boxed{\\frac{2}{2}}"))


def _parsed(library: Any, text: str) -> Any:
    # Its own limit needs the main thread and a signal of its own; here the process has one.
    return library.parse(text, parsing_timeout=None)


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """In the process that compares: whether answer and label are equal."""
    import math_verify

    library: Any = math_verify
    right, given = _parsed(library, _in_a_box(asked["label"])), _parsed(library, asked["answer"])
    equal = library.verify(right, given, float_rounding=asked["digits"], timeout_seconds=None)
    return {"equal": bool(equal) and not _apart(right, given, asked["digits"])}


def _apart(right: Sequence[Any], given: Sequence[Any], digits: int) -> bool:
    """Whether both are numbers so small that they are equal to `digits` places alone: 2^-98 is not 2^-99."""
    numbers = []
    for parsed in (right, given):
        found = next((one for one in parsed if getattr(one, "is_number", False)), None)
        if found is None or not getattr(found, "is_real", False):
            return False
        numbers.append(abs(found.evalf(20)))
    least, most = sorted(numbers)
    return bool(0 < least < 10.0**-digits and most - least > most * 10.0**-digits)


VERIFIER = Verifier(score, label_fault, require, lambda settings: settings.seconds)
