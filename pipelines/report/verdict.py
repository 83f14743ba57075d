"""Write the verdict on the merge: plain sentences computed from the run's numbers. Also write the closing
summary of a command: the verdict, a few lines of numbers, and paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opd.config.teachers import FROM_GROUP
from opd.pipelines.evaluation.statistics import (
    FEW,
    Count,
    Interval,
    mean_accuracy,
    mean_difference,
    retention_interval,
)
from opd.pipelines.records.inputs import changed_files
from opd.pipelines.records.stage_names import kind_of
from opd.pipelines.report.display_text import (
    NARROW,
    amount,
    format_best_teachers,
    format_bounds,
    format_duration,
    join_items,
    lower_label,
    model_label,
    percent,
    point_bounds,
    points,
    teachers_label,
)
from opd.pipelines.report.load import load_run
from opd.pipelines.report.results import DomainAccuracy, ModelResult, Run
from opd.untrusted import escape_controls

WEAK = 0.2
"""Teachers are weak if fewer than this share of their sampled answers are right."""
SAME_BUDGET = 0.05
"""Two token budgets count as equal if they differ by less than this share."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A headline and the points below it, as plain text."""

    headline: str
    points: list[tuple[str, str]]
    """(lead, sentence)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The merged student against one other model, over the domains of both."""

    other: ModelResult
    gap: Interval
    """Mean over domains of merged minus other, in [-1, 1]."""

    @property
    def outcome(self) -> str:
        """`ahead` or `behind` if the interval excludes zero, else `level`."""
        if self.gap.low > 0:
            return "ahead"
        return "behind" if self.gap.high < 0 else "level"


def compare_models(run: Run, merged: ModelResult, other: ModelResult) -> Comparison | None:
    """Compare two models. `None` if they share no domain."""
    shared = [domain for domain in run.domains if domain in merged.sampled and domain in other.sampled]
    if not shared:
        return None
    gap = mean_difference(merged.sampled_counts(shared), other.sampled_counts(shared), run.confidence)
    return Comparison(other, gap)


def write_verdict(run: Run) -> Verdict:
    """Return the verdict on `run`, or a note that it has no evaluated merge yet."""
    merged = run.model("merged")
    if merged is None or not merged.sampled:
        return Verdict(
            "This run has no evaluated merge yet. Below is what it has produced so far.",
            [*_change_points(run), *_cost_points(run)],
        )
    points_ = [*_teacher_points(run, merged), *_round_points(run), *_comparison_points(run, merged)]
    return Verdict(_write_headline(run, merged), [*points_, *_change_points(run), *_cost_points(run)])


def _round_points(run: Run) -> list[tuple[str, str]]:
    """Return what each round changed against the one before (first: the base), and why there is none after
    the last. A domain has improved or is forgotten if the interval of its change excludes zero.
    """
    points_, before = [], run.model("base")
    for one in run.rounds:
        student = one.model("merged")
        if student is not None and before is not None and (whole := compare_models(run, student, before)):
            gaps = {
                domain: mean_difference(
                    [student.sampled[domain].count], [before.sampled[domain].count], run.confidence
                )
                for domain in run.domains
                if domain in student.sampled and domain in before.sampled
            }
            improved = [domain for domain, gap in gaps.items() if gap.low > 0]
            forgotten = [domain for domain, gap in gaps.items() if gap.high < 0]
            text = f"{points(whole.gap.value)} points on average ({point_bounds(whole.gap)})"
            text += f"; improved: {join_items(improved)}" if improved else "; no domain clearly improved"
            text += f"; forgotten: {join_items(forgotten)}." if forgotten else "; none clearly forgotten."
            points_.append((f"Round {one.number}:", text))
        before = student
    least, asked = run.config.get("min_round_gain"), run.config.get("rounds", 1)
    last = run.rounds[-1] if 0 < len(run.rounds) < asked else None
    if last and last.gain is not None and least is not None and last.gain < least:
        sentence = f"round {last.number} of {asked} gained {points(last.gain)} points, less than the"
        points_.append(("Ended early:", f"{sentence} {points(least)} of min_round_gain."))
    return points_


def _change_points(run: Run) -> list[tuple[str, str]]:
    """Return the changes of the user's own code and of settings."""
    points_ = []
    for change in run.code_changes:
        states = {"done": change["done"], "under way": change["under_way"]}
        then = " and ".join(f"{join_items(names)} {state}" for state, names in states.items() if names)
        points_.append(
            (
                "User code changed during the run:",
                f"{changed_files(change)}, on {change['time'].replace('T', ' ')}, with"
                f" {then or 'no stage begun'}. What came before was made by other code than what came after.",
            )
        )
    for change in run.setting_changes:
        points_.append(
            (
                "A setting changed during the run:",
                f"{change.format_change()}, on {change.time.replace('T', ' ')}.",
            )
        )
    return points_


