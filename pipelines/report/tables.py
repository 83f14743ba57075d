"""The tables of the report, its counters in words, and answers side by side, as HTML.

Every text that comes from a run is escaped here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from opd.pipelines.evaluation.statistics import Interval, mean_accuracy
from opd.pipelines.report.figures import Cues, own_domain
from opd.pipelines.report.load import DomainAccuracy, ModelResult, Run
from opd.pipelines.report.verdict import compare
from opd.pipelines.report.words import (
    NARROW,
    amount,
    bounds,
    duration,
    model_label,
    own_label,
    percent,
    point_bounds,
    points,
    stage_label,
)

COUNTS = {
    "head_loads": "Heads loaded",
    "resident_heads_peak": "Heads in memory at once, at most",
    "prefetched_heads_peak": "Heads read ahead beside them, at most",
    "teacher_tokens": "Tokens scored by teachers",
    "cached_tokens": "Tokens whose hidden states were in the cache",
    "rollout/requests": "Responses asked for",
    "rollout/completed": "Responses completed",
    "rollout/truncated": "Responses cut at the length limit",
    "rollout/failed": "Responses failed",
    "rollout/aborted": "Responses aborted",
    "rollout/replayed_requests": "Responses taken whole from the log",
    "rollout/resumed_requests": "Responses continued from the log",
    "rollout/interrupted_requests": "Responses interrupted",
    "rollout/deadlines": "Responses that missed their deadline",
    "rollout/engine_failures": "Engines that failed",
    "rollout/engine_timeouts": "Engines that did not answer in time",
    "rollout/suspensions": "Times the engine made room",
    "rollout/tokens": "Tokens written",
    "rollout/prefilled_tokens": "Tokens of prompts and prefixes computed",
    "rollout/kv_restored_sequences": "Responses whose keys and values were restored",
    "rollout/kv_restored_tokens": "Tokens whose keys and values were restored",
    "rollout/kept_tokens": "Tokens of earlier turns not computed again",
    "rollout/replayed_tokens": "Tokens taken from the log",
}
BYTES = {
    "bytes_read": "Read from the stores",
    "cached_bytes": "Taken from copies on the node in place of the stores",
    "weight_bytes_peak": "Weights in memory at once, at most",
    "rollout/kv_saved_bytes": "Keys and values kept",
    "rollout/pushed_bytes": "Weights sent to the engines",
}
SECONDS = {"stall_seconds": "Waited for layers and heads", "rollout/log_seconds": "Waited for the log"}


WAITED = re.compile(r"teacher/(?P<teacher>.+)/wait_seconds")


def counter_rows(run: Run) -> Iterator[tuple[str, str]]:
    """(label, value) of every counter that is not 0, in a fixed order; those without a label come last."""
    known = [*COUNTS, *BYTES, *SECONDS]
    for name in [*known, *(name for name in run.counters if name not in known)]:
        value = run.counters.get(name, 0)
        if not value:
            continue
        if name in COUNTS:
            yield COUNTS[name], amount(value)
        elif name in BYTES:
            yield BYTES[name], f"{amount(value)}B"
        elif name in SECONDS:
            yield SECONDS[name], duration(value) + _share(run, name, value)
        elif found := WAITED.fullmatch(name):
            yield f"Waited for teacher {found['teacher']}", duration(value) + _share_of_steps(run, value)
        else:
            yield name.replace("_", " ").replace("/", ": "), f"{value:,.6g}".replace(",", NARROW)


def _share(run: Run, name: str, value: float) -> str:
    """The part of the phase that a wait belongs to."""
    phase = "rollout" if name.startswith("rollout/") else "score"
    merge = run.stage("merge")
    whole = merge.phases.get(phase, 0.0) if merge else 0.0
    return f" ({percent(value / whole)} of {phase})" if whole > 0 else ""


def _share_of_steps(run: Run, value: float) -> str:
    """The part of the merge's steps, without what is measured in between."""
    merge = run.stage("merge")
    phases = merge.phases.items() if merge else ()
    whole = sum(seconds for phase, seconds in phases if phase != "evaluate")
    return f" ({percent(value / whole)} of the steps)" if whole > 0 else ""


EMPTY = '<td class="none">\u2013</td>'


