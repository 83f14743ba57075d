"""The page of what is known has the numbers of the committed results."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from loaded import load_example

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_results_make() -> None:
    evidence = load_example("evidence.py")
    text = evidence.PAGE.read_text("utf-8")
    assert text == evidence.page(text, evidence.table()), "run examples/evidence.py --write"


def test_the_readme_has_the_rows_of_the_results() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for row in load_example("evidence.py").readme_rows():
        assert row in text, "run examples/evidence.py --readme"


def test_every_command_names_a_program_that_is_there() -> None:
    for claim in load_example("evidence.py").CLAIMS:
        for program in re.findall(r"(?:examples|tests)/[\w/]+\.(?:py|sh)", claim.command):
            assert (ROOT / program).is_file(), claim.command


@pytest.mark.slow
@pytest.mark.long
def test_every_command_begins_and_knows_its_options() -> None:
    commands = {claim.command for claim in load_example("evidence.py").CLAIMS}
    for command in sorted(command for command in commands if ".venv/bin/python" in command):
        before, _, rest = command.partition(".venv/bin/python")
        given = dict(part.split("=") for part in shlex.split(before))
        done = subprocess.run(
            [sys.executable, *shlex.split(rest), "--help"],
            cwd=ROOT,
            env=os.environ | given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, command + done.stderr
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in done.stdout, command
