"""Rounds of specialists and merge: each starts from the student before, and may be the last."""

import json
from pathlib import Path

import pytest
import yaml
from attempts import run_only
from recipes import NO_CURVE, tiny_recipe, write_recipe
from test_kill_and_resume import digests, finish, middle_of, start

from opd.config.load import load_recipe
from opd.errors import ConfigError, RunFolderError
from opd.pipelines.records.layout import RunLayout
from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder
from opd.pipelines.records.stage_names import model_stage, split_round, stage_model
from opd.pipelines.report import write_report
from opd.pipelines.report.display_text import model_label, stage_label
from opd.pipelines.report.results import stage_order
from opd.pipelines.run import run_pipeline
from opd.pipelines.stages.pipeline_plan import plan_stages, with_needs
from opd.pipelines.stages.rounds import ended_recipe, plan_portions

SHORT = {
    "base": None,
    "domains": {
        name: {
            "source": f"procedural:{name}",
            "params": {"digits": 3},
            "prompts": 50,
            "reward": "recipes:varied",
        }
        for name in ("sort", "add3")
    },
    "specialist": {"steps": 2, "prompts_per_step": 4, "group_size": 4, "filter_zero_variance": False},
    "distill": {"steps": 2, "prompts_per_domain": 4},
    "baselines": {"methods": ["average", "mixed_grpo"]},
    "evaluation": NO_CURVE,
}


@pytest.mark.parametrize("model", ["merged+2", "specialist:sort+12", "merged", "specialist:a+b", "sft:sort"])
def test_names_of_a_round_lead_to_one_stage_and_back(model):
    assert stage_model(model_stage(model)) == model
    name, number = split_round(model)
    assert number == (1 if name == model else int(model.rpartition("+")[2]))
    folder = RunLayout(Path("run")).model_folder(tiny_recipe(), model)
    assert folder.is_relative_to(Path("run/rounds") / str(number)) == (number > 1)


def test_each_round_needs_the_student_before_it():
    plan = plan_stages(tiny_recipe(rounds=3, min_round_gain=0.0))
    assert plan["specialist-sort+2"].needs == ("merge", "evaluate+1")
    assert plan["merge+3"].needs == ("merge+2", "evaluate+2", "specialist-sort+3", "specialist-add3+3")
    assert "evaluate+3" not in plan
    assert plan["baseline-mixed_grpo"].needs == ("merge+3",)
    assert [one.name for one in with_needs(plan, "merge+3")] == sorted(
        (one.name for one in with_needs(plan, "merge+3")), key=lambda name: stage_order(name)[:3]
    )
    assert list(plan_stages(tiny_recipe())) == [
        name for name in plan if not any(name.endswith(f"+{number}") for number in (1, 2, 3))
    ]


