"""CONTRIBUTING.md names the files to read in an afternoon, and they can be."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_to_be_read_in_an_afternoon_is_short():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("## Read in an afternoon")[2].partition("\n## ")[0]
    files = re.findall(r"\]\(([^)]+)\)", section)
    assert len(files) > 8
    assert sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in files) <= 3300
