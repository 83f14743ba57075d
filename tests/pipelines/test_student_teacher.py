"""A run whose student is its own teacher: beside others and rewards, killed, resumed, on disk, on ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from attempts import killed_merge, merged, run_distill, specialist_weights, stop, write_recipe_of
from pydantic import ValidationError
from recipes import NO_CURVE, tiny_recipe, varied
from safetensors.torch import load_file

from opd.config import Recipe
from opd.metrics import read_metrics
from opd.pipelines.check.memory import average_bytes, memory_parts
from opd.pipelines.check.resources import disk_parts
from opd.pipelines.check.servers import check_kinds
from opd.pipelines.check.shapes import ModelShape
from opd.pipelines.records.results import write_results
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report.load import load_run
from opd.pipelines.report.page import render_report
from opd.pipelines.run import run_pipeline
from opd.pipelines.stages.supervised import new_base
from opd.teachers.student_teacher import StudentTeacher

REWARD = f"{varied.__module__}:varied"
AVERAGE = {"type": "student", "moving_average": 0.9}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Noise from which a student begins."""
    folder = tmp_path_factory.mktemp("base") / "base"
    new_base(tiny_recipe(base=None), folder)
    return folder


def settings_of(base: Path, **changes) -> dict[str, Any]:
    """A merge: `sort` is taught by the student who reads the answer, `add3` by its moving average."""
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"] |= {"teacher": "self", "teacher_prompt": "{label}={prompt}"}
    domains["add3"] |= {"teacher": "slow"}
    return {
        "model": {"path": str(base)},
        "base": None,
        "domains": domains,
        "teachers": {"self": {"type": "student"}, "slow": AVERAGE},
        "distill": {"steps": 4, "prompts_per_domain": 3, "checkpoint_every": 2},
        "baselines": {"methods": []},
        "evaluation": NO_CURVE,
    } | changes


def recipe_of(base: Path, **changes) -> Recipe:
    return tiny_recipe(**settings_of(base, **changes))


def test_a_student_and_its_average_teach_and_a_stopped_run_goes_on(base, tmp_path, monkeypatch):
    digests: list[list[str]] = []
    score = StudentTeacher.score

    def noting(teacher: StudentTeacher, samples):
        if teacher.name == "self":
            digests.append([teacher.digest, samples[0].uid])
        return score(teacher, samples)

    monkeypatch.setattr(StudentTeacher, "score", noting)
    recipe = recipe_of(base)
    weights, rows = merged(recipe, tmp_path / "whole")
    assert len(rows) == len({digest for digest, _ in digests}) == 4  # no step is given another's scores
    assert all(row["kl/self"] > 1e-6 for row in rows)
    assert rows[0]["kl/slow"] == pytest.approx(0.0, abs=1e-9)  # it begins as the student
    assert all(row["kl/slow"] > 1e-9 for row in rows[1:])
    stopped = tmp_path / "stopped"
    with RunFolder.create(stopped, recipe) as folder:
        stop(recipe, folder, "merge", after=3)
    (checkpoint,) = (stopped / "stages" / "merge" / "checkpoints").glob("step_*")
    assert (checkpoint / "average.safetensors").is_file()
    resumed, again = merged(recipe, stopped, RunFolder.resume)
    tiny.assert_equal(resumed, weights)
    assert [row["kl/slow"] for row in again] == [row["kl/slow"] for row in rows]


@pytest.mark.parametrize(
    "changes",
    [
        {"storage": {"trajectories": "disk"}},
        pytest.param(
            {
                "storage": {"trajectories": "disk"},
                "rollout": {"max_new_tokens": 5, "max_sequence": 16, "schedule": "ahead"},
            },
            marks=pytest.mark.slow,
        ),
        {"runtime": {"offload": {"engine": True, "trainer": True}}},
    ],
    ids=["disk", "disk ahead", "offload"],
)
def test_samples_on_disk_and_offloading_change_nothing(base, tmp_path, changes):
    plain = {"rollout": changes["rollout"]} if "rollout" in changes else {}
    expected, rows = merged(recipe_of(base, **plain), tmp_path / "plain")
    found, others = merged(recipe_of(base, **changes), tmp_path / "changed")
    tiny.assert_equal(found, expected)
    assert [row["kl/self"] for row in others] == [row["kl/self"] for row in rows]


