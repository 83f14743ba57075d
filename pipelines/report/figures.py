"""Select a run's charts: one function per section. Each leaves out metrics that the run did not log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opd.pipelines.evaluation.statistics import Interval, at_the_end
from opd.pipelines.records.stage_names import kind_of, split_round, stage_model
from opd.pipelines.report.charts import (
    MARKERS,
    Axis,
    Bar,
    Dot,
    Series,
    bar_chart,
    dot_chart,
    line_chart,
    series_role,
)
from opd.pipelines.report.display_text import (
    format_duration,
    join_items,
    model_label,
    percent,
    point_bounds,
    points,
    stage_label,
    teachers_label,
)
from opd.pipelines.report.results import ModelResult, Run, StageResult, stage_order
from opd.pipelines.report.verdict import compare_models

STILL = 0.02
"""A line whose values differ by no more than this share becomes text."""
KL_AT = "kl_at/"
"""Prefix of the merge's KL by position (`opd.train.distill_terms`)."""
PHASES = ("rollout", "score", "train", "sync", "evaluate")
ANY, ABOVE, LOG = Axis(), Axis(low=0), Axis(log=True)
SHARE, UNIT = Axis(percent=True, low=0), Axis(percent=True, low=0, high=1.02)
_TOKENS, _STEP = "student tokens", "step"
REWARD = "mean reward of the step\u2019s samples"


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart with its heading and a sentence about it."""

    title: str
    unit: str
    svg: str
    """Empty if every line has a single value. Then the caption gives it."""
    caption: str


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """Title, style and caption of a chart of lines."""

    title: str
    unit: str
    axis: Axis
    caption: str
    against: str = _TOKENS
    """The unit of its horizontal axis."""


HEALTH = {
    "length/mean": ("Response length", "tokens, mean", ABOVE, "Should settle as right answers do."),
    "episode/turns": ("Turns of an episode", "mean", ABOVE, "Should settle as success does."),
    "episode/done": ("Episodes that their environment ended", "share of episodes", UNIT,
        "The others met a limit of turns or tokens. Rises as the agent learns to come to an end."),
    "entropy": ("Entropy", "nats per token", ABOVE, "Falls as answers get certain; not at once."),
    "grad_norm": ("Gradient norm", "before clipping, log scale", LOG, "No spikes that stay."),
    "lr": ("Learning rate", "per step", ABOVE, "The schedule, as it was."),
    "frac_reward_zero_std": ("Groups without signal", "share of groups with equal rewards", UNIT,
        "They carry no policy gradient. Rises as a domain is solved."),
    "policy/clip_ratio": ("Clipped tokens", "share of tokens", SHARE, "Small, and not growing."),
    "mismatch/mean_abs": ("Engine against trainer", "mean |log-prob difference|, nats", LOG,
        "The two compute the same policy: rounding only, orders of magnitude below the KL."),
    "mismatch/ess": ("Effective sample size", "share of samples, engine to trainer", UNIT,
        "100 % when samples come from the policy being trained."),
    "sampling/kept": ("Tokens that top-p or top-k keeps", "mean number", ABOVE,
        "Falls as answers get certain. At 1 nothing is left to learn from."),
    "sampling/mass": ("Probability of what is kept", "trainer\u2019s, mean", UNIT,
        "About top-p or more. Far below it the trainer\u2019s policy is another than the one that wrote."),
    "sampling/masked": ("Tokens with a sampling mask", "share of tokens", UNIT,
        "100 % for what the student wrote, unless a cut keeps more than 1024 tokens."),
    "routing/load_max": ("Most loaded expert", "its load over the mean of its layer", ABOVE,
        "Near 1 if experts are used alike; the number of experts over those of a token if some get all."),
    "routing/dead": ("Experts without a token", "share of experts", SHARE, "Few, and not growing."),
    "align/exact": ("Tokens compared by class with another tokenizer\u2019s", "share of tokens", SHARE,
        "The rest is compared in chunks of equal bytes, or not at all."),
}  # fmt: skip
"""Metric -> (title, unit, axis, expected shape), of every specialist and the merge, against steps."""
SPECIALISTS = {
    "reward/mean": ChartSpec("Specialists: reward", REWARD, ANY,
        "Each line should rise and flatten; a specialist that stays low gives the merge a weak teacher."),
    "kl/mean": ChartSpec("Specialists: KL to their teachers", "nats per token", ANY,
        "Should fall beside a growing reward. One that grows: the rewards lead away from the teacher."),
}  # fmt: skip
MERGE_KL = ChartSpec("Merge: KL to each teacher", "nats per token, log scale", LOG,
    "Should fall for every teacher. One that stalls above the others is not being learned.")  # fmt: skip
RIVALS = ChartSpec("Merge and trained baselines", "mean reward over domains", ANY,
    "Higher and further left is better. Lines are cut at the merge\u2019s token budget.")  # fmt: skip
TAUGHT = ChartSpec("Demonstrations: loss", "cross-entropy, nats per token", ANY,
    "Should fall and flatten. It cannot reach zero when demonstrations disagree.", _STEP)  # fmt: skip
SHARES = {
    "token_share": ChartSpec("Token share", "share of the step\u2019s tokens", SHARE,
        "How the response tokens are spread.", _STEP),
    "grad_share": ChartSpec("Gradient share", "share of the gradient", SHARE,
        "Who pulls the student. A teacher near zero is ignored, or has nothing left to teach.", _STEP),
    "budget_weight": ChartSpec("Weights of domains", "share of the loss", SHARE,
        "What the budget decided. A line at its bound: the domain needs more than it may get.", _STEP),
    "budget_prompts": ChartSpec("Prompts of domains", "prompts a step", ABOVE,
        "What the budget decided.", _STEP),
    "budget_need": ChartSpec("Need of domains", "as the budget measures it", ABOVE,
        "What the budget decided by. The lines should come together.", _STEP),
}  # fmt: skip
OVERLAID = {
    "reward/mean": ("reward", REWARD, ANY, _TOKENS),
    "kl/mean": ("KL to the teachers", "nats per token, log scale", LOG, _TOKENS),
    "loss/ce": ("loss", "cross-entropy, nats per token", ANY, _STEP),
    "length/mean": ("response length", "tokens, mean", ABOVE, _TOKENS),
    "entropy": ("entropy", "nats per token", ABOVE, _TOKENS),
}
"""Metric -> (title, unit, axis, horizontal axis) of comparisons of runs."""


@dataclass(frozen=True, slots=True)
class Cue:
    """The look of one domain, teacher or stage in every chart."""

    label: str
    role: str
    marker: str


class ChartCues:
    """One colour and marker per domain and teacher, the same in every chart. The merge is ink."""

    def __init__(self, run: Run) -> None:
        merge = run.merge
        teachers = [*run.teachers, *(merge.names_under("kl/") if merge else [])]
        names = [name for name in dict.fromkeys([*run.domains, *teachers]) if name != "mean"]
        self._cues = {
            name: Cue(name, series_role(index), MARKERS[index % len(MARKERS)])
            for index, name in enumerate(names)
        }

    def cue_of(self, name: str) -> Cue:
        return self._cues.get(name, Cue(name, "ink", "o"))

    def all(self) -> list[Cue]:
        return list(self._cues.values())


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """Charts under one heading and one legend."""

    title: str
    panels: list[Panel]
    cues: list[Cue]
    intro: str = ""


def chart_groups(run: Run, cues: ChartCues) -> list[ChartGroup]:
    """Return the charts of training. Charts of progress come first. Some groups may be empty."""
    merge = [Cue("merge", "ink", "o")] if run.merge else []
    trained = [Cue(line.label, line.role, line.marker) for line in merge_and_baselines(run, cues)[1:]]
    return [
        ChartGroup(
            "Learning curves",
            learning_panels(run, cues),
            [*cues.all(), *merge, *trained],
            "Thin lines are single steps, thick ones a moving mean over nine points. The mark at the right"
            " is the mean of the last steps, the number below a chart.",
        ),
        ChartGroup("Teachers", teacher_panels(run, cues), cues.all()),
        ChartGroup("Lengths and training health", health_panels(run, cues), [*cues.all(), *merge]),
        ChartGroup(
            "Prompts by difficulty",
            difficulty_panels(run, cues),
            cues.all(),
            "What the model that a specialist starts from answered to its training prompts, before it"
            " learned.",
        ),
    ]


def learning_panels(run: Run, cues: ChartCues) -> list[Panel]:
    """Return reward, KL and loss against student tokens (supervised warm-up: against steps)."""
    specialists = [stage for stage in run.stages if kind_of(stage.name) == "specialist"]
    panels = [
        _metric_panel(spec, [(stage, key, _stage_cue(cues, stage)) for stage in specialists])
        for key, spec in SPECIALISTS.items()
    ]
    merge = run.merge
    if merge:
        kinds = [name for name in merge.names_under("kl/") if name not in ("mean", "floor")]
        panels.append(_metric_panel(MERGE_KL, [(merge, f"kl/{name}", cues.cue_of(name)) for name in kinds]))
        trained = run.config.get("distill", {}).get("rl_coef", 0.0) > 0
        caption = "Every domain should climb together." + (
            "" if trained else " Not trained on: it only watches."
        )
        prefix = "accuracy/" if merge.names_under("accuracy/") else "reward/"
        unit = "share of right answers" if prefix == "accuracy/" else REWARD
        spec = ChartSpec(f"Merge: {prefix.rstrip('/')} by domain", unit, ANY, caption)
        kinds = [name for name in merge.names_under(prefix) if name in run.domains]
        panels.append(_metric_panel(spec, [(merge, f"{prefix}{name}", cues.cue_of(name)) for name in kinds]))
    rivals = merge_and_baselines(run, cues)
    panels.append(_draw_panel(RIVALS, rivals) if len(rivals) > 1 else None)
    taught = [stage for stage in run.stages if kind_of(stage.name) in ("base", "sft", "specialist")]
    panels.append(_metric_panel(TAUGHT, [(stage, "loss/ce", _stage_cue(cues, stage)) for stage in taught]))
    return [panel for panel in panels if panel]


def teacher_panels(run: Run, cues: ChartCues) -> list[Panel]:
    """Return each teacher's share of the merge's tokens and of its gradient."""
    merge = run.merge
    if not merge:
        return []
    panels = [_by_position(merge)]
    for prefix, spec in SHARES.items():
        names = merge.names_under(f"{prefix}/")
        panels.append(_metric_panel(spec, [(merge, f"{prefix}/{name}", cues.cue_of(name)) for name in names]))
    return [panel for panel in panels if panel]


def _by_position(merge: StageResult) -> Panel | None:
    """Return KL against the position in the response, at the beginning of the merge and at its end."""
    names = merge.names_under(KL_AT)
    positions = sorted(int(name) for name in names if name.isdecimal() and len(name) < 12)
    columns = [merge.column_values(f"{KL_AT}{position}")[2] for position in positions]
    if len(positions) < 2 or min(map(len, columns)) < 2:
        return None
    names = [f"{first}\u2013{2 * first - 1}" if first > 1 else "1" for first in positions]
    count = at_the_end(columns[0])[1]
    x, axis = list(range(len(positions))), Axis(log=True, names=names)
    lines = []
    for label, role, y in (
        (f"first {count} steps", "rest", [sum(column[:count]) / len(column[:count]) for column in columns]),
        (f"last {count} steps", "ink", [at_the_end(column)[0] for column in columns]),
    ):
        if min(y) > 0:
            lines.append(Series(label, x, y, role, "o" if role == "ink" else "s", y[-1:]))
    if not lines:
        return None
    description = "; ".join(
        f"{line.label}: "
        + ", ".join(f"{n}\u00a0{axis.format_value(v)}" for n, v in zip(names, line.y, strict=True))
        for line in lines
    )
    caption = (
        f"Grey: the first {count} steps; black: the last. A student that drifts shows at late places first."
    )
    svg = line_chart("KL by position", lines, axis, "response token number", description)
    return Panel("KL by position", "nats per token, log scale", svg, caption)


def health_panels(run: Run, cues: ChartCues) -> list[Panel]:
    """Return metrics that tell a healthy run from a broken one, for every specialist and the merge."""
    stages = [stage for stage in run.stages if kind_of(stage.name) in ("specialist", "merge")]
    panels = []
    for key, (title, unit, axis, caption) in HEALTH.items():
        spec = ChartSpec(title, unit, axis, caption, against=_STEP)
        panels.append(_metric_panel(spec, [(stage, key, _stage_cue(cues, stage)) for stage in stages]))
    return [panel for panel in [*panels, answer_lengths(run, cues)] if panel]


def difficulty_panels(run: Run, cues: ChartCues) -> list[Panel]:
    """Return a histogram for each domain whose specialist measured its training prompts before training."""
    panels = []
    for domain, measured in run.difficulty.items():
        bars = [
            Bar(name, str(count), [(cues.cue_of(domain).role, float(count))])
            for name, count in measured["histogram"].items()
        ]
        caption = (
            f"Of {measured['prompts']} prompts {measured['kept']} were trained on; {measured['too_hard']}"
            f" were too hard and {measured['too_easy']} too easy. Right answers:"
            f" {percent(measured['pass_at_1'])}."
        )
        svg = bar_chart(f"Right answers to each prompt: {domain}", bars, "prompts", caption)
        panels.append(Panel(f"{domain}: right answers to each prompt", "prompts", svg, caption))
    return panels


def answer_lengths(run: Run, cues: ChartCues) -> Panel | None:
    """Return the lengths of held-out answers, by domain: base, the domain's teacher, merged student."""
    dots = []
    base, merged = run.model("base"), run.model("merged")
    for domain in run.domains:
        sides = (
            ("base", base, "muted"),
            ("teacher", run.best_teacher(domain), "muted"),
            ("merged", merged, "ink"),
        )
        for label, model, role in sides:
            quantiles = model.lengths.get(domain) if model else None
            if quantiles:
                low, middle, high, longest = (quantiles[key] for key in ("p10", "p50", "p90", "max"))
                note = f"{middle:g} ({low:g}\u2013{high:g}, at most {longest:g})"
                parts = [(cues.cue_of(domain).role, cues.cue_of(domain).marker, longest)]
                dots.append(Dot(f"{domain}, {label}", note, Interval(middle, low, high), parts, role))
    if not dots:
        return None
    if len({dot.note for dot in dots}) == 1:
        return Panel("Length of held-out answers", "tokens", "", f"{dots[0].note} tokens everywhere")
    description = "; ".join(f"{dot.label}: {dot.note}" for dot in dots)
    svg = dot_chart("Length of held-out answers", dots, "tokens", lambda value: f"{value:g}", description)
    caption = "Tick: median; line: from the shortest tenth to the longest; mark: the longest answer."
    return Panel("Length of held-out answers", "tokens, sampled", svg, caption)


