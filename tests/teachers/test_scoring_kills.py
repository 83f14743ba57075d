import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from tiny_published import publish

_KILLS = int(os.environ.get("OPD_SCORING_KILLS", "5"))


@pytest.mark.slow
def test_kill_9_while_scoring_leaves_right_rows_and_nothing_else(tmp_path):
    """Kills (`OPD_SCORING_KILLS`, 5) while layers are streamed and rows are cached and evicted."""
    for seed, name in enumerate(["a", "b"]):
        publish(tiny.model(seed=seed), tmp_path / name)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    script = Path(__file__).with_name("scoring_kills.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(_KILLS)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["right"] == seen["blobs"] > 5
    assert seen["evicting"] > 0
    assert list(temporary.iterdir()) == []
