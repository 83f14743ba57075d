"""What was measured beside the domains' accuracy: evaluation sets, and several answers to each prompt."""

from __future__ import annotations

from html import escape

from opd.pipelines.report.load import ModelResult, Run
from opd.pipelines.report.tables import EMPTY, heat, heat_cell, ordered, row, table
from opd.pipelines.report.words import model_label


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
