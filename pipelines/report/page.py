"""Draw the pages from `templates/`: one HTML text each, with its style and charts inside and no network.

A template escapes any text. Only the project's own content is inserted unescaped (`|safe`): the SVG of
charts, a page's policy, the script of the live page.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from opd.pipelines.report import display_text, figures, tables
from opd.pipelines.report.charts import css_variables
from opd.pipelines.report.figures import ChartCues
from opd.pipelines.report.results import Run
from opd.pipelines.report.verdict import compare_models, follows_teachers, write_verdict
from opd.redact import redact
from opd.untrusted import escape_controls

TEMPLATES = Path(__file__).parent / "templates"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The browser's permissions of the page: to be drawn."""


def render_report(run: Run) -> str:
    cues, facts = ChartCues(run), run.facts
    headline = [run.name, *([f"seed {facts['seed']}"] if "seed" in facts else [])]
    headline += [str(facts["created"]).replace("T", " ")] if "created" in facts else []
    headline += [f"opd {facts['version']}"] if "version" in facts else []
    return draw_template(
        "report.html",
        title=run.name,
        run=run,
        cues=cues,
        facts=headline,
        verdict=write_verdict(run),
        totals=sorted({a.count.total for model in run.models for a in model.sampled.values()}),
        groups=figures.chart_groups(run, cues),
        teachers=tables.teachers_table(run, cues),
        last=max(
            (int(values["kl_steps"]) for values in run.teachers.values() if "kl_steps" in values), default=0
        ),
        recipe=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=100)
        if run.config
        else "",
    )


def draw_template(template: str, **values: Any) -> Markup:
    """Fill a template with `values`, without secrets and without control characters."""
    return Markup(clean_text(fill_template(template, **values)))


def fill_template(template: str, **values: Any) -> str:
    return _template_environment().get_template(template).render(values)


def clean_text(text: str) -> str:
    """Return `text` without secrets and control characters."""
    return escape_controls(redact(text))


def _clean_value(value: object) -> Any:
    """Return a value of a template without secrets and control characters. HTML stays as it is."""
    return clean_text(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@cache
def _template_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean_value,  # before escaping, which would hide a secret
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("amount", "model_label", "percent", "point_bounds", "points", "stage_label"):
        environment.filters[name] = getattr(display_text, name)
    environment.globals |= {
        "figures": figures,
        "tables": tables,
        "variables": css_variables,
        "policy": POLICY,
    }
    environment.globals |= {"plain_table": tables.plain_table, "machine_words": machine_words}
    environment.globals |= {"compare": compare_models, "follows": follows_teachers}
    environment.globals["m"] = environment.get_template("macros.html").module
    return environment


def machine_words(run: Run) -> list[str]:
    """List the known facts of the run's machine."""
    formats = {"cpu": "{}", "cores": "{} cores", "python": "Python {}", "torch": "PyTorch {}"}
    machine = run.facts.get("machine", {})
    return [text.format(machine[key]) for key, text in formats.items() if key in machine]
