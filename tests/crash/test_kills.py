"""Writers and readers of one log are killed at random moments: nothing acknowledged is lost or doubled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from full import FULL

LOOP = Path(__file__).with_name("kill_loop.py")


def run(kills: int, folder: Path | str, seed: int) -> dict[str, int]:
    """In a process of its own, which is small and forks fast."""
    command = [sys.executable, str(LOOP), "--kills", str(kills), "--seed", str(seed), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def memory_folder(tmp_path: Path) -> Path | str:
    """The cache survives `kill -9` whatever is below it, so that a file system in memory tests the same."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path


def test_kills_on_a_disk(tmp_path):
    counts = run(40, tmp_path, seed=1)
    assert counts["kills"] == 40
    assert counts["acknowledged_calls"] > 100


@pytest.mark.slow
def test_hundreds_of_kills(tmp_path):
    """A thousand with `--full`; `OPD_KILLS=10000` for as many as one likes."""
    wanted = int(os.environ.get("OPD_KILLS", "1000" if FULL else "150"))
    counts = run(wanted, memory_folder(tmp_path), seed=2)
    assert counts["kills"] == wanted
    assert counts["torn"] > wanted // 50, "no append was cut in the middle"
    assert counts["in_flight_kept"] > wanted // 100
    assert counts["opening"] > wanted // 100
    assert counts["reads"] > wanted // 10
