"""A stage whose student writes on a real SGLang server, from a recipe, against the engine of the process."""

import json
import math
import re

import numpy as np
import pytest
import served_models as models
import torch
from recipes import tiny_recipe
from safetensors.torch import load_file
from served_stage import FEW, run

from opd.errors import RolloutError
from opd.pipelines.check.servers import check_workers
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.served_engine import with_engine
from opd.rollout.weight_proof import check_form

pytestmark = pytest.mark.usefixtures("restored")


def served(sglang, sync="disk"):
    return {"type": "sglang", "urls": [sglang.url], "patience": 60.0, "sync": sync}


@pytest.mark.long
@pytest.mark.parametrize("sync", [pytest.param("disk", marks=pytest.mark.long), "tensors"])
def test_models_are_measured_on_the_server_that_the_recipe_names(sglang, served_models, tmp_path, sync):
    """Each with its own weights: at next to no temperature it answers as the engine of the process."""
    settings = {
        "teachers": {name: {"path": str(served_models["b"])} for name in ("sort", "add3")},
        "rollout": {"temperature": 0.001},
    }
    sets = {"gen": {"source": "procedural:add3", "params": {"digits": 3}, "prompts": 4}}
    found = {}
    for name, engine in {"embedded": {"type": "torch"}, "sglang": served(sglang, sync)}.items():
        out = tmp_path / name
        evaluation = {"prompts_per_domain": 6, "sets": sets}
        run(out, "evaluate", engine, served_models, evaluation=evaluation, **settings)
        models = json.loads((out / "stages/evaluate/models.json").read_text())["models"]
        assert {model["engine"] for model in models.values()} == {name}
        found[name] = {
            (model, of, answer["uid"]): answer["text"]
            for model, entry in models.items()
            for of, answers in entry["answers"].items()
            for answer in answers
        }
    assert found["embedded"] == found["sglang"]
    assert {of for _, of, _ in found["sglang"]} == {"sort", "add3", "gen"}
    base, teacher = (
        [text for (model, of, _), text in found["sglang"].items() if (model, of) == (name, "sort")]
        for name in ("base", "teacher:sort")
    )
    assert base != teacher


@pytest.mark.slow
@pytest.mark.parametrize("sync", [pytest.param("disk", marks=pytest.mark.long), "tensors"])
def test_grpo_on_a_server_samples_with_what_the_trainer_holds(sglang, served_models, tmp_path, sync):
    """Every optimiser step's weights are sampled with: at every step the log-probabilities of engine and
    trainer agree, which those of the step before do not.
    """
    domains = {
        "sort": {
            "source": "procedural:sort",
            "params": {"digits": 3},
            "prompts": 200,
            "reward": models.VARIETY,
        }
    }
    changes = {"domains": domains, "teachers": {}}
    specialist = {"steps": 4, "prompts_per_step": 16, "group_size": 8, "minibatches": 2}
    changes["specialist"] = specialist | {"optim": {"lr": 3e-3}, "checkpoint_every": 2}
    found = {}
    for name, engine in {"torch": {"type": "torch"}, "sglang": served(sglang, sync)}.items():
        steps = run(tmp_path / name, "specialist-sort", engine, served_models, **changes)
        assert len(steps) == 4
        found[name] = steps
    for metrics in found["sglang"]:
        assert metrics["mismatch/max_abs"] < 1e-3
        assert metrics["mismatch/mean_abs"] < 1e-4
    assert all("staleness/max" not in metrics for metrics in found["sglang"])
    start, end = (load_file(folder / "model.safetensors") for folder in trained(tmp_path, served_models))
    assert max(float((end[name] - start[name]).abs().max()) for name in start) > 1e-3
    # No samples in common, the same distribution: the first step's rewards, before anything was learnt.
    one, other = (found[name][0] for name in ("torch", "sglang"))
    error = math.sqrt(2 / 128) * one["reward/std"]
    assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=5 * error)
    assert not list((tmp_path / "sglang").rglob("version-*"))


def trained(tmp_path, served_models):
    return served_models["a"], tmp_path / "sglang/specialists/sort"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "lora"),
    [
        ("disk", None),
        pytest.param("tensors", None, marks=pytest.mark.long),
        ("tensors", {"rank": 4, "alpha": 8}),
    ],
)
def test_a_merge_on_a_server_ends_in_the_same_student(sglang, served_models, tmp_path, sync, lora):
    """With the most likely token always, both engines write the same: so both learn the same. Adapters come
    to the server merged.
    """
    ends = {}
    changes = {"model": {"path": str(served_models["a"]), "lora": lora}} if lora else {}
    for name, engine in {"torch": {"type": "torch"}, "sglang": served(sglang, sync)}.items():
        steps = run(tmp_path / name, "merge", engine, served_models, rollout={"top_k": 1}, **changes)
        ends[name] = (load_file(tmp_path / name / "merged/model.safetensors"), steps)
    (here, one), (there, other) = ends["torch"], ends["sglang"]
    for ours, theirs in zip(one, other, strict=True):
        assert ours["tokens/student"] == theirs["tokens/student"]
        assert ours["kl/mean"] == pytest.approx(theirs["kl/mean"], abs=1e-4)
    start = load_file(served_models["a"] / "model.safetensors")
    moved = max(float((here[name] - start[name]).abs().max()) for name in here)
    assert moved > 0
    assert max(float((here[name] - there[name]).abs().max()) for name in here) <= 1e-2 * moved
    sent = {row["rollout/pushed_bytes"] for row in other[1:]}
    assert sent == {sum(tensor.nbytes for tensor in here.values())}