def test_pages_name_the_round():
    assert stage_label("merge+2") == "Merge, round 2"
    assert stage_label("evaluate+1") == "Evaluation, round 1"
    assert model_label("specialist:sort+3") == "Specialist, sort, round 3"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "rounds"),
        ({"rounds": True}, "rounds"),
        ({"rounds": 2, "min_round_gain": 2}, "min_round_gain"),
        ({"rounds": 2, "distill": {"start": "ties"}}, "distill.start ties is for a run of one round"),
        ({"distill": {"start": "best"}}, "distill.start"),
        (
            {"baselines": {"methods": ["slerp"]}, "teachers": {"sort": {"type": "student"}}},
            "teachers.sort of type student",
        ),
        (
            {"domains": {"sort": {"source": "procedural:sort"}}, "distill": {"start": "slerp"}},
            "slerp interpolates between two models, and this recipe has 1 teachers",
        ),
        (
            {"rounds": 2, "teachers": {"sort": {"path": "/old"}}},
            "rounds 2 trains the merge's teachers again in each round, and teachers.sort is not trained here",
        ),
    ],
)
def test_rounds_that_cannot_be(tmp_path, changes, said):
    path = write_recipe(tmp_path / "recipe.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=said):
        load_recipe([path])


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_round_that_gains_too_little_is_the_last_and_the_run_goes_on_when_asked(tmp_path):
    recipe, out = tiny_recipe(rounds=2, min_round_gain=1.0, **SHORT), tmp_path / "run"
    with RunFolder.create(out, recipe) as folder:
        run_pipeline(recipe, folder)
        assert folder.stage_done("specialist-sort+2") is None
    found = results_of(out)
    assert [one["round"] for one in found["rounds"]] == [1]
    assert found["rounds"][0]["gain"] < 1
    report = write_report(out).read_text()
    assert "Ended early" in report
    one = tiny_recipe(**SHORT)
    with RunFolder.create(tmp_path / "one", one) as folder:
        run_pipeline(one, folder)
    assert digests(out) == digests(tmp_path / "one")  # a round is the run without rounds

    more = tiny_recipe(rounds=2, min_round_gain=-1.0, **SHORT)
    with pytest.raises(RunFolderError, match="--accept-changed-settings"):
        RunFolder.resume(out, more)
    first = digests(out)
    with RunFolder.resume(out, more, AcceptedChanges(settings=True)) as folder:
        run_pipeline(more, folder)
        tokens = [folder.stage_done(name)["student_tokens"] for name in ("merge", "merge+2")]
    made = digests(out)
    assert {name: made[name] for name in first if "baselines" not in name} == {
        name: digest for name, digest in first.items() if "baselines" not in name
    }
    assert {"rounds/2/merged", "rounds/2/specialists/sort"} <= set(made)
    found = results_of(out)
    assert [one["round"] for one in found["rounds"]] == [1, 2]
    models = {one["name"]: one for one in found["models"]}
    assert models["merged"]["student_tokens"] == sum(tokens)
    assert models["mixed_grpo"]["student_tokens"] >= sum(tokens)  # made again, for the tokens of both
    assert found["folders"]["merged"]["digest"] == made["rounds/2/merged"]
    assert found["folders"]["merged+1"]["digest"] == made["merged"]
    report = write_report(out).read_text()
    assert "Merged student, round 2" in report
    assert "Ended early" not in report
    stricter = tiny_recipe(rounds=2, min_round_gain=1.0, **SHORT)  # too late: the second round is there
    with RunFolder.resume(out, stricter, AcceptedChanges(settings=True)) as folder:
        assert [stages[-1].name for _, stages in plan_portions(stricter, folder)][-1] == "evaluate"
        assert ended_recipe(stricter, folder).rounds == 2
    card = (out / "rounds/2/specialists/sort/README.md").read_text()
    assert f"base_model: {out}/merged" in card
    with pytest.raises(RunFolderError, match="only grows while a run goes on"):
        RunFolder.resume(out, more.with_rounds(1), AcceptedChanges(settings=True))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_in_every_round(tmp_path, workers):
    """To the weights of an undisturbed run, bit for bit."""
    changes = {"rounds": 2, "min_round_gain": -1.0, "baselines": {"methods": []}, "evaluation": NO_CURVE}
    recipe = write_recipe(tmp_path / "recipe.yaml", runtime={"workers": workers}, **changes)
    finish(recipe, tmp_path / "undisturbed")
    disturbed = tmp_path / "disturbed"
    for stage in ("merge", "evaluate+1", "specialist-sort+2", "merge+2"):
        process = start(recipe, disturbed, *(["--resume"] if disturbed.exists() else []))
        try:
            while process.poll() is None and not middle_of(disturbed, stage):
                pass
        finally:
            process.kill()
            process.communicate()
    finish(recipe, disturbed, "--resume")
    assert digests(disturbed) == digests(tmp_path / "undisturbed")
    assert len(digests(disturbed)) == 7


@pytest.mark.parametrize("methods", [[], ["average", "slerp"]])
def test_the_student_starts_from_a_merge_of_weights(tmp_path, methods):
    still = SHORT["distill"] | {"start": "slerp", "optim": {"lr": 1e-30, "schedule": "constant"}}
    recipe = tiny_recipe(**SHORT | {"distill": still, "baselines": {"methods": methods}})
    plan = plan_stages(recipe)
    assert list(plan).index("baseline-slerp") < list(plan).index("merge")
    assert sum(stage.startswith("baseline") for stage in plan) == max(len(methods), 1)
    run_only(recipe, tmp_path / "run", "merge")
    made = digests(tmp_path / "run")
    assert made["merged"] == made["baselines/slerp"] not in (made["base"], made["specialists/sort"])
    assert f"base_model: {tmp_path}/run/baselines/slerp" in (tmp_path / "run/merged/README.md").read_text()
