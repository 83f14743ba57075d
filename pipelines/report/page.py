"""Puts the report together: one HTML text with its style sheet and charts inside, no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import yaml

from opd.foreign import visible
from opd.pipelines.report import evaluated, figures, tables
from opd.pipelines.report.charts import MARKERS, variables
from opd.pipelines.report.figures import Cue, Cues, Panel
from opd.pipelines.report.load import Run
from opd.pipelines.report.verdict import caveats, write_verdict
from opd.pipelines.report.words import model_label, percent, stage_label

SHAPES = {
    "o": '<circle cx="17" cy="5" r="3.2"/>',
    "s": '<rect x="14" y="2" width="6" height="6"/>',
    "^": '<path d="M17 1.4 20.6 8H13.4Z"/>',
    "D": '<path d="M17 1.2 20.8 5 17 8.8 13.2 5Z"/>',
    "v": '<path d="M17 8.6 20.6 2H13.4Z"/>',
    "P": '<path d="M15.8 1.6h2.4v2.2h2.2v2.4h-2.2v2.2h-2.4V6.2h-2.2V3.8h2.2Z"/>',
    "X": '<path d="M14 3.4 15.4 2 17 3.6 18.6 2 20 3.4 18.4 5 20 6.6 18.6 8 17 6.4 15.4 8 14 6.6 15.6 5Z"/>',
    "p": '<path d="M17 1.4 20.4 4 19.1 8H14.9L13.6 4Z"/>',
}
"""A legend's drawing of each of `theme.MARKERS`, at the end of its line."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a browser lets the page do: be drawn."""
_FLAGS = 50
"""Red flags that the page shows."""
LIBRARIES = (("python", "Python"), ("torch", "PyTorch"))


def render(run: Run) -> str:
    """The whole page."""
    cues = Cues(run)
    sections = [
        _flags(run),
        _accuracy(run, cues),
        _answers(run),
        _episodes(run),
        _curves(run, cues),
        _teachers(run, cues),
        _health(run, cues),
        _difficulty(run, cues),
        _models(run),
        _time(run),
        _caveats(run),
        _recipe(run),
    ]
    return document(run.name, f"{_header(run, cues)}\n{''.join(sections)}")


def document(title: str, body: str, policy: str = POLICY, after: str = "") -> str:
    """A page of its own around `body`, in the report's style; `policy`: what a browser lets it do. `after`
    follows the body.
    """
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    theme = (
        f":root{{{variables('light')}}}@media (prefers-color-scheme:dark){{:root{{{variables('dark')}}}}}"
        f"@media print{{:root{{{variables('light')}}}}}"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)} \u2013 opd report</title>\n<style>\n{theme}\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n{after}</body>\n</html>\n"
    )


def _header(run: Run, cues: Cues) -> str:
    verdict = write_verdict(run)
    items = "".join(
        f"<li><strong>{escape(lead)}</strong> {escape(sentence)}</li>" for lead, sentence in verdict.points
    )
    facts = [f"seed {run.facts['seed']}"] if "seed" in run.facts else []
    facts += [str(run.facts["created"]).replace("T", " ")] if "created" in run.facts else []
    facts += [f"opd {run.facts['version']}"] if "version" in run.facts else []
    kicker = " \u00b7 ".join([run.name, *facts])
    points = f'<ul class="verdict">{items}</ul>' if items else ""
    panel = figures.gaps(run, tables.ordered(run), cues)
    chart = f"<div>{figure(panel, legend(cues.all()))}</div>" if panel else ""
    return (
        f'<header>\n<div><p class="kicker">{escape(kicker)}</p>\n'
        f"<h1>{escape(verdict.headline)}</h1>\n{points}</div>\n{chart}</header>"
    )


def _flags(run: Run) -> str:
    if not run.flags:
        return ""
    rows = [
        f'<tr><th>{escape(stage_label(flag.stage))}</th><td>{flag.step}</td><td class="text">'
        f'{escape(visible(flag.rule))}</td><td class="text flag">{escape(visible(flag.sentence))}</td></tr>'
        for flag in run.flags[:_FLAGS]
    ]
    head = "<tr><th>Stage</th><th>Step</th><th>Rule</th><th>What happened, and the lever</th></tr>"
    note = "Rules of the recipe\u2019s watch that fired, in the order of the stages."
    if len(run.flags) > _FLAGS:
        note += f" {len(run.flags) - _FLAGS} more are in the stages\u2019 flags.jsonl."
    return section("Red flags", captioned(tables.table(head, rows, "flags"), note))


