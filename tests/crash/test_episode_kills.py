"""Processes are killed in the middle of episodes: no token lost, no command twice, masks right."""

import json
import os
import subprocess
import sys
from pathlib import Path

from full import FULL

LOOP = Path(__file__).with_name("episode_loop.py")


def test_killed_in_the_middle_of_episodes(tmp_path):
    """`OPD_EPISODE_KILLS=1000` for as many as one likes. With `--episodes 5120` the script has enough of them
    to compare their distribution.
    """
    wanted = int(os.environ.get("OPD_EPISODE_KILLS", "200" if FULL else "3"))
    command = [sys.executable, str(LOOP), "--kills", str(wanted), "--seed", "3", "--folder", str(tmp_path)]
    episodes = 64 if FULL else 12
    command += ["--episodes", str(episodes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600 + 10 * wanted)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    counts = found["counts"]
    assert counts["kills"] >= wanted
    assert counts["commands"] > wanted, "restarts did not continue"
    assert wanted < 200 or counts["again"] > 0, "no kill met a command"
    assert wanted < 200 or counts["interrupted"] > 0, "no kill met a command that may not be repeated"
    assert all(arm["episodes"] >= episodes for arm in found["arms"].values())
    assert {"resumed", "undisturbed", "restarted"} <= found["arms"].keys()
