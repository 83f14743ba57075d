"""What pyright says of the sources, with the settings of `pyproject.toml`, and of programs nobody runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("pyright", reason="needs pyright: .venv/bin/python -m pip install 'pyright[nodejs]'")
PROGRAMS = ("tests/bench", "tests/crash", "examples")
BROKEN = ("is not a known attribute of module", "Argument missing for parameter", "positional argument")


def said(project: Path) -> str:
    """The output of pyright with the settings of a file."""
    command = [sys.executable, "-m", "pyright", "--project", str(project)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.check
def test_the_types_agree():
    found = said(ROOT / "pyproject.toml")
    assert "0 errors" in found, found[-8000:]


@pytest.mark.check
def test_benchmarks_and_examples_call_what_is_there(tmp_path):
    """Of those that take minutes nobody would notice."""
    here = Path(os.path.relpath(ROOT, tmp_path))
    folders = [path.parent for path in ROOT.glob("tests/**/*.py")] + list((ROOT / "examples").iterdir())
    settings = {
        "include": [str(here / name) for name in PROGRAMS],
        "extraPaths": sorted(
            {os.path.relpath(path, tmp_path) for path in folders if path.is_dir()} | {str(here)}
        ),
        "typeCheckingMode": "off",
        "reportAttributeAccessIssue": "error",
        "reportCallIssue": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    found = said(tmp_path / "pyrightconfig.json")
    assert "files analyzed" in found or " error" in found, found[-2000:]
    assert [line for line in found.splitlines() if any(words in line for words in BROKEN)] == []