def _accuracy(run: Run, cues: Cues) -> str:
    if not run.models:
        return ""
    level = percent(run.confidence, 0)
    note = (
        f"Answers on held-out prompts{_evaluated(run)}. The small figures are {level} intervals. The more "
        "colour the better; the scale runs from 0 to 100\u202f%. A frame marks a teacher on its own domain."
    )
    other = [f"{model_label(model.name)}: {model.elsewhere}" for model in run.models if model.elsewhere]
    if other:
        note += f" Answered by an engine in the evaluation\u2019s own process: {'; '.join(other)}."
    parts = [captioned(tables.accuracy_table(run, cues), note)]
    table = tables.alternatives_table(run)
    if run.model("merged"):
        note = (
            f"Merged minus the model in the row, mean over domains, with its {level} interval; below zero "
            "the merged student is behind. Tokens: what the model\u2019s own training sampled; merges of "
            "weights sample none."
        )
        parts.append(captioned(table, note))
    recovery = tables.recovery_table(run, cues)
    if recovery:
        note = (
            "(model \u2212 base) / (teacher \u2212 base) of sampled accuracy, in %: 0 is the base, 100 "
            "the domain\u2019s teacher. A dash: the teacher is not clearly above the base, so there is "
            "nothing to recover."
        )
        parts.append(f"<h3>Recovery</h3>{captioned(recovery, note)}")
    parts += _evaluated_beside(run, level)
    return section("Accuracy", "".join(parts))


def _evaluated_beside(run: Run, level: str) -> list[str]:
    """Evaluation sets, and several answers to each prompt, where there are any."""
    parts = []
    sets = evaluated.sets_table(run)
    if sets:
        note = f"Sampled, % right, on sets of prompts with sources of their own; {level} intervals."
        parts.append(f"<h3>Evaluation sets</h3>{captioned(sets, note)}")
    several = evaluated.several_tables(run)
    if several:
        note = (
            "pass@k: share of prompts of which one of k sampled answers is right, the unbiased estimate from "
            "all of them; maj@k: how often the commonest of k is right. In %, with "
            f"{level} intervals over prompts."
        )
        parts.append(f"<h3>Several answers to each prompt</h3>{captioned(several, note)}")
    shared = evaluated.contamination_table(run)
    if shared:
        size, texts = run.contamination["ngram"], run.contamination["texts"]
        note = (
            f"Evaluation prompts that share {size} words in a row, or all they say, with one of {texts} "
            "training prompts and demonstrations of this run. What more than ten different ones have does "
            "not count. Nothing is said of what given models were trained on."
        )
        parts.append(f"<h3>Evaluation prompts in training</h3>{captioned(shared, note)}")
    return parts


def _answers(run: Run) -> str:
    body = tables.answers(run)
    note = (
        "Up to three answers of each kind, as the evaluation sampled them; long ones are cut. Read some "
        "before believing a number."
    )
    return section("Answers side by side", f'<p class="note">{note}</p>{body}') if body else ""


def _episodes(run: Run) -> str:
    body = evaluated.episodes_tables(run)
    note = (
        "Sampled episodes on held-out tasks: means over all of them, and the first of a few tasks one by "
        "one. Done: the environment ended it; the others met a limit of turns or tokens."
    )
    return section("Episodes", f'<p class="note">{note}</p>{body}') if body else ""


def _curves(run: Run, cues: Cues) -> str:
    panels = figures.learning(run, cues)
    extra = [Cue("merge", "ink", "o")] if run.stage("merge") else []
    extra += [Cue(line.label, line.role, line.marker) for line in figures.merge_and_baselines(run, cues)[1:]]
    intro = (
        "Thin lines are single steps, thick ones a moving mean over nine points. The mark at the right is "
        "the mean of the last steps, the number below a chart."
    )
    return section("Learning curves", grid(panels, [*cues.all(), *extra], intro)) if panels else ""


def _teachers(run: Run, cues: Cues) -> str:
    panels = figures.teachers(run, cues)
    table = tables.teachers_table(run, cues)
    if not panels and not table:
        return ""
    steps = {int(values["kl_steps"]) for values in run.teachers.values() if "kl_steps" in values}
    last = f"the mean of the last {max(steps)} steps" if steps and max(steps) > 1 else "that of the last step"
    note = f"KL: {last}; shares are means over the merge."
    return section(
        "Teachers",
        (captioned(table, note) if table else "") + (grid(panels, cues.all()) if panels else ""),
    )


def _health(run: Run, cues: Cues) -> str:
    panels = figures.health(run, cues)
    known = [*cues.all(), *([Cue("merge", "ink", "o")] if run.stage("merge") else [])]
    return section("Lengths and training health", grid(panels, known)) if panels else ""