def test_beside_another_teacher_and_rewards(base, tmp_path):
    new_base(tiny_recipe(base=None, seed=5), tmp_path / "other")
    settings = settings_of(base)
    settings["teachers"] |= {"other": {"type": "local", "path": str(tmp_path / "other")}}
    settings["domains"]["add3"] |= {"teacher": {"slow": 0.5, "other": 0.5}}
    for domain in settings["domains"].values():
        domain["reward"] = REWARD
    settings["distill"] |= {"rl_coef": 0.5, "samples_per_prompt": 2, "mixture": "geometric"}
    recipe = tiny_recipe(**settings)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_pipeline(recipe, folder)
        write_results(recipe, folder)
    rows = read_metrics(tmp_path / "run" / "stages" / "merge" / "metrics.jsonl")
    assert {"kl/self", "kl/slow+other", "policy/ratio_max"} <= rows[-1].keys()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {one["name"] for one in results["models"]} == {"base", "teacher:other", "merged"}
    found = load_run(tmp_path / "run")
    assert found.best_teacher("sort") is None
    assert found.best_teacher("add3") is not None
    assert "sort" in render_report(found)
    card = (tmp_path / "run" / "merged" / "README.md").read_text()
    assert "this model as it learnt" in card
    assert "its moving average (decay 0.9)" in card


@pytest.mark.parametrize("changes", [{"lora": {"rank": 2, "alpha": 4}}, {"dtype": "bfloat16"}], ids=str)
def test_adapters_and_16_bits_teach_themselves(base, tmp_path, changes):
    recipe = recipe_of(base, model={"path": str(base)} | changes)
    _, rows = merged(recipe, tmp_path / "run")
    assert all(row["kl/self"] > 1e-6 for row in rows)
    assert abs(rows[0]["kl/slow"]) < 1e-6 < rows[-1]["kl/self"]
    with RunFolder.create(tmp_path / "stopped", recipe) as folder:
        stop(recipe, folder, "merge", after=3)
    _, again = merged(recipe, tmp_path / "stopped", RunFolder.resume)
    assert [row["kl/slow"] for row in again] == [row["kl/slow"] for row in rows]


