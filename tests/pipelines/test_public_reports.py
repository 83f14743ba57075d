"""Inputs of public reports, one by one; and the documentation's page of them."""

from pathlib import Path

import pytest
from public_reports import Report, page
from reported_adapters import ADAPTERS
from reported_models import MODELS
from reported_rewards import REWARDS
from reported_rows import RECIPES, ROWS
from reported_texts import TEXTS

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
GROUPS = {
    "Models": MODELS,
    "Adapters": ADAPTERS,
    "Tokenizers, templates, demonstrations": TEXTS,
    "Data": ROWS,
    "Answers and rewards": REWARDS,
    "Recipes and command lines": RECIPES,
}
REPORTS = [one for group in GROUPS.values() for one in group]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "public_inputs.md"
LEAST = 60


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "report", [pytest.param(one, id=str(one), marks=pytest.mark.long if one.long else ()) for one in REPORTS]
)
def test_a_report(report: Report, tmp_path: Path):
    if report in ADAPTERS:
        pytest.importorskip("peft")
    report.tried(tmp_path)


def test_no_report_is_there_twice():
    assert len({one.source for one in REPORTS}) == len(REPORTS) >= LEAST


def test_the_documentation_has_the_table():
    assert "\n".join(page(GROUPS)) in PAGE.read_text("utf-8")