def _difficulty(run: Run, cues: Cues) -> str:
    panels = figures.difficulty(run, cues)
    if not panels:
        return ""
    intro = (
        "What the model that a specialist starts from answered to its training prompts, before it learned."
    )
    return section("Prompts by difficulty", grid(panels, cues.all(), intro))


def _models(run: Run) -> str:
    table = tables.models_table(run)
    if not table:
        return ""
    note = (
        "Hugging Face folders; each has a card with its accuracy, prompt format and loading lines. Digest: "
        "the beginning of the sha256 of the weights."
    )
    body = captioned(table, note)
    used = run.folders.get("merged", {})
    for key, title in (("prompt_format", "How it is prompted"), ("loading", "How it is loaded")):
        if key in used:
            text = used[key].removeprefix("```python\n").removesuffix("```")
            body += f"<h3>The merged student: {title.lower()}</h3><pre>{escape(text)}</pre>\n"
    return section("Models", body)


def _time(run: Run) -> str:
    if not run.stages:
        return ""
    machine = run.facts.get("machine", {})
    words = [str(machine[key]) for key in ("cpu",) if key in machine]
    words += [f"{machine['cores']} cores"] if "cores" in machine else []
    words += [f"{label} {machine[key]}" for key, label in LIBRARIES if key in machine]
    note = f"Machine: {', '.join(words)}." if words else "Per stage, as measured by the run."
    body = beside(
        figures.time_per_phase(run), captioned(tables.stages_table(run), note), figures.phase_cues(run)
    )
    memory = figures.memory_per_phase(run)
    if memory:
        body += grid([memory], figures.kind_cues())
    counters = tables.counters_table(run)
    if counters:
        note = (
            "Of the merge. A head is loaded once per teacher of a mini-batch and one is in memory at a time;"
            " every token is in the log before anyone else sees it."
        )
        body += f"<h3>Counters</h3>{captioned(counters, note)}"
    return section("Time and memory", body)


def _caveats(run: Run) -> str:
    if not run.models:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in caveats(run))
    return section("What these numbers do not show", f'<ul class="prose">{items}</ul>')


def _recipe(run: Run) -> str:
    if not run.config:
        return ""
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=100)
    return f"<details>\n<summary>Resolved recipe</summary>\n<pre>{escape(text)}</pre>\n</details>\n"


def _evaluated(run: Run) -> str:
    totals = sorted({a.count.total for model in run.models for a in model.sampled.values()})
    if not totals:
        return ""
    return f", {totals[0]} per domain" if len(totals) == 1 else f", {totals[0]} to {totals[-1]} per domain"


def section(title: str, body: str) -> str:
    """A part of a page under its heading."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n"


def captioned(table: str, note: str) -> str:
    """A table with what is to be known of it below."""
    return f'<div class="block">{table}<p class="note">{escape(note)}</p></div>\n'


def beside(panel: Panel | None, block: str, cues: Sequence[Cue]) -> str:
    """A chart with its legend, and what stands at its right."""
    if panel is None:
        return block
    return f'<div class="beside"><div>{figure(panel, legend(cues))}</div>{block}</div>\n'


def grid(panels: Sequence[Panel], cues: Sequence[Cue], intro: str = "") -> str:
    """Charts beside each other under one legend; those with nothing to draw in a list below."""
    text = f'<p class="note">{escape(intro)}</p>' if intro else ""
    charts = "".join(figure(panel) for panel in panels if panel.svg)
    still = "".join(
        f"<li>{escape(panel.title)} ({escape(panel.unit)}): {escape(panel.caption)}</li>"
        for panel in panels
        if not panel.svg
    )
    constant = (
        f'<p class="note">Constant within 2 %, so not drawn:</p><ul class="note">{still}</ul>'
        if still
        else ""
    )
    return f'{text}{legend(cues)}<div class="grid">{charts}</div>\n{constant}\n'


def figure(panel: Panel, above: str = "") -> str:
    """A chart with heading and caption."""
    return (
        f"<figure><h3>{escape(panel.title)}</h3><p class=unit>{escape(panel.unit)}</p>{above}{panel.svg}"
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>\n"
    )


def legend(cues: Sequence[Cue]) -> str:
    """What each line is."""
    items = "".join(f"<li>{_key(cue)}{escape(cue.label)}</li>" for cue in cues)
    return f'<ul class="legend">{items}</ul>'


def _key(cue: Cue) -> str:
    colour = f"var(--{cue.role})"
    if cue.marker == "block":
        return f'<i class="dot block" style="background:{colour}"></i>'
    shape = SHAPES[cue.marker if cue.marker in MARKERS else "o"]
    return (
        f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true" fill="{colour}">'
        f'<path d="M0 5H17" stroke="{colour}" stroke-width="1.7"/>{shape}</svg>'
    )
