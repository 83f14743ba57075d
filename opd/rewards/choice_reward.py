"""`reward: choice`: the letter of a multiple choice."""

from __future__ import annotations

import re
import string
from typing import Any

from opd.config.rewards import ChoiceReward
from opd.rewards.extract import extracted
from opd.rewards.verifier import Answered, Verifier, each, is_missing
from opd.rollout.prompts import plain_label

_FORM = re.compile(r"\\(?:text|math)[a-z]*\s*\{|\\boxed\s*\{|\\(?:bf|rm|it)\b")
_CALLED = r"(?i:(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:option|choice|answer|letter)\b(?:\s+is\b)?)?"
_LETTER = re.compile(rf"[\W_]*{_CALLED}[\W_]*(?:([A-Z])|([a-z])(?=\W*$|[).:]))(?![^\W_])")
_LABEL = re.compile(rf"[\W_]*{_CALLED}[\W_]*([A-Za-z])[\W_]*")
_ARTICLE = re.compile(r"[\W_]*A\s+[a-z]")
_SPEAKER = re.compile(r"[\W_]*I(?:'\w+)?\s+(?!because\b|since\b|as\b)[a-z]")
_DENIED = re.compile(r"\bnot\b|n't\b|\bexcept\b|\brul\w+ out\b")
_ALONE = re.compile(r"(?<![\w'])[A-Z](?![\w'])")


def letter(text: str, choices: int) -> str | None:
    """The letter that `text` begins with; a small one where it stands alone or before a bracket."""
    found = _LETTER.match(_FORM.sub("", text[:200]))
    return _known(found[1] or found[2], choices) if found else None


def _known(said: str, choices: int) -> str | None:
    return said.upper() if said.upper() in string.ascii_uppercase[:choices] else None


def _of_label(label: Any, choices: int) -> str | None:
    """The letter of a label: a number from 0, or a letter, however it is written, and nothing else."""
    label = plain_label(label)
    if isinstance(label, str) and re.fullmatch(r"\d+(\.0+)?", label.strip()):
        label = int(label.strip().partition(".")[0]) if len(label) < 20 else -1
    if isinstance(label, int) and not isinstance(label, bool):
        return string.ascii_uppercase[label] if 0 <= label < choices else None
    found = _LABEL.fullmatch(_FORM.sub("", label[:200]).strip()) if isinstance(label, str) else None
    return _known(found[1], choices) if found else None


def label_fault(settings: ChoiceReward, label: Any) -> str | None:
    """A label that is none of the choices."""
    if is_missing(label):
        return "is missing; give the letter of the right choice, or its number from 0"
    if _of_label(label, settings.choices) is None:
        most = settings.choices - 1
        last = string.ascii_uppercase[most]
        return f"is {str(label)[:40]!r}; give a letter from A to {last}, or a number from 0 to {most}"
    return None


def score(settings: ChoiceReward, answer: Answered) -> float:
    """1 or 0."""
    said = chosen(settings, answer.text)
    return float(said is not None and said == _of_label(answer.label, settings.choices))


def chosen(settings: ChoiceReward, text: str) -> str | None:
    """The letter that a response chooses; `None` where none is found."""
    for way in settings.extract:
        found = extracted(text, [way])
        said = _said(found, way, settings.choices) if found else None
        if said is not None:
            return said
    return None


def _said(text: str, way: str, choices: int) -> str | None:
    """The letter of what `way` has found: no article, and nobody who speaks of himself."""
    speaks = _SPEAKER.match(text)
    if way in ("last_line", "whole") and (speaks or _ARTICLE.match(text)):
        return None
    if not speaks:
        return letter(text, choices)
    named = {one for one in _ALONE.findall(text[:200]) if one != "I"}  # "I think it is C"
    one = named.pop() if len(named) == 1 and not _DENIED.search(text) else ""
    return one if one and one in string.ascii_uppercase[:choices] else None


VERIFIER = Verifier(each(score), label_fault, answer=chosen)
