"""The table of `examples/self_distillation`: runs that are not there are named, and nothing is written."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "self_distillation"


def test_a_folder_without_a_run_is_named(tmp_path):
    kept = (EXAMPLE / "results" / "rarely.json").read_bytes()
    command = [sys.executable, EXAMPLE / "table.py", tmp_path / "none"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"there is no {tmp_path}/none-grpo/stages" in ended.stderr
    assert (EXAMPLE / "results" / "rarely.json").read_bytes() == kept
