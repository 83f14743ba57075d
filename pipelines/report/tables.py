"""Build the tables of the pages as text. `templates/macros.html` draws them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from opd.pipelines.evaluation.statistics import Interval, mean_accuracy, mean_difference
from opd.pipelines.report.display_text import (
    DASH,
    NARROW,
    amount,
    format_bounds,
    format_duration,
    model_label,
    percent,
    point_bounds,
    points,
    stage_label,
    teachers_label,
)
from opd.pipelines.report.figures import ChartCues, best_accuracies
from opd.pipelines.report.results import DomainAccuracy, ModelResult, Run
from opd.pipelines.report.verdict import compare_models


@dataclass(frozen=True, slots=True)
class Cell:
    """A text, with a small one below it."""

    text: str
    small: str = ""
    kind: str = ""
    """A class of the style sheet. `heat` shades by the number, `text` is for words, `code` for a name."""
    title: str = ""


EMPTY = Cell(DASH, kind="none")


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: str = ""
    role: str = ""
    """Colour of a dot before the name, "" for none."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row behind its label."""

    label: str
    cells: Sequence[Cell]
    kind: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    first: str | None = ""
    """The head above the labels. `None`: the rows have no labels."""
    kind: str = ""
    groups: Sequence[tuple[str, int, str]] = field(default_factory=list)
    """(name, columns, kind) of heads above adjacent columns."""


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | None:
    """Return a table of texts, the first of each row its label. `None` without rows."""
    table_rows = [TableRow(label, [Cell(text) for text in texts]) for label, *texts in rows]
    return Table([Column(name) for name in head[1:]], table_rows, head[0]) if rows else None


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
    "rollout/received_bytes": "Weights that servers took, each counted",
}
SECONDS = {"stall_seconds": "Waited for layers and heads", "rollout/log_seconds": "Waited for the log"}


WAITED = re.compile(r"teacher/(?P<teacher>.+)/wait_seconds")


