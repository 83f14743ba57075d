"""Find all errors that can be known before a run starts: `opd doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from opd.config import Recipe, SFTConfig
from opd.config.hub_names import hub_name
from opd.models.hf_folder import require_folder
from opd.pipelines.check.checks import (
    Finding,
    check_extras,
    check_paths,
    check_publishing,
    check_ranks,
    check_run_dir,
    check_sampling,
    check_schedule,
    check_sinks,
    check_sizes,
    given_teachers,
    print_findings,
    run_check,
)
from opd.pipelines.check.domains import (
    check_domains,
    check_environments,
    check_held_out,
    check_rewards,
    check_sandbox,
    check_scorer,
)
from opd.pipelines.check.models import DEVICE, Models, check_device, check_models, require_folders
from opd.pipelines.check.servers import check_cluster, check_kinds, check_servers, check_shared, check_workers
from opd.pipelines.check.tokenizers import check_prompts
from opd.pipelines.evaluation.prompt_sets import with_set_names
from opd.pipelines.records.run_folder import AcceptedChanges, default_path

if TYPE_CHECKING:
    from opd.rollout.prompts import Domain


_MOST_PROMPTS = 10_000
"""Prompts a generated source makes for the check, so that a shortage is found before the run."""
_EXAMPLE = 80
"""Characters of an example."""
_DEMONSTRATIONS = 500
"""Demonstrations that the check encodes. The stage encodes all of them first."""


def check_sets(recipe: Recipe, sets: dict[str, Domain]) -> list[Finding]:
    """Load every evaluation set into `sets`, with its reward."""
    findings: list[Finding] = []
    of_sets = recipe.of_sets()
    for name in of_sets.domains:
        findings += _set_findings(recipe, name, lambda name=name: _check_set(recipe, of_sets, name, sets))
    return findings


def check_set_prompts(recipe: Recipe, sets: dict[str, Domain], tokenizer: Any) -> list[Finding]:
    """Check that the sets' prompts can be encoded and leave tokens for their responses."""
    findings: list[Finding] = []
    of_sets = recipe.of_sets()
    for name, found in sets.items():
        findings += _set_findings(
            recipe, name, lambda d=found: check_prompts(of_sets, d, tokenizer), "prompts "
        )
    return findings


def check_contamination(recipe: Recipe, sets: dict[str, Domain]) -> list[Finding]:
    """Warn for each set with evaluation prompts that are also in the training data."""
    from opd.pipelines.evaluation.evaluate import find_contamination
    from opd.pipelines.stages.domains import load_domains

    title = "contamination"
    told = find_contamination(recipe, load_domains(recipe), sets)
    if not told:
        return []
    findings = []
    for name, found in told["found"].items():
        if found["contaminated"]:
            example = found["examples"][0]
            detail = (
                f"{found['contaminated']} of {found['prompts']} evaluation prompts of {name} share"
                f" {told['ngram']} words in a row, or all they say, with what the run is trained on, such as"
                f" {_shorten_text(example['shared'])!r} ({example['where']}); take them out of one of the two"
            )
            numbers = {"contaminated": found["contaminated"], "prompts": found["prompts"]}
            findings.append(Finding("warning", title, detail, numbers))
    prompts = sum(found["prompts"] for found in told["found"].values())
    sound = f"no evaluation prompt of {prompts:,} is in the {told['texts']:,} training texts"
    return findings or [Finding("ok", title, sound)]


def _shorten_text(text: str) -> str:
    return text if len(text) <= _EXAMPLE else f"{text[:_EXAMPLE]} ..."


def _check_set(recipe: Recipe, of_sets: Recipe, name: str, sets: dict[str, Domain]) -> list[Finding]:
    from opd.data.load import load_domain
    from opd.rewards.registry import check_labels, scored_by

    config, asked = of_sets.domains[name], recipe.evaluation.sets[name].prompts
    count = asked if config.is_file else min(_MOST_PROMPTS, asked)
    found = load_domain(name, config, seed=recipe.seed, held_out_prompts=count)
    check_scorer(of_sets, name)
    sets[name] = found
    # A set has no training prompts, so simple answers are scored on its first prompt.
    rewarded = check_rewards(of_sets, {name: replace(found, train=found.held_out)})
    check_labels(config, name, found.held_out)
    count = len(found.held_out) if config.is_file else asked
    sound = Finding(
        "ok", f"domain {name}", f"{config.source}, {count} prompts, scored by {scored_by(config)}"
    )
    return [sound, *(finding for finding in rewarded if finding.level != "ok")]