def time_per_phase(run: Run) -> Panel | None:
    """Return stacked bars: seconds of every stage by phase."""
    bars = []
    for stage in run.stages:
        if stage.seconds <= 0:
            continue
        parts = [(cue.role, stage.phases.get(cue.label, 0.0)) for cue in phase_cues(run)[:-1]]
        other = max(0.0, stage.seconds - sum(seconds for _, seconds in parts))
        bars.append(Bar(stage_label(stage.name), format_duration(stage.seconds), [*parts, ("rest", other)]))
    if not bars:
        return None
    caption = (
        "Where the time goes. Stages may have run side by side, so the bars need not add up to the wall time."
    )
    description = ", ".join(f"{bar.label} {bar.note}" for bar in bars)
    return Panel(
        "Time per phase", "seconds", bar_chart("Time per phase", bars, "seconds", description), caption
    )


KINDS = (
    ("trainer_weights", "trainer: weights"),
    ("trainer_gradients", "gradients"),
    ("trainer_moments", "AdamW\u2019s moments"),
    ("engine_weights", "engine: weights"),
    ("engine_kv", "keys and values"),
    ("teacher_weights", "teachers: layers"),
    ("teacher_heads", "heads"),
    ("hidden_states", "hidden states"),
)
"""Kinds of memory, with their labels."""
_MIB = 1 << 20


