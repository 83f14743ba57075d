"""`reward: judge` and `scorer`: models behind HTTP.

A judge's number is read from its text. A reward model returns one number for each of many texts.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from opd.config.rewards import JudgeReward, ScorerReward
from opd.redact import redact
from opd.rewards.endpoint import (
    LARGEST,
    EndpointError,
    EndpointForm,
    answer_seconds,
    fill_template,
    finite_number,
    label_fault,
    query_endpoint,
    require,
)
from opd.rewards.verifier import Answered, Score, Verifier, match_patterns, without_thoughts
from opd.served.http_client import UnavailableError
from opd.served.scoring import unreadable_error
from opd.untrusted import convert_decode_errors, safe_excerpt

_log = logging.getLogger(__name__)

_NUMBER = r"([-+]?[0-9]{1,15}(?:\.[0-9]{1,15})?)(?![0-9])"
_SAYS = r"(?:score|rating)[\"'*_`]{0,8}\s{0,8}(?:\([^()\n]{0,40}\)\s{0,8})?(?:is|[:=])[\s\"'*_`\[(]*"
_SCORE = re.compile(_SAYS + _NUMBER, re.IGNORECASE)
_DOUBLE = re.compile(rf"\[\[\s*{_NUMBER}\s*(?:/\s*[0-9]+\s*)?\]\]")
_ALONE = re.compile(rf"[\s*_`\[(]*{_NUMBER}\s*(?:/\s*[0-9]+)?[\s.*_`\])]*")
_TOKEN = 64
"""Most bytes of JSON per token of a reply, with its share of the other fields."""
_PATTERN_SECONDS = 1.0
_reported: set[str] = set()
"""Settings for which a reply without a number was shown."""


def judge_score(settings: JudgeReward, answers: Sequence[Answered]) -> list[Score]:
    """The judge's number for each answer, in [0, 1] if the settings have a range. With a fallback, in parts:
    `reward`, and `unreadable` 0 or 1.
    """
    most = _TOKEN * settings.max_tokens
    form = EndpointForm(
        "/chat/completions", 1, lambda questions: questions[0], _read_completion, most, str, lenient=True
    )
    replies = query_endpoint(settings, form, [judge_question(settings, answer) for answer in answers])
    numbers = _read_numbers(settings, replies)
    if settings.range is not None:
        low, high = settings.range
        numbers = [
            (number - low) / (high - low) if number is not None and low <= number <= high else None
            for number in numbers
        ]
    missing = [reply for reply, number in zip(replies, numbers, strict=True) if number is None]
    if missing:
        _report_missing(settings, missing, len(replies))
    if settings.unreadable is None:
        return [number for number in numbers if number is not None]
    fallback = settings.unreadable
    return [
        {"reward": fallback if number is None else number, "unreadable": float(number is None)}
        for number in numbers
    ]


def judge_question(settings: JudgeReward, answer: Answered) -> dict[str, Any]:
    """Return the body of the request about one answer."""
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    body = {
        "model": settings.model or "default",
        "messages": [*system, {"role": "user", "content": fill_template(settings.template, answer)}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
    }
    return {key: value for key, value in (body | settings.request).items() if value is not None}


def _read_completion(reply: Any, count: int) -> list[Any]:
    """Return the judge's text, or None if it refused the request."""

    def unreadable_error(cause: str) -> UnavailableError:
        return UnavailableError(f"the answer is no chat completion ({cause})", answered=True)

    if reply is None:
        return [None] * count
    with convert_decode_errors(unreadable_error):
        text = reply["choices"][0]["message"]["content"]
        if text is not None and not isinstance(text, str):
            raise TypeError(f"its content is a {type(text).__name__}")
    # A judge may repeat its input, even a key. Thoughts alone are no text.
    return [redact(text or "")]


def _read_numbers(settings: JudgeReward, replies: Sequence[str | None]) -> list[float | None]:
    texts = ["" if reply is None else without_thoughts(reply) for reply in replies]
    if settings.pattern is None:
        return [read_number(text) for text in texts]
    group = "score" if "score" in re.compile(settings.pattern).groupindex else 0
    count = len(texts)
    results = match_patterns([settings.pattern] * count, texts, [group] * count, _PATTERN_SECONDS)
    return [_to_float(one.get("caught")) for one in results]


def read_number(text: str) -> float | None:
    """The last `Score: N` or `Rating: N`, else the last `[[N]]`, else a text that is a number."""
    for pattern in (_SCORE, _DOUBLE):
        numbers = pattern.findall(text)
        if numbers:
            return _to_float(numbers[-1])
    alone = _ALONE.fullmatch(text[:200]) if len(text) <= 200 else None
    return _to_float(alone[1]) if alone else None


