"""What pyright says of the sources, with the settings of `pyproject.toml`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("pyright", reason="needs pyright: .venv/bin/python -m pip install 'pyright[nodejs]'")


@pytest.mark.slow
def test_the_types_agree():
    command = [sys.executable, "-m", "pyright", "--project", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "0 errors" in done.stdout