def memory_per_phase(run: Run) -> Panel | None:
    """Return stacked bars: maximum memory of the merge and the largest specialist in each phase of a step."""
    stages = [stage for stage in run.stages if stage.held]
    merges = [stage for stage in stages if stage is run.merge]
    others = [stage for stage in stages if kind_of(stage.name) == "specialist"]
    others.sort(key=lambda stage: -max(sum(sizes.values()) for sizes in stage.held.values()))
    bars = []
    for stage in [*merges, *others[:1]] or stages[:1]:
        for phase in [name for name in PHASES if name in stage.held]:
            sizes = stage.held[phase]
            parts = [(series_role(i), sizes.get(kind, 0.0) / _MIB) for i, (kind, _) in enumerate(KINDS)]
            note = f"{sum(sizes.values()) / _MIB:,.4g} MiB"
            bars.append(Bar(f"{stage_label(stage.name)}: {phase}", note, parts))
    if not bars:
        return None
    description = ", ".join(f"{bar.label} {bar.note}" for bar in bars)
    caption = (
        "The most that each phase of a step held at once, of one process. What passes by (activations,"
        " logits) is not counted."
    )
    return Panel("Memory by phase", "MiB", bar_chart("Memory by phase", bars, "MiB", description), caption)


def kind_cues() -> list[Cue]:
    """Return the legend of the memory chart."""
    return [Cue(words, series_role(i), "block") for i, (_, words) in enumerate(KINDS)]


