"""`opd doctor`: everything that can be known to be wrong before a run starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opd.config import Recipe
from opd.config.hub_names import hub_name
from opd.models.hf_folder import require_folder
from opd.pipelines.commands.ending import one_line
from opd.pipelines.doctor.checks import (
    Finding,
    attempt,
    check_domains,
    check_extras,
    check_held_out,
    check_kinds,
    check_paths,
    check_publishing,
    check_ranks,
    check_run_dir,
    check_sampling,
    check_schedule,
    check_sinks,
    check_sizes,
    given_teachers,
    number_of,
)
from opd.pipelines.doctor.cluster import check_cluster
from opd.pipelines.doctor.demonstrations import check_demonstrations
from opd.pipelines.doctor.environments import check_environments
from opd.pipelines.doctor.evaluation import check_contamination, check_set_prompts, check_sets
from opd.pipelines.doctor.models import DEVICE, Models, check_device, check_models, require_folders
from opd.pipelines.doctor.rewards import check_rewards, check_sandbox
from opd.pipelines.doctor.servers import check_servers, check_shared, check_workers
from opd.pipelines.records.run_folder import Accepted, default_path

if TYPE_CHECKING:
    from opd.rollout.prompts import Domain

__all__ = ["Finding", "diagnose", "examine", "show"]

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def examine(
    recipe: Recipe,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    accepted: Accepted | None = None,
    thorough: bool = True,
) -> list[Finding]:
    """Every check, in the order of a run; with `thorough=False`, as before a run, those that load no weights,
    and once something is wrong none that needs a library of models.

    `run_dir`, `resume` and `accepted` are what `opd run` would be told. Nothing is left behind. A check that
    cannot be made because an earlier one failed is left out; a run folder that cannot be used stands in
    the way of none.
    """
    path = run_dir or default_path(recipe)
    findings = attempt("run folder", lambda: check_run_dir(path, recipe, resume, accepted or Accepted()))
    if _errors(findings) and not thorough:
        return findings
    return findings + _examine(recipe, path, thorough)


def _examine(recipe: Recipe, run_dir: Path, thorough: bool) -> list[Finding]:
    """All checks but that of the run folder."""
    findings = check_sampling(recipe) + check_ranks(recipe) + check_paths(recipe) + check_sinks(recipe)
    findings += check_extras(recipe) + check_cluster(recipe)
    sizes = check_sizes(recipe)
    findings += sizes
    domains: dict[str, Domain] = {}
    sets: dict[str, Domain] = {}
    if not _errors(sizes):  # what they ask for may be impossible to make
        findings += check_domains(recipe, domains)
        failed = {finding.title for finding in findings if finding.level == "error"}
        sound = {name: domain for name, domain in domains.items() if f"domain {name}" not in failed}
        findings += check_sandbox(recipe) + check_sandbox(recipe.of_sets()) + check_rewards(recipe, sound)
        findings += check_environments(recipe, sound)
        findings += check_sets(recipe, sets)
        findings += check_publishing(recipe)
    if _errors(findings) and not thorough:
        return findings
    # With the libraries of models, which the checks above spare.
    from opd.pipelines.doctor.estimate import check_asked, check_precision, check_resources
    from opd.pipelines.doctor.kl import check_base, check_kl

    findings += check_schedule(recipe)
    models = Models()
    whole = len(domains) == len(recipe.domains)
    if not whole and recipe.model.path is None and recipe.model.tokenizer is None:
        return findings  # the tokenizer is made of the domains' characters
    findings += check_device(recipe)
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
    findings += attempt("precision", lambda: check_precision(recipe, models))
    findings += check_asked(recipe)
    findings += attempt("resources", lambda: check_resources(recipe, models, run_dir))
    if not _errors(findings):
        findings += check_held_out(recipe, domains)
    if thorough and not _errors(findings):
        findings += attempt("rewards of the base", lambda: check_base(recipe, domains, models.tokenizer))
        findings += attempt("contamination", lambda: check_contamination(recipe, sets))
        findings += attempt("KL to the teachers", lambda: check_kl(recipe, domains, models.tokenizer))
    return findings


def examine_folders(recipe: Recipe) -> list[Finding]:
    """What the models that lie in folders here give a run to refuse, in the words of `examine`.

    Configurations, tokenizers and headers of weights are read, and nobody is asked: names on the Hub, URLs
    and what a stage of the run makes are left out. A folder that is not there, or not yet, is a warning.
    """
    model, teachers = recipe.model, given_teachers(recipe)
    if model.chat_template is not None and not _is_place(model.chat_template):
        model = model.model_copy(update={"chat_template": None})
        recipe = recipe.model_copy(update={"model": model})
    places = [place for place in (model.path, model.tokenizer, *teachers.values()) if place is not None]
    findings = []
    if any(Path(place).is_dir() for place in places):  # else without the libraries of models
        findings = check_models(recipe, {}, Models(weights=False))
    if all(map(_is_place, filter(None, (model.path, model.tokenizer)))):
        findings += _absent("student", lambda: require_folders(model))
    for name, place in teachers.items():
        if _is_place(place):
            findings += _absent(f"teacher {name}", partial(require_folder, Path(place)))
    return findings


def _absent(title: str, check: Callable[[], None]) -> list[Finding]:
    """A warning if `check` raises for a folder that is not there."""

    def found() -> list[Finding]:
        check()
        return []

    return [replace(one, level="warning") for one in attempt(title, found)]


def _is_place(path: str) -> bool:
    """Whether `path` can only be of this machine."""
    return "://" not in path and hub_name(path) is None


def _errors(findings: list[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def diagnose(
    recipe: Recipe,
    console: Console | None = None,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    as_json: bool = False,
) -> int:
    """Print the findings; returns the exit status: 2 if any is an error, else 0.

    A table in a terminal, else a line each (level, check, finding); `as_json` one JSON object a line with
    the keys `level`, `check`, `finding` and `numbers`.
    """
    findings = examine(recipe, run_dir=run_dir, resume=resume)
    return show(f"opd doctor: {recipe.name}", findings, console, as_json=as_json)


def show(
    title: str, findings: list[Finding], console: Console | None = None, *, as_json: bool = False
) -> int:
    """Print `findings` as `diagnose` does, and return its status."""
    console = console or Console()
    if as_json:
        lines = [
            json.dumps({"level": f.level, "check": f.title, "finding": f.detail, "numbers": dict(f.numbers)})
            for f in findings
        ]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    elif console.is_terminal:
        console.print(_table(title, findings), markup=True)
    else:
        lines = [f"{f.level:<8} {one_line(f'{f.title}: {f.detail}')}" for f in findings]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    errors, warnings = (sum(f.level == level for f in findings) for level in ("error", "warning"))
    if not as_json:
        console.print(f"{number_of(errors, 'error')}, {number_of(warnings, 'warning')}", highlight=False)
    return 2 if errors else 0


def _table(title: str, findings: list[Finding]) -> Table:
    # Texts, not markup: they hold names, answers and the words of servers.
    table = Table(title=Text(one_line(title)), title_justify="left", show_lines=False)
    for column in ("", "check", "finding"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(_MARKS[finding.level], Text(one_line(finding.title)), Text(one_line(finding.detail)))
    return table
