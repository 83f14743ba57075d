"""Which charts a run gets: one function per section, each leaving out what the run did not log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opd.pipelines.report.charts import Axis, Bar, Dot, Series, bar_chart, dot_chart, line_chart
from opd.pipelines.report.load import ModelResult, Run, StageResult
from opd.pipelines.report.theme import MARKERS, series_role
from opd.pipelines.report.words import duration, model_label, percent, stage_label
from opd.pipelines.statistics import Interval, mean_accuracy

PHASES = ("rollout", "score", "train", "sync", "evaluate")
SHARE = Axis(percent=True, low=0)
UNIT = Axis(percent=True, low=0, high=1.02)

HEALTH = (
    ("length/mean", "Response length", "tokens, mean", Axis(low=0), "Should settle as right answers do."),
    ("entropy", "Entropy", "nats per token", Axis(low=0), "Falls as answers get certain; not at once."),
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


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart with its heading and the sentence that says what to see in it."""

    title: str
    unit: str
    svg: str
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
    base = run.stage("base")
    if base:
        lines = [_line(base, "loss/ce", Cue("base", "ink", "o"), against="step")]
        note = "Should fall and flatten. It cannot reach zero when demonstrations disagree."
        _add(
            panels, "Base: warm-up loss", "cross-entropy, nats per token", lines, Axis(), note, x_label="step"
        )
    return panels


def teachers(run: Run, cues: Cues) -> list[Panel]:
    """Each teacher's share of the merge's tokens and of its gradient."""
    merge = run.stage("merge")
    if not merge:
        return []
    panels: list[Panel] = []
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


def health(run: Run, cues: Cues) -> list[Panel]:
    """Numbers that tell a healthy run from a broken one, for every specialist and the merge."""
    stages = [stage for stage in run.stages if _is_specialist(stage) or stage.name == "merge"]
    panels: list[Panel] = []
    for key, title, unit, axis, caption in HEALTH:
        lines = [_line(stage, key, cues.of(_short(stage.name)), against="step") for stage in stages]
        _add(panels, title, unit, lines, axis, caption, x_label="step")
    return panels


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
    return Panel("Time per phase", "seconds", bar_chart("Time per phase", bars, "seconds"), caption)


def phase_cues(run: Run) -> list[Cue]:
    """Legend of the time chart: the phases some stage spent time in, and what no phase accounts for."""
    timed = {phase for stage in run.stages for phase, seconds in stage.phases.items() if seconds > 0}
    names = [*PHASES, *sorted(timed - set(PHASES))]
    cues = [Cue(name, series_role(i), "block") for i, name in enumerate(names) if name in timed]
    return [*cues, Cue("other", "rest", "block")]


def mean_accuracies(run: Run, models: Sequence[ModelResult], cues: Cues) -> Panel | None:
    """Mean sampled accuracy of every model that was measured on all domains, its domains as small marks."""
    dots = []
    own = own_domain(run)
    for model in models:
        if model.kind != "specialist" and set(run.domains) <= set(model.sampled):
            parts = [(domain, model.sampled[domain]) for domain in run.domains]
            role = "ink" if model.name == "merged" else "muted"
            dots.append(_dot(model_label(model.name), parts, run, cues, role))
        if model.kind == "base" and own:
            dots.append(_dot("Specialists, own domain", own, run, cues, "muted"))
    if len(dots) < 2:
        return None
    caption = f"Tick: mean; line: its {percent(run.confidence, 0)} interval. Small marks: single domains."
    svg = dot_chart("Mean sampled accuracy", dots, "sampled answers that are right, %")
    return Panel("Mean sampled accuracy", "mean over domains", svg, caption)


def own_domain(run: Run) -> list:
    """(domain, accuracy of its own teacher) where every domain has an evaluated one, else nothing."""
    pairs = [(domain, run.teacher(domain)) for domain in run.domains]
    found = [(domain, teacher.sampled[domain]) for domain, teacher in pairs if teacher]
    return found if len(found) == len(run.domains) else []


def _dot(label: str, parts: Sequence, run: Run, cues: Cues, role: str) -> Dot:
    mean: Interval = mean_accuracy([accuracy.count for _, accuracy in parts], run.confidence)
    marks = [
        (cues.of(domain).role, cues.of(domain).marker, accuracy.interval.value) for domain, accuracy in parts
    ]
    return Dot(label, percent(mean.value), mean, marks, role)


def merge_and_baselines(run: Run, cues: Cues) -> list[Series]:
    """Mean reward of the merge and, up to its token budget, of every baseline that trains on rewards."""
    merge = run.stage("merge")
    line = _line(merge, "reward/mean", cues.of("merge")) if merge else None
    if line is None:
        return []
    lines = [line]
    for stage in run.stages:
        other = _line(stage, "reward/mean", baseline_cue(run, stage.name))
        if other is None or not stage.name.startswith("baseline-"):
            continue
        kept = sum(tokens <= 1.02 * line.x[-1] for tokens in other.x)
        if kept > 1:
            lines.append(Series(other.label, other.x[:kept], other.y[:kept], other.role, other.marker))
    return lines


def baseline_cue(run: Run, stage: str) -> Cue:
    """Colour and marker of a trained baseline: those that follow the domains'."""
    trained = [other.name for other in run.stages if other.name.startswith("baseline-")]
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
    svg = line_chart(title, drawn, axis, x_label)
    panels.append(Panel(title, unit, svg, f"{caption} {_ends(drawn, axis)}"))


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
    return stage.name.startswith("specialist-")


def _short(stage: str) -> str:
    return stage.removeprefix("specialist-")
