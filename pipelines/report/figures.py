"""Which charts a run gets: one function per section, each leaving out what the run did not log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opd.pipelines.evaluation.statistics import Interval, at_the_end
from opd.pipelines.records.stage_names import kind_of
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
from opd.pipelines.report.load import ModelResult, Run, StageResult, stage_order
from opd.pipelines.report.verdict import compare
from opd.pipelines.report.words import (
    duration,
    listing,
    model_label,
    own_label,
    percent,
    point_bounds,
    points,
    stage_label,
)

STILL = 0.02
"""A line whose values differ by no more than this share is not drawn but told."""
KL_AT = "kl_at/"
"""Begins the name of the merge's KL at some positions (`opd.train.distill_terms`)."""
PHASES = ("rollout", "score", "train", "sync", "evaluate")
SHARE = Axis(percent=True, low=0)
UNIT = Axis(percent=True, low=0, high=1.02)

HEALTH = (
    ("length/mean", "Response length", "tokens, mean", Axis(low=0), "Should settle as right answers do."),
    ("episode/turns", "Turns of an episode", "mean", Axis(low=0), "Should settle as success does."),
    (
        "episode/done",
        "Episodes that their environment ended",
        "share of episodes",
        UNIT,
        "The others met a limit of turns or tokens. Rises as the agent learns to come to an end.",
    ),
    ("entropy", "Entropy", "nats per token", Axis(low=0), "Falls as answers get certain; not at once."),
    ("grad_norm", "Gradient norm", "before clipping, log scale", Axis(log=True), "No spikes that stay."),
    ("lr", "Learning rate", "per step", Axis(low=0), "The schedule, as it was."),
    (
        "frac_reward_zero_std",
        "Groups without signal",
        "share of groups with equal rewards",
        UNIT,
        "They carry no policy gradient. Rises as a domain is solved.",
    ),
    ("policy/clip_ratio", "Clipped tokens", "share of tokens", SHARE, "Small, and not growing."),
    (
        "mismatch/mean_abs",
        "Engine against trainer",
        "mean |log-prob difference|, nats",
        Axis(log=True),
        "The two compute the same policy: rounding only, orders of magnitude below the KL.",
    ),
    (
        "mismatch/ess",
        "Effective sample size",
        "share of samples, engine to trainer",
        UNIT,
        "100 % when samples come from the policy being trained.",
    ),
)
"""(key, title, unit, axis, what one should see)."""


OVERLAID = (
    ("reward/mean", "reward", "mean reward of the step\u2019s samples", Axis()),
    ("kl/mean", "KL to the teachers", "nats per token, log scale", Axis(log=True)),
    ("loss/ce", "loss", "cross-entropy, nats per token", Axis()),
    ("length/mean", "response length", "tokens, mean", Axis(low=0)),
    ("entropy", "entropy", "nats per token", Axis(low=0)),
)
"""(key, what it is, unit, axis) of what several runs are compared by while they train."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart with its heading and the sentence that says what to see in it."""

    title: str
    unit: str
    svg: str
    """Empty where every line is one value from beginning to end: then the caption says it."""
    caption: str


@dataclass(frozen=True, slots=True)
class Cue:
    """How one domain, teacher or stage looks in every chart."""

    label: str
    role: str
    marker: str


class Cues:
    """One colour and marker per domain and teacher, the same in every chart; ink for the merge."""

    def __init__(self, run: Run) -> None:
        merge = run.stage("merge")
        teachers = [*run.teachers, *(merge.names("kl/") if merge else [])]
        names = [name for name in dict.fromkeys([*run.domains, *teachers]) if name != "mean"]
        self._cues = {
            name: Cue(name, series_role(index), MARKERS[index % len(MARKERS)])
            for index, name in enumerate(names)
        }

    def of(self, name: str) -> Cue:
        return self._cues.get(name, Cue(name, "ink", "o"))

    def all(self) -> list[Cue]:
        return list(self._cues.values())


