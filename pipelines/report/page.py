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

from opd.foreign import visible
from opd.pipelines.report import figures, tables, words
from opd.pipelines.report.charts import variables
from opd.pipelines.report.figures import Cues
from opd.pipelines.report.results import Run
from opd.pipelines.report.verdict import compare, follows, write_verdict
from opd.redact import redact

TEMPLATES = Path(__file__).parent / "templates"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The browser's permissions of the page: to be drawn."""


def render(run: Run) -> str:
    """Draw the whole report."""
    cues, facts = Cues(run), run.facts
    told = [run.name, *([f"seed {facts['seed']}"] if "seed" in facts else [])]
    told += [str(facts["created"]).replace("T", " ")] if "created" in facts else []
    told += [f"opd {facts['version']}"] if "version" in facts else []
    return draw(
        "report.html",
        title=run.name,
        run=run,
        cues=cues,
        facts=told,
        verdict=write_verdict(run),
        totals=sorted({a.count.total for model in run.models for a in model.sampled.values()}),
        groups=figures.groups(run, cues),
        teachers=tables.teachers_table(run, cues),
        last=max(
            (int(values["kl_steps"]) for values in run.teachers.values() if "kl_steps" in values), default=0
        ),
        recipe=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=100)
        if run.config
        else "",
    )


def draw(template: str, **told: Any) -> Markup:
    """Fill a template with `told`, without secrets and without control characters."""
    return Markup(clean(fill(template, **told)))


def fill(template: str, **told: Any) -> str:
    """Fill a template with `told`."""
    return _environment().get_template(template).render(told)


def clean(text: str) -> str:
    """Return `text` without secrets and control characters."""
    return visible(redact(text))


def _shown(value: Any) -> Any:
    """Return a value of a template without secrets and control characters. HTML stays as it is."""
    return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,  # before escaping, which would hide a secret
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("amount", "model_label", "percent", "point_bounds", "points", "stage_label"):
        found.filters[name] = getattr(words, name)
    found.globals |= {"figures": figures, "tables": tables, "variables": variables, "policy": POLICY}
    found.globals |= {"plain_table": tables.plain_table, "machine_words": machine_words}
    found.globals |= {"compare": compare, "follows": follows}
    found.globals["m"] = found.get_template("macros.html").module
    return found


def machine_words(run: Run) -> list[str]:
    """List the known facts of the run's machine."""
    told = {"cpu": "{}", "cores": "{} cores", "python": "Python {}", "torch": "PyTorch {}"}
    machine = run.facts.get("machine", {})
    return [text.format(machine[key]) for key, text in told.items() if key in machine]
