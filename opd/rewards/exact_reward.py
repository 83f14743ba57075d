"""`reward: exact`: the answer is the label, or one of several."""

from __future__ import annotations

import re
import string
from typing import Any

from opd.config.rewards import ExactReward
from opd.rewards.extract import extracted
from opd.rewards.verifier import Answered, Verifier, each

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def squad(text: str) -> str:
    """As SQuAD's script compares: lower case, no punctuation, no articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def texts(label: Any) -> list[str]:
    """The answers that count as right: a label, or a list of them."""
    return [str(one).strip() for one in (label if isinstance(label, list) else [label])]


def label_fault(settings: Any, label: Any) -> str | None:
    """A label that no answer can be compared with."""
    many = label if isinstance(label, list) else [label]
    if label is None or not many:
        return "is missing; give a text, a number, or a list of them"
    for one in many:
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
    form = squad if settings.normalise == "squad" else str
    right = set(map(form, texts(answer.label))) - {""}  # which signs alone would be, too
    return float(form(found) in right)


VERIFIER = Verifier(each(score), label_fault)
