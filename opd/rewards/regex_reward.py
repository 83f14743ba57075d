"""`reward: regex`: the answer matches an expression, looked for in a process that can be ended."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from opd.config.rewards import RegexReward
from opd.rewards.exact_reward import same_number, texts
from opd.rewards.extract import extracted
from opd.rewards.verifier import Answered, Score, Verifier, compared, is_missing


def _has_group(settings: RegexReward) -> bool:
    return settings.pattern is not None and "answer" in re.compile(settings.pattern).groupindex


def label_fault(settings: RegexReward, label: Any) -> str | None:
    """A label that is no expression, where it has to be one, or nothing to compare a group with."""
    if settings.pattern is not None and not _has_group(settings):
        return None
    wanted = "what the group `answer` has to catch" if settings.pattern else "a regular expression"
    if is_missing(label):
        return f"is missing; give {wanted}, or set the reward's pattern"
    if settings.pattern is not None:
        plain = isinstance(label, str | int | float) and not isinstance(label, bool)
        return None if plain else f"is a {type(label).__name__}; give {wanted}"
    if label == "":
        return "is empty, which every answer matches; give a regular expression, or set the reward's pattern"
    try:
        re.compile(label)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"is no regular expression ({str(error)[:100]}); mend it, or set the reward's pattern"
    return None


def score(settings: RegexReward, answers: Sequence[Answered]) -> list[Score]:
    """1 or 0 each; 0 where nothing is found, or looking takes too long."""
    group = _has_group(settings)
    requests = [
        {
            "text": extracted(answer.text, settings.extract) or "",
            "pattern": settings.pattern if settings.pattern is not None else answer.label,
            "wanted": texts(answer.label) if group else None,
            "full": settings.full,
            "ignore_case": settings.ignore_case,
        }
        for answer in answers
    ]
    said = compared(__name__, requests, settings.seconds)
    labels = [answer.label if group else "" for answer in answers]
    return [
        float(one.get("matches") is True or same_number(str(one.get("caught", "")), label))
        for one, label in zip(said, labels, strict=True)
    ]


def prepare() -> None:
    """In the process that looks: nothing to import."""


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """In the process that looks: whether it matches."""
    pattern = re.compile(asked["pattern"], re.IGNORECASE if asked["ignore_case"] else 0)
    if asked["full"]:
        found = pattern.fullmatch(asked["text"])
    elif asked["wanted"] is None:
        found = pattern.search(asked["text"])
    else:
        last = deque(pattern.finditer(asked["text"]), maxlen=1)
        found = last[0] if last else None
    if found is None or asked["wanted"] is None:
        return {"matches": found is not None}
    caught = (found["answer"] or "").strip()
    return {"matches": caught in asked["wanted"], "caught": caught}


VERIFIER = Verifier(score, label_fault, seconds=lambda settings: settings.seconds)
