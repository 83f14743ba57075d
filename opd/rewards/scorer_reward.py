"""`reward: scorer`: a reward model behind HTTP gives a number for each of many texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opd.config.rewards import ScorerReward
from opd.foreign import decoding
from opd.rewards.endpoint import EndpointForm, ask, filled, finite, label_fault, require, seconds
from opd.rewards.verifier import Answered, Score, Verifier
from opd.served.http_client import UnavailableError

_NUMBER = 1024
"""Bytes of JSON for one number and what else a server says of its text."""


def score(settings: ScorerReward, answers: Sequence[Answered]) -> list[Score]:
    """The model's number for each answer; with `sigmoid` in [0, 1]."""
    body, numbers = _APIS[settings.api]

    def asked(questions: list[dict[str, Any]]) -> dict[str, Any]:
        model = {} if settings.model is None else {"model": settings.model}
        return model | body(questions)

    def read(reply: Any, count: int) -> list[Any]:
        with decoding(_unreadable):
            return _checked(numbers(reply), count)

    form = EndpointForm("", settings.batch, asked, read, _NUMBER, float)
    found = ask(settings, form, [_question(settings, answer) for answer in answers])
    return [_sigmoid(value) for value in found] if settings.sigmoid else found


def _question(settings: ScorerReward, answer: Answered) -> dict[str, Any]:
    """What is sent of an answer, and so what its number is kept under."""
    own = {"api": settings.api, "model": settings.model, "text": filled(settings.template, answer)}
    if settings.api == "score":
        return own | {"text": answer.text, "prompt": answer.prompt}
    if settings.api == "openrlhf":
        return own | {"prompt": answer.context, "label": answer.label}
    return own


def _column(questions: list[dict[str, Any]], name: str) -> list[Any]:
    return [question[name] for question in questions]


def _unreadable(cause: str) -> UnavailableError:
    return UnavailableError(f"the answer has another form than it should have ({cause})", answered=True)


def _checked(values: Sequence[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise UnavailableError(f"{len(values)} numbers came for {count} texts", answered=True)
    return [finite(value) for value in values]


def _single(value: Any) -> Any:
    """The number in lists of one; a model with several outputs is no reward model."""
    while isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"{len(value)} numbers came for one text, where a reward is one")
        value = value[0]
    return value


def _plain(reply: Any) -> list[Any]:
    values = reply["rewards" if "rewards" in reply else "scores"] if isinstance(reply, dict) else reply
    if not isinstance(values, list):
        raise TypeError(f"it is a {type(values).__name__} and no list")
    return [_single(value) for value in values]


def _sglang(reply: Any) -> list[Any]:
    return [_single(one["embedding"]) for one in (reply if isinstance(reply, list) else [reply])]


def _vllm(reply: Any) -> list[Any]:
    rows = {one["index"]: one for one in reply["data"]}
    if sorted(rows) != list(range(len(reply["data"]))):
        raise ValueError("its indices do not count its rows")
    return [_single(_of_row(rows[place])) for place in range(len(rows))]


def _of_row(row: Mapping[str, Any]) -> Any:
    name = next((name for name in ("score", "probs", "data") if name in row), None)
    if name is None:
        raise ValueError("a row has no score, probs or data")
    return row[name]


_APIS: dict[str, tuple[Callable[[list[dict[str, Any]]], dict[str, Any]], Callable[[Any], list[Any]]]] = {
    "plain": (lambda asked: {"texts": _column(asked, "text")}, _plain),
    "sglang": (lambda asked: {"text": _column(asked, "text")}, _sglang),
    "vllm": (lambda asked: {"input": _column(asked, "text")}, _vllm),
    "score": (lambda asked: {"text_1": _column(asked, "prompt"), "text_2": _column(asked, "text")}, _vllm),
    "openrlhf": (
        lambda asked: {
            "query": _column(asked, "text"),
            "prompts": _column(asked, "prompt"),
            "labels": _column(asked, "label"),
        },
        _plain,
    ),
}
"""What each kind of server is sent, and the numbers in what it answers."""


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


VERIFIER = Verifier(score, label_fault, require, seconds, answer=lambda settings, text: None)
