"""Generating processes are killed at any moment: no token that was given out is lost, changed or doubled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import generate_loop
import pytest
from full import FULL

LOOP = Path(__file__).with_name("generate_loop.py")


def kill(folder: Path, count: int, *options: str) -> dict[str, int]:
    """Run the loop with so many kills. Returns its counts."""
    command = [sys.executable, str(LOOP), "--kills", str(count), "--seed", "3", "--folder", str(folder)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300 + count)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_killed_while_recording_expert_choices(tmp_path):
    """A kill at each place: every logged token has the choices of an undisturbed process, bit for bit."""
    counts = generate_loop.run(tmp_path / "log", 7, 3, generate_loop.mixture())
    assert counts["kills"] == 7
    assert counts["tokens"] > 70
    assert sum(name.startswith("killed in ") for name in counts) >= 5


@pytest.mark.slow
def test_killed_often_while_recording_expert_choices(tmp_path):
    wanted = int(os.environ.get("OPD_GENERATE_KILLS", "100" if FULL else "20"))
    assert kill(tmp_path, wanted, "--mixture")["kills"] == wanted


@pytest.mark.slow
def test_killed_while_generating(tmp_path):
    """A hundred with `--full`; `OPD_GENERATE_KILLS=1000` (or 10000) for as many as one likes."""
    usual = "100" if FULL else "20"
    wanted = int(os.environ.get("OPD_GENERATE_KILLS", usual))
    counts = kill(tmp_path, wanted)
    assert counts["kills"] == wanted
    assert counts["killed readers"] >= wanted // 3
    for place in ("write", "tear", "rotation", "compaction", "opening", "time"):
        assert counts[f"killed in {place}"] >= wanted // 20, place
    assert counts["torn"] >= counts["killed in tear"] // 2, "no append was cut in the middle"
    assert counts["batches"] >= wanted // 10, "restarts did not continue"
    assert counts["tokens"] > 10 * wanted
