"""A run on ranks that share the student, also to write: killed in the middle of a checkpoint, gone on with by
other ranks.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tiny
import yaml
from recipes import tiny_recipe
from safetensors.torch import load_file

from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage

pytestmark = [pytest.mark.slow, pytest.mark.long]

SECONDS = 1200
STAGE = "specialist-sort"
TRAINED = {"steps": 6, "checkpoint_every": 1}
"""A checkpoint is asked for at every step, and written while the next one is taken."""
CHANGES = {
    "base": None,
    "specialist": {"prompts_per_step": 6, "group_size": 4, "minibatches": 2} | TRAINED,
    "distill": {"prompts_per_domain": 4} | TRAINED,
    "baselines": {"methods": []},
    "evaluation": {"prompts_per_domain": 8, "every": 3, "curve_prompts": 5},
}


def settings(start: Path, ranks: int | None) -> dict:
    """What a recipe says that starts from `start`, on so many ranks, which share an engine."""
    rollout = tiny_recipe().rollout.model_dump(mode="json") | {"engine": {"type": "torch", "sharded": True}}
    return CHANGES | {"model": {"path": str(start)}, "rollout": rollout, "train": {"ranks": ranks}}


def start_run(folder: Path, start: Path, ranks: int, *words: str) -> subprocess.Popen[bytes]:
    """`opd run` of that recipe into `folder / "run"`."""
    recipe = tiny_recipe(**settings(start, ranks)).model_dump(mode="json", exclude_none=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(folder / "recipe.yaml")]
    command += ["--out", str(folder / "run"), *words]
    with (folder / "log").open("ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def family(pid: int) -> list[int]:
    """A process and all below it, itself first."""
    found = [pid]
    for parent in found:
        try:
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        except OSError:
            continue
    return found


def tell(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a run and all its ranks."""
    for pid in family(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def drafts(checkpoints: Path) -> list[int]:
    """The steps of checkpoints that are being written, with something in them."""
    found = [draft for draft in checkpoints.glob(".step_*.tmp") if any(draft.glob("*"))]
    return [int(draft.name.split("_")[1].split(".")[0]) for draft in found]


def killed_in_a_draft(checkpoints: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    """Kill a run while the third checkpoint of a stage or a later one is written, and return its step; 0
    where the stage is over first.
    """
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-3000:]
        if max(drafts(checkpoints), default=0) >= 3:
            tell(process, signal.SIGSTOP)
            [step, *_] = [*drafts(checkpoints), 0]
            if step >= 3:  # else it got its name meanwhile
                tell(process, signal.SIGKILL)
                return step
            tell(process, signal.SIGCONT)
        if (checkpoints / f"step_{TRAINED['steps']}").exists():
            return 0
    raise AssertionError("no checkpoint was begun: " + log.read_text()[-3000:])


def test_a_run_of_four_ranks_killed_in_a_save_goes_on_on_three(tiny_run, tmp_path):
    start = tiny_run / "base"
    process = start_run(tmp_path, start, 4)
    checkpoints = tmp_path / "run" / "stages" / STAGE / "checkpoints"
    try:
        begun = killed_in_a_draft(checkpoints, process, tmp_path / "log")
    finally:
        tell(process, signal.SIGKILL)
        process.wait()
    whole = max(int(path.name.split("_")[1]) for path in checkpoints.glob("step_*"))
    assert whole < begun
    assert drafts(checkpoints) == [begun]
    process = start_run(tmp_path, start, 3, "--resume")
    assert process.wait(SECONDS) == 0, (tmp_path / "log").read_text()[-3000:]
    assert f"resumed from step {whole}" in (tmp_path / "log").read_text()
    assert [row["step"] for row in read_metrics(checkpoints.parent / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    alone = tiny_recipe(**settings(start, None))
    with RunFolder.create(tmp_path / "alone", alone) as folder:
        for stage in (STAGE, "specialist-add3", "merge"):
            run_stage(alone, folder, stage)
    base = load_file(start / "model.safetensors")
    for model in ("specialists/sort", "merged"):
        ours, expected = (load_file(tmp_path / run / model / "model.safetensors") for run in ("run", "alone"))
        tiny.assert_learnt_alike(ours, expected, base, share=2e-2)
    assert (tmp_path / "run" / "stages" / "evaluate" / "models.json").exists()
