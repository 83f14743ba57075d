"""What was measured beside the domains' accuracy: evaluation sets, and several answers to each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from opd.pipelines.report.load import ModelResult, Run
from opd.pipelines.report.tables import EMPTY, heat, heat_cell, ordered, row, table
from opd.pipelines.report.words import model_label

_TASK = 160
"""Characters of a task that are shown beside its episode."""


def sets_table(run: Run) -> str:
    """Models x evaluation sets: sampled accuracy with its interval; empty where there is no set."""
    names = run.sets
    if not names:
        return ""
    rows = [
        row(model_label(model.name), "".join(heat(model.sets.get(name)) for name in names), _kind(model))
        for model in ordered(run)
        if model.sets
    ]
    return table(_head(names), rows, "heat")


def several_tables(run: Run) -> str:
    """For every domain and set with several answers to each prompt: models x pass@k and maj@k."""
    blocks = []
    for name in [*run.domains, *run.sets]:
        measured = [model for model in ordered(run) if name in model.several]
        columns = list(dict.fromkeys(key for model in measured for key in model.several[name]))
        if not columns:
            continue
        rows = [
            row(
                model_label(model.name),
                "".join(
                    heat_cell(model.several[name][key]) if key in model.several[name] else EMPTY
                    for key in columns
                ),
                _kind(model),
            )
            for model in measured
        ]
        blocks.append(f"<h4>{escape(name)}</h4>{table(_head(columns), rows, 'heat')}")
    return "".join(blocks)


_EPISODES = ("Success, %", "Turns", "Done, %", "Reward", "Calls", "Broken calls")
_PLACES = (1, 1, 1, 2, 2, 2)
_SINGLE = ("Task", "Right", "Turns", "End", "Reward of each turn", "Calls", "Broken calls")


def episodes_tables(run: Run) -> str:
    """For every domain and set with an environment: models x what their episodes were like, and a few of one
    model's, the merged student's if there is one.
    """
    blocks = []
    for name in [*run.domains, *run.sets]:
        models = [model for model in ordered(run) if name in model.episodes]
        if not models:
            continue
        rows = [row(model_label(one.name), _means(one, name), _kind(one)) for one in models]
        last = next((one for one in models if one.name == "merged"), models[-1])
        shown = "".join(f"<tr>{_single(episode)}</tr>" for episode in last.episodes[name]["shown"])
        blocks.append(
            f"<h3>{escape(name)}</h3>{table(_head(list(_EPISODES)), rows, 'heat')}"
            f'<p class="note">Single episodes of {escape(model_label(last.name))}:</p>'
            f"{table(_prose_head(_SINGLE), [shown])}"
        )
    return "".join(blocks)


def _means(model: ModelResult, name: str) -> str:
    told, right = model.episodes[name], (model.sampled | model.sets)[name].count
    done = 100 * told["ended"]["done"] / told["count"]
    values = (100 * right.accuracy, told["turns"], done, told["reward"], told["calls"], told["broken_calls"])
    return "".join(
        f"<td>{value:.{places}f}</td>" for value, places in zip(values, (1, 1, 1, 2, 2, 2), strict=True)
    )


def _single(told: dict[str, Any]) -> str:
    asked = str(told["prompt"])
    asked = asked if len(asked) <= _TASK else f"{asked[:_TASK]} \u2026"
    rewards = " ".join(f"{float(one):g}" for one in told["rewards"]) or "\u2013"
    cells = (asked, "yes" if told["right"] else "no", told["turns"], told["ended"], rewards)
    cells = (*cells, told["calls"], told["broken_calls"])
    return "".join(f'<td class="text">{escape(str(cell))}</td>' for cell in cells)


def _prose_head(names: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col" class="text">{escape(name)}</th>' for name in names)
    return f"<tr>{cells}</tr>"


def contamination_table(run: Run) -> str:
    """Domain or set -> evaluation prompts that stand in training texts, with an example of each; empty where
    nothing was compared.
    """
    rows = []
    for name, found in run.contamination.get("found", {}).items():
        count, prompts = int(found["contaminated"]), int(found["prompts"])
        cells = f"<td>{prompts}</td><td>{count}</td>"
        cells += f"<td>{100 * count / prompts:.1f}</td>" if prompts else EMPTY
        example = found["examples"][0] if found["examples"] else None
        told = f"\u201c{example['shared']}\u201d: {example['where']}" if example else ""
        rows.append(row(name, f'{cells}<td class="text">{escape(told)}</td>'))
    head = "".join(
        f'<th scope="col"{kind}>{name}</th>'
        for name, kind in (
            ("Prompts", ""),
            ("Found", ""),
            ("%", ""),
            ("Example, and where it stands", ' class="text"'),
        )
    )
    return table(f'<tr><td class="corner"></td>{head}</tr>', rows) if rows else ""


def _head(names: list[str]) -> str:
    cells = "".join(f'<th scope="col" class="name">{escape(name)}</th>' for name in names)
    return f'<tr><td class="corner"></td>{cells}</tr>'


def _kind(model: ModelResult) -> str:
    return f"is-{model.kind}"