def learning(run: Run, cues: Cues) -> list[Panel]:
    """Reward, KL and loss against student tokens (supervised warm-up: against steps)."""
    panels = []
    lines = [_line(s, "reward/mean", cues.of(_short(s.name))) for s in run.stages if _is_specialist(s)]
    _add(
        panels,
        "Specialists: reward",
        "mean reward of the step\u2019s samples",
        lines,
        Axis(),
        "Each line should rise and flatten; a specialist that stays low gives the merge a weak teacher.",
    )
    lines = [_line(s, "kl/mean", cues.of(_short(s.name))) for s in run.stages if _is_specialist(s)]
    led = "Should fall beside a growing reward. One that grows: the rewards lead away from the teacher."
    _add(panels, "Specialists: KL to their teachers", "nats per token", lines, Axis(), led)
    merge = run.stage("merge")
    if merge:
        kinds = [name for name in merge.names("kl/") if name not in ("mean", "floor")]
        lines = [_line(merge, f"kl/{name}", cues.of(name)) for name in kinds]
        _add(
            panels,
            "Merge: KL to each teacher",
            "nats per token, log scale",
            lines,
            Axis(log=True),
            "Should fall for every teacher. One that stalls above the others is not being learned.",
        )
        trained = run.config.get("distill", {}).get("rl_coef", 0.0) > 0
        prefix = "accuracy/" if merge.names("accuracy/") else "reward/"
        kinds = [name for name in merge.names(prefix) if name in run.domains]
        lines = [_line(merge, f"{prefix}{name}", cues.of(name)) for name in kinds]
        unit = "share of right answers" if prefix == "accuracy/" else "mean reward of the step\u2019s samples"
        _add(
            panels,
            f"Merge: {prefix.rstrip('/')} by domain",
            unit,
            lines,
            Axis(),
            "Every domain should climb together." + ("" if trained else " Not trained on: it only watches."),
        )
    lines = merge_and_baselines(run, cues)
    if len(lines) > 1:
        note = "Higher and further left is better. Lines are cut at the merge\u2019s token budget."
        _add(panels, "Merge and trained baselines", "mean reward over domains", lines, Axis(), note)
    taught = [stage for stage in run.stages if kind_of(stage.name) in _TAUGHT]
    lines = [_line(s, "loss/ce", cues.of(_short(s.name)), against="step") for s in taught]
    note = "Should fall and flatten. It cannot reach zero when demonstrations disagree."
    _add(panels, "Demonstrations: loss", "cross-entropy, nats per token", lines, Axis(), note, x_label="step")
    return panels


def teachers(run: Run, cues: Cues) -> list[Panel]:
    """Each teacher's share of the merge's tokens and of its gradient."""
    merge = run.stage("merge")
    if not merge:
        return []
    panels = [panel for panel in [_by_position(merge)] if panel]
    for prefix, title, unit, caption in (
        (
            "token_share",
            "Token share",
            "share of the step\u2019s tokens",
            "How the response tokens are spread.",
        ),
        (
            "grad_share",
            "Gradient share",
            "share of the gradient",
            "Who pulls the student. A teacher near zero is ignored, or has nothing left to teach.",
        ),
    ):
        lines = [_line(merge, f"{prefix}/{n}", cues.of(n), against="step") for n in merge.names(f"{prefix}/")]
        _add(panels, title, unit, lines, SHARE, caption, x_label="step")
    return panels


def _by_position(merge: StageResult) -> Panel | None:
    """KL against the place in the response, at the beginning of the merge and at its end."""
    places = sorted(int(name) for name in merge.names(KL_AT))
    columns = [merge.column(f"{KL_AT}{place}")[2] for place in places]
    if len(places) < 2 or min(map(len, columns)) < 2:
        return None
    names = [str(place) if place == 1 else f"{place}\u2013{2 * place - 1}" for place in places]
    count = at_the_end(columns[0])[1]
    x, axis = list(range(len(places))), Axis(log=True, names=names)
    lines = []
    for label, role, y in (
        (f"first {count} steps", "rest", [sum(column[:count]) / len(column[:count]) for column in columns]),
        (f"last {count} steps", "ink", [at_the_end(column)[0] for column in columns]),
    ):
        if min(y) > 0:
            lines.append(Series(label, x, y, role, "o" if role == "ink" else "s", y[-1:]))
    if not lines:
        return None
    told = "; ".join(
        f"{line.label}: " + ", ".join(f"{n}\u00a0{axis.write(v)}" for n, v in zip(names, line.y, strict=True))
        for line in lines
    )
    caption = (
        f"Grey: the first {count} steps; black: the last. A student that drifts shows at late places first."
    )
    svg = line_chart("KL by position", lines, axis, "response token number", told)
    return Panel("KL by position", "nats per token, log scale", svg, caption)