def _count_pairs(run: Run, merged: ModelResult) -> dict[str, tuple[Count, Count]]:
    """Return (merged, teacher) of every domain with an evaluated teacher."""
    pairs = {}
    for domain in run.domains:
        teacher = run.best_teacher(domain)
        if teacher and domain in merged.sampled:
            pairs[domain] = (merged.sampled[domain].count, teacher.sampled[domain].count)
    return pairs


def retained_shares(run: Run, model: ModelResult) -> dict[str, float]:
    """Return accuracy / teacher's accuracy of every domain with an evaluated teacher that is ever right."""
    return {
        domain: student.accuracy / teacher.accuracy
        for domain, (student, teacher) in _count_pairs(run, model).items()
        if teacher.correct
    }


def _write_headline(run: Run, merged: ModelResult) -> str:
    """Return the retained share with the levels behind it, because a share of a tiny level is no success."""
    pairs, shares = _count_pairs(run, merged), retained_shares(run, merged)
    mean = mean_accuracy(merged.sampled_counts(list(merged.sampled)), run.confidence).value
    if not pairs:
        return f"The merged student samples {percent(mean)} right answers on average over its domains."
    retained = sum(shares.values()) / len(shares) if shares else 0.0
    weak = _weak_teachers(run, pairs, retained)
    if weak:
        return weak
    keeps = "reaches" if retained >= 1 else "keeps" if retained >= 0.9 else "keeps only"
    student, teachers = (mean_accuracy([pair[side] for pair in pairs.values()]).value for side in (0, 1))
    keeps = f"{keeps} {percent(retained)} of its {run.teacher_word}"
    levels = f" ({percent(student)} right, {'they' if len(pairs) > 1 else 'it'} {percent(teachers)})"
    if len(pairs) == 1:
        return f"The merged student {keeps}\u2019s sampled accuracy{levels}."
    worst = min(shares, key=shares.__getitem__)
    return (
        f"The merged student {keeps}s\u2019 sampled accuracy on average"
        f"{levels}; its weakest domain is {worst}, at {percent(shares[worst])}."
    )


def _weak_teachers(run: Run, pairs: dict[str, tuple[Count, Count]], retained: float) -> str:
    """Return the headline for teachers with nothing to retain: hardly ever right, or not above the base."""
    student, teachers = ([pair[side] for pair in pairs.values()] for side in (0, 1))
    levels = mean_accuracy(teachers).value
    who, be = (f"{run.teacher_word}s", "are") if len(pairs) > 1 else (run.teacher_word, "is")
    base = run.model("base")
    start = [base.sampled[d].count for d in pairs] if base and set(pairs) <= set(base.sampled) else None
    gain = mean_difference(teachers, start, run.confidence) if start else None
    levels_text = f"{percent(levels)} of {'their' if len(pairs) > 1 else 'its'} sampled answers are right"
    student_level = f"the merged student\u2019s: {percent(mean_accuracy(student).value)}"
    base_level = f", the base\u2019s: {percent(mean_accuracy(start).value)}" if start else ""
    if gain and gain.low <= 0:
        return (
            f"No verdict on the merge: its {who} {be} not clearly above the base ({points(gain.value)} "
            f"points, {point_bounds(gain)}). {levels_text} ({student_level}{base_level})."
        )
    if levels < WEAK:
        says = f"so the {percent(retained)} that are kept say little"
        return f"The {who} {be} weak: {levels_text} ({student_level}{base_level}), {says}."
    return ""


def _teacher_points(run: Run, merged: ModelResult) -> list[tuple[str, str]]:
    """Return the levels behind the headline: merged, specialists, base, and domains that got worse."""
    domains = [domain for domain in run.domains if domain in merged.sampled]
    mean = mean_accuracy(merged.sampled_counts(domains), run.confidence)
    over = f"{len(domains)} domains" if len(domains) > 1 else "one domain"
    level = f"{percent(mean.value)} of sampled answers are right, averaged over {over}"
    pairs = list(_count_pairs(run, merged).values())
    if pairs:
        teachers = mean_accuracy([teacher for _, teacher in pairs], run.confidence)
        retained = retention_interval(pairs, run.confidence)
        level += f"; the {run.teacher_word}s reach {percent(teachers.value)}, each on its own domain"
        if retained:
            level += (
                f" (share kept: {format_bounds(retained)}{NARROW}%, a {percent(run.confidence, 0)} interval)"
            )
    silent = [domain for domain, (_, teacher) in _count_pairs(run, merged).items() if not teacher.correct]
    result = [("Accuracy.", f"{level}.")]
    base = run.model("base")
    if base is not None and all(domain in base.sampled for domain in domains):
        start = mean_accuracy(base.sampled_counts(domains), run.confidence)
        began = "The base they all started from" if run.trained_here else "The base"
        result = [("Accuracy.", f"{level}. {began} reaches {percent(start.value)}.")]
        worse = [d for d in domains if merged.sampled[d].count.accuracy < base.sampled[d].count.accuracy]
        if worse:
            result.append(("Worse than the base", f"on {join_items(worse)}."))
    if best := run.best_of_several():
        result.append(("Several teachers:", f"{format_best_teachers(best)}."))
    if told := _told_more(run):
        result.append(("Two prompts:", f"{told}."))
    if silent:
        result.append(
            ("Left out of the share kept:", f"{join_items(silent)}, where the teacher is never right.")
        )
    return result


