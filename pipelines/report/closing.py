"""What a command says when it ends: the verdict, a few lines of numbers, and where things are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opd.pipelines.evaluation.statistics import FEW, mean_accuracy
from opd.pipelines.report.load import Accuracy, ModelResult, Run, load_run
from opd.pipelines.report.verdict import retained, write_verdict
from opd.pipelines.report.words import best_told, listing, model_label, own_label, percent

LINES = 5
"""Most models in the table: base, specialists, merged student and the best of the others."""
DOMAINS = 6
"""Most domains with a column of their own."""


def closing(run_dir: Path) -> str:
    """The last words of `opd run`, `distill` and `evaluate` about the run in `run_dir`.

    Raises `RunFolderError` as `load_run` does.
    """
    run = load_run(run_dir)
    merged = run.model("merged")
    parts = [write_verdict(run).headline] if merged and merged.sampled else [_unmeasured(run)]
    table = _table(run)
    parts += ["\n".join(table)] if table else []
    parts.append("\n".join(_places(run_dir)))
    return "\n\n".join(part for part in parts if part)


def _unmeasured(run: Run) -> str:
    ends = ", ".join(f"{name} {values['kl']:.4f}" for name, values in run.teachers.items() if "kl" in values)
    steps = {int(values.get("kl_steps", 1)) for values in run.teachers.values()}
    mean = f", mean of the last {max(steps)} steps" if steps and max(steps) > 1 else ""
    left = f"KL to the teachers at the end of the merge (nats per token{mean}): {ends}. " if ends else ""
    return f"{left}No accuracy of a merged student was measured yet: `opd evaluate RECIPE --resume` does."


def _table(run: Run) -> list[str]:
    """A line a model: domains, their mean, and the share kept of the teachers' accuracy, in %."""
    shown = run.domains if len(run.domains) <= DOMAINS else []
    rows = [_row(run, label, sampled, shown) for label, sampled in _models(run)]
    if not rows:
        return []
    head = ["sampled accuracy, %", *shown, "mean", "kept"]
    lines = aligned([head, *rows])
    left_out = len(run.models) - sum(model.teaches for model in run.models)
    left_out -= sum(label != own_label(run.teacher_word) for label, _ in _models(run))
    more = [f"and {left_out} more in the report"] if left_out > 0 else []
    best = run.best_of_several()
    several = [best_told(best)] if best else []
    return [*lines, *more, *_error(run), *several, *_not_in_kept(run)]


def _error(run: Run) -> list[str]:
    """How well the accuracies of the table are known."""
    known = [accuracy for _, sampled in _models(run) for accuracy in sampled.values()]
    if not known:
        return []
    widest = max((a.interval.high - a.interval.low) / 2 for a in known)
    answers = min(a.count.total for a in known)
    said = f"each known to ± {100 * widest:.1f} points or better ({percent(run.confidence, 0)} intervals)"
    if answers < FEW:
        said += f": {answers} answers are few, raise evaluation.prompts_per_domain to tell models apart"
    return [said]


def _not_in_kept(run: Run) -> list[str]:
    """The domains that the share kept leaves out, and why."""
    merged = run.model("merged")
    if merged is None or not merged.sampled:
        return []
    left = [domain for domain in merged.sampled if domain not in retained(run, merged)]
    measured = {domain: run.teacher(domain) is not None for domain in left}
    reasons = {True: "where the teacher is never right", False: "whose teacher was not measured"}
    parts = [
        f"{listing(found)}, {reason}"
        for known, reason in reasons.items()
        if (found := [domain for domain in left if measured[domain] is known])
    ]
    return [f"kept leaves out {'; '.join(parts)}"] if parts else []


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line a row, the first column to the left and all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _models(run: Run) -> list[tuple[str, dict[str, Accuracy]]]:
    """(label, accuracies) of the models to show; of the others, those with the highest mean."""
    chosen: list[tuple[str, dict[str, Accuracy]]] = []
    base, merged = run.model("base"), run.model("merged")
    if base:
        chosen.append((model_label("base"), base.sampled))
    own = {d: teacher.sampled[d] for d in run.domains if (teacher := run.teacher(d))}
    if own:
        chosen.append((own_label(run.teacher_word), own))
    if merged:
        chosen.append((model_label("merged"), merged.sampled))
    others = [model for model in run.models if model.kind == "baseline" and model.sampled]
    others.sort(key=lambda model: -_mean(run, model.sampled))
    return [*chosen, *((model_label(m.name), m.sampled) for m in others[: LINES - len(chosen)])]


def _row(run: Run, label: str, sampled: dict[str, Accuracy], shown: Sequence[str]) -> list[str]:
    cells = [f"{100 * sampled[d].interval.value:.1f}" if d in sampled else "-" for d in shown]
    shares = retained(run, ModelResult(label, "", sampled, {}, {}))
    kept = percent(sum(shares.values()) / len(shares)) if shares else "-"
    return [label, *cells, f"{100 * _mean(run, sampled):.1f}", kept]


def _mean(run: Run, sampled: dict[str, Accuracy]) -> float:
    return mean_accuracy([sampled[d].count for d in run.domains if d in sampled]).value


def _places(run_dir: Path) -> list[str]:
    places = {"merged model": run_dir / "merged", "specialists": run_dir / "specialists"}
    places["report"] = run_dir / "report.html"
    return [f"{name:<14}{place}" for name, place in places.items() if place.exists()]