def _to_float(text: Any) -> float | None:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def _report_missing(settings: JudgeReward, missing: Sequence[str | None], count: int) -> None:
    first = missing[0]
    example = "a refused request" if first is None else f"'{safe_excerpt(first[-200:], 200)}'"
    message = (
        f"reward judge: {len(missing)} of {count} replies hold no number that can be read, such as {example}"
    )
    if settings.unreadable is None:
        raise EndpointError(
            f"{message}; mend the template, pattern, range or max_tokens, or set the reward's `unreadable` to"
            " what such an answer is worth, also with --resume --accept-changed-settings."
        )
    key = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    if key not in _reported:
        _reported.add(key)
        _log.warning("%s; they count as %g, and as the part `unreadable`", message, settings.unreadable)


_NUMBER_BYTES = 1024
"""Bytes of JSON for one number and the other fields of its text."""


def scorer_score(settings: ScorerReward, answers: Sequence[Answered]) -> list[Score]:
    """The model's number for each answer, in [0, 1] with `sigmoid`."""
    body, numbers = _APIS[settings.api]

    def request_body(questions: list[dict[str, Any]]) -> dict[str, Any]:
        model = {} if settings.model is None else {"model": settings.model}
        return model | body(questions)

    def read(reply: object, count: int) -> list[Any]:
        with convert_decode_errors(unreadable_error):
            values = numbers(reply)
            if len(values) != count:
                raise UnavailableError(f"{len(values)} numbers came for {count} texts", answered=True)
            return [finite_number(value) for value in values]

    form = EndpointForm("", settings.batch, request_body, read, _NUMBER_BYTES, float)
    values = query_endpoint(settings, form, [_scored_question(settings, answer) for answer in answers])
    return [_sigmoid(value) for value in values] if settings.sigmoid else values


def _scored_question(settings: ScorerReward, answer: Answered) -> dict[str, Any]:
    """Return the question about an answer, which is also the cache key of its number."""
    question = {
        "api": settings.api,
        "model": settings.model,
        "text": fill_template(settings.template, answer),
    }
    if settings.api == "score":
        return question | {"text": answer.text, "prompt": answer.prompt}
    if settings.api == "openrlhf":
        return question | {"prompt": answer.context, "label": answer.label}
    return question


def _question_column(questions: list[dict[str, Any]], name: str) -> list[Any]:
    return [question[name] for question in questions]


def _single_number(value: object) -> Any:
    """The number in lists of one. A model with several outputs is no reward model."""
    while isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"{len(value)} numbers came for one text, where a reward is one")
        value = value[0]
    return value


def _plain_numbers(reply: object) -> list[Any]:
    values = reply["rewards" if "rewards" in reply else "scores"] if isinstance(reply, dict) else reply
    if not isinstance(values, list):
        raise TypeError(f"it is a {type(values).__name__} and no list")
    return [_single_number(value) for value in values]


def _sglang_numbers(reply: Any) -> list[Any]:
    return [_single_number(one["embedding"]) for one in (reply if isinstance(reply, list) else [reply])]


def _vllm_numbers(reply: Any) -> list[Any]:
    rows = {one["index"]: one for one in reply["data"]}
    if sorted(rows) != list(range(len(reply["data"]))):
        raise ValueError("its indices do not count its rows")
    numbers = []
    for index in range(len(rows)):
        name = next((name for name in ("score", "probs", "data") if name in rows[index]), None)
        if name is None:
            raise ValueError("a row has no score, probs or data")
        numbers.append(_single_number(rows[index][name]))
    return numbers


_APIS: dict[str, tuple[Callable[[list[dict[str, Any]]], dict[str, Any]], Callable[[Any], list[Any]]]] = {
    "plain": (lambda questions: {"texts": _question_column(questions, "text")}, _plain_numbers),
    "sglang": (lambda questions: {"text": _question_column(questions, "text")}, _sglang_numbers),
    "vllm": (lambda questions: {"input": _question_column(questions, "text")}, _vllm_numbers),
    "score": (
        lambda questions: {
            "text_1": _question_column(questions, "prompt"),
            "text_2": _question_column(questions, "text"),
        },
        _vllm_numbers,
    ),
    "openrlhf": (
        lambda questions: {
            "query": _question_column(questions, "text"),
            "prompts": _question_column(questions, "prompt"),
            "labels": _question_column(questions, "label"),
        },
        _plain_numbers,
    ),
}
"""Request of each kind of server, and reader of the numbers in its reply."""


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


KINDS = {
    "judge": Verifier(judge_score, label_fault, require, answer_seconds, answer=lambda settings, text: None),
    "scorer": Verifier(
        scorer_score, label_fault, require, answer_seconds, answer=lambda settings, text: None
    ),
}
