"""What the doctor can tell from the recipe, the data and the file system, without loading a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from opd.config import Recipe
from opd.errors import ConfigError, from_system
from opd.imports import import_function
from opd.monitor.progress import doing
from opd.pipelines.given import user_functions
from opd.pipelines.run_folder import RunFolder
from opd.redact import redact

if TYPE_CHECKING:
    from opd.data.prompts import Domain

_PEEK = 64
"""Prompts a procedural source makes for a check: enough to see their form."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor looked at."""

    level: Literal["ok", "warning", "error"]
    title: str
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the detail says in figures, for `opd doctor --json`."""

    def __post_init__(self) -> None:
        # Before a table cuts it into lines.
        object.__setattr__(self, "detail", redact(self.detail))


def attempt(title: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """What `check` finds; an `OpdError`, or what the machine refuses, is a finding of level `error`."""
    try:
        with doing(f"checking {title}"):
            return check()
    except Exception as error:
        understood = from_system(error)
        if understood is None:
            raise
        return [Finding("error", title, str(understood))]


def number_of(count: int, thing: str) -> str:
    """`1 error`, `2,000 errors`, `0 batches`."""
    plural = f"{thing}es" if thing.endswith(("ch", "s", "x")) else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"


def check_sampling(recipe: Recipe) -> list[Finding]:
    """Cut distributions, for which no importance weight makes up."""
    rollout, cuts = recipe.rollout, []
    if rollout.top_p < 1:
        cuts.append(f"rollout.top_p = {rollout.top_p}")
    if rollout.top_k:
        cuts.append(f"rollout.top_k = {rollout.top_k}")
    if cuts:
        detail = f"{' and '.join(cuts)}: tokens outside the cut are never seen, which biases every estimator"
        return [Finding("warning", "sampling", f"{detail}; use top_p 1 and top_k 0")]
    return [Finding("ok", "sampling", f"whole vocabulary at temperature {rollout.temperature:g}")]


def check_schedule(recipe: Recipe) -> list[Finding]:
    """Tokens of older weights, learnt from as if the newest had drawn them."""
    from opd.pipelines.merge_loss import needs_policy_stream, policy_loss

    schedule, distill = recipe.rollout.schedule, recipe.distill
    if schedule == "in_turn":
        return []
    uncorrected = []
    if recipe.specialist_domains() and recipe.specialist.policy_loss.correction is None:
        uncorrected.append("specialist.policy_loss.correction")
    sampled = needs_policy_stream(distill) or distill.weighs_samples
    if sampled and policy_loss(distill).correction is None:
        where = "loss.loss" if distill.loss.type == "k1" else "policy_loss"
        uncorrected.append(f"distill.{where}.correction")
    if not uncorrected:
        return [Finding("ok", "schedule", f"{schedule}, corrected for the age of tokens")]
    detail = f"with rollout.schedule {schedule} tokens of older weights count as if they were new"
    return [Finding("warning", "schedule", f"{detail}; set {' and '.join(uncorrected)} to {{type: tis}}")]


def check_paths(recipe: Recipe) -> list[Finding]:
    """The user's own functions, named by dotted path: can they be loaded?"""
    findings: list[Finding] = []
    for where, (path, takes) in user_functions(recipe).items():
        findings += attempt(where, lambda w=where, p=path, t=takes: _check_path(p, w, t))
    return findings


def _check_path(path: str, where: str, takes: Sequence[str]) -> list[Finding]:
    if where.endswith("advantage.path"):
        from opd.algorithms.advantages import OwnAdvantage  # which may be a class

        OwnAdvantage(path, where)
    else:
        import_function(path, where, ConfigError, takes)
    return [Finding("ok", where, path)]


def check_run_dir(path: Path, recipe: Recipe, *, resume: bool) -> list[Finding]:
    """Whether the run folder can be made or, with `resume`, gone on in."""
    RunFolder.check(path, recipe, resume=resume)
    parent = existing_parent(path)
    wrong = unwritable(parent)
    if wrong is not None:
        return [
            Finding("error", "run folder", f"{parent} cannot be written ({wrong}); choose another with --out")
        ]
    return [Finding("ok", "run folder", str(path))]


def unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, or `None`. What is tried leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def existing_parent(path: Path) -> Path:
    """`path` or the nearest folder above it that exists."""
    path = path.absolute()
    try:
        return next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise from_system(error) or error from None


def check_domains(recipe: Recipe, domains: dict[str, Domain]) -> list[Finding]:
    """Loads a small part of every domain into `domains` and its reward function."""
    findings: list[Finding] = []
    for name in recipe.domains:
        title = f"domain {name}"
        scorer = attempt(title, lambda name=name: _check_scorer(recipe, name))
        source = attempt(title, lambda name=name: _check_domain(recipe, name, domains))
        # One line for a sound domain, and all that is wrong with another.
        findings += scorer + ([f for f in source if f.level != "ok"] if scorer else source)
    return findings


def _check_scorer(recipe: Recipe, name: str) -> list[Finding]:
    """What is wrong with the reward of a domain, whatever its prompts are."""
    from opd.rewards.functions import load_reward

    config = recipe.domains[name]
    if config.reward is not None:
        load_reward(config.reward)
    elif config.source.endswith((".jsonl", ".parquet")):
        detail = f"{config.source} has no checker of its own; give domains.{name}.reward a dotted path"
        return [Finding("error", f"domain {name}", detail)]
    return []


def _check_domain(recipe: Recipe, name: str, domains: dict[str, Domain]) -> list[Finding]:
    from opd.data.load import load_domain

    config = recipe.domains[name]
    # Short of the run's own settings in size alone, and no smaller than the recipe asks for.
    small = config.model_copy(update={"prompts": min(config.prompts, _PEEK)})
    held_out = _held_out(recipe)
    if ":" in config.source:  # generated: a few show their form, where files are read whole
        held_out = min(8, held_out)
    domain = load_domain(name, small, seed=recipe.seed, held_out_prompts=held_out)
    domains[name] = domain
    if recipe.base is not None and domain.demonstrations is None:
        detail = (
            f"{config.source} has no demonstrations for the warm-up of `base`; give model.path and no `base`"
        )
        return [Finding("error", f"domain {name}", detail)]
    scored = config.reward or "the source's own checker"
    return [Finding("ok", f"domain {name}", f"{config.source}, scored by {scored}")]


def _held_out(recipe: Recipe) -> int:
    return recipe.evaluation.prompts_per_domain


def check_held_out(recipe: Recipe, domains: Mapping[str, Domain]) -> list[Finding]:
    """Whether the evaluation asks enough prompts to know accuracies: a warning, or nothing."""
    from opd.pipelines.statistics import FEW, Count, wilson

    counts = {}
    for name, domain in domains.items():
        generated = ":" in recipe.domains[name].source  # of which a few were made for the check
        counts[name] = _held_out(recipe) if generated else min(_held_out(recipe), len(domain.held_out))
    few = {name: count for name, count in counts.items() if count < FEW}
    if not few:
        return []
    least, level = min(few.values()), recipe.evaluation.confidence
    interval = wilson(Count(least // 2, least), level)
    half = 50 * (interval.high - interval.low)
    detail = (
        f"{', '.join(f'{name} {count}' for name, count in few.items())}: with {least} an accuracy of 50 % is"
        f" known to ± {half:.0f} points ({100 * level:g} % interval), and models that are closer cannot be"
        " told apart; raise evaluation.prompts_per_domain, or held_out where a file has no more"
    )
    return [Finding("warning", "held-out prompts", detail, {"points": half})]


def given_teachers(recipe: Recipe) -> Mapping[str, str]:
    """Folders or URLs of the teachers that some domain uses and this run does not train."""
    used = dict.fromkeys(name for domain in recipe.domains for name in recipe.teacher_weights(domain))
    return {name: recipe.teachers[name].path for name in used if name in recipe.teachers}
