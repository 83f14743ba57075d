"""The list of limits: each sentence that it quotes is one that the code says, and other pages lead to it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.check
PAGE = ROOT / "docs" / "reference" / "limits.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| you ")
]
SAID = [row for row in ROWS if len(row) == 3]


@cache
def sentences() -> str:
    """Every text of the code and its data, with parts that are filled in left out, one a line."""
    names = yaml.safe_load((ROOT / "opd" / "config" / "other_names.yaml").read_text("utf-8"))
    found = [row["note"] for row in names["rows"] if "note" in row]
    for folder in ("opd", "kernels", "pipelines", "storage", "teachers"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value for part in node.values if isinstance(part, ast.Constant))
                    found.append("".join(str(part) for part in parts))
    return "\n".join(found)


@pytest.mark.parametrize("row", SAID, ids=lambda row: row[0][:40])
def test_the_code_says_what_the_page_quotes(row):
    quoted = re.fullmatch(r"`([^`]+)`", row[2])
    assert quoted or row[2] == "Nothing"
    assert quoted is None or quoted[1] in sentences()


def test_most_limits_are_told_by_the_code():
    assert sum(row[2] != "Nothing" for row in SAID) > 30


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/recipes/scale.md", "CHANGELOG.md"])
def test_there_is_one_list(page):
    text = (ROOT / page).read_text("utf-8")
    assert "reference/limits.md" in text
    assert "## Not there yet" not in text
