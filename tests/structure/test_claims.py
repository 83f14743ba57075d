"""What `docs/claims.md` promises of a run without `--full`: a test of every row."""

import os
import re
import subprocess
import sys
from pathlib import Path

import full
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"tests/\w+(?:/test_\w+\.py)?")


def rows() -> list[tuple[str, str]]:
    """Claim, command."""
    lines = (ROOT / "docs" / "claims.md").read_text("utf-8").splitlines()
    cells = [line.strip("| ").split(" | ", 1) for line in lines if line.startswith("| ")]
    return [(claim, command) for claim, command in cells if "`pytest" in command]


def default_commands(command: str) -> list[str]:
    """The `pytest` commands of a row that do not say `--full`."""
    found = re.findall(r"`(pytest [^`]+)`", command)
    return [one for one in found if "--full" not in one]


@pytest.mark.check
def test_every_row_has_a_test_by_default():
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {name: value for name, value in os.environ.items() if name != "OPD_FULL_TESTS"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    collected = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert len(collected) > 100, done.stdout[-2000:] + done.stderr[-2000:]
    without = [
        claim
        for claim, command in rows()
        for files in [FILE.findall(" ".join(default_commands(command)))]
        if files and not any(one == file or one.startswith(f"{file}/") for file in files for one in collected)
    ]
    assert without == []


def test_every_row_without_a_default_test_says_full():
    assert len(rows()) > 40
    assert [
        claim for claim, command in rows() if not default_commands(command) and "--full" not in command
    ] == []


@pytest.mark.check
def test_the_tests_page_shows_what_the_whole_runs_recorded():
    assert full.table() in (ROOT / "tests" / "README.md").read_text("utf-8")