def counter_rows(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of every counter that is not 0, in a fixed order, those without a label last."""
    merge = run.merge
    phases = merge.phases if merge else {}
    steps = sum(seconds for phase, seconds in phases.items() if phase != "evaluate")
    labelled = [*COUNTS, *BYTES, *SECONDS]
    for name in [*labelled, *(name for name in run.counters if name not in labelled)]:
        value = run.counters.get(name, 0)
        if not value:
            continue
        if name in COUNTS:
            yield COUNTS[name], amount(value)
        elif name in BYTES:
            yield BYTES[name], f"{amount(value)}B"
        elif name in SECONDS:
            phase = "rollout" if name.startswith("rollout/") else "score"
            total = phases.get(phase, 0.0)
            share = f" ({percent(value / total)} of {phase})" if total > 0 else ""
            yield SECONDS[name], format_duration(value) + share
        elif match := WAITED.fullmatch(name):
            share = f" ({percent(value / steps)} of the steps)" if steps > 0 else ""
            yield f"Waited for teacher {match['teacher']}", format_duration(value) + share
        else:
            yield name.replace("_", " ").replace("/", ": "), f"{value:,.6g}".replace(",", NARROW)


def ordered(run: Run) -> list[ModelResult]:
    """Return models in the report's order: base, specialists, merged, then the baselines, the best first."""
    ranks = {"base": 0, "specialist": 1, "teacher": 1, "merged": 2}

    def model_rank(model: ModelResult) -> tuple[int, float]:
        rank = ranks.get(model.kind, 3)
        if rank < 3 or not model.sampled:
            return rank, 0.0
        return rank, -mean_accuracy(model.sampled_counts(list(model.sampled))).value

    return sorted(run.models, key=model_rank)


def accuracy_table(run: Run, cues: ChartCues) -> Table:
    """Return models x domains: sampled accuracy with its interval as a heat map, greedy accuracy beside."""
    several = len(run.domains) > 1
    greedy = any(model.greedy for model in run.models)
    names = [Column(domain, "name", cues.cue_of(domain).role) for domain in run.domains]
    names += [Column("mean", "name")] if several else []
    groups, columns = [("Sampled, % right", len(names), "")], list(names)
    if greedy and names:
        groups.append(("Greedy, % right", len(names), "gap"))
        columns += [Column(names[0].name, "name gap", names[0].role), *names[1:]]
    rows = []
    for model in ordered(run):
        cells = [
            _accuracy_cell(model.sampled.get(d), " own" * (run.best_teacher(d) is model)) for d in run.domains
        ]
        cells += [_mean_cell(run, model.sampled, _shaded_cell)] if several else []
        if greedy:
            for index, domain in enumerate(run.domains):
                accuracy = model.greedy.get(domain)
                text = _format_tenth(accuracy.interval) if accuracy else DASH
                cells.append(Cell(text, kind="" if index else "gap"))
            if several:
                cells.append(_mean_cell(run, model.greedy, lambda mean: Cell(_format_tenth(mean))))
        rows.append(_model_row(model, cells))
    return Table(columns, rows, kind="heat", groups=groups)


def alternatives_table(run: Run) -> Table | None:
    """Return every other model beside the merged one: mean, gap to it, tokens, time, settings."""
    merged, rows = run.model("merged"), []
    for model in ordered(run):
        shared = [domain for domain in run.domains if domain in model.sampled]
        if model.is_teacher or not shared:
            continue
        settings = ", ".join(f"{key} {_format_setting(value)}" for key, value in model.settings.items())
        cells = _merged_comparison(run, model, shared, model is not merged)
        rows.append(
            _model_row(
                model,
                [*cells, *_cost_cells(model.student_tokens, model.seconds), Cell(settings, kind="text")],
            )
        )
    accuracies = dict(best_accuracies(run))
    if accuracies:
        teachers = [model for model in run.models if model.is_teacher]
        tokens, seconds = (
            sum(getattr(one, key) for one in teachers) for key in ("student_tokens", "seconds")
        )
        teacher = ModelResult(teachers_label(run.teacher_word), "specialist", accuracies, {}, {})
        is_complete = merged is not None and set(run.domains) <= set(merged.sampled)
        cells = [*_merged_comparison(run, teacher, run.domains, is_complete), *_cost_cells(tokens, seconds)]
        cells.append(Cell("sum of all" if tokens else "", kind="text"))
        rows.insert(1, TableRow(teacher.name, cells, "is-specialist"))
    names = ("Mean sampled, %", "Merged ahead by, points", "Student tokens", "Time")
    return Table([*map(Column, names), Column("Settings", "text")], rows, "Model") if rows else None


def rounds_table(run: Run, cues: ChartCues) -> Table | None:
    """Return base, specialists (each on its own domains) and student of each round: accuracy by domain, the
    student's also against the one before it, with the tokens so far. `None` for a recipe of one round.
    """
    if not run.rounds:
        return None
    rows, before = [], run.model("base")
    if before is not None:
        rows.append(_model_row(before, [*_round_cells(run, before, None), EMPTY]))
    for one in run.rounds:
        best = {domain: run.best_teacher(domain) for domain in run.domains}
        found = {d: model for d, teacher in best.items() if teacher and (model := one.model(teacher.name))}
        own = {domain: model.sampled[domain] for domain, model in found.items()}
        together = ModelResult(f"Specialists, round {one.number}", "specialist", own, {}, {})
        student = one.model("merged")
        tokens = sum(model.student_tokens for model in one.models if model.is_teacher)
        rows.append(_model_row(together, [*_round_cells(run, together, before), Cell(amount(tokens))]))
        if student is not None:
            total = Cell(amount(tokens + student.student_tokens))
            label = ModelResult(f"merged+{one.number}", "merged", student.sampled, {}, {})
            rows.append(_model_row(label, [*_round_cells(run, label, before), total]))
        before = student
    columns = [Column(domain, "name", cues.cue_of(domain).role) for domain in run.domains]
    return Table([*columns, Column("mean", "name"), Column("Tokens so far")], rows, "Model")


def _round_cells(run: Run, model: ModelResult, before: ModelResult | None) -> list[Cell]:
    """Return accuracies by domain and their mean, each with its change from `before` in points below it."""
    cells = []
    for domains in [*([domain] for domain in run.domains), run.domains]:
        if not set(domains) <= set(model.sampled):
            cells.append(EMPTY)
            continue
        counts, change = model.sampled_counts(domains), ""
        if before is not None and set(domains) <= set(before.sampled):
            gap = mean_difference(counts, before.sampled_counts(domains), run.confidence)
            change = f"{points(gap.value)} ({point_bounds(gap)})"
        cells.append(Cell(_format_tenth(mean_accuracy(counts, run.confidence)), change))
    return cells


def _merged_comparison(run: Run, model: ModelResult, domains: Sequence[str], gap: bool) -> list[Cell]:
    """Return its mean over `domains`, and, with `gap`, the lead of the merged student."""
    mean = mean_accuracy(model.sampled_counts(domains), run.confidence)
    merged = run.model("merged")
    comparison = compare_models(run, merged, model) if merged and gap else None
    ahead = Cell(points(comparison.gap.value), point_bounds(comparison.gap)) if comparison else EMPTY
    return [_interval_cell(mean), ahead]


def _cost_cells(tokens: int, seconds: float) -> list[Cell]:
    return [Cell(amount(tokens)) if tokens else EMPTY, Cell(format_duration(seconds)) if seconds else EMPTY]


def recovery_table(run: Run, cues: ChartCues) -> Table | None:
    """Return (student - base) / (teacher - base) per model and domain, `None` if nothing was measured."""
    rows = []
    for model in ordered(run):
        recovered = run.recovery.get(model.name)
        if recovered:
            cells = [_interval_cell(recovered[d]) if d in recovered else EMPTY for d in run.domains]
            rows.append(_model_row(model, cells))
    columns = [Column(domain, "name", cues.cue_of(domain).role) for domain in run.domains]
    return Table(columns, rows, "Model") if rows else None


def teachers_table(run: Run, cues: ChartCues) -> Table | None:
    """Return final KL, token share and gradient share of each teacher."""
    rows = []
    for name, values in run.teachers.items():
        kl, *shares = (values.get(key) for key in ("kl", "token_share", "grad_share"))
        cells = [EMPTY if kl is None else Cell(f"{kl:.4f}")]
        cells += [EMPTY if share is None else Cell(f"{100 * share:.1f}") for share in shares]
        rows.append(TableRow(name, cells, "name", cues.cue_of(name).role))
    names = ("KL, nats per token", "Tokens, %", "Gradient, %")
    return Table([*map(Column, names)], rows, "Teacher") if rows else None


def models_table(run: Run) -> Table | None:
    """Return the folder of each model, and the digest of its weights."""
    rows = []
    for name, files in run.folders.items():
        digest = files.get("digest", "")
        cells = [Cell(files["folder"], kind="text code"), Cell(digest[:16], kind="text code", title=digest)]
        rows.append(TableRow(model_label(name), cells))
    return Table([Column("Folder", "text"), Column("Digest", "text")], rows) if rows else None


def stages_table(run: Run) -> Table | None:
    """Return time, steps, tokens and memory of each stage."""
    rows = []
    for stage in run.stages:
        tokens, memory = stage.student_tokens, stage.peak_rss_mb
        rate = tokens / stage.seconds if stage.seconds > 0 else 0
        cells = [
            Cell(format_duration(stage.seconds)),
            Cell(str(stage.steps)) if stage.steps else EMPTY,
            *(Cell(amount(number)) if number else EMPTY for number in (tokens, rate)),
            Cell(f"{memory:,.0f}".replace(",", NARROW)) if memory else EMPTY,
        ]
        rows.append(TableRow(stage_label(stage.name), cells))
    names = ("Time", "Steps", "Student tokens", "Tokens/s", "Peak memory, MB")
    return Table([*map(Column, names)], rows, "Stage") if rows else None


def counters_table(run: Run) -> Table | None:
    """Return counters of the merge: teachers, stores, rollouts and their log."""
    return plain_table(["Counter", "Value"], list(counter_rows(run)))


def sets_table(run: Run) -> Table | None:
    """Return models x evaluation sets: sampled accuracy with its interval, `None` without sets."""
    rows = [
        _model_row(model, [_accuracy_cell(model.sets.get(name)) for name in run.sets])
        for model in ordered(run)
        if model.sets
    ]
    return Table([Column(name, "name") for name in run.sets], rows, kind="heat") if rows else None


def several_tables(run: Run) -> Iterator[tuple[str, Table]]:
    """Yield models x pass@k and maj@k for every domain and set with several answers to each prompt."""
    for name in [*run.domains, *run.sets]:
        measured = [model for model in ordered(run) if name in model.several]
        keys = list(dict.fromkeys(key for model in measured for key in model.several[name]))
        rows = []
        for model in measured:
            intervals = model.several[name]
            rows.append(
                _model_row(
                    model, [_shaded_cell(intervals[key]) if key in intervals else EMPTY for key in keys]
                )
            )
        if keys:
            yield name, Table([Column(key, "name") for key in keys], rows, kind="heat")


_EPISODES = ("Success, %", "Turns", "Done, %", "Reward", "Calls", "Broken calls")
_SINGLE = ("Task", "Right", "Turns", "End", "Reward of each turn", "Calls", "Broken calls")
_TASK = 160
"""Characters of a task shown beside its episode."""


def episodes_tables(run: Run) -> Iterator[tuple[str, Table, str, Table]]:
    """Yield tables of episodes for every domain and set with an environment. Each has the name, models x
    statistics of their episodes, and a model's name with a few of its episodes. That model is the merged
    student if there is one.
    """
    for name in [*run.domains, *run.sets]:
        models = [model for model in ordered(run) if name in model.episodes]
        if not models:
            continue
        last = next((one for one in models if one.name == "merged"), models[-1])
        rows, single = [], []
        for model in models:
            episodes, right = model.episodes[name], (model.sampled | model.sets)[name].count
            done = 100 * episodes["ended"]["done"] / episodes["count"]
            cells = [Cell(f"{value:.1f}") for value in (100 * right.accuracy, episodes["turns"], done)]
            cells += [Cell(f"{episodes[key]:.2f}") for key in ("reward", "calls", "broken_calls")]
            rows.append(_model_row(model, cells))
        for episode in last.episodes[name]["shown"]:
            prompt = str(episode["prompt"])
            prompt = prompt if len(prompt) <= _TASK else f"{prompt[:_TASK]} \u2026"
            rewards = " ".join(f"{float(one):g}" for one in episode["rewards"]) or DASH
            texts = [prompt, "yes" if episode["right"] else "no", episode["turns"], episode["ended"], rewards]
            texts += [episode["calls"], episode["broken_calls"]]
            single.append(TableRow("", [Cell(str(text), kind="text") for text in texts]))
        yield (
            name,
            Table([Column(head, "name") for head in _EPISODES], rows, kind="heat"),
            model_label(last.name),
            Table([Column(head, "text") for head in _SINGLE], single, first=None),
        )


def contamination_table(run: Run) -> Table | None:
    """Return domain or set -> evaluation prompts in training texts, and an example. `None`: not compared."""
    rows = []
    for name, matches in run.contamination.get("found", {}).items():
        count, prompts = int(matches["contaminated"]), int(matches["prompts"])
        cells = [Cell(f"{prompts}"), Cell(f"{count}")]
        cells.append(Cell(f"{100 * count / prompts:.1f}") if prompts else EMPTY)
        example = matches["examples"][0] if matches["examples"] else None
        example_text = f"\u201c{example['shared']}\u201d: {example['where']}" if example else ""
        rows.append(TableRow(name, [*cells, Cell(example_text, kind="text")]))
    columns = [*map(Column, ("Prompts", "Found", "%")), Column("Example, and where it stands", "text")]
    return Table(columns, rows) if rows else None


def _model_row(model: ModelResult, cells: Sequence[Cell]) -> TableRow:
    return TableRow(model_label(model.name), cells, f"is-{model.kind}")


def _accuracy_cell(accuracy: DomainAccuracy | None, kind: str = "") -> Cell:
    return _shaded_cell(accuracy.interval, kind) if accuracy else EMPTY


def _shaded_cell(value: Interval, kind: str = "") -> Cell:
    """Return a share in %, shaded by its size, with its interval."""
    return Cell(_format_tenth(value), format_bounds(value), f"heat{kind}")


def _interval_cell(value: Interval) -> Cell:
    return Cell(_format_tenth(value), format_bounds(value))


def _format_tenth(value: Interval) -> str:
    return f"{100 * value.value:.1f}"


def _mean_cell(
    run: Run, accuracies: dict[str, DomainAccuracy], format_cell: Callable[[Interval], Cell]
) -> Cell:
    if not set(run.domains) <= set(accuracies):
        return EMPTY
    return format_cell(mean_accuracy([accuracies[domain].count for domain in run.domains], run.confidence))


def _format_setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