def health(run: Run, cues: Cues) -> list[Panel]:
    """Numbers that tell a healthy run from a broken one, for every specialist and the merge."""
    stages = [stage for stage in run.stages if _is_specialist(stage) or stage.name == "merge"]
    panels: list[Panel] = []
    for key, title, unit, axis, caption in HEALTH:
        lines = [_line(stage, key, cues.of(_short(stage.name)), against="step") for stage in stages]
        _add(panels, title, unit, lines, axis, caption, x_label="step")
    panels += [panel for panel in [answer_lengths(run, cues)] if panel]
    return panels


def difficulty(run: Run, cues: Cues) -> list[Panel]:
    """A histogram for each domain whose specialist measured its training prompts before it learned."""
    panels = []
    for domain, found in run.difficulty.items():
        bars = [
            Bar(name, str(count), [(cues.of(domain).role, float(count))])
            for name, count in found["histogram"].items()
        ]
        told = (
            f"Of {found['prompts']} prompts {found['kept']} were trained on; {found['too_hard']} were too"
            f" hard and {found['too_easy']} too easy. Right answers: {percent(found['pass_at_1'])}."
        )
        svg = bar_chart(f"Right answers to each prompt: {domain}", bars, "prompts", told)
        panels.append(Panel(f"{domain}: right answers to each prompt", "prompts", svg, told))
    return panels


def answer_lengths(run: Run, cues: Cues) -> Panel | None:
    """How long held-out answers are, by domain: base, the domain's teacher, merged student."""
    dots = []
    base, merged = run.model("base"), run.model("merged")
    for domain in run.domains:
        sides = (
            ("base", base, "muted"),
            ("teacher", run.teacher(domain), "muted"),
            ("merged", merged, "ink"),
        )
        for label, model, role in sides:
            found = model.lengths.get(domain) if model else None
            if found:
                middle = Interval(found["p50"], found["p10"], found["p90"])
                note = f"{found['p50']:g} ({found['p10']:g}\u2013{found['p90']:g}, at most {found['max']:g})"
                parts = [(cues.of(domain).role, cues.of(domain).marker, found["max"])]
                dots.append(Dot(f"{domain}, {label}", note, middle, parts, role))
    if not dots:
        return None
    if len({dot.note for dot in dots}) == 1:
        return Panel("Length of held-out answers", "tokens", "", f"{dots[0].note} tokens everywhere")
    told = "; ".join(f"{dot.label}: {dot.note}" for dot in dots)
    svg = dot_chart("Length of held-out answers", dots, "tokens", lambda value: f"{value:g}", told)
    caption = "Tick: median; line: from the shortest tenth to the longest; mark: the longest answer."
    return Panel("Length of held-out answers", "tokens, sampled", svg, caption)


def time_per_phase(run: Run) -> Panel | None:
    """Stacked bars: seconds of every stage by phase."""
    bars = []
    for stage in run.stages:
        if stage.seconds <= 0:
            continue
        parts = [(cue.role, stage.phases.get(cue.label, 0.0)) for cue in phase_cues(run)[:-1]]
        rest = max(0.0, stage.seconds - sum(seconds for _, seconds in parts))
        bars.append(Bar(stage_label(stage.name), duration(stage.seconds), [*parts, ("rest", rest)]))
    if not bars:
        return None
    caption = (
        "Where the time goes. Stages may have run side by side, so the bars need not add up to the wall time."
    )
    told = ", ".join(f"{bar.label} {bar.note}" for bar in bars)
    return Panel("Time per phase", "seconds", bar_chart("Time per phase", bars, "seconds", told), caption)


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
"""What memory holds, with the words for it."""
_MIB = 1 << 20


