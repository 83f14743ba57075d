"""The whole pipeline, for real, at a size that takes seconds."""

import html
import json
import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
from recipes import tiny_recipe, write_recipe
from shared_runs import go_on

import opd
from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.pipelines.cli import main
from opd.pipelines.launch.machine import git_state
from opd.pipelines.launch.workers import run_concurrently
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline, run_stage
from opd.pipelines.stages.pipeline_plan import plan_stages, with_needs
from opd.pipelines.stages.rounds import select_stages
from opd.progress import Progress

pytestmark = pytest.mark.reports
MODELS = ["base", "specialists/sort", "specialists/add3", "merged"] + [
    f"baselines/{name}" for name in ("average", "task_arithmetic", "ties", "dare", "mixed_grpo", "off_policy")
]


def digests(path: Path) -> dict[str, str]:
    return {name: CausalLM.from_pretrained(path / name).digest() for name in MODELS}


@pytest.fixture(scope="module")
def finished(finished_run, tmp_path_factory):
    """A run that these tests may go on with."""
    return shutil.copytree(finished_run, tmp_path_factory.mktemp("runs") / "whole")


def test_stages_that_are_named_run_in_their_order_each_with_its_needs():
    stages = plan_stages(tiny_recipe())
    chosen = [stage.name for stage in select_stages(stages, ["evaluate", "merge"])]
    needed = {stage.name for stage in with_needs(stages, "merge")} | {"evaluate"}
    assert chosen == [name for name in stages if name in needed] != list(stages)


def test_a_stage_is_alone_where_no_other_that_trains_can_run_beside_it():
    stages = plan_stages(tiny_recipe())
    before = {name: {stage.name for stage in with_needs(stages, name)} for name in stages}
    for name, stage in stages.items():
        beside = {
            other
            for other, its in stages.items()
            if its.trained and other not in before[name] and name not in before[other]
        }
        assert stage.alone == (not beside), (name, beside)


