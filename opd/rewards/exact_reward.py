"""`reward: exact`: the answer is the label, or one of several."""

from __future__ import annotations

import math
import re
import string
from decimal import Decimal
from typing import Any

from opd.config.rewards import ExactReward
from opd.rewards.extract import extracted
from opd.rewards.verifier import Answered, Verifier, each, is_missing, written_number
from opd.rollout.prompts import plain_label

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


_OF_NUMBERS = re.compile(r"((?<=\d)[./:-](?=\d)|(?<![\w.])-(?=\.?\d))")
"""The signs without which 1.5 would be 15, and -5 would be 5."""


def squad(text: str) -> str:
    """Return `text` as SQuAD's script compares it: lower case, no punctuation but a number's, no articles,
    single blanks.
    """
    parts = _OF_NUMBERS.split(text.lower())  # every second one is a sign that stays
    kept = "".join(part if place % 2 else part.translate(_PUNCTUATION) for place, part in enumerate(parts))
    return " ".join(_ARTICLES.sub(" ", kept).split())


_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_WHOLE = re.compile(r"([-+]?\d+)\.0")
"""What tables make of whole numbers: commas between thousands, and the zero of a column of floats."""


def texts(label: Any) -> list[str]:
    """The answers that count as right: a label, or a list of them; of a number that a table has written, also
    the number as people write it.
    """
    found = []
    for one in label if isinstance(label, list) else [label]:
        text = str(one).strip() if isinstance(one, str) else written_number(plain_label(one))
        plain = text.replace(",", "") if _GROUPED.fullmatch(text) else text
        found += dict.fromkeys([text, plain, _WHOLE.sub(r"\1", plain) if _WHOLE.fullmatch(plain) else plain])
    return found


def same_number(answer: str, label: Any) -> bool:
    """Whether one of the labels is a number, and the answer is that number."""
    numbers = [one for one in (label if isinstance(label, list) else [label]) if not isinstance(one, str)]
    if not numbers or not _NUMBER.fullmatch(answer) or len(answer) > 400:
        return False
    said = Decimal(answer.replace(",", ""))
    return any(said == Decimal(written_number(plain_label(one))) for one in numbers)


_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d{1,3})?")


def label_fault(settings: Any, label: Any) -> str | None:
    """A label that no answer can be compared with."""
    many = label if isinstance(label, list) else [label]
    if is_missing(label) or not many:
        return "is missing; give a text, a number, or a list of them"
    for one in many:
        if isinstance(one, float) and not math.isfinite(one):
            return f"is {one}; give a number that is finite, or leave the row out"
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            return f"is a {type(one).__name__}; give a text, a number, or a list of them"
    if not any(texts(label)):
        return "is empty; give what is right"
    if getattr(settings, "normalise", "squad") == "squad" and not any(map(squad, texts(label))):
        return (
            "has articles and signs alone, of which SQuAD's form leaves nothing to compare; take `exact` with"
            " `normalise: none` (`choice` for letters), or leave the row out"
        )
    return None


def score(settings: ExactReward, answer: Answered) -> float:
    """1 or 0."""
    found = extracted(answer.text, settings.extract)
    if found is None:
        return 0.0
    if same_number(found, answer.label):
        return 1.0
    form = squad if settings.normalise == "squad" else str
    right = set(map(form, texts(answer.label))) - {""}  # which signs alone would be, too
    return float(form(found) in right)


VERIFIER = Verifier(each(score), label_fault)