def _told_more(run: Run) -> str:
    """Name the domains whose teachers were measured on another prompt than the student. Empty if none."""
    configs = run.config.get("domains", {})
    read = {d: configs.get(d, {}).get("teacher_prompt") for d in run.domains if run.best_teacher(d)}
    late = [f"{{{name}}}" for name in FROM_GROUP]  # such a prompt needs an answer of the student
    told = [d for d, one in read.items() if one and not any(name in str(one["user"]) for name in late)]
    whose = f"the {run.teacher_word}s answered teacher_prompt, all others the student\u2019s prompt"
    return f"on {join_items(told)} {whose}" if told else ""


def _comparison_points(run: Run, merged: ModelResult) -> list[tuple[str, str]]:
    by_outcome: dict[str, list[str]] = {"ahead": [], "level": [], "behind": []}
    for other in run.models:
        comparison = compare_models(run, merged, other) if other.kind == "baseline" else None
        if comparison:
            gap = comparison.gap
            value = points(gap.value if comparison.outcome == "level" else abs(gap.value))
            notes = [f"{value if comparison.outcome == 'level' else value.lstrip('+')} points"]
            notes += [point_bounds(gap)] if comparison.outcome == "level" else []
            notes += [note] if (note := _budget_note(merged, other)) else []
            by_outcome[comparison.outcome].append(
                f"{lower_label(model_label(other.name))} ({', '.join(notes)})"
            )
    leads = {"ahead": "Ahead of", "level": "Too close to tell from", "behind": "Behind"}
    return [(leads[outcome], f"{join_items(texts)}.") for outcome, texts in by_outcome.items() if texts]


def _budget_note(merged: ModelResult, other: ModelResult) -> str:
    """Compare a trained baseline's student tokens with the merge's. Empty for merges of weights."""
    if not other.student_tokens or not merged.student_tokens:
        return ""
    ratio = other.student_tokens / merged.student_tokens
    if abs(ratio - 1) <= SAME_BUDGET:
        return "equal student tokens"
    return f"{ratio:.1f} times the merge\u2019s student tokens"


def _cost_points(run: Run) -> list[tuple[str, str]]:
    specialists = [stage for stage in run.stages if kind_of(stage.name) == "specialist"]
    merges = [merge for merge in run.merges if merge.steps]
    parts = []
    if merges:
        whose = "followed its teachers over" if follows_teachers(run) else "sampled"
        kind = "of their tokens" if follows_teachers(run) else "student tokens"
        tokens, seconds = (sum(getattr(s, key) for s in merges) for key in ("student_tokens", "seconds"))
        who = "the merge" if len(merges) == 1 else f"the merges of {len(merges)} rounds"
        parts.append(f"{who} {whose} {amount(tokens)} {kind} in {format_duration(seconds)}")
    if specialists:
        tokens, seconds = (sum(getattr(s, key) for s in specialists) for key in ("student_tokens", "seconds"))
        count = f"{len(specialists)} specialists" if len(specialists) > 1 else "the specialist"
        parts.append(
            f"training {count} took {amount(tokens)} tokens and {format_duration(seconds)} of stage time"
        )
    if not parts:
        return []
    sentence = "; ".join(parts)
    return [("Cost.", f"{sentence[0].upper()}{sentence[1:]}.")]


def follows_teachers(run: Run) -> bool:
    """Return whether the merge learnt from answers of its teachers."""
    return run.config.get("distill", {}).get("prefixes") == "teacher"


LINES = 5
"""Maximum models in the table: base, specialists, merged student and the best of the others."""
DOMAINS = 6
"""Maximum domains with their own column."""