def ordered(run: Run) -> list[ModelResult]:
    """Models as the report lists them: base, specialists, merged, then the baselines, the best first."""
    ranks = {"base": 0, "specialist": 1, "teacher": 1, "merged": 2}

    def place(model: ModelResult) -> tuple[int, float]:
        rank = ranks.get(model.kind, 3)
        if rank < 3 or not model.sampled:
            return rank, 0.0
        return rank, -mean_accuracy(model.counts(list(model.sampled))).value

    return sorted(run.models, key=place)


def accuracy_table(run: Run, cues: Cues) -> str:
    """Models x domains: sampled accuracy with its interval as a heat map, greedy accuracy beside it."""
    several = len(run.domains) > 1
    span = len(run.domains) + several
    greedy = any(model.greedy for model in run.models)
    names = [f"{_swatch(cues, domain)}{escape(domain)}" for domain in run.domains]
    names += ["mean"] if several else []
    groups = f'<th colspan="{span}" scope="colgroup">Sampled, % right</th>'
    groups += f'<th colspan="{span}" scope="colgroup" class="gap">Greedy, % right</th>' if greedy else ""
    columns = _columns(names) + (_columns(names, first="name gap") if greedy else "")
    corner = '<td class="corner"></td>'
    rows = []
    for model in ordered(run):
        cells = "".join(heat(model.sampled.get(d), run.teacher(d) is model) for d in run.domains)
        cells += _mean(run, model.sampled, heat=True) if several else ""
        if greedy:
            cells += _greedy(run, model) + (_mean(run, model.greedy, heat=False) if several else "")
        rows.append(row(model_label(model.name), cells, f"is-{model.kind}"))
    return table(f"<tr>{corner}{groups}</tr><tr>{corner}{columns}</tr>", rows, "heat")


def alternatives_table(run: Run) -> str:
    """Every other model beside the merged one: mean, gap to it, tokens, time, settings."""
    merged = run.model("merged")
    head = _head(
        "Model",
        "Mean sampled, %",
        "Merged ahead by, points",
        "Student tokens",
        "Time",
        "Settings",
        prose="Settings",
    )
    rows = []
    own = own_domain(run)
    for model in ordered(run):
        shared = [domain for domain in run.domains if domain in model.sampled]
        if model.teaches or not shared:
            continue
        mean = mean_accuracy(model.counts(shared), run.confidence)
        gap = compare(run, merged, model) if merged and model is not merged else None
        cells = f"<td>{100 * mean.value:.1f}<small>{bounds(mean)}</small></td>"
        cells += f"<td>{points(gap.gap.value)}<small>{point_bounds(gap.gap)}</small></td>" if gap else EMPTY
        cells += f"<td>{amount(model.student_tokens)}</td>" if model.student_tokens else EMPTY
        cells += f"<td>{duration(model.seconds)}</td>" if model.seconds else EMPTY
        settings = ", ".join(f"{key} {_setting(value)}" for key, value in model.settings.items())
        cells += f'<td class="text">{escape(settings)}</td>'
        rows.append(row(model_label(model.name), cells, f"is-{model.kind}"))
    if own:
        mean = mean_accuracy([accuracy.count for _, accuracy in own], run.confidence)
        cells = f"<td>{100 * mean.value:.1f}<small>{bounds(mean)}</small></td>" + _specialist_gap(run)
        cost = [model for model in run.models if model.teaches]
        tokens, seconds = sum(m.student_tokens for m in cost), sum(m.seconds for m in cost)
        cells += f"<td>{amount(tokens)}</td>" if tokens else EMPTY
        cells += f"<td>{duration(seconds)}</td>" if seconds else EMPTY
        rows.insert(
            1,
            row(
                own_label(run.teacher_word),
                cells + f'<td class="text">{"sum of all" if tokens else ""}</td>',
                "is-specialist",
            ),
        )
    return table(head, rows) if rows else ""