def _set_findings(
    recipe: Recipe, name: str, check: Callable[[], list[Finding]], title: str = "domain "
) -> list[Finding]:
    """Return the findings of `check`, named for an evaluation set."""
    names = recipe.evaluation.sets
    return [
        replace(found, title=with_set_names(found.title, names), detail=with_set_names(found.detail, names))
        for found in run_check(f"{title}{name}", check)
    ]


def check_demonstrations(recipe: Recipe, models: Models) -> list[Finding]:
    """Check the demonstrations of every `sft` of the recipe. An error in a shared file appears once."""
    findings: list[Finding] = []
    for domain, config in recipe.demonstration_settings().items():
        title = f"sft {domain}" if domain else "sft"
        found = run_check(title, partial(_check_demonstrated, title, recipe, domain or None, config, models))
        told = {finding.detail for finding in findings if finding.level == "error"}
        findings += [finding for finding in found if finding.detail not in told]
    return findings


def _check_demonstrated(
    title: str, recipe: Recipe, domain: str | None, config: SFTConfig, models: Models
) -> list[Finding]:
    from opd.data.demonstrations import limit_lengths, read_demonstrations
    from opd.pipelines.stages.sft import demonstration_encoder, length_limit, refuse_template

    rows = read_demonstrations(config.source, domain)
    if models.tokenizer is None:
        return []
    writes = demonstration_encoder(recipe, models.tokenizer)
    refuse_template(rows, writes)
    limit, why = length_limit(recipe, config, models.tokenizer)
    some = rows[:: -(-len(rows) // _DEMONSTRATIONS)]
    found = limit_lengths(some, writes, limit, config.too_long, why)
    told = found.describe_dropped(limit, why)
    if not found.rows:
        mend = "shorten them" if why.startswith("the model") else "give `sft` a larger max_length"
        return [Finding("error", title, f"none can be learnt from: {told}; {mend}")]
    lengths = [len(encoded) for _, encoded in found.rows]
    counted = sum(int(encoded.mask.sum()) for _, encoded in found.rows)
    text = (
        f"{len(rows)} demonstrations, {min(lengths)} to {max(lengths)} tokens in the {len(some)} looked at,"
        f" of which {counted / sum(lengths):.0%} are learnt"
    )
    findings = [Finding("ok", title, text)]
    if told:
        findings.append(Finding("warning", title, told))
    cut = set(found.cut)
    ends = {
        int(encoded.response_ids[encoded.mask][-1])
        for row, encoded in found.rows
        if row.prompt.where not in cut
    }
    if ends and not ends & {*writes.stops} and not recipe.rollout.stop:
        last = min(ends)
        detail = (
            f"answers end with {last} {models.tokenizer.convert_ids_to_tokens(last)!r}, at which responses do"
            " not end: the model would never learn to stop; add the id that the chat template ends an answer"
            " with to rollout.stop_ids, or give model.chat_template one that writes an end-of-sequence token"
        )
        findings.append(Finding("error", title, detail))
    return findings


def run_checks(
    recipe: Recipe,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    accepted: AcceptedChanges | None = None,
    thorough: bool = True,
) -> list[Finding]:
    """Return the findings of every check, in the order of a run.

    `thorough=False` is for the check before a run. It loads no weights, and it needs no library of models
    once something is wrong. `run_dir`, `resume` and `accepted` are those of `opd run`. Nothing is left
    behind. A check is left out if an earlier one that it needs failed. An unusable run folder prevents no
    other check.
    """
    path = run_dir or default_path(recipe)
    findings = run_check(
        "run folder", lambda: check_run_dir(path, recipe, resume, accepted or AcceptedChanges())
    )
    if _has_errors(findings) and not thorough:
        return findings
    return findings + _check_recipe(recipe, path, thorough)


def _check_recipe(recipe: Recipe, run_dir: Path, thorough: bool) -> list[Finding]:
    """Return the findings of all checks but that of the run folder."""
    findings = check_sampling(recipe) + check_ranks(recipe) + check_paths(recipe) + check_sinks(recipe)
    findings += check_extras(recipe) + check_cluster(recipe)
    sizes = check_sizes(recipe)
    findings += sizes
    domains: dict[str, Domain] = {}
    sets: dict[str, Domain] = {}
    if not _has_errors(sizes):  # else the sizes may be impossible to make
        findings += check_domains(recipe, domains)
        failed = {finding.title for finding in findings if finding.level == "error"}
        sound = {name: domain for name, domain in domains.items() if f"domain {name}" not in failed}
        findings += check_sandbox(recipe) + check_sandbox(recipe.of_sets()) + check_rewards(recipe, sound)
        findings += check_environments(recipe, sound)
        findings += check_sets(recipe, sets)
        findings += check_publishing(recipe)
    if _has_errors(findings) and not thorough:
        return findings
    # These need the libraries of models, and the checks above do not.
    from opd.pipelines.check.measured import check_base, check_kl
    from opd.pipelines.check.resources import check_answers, check_precision, check_resources

    findings += check_schedule(recipe)
    models = Models()
    whole = len(domains) == len(recipe.domains)
    if not whole and recipe.model.path is None and recipe.model.tokenizer is None:
        return findings  # the tokenizer is made of the domains' characters
    findings += run_check(DEVICE, lambda: check_device(recipe))
    if any(finding.title == DEVICE and finding.level == "error" for finding in findings):
        return findings
    said = {finding.detail for finding in findings}  # prompts are rendered with an environment's tools
    findings += [one for one in check_models(recipe, domains, models) if one.detail not in said]
    findings += check_set_prompts(recipe, sets, models.tokenizer) if models.tokenizer is not None else []
    findings += check_demonstrations(recipe, models)
    findings += check_kinds(recipe) + check_servers(recipe) + check_workers(recipe)
    findings += check_shared(recipe)
    if models.student is None:
        return findings
    findings += run_check("precision", lambda: check_precision(recipe, models))
    findings += check_answers(recipe)
    findings += run_check("resources", lambda: check_resources(recipe, models, run_dir))
    if not _has_errors(findings):
        findings += check_held_out(recipe, domains)
    if thorough and not _has_errors(findings):
        findings += run_check("rewards of the base", lambda: check_base(recipe, domains, models.tokenizer))
        findings += run_check("contamination", lambda: check_contamination(recipe, sets))
        findings += run_check("KL to the teachers", lambda: check_kl(recipe, domains, models.tokenizer))
    return findings


def examine_folders(recipe: Recipe) -> list[Finding]:
    """Check the local model folders of a recipe, with the messages of `examine`.

    It reads configurations, tokenizers and headers of weights, and sends no requests. It ignores names on the
    Hub, URLs and models that a stage of the run makes. A missing folder is a warning.
    """
    model, teachers = recipe.model, given_teachers(recipe)
    if model.chat_template is not None and not _is_place(model.chat_template):
        model = model.model_copy(update={"chat_template": None})
        recipe = recipe.model_copy(update={"model": model})
    places = [place for place in (model.path, model.tokenizer, *teachers.values()) if place is not None]
    findings = []
    if any(Path(place).is_dir() for place in places):  # else the libraries of models are not needed
        findings = check_models(recipe, {}, Models(weights=False))
    if all(map(_is_place, filter(None, (model.path, model.tokenizer)))):
        findings += _warn_if_absent("student", lambda: require_folders(model))
    for name, place in teachers.items():
        if _is_place(place):
            findings += _warn_if_absent(f"teacher {name}", partial(require_folder, Path(place)))
    return findings


def _warn_if_absent(title: str, check: Callable[[], None]) -> list[Finding]:
    """Return a warning if `check` raises for a missing folder."""

    def check_folder() -> list[Finding]:
        check()
        return []

    return [replace(one, level="warning") for one in run_check(title, check_folder)]


def _is_place(path: str) -> bool:
    """Return whether `path` can only be of this machine."""
    return "://" not in path and hub_name(path) is None


def _has_errors(findings: list[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def print_diagnosis(
    recipe: Recipe,
    console: Console | None = None,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    as_json: bool = False,
) -> int:
    """Print the findings and return the exit status: 2 if any is an error, else 0.

    A terminal gets a table. Otherwise each finding is a line (level, check, finding). With `as_json` each
    line is a JSON object with the keys `level`, `check`, `finding` and `numbers`.
    """
    findings = run_checks(recipe, run_dir=run_dir, resume=resume)
    return print_findings(f"opd doctor: {recipe.name}", findings, console, as_json=as_json)
