"""Writing while learning: bounded ages, the same tokens whoever is faster, and a resume that goes on."""

import time
from pathlib import Path

import pytest
from attempts import run_only
from recipes import tiny_recipe

from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.student import Student
from opd.train.torch_backend import TorchBackend

SPECIALIST = {"steps": 5, "prompts_per_step": 8, "group_size": 4, "minibatches": 1, "checkpoint_every": 2}
TIS = {"policy_loss": {"correction": {"type": "tis"}}}
STAGE = "specialist-add3"


def recipe_with(base: Path, **rollout):
    recipe = tiny_recipe()
    own = recipe.rollout.model_dump(mode="json") | rollout
    model = {"path": str(base)}
    return tiny_recipe(
        base=None,
        model=model,
        baselines={"methods": []},
        rollout=own,
        specialist=SPECIALIST | TIS,
        distill={"steps": 4, "prompts_per_domain": 6},
        evaluation={"prompts_per_domain": 20, "every": 2, "curve_prompts": 8},
    )


@pytest.fixture(scope="module")
def base(tiny_run):
    return tiny_run / "base"


def specialist(path: Path, recipe) -> tuple[str, list[dict]]:
    """Digest and metrics of a specialist."""
    run_only(recipe, path, STAGE)
    digest = CausalLM.from_pretrained(path / "specialists/add3").digest()
    return digest, read_metrics(path / "stages" / STAGE / "metrics.jsonl")


@pytest.mark.slow
def test_one_batch_ahead_ends_with_the_same_weights_every_time(base, tmp_path):
    recipe = recipe_with(base, schedule="ahead")
    first, rows = specialist(tmp_path / "a", recipe)
    second, _ = specialist(tmp_path / "b", recipe)
    in_turn, plain = specialist(tmp_path / "c", recipe_with(base))
    assert first == second != in_turn
    assert [row.get("staleness/max", 0.0) for row in rows] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [row["rollout/requests"] for row in rows] == [32.0] * 5 or sum(
        row["rollout/requests"] for row in rows
    ) >= 5 * 32
    assert "staleness/max" not in plain[-1]
    assert rows[-1]["tokens/student"] > 0


def test_asynchronous_ages_stay_within_the_bound(base, tmp_path):
    _, rows = specialist(tmp_path / "run", recipe_with(base, schedule="async", max_ahead=2))
    assert len(rows) == 5
    assert all(row.get("staleness/max", 0.0) <= 2.0 for row in rows)
    assert all("correction/ess" in row for row in rows if "policy/clip_ratio" in row)


def test_tokens_that_are_too_old_leave_the_loss(base, tmp_path):
    _, rows = specialist(tmp_path / "run", recipe_with(base, schedule="ahead", max_staleness=0))
    assert [row.get("staleness/dropped", 0.0) for row in rows] == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ahead", "async"])
def test_an_interrupted_stage_goes_on(base, tmp_path, schedule, monkeypatch):
    recipe = recipe_with(base, schedule=schedule)
    calls = []
    plain, rollout = TorchBackend.step, Student.sample_groups

    def slowly(self, *batch):
        # The learner is done before the next batch is begun: an asynchronous one gets the newest weights.
        if len(calls) < 4:
            time.sleep(0.3)
        return rollout(self, *batch)

    def failing(self, lr):
        calls.append(lr)
        if len(calls) == 4:
            raise RuntimeError("pulled the plug")
        return plain(self, lr)

    monkeypatch.setattr(TorchBackend, "step", failing)
    monkeypatch.setattr(Student, "sample_groups", slowly)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        with pytest.raises(RuntimeError, match="plug"):
            run_stage(recipe, folder, STAGE)
        run_stage(recipe, folder, STAGE)
    rows = read_metrics(tmp_path / "run" / "stages" / STAGE / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # What the first attempt wrote is not written again.
    assert any(row.get("rollout/replayed_tokens", 0) > 0 for row in rows)
    assert max(row.get("staleness/max", 0.0) for row in rows) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ahead", "async"])
def test_a_merge_with_a_learning_curve(base, tmp_path, schedule):
    recipe = recipe_with(base, schedule=schedule)
    teachers = {"sort": {"path": str(base)}, "add3": {"path": str(base)}}
    recipe = type(recipe).model_validate(recipe.model_dump(mode="json") | {"teachers": teachers})
    run_only(recipe, tmp_path / "run", "merge")
    rows = read_metrics(tmp_path / "run" / "stages" / "merge" / "metrics.jsonl")
    assert len(rows) == 4
    assert "accuracy/sort" in rows[1]
    assert all(row.get("staleness/max", 0.0) <= 1.0 for row in rows)