def recovery_table(run: Run, cues: Cues) -> str:
    """(student - base) / (teacher - base) per model and domain; empty if nothing was measured."""
    models = [model.name for model in ordered(run) if run.recovery.get(model.name)]
    if not models:
        return ""
    columns = [f"{_swatch(cues, domain)}{escape(domain)}" for domain in run.domains]
    rows = []
    for name in models:
        cells = ""
        for domain in run.domains:
            value = run.recovery[name].get(domain)
            cells += f"<td>{100 * value.value:.1f}<small>{bounds(value)}</small></td>" if value else EMPTY
        model = run.model(name)
        rows.append(row(model_label(name), cells, f"is-{model.kind if model else 'baseline'}"))
    return table(_head("Model", *columns, raw=True), rows)


def teachers_table(run: Run, cues: Cues) -> str:
    """Final KL, token share and gradient share of each teacher."""
    if not run.teachers:
        return ""
    rows = []
    for name, values in run.teachers.items():
        kl, tokens, gradient = (values.get(key) for key in ("kl", "token_share", "grad_share"))
        cells = f"<td>{kl:.4f}</td>" if kl is not None else EMPTY
        cells += "".join(f"<td>{100 * v:.1f}</td>" if v is not None else EMPTY for v in (tokens, gradient))
        rows.append(row(f"{_swatch(cues, name)}{escape(name)}", cells, "name", raw=True))
    return table(_head("Teacher", "KL, nats per token", "Tokens, %", "Gradient, %"), rows)


def models_table(run: Run) -> str:
    """Where each model lies, and the digest of its weights."""
    rows = []
    for name, told in run.folders.items():
        digest = told.get("digest", "")
        cells = f'<td class="text"><code>{escape(told["folder"])}</code></td>'
        cells += f'<td class="text" title="{escape(digest)}"><code>{escape(digest[:16])}</code></td>'
        rows.append(row(model_label(name), cells))
    return (
        table('<tr><th></th><th class="text">Folder</th><th class="text">Digest</th></tr>', rows)
        if rows
        else ""
    )


def stages_table(run: Run) -> str:
    """Time, steps, tokens and memory of each stage."""
    if not run.stages:
        return ""
    rows = []
    for stage in run.stages:
        rate = stage.student_tokens / stage.seconds if stage.seconds > 0 else 0
        cells = f"<td>{duration(stage.seconds)}</td>"
        cells += f"<td>{stage.steps}</td>" if stage.steps else EMPTY
        cells += f"<td>{amount(stage.student_tokens)}</td>" if stage.student_tokens else EMPTY
        cells += f"<td>{amount(rate)}</td>" if rate else EMPTY
        memory = stage.peak_rss_mb
        cells += f"<td>{memory:,.0f}</td>".replace(",", NARROW) if memory else EMPTY
        rows.append(row(stage_label(stage.name), cells))
    return table(_head("Stage", "Time", "Steps", "Student tokens", "Tokens/s", "Peak memory, MB"), rows)


def counters_table(run: Run) -> str:
    """Counters of the merge: teachers, stores, rollouts and their log."""
    rows = [row(label, f"<td>{escape(value)}</td>") for label, value in counter_rows(run)]
    return table(_head("Counter", "Value"), rows, "narrow") if rows else ""


def _specialist_gap(run: Run) -> str:
    merged = run.model("merged")
    if merged is None or not set(run.domains) <= set(merged.sampled):
        return EMPTY
    own = dict(own_domain(run))
    reference = ModelResult("specialists", "specialist", own, {}, {})
    gap = compare(run, merged, reference)
    return f"<td>{points(gap.gap.value)}<small>{point_bounds(gap.gap)}</small></td>" if gap else EMPTY


def _columns(names: Sequence[str], first: str = "") -> str:
    kinds = [first, *[""] * (len(names) - 1)]
    return "".join(
        f'<th scope="col" class="{kind or "name"}">{name}</th>'
        for kind, name in zip(kinds, names, strict=True)
    )


def heat(accuracy: DomainAccuracy | None, own: bool = False) -> str:
    """A cell of an accuracy; `own` frames it."""
    return heat_cell(accuracy.interval, "own" if own else "") if accuracy else EMPTY


def heat_cell(value: Interval, kind: str = "") -> str:
    """A cell of a share in %, the more colour the higher, with its interval."""
    share = f"{100 * value.value:.1f}"
    return f'<td{_class(kind)} style="--p:{share}%">{share}<small>{bounds(value)}</small></td>'


