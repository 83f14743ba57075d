"""Every folder of tests has its row in the tests' page, and its job every night."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}


def test_every_folder_of_tests_runs_at_night():
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "full.yml").read_text("utf-8"))
    lines = nightly["jobs"]["tests"]["strategy"]["matrix"]["folders"]
    assert sorted(" ".join(lines).split()) == sorted(FOLDERS)


def test_every_folder_of_tests_is_in_their_page():
    rows = re.findall(r"(?m)^\| `([^|]+)` \|", (ROOT / "tests" / "README.md").read_text("utf-8"))
    named = {word.strip("/") for row in rows for word in row.split()}
    assert named >= FOLDERS, FOLDERS - named
