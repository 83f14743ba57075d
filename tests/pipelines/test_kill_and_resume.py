"""A run killed in the middle of every stage ends with the weights of an undisturbed one, bit for bit."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from recipes import shaped_specialist, tiny_recipe, write_recipe

from opd.models.causal_lm import CausalLM
from opd.pipelines.launch.ray.cluster import _alive_pids, descendant_processes
from opd.pipelines.records.stage_names import split_round
from opd.pipelines.stages.supervised import new_base

MEASURING = "difficulty of sort"
STAGES = [
    "base",
    MEASURING,
    "specialist-sort",
    "merge",
    "baseline-ties",
    "baseline-mixed_grpo",
    "baseline-off_policy",
    "evaluate",
]


def start(recipe: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(recipe), "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(recipe: Path, out: Path, *options: str) -> None:
    process = start(recipe, out, *options)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def digests(out: Path) -> dict[str, str]:
    folders = [path.parent for path in out.rglob("config.json") if (path.parent / "tokenizer.json").exists()]
    models = [folder for folder in folders if "stages" not in folder.relative_to(out).parts]
    return {str(folder.relative_to(out)): CausalLM.from_pretrained(folder).digest() for folder in models}


def last_samples(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in out.glob("stages/*/last_samples.json")}


def flags(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in out.glob("stages/*/flags.jsonl")}


def middle_of(out: Path, stage: str) -> bool:
    """Whether `stage` has begun: steps written, or files made by stages without steps."""
    if stage == MEASURING:
        return (out / "stages" / "specialist-sort" / "difficulty.json").exists()
    folder = out / "stages" / stage
    metrics = folder / "metrics.jsonl"
    if stage.startswith("specialist") or split_round(stage)[0] in (
        "base",
        "merge",
        "baseline-mixed_grpo",
        "baseline-off_policy",
    ):
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= 4
    return folder.exists()


def assert_all_end(family: dict[int, int]) -> None:
    """Process ids and when they were started: a worker notices that its run is gone, and writes no more."""
    until = time.monotonic() + 120
    while _alive_pids(family):
        assert time.monotonic() < until, "a worker went on after its run was killed"
        time.sleep(0.05)


HANDED_OVER = ["--runtime.offload.engine", "true", "--runtime.offload.trainer", "true"]
SOME = ["specialist-sort", "merge"]
"""The stages that train with most at once; each kill costs a start. Other methods than one are left out."""


@pytest.mark.slow
@pytest.mark.parametrize("stages", [SOME, pytest.param(STAGES, marks=pytest.mark.long)], ids=["some", "all"])
def test_killed_in_every_stage(tmp_path, stages):
    """With stages side by side, whose processes end with the run, responses on disk, rewards whose scale is
    that of all steps, a coefficient that follows what was measured, prompts that are measured, refilled and
    asked again, a teacher that specialists follow, in one domain a critic in its place and cut distributions,
    and a rule that has lowered the rate before every kill. Engine and trainer hand the device to each other
    in the killed run alone.
    """
    lowered = {"metric": "lr", "above": 0.0, "steps": 2, "action": "lower_rate", "stages": "[!b]*"}
    storage = {"trajectories": "disk"}
    new_base(tiny_recipe(base=None, seed=1), tmp_path / "old")
    held = {"epochs": 2, "reference_kl": {"coef": 0.1, "target": 0.02}}
    chosen = {
        "difficulty": {"samples": 4, "prompts": 80},
        "curriculum": {},
        "refill": {"limit": 3},
        "replay": {},
    }
    followed = {"opd": {"teacher": "old", "coef": 0.02, "loss": {"type": "full"}}}
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"]["rollout"] = {"top_p": 0.9}
    domains["sort"]["specialist"] = {
        "advantage": {"type": "gae"},
        "filter_zero_variance": False,
        "group_filter": "opd.train.advantages:has_signal",
        "opd": None,
    }
    methods = {"methods": ["ties"]} if stages == SOME else {}
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        runtime={"workers": 2},
        storage=storage,
        watch={"lowered": lowered},
        specialist=shaped_specialist() | held | chosen | followed,
        teachers={"old": {"path": str(tmp_path / "old")}},
        domains=domains,
        baselines=tiny_recipe().baselines.model_dump(mode="json", exclude_none=True) | methods,
    )
    settings = yaml.safe_load(recipe.read_text())
    settings["domains"]["sort"]["specialist"]["opd"] = None  # which a recipe that is written leaves out
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False))
    finish(recipe, tmp_path / "undisturbed")
    disturbed = tmp_path / "disturbed"
    killed = 0
    for stage in stages:
        process = start(recipe, disturbed, *HANDED_OVER, *(["--resume"] if disturbed.exists() else []))
        try:
            deadline = time.monotonic() + 300
            while process.poll() is None and not middle_of(disturbed, stage):
                assert time.monotonic() < deadline, f"stage {stage} did not begin"
                time.sleep(0.01)
            killed += process.poll() is None
            workers = descendant_processes(process.pid)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert workers or stage != "specialist-sort"
        assert_all_end(workers)
    assert killed >= len(stages) - 1, "a stage that ends before the kill is allowed once, not as a rule"
    finish(recipe, disturbed, *HANDED_OVER, "--resume")
    assert digests(disturbed) == digests(tmp_path / "undisturbed")
    assert len(digests(disturbed)) == (5 if methods else 10)
    assert last_samples(disturbed) == last_samples(tmp_path / "undisturbed")
    assert len(last_samples(disturbed)) == (3 if methods else 4)
    assert flags(disturbed) == flags(tmp_path / "undisturbed")
    assert b'"lowered"' in flags(disturbed)["merge"]