def _mean(run: Run, accuracies: dict[str, DomainAccuracy], heat: bool) -> str:
    if not set(run.domains) <= set(accuracies):
        return EMPTY
    mean = mean_accuracy([accuracies[domain].count for domain in run.domains], run.confidence)
    return heat_cell(mean) if heat else f"<td>{100 * mean.value:.1f}</td>"


def _greedy(run: Run, model: ModelResult) -> str:
    found = [model.greedy.get(domain) for domain in run.domains]
    texts = [f"{100 * accuracy.interval.value:.1f}" if accuracy else "\u2013" for accuracy in found]
    return "".join(f"<td{_class('' if index else 'gap')}>{text}</td>" for index, text in enumerate(texts))


def _setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _swatch(cues: Cues, name: str) -> str:
    return f'<i class="dot" style="background:var(--{cues.of(name).role})"></i>'


def _head(*names: str, raw: bool = False, prose: str = "") -> str:
    """A header row; `prose` names the column of words, aligned to the left."""
    kinds = ["text" if name == prose else "name" if raw else "" for name in names]
    cells = "".join(
        f'<th scope="col"{_class(kind)}>{name if raw else escape(name)}</th>'
        for kind, name in zip(kinds, names, strict=True)
    )
    return f"<tr>{cells}</tr>"


def row(label: str, cells: str, kind: str = "", raw: bool = False) -> str:
    """A row of `cells`, which are HTML, behind its label; a `raw` one is HTML too."""
    return f'<tr{_class(kind)}><th scope="row">{label if raw else escape(label)}</th>{cells}</tr>'


def table(head: str, rows: Sequence[str], kind: str = "") -> str:
    """A table that scrolls where it is too wide."""
    columns = max(row.count("<td") for row in rows) if rows else 0
    hint = '<p class="hint" aria-hidden="true">The table scrolls sideways \u2192</p>' if columns > 3 else ""
    return (
        f'{hint}<div class="scroll" tabindex="0"><table{_class(kind)}><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _class(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""


KINDS = {
    "wins": ("Wins", "wrong in the base, right in the merged student"),
    "losses": ("Losses", "right in the teacher, wrong in the merged student"),
    "regressions": ("Regressions", "right in the base, wrong in the merged student"),
}
SIDES = {"base": "Base", "teacher": "Teacher", "merged": "Merged student"}


def answers(run: Run) -> str:
    """A block a domain; empty if the evaluation kept no answers."""
    return "".join(
        _domain_answers(name, found, run.teacher_word)
        for name, found in run.answers.items()
        if found.get("compared")
    )


def _domain_answers(name: str, found: dict[str, Any], teacher: str) -> str:
    counts = ", ".join(f"{found[kind]['count']} {KINDS[kind][0].lower()}" for kind in KINDS)
    note = f"First sampled answers to {found['compared']} held-out prompts: {counts}."
    sides = SIDES | {"teacher": teacher.capitalize()}
    rows = "".join(
        f"<h4>{label}: {escape(what.replace('teacher', teacher))}</h4>"
        + "".join(_example(row, sides) for row in found[kind]["shown"])
        for kind, (label, what) in KINDS.items()
        if found[kind]["shown"]
    )
    return f'<div class="answers"><h3>{escape(name)}</h3><p class="note">{escape(note)}</p>{rows}</div>\n'


def _example(row: dict[str, Any], sides: dict[str, str]) -> str:
    cells = [cell("Prompt", row["prompt"]), cell("Label", row["label"])]
    cells += [_answer(label, row[side]) for side, label in sides.items() if row.get(side)]
    return f'<dl class="answer">{"".join(cells)}</dl>\n'


def _answer(label: str, told: dict[str, Any]) -> str:
    sign, word = ("\u2713", "right") if told["right"] else ("\u2717", "wrong")
    ended = ", cut at the length limit" if told["cut"] else ""
    mark = f' <span class="{word}">{sign} {word}{ended}</span>'
    return cell(label, told["text"], mark)


def cell(label: str, text: str, mark: str = "") -> str:
    """A text under its name, beside others; `mark` is HTML."""
    shown = escape(str(text)) or '<i class="none">(empty)</i>'
    return f"<div><dt>{escape(label)}{mark}</dt><dd>{shown}</dd></div>"
