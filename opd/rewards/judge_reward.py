"""`reward: judge`: a language model behind chat completions says a number, which is read from its words."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from opd.config.rewards import JudgeReward
from opd.foreign import decoding, shown
from opd.redact import redact
from opd.rewards.endpoint import (
    LARGEST,
    EndpointError,
    EndpointForm,
    ask,
    filled,
    label_fault,
    require,
    seconds,
)
from opd.rewards.extract import answered
from opd.rewards.verifier import Answered, Score, Verifier, compared
from opd.served.http_client import UnavailableError

_log = logging.getLogger(__name__)

_NUMBER = r"([-+]?[0-9]{1,15}(?:\.[0-9]{1,15})?)(?![0-9])"
_SAYS = r"(?:score|rating)[\"'*_`]{0,8}\s{0,8}(?:\([^()\n]{0,40}\)\s{0,8})?(?:is|[:=])[\s\"'*_`\[(]*"
_SCORE = re.compile(_SAYS + _NUMBER, re.IGNORECASE)
_DOUBLE = re.compile(rf"\[\[\s*{_NUMBER}\s*(?:/\s*[0-9]+\s*)?\]\]")
_ALONE = re.compile(rf"[\s*_`\[(]*{_NUMBER}\s*(?:/\s*[0-9]+)?[\s.*_`\])]*")
_TOKEN = 64
"""Bytes of JSON that a token of a reply may take, its share of what else a server says of it included."""
_PATTERN_SECONDS = 1.0
_told: set[str] = set()
"""Settings of which a reply without a number was shown."""


def score(settings: JudgeReward, answers: Sequence[Answered]) -> list[Score]:
    """The judge's number for each answer, in [0, 1] where the settings have a range; with a fallback, in
    parts: `reward`, and `unreadable` 0 or 1.
    """
    most = _TOKEN * settings.max_tokens
    form = EndpointForm(
        "/chat/completions", 1, lambda questions: questions[0], _said, most, str, lenient=True
    )
    replies = ask(settings, form, [question(settings, answer) for answer in answers])
    numbers = [_scaled(settings, number) for number in _numbers(settings, replies)]
    missing = [reply for reply, number in zip(replies, numbers, strict=True) if number is None]
    if missing:
        _tell(settings, missing, len(replies))
    if settings.unreadable is None:
        return [number for number in numbers if number is not None]
    fallback = settings.unreadable
    return [
        {"reward": fallback if number is None else number, "unreadable": float(number is None)}
        for number in numbers
    ]


def question(settings: JudgeReward, answer: Answered) -> dict[str, Any]:
    """The body of the request about one answer."""
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    body = {
        "model": settings.model or "default",
        "messages": [*system, {"role": "user", "content": filled(settings.template, answer)}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
    }
    return {key: value for key, value in (body | settings.request).items() if value is not None}


def _said(reply: Any, count: int) -> list[Any]:
    """What the judge wrote; `None` where it refused the request."""

    def unreadable(cause: str) -> UnavailableError:
        return UnavailableError(f"the answer is no chat completion ({cause})", answered=True)

    if reply is None:
        return [None] * count
    with decoding(unreadable):
        text = reply["choices"][0]["message"]["content"]
        if text is not None and not isinstance(text, str):
            raise TypeError(f"its content is a {type(text).__name__}")
    # A judge may repeat what it was told, a key too; and thoughts alone are no words.
    return [redact(text or "")]


def _numbers(settings: JudgeReward, replies: Sequence[str | None]) -> list[float | None]:
    texts = ["" if reply is None else answered(reply) for reply in replies]
    if settings.pattern is None:
        return [read_number(text) for text in texts]
    requests = [{"text": text, "pattern": settings.pattern} for text in texts]
    return [_float(said.get("found")) for said in compared(__name__, requests, _PATTERN_SECONDS)]


def read_number(text: str) -> float | None:
    """The last `Score: N` or `Rating: N`, else the last `[[N]]`, else a text that is a number."""
    for pattern in (_SCORE, _DOUBLE):
        found = pattern.findall(text)
        if found:
            return _float(found[-1])
    alone = _ALONE.fullmatch(text[:200]) if len(text) <= 200 else None
    return _float(alone[1]) if alone else None


def _float(text: Any) -> float | None:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def _scaled(settings: JudgeReward, number: float | None) -> float | None:
    if number is None or settings.range is None:
        return number
    low, high = settings.range
    return (number - low) / (high - low) if low <= number <= high else None


def _tell(settings: JudgeReward, missing: Sequence[str | None], asked: int) -> None:
    first = missing[0]
    what = "a refused request" if first is None else f"'{shown(first[-200:], 200)}'"
    said = f"reward judge: {len(missing)} of {asked} replies hold no number that can be read, such as {what}"
    if settings.unreadable is None:
        raise EndpointError(
            f"{said}; mend the template, pattern, range or max_tokens, or set the reward's `unreadable` to"
            " what such an answer is worth, also with --resume --accept-changed-settings."
        )
    key = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    if key not in _told:
        _told.add(key)
        _log.warning("%s; they count as %g, and as the part `unreadable`", said, settings.unreadable)


def prepare() -> None:
    """In the process that looks: nothing to import."""


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """In the process that looks: what the last match of the pattern holds."""
    found = None
    for found in re.finditer(asked["pattern"], asked["text"]):  # noqa: B007 - the last one
        pass
    if found is None:
        return {}
    return {"found": found["score"] if "score" in found.re.groupindex else found[0]}


VERIFIER = Verifier(score, label_fault, require, seconds, answer=lambda settings, text: None)
