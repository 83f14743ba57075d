"""What a run's numbers do not show: printed wherever its results are."""

from __future__ import annotations

from opd.pipelines.report.load import Run
from opd.pipelines.report.verdict import compare
from opd.pipelines.report.words import amount, percent, point_bounds, points

CLAIM = "What is claimed is quality per merge token, and that specialists trained apart can be joined later."


def caveats(run: Run) -> list[str]:
    """Sentences that bound the claims of this run, drawn from what it did and did not measure."""
    merged = run.model("merged")
    sentences = [
        f"One training seed{_seed(run)}. The intervals hold the evaluation\u2019s sampling noise only; where "
        "training is unstable, another seed moves a row by more. Compare several seeds before ranking "
        "methods that are close."
    ]
    if merged:
        sentences.append(_token_budget(run))
    if run.model("off_policy"):
        sentences.append(
            "Where each prompt has one right answer, imitating teacher samples loses little: such domains "
            "flatter off-policy distillation and leave on-policy data less room to help than long or "
            "open-ended answers do."
        )
    if run.config.get("base"):
        right = run.config["base"].get("right", 0.3)
        sentences.append(
            f"The base was warmed up on demonstrations of which {percent(right, 0)} are right. It can "
            "already write right answers, so part of what the specialists gain is choosing them more often, "
            "not a new skill."
        )
    if any(model.greedy for model in run.models):
        sentences.append(
            "Greedy accuracy saturates early and can hide a damaged distribution, so the verdict rests on "
            "sampled accuracy."
        )
    if any(run.model(name) for name in ("task_arithmetic", "ties", "dare")):
        sentences.append(
            "Weight merges were tuned over a few coefficients on training prompts. A finer search may gain a "
            "little; experts that moved further from a shared base may lose a lot."
        )
    sentences.append(
        "Times are of one machine and one model size. They say how this run spent its time, not what a "
        "larger model, a longer answer or another accelerator would cost."
    )
    return sentences


def _seed(run: Run) -> str:
    return f" ({run.facts['seed']})" if "seed" in run.facts else ""


def _token_budget(run: Run) -> str:
    merged, other = run.model("merged"), run.model("mixed_grpo_all")
    specialists = sum(model.student_tokens for model in run.models if model.kind == "specialist")
    start = "\u201cEqual student tokens\u201d counts the merge alone"
    start += f"; its specialists sampled {amount(specialists)} more before it. " if specialists else ". "
    comparison = compare(run, merged, other) if merged and other else None
    if comparison is None:
        return (
            f"{start}Mixed-domain GRPO on the whole budget was not measured here and may draw level. {CLAIM}"
        )
    gap = comparison.gap
    ahead = {"ahead": "is still ahead of it by", "behind": "is behind it by", "level": "is level with it:"}
    value = points(gap.value if comparison.outcome == "level" else abs(gap.value)).lstrip("+")
    return (
        f"{start}Given all of these tokens, mixed-domain GRPO is the fair rival: the merged student "
        f"{ahead[comparison.outcome]} {value} points ({point_bounds(gap)}). {CLAIM}"
    )