def phase_cues(run: Run) -> list[Cue]:
    """Return the legend of the time chart: the phases with time in some stage, and the rest."""
    timed = {phase for stage in run.stages for phase, seconds in stage.phases.items() if seconds > 0}
    names = [*PHASES, *sorted(timed - set(PHASES))]
    cues = [Cue(name, series_role(i), "block") for i, name in enumerate(names) if name in timed]
    return [*cues, Cue("other", "rest", "block")]


def gaps(run: Run, models: Sequence[ModelResult], cues: ChartCues) -> Panel | None:
    """Return every other fully measured model against the merged student, the best on top. The base is far
    behind as it should be, so it appears only if there is nothing else.
    """
    merged = run.model("merged")
    if merged is None or not set(run.domains) <= set(merged.sampled):
        return None
    teachers = best_accuracies(run)
    others = [model for model in models if model.kind == "baseline"]
    if teachers:
        others.append(ModelResult(teachers_label(run.teacher_word), "specialist", dict(teachers), {}, {}))
    base = run.model("base")
    if base and not others:
        others.append(base)
    dots = []
    for model in others:
        gap = compare_models(run, merged, model)
        if gap is None or not set(run.domains) <= set(model.sampled):
            continue
        mean = Interval(-gap.gap.value, -gap.gap.high, -gap.gap.low)
        marks = [
            (
                cues.cue_of(d).role,
                cues.cue_of(d).marker,
                model.sampled[d].interval.value - merged.sampled[d].interval.value,
            )
            for d in run.domains
        ]
        label = model.name if model.kind == "specialist" else model_label(model.name)
        dots.append(
            Dot(label, points(mean.value), mean, marks, "ink" if gap.outcome == "behind" else "muted")
        )
    if not dots:
        return None
    dots.sort(key=lambda dot: -dot.mean.value)
    description = "; ".join(f"{dot.label}: {dot.note} ({point_bounds(dot.mean)})" for dot in dots)
    title = "Against the merged student"
    svg = dot_chart(title, dots, "points of sampled accuracy", points, description)
    caption = (
        "Left of the line: worse than the merged student. Tick: mean; line: its "
        f"{percent(run.confidence, 0)} interval. Small marks: single domains."
    )
    return Panel(title, "mean over domains, points", svg, caption)


