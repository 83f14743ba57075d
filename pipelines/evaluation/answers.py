"""Answers that are kept to be read: what base, teacher and student wrote to a prompt, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opd.types import Sample, Status

PROMPTS = 256
"""Held-out prompts of a domain whose answers are kept, at most."""
CHARACTERS = 1500
"""Most of a prompt, a label or an answer that is kept."""
SHOWN = 3
"""Examples of each kind."""
KINDS = ("wins", "losses", "regressions")
"""Right where the base was wrong; wrong where the teacher was right; wrong where the base was right."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model wrote to one prompt."""

    uid: str
    prompt: str
    label: str
    text: str
    right: bool
    cut: bool
    """Whether the response ended at the length limit."""


def keep(
    samples: Sequence[Sample], text: Callable[[Sample], str], right: Callable[[Sample], bool]
) -> list[Any]:
    """The first scored answer to each of the first `PROMPTS` prompts, JSON-able, in their order.

    `text` gives a response as its reward sees it, `right` whether it counts as right.
    """
    first = {sample.group_uid: sample for sample in reversed(samples)}
    order = list(dict.fromkeys(sample.group_uid for sample in samples))[:PROMPTS]
    return [asdict(_answer(first[uid], text(first[uid]), right(first[uid]))) for uid in order]


def asked_of(sample: Sample) -> str:
    """The prompt of a sample as text, cut if it is long."""
    messages = sample.metadata.get("messages")
    said = [f"{message.get('role')}: {message.get('content')}" for message in messages or []]
    return _short("\n".join(said) or str(sample.metadata.get("prompt", "")))


def _answer(sample: Sample, text: str, right: bool) -> Answer:
    label = sample.label if isinstance(sample.label, str) else json.dumps(sample.label, default=str)
    cut = sample.status is Status.TRUNCATED
    return Answer(sample.group_uid, asked_of(sample), _short(label), _short(text), right, cut)


def _short(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} \u2026"


def side_by_side(
    answers: dict[str, dict[str, list[Any]]], domains: Sequence[str], teachers: Mapping[str, str]
) -> dict[str, Any]:
    """domain -> how many prompts were compared, and of each of `KINDS` how many there are and a few of them.

    `answers`: model -> domain -> what `keep` gave; `teachers`: domain -> the model that is its teacher.
    An example is shown once, under the last kind it is of.
    """
    found = {}
    for domain in domains:
        sides = {
            side: {answer["uid"]: answer for answer in answers.get(model, {}).get(domain, [])}
            for side, model in (("base", "base"), ("teacher", teachers.get(domain, "")), ("merged", "merged"))
        }
        rows = [
            {"prompt": merged["prompt"], "label": merged["label"]}
            | {side: _told(of.get(uid)) for side, of in sides.items()}
            for uid, merged in sides["merged"].items()
        ]
        if not rows:
            continue
        kinds = [(row, _kinds(row)) for row in rows]
        found[domain] = {"compared": len(rows)} | {
            kind: {
                "count": sum(kind in own for _, own in kinds),
                "shown": [row for row, own in kinds if own and own[-1] == kind][:SHOWN],
            }
            for kind in KINDS
        }
    return found


def _told(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if answer is None else {key: answer[key] for key in ("text", "right", "cut")}


def _kinds(row: dict[str, Any]) -> list[str]:
    base, teacher, merged = (row[side] for side in ("base", "teacher", "merged"))
    kinds = []
    if base is not None and merged["right"] and not base["right"]:
        kinds.append("wins")
    if teacher is not None and teacher["right"] and not merged["right"]:
        kinds.append("losses")
    if base is not None and base["right"] and not merged["right"]:
        kinds.append("regressions")
    return kinds
