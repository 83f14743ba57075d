"""Processes whose agents run commands are killed at random: nothing runs twice unmarked, nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from full import FULL

LOOP = Path(__file__).with_name("command_kills.py")


@pytest.mark.slow
def test_commands_and_kills(tmp_path):
    """In a process of its own, which is small and forks fast. Hundreds of kills with `--full`."""
    wanted = 300 if FULL else 24
    command = [sys.executable, str(LOOP), "--kills", str(wanted), "--seed", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] >= wanted
    assert counts["agents"] >= 3
    assert counts["again"] > 0, "no kill met a command"
