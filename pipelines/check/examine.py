"""Find all errors that can be known before a run starts: `opd doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from opd.config import Recipe, SFTConfig
from opd.config.hub_names import hub_name
from opd.config.rewards import FunctionReward
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
from opd.pipelines.check.tokenizers import check_own_prompts, check_prompts
from opd.pipelines.evaluation.prompt_sets import with_set_names
from opd.pipelines.records.run_folder import AcceptedChanges, default_path
from opd.rollout.prompts import Domain

_MOST_PROMPTS = 10_000
"""Prompts a generated source makes for the check, so that a shortage is found before the run."""
_EXAMPLE = 80
"""Characters of an example."""
_DEMONSTRATIONS = 500
"""Demonstrations that the check encodes. The stage encodes all of them first."""


def check_set_prompts(recipe: Recipe, sets: dict[str, Domain], models: Models) -> list[Finding]:
    """Check that prompts of sets can be encoded, by teachers with a tokenizer of their own too, and fit."""
    from opd.teachers.skeleton import small_files

    findings: list[Finding] = []
    of_sets = recipe.of_sets()
    for name, domain in sets.items():
        checked = run_check(f"prompts {name}", check_prompts, of_sets, domain, models.tokenizer)
        findings += _with_set_names(recipe, checked)
    for name, source in recipe.given_teachers().items() if sets and not _has_errors(findings) else ():
        if name in models.teachers and recipe.teacher_tokenizer(name) is not None:
            with small_files(source) as folder:
                own = run_check(f"teacher {name}", check_own_prompts, of_sets, name, folder, sets, models)
            findings += _with_set_names(recipe, own)
    return findings


def check_contamination(recipe: Recipe, sets: dict[str, Domain]) -> list[Finding]:
    """Warn for each set with evaluation prompts that are also in the training data."""
    from opd.pipelines.evaluation.evaluate import find_contamination
    from opd.pipelines.stages.domains import load_domains

    title = "contamination"
    report = find_contamination(recipe, load_domains(recipe), sets)
    if not report:
        return []
    findings = []
    for name, matches in report["found"].items():
        if matches["contaminated"]:
            example = matches["examples"][0]
            shared = example["shared"]
            if len(shared) > _EXAMPLE:
                shared = f"{shared[:_EXAMPLE]} ..."
            detail = (
                f"{matches['contaminated']} of {matches['prompts']} evaluation prompts of {name} share"
                f" {report['ngram']} words in a row, or all they say, with what the run is trained on, such"
                f" as {shared!r} ({example['where']}); take them out of one of the two"
            )
            numbers = {"contaminated": matches["contaminated"], "prompts": matches["prompts"]}
            findings.append(Finding("warning", title, detail, numbers))
    prompts = sum(matches["prompts"] for matches in report["found"].values())
    sound = f"no evaluation prompt of {prompts:,} is in the {report['texts']:,} training texts"
    return findings or [Finding("ok", title, sound)]


def _check_set(recipe: Recipe, of_sets: Recipe, name: str, sets: dict[str, Domain]) -> list[Finding]:
    from opd.data.load import load_domain
    from opd.rewards.registry import check_labels, scored_by

    config, wanted = of_sets.domains[name], recipe.evaluation.sets[name].prompts
    count = wanted if config.is_file else min(_MOST_PROMPTS, wanted)
    domain = load_domain(name, config, seed=recipe.seed, held_out_prompts=count)
    check_scorer(of_sets, name)
    sets[name] = domain
    # A set has no training prompts, so simple answers are scored on its first prompt.
    rewarded = check_rewards(of_sets, {name: replace(domain, train=domain.held_out)})
    check_labels(config, name, domain.held_out)
    count = len(domain.held_out) if config.is_file else wanted
    sound = Finding(
        "ok", f"domain {name}", f"{config.source}, {count} prompts, scored by {scored_by(config)}"
    )
    return [sound, *(finding for finding in rewarded if finding.level != "ok")]


def _with_set_names(recipe: Recipe, findings: list[Finding]) -> list[Finding]:
    """Return `findings`, named for their evaluation set."""
    names = recipe.evaluation.sets
    return [
        replace(
            finding, title=with_set_names(finding.title, names), detail=with_set_names(finding.detail, names)
        )
        for finding in findings
    ]


def check_demonstrations(recipe: Recipe, models: Models) -> list[Finding]:
    """Check the demonstrations of every `sft` of the recipe. An error in a shared file appears once."""
    findings: list[Finding] = []
    for domain, config in recipe.demonstration_settings().items():
        title = f"sft {domain}" if domain else "sft"
        checked = run_check(title, _check_demonstrated, title, recipe, domain or None, config, models)
        errors = {finding.detail for finding in findings if finding.level == "error"}
        findings += [finding for finding in checked if finding.detail not in errors]
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
    demonstrations = limit_lengths(some, writes, limit, config.too_long, why)
    dropped = demonstrations.describe_dropped(limit, why)
    if not demonstrations.rows:
        mend = "shorten them" if why.startswith("the model") else "give `sft` a larger max_length"
        return [Finding("error", title, f"none can be learnt from: {dropped}; {mend}")]
    lengths = [len(encoded) for _, encoded in demonstrations.rows]
    counted = sum(int(encoded.mask.sum()) for _, encoded in demonstrations.rows)
    text = (
        f"{len(rows)} demonstrations, {min(lengths)} to {max(lengths)} tokens in the {len(some)} looked at,"
        f" of which {counted / sum(lengths):.0%} are learnt"
    )
    findings = [Finding("ok", title, text)]
    if dropped:
        findings.append(Finding("warning", title, dropped))
    cut = set(demonstrations.cut)
    ends = {
        int(encoded.response_ids[encoded.mask][-1])
        for row, encoded in demonstrations.rows
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
    of_folder = run_check("run folder", check_run_dir, path, recipe, resume, accepted or AcceptedChanges())
    if _has_errors(of_folder) and not thorough:
        return of_folder
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
        of_sets = recipe.of_sets()
        findings += check_sandbox(recipe) + check_sandbox(of_sets) + check_rewards(recipe, sound)
        findings += check_environments(recipe, sound)
        for name in of_sets.domains:
            checked = run_check(f"domain {name}", _check_set, recipe, of_sets, name, sets)
            findings += _with_set_names(recipe, checked)
        findings += run_check("storage.published", check_publishing, recipe)
    if thorough or not _has_errors(findings):
        findings += _check_with_models(recipe, path, domains, sets, findings, thorough)
    return of_folder + findings


def _check_with_models(
    recipe: Recipe,
    run_dir: Path,
    domains: Mapping[str, Domain],
    sets: dict[str, Domain],
    earlier: list[Finding],
    thorough: bool,
) -> list[Finding]:
    """Return the findings of the checks that need the libraries of models. `earlier`: those of the others."""
    from opd.pipelines.check.measured import check_base, check_kl
    from opd.pipelines.check.resources import check_answers, check_precision, check_resources

    findings = check_schedule(recipe)
    models = Models()
    is_complete = len(domains) == len(recipe.domains)
    if not is_complete and recipe.model.path is None and recipe.model.tokenizer is None:
        return findings  # the tokenizer is made of the domains' characters
    device = run_check(DEVICE, check_device, recipe)
    findings += device
    if device:
        return findings
    # Prompts are rendered with an environment's tools, so its errors would appear again.
    details = {finding.detail for finding in earlier + findings}
    findings += [one for one in check_models(recipe, domains, models) if one.detail not in details]
    findings += check_set_prompts(recipe, sets, models) if models.tokenizer is not None else []
    findings += check_demonstrations(recipe, models)
    findings += check_kinds(recipe) + check_servers(recipe) + check_workers(recipe)
    findings += check_shared(recipe)
    if models.student is None:
        return findings
    findings += run_check("precision", check_precision, recipe, models)
    findings += check_answers(recipe)
    findings += run_check("resources", check_resources, recipe, models, run_dir)
    if not _has_errors(earlier + findings):
        findings += check_held_out(recipe, domains)
    if thorough and not _has_errors(earlier + findings):
        findings += run_check("rewards of the base", check_base, recipe, domains, models.tokenizer)
        findings += run_check("contamination", check_contamination, recipe, sets)
        findings += run_check("KL to the teachers", check_kl, recipe, domains, models.tokenizer)
    return findings


def examine_paths(recipe: Recipe) -> list[Finding]:
    """Check what a recipe names on this machine: functions, files of prompts, folders of models. The messages
    are those of `run_checks`.

    It reads configurations, tokenizers and headers of weights, and sends no requests. It ignores names on the
    Hub, URLs and models that a stage of the run makes.
    """
    return _examine_sources(recipe) + _examine_folders(recipe)


def _examine_sources(recipe: Recipe) -> list[Finding]:
    from opd.data.load import require_file

    findings = [finding for finding in check_paths(recipe) if finding.level == "error"]
    of_sets = recipe.of_sets()
    for settings in (recipe, of_sets):
        checked: list[Finding] = []
        for name, config in settings.domains.items():
            if isinstance(config.reward, FunctionReward):
                checked += run_check(f"domain {name}", check_scorer, settings, name)
            if config.is_file and _is_place(config.source):
                checked += run_check(f"domain {name}", require_file, Path(config.source))
        findings += checked if settings is recipe else _with_set_names(recipe, checked)
    for domain, config in recipe.demonstration_settings().items():
        if _is_place(config.source):
            findings += run_check(f"sft {domain}".strip(), require_file, Path(config.source))
    return findings


def _examine_folders(recipe: Recipe) -> list[Finding]:
    model, teachers = recipe.model, given_teachers(recipe)
    if model.chat_template is not None and not _is_place(model.chat_template):
        model = model.model_copy(update={"chat_template": None})
        recipe = recipe.model_copy(update={"model": model})
    sources = [source for source in (model.path, model.tokenizer, *teachers.values()) if source is not None]
    findings = []
    if any(Path(source).is_dir() for source in sources):  # else the libraries of models are not needed
        findings = check_models(recipe, {}, Models(weights=False))
    if all(map(_is_place, filter(None, (model.path, model.tokenizer)))):
        findings += run_check("student", require_folders, model)
    for name, source in teachers.items():
        if _is_place(source):
            findings += run_check(f"teacher {name}", require_folder, Path(source))
    return findings


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