def closing_summary(run_dir: Path) -> str:
    """Return the closing summary of `opd run`, `distill` and `evaluate` for the run in `run_dir`.

    Raises `RunFolderError` as `load_run` does.
    """
    run = load_run(run_dir)
    merged = run.model("merged")
    if merged and merged.sampled:
        headline = write_verdict(run).headline
    else:
        ends = [f"{name} {values['kl']:.4f}" for name, values in run.teachers.items() if "kl" in values]
        steps = max((int(values.get("kl_steps", 1)) for values in run.teachers.values()), default=1)
        mean = f", mean of the last {steps} steps" if steps > 1 else ""
        headline = "No accuracy of a merged student was measured yet: `opd evaluate RECIPE --resume` does."
        if ends:
            measure = f"KL to the teachers at the end of the merge (nats per token{mean})"
            headline = f"{measure}: {', '.join(ends)}. {headline}"
    names = {"merged model": "merged", "specialists": "specialists", "report": "report.html"}
    if len(run.rounds) > 1:
        last = f"rounds/{len(run.rounds)}"
        names |= {"merged model": f"{last}/merged", "specialists": f"{last}/specialists"}
    paths = [f"{name:<14}{run_dir / file}" for name, file in names.items() if (run_dir / file).exists()]
    parts = [headline, "\n".join(_accuracy_lines(run)), "\n".join(paths)]
    return escape_controls("\n\n".join(part for part in parts if part))


def _accuracy_lines(run: Run) -> list[str]:
    """Return a line a model: domains, their mean, and the retained share of the teachers' accuracy, in %.
    Below them are the models left out, the accuracies' precision, and the domains without a retained share.
    """
    models = _shown_models(run)
    if not models:
        return []
    domains = run.domains if len(run.domains) <= DOMAINS else []
    rows = [["sampled accuracy, %", *domains, "mean", "kept"]]
    for label, sampled in models:
        cells = [f"{100 * sampled[d].interval.value:.1f}" if d in sampled else "-" for d in domains]
        shares = retained_shares(run, ModelResult(label, "", sampled, {}, {}))
        share = percent(sum(shares.values()) / len(shares)) if shares else "-"
        rows.append([label, *cells, f"{100 * _mean_value(run, sampled):.1f}", share])
    lines = align_columns(rows)
    left_out = len(run.models) - sum(model.is_teacher for model in run.models)
    left_out -= sum(label != teachers_label(run.teacher_word) for label, _ in models)
    if left_out > 0:
        lines.append(f"and {left_out} more in the report")
    accuracies = [accuracy for _, sampled in models for accuracy in sampled.values()]
    if accuracies:
        widest = max((a.interval.high - a.interval.low) / 2 for a in accuracies)
        answers = int(min(a.count.effective_size for a in accuracies))
        line = f"each known to ± {100 * widest:.1f} points or better ({percent(run.confidence, 0)} intervals)"
        if answers < FEW:
            line += f": {answers} answers are few, raise evaluation.prompts_per_domain to tell models apart"
        lines.append(line)
    if best := run.best_of_several():
        lines.append(format_best_teachers(best))
    if told := _told_more(run):
        lines.append(told)
    merged = run.model("merged")
    if merged is not None and merged.sampled:
        shares = retained_shares(run, merged)
        missing = [domain for domain in merged.sampled if domain not in shares]
        never_right = [domain for domain in missing if run.best_teacher(domain)]
        unmeasured = [domain for domain in missing if not run.best_teacher(domain)]
        parts = [f"{join_items(never_right)}, where the teacher is never right"] if never_right else []
        parts += [f"{join_items(unmeasured)}, whose teacher was not measured"] if unmeasured else []
        if parts:
            lines.append(f"kept leaves out {'; '.join(parts)}")
    return lines


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line a row, the first column left-aligned and all others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _shown_models(run: Run) -> list[tuple[str, dict[str, DomainAccuracy]]]:
    """Return (label, accuracies) of the shown models. Of the others these have the highest mean."""
    chosen: list[tuple[str, dict[str, DomainAccuracy]]] = []
    base, merged = run.model("base"), run.model("merged")
    if base:
        chosen.append((model_label("base"), base.sampled))
    of_teachers = {d: teacher.sampled[d] for d in run.domains if (teacher := run.best_teacher(d))}
    if of_teachers:
        chosen.append((teachers_label(run.teacher_word), of_teachers))
    if merged:
        chosen.append((model_label("merged"), merged.sampled))
    others = [model for model in run.models if model.kind == "baseline" and model.sampled]
    others.sort(key=lambda model: -_mean_value(run, model.sampled))
    return [*chosen, *((model_label(m.name), m.sampled) for m in others[: LINES - len(chosen)])]


def _mean_value(run: Run, sampled: dict[str, DomainAccuracy]) -> float:
    return mean_accuracy([sampled[d].count for d in run.domains if d in sampled]).value
