"""Answers side by side, as HTML: the first thing to read of a merge. All text of the run is escaped here."""

from __future__ import annotations

from html import escape
from typing import Any

from opd.pipelines.report.load import Run

KINDS = {
    "wins": ("Wins", "wrong in the base, right in the merged student"),
    "losses": ("Losses", "right in the specialist, wrong in the merged student"),
    "regressions": ("Regressions", "right in the base, wrong in the merged student"),
}
SIDES = {"base": "Base", "teacher": "Specialist", "merged": "Merged student"}


def answers(run: Run) -> str:
    """A block a domain; empty if the evaluation kept no answers."""
    return "".join(_domain(name, found) for name, found in run.answers.items() if found.get("compared"))


def _domain(name: str, found: dict[str, Any]) -> str:
    counts = ", ".join(f"{found[kind]['count']} {KINDS[kind][0].lower()}" for kind in KINDS)
    note = f"First sampled answers to {found['compared']} held-out prompts: {counts}."
    rows = "".join(
        f"<h4>{label}: {escape(what)}</h4>{''.join(_example(row) for row in found[kind]['shown'])}"
        for kind, (label, what) in KINDS.items()
        if found[kind]["shown"]
    )
    return f'<div class="answers"><h3>{escape(name)}</h3><p class="note">{escape(note)}</p>{rows}</div>\n'


def _example(row: dict[str, Any]) -> str:
    cells = [_cell("Prompt", row["prompt"]), _cell("Label", row["label"])]
    cells += [_answer(label, row[side]) for side, label in SIDES.items() if row.get(side)]
    return f'<dl class="answer">{"".join(cells)}</dl>\n'


def _answer(label: str, told: dict[str, Any]) -> str:
    sign, word = ("\u2713", "right") if told["right"] else ("\u2717", "wrong")
    ended = ", cut at the length limit" if told["cut"] else ""
    mark = f' <span class="{word}">{sign} {word}{ended}</span>'
    return _cell(label, told["text"], mark)


def _cell(label: str, text: str, mark: str = "") -> str:
    shown = escape(str(text)) or '<i class="none">(empty)</i>'
    return f"<div><dt>{escape(label)}{mark}</dt><dd>{shown}</dd></div>"