@pytest.mark.slow
def test_weights_reach_responses_that_are_being_written(sglang, served_models, tmp_path):
    """Asynchronous, with long responses: some are finished by later weights than they were begun with."""
    changes = {
        "rollout": {"schedule": "async", "max_new_tokens": 100, "max_sequence": 120},
        "distill": FEW | {"steps": 6},
    }
    means: list[float] = []
    # On a busy machine the server may have written all before the learner is done with a step.
    while not any(0 < mean < 1 for mean in means) and len(means) < 36:
        out = tmp_path / f"run-{len(means)}"
        steps = run(out, "merge", served(sglang, "tensors"), served_models, **changes)
        assert max(metrics.get("staleness/max", 0) for metrics in steps) == 1
        means += [metrics.get("staleness/mean", 0) for metrics in steps]
    assert any(0 < mean < 1 for mean in means)


@pytest.mark.long
def test_a_stage_that_was_stopped_goes_on_with_its_own_weights(sglang, served_models, tmp_path):
    """The server holds those of another stage meanwhile, under a version of the same number."""
    changes = {"rollout": {"top_k": 1}, "distill": FEW | {"to_batch": models.STOPS_AT}}
    models.stop_at(0)
    run(tmp_path / "undisturbed", "merge", served(sglang), served_models, **changes)
    models.stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", "merge", served(sglang), served_models, **changes)
    sglang.load(served_models["bad"], "2")
    models.stop_at(0)
    run(tmp_path / "stopped", "merge", served(sglang), served_models, **changes)
    one, other = (
        load_file(tmp_path / name / "merged/model.safetensors") for name in ("undisturbed", "stopped")
    )
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-5)


def test_the_doctor_looks_at_every_worker(sglang, served_models):
    absent = "http://127.0.0.1:9"
    engine = {"type": "sglang", "urls": [sglang.url, absent], "connect_timeout": 1.0}
    settings = {"base": None, "rollout": {"engine": engine}}
    findings = check_workers(tiny_recipe(model={"path": str(served_models["a"])}, **settings))
    assert [finding.level for finding in findings] == ["ok", "error"]
    assert f"{sglang.url} serves" in findings[0].detail
    assert re.search(f"{absent}/\\w+ failed", findings[1].detail)
    other = {"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2}
    settings["rollout"]["max_sequence"] = 128
    findings = check_workers(tiny_recipe(model={"config": other}, **settings))
    assert "with hidden_size 32, the student has 48" in findings[0].detail


def test_ranks_share_the_workers(served_models, tmp_path):
    """Each rank may write on all."""
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 6)]
    recipe = tiny_recipe(
        model={"path": str(served_models["a"])},
        base=None,
        rollout={"engine": {"type": "sglang", "urls": urls}},
    )
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        for rank, ranks in ((0, 3), (2, 3), (5, 6)):
            context = StageContext.open(recipe, folder, "merge", lambda *words: None)
            context.ranks.rank, context.ranks.size = rank, ranks
            with with_engine(context):
                engine = context.helpers.open_engines(served_models["a"]).engines[0]
                assert engine.policy_version == -1
                pool = engine._workers.pool
                assert [server.url for server in pool.servers] == urls
                assert (pool.options.rank, pool.options.ranks) == (rank, ranks)


def test_stages_side_by_side_are_refused(sglang, served_models):
    with pytest.raises(ValueError, match=re.escape("set runtime.workers to 1")):
        tiny_recipe(rollout={"engine": served(sglang)}, runtime={"workers": 2})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "with hidden_size 32, the student has 64; serve the student's own"),
        ({"num_hidden_layers": 3}, "with num_hidden_layers 2, the student has 3"),
        ({"model_type": "llama"}, "with model_type qwen3, the student has llama"),
    ],
)
def test_a_server_of_another_form_stops_the_stage(sglang, served_models, tmp_path, changes, words):
    """Before it is given weights that would end it: it serves on."""
    models.write_model(tmp_path / "other", seed=0, **(models.QWEN3 | {"vocab_size": models.PADDED} | changes))
    with pytest.raises(RolloutError, match=words):
        run(tmp_path / "run", "merge", served(sglang), {**served_models, "a": tmp_path / "other"})


def test_tensors_of_another_form_are_found_where_no_folder_can_be_read():
    norm, layer = torch.ones(2), torch.ones(2, 2)
    weights = [("model.norm.weight", norm), ("model.layers.0.mlp.down_proj.weight", layer)]
    names = [name for name, _ in weights]
    check_form("http://w", {}, [*names, "model.layers.0.rotary_emb.cos_sin_cache"], weights)
    with pytest.raises(RolloutError, match=r"with a tensor model\.layers\.1\.x, which the student has not"):
        check_form("http://w", {}, [*names, "model.layers.1.x"], weights)
    with pytest.raises(RolloutError, match=r"without model\.norm\.weight, which the student has"):
        check_form("http://w", {}, names[1:], weights)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["in_turn", "ahead", "async"])
def test_a_server_goes_on_with_groups_that_a_step_left(sglang, served_models, tmp_path, schedule):
    """They are taken in later steps, each once, with the tokens of every version that wrote them."""
    rollout = {"schedule": schedule, "over_sample": 1.5, "max_ahead": 3}
    distill = FEW | {"steps": 6}
    steps = run(tmp_path, "merge", served(sglang), served_models, rollout=rollout, distill=distill)
    assert len(steps) == 6
    assert sum(step["rollout/out_of_order"] for step in steps) > 0
    assert steps[-1]["rollout/carried"] == 0.0
    if schedule == "in_turn":  # else a batch after the last step begins
        ends = ("rollout/completed", "rollout/truncated")
        assert sum(step.get(end, 0.0) for step in steps for end in ends) == 6 * 8
