"""Whether the evaluation sets can be read, asked and rewarded, long before it is their turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.pipelines.doctor.checks import Finding, attempt, check_scorer
from opd.pipelines.doctor.rewards import check_rewards
from opd.pipelines.evaluation.sets import said_of_set

if TYPE_CHECKING:
    from opd.rollout.prompts import Domain

_MOST = 10_000
"""Prompts a generated source makes for the check: that it has too few is not to be found out at the end."""


_SHOWN = 80
"""Characters of an example."""


def check_sets(recipe: Recipe, sets: dict[str, Domain]) -> list[Finding]:
    """Loads every evaluation set into `sets`, with its reward."""
    findings: list[Finding] = []
    of_sets = recipe.of_sets()
    for name in of_sets.domains:
        findings += _said(recipe, name, lambda name=name: _check_set(recipe, of_sets, name, sets))
    return findings


def check_set_prompts(recipe: Recipe, sets: dict[str, Domain], tokenizer: Any) -> list[Finding]:
    """Whether their prompts can be written as tokens and leave room for their responses."""
    from opd.pipelines.doctor.models import check_prompts

    findings: list[Finding] = []
    of_sets = recipe.of_sets()
    for name, found in sets.items():
        findings += _said(recipe, name, lambda d=found: check_prompts(of_sets, d, tokenizer), "prompts ")
    return findings


def check_contamination(recipe: Recipe, sets: dict[str, Domain]) -> list[Finding]:
    """Evaluation prompts that stand in what the run will be trained on: a warning for each set with some."""
    from opd.pipelines.evaluation.contamination import contamination
    from opd.pipelines.stages.domains import load_domains

    title = "contamination"
    told = contamination(recipe, load_domains(recipe), sets)
    if not told:
        return []
    findings = []
    for name, found in told["found"].items():
        if found["contaminated"]:
            example = found["examples"][0]
            detail = (
                f"{found['contaminated']} of {found['prompts']} evaluation prompts of {name} share"
                f" {told['ngram']} words in a row, or all they say, with what the run is trained on, such as"
                f" {_cut(example['shared'])!r} ({example['where']}); take them out of one of the two"
            )
            numbers = {"contaminated": found["contaminated"], "prompts": found["prompts"]}
            findings.append(Finding("warning", title, detail, numbers))
    prompts = sum(found["prompts"] for found in told["found"].values())
    sound = f"no evaluation prompt of {prompts:,} is in the {told['texts']:,} training texts"
    return findings or [Finding("ok", title, sound)]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _check_set(recipe: Recipe, of_sets: Recipe, name: str, sets: dict[str, Domain]) -> list[Finding]:
    from opd.data.load import load_domain
    from opd.rewards.kinds import check_labels, scored_by

    config, asked = of_sets.domains[name], recipe.evaluation.sets[name].prompts
    wrong = check_scorer(of_sets, name)
    count = asked if config.is_file else min(_MOST, asked)
    found = load_domain(name, config, seed=recipe.seed, held_out_prompts=count)
    if wrong:
        return wrong
    sets[name] = found
    # Of a set nothing is trained on; what a reward says of simple answers is asked of its first prompt.
    rewarded = check_rewards(of_sets, {name: replace(found, train=found.held_out)})
    check_labels(config, name, found.held_out)
    count = len(found.held_out) if config.is_file else asked
    sound = Finding(
        "ok", f"domain {name}", f"{config.source}, {count} prompts, scored by {scored_by(config)}"
    )
    return [sound, *(finding for finding in rewarded if finding.level != "ok")]


def _said(
    recipe: Recipe, name: str, check: Callable[[], list[Finding]], title: str = "domain "
) -> list[Finding]:
    """What `check` finds, said of an evaluation set."""
    names = recipe.evaluation.sets
    return [
        replace(found, title=said_of_set(found.title, names), detail=said_of_set(found.detail, names))
        for found in attempt(f"{title}{name}", check)
    ]