def overlay_panels(
    runs: Sequence[tuple[str, Run]], keys: Sequence[str] = (), stages: str = ""
) -> list[Panel]:
    """Return several runs in one chart for each stage and each of `OVERLAID`. With `keys` only these metrics,
    with `stages` only stages with this prefix.
    """
    panels: list[Panel | None] = []
    names = dict.fromkeys(stage.name for _, run in runs for stage in run.stages)
    cues = run_cues([label for label, _ in runs])
    for name in sorted((name for name in names if name.startswith(stages)), key=stage_order):
        drawn = [(stage, cue) for cue, (_, run) in zip(cues, runs, strict=True) if (stage := run.stage(name))]
        for key in keys or OVERLAID:
            metric, unit, axis, against = OVERLAID[key]
            spec = ChartSpec(f"{stage_label(name)}: {metric}", unit, axis, "A line a run.", against)
            panels.append(_metric_panel(spec, [(stage, key, cue) for stage, cue in drawn]))
    return [panel for panel in panels if panel]


def run_cues(labels: Sequence[str]) -> list[Cue]:
    """Return the look of compared runs."""
    return [Cue(label, series_role(i), MARKERS[i % len(MARKERS)]) for i, label in enumerate(labels)]


def best_accuracies(run: Run) -> list:
    """Return (domain, accuracy of its own teacher) if every domain has an evaluated one, else nothing."""
    pairs = [(domain, run.best_teacher(domain)) for domain in run.domains]
    accuracies = [(domain, teacher.sampled[domain]) for domain, teacher in pairs if teacher]
    return accuracies if len(accuracies) == len(run.domains) else []


