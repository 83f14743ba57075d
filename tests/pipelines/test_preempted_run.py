"""A run that is told to stop leaves with status 143 and goes on to the same weights."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recipes import write_recipe

SETTINGS = {
    "specialist": {"steps": 40, "prompts_per_step": 16, "group_size": 4, "checkpoint_every": 100},
    "distill": {"steps": 4, "prompts_per_domain": 4},
    "baselines": {"methods": []},
    "evaluation": {"prompts_per_domain": 10},
}


def start(recipe: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(recipe), "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(recipe: Path, out: Path, *options: str) -> str:
    process = start(recipe, out, *options)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return json.loads((out / "stages/merge/done.json").read_text())["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_told_to_stop_and_resumed(tmp_path, workers):
    recipe = write_recipe(tmp_path / "recipe.yaml", runtime={"workers": workers}, **SETTINGS)
    expected = finish(recipe, tmp_path / "undisturbed")
    out = tmp_path / "stopped"
    process = start(recipe, out)
    metrics = out / "stages/specialist-sort/metrics.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, output
    assert "--resume" in output
    assert (out / "stages/specialist-sort/wal").exists()
    assert finish(recipe, out, "--resume") == expected