@pytest.mark.parametrize("loss", ["full", "k1"])
def test_a_specialist_follows_itself_in_several_updates(base, tmp_path, loss):
    settings = settings_of(base)
    for name, domain in settings["domains"].items():
        domain.pop("teacher")
        domain |= {"reward": REWARD} | ({"teacher_prompt": "{label}={prompt}"} if name == "sort" else {})
    settings["domains"]["add3"]["teacher"] = "sort"
    opd = {"teacher": "self", "coef": 0.5, "loss": {"type": loss}}
    own = {
        "steps": 3,
        "prompts_per_step": 4,
        "group_size": 3,
        "minibatches": 2,
        "epochs": 2,
        "checkpoint_every": 1,
    }
    settings["specialist"] = own | {"opd": opd}
    recipe = tiny_recipe(**settings)
    whole = specialist_weights(recipe, tmp_path / "whole")
    tiny.assert_equal(whole, specialist_weights(recipe, tmp_path / "stopped", stop_after=2))
    rows = read_metrics(tmp_path / "whole" / "stages" / "specialist-sort" / "metrics.jsonl")
    assert all(abs(row["kl/self"]) > 1e-7 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_a_killed_run_goes_on_with_the_average(base, tmp_path, storage):
    settings = settings_of(base, storage={"trajectories": storage})
    settings["distill"] |= {"steps": 40, "checkpoint_every": 3}
    settings["teachers"]["self"] = AVERAGE
    killed, whole = killed_merge(tiny_recipe(**settings), tmp_path)
    merged_weights = [load_file(one / "merged" / "model.safetensors") for one in (whole, killed)]
    tiny.assert_equal(*merged_weights)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_two_ranks_make_the_student_of_one(base, tmp_path, storage):
    expected, rows = merged(recipe_of(base), tmp_path / "alone")
    recipe = recipe_of(base, train={"ranks": 2}, storage={"trajectories": storage})
    out = tmp_path / "ranks"
    run_distill(write_recipe_of(recipe, tmp_path / "recipe.yaml"), out)
    found, start = load_file(out / "merged" / "model.safetensors"), load_file(base / "model.safetensors")
    moved = max(float((expected[name] - start[name]).abs().max()) for name in expected)
    apart = max(float((expected[name] - found[name]).abs().max()) for name in expected)
    assert apart <= 1e-2 * moved
    for ours, others in zip(read_metrics(out / "stages/merge/metrics.jsonl"), rows, strict=True):
        for name in ("kl/self", "kl/slow"):
            assert ours[name] == pytest.approx(others[name], rel=1e-2, abs=1e-7)


PLAIN = {"self": {"type": "student"}, "slow": {"type": "student"}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"teachers": PLAIN}, r"teachers\.slow is the student itself and reads the same prompt in add3"),
        (
            {"teachers": {"self": {"type": "student", "moving_average": 0.5}, "slow": AVERAGE}},
            "decays 0.5 and 0.9",
        ),
        (
            {"teachers": {"self": {"type": "student", "sync_every": 9}, "slow": AVERAGE}},
            "decays 0 and 0.9, every 9 and 1 steps; give them one",
        ),
        ({"teachers": {"self": {"type": "student", "sync_every": 0}, "slow": AVERAGE}}, "greater than"),
        (
            {"teachers": {"self": AVERAGE, "slow": {"type": "student", "sync_every": 1}}},
            r"teachers\.slow is the student itself and reads the same prompt in add3",
        ),
        ({"teachers": {"self": {"type": "student", "path": "x"}, "slow": AVERAGE}}, "path"),
        ({"teachers": {"self": {"type": "student", "moving_average": 1.0}, "slow": AVERAGE}}, "less than 1"),
        ({"train": {"backend": "deepspeed"}}, "needs train.backend torch, not deepspeed"),
        ({"train": {"backend": "megatron"}}, "needs train.backend torch, not megatron"),
        ({"train": {"context_parallel": 2}}, "needs train.context_parallel 1, not 2"),
        (
            {"baselines": {"methods": ["mixed_grpo", "ties"]}},
            "which baselines.methods ties needs; leave that out",
        ),
        (
            {"distill": {"prefixes": "teacher", "loss": {"type": "full"}}},
            "which distill.prefixes teacher needs",
        ),
    ],
)
def test_what_a_student_cannot_teach_is_refused(base, changes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        recipe_of(base, **changes)


@pytest.mark.parametrize("prompt", ["{prompt}", {"user": "{prompt}"}])
def test_a_prompt_that_is_the_students_is_no_other(base, prompt):
    settings = settings_of(base)
    settings["domains"]["sort"]["teacher_prompt"] = prompt
    with pytest.raises(ValidationError, match=r"teaches nothing; give domains\.sort\.teacher_prompt"):
        tiny_recipe(**settings)


def test_epochs_on_disk_are_refused(base):
    settings = settings_of(base, storage={"trajectories": "disk"})
    settings["domains"]["sort"].pop("teacher")
    own = {"steps": 2, "epochs": 2, "opd": {"teacher": "slow", "coef": 0.5, "loss": {"type": "full"}}}
    settings["specialist"] = own
    with pytest.raises(
        ValidationError, match=r"score samples on disk again in the second of specialist\.epochs"
    ):
        tiny_recipe(**settings)


def test_the_doctor_counts_one_copy_for_an_average(base):
    recipe = recipe_of(base)
    findings = [(one.title, one.detail) for one in check_kinds(recipe)]
    assert findings == [
        (
            "student teacher self",
            "the student itself, by the weights that a step begins with; it takes no memory of its own",
        ),
        ("student teacher slow", "the moving average of the student's weights, decay 0.9 a step"),
    ]
    shape = ModelShape(parameters=1000, hidden_size=8, windows=(None, None), vocabulary=10, kv_width=4)
    assert average_bytes(recipe, shape) == 4000
    living = recipe.model_copy(update={"teachers": {"self": recipe.teachers["self"]}})
    domains = {"sort": recipe.domains["sort"]}
    living = living.model_copy(update={"domains": domains})
    assert average_bytes(living, shape) == 0
    sizes = []
    for one in (recipe, living):
        parts = {part.name: part.size for part in memory_parts(one, shape, {})}
        disk = {part.name: part.size for part in disk_parts(one, shape, {})}
        sizes.append((parts["teachers"], disk["a checkpoint being written"]))
    assert sizes[1][0] == 0
    assert sizes[0][0] == 4000 + 4 * 80  # the average and its head
    assert sizes[0][1] - sizes[1][1] == 4000
    assert np.isfinite(sizes[0][0])
