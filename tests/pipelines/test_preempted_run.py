"""A run that is told to stop, or is killed, in the middle of responses goes on to the same weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from full import FULL
from recipes import tiny_recipe, write_recipe

from opd.pipelines.cli import main

BASE = tiny_recipe().base
assert BASE is not None
SETTINGS = {
    "base": BASE.model_dump(exclude_none=True) | {"steps": 200 if FULL else 30},
    "specialist": {
        "steps": 40 if FULL else 2,
        "prompts_per_step": 16,
        "group_size": 4,
        "checkpoint_every": 100,
    },
    "distill": {"steps": 4, "prompts_per_domain": 4},
    "baselines": {"methods": []},
    "evaluation": {"prompts_per_domain": 10},
}


def recipe_for(folder: Path, workers: int) -> Path:
    return write_recipe(folder / "recipe.yaml", runtime={"workers": workers}, **SETTINGS)


def start(recipe: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(recipe), "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(recipe: Path, out: Path, *options: str) -> str:
    main(["run", str(recipe), "--out", str(out), *options])
    return json.loads((out / "stages/merge/done.json").read_text())["digest"]


def interrupt(recipe: Path, out: Path, stage: str, steps: int, number: int) -> tuple[int, str]:
    """Start a run and send it a signal after some steps of `stage`; its exit status and output."""
    process = start(recipe, out)
    metrics = out / "stages" / stage / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    return process.returncode, output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Digest of the student at the end of a run that nobody disturbs, one stage after another."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return finish(recipe_for(folder, 1), folder / "run")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_told_to_stop_and_resumed(tmp_path, undisturbed, workers):
    """It leaves with status 143."""
    recipe, out = recipe_for(tmp_path, workers), tmp_path / "stopped"
    status, output = interrupt(recipe, out, "specialist-sort", 2, signal.SIGTERM)
    assert status == 143, output
    assert "--resume" in output
    assert (out / "stages/specialist-sort/wal").exists()
    assert finish(recipe, out, "--resume") == undisturbed


def test_killed_in_the_merge_and_resumed(tmp_path, undisturbed):
    """With everything in one process, and responses in memory."""
    recipe, out = recipe_for(tmp_path, 1), tmp_path / "killed"
    assert interrupt(recipe, out, "merge", 2, signal.SIGKILL)[0] == -signal.SIGKILL
    assert finish(recipe, out, "--resume") == undisturbed
