"""Streamed, local and already published teachers end with the same student."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch.distributed as dist
from recipes import tiny_recipe
from safetensors.torch import load_file
from shared_runs import SPECIALISTS, go_on

from opd.config import Recipe
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline, run_stage
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.teachers.schedule import TeacherSchedule

FEW = {"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def trained(tiny_run, tmp_path_factory):
    """A run with base, specialists and a streamed merge."""
    recipe = tiny_recipe(distill=FEW)
    path = go_on(tiny_run, tmp_path_factory.mktemp("modes") / "streamed", recipe, *SPECIALISTS)
    with RunFolder.resume(path, recipe) as folder:
        run_stage(recipe, folder, "merge")
    return path


def merging_again(trained: Path, given: dict, **distill) -> Recipe:
    settings = {"model": {"path": str(trained / "base")}, "base": None, "teachers": given}
    return tiny_recipe(**settings, distill=FEW | distill, baselines={"methods": []})


def merge_again(trained: Path, out: Path, given: dict, **distill) -> dict:
    """A merge of the same specialists from the same base; returns what its stage recorded."""
    recipe = merging_again(trained, given, **distill)
    with RunFolder.create(out, recipe) as folder:
        run_pipeline(recipe, folder)
        done = folder.stage_done("merge")
    assert done is not None
    return done


def folders(trained: Path) -> dict:
    return {name: {"path": str(trained / "specialists" / name)} for name in ("sort", "add3")}


def test_local_teachers_give_the_same_weights(trained, tmp_path, monkeypatch):
    """And nothing that they gave is left when the next step is scored."""
    scored, score = [], TeacherSchedule.score

    def scoring(schedule, samples):
        assert not schedule._rows
        scored.append(len(samples))
        score(schedule, samples)

    monkeypatch.setattr(TeacherSchedule, "score", scoring)
    streamed = json.loads((trained / "stages/merge/done.json").read_text())
    local = merge_again(trained, tmp_path / "local", folders(trained), teachers="local")
    assert local["digest"] == streamed["digest"]
    assert len(scored) == FEW["steps"]
    assert streamed["counters"]["bytes_read"] > 0
    assert "bytes_read" not in local["counters"] or local["counters"]["bytes_read"] == 0


def test_published_teachers_give_the_same_weights_and_are_evaluated(trained, tmp_path):
    urls = {}
    for name in ("sort", "add3"):
        urls[name] = {"path": f"file://{tmp_path}/store/{name}"}
        publish_checkpoint(trained / "specialists" / name, urls[name]["path"], shards=2)
    urls["sort"]["type"] = "local"  # fetched as a whole, beside one that is streamed
    done = merge_again(trained, tmp_path / "run", urls)
    assert done["digest"] == json.loads((trained / "stages/merge/done.json").read_text())["digest"]
    models = {m["name"]: m for m in json.loads((tmp_path / "run/results.json").read_text())["models"]}
    assert models["teacher:sort"]["domains"]["sort"]["sampled"]["total"] == 20
    measured = measured_with_swapped_teachers(tmp_path / "run", merging_again(trained, urls))
    assert measured == {name: model["domains"] for name, model in models.items()}


@pytest.mark.slow
def test_teachers_in_an_object_store_are_read_once_a_run(trained, tmp_path, capsys):
    """With the node's copies of them or without, to the same weights."""
    urls = {}
    for name in ("sort", "add3"):
        urls[name] = {"path": f"local://{tmp_path}/store/{name}"}  # by fsspec
        publish_checkpoint(trained / "specialists" / name, urls[name]["path"])
    expected = json.loads((trained / "stages/merge/done.json").read_text())["digest"]
    read = {}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for most in (None, 0, "a link"):
        out, recipe = tmp_path / f"run-{most}", merging_again(trained, urls)
        runtime = recipe.runtime.model_copy(update={"weights_cache_mb": 0 if most == 0 else None})
        recipe = recipe.model_copy(update={"runtime": runtime})
        with RunFolder.create(out, recipe) as folder:
            if most == "a link":
                (out / "weights_cache").symlink_to(elsewhere)
            run_stage(recipe, folder, "merge")
            assert folder.weights_cache(recipe).exists() == (most is None)
            done, steps = folder.stage_done("merge"), folder.read_metrics("merge")
        assert done is not None
        assert done["digest"] == expected
        assert (out / "weights_cache").exists() == (most == "a link")
        assert not list(elsewhere.iterdir())
        rows = [row for row in steps if "bytes_read" in row][1:]  # after the first step
        read[most] = [(row["bytes_read"] > 0, row["cached_bytes"] > 0) for row in rows]
    again = [(True, False)] * 2
    assert read == {None: [(False, True)] * 2, 0: again, "a link": again}
    assert "weights_cache is a link, where this run keeps copies" in capsys.readouterr().err


def measured_with_swapped_teachers(run: Path, recipe: Recipe) -> dict:
    """What is measured again after the teachers that were fetched have changed places."""
    fetched = run / "downloaded"
    (fetched / "sort").rename(fetched / "aside")
    (fetched / "add3").rename(fetched / "sort")
    (fetched / "aside").rename(fetched / "add3")
    shutil.rmtree(run / "stages" / "evaluate")
    with RunFolder.resume(run, recipe) as folder:
        run_pipeline(recipe, folder)
    return {m["name"]: m["domains"] for m in json.loads((run / "results.json").read_text())["models"]}


@pytest.mark.some(1)
@pytest.mark.parametrize("keep", [False, True])
def test_megatron_teachers_give_the_same_student(trained, tmp_path, keep):
    pytest.importorskip("megatron.core", reason="needs the extra megatron", exc_type=ImportError)
    before = dist.is_initialized()  # a test before this one in the same process may have made a group
    merge_again(trained, tmp_path / "run", folders(trained), teachers={"type": "megatron", "keep": keep})
    ours = load_file(tmp_path / "run/merged/model.safetensors")
    theirs = load_file(trained / "merged/model.safetensors")
    tiny.assert_learnt_alike(ours, theirs, load_file(trained / "base/model.safetensors"))
    assert dist.is_initialized() == before


def test_a_finished_stage_keeps_no_log_and_no_cache(trained):
    for stage in ("specialist-sort", "merge"):
        assert not (trained / "stages" / stage / "wal").exists()
        assert not (trained / "stages" / stage / "cache").exists()
