"""A run that is told to stop, or is killed, in the middle of responses goes on to the same weights."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recipes import tiny_recipe, write_recipe
from shared_runs import SPECIALISTS, go_on

from opd.pipelines.cli import main
from opd.pipelines.stages import pipeline_plan

MERGE = {
    "distill": {"steps": 4, "prompts_per_domain": 4},
    "baselines": {"methods": []},
    "evaluation": {"prompts_per_domain": 10},
}
LONG = {"specialist": {"steps": 40, "prompts_per_step": 16, "group_size": 4, "checkpoint_every": 100}}


def begun(tiny_run: Path, folder: Path, stages: Sequence[str], **settings: Any) -> tuple[Path, Path]:
    """A recipe, and a run of it whose first `stages` are done."""
    recipe = write_recipe(folder / "recipe.yaml", **settings)
    return recipe, go_on(tiny_run, folder / "run", tiny_recipe(**settings), *stages)


def start(command: str, recipe: Path, out: Path) -> subprocess.Popen:
    words = [sys.executable, "-m", "opd.pipelines.cli", command, str(recipe), "--out", str(out), "--resume"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(command: str, recipe: Path, out: Path) -> str:
    main([command, str(recipe), "--out", str(out), "--resume"])
    return json.loads((out / "stages/merge/done.json").read_text())["digest"]


def interrupt(process: subprocess.Popen, out: Path, stage: str, steps: int, number: int) -> tuple[int, str]:
    """Send a run a signal after some steps of `stage`; its exit status and output."""
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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_told_to_stop_and_resumed(tiny_run, tmp_path, workers):
    """It leaves with status 143."""
    digests = []
    for name, own in (("undisturbed", 1), ("stopped", workers)):
        (tmp_path / name).mkdir()
        settings = MERGE | LONG | {"runtime": {"workers": own}}
        recipe, out = begun(tiny_run, tmp_path / name, ["base"], **settings)
        if name == "stopped":
            status, output = interrupt(start("run", recipe, out), out, "specialist-sort", 2, signal.SIGTERM)
            assert status == 143, output
            assert "--resume" in output
            assert (out / "stages/specialist-sort/wal").exists()
        digests.append(finish("run", recipe, out))
    assert digests[0] == digests[1]


def test_told_to_stop_in_a_stage_that_trains_nothing(tiny_run, tmp_path, monkeypatch):
    """It ends once that stage is done, and no other is begun."""
    settings = MERGE | {"baselines": {"methods": ["average", "task_arithmetic"], "scales": [1.0]}}
    recipe, out = begun(tiny_run, tmp_path, SPECIALISTS, **settings)
    merge_weights = pipeline_plan._run_baseline

    def told(context, method):
        os.kill(os.getpid(), signal.SIGTERM)
        return merge_weights(context, method)

    monkeypatch.setattr(pipeline_plan, "_run_baseline", told)
    words = ["run", str(recipe), "--out", str(out), "--resume"]
    assert main(words) == 143
    done = {path.parent.name for path in out.glob("stages/baseline-*/done.json")}
    assert done == {"baseline-average"}
    assert not (out / "stages/evaluate").exists()
    monkeypatch.undo()
    assert main(words) == 0


def test_killed_in_the_merge_and_resumed(tiny_run, tmp_path):
    """With everything in one process, and responses in memory."""
    digests = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        recipe, out = begun(tiny_run, tmp_path / name, SPECIALISTS, **MERGE)
        if name == "killed":
            process = start("distill", recipe, out)
            assert interrupt(process, out, "merge", 2, signal.SIGKILL)[0] == -signal.SIGKILL
        digests.append(finish("distill", recipe, out))
    assert digests[0] == digests[1]
