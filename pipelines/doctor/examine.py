"""`opd doctor`: everything that can be known to be wrong before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from opd.config import Recipe
from opd.pipelines.doctor.checks import (
    Finding,
    attempt,
    check_domains,
    check_paths,
    check_run_dir,
    check_sampling,
    check_schedule,
)
from opd.pipelines.doctor.estimate import check_precision, check_resources
from opd.pipelines.doctor.kl import check_kl
from opd.pipelines.doctor.models import Models, check_models
from opd.pipelines.doctor.served import check_served
from opd.pipelines.run_folder import default_path

if TYPE_CHECKING:
    from opd.data.prompts import Domain

__all__ = ["Finding", "diagnose", "examine"]

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def examine(recipe: Recipe, *, run_dir: Path | None = None, thorough: bool = True) -> list[Finding]:
    """Every check, in the order of a run; with `thorough=False` those that load no weights.

    Nothing is written. A check that cannot be made because an earlier one failed is left out.
    """
    findings = check_sampling(recipe) + check_schedule(recipe)
    path = run_dir
    if path is None:
        findings += attempt("run folder", lambda: check_run_dir(default_path(recipe)))
        path = Path(recipe.run_dir or "runs")
    else:
        findings += check_run_dir(path)
    findings += check_paths(recipe)
    domains: dict[str, Domain] = {}
    findings += check_domains(recipe, domains)
    models = Models()
    findings += check_models(recipe, domains, models)
    findings += check_served(recipe)
    findings += attempt("precision", lambda: check_precision(recipe, models))
    findings += check_resources(recipe, models, path)
    sound = not any(finding.level == "error" for finding in findings)
    if thorough and sound:
        findings += attempt("KL to the teachers", lambda: check_kl(recipe, domains, models.tokenizer))
    return findings


def diagnose(recipe: Recipe, console: Console | None = None) -> int:
    """Print the findings as a table; returns the exit status: 2 if any is an error, else 0."""
    console = console or Console()
    findings = examine(recipe)
    table = Table(title=f"opd doctor: {recipe.name}", title_justify="left", show_lines=False)
    for column in ("", "check", "finding"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(_MARKS[finding.level], finding.title, finding.detail)
    console.print(table, markup=True)
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(f"{errors} errors, {warnings} warnings")
    return 2 if errors else 0
