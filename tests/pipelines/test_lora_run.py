"""A run that trains adapters: specialists, their teachers on one base, and the student."""

import json
from pathlib import Path

import pytest
import torch
from attempts import run_only
from recipes import NO_CURVE, tiny_recipe
from safetensors.torch import load_file

from opd.models.adapters import read_adapter
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.teachers.streamed_teacher import SharedBase

pytest.importorskip("peft")

FEW = {"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 2, "optim": {"lr": 0.01}}
DOMAINS = ("sort", "add3")


def recipe(**changes):
    model = tiny_recipe().model.model_dump(exclude_none=True) | {"lora": {"rank": 4, "alpha": 8}}
    base = tiny_recipe().base
    assert base is not None
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    settings = {
        "model": model,
        "base": base.model_dump() | {"steps": 5},
        "domains": {name: own | {"reward": "recipes:varied"} for name, own in domains.items()},
        "specialist": {"steps": 3, "prompts_per_step": 4, "group_size": 4, "minibatches": 1},
        "distill": FEW,
        "baselines": {"methods": []},
        "evaluation": NO_CURVE,
    }
    return tiny_recipe(**settings | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "run"
    run_only(recipe(), path, "merge")
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_every_model_is_the_base_and_an_adapter(trained):
    base = weights(trained / "base")
    for name in ("specialists/sort", "specialists/add3", "merged"):
        found, adapter = weights(trained / name), read_adapter(trained / name)
        changed = {key for key, tensor in found.items() if not torch.equal(tensor, base[key])}
        assert changed == set(adapter.pairs)
        for key, (a, b) in adapter.pairs.items():
            torch.testing.assert_close(found[key], base[key] + 2.0 * (b @ a), rtol=1e-5, atol=1e-6)
    assert not (trained / "base" / "adapter").exists()


def test_the_teachers_are_published_as_one_base_and_adapters(trained):
    published = trained / "published"
    assert sorted(path.name for path in published.iterdir()) == ["adapted-base", *sorted(DOMAINS)]
    assert len([path for path in (published / "adapted-base").iterdir() if path.is_dir()]) == 1
    for name in DOMAINS:
        assert (published / name / "adapter.json").is_file()
        assert not list((published / name).rglob("shard-*"))


def test_each_step_reads_the_base_once(trained, monkeypatch):
    passes = []
    monkeypatch.setattr(
        SharedBase,
        "score_all",
        lambda self, asked, score=SharedBase.score_all: passes.append(len(asked)) or score(self, asked),
    )
    folder_of_run = trained.parent / "again"
    given = {name: {"path": str(trained / "specialists" / name)} for name in DOMAINS}
    model = {"path": str(trained / "base"), "lora": {"rank": 4, "alpha": 8}}
    settings = {"model": model, "base": None, "teachers": given}
    with RunFolder.create(folder_of_run, recipe(**settings)) as folder:
        run_stage(recipe(**settings), folder, "merge")
        streamed = folder.stage_done("merge") or {}
    assert passes == [len(DOMAINS)] * FEW["steps"]
    assert streamed["digest"] == json.loads((trained / "stages/merge/done.json").read_text())["digest"]

    settings |= {"distill": FEW | {"teachers": "local"}}
    with RunFolder.create(trained.parent / "local", recipe(**settings)) as folder:
        run_stage(recipe(**settings), folder, "merge")
        local = folder.stage_done("merge") or {}
    # The merged folders are what the base and the adapters are together, bit for bit.
    assert local["digest"] == streamed["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["k1", "full"])
def test_a_specialist_of_adapters_follows_one_that_has_kept_its_own(trained, tmp_path, loss):
    """Streamed beside its base or merged and whole: the same weights, and no more than adapters learn."""
    found = []
    for kind in ("streamed", "local"):
        old = {"path": str(trained / "specialists" / "sort"), "type": kind}
        opd = {"teacher": "old", "loss": {"type": loss}}
        own = tiny_recipe().specialist.model_dump() | {"steps": 2, "optim": {"lr": 0.01}, "opd": opd}
        model = {"path": str(trained / "base"), "lora": {"rank": 4, "alpha": 8}}
        settings = recipe(model=model, base=None, teachers={"old": old}, specialist=own)
        with RunFolder.create(tmp_path / kind, settings) as folder:
            run_stage(settings, folder, "specialist-add3")
            found.append((folder.stage_done("specialist-add3") or {})["digest"])
    assert found[0] == found[1]
    base, ours = weights(trained / "base"), weights(tmp_path / "local/specialists/add3")
    changed = {key for key, tensor in ours.items() if not torch.equal(tensor, base[key])}
    assert changed == set(read_adapter(tmp_path / "local/specialists/add3").pairs)
    assert (tmp_path / "streamed/published/old/adapter.json").is_file()
