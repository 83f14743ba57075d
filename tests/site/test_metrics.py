"""The documentation's table of metrics is what the code writes.

`tests/pipelines/conftest.py` holds every step of every run of its tests against it as well.
"""

import ast
import functools
import re
from pathlib import Path

import pytest
from metric_table import NAMES, documented, undocumented

from opd.config.watch import METRICS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.check
SOURCES = [
    path
    for top in ("opd", "pipelines", "teachers")
    for path in sorted((ROOT / top).rglob("*.py"))
    if not any(part in ("report", "doctor", "simulate") for part in path.parts)
]
KEY = re.compile(r"(?:policy|mismatch|staleness|correction|reward|length|kl|loss|tokens)/[a-z_0-9]{2,}")


@functools.cache
def literals() -> set[str]:
    """The strings of the code, and the parts of those that are put together."""
    return {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@functools.cache
def written() -> set[str]:
    """The strings of the code, what metrics are put together from, and its fields."""
    parts = {found for text in literals() for found in (text, text + "/", text.split("/")[-1])}
    parts |= {f"rollout/{text}" for text in literals()} | {f"length/p{share}" for share in (10, 50, 90)}
    sources = (path.read_text("utf-8") for path in SOURCES)
    return parts | {word for text in sources for word in re.findall(r"^    (\w+): ", text, re.M)}


def test_every_metric_that_is_named_in_the_code_has_a_row():
    assert undocumented(sorted(found for found in literals() if KEY.fullmatch(found))) == []


@pytest.mark.parametrize("name", documented())
def test_every_row_is_of_a_metric_that_the_code_names(name):
    fixed = [part for part in re.split(r"\b[A-Z]+\b", name) if part.strip("/")]
    assert set(fixed) <= written(), f"nothing writes {name}; take it out of the table"


def test_metrics_that_rules_may_ask_for_have_a_row():
    assert set(METRICS) == set(documented())


def test_a_metric_without_a_row_is_found():
    keys = ["kl/math", "kl_at/16", "kl_at/x", "time/train", "teacher/a/wait_seconds", "lr", "lrs"]
    assert undocumented(keys) == ["kl_at/x", "lrs"]
    assert set(NAMES) >= {"DOMAIN", "TEACHER"}