def memory_per_phase(run: Run) -> Panel | None:
    """Stacked bars: what the merge and the largest specialist held in each phase of a step, at most."""
    stages = [(stage, _most_held(stage)) for stage in run.stages]
    merges = [(stage, most) for stage, most in stages if most and stage.name == "merge"]
    others = [(stage, most) for stage, most in stages if most and _is_specialist(stage)]
    largest = sorted(others, key=lambda pair: -max(sum(held.values()) for held in pair[1].values()))[:1]
    bars = []
    for stage, most in [*merges, *largest] or [(stage, most) for stage, most in stages if most][:1]:
        for phase in [name for name in PHASES if name in most]:
            held = most[phase]
            parts = [(series_role(i), held.get(kind, 0.0) / _MIB) for i, (kind, _) in enumerate(KINDS)]
            note = f"{sum(held.values()) / _MIB:,.4g} MiB"
            bars.append(Bar(f"{stage_label(stage.name)}: {phase}", note, parts))
    if not bars:
        return None
    told = ", ".join(f"{bar.label} {bar.note}" for bar in bars)
    caption = (
        "The most that each phase of a step held at once, of one process. What passes by (activations,"
        " logits) is not counted."
    )
    return Panel("Memory by phase", "MiB", bar_chart("Memory by phase", bars, "MiB", told), caption)


def _most_held(stage: StageResult) -> dict[str, dict[str, float]]:
    """By phase the bytes of each kind, in the step in which they were the most together."""
    found: dict[str, dict[str, float]] = {}
    for row in stage.metrics:
        phases: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            place, _, kind = key.removeprefix("memory/").partition("/")
            if key.startswith("memory/") and isinstance(value, int | float):
                phases.setdefault(place, {})[kind] = float(value)
        for phase, held in phases.items():
            if sum(held.values()) > sum(found.get(phase, {}).values()):
                found[phase] = held
    return found


def kind_cues() -> list[Cue]:
    """Legend of the chart of memory."""
    return [Cue(words, series_role(i), "block") for i, (_, words) in enumerate(KINDS)]


def phase_cues(run: Run) -> list[Cue]:
    """Legend of the time chart: the phases some stage spent time in, and what no phase accounts for."""
    timed = {phase for stage in run.stages for phase, seconds in stage.phases.items() if seconds > 0}
    names = [*PHASES, *sorted(timed - set(PHASES))]
    cues = [Cue(name, series_role(i), "block") for i, name in enumerate(names) if name in timed]
    return [*cues, Cue("other", "rest", "block")]


