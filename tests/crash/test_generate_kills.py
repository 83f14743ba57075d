"""Generating processes are killed at any moment: no token that was given out is lost, changed or doubled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from full import FULL

LOOP = Path(__file__).with_name("generate_loop.py")


@pytest.mark.slow
def test_killed_while_generating(tmp_path):
    """A hundred with `--full`; `OPD_GENERATE_KILLS=1000` (or 10000) for as many as one likes."""
    usual = "100" if FULL else "20"
    wanted = int(os.environ.get("OPD_GENERATE_KILLS", usual))
    command = [sys.executable, str(LOOP), "--kills", str(wanted), "--seed", "3", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300 + wanted)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    counts = json.loads(done.stdout)
    assert counts["kills"] == wanted
    assert counts["killed readers"] >= wanted // 3
    for place in ("write", "tear", "rotation", "compaction", "opening", "time"):
        assert counts[f"killed in {place}"] >= wanted // 20, place
    assert counts["torn"] >= counts["killed in tear"] // 2, "no append was cut in the middle"
    assert counts["batches"] >= wanted // 10, "restarts did not continue"
    assert counts["tokens"] > 10 * wanted