def merge_and_baselines(run: Run, cues: ChartCues) -> list[Series]:
    """Return mean rewards of the merge and of the baselines trained on rewards, up to its token budget."""
    merge = run.merge
    line = _metric_line(merge, "reward/mean", cues.cue_of("merge")) if merge else None
    if line is None:
        return []
    lines = [line]
    baselines = [stage for stage in run.stages if kind_of(stage.name) == "baseline"]
    for index, stage in enumerate(baselines, start=len(run.domains)):  # their cues follow the domains'
        cue = Cue(stage_label(stage.name), series_role(index), MARKERS[index % len(MARKERS)])
        other = _metric_line(stage, "reward/mean", cue)
        count = sum(tokens <= 1.02 * line.x[-1] for tokens in other.x) if other else 0
        if other is not None and count > 1:
            lines.append(Series(other.label, other.x[:count], other.y[:count], other.role, other.marker))
    return lines


def _metric_line(stage: StageResult, key: str, cue: Cue, against: str = _TOKENS) -> Series | None:
    """Return a metric's line, `None` with fewer than two values, or no tokens to draw them against."""
    steps, tokens, values = stage.column_values(key)
    x = tokens if against == _TOKENS else steps
    if len(values) < 2 or x[-1] <= x[0]:
        return None
    return Series(cue.label, x, values, cue.role, cue.marker)


def _metric_panel(spec: ChartSpec, metrics: Sequence[tuple[StageResult, str, Cue]]) -> Panel | None:
    """Draw metrics of stages, each by its key and cue. `None` if none was logged."""
    return _draw_panel(spec, [line for metric in metrics if (line := _metric_line(*metric, spec.against))])


def _draw_panel(spec: ChartSpec, lines: Sequence[Series]) -> Panel | None:
    """Draw `lines`, or return `None` without any. A log axis drops values that it cannot show. Lines that
    stay within `STILL`, or are one value at the displayed precision, become text.
    """
    axis, drawn, is_constant = spec.axis, [], True
    for line in lines:
        if axis.log:
            shown = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y > 0]
            line = replace(line, x=[x for x, _ in shown], y=[y for _, y in shown], all_values=line.y)
        if len(line.y) > 1:
            drawn.append(line)
            low, high = min(line.y), max(line.y)
            is_still = high - low <= STILL * max(abs(low), abs(high))
            is_constant &= is_still or axis.format_value(low) == axis.format_value(high)
    if not drawn:
        return None
    ends = [axis.format_value(line.end_mean[0]) for line in drawn]
    if is_constant:
        each = [f"{line.label} {end}" for line, end in zip(drawn, ends, strict=True)]
        return Panel(spec.title, spec.unit, "", ends[0] if len({*ends}) == 1 else join_items(each))
    counts = {line.end_mean[1] for line in drawn}
    span = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    where = "At the last step" if counts == {1} else f"Mean of the last {span} steps"
    listed = ", ".join(f"{line.label}\u00a0{end}" for line, end in zip(drawn, ends, strict=True))
    description = f"{where}: {listed}."
    svg = line_chart(spec.title, drawn, axis, spec.against, description)
    return Panel(spec.title, spec.unit, svg, f"{spec.caption} {description}")


def _stage_cue(cues: ChartCues, stage: StageResult) -> Cue:
    """Return the cue of a stage's domain, or of the stage if it has none."""
    name, number = split_round(stage.name)
    cue = cues.cue_of(stage_model(name).partition(":")[2] or name)
    return cue if number == 1 else replace(cue, label=f"{cue.label}, round {number}")
