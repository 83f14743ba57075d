"""What other data sets call the columns `prompt`, `label` and `completion`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ASKED = ("problem", "question", "query", "instruction", "input", "inputs", "user", "text", "task")
_RIGHT = (
    *(
        "answer",
        "ground_truth",
        "final_answer",
        "correct_answer",
        "expected_answer",
        "gold",
        "target",
        "targets",
    ),
    *("solution", "reference", "reference_answer", "answers", "response", "output", "completion", "labels"),
)
_SAID = (
    *(
        "response",
        "answer",
        "output",
        "chosen",
        "solution",
        "completions",
        "target",
        "generation",
        "assistant",
    ),
)
_NAMES = {"prompt": _ASKED, "label": _RIGHT, "completion": _SAID}
SHOWN = ("instruction", "input", "context", "passage", "history", "choices", "options")
"""Columns in which others have a part of what is asked."""
THOUGHT = ("thinking", "reasoning", "reasoning_content", "thoughts")
"""And a part of what is answered."""
SPOKEN = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
"""Columns of conversations."""


def rename_hint(row: Mapping[str, Any], *wanted: str) -> str:
    """How to rename columns of `row` to those `wanted` that it lacks: `; rename ...`, or nothing."""
    found, free = [], {name.strip().lower(): name for name in row if row[name] is not None}
    for column in wanted:
        if row.get(column) is not None:
            continue
        there = next((free[name] for name in (column, *_NAMES[column]) if name in free), None)
        if there is not None:
            free = {key: name for key, name in free.items() if name != there}
            parts = [f"`{name}`" for name in row if name in SHOWN and name != there and row[name]]
            whole = f" (with {' and '.join(parts)} written into it)" if column == "prompt" and parts else ""
            found.append(f"`{there}`{whole} to `{column}`")
    given = row.get("reward_model")
    if (
        "label" in wanted
        and row.get("label") is None
        and isinstance(given, Mapping)
        and "ground_truth" in given
    ):
        found = [
            *(one for one in found if not one.endswith("`label`")),
            "`reward_model.ground_truth` to `label`",
        ]
    return f"; rename {' and '.join(found)}" if found else ""


def rows_within(row: Mapping[str, Any]) -> str | None:
    """The column of `row` that holds the rows themselves, as in `{"data": [{...}, ...]}`."""
    known = {"prompt", "messages", *_ASKED}
    lists = ((name, value[0]) for name, value in row.items() if isinstance(value, list) and value)
    found = (name for name, first in lists if isinstance(first, dict) and first.keys() & known)
    return next((name for name in found if name not in SPOKEN), None)