def test_every_model_is_a_hugging_face_folder(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in MODELS:
        AutoModelForCausalLM.from_pretrained(finished / name)
        assert (
            AutoTokenizer.from_pretrained(finished / name, trust_remote_code=False).eos_token_id is not None
        )
        assert (finished / name / "README.md").read_text().strip()


def test_results_hold_every_model_and_stage(finished):
    results = json.loads((finished / "results.json").read_text())
    names = [model["name"] for model in results["models"]]
    assert names[:4] == ["base", "specialist:sort", "specialist:add3", "merged"]
    assert sorted(names[4:]) == sorted(name.split("/")[1] for name in MODELS[4:])
    assert [stage["name"] for stage in results["stages"]] == list(plan_stages(tiny_recipe()))
    merge = next(model for model in results["models"] if model["name"] == "merged")
    limit = tiny_recipe().rollout.max_new_tokens
    for baseline, most in {"mixed_grpo": tiny_recipe().specialist.group_size, "off_policy": 1}.items():
        tokens = next(m["student_tokens"] for m in results["models"] if m["name"] == baseline)
        assert 0 <= tokens - merge["student_tokens"] < most * limit, "the merge's tokens, to one group"
    assert results["counters"]["head_loads"] == 8 * 2
    assert results["counters"]["resident_heads_peak"] == 1
    assert (finished / "report.html").stat().st_size > 10_000


def test_results_say_what_the_run_was_made_with(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["engine"] == "torch"
    assert results["kernels"].partition(",")[0] in ("chunked", "triton")
    assert {stage["kernels"] for stage in results["stages"]} == {results["kernels"]}
    assert results["extras"] == []
    versions = {name: metadata.version(name) for name in ("transformers", "numpy", "safetensors")}
    assert results["versions"].items() >= (versions | {"opd": results["version"]}).items()
    assert results["machine"]["torch"] == results["versions"]["torch"] == torch.__version__
    assert results["machine"]["memory_mb"] > 100
    assert results["git"].get("commit") == git_state(Path(opd.__file__).parents[1]).get("commit")


def test_metrics_have_one_line_per_step(finished):
    rows = read_metrics(finished / "stages" / "merge" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["kl/mean"] >= 0 for row in rows)
    assert rows[-1]["kl/sort"] > 0
    known = {"entropy", "grad_norm", "lr", "kl_at/1", "kl_at/2", "length/p10", "length/p50", "length/p90"}
    assert known <= rows[-1].keys()
    assert "frac_reward_zero_std" not in rows[-1], "one response has no group to differ from"
    assert "accuracy/sort" in rows[3]
    assert "accuracy/sort" not in rows[4]
    tokens = [row["tokens/student"] for row in rows]
    assert tokens == sorted(tokens)


@pytest.mark.some(1)
@pytest.mark.parametrize("command", ["run", "distill", "evaluate"])
def test_a_second_command_does_nothing_and_says_what_came_out_and_where_it_is(
    finished, tmp_path, capsys, command
):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("model*.safetensors")}
    recipe = write_recipe(tmp_path / "recipe.yaml")
    assert main([command, str(recipe), "--out", str(finished), "--resume"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("model*.safetensors")}
    verdict, table, places = capsys.readouterr().out.strip().split("\n\n")
    page = (finished / "report.html").read_text()
    assert f"<h1>{verdict}</h1>" in page
    assert table.splitlines()[0].split() == ["sampled", "accuracy,", "%", "sort", "add3", "mean", "kept"]
    assert len(table.splitlines()) <= 8
    assert f"merged model  {finished / 'merged'}\n" in places
    assert places.endswith(f"{finished / 'report.html'}")


def test_the_report_shows_answers_of_the_run_itself(finished):
    results = json.loads((finished / "results.json").read_text())
    page = (finished / "report.html").read_text()
    merged = next(model for model in results["models"] if model["name"] == "merged")["domains"]
    for domain, found in results["answers"].items():
        assert found["compared"] == merged[domain]["sampled"]["total"] == 20
        told = [row for kind in ("wins", "losses", "regressions") for row in found[kind]["shown"]]
        assert told, "a model of so few steps is wrong somewhere"
        assert all(f"<dd>{html.escape(row['prompt'])}</dd>" in page for row in told)
        assert set(merged[domain]["lengths"]) == {"p10", "p50", "p90", "max", "cut"}
    assert set(results["answers"]) == {"sort", "add3"}
    assert not re.search(r"rollout: (?!null)|<th scope=\"row\">[a-z ]+ requests", page), (
        "a counter without words"
    )


@pytest.mark.slow
def test_side_by_side_gives_the_same_weights(finished, tmp_path):
    recipe = tiny_recipe(runtime={"workers": 2})
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_pipeline(recipe, folder)
    assert digests(tmp_path / "run") == digests(finished)


def test_specialists_side_by_side_have_the_weights_of_one_after_another(finished, tmp_path):
    recipe = tiny_recipe(runtime={"workers": 2})
    names = ["specialist-sort", "specialist-add3"]
    with RunFolder.resume(go_on(finished, tmp_path / "run", recipe, "base"), recipe) as folder:
        run_concurrently(recipe, folder, [plan_stages(recipe)[name] for name in names], Progress())
        assert [folder.stage_done(name) is not None for name in names] == [True, True]
    for name in MODELS[1:3]:
        made = CausalLM.from_pretrained(tmp_path / "run" / name).digest()
        assert made == CausalLM.from_pretrained(finished / name).digest()


@pytest.mark.long
def test_another_seed_gives_other_weights(finished, tmp_path):
    recipe = tiny_recipe(seed=1)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "base")
        assert not (tmp_path / "run" / "merged").exists()
    other = CausalLM.from_pretrained(tmp_path / "run" / "base").digest()
    assert other != CausalLM.from_pretrained(finished / "base").digest()


@pytest.mark.slow
def test_evaluate_measures_what_is_there_and_is_not_final(tiny_run, tmp_path):
    recipe = tiny_recipe()
    with RunFolder.resume(go_on(tiny_run, tmp_path / "run", recipe, "base"), recipe) as folder:
        run_stage(recipe, folder, "evaluate")
        assert folder.stage_done("evaluate") is None
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [model["name"] for model in results["models"]] == ["base"]


def test_needs_are_transitive():
    stages = plan_stages(tiny_recipe())
    names = [stage.name for stage in with_needs(stages, "baseline-mixed_grpo")]
    assert names == ["base", "specialist-sort", "specialist-add3", "merge", "baseline-mixed_grpo"]
