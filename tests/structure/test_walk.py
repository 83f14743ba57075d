"""How many files a step walks through: numbers that may fall and not rise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = {"merge": (75, 9, 695, 124, 29), "grpo": (59, 8, 558, 94, 28)}
"""Files, folders, functions and classes that a step of each kind enters, and its deepest stack.
Counts vary by a few. The last files are `token_ids`, what tokenizers add, `transcript`, tokens by request for
the log and its readers, and `torch_backend`, cut from `backend`.
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.check
@pytest.mark.parametrize("kind", MOST)
def test_a_step_can_be_followed(kind):
    # A process of its own: here other tests' threads and what the collector closes would be on the way.
    command = [sys.executable, "-m", "tests.structure.walk", kind, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout.splitlines()[-1])[kind]  # libraries may say something before
    files = step["files"]
    assert len(files) <= MOST[kind][0], files
    assert len({str(Path(file).parent) for file in files}) <= MOST[kind][1], files
    assert step["functions"] <= MOST[kind][2]
    assert step["classes"] <= MOST[kind][3]
    assert len(step["deepest"]) <= MOST[kind][4], step["deepest"]
    assert "pipelines/stages/loop.py" in files
