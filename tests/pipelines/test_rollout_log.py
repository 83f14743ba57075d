"""What a run tells about its rollouts: what the log cost, and counts that add up."""

import json
import re
from pathlib import Path

import pytest
from recipes import tiny_recipe
from test_over_sample import SPECIALIST, settings, weights

from opd.config import RolloutConfig
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.run import run_pipeline

FEW = {"steps": 4, "prompts_per_domain": 4, "checkpoint_every": 3}
SETTINGS = {"distill": FEW, "baselines": {"methods": []}, "evaluation": {"prompts_per_domain": 10}}


def run(path: Path, **changes) -> dict:
    recipe = tiny_recipe(**SETTINGS, **changes)
    with RunFolder.create(path, recipe) as folder:
        run_pipeline(recipe, folder)
        done = folder.stage_done("merge")
    assert done is not None
    return done


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run with the default settings, and what its merge recorded."""
    path = tmp_path_factory.mktemp("log") / "run"
    return path, run(path)


def test_the_log_is_used_by_default():
    log = RolloutConfig().log
    assert log is not None
    assert log.fsync == "interval"


@pytest.mark.long
def test_the_cost_of_the_log_is_in_metrics_results_and_report(logged):
    path, done = logged
    seconds = done["counters"]["rollout/log_seconds"]
    rows = read_metrics(path / "stages/merge/metrics.jsonl")
    assert sum(row["rollout/log_seconds"] for row in rows) == pytest.approx(seconds)
    assert 0 < seconds < done["phases"]["rollout"]
    assert json.loads((path / "results.json").read_text())["counters"]["rollout/log_seconds"] == seconds
    page = write_report(path).read_text()
    assert re.search(r"Waited for the log.{0,80}[0-9.]+\s*%\s*of rollout", page, re.DOTALL), (
        "not in the report"
    )


@pytest.mark.slow
def test_every_response_is_counted_once(logged):
    _, done = logged
    counters = {name.removeprefix("rollout/"): n for name, n in done["counters"].items()}
    distill = tiny_recipe(**SETTINGS).distill
    assert counters["requests"] == 4 * 2 * distill.prompts_per_domain * distill.samples_per_prompt
    assert counters["requests"] == counters.get("completed", 0) + counters.get("truncated", 0)
    assert counters["tokens"] == done["student_tokens"]
    assert counters["prefilled_tokens"] > 0


@pytest.mark.slow
def test_the_log_does_not_change_the_weights(logged, tmp_path):
    _, with_log = logged
    without = run(tmp_path / "run", rollout={"max_new_tokens": 5, "max_sequence": 16, "log": None})
    assert without["digest"] == with_log["digest"]
    assert "rollout/log_seconds" not in without["counters"]


def test_without_a_log_a_killed_run_has_the_same_bits_in_bfloat16_and_with_a_correction(models, tmp_path):
    """The rollouts since the checkpoint are made again, in the same batches."""
    own = settings(models, learner="corrected", over_sample=1.0, log=None, stop=["a token a chunk"])
    recipe = tiny_recipe(**own | {"model": own["model"] | {"dtype": "bfloat16"}})
    expected, rows = weights(tmp_path / "undisturbed", recipe, SPECIALIST)
    assert any(row.get("correction/weight_mean", 1.0) != 1.0 for row in rows)
    digest, _ = weights(tmp_path / "killed", recipe, SPECIALIST, 60)
    assert digest == expected
