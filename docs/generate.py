"""What the site takes from the code when it is built, in place of `<!-- generated: NAME -->` on a page.

The fields are those of the configuration models, with their own sentences; the rules those of the default
set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.config.schema import FieldDescription, describe_fields
from opd.config.watch import DEFAULT_RULES, Condition

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"<!-- generated: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return MARK.sub(lambda found: PARTS[found[1]](), markdown)


def fields() -> str:
    """A section for each key at the top of a recipe, with a table of every field below it; each of the models
    among which a `type` chooses has one of its own.
    """
    found = list(describe_fields())
    below = {one.key.partition(".")[0] for one in found if "." in one.key}
    lines = ["## The top of a recipe", "", Recipe.__doc__ or ""]
    lines += _table([one for one in found if "." not in one.key])
    for name in dict.fromkeys(one.key for one in found if one.key in below):
        lines += ["", f"## {name}"]
        lines += _section([one for one in found if one.key.startswith(f"{name}.")])
    return "\n".join(lines)


def _section(found: list[FieldDescription]) -> Iterator[str]:
    """Tables of `found`, with a heading before the fields of each model that a `type` chooses."""
    rows: list[FieldDescription] = []
    of = ""
    for one in found:
        chosen = one.key.removesuffix("type") if one.key.endswith(".type") else None
        if chosen is not None or not one.key.startswith(of):
            yield from _table(rows)
            rows, of = [], chosen or ""
        if chosen is None:
            rows.append(one)
        else:
            yield from ("", f"**`{one.key}: {one.kind}`**", "", one.sentence)
    yield from _table(rows)


def _table(rows: list[FieldDescription]) -> Iterator[str]:
    if rows:
        yield from ("", "| field | type | default | |", "|---|---|---|---|")
    for one in rows:
        default = f"`{one.default}`" if one.default else ""
        cells = (f"`{one.key}`", one.kind, default, one.sentence)
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def rules() -> str:
    """The rules that are on by default."""
    lines = ["| rule | fires when | in a row | stages | what to do |", "|---|---|---|---|---|"]
    for name, rule in DEFAULT_RULES.items():
        when = _told(rule) + (f", while {_told(rule.also)}" if rule.also else "")
        stages = {"*": "all", "*-*": "specialists, baselines"}[rule.stages]
        lines.append(f"| `{name}` | {when} | {rule.steps} | {stages} | {rule.lever} |")
    return "\n".join(lines)


def _told(condition: Condition) -> str:
    """`entropy` below 0.1 of the mean of its first 5."""
    high, first = condition.above is not None, f"the mean of its first {condition.first}"
    bound = f"{condition.above if high else condition.below:g}"
    words = {"value": bound, "ratio": f"{bound} times {first}", "change": f"{first} and {bound}"}
    mean = f" (mean of its last {condition.last})" if condition.last > 1 else ""
    return f"`{condition.metric}`{mean} is {'above' if high else 'below'} {words[condition.form]}"


PARTS = {"fields": fields, "rules": rules}