def gaps(run: Run, models: Sequence[ModelResult], cues: Cues) -> Panel | None:
    """Every other model measured on all domains against the merged student, the best on top; the base,
    far behind as it should be, only where there is nothing else.
    """
    merged = run.model("merged")
    if merged is None or not set(run.domains) <= set(merged.sampled):
        return None
    own = own_domain(run)
    others = [model for model in models if model.kind == "baseline"]
    if own:
        others.append(ModelResult(own_label(run.teacher_word), "specialist", dict(own), {}, {}))
    base = run.model("base")
    if base and not others:
        others.append(base)
    dots = []
    for model in others:
        gap = compare(run, merged, model)
        if gap is None or not set(run.domains) <= set(model.sampled):
            continue
        mean = Interval(-gap.gap.value, -gap.gap.high, -gap.gap.low)
        marks = [
            (
                cues.of(d).role,
                cues.of(d).marker,
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
    told = "; ".join(f"{dot.label}: {dot.note} ({point_bounds(dot.mean)})" for dot in dots)
    title = "Against the merged student"
    svg = dot_chart(title, dots, "points of sampled accuracy", points, told)
    caption = (
        "Left of the line: worse than the merged student. Tick: mean; line: its "
        f"{percent(run.confidence, 0)} interval. Small marks: single domains."
    )
    return Panel(title, "mean over domains, points", svg, caption)


def overlaid(runs: Sequence[tuple[str, Run]], keys: Sequence[str] = (), stages: str = "") -> list[Panel]:
    """Several runs in one chart for each stage and each of `OVERLAID`, or for those of `keys` and of the
    `stages` that begin so.
    """
    panels: list[Panel] = []
    names = dict.fromkeys(stage.name for _, run in runs for stage in run.stages)
    for name in sorted((name for name in names if name.startswith(stages)), key=stage_order):
        for key, what, unit, axis in OVERLAID:
            if keys and key not in keys:
                continue
            against = "step" if key == "loss/ce" else "tokens"
            lines = [
                _line(stage, key, cue, against)
                for cue, (_, run) in zip(run_cues([label for label, _ in runs]), runs, strict=True)
                if (stage := run.stage(name)) is not None
            ]
            note = "student tokens" if against == "tokens" else "step"
            _add(panels, f"{stage_label(name)}: {what}", unit, lines, axis, "A line a run.", note)
    return panels


def run_cues(labels: Sequence[str]) -> list[Cue]:
    """How runs look beside each other."""
    return [Cue(label, series_role(i), MARKERS[i % len(MARKERS)]) for i, label in enumerate(labels)]


def own_domain(run: Run) -> list:
    """(domain, accuracy of its own teacher) where every domain has an evaluated one, else nothing."""
    pairs = [(domain, run.teacher(domain)) for domain in run.domains]
    found = [(domain, teacher.sampled[domain]) for domain, teacher in pairs if teacher]
    return found if len(found) == len(run.domains) else []


def merge_and_baselines(run: Run, cues: Cues) -> list[Series]:
    """Mean reward of the merge and, up to its token budget, of every baseline that trains on rewards."""
    merge = run.stage("merge")
    line = _line(merge, "reward/mean", cues.of("merge")) if merge else None
    if line is None:
        return []
    lines = [line]
    for stage in run.stages:
        other = _line(stage, "reward/mean", baseline_cue(run, stage.name))
        if other is None or kind_of(stage.name) != "baseline":
            continue
        kept = sum(tokens <= 1.02 * line.x[-1] for tokens in other.x)
        if kept > 1:
            lines.append(Series(other.label, other.x[:kept], other.y[:kept], other.role, other.marker))
    return lines


def baseline_cue(run: Run, stage: str) -> Cue:
    """Colour and marker of a trained baseline: those that follow the domains'."""
    trained = [other.name for other in run.stages if kind_of(other.name) == "baseline"]
    index = len(run.domains) + (trained.index(stage) if stage in trained else 0)
    return Cue(stage_label(stage), series_role(index), MARKERS[index % len(MARKERS)])


def _line(stage: StageResult, key: str, cue: Cue, against: str = "tokens") -> Series | None:
    """`None` if `stage` logged fewer than two values of `key`, or no tokens to draw them against."""
    steps, tokens, values = stage.column(key)
    x = tokens if against == "tokens" else steps
    if len(values) < 2 or x[-1] <= x[0]:
        return None
    return Series(cue.label, x, values, cue.role, cue.marker)


def _add(
    panels: list[Panel],
    title: str,
    unit: str,
    lines: Sequence[Series | None],
    axis: Axis,
    caption: str,
    x_label: str = "student tokens",
) -> None:
    """Append the chart of those `lines` that exist; a log axis drops what it cannot show."""
    drawn = [_positive(line) if axis.log else line for line in lines if line]
    drawn = [line for line in drawn if len(line.y) > 1]
    if not drawn:
        return
    if all(_constant(line, axis) for line in drawn):
        values = {axis.write(line.end[0]) for line in drawn}
        each = (
            values.pop()
            if len(values) == 1
            else listing([f"{x.label} {axis.write(x.end[0])}" for x in drawn])
        )
        panels.append(Panel(title, unit, "", each))
        return
    told = _ends(drawn, axis)
    panels.append(Panel(title, unit, line_chart(title, drawn, axis, x_label, told), f"{caption} {told}"))


def _constant(line: Series, axis: Axis) -> bool:
    """Whether `line` stays within `STILL`, or is one value as precisely as a reader is told."""
    low, high = min(line.y), max(line.y)
    return high - low <= STILL * max(abs(low), abs(high)) or axis.write(low) == axis.write(high)


def _ends(lines: Sequence[Series], axis: Axis) -> str:
    """Where the lines end: "Mean of the last 20 steps: sort 0.01, add3 0.02."."""
    counts = {line.end[1] for line in lines}
    span = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    what = "At the last step" if counts == {1} else f"Mean of the last {span} steps"
    ends = ", ".join(f"{line.label}\u00a0{axis.write(line.end[0])}" for line in lines)
    return f"{what}: {ends}."


def _positive(line: Series) -> Series:
    kept = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y > 0]
    return replace(line, x=[x for x, _ in kept], y=[y for _, y in kept], whole=line.y)


def _is_specialist(stage: StageResult) -> bool:
    return kind_of(stage.name) == "specialist"


_TAUGHT = ("base", "sft", "specialist")
"""Stages that may have learnt from demonstrations."""


def _short(stage: str) -> str:
    return stage.partition("-")[2] or stage
