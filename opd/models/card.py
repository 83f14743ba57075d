"""The model card: README.md of an exported checkpoint."""

from __future__ import annotations

from typing import Any

import yaml

from opd.redact import redact

SECTIONS = ("accuracy", "prompt_format", "loading", "base", "teachers", "data", "settings", "results")


def model_card(name: str, card: dict[str, Any]) -> str:
    """Markdown for a model called `name`.

    `card` maps section names to text, numbers, lists or dictionaries; `SECTIONS` come first, in that order,
    then the rest in its own. A dictionary of dictionaries becomes a table with one row per key, anything
    deeper a YAML block. "about" is the sentence below the title, "base_model" is in the front matter too.
    """
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if "base_model" in card:
        front["base_model"] = card["base_model"]
    front["tags"] = ["on-policy-distillation", "opd"]
    lines = ["---", yaml.safe_dump(front, sort_keys=False, width=1000).strip(), "---", "", f"# {name}", ""]
    lines += [f"{card['about']} Made with `opd`." if "about" in card else "Made with `opd`.", ""]
    given = [section for section in card if section != "about"]
    for section in [*(s for s in SECTIONS if s in given), *(s for s in given if s not in SECTIONS)]:
        lines += [f"## {section.replace('_', ' ').capitalize()}", "", _body(card[section]), ""]
    return redact("\n".join(lines))


def _body(value: Any) -> str:
    if isinstance(value, dict) and value:
        rows = list(value.values())
        if all(isinstance(row, dict) and row and all(map(_plain, row.values())) for row in rows):
            return _table(value)
        if all(map(_plain, rows)):
            return "\n".join(f"- {key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, list) and value and all(map(_plain, value)):
        return "\n".join(f"- {_text(item)}" for item in value)
    if _plain(value):
        return _text(value)
    return f"```yaml\n{yaml.safe_dump(value, sort_keys=False, allow_unicode=True).strip()}\n```"


def _table(rows: dict[str, dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = ["| | " + " | ".join(map(_cell, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for key, row in rows.items():
        lines.append(
            " | ".join([f"| {_cell(key)}", *(_cell(row.get(column, "")) for column in columns)]) + " |"
        )
    return "\n".join(lines)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(value: Any) -> str:
    return _text(value).replace("|", "\\|").replace("\n", " ")
