"""A run whose model, teacher and data are on the Hub: from names to a merge, and on from its commits."""

import json
import shutil

import pytest
import tiny
import yaml
from hub_server import files_of

from opd.config.load import load_recipe
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.cli import main
from opd.pipelines.records.hub import fetch_recipe, rank_variables

PROMPTS = b"".join(b'{"prompt": "<a>%d=", "label": "%d"}\n' % (i, i) for i in range(40))


@pytest.fixture
def recipe(hub, hub_model, tmp_path):
    """A merge of one teacher, all of it on the Hub; the teacher by its tag."""
    hub.add("org/tiny", hub_model)
    teacher = save_checkpoint(tiny.model(seed=1), tiny.tokenizer(), tmp_path / "teacher", {})
    made = hub.add("org/teacher", files_of(teacher))
    made.refs["v1"] = made.refs["main"]
    hub.add("org/set", {"train.jsonl": PROMPTS}, "datasets")
    path = tmp_path / "recipe.yaml"
    settings = {
        "name": "hub",
        "model": {"path": "org/tiny"},
        "teachers": {"a": {"type": "local", "path": "org/teacher@v1"}},
        "domains": {"a": {"source": "hf://datasets/org/set/train.jsonl", "reward": "hub_reward:right"}},
        "rollout": {"max_new_tokens": 4, "max_sequence": 32},
        "distill": {"steps": 1, "prompts_per_domain": 4},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 4},
        "runtime": {"threads": 1},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_from_names_on_the_hub_to_a_merge_and_on_from_its_commits(hub, recipe, tmp_path, capfd):
    out = tmp_path / "run"
    commits = {name: made.refs["main"] for name, made in hub.server.repositories.items()}
    assert main(["distill", str(recipe), "--out", str(out)]) == 0
    assert f"org/teacher@v1           done is commit {commits['org/teacher']}" in capfd.readouterr().err
    inputs, config = (json.loads((out / f"{name}.json").read_text()) for name in ("inputs", "config"))
    asked = {
        "model.path": {"asked": "org/tiny", "commit": commits["org/tiny"]},
        "teachers.a.path": {"asked": "org/teacher@v1", "commit": commits["org/teacher"]},
        "domains.a.source": {"asked": "hf://datasets/org/set/train.jsonl", "commit": commits["org/set"]},
    }
    assert inputs["hub"] == asked == json.loads((out / "results.json").read_text())["hub"]
    assert inputs["given"]["model.path"]["model.safetensors"]
    assert config["model"]["path"] == f"org/tiny@{commits['org/tiny']}"
    assert config["domains"]["a"]["source"] == f"hf://datasets/org/set@{commits['org/set']}/train.jsonl"
    card = (out / "merged" / "README.md").read_text()
    assert "base_model: org/tiny\n" in card
    assert f"org/teacher@{commits['org/teacher']}" in card

    for made in hub.server.repositories.values():  # every branch moves on, every tag is set anew
        for branch in list(made.refs):
            made.commit({"config.json": b"{}", "model.safetensors": b""}, branch)
    hub.server.asked.clear()
    assert main(["run", str(recipe), "--out", str(out), "--resume"]) == 0
    assert hub.server.asked == []  # all files are here
    assert json.loads((out / "results.json").read_text())["hub"] == asked

    shutil.rmtree(hub.cache)  # another machine
    assert main(["run", str(recipe), "--out", str(out), "--resume"]) == 0
    assert hub.asked(f"HEAD /org/tiny/resolve/{commits['org/tiny']}/model.safetensors")


@pytest.mark.slow
def test_another_revision_is_another_run(hub, recipe, hub_model, tmp_path, ends):
    out = tmp_path / "run"
    assert main(["distill", str(recipe), "--out", str(out)]) == 0
    hub.server.repositories["org/tiny"].commit(hub_model | {"generation_config.json": b"{}"}, "v2")
    words = ["distill", str(recipe), "--out", str(out), "--resume", "--model.path", "org/tiny@v2"]
    assert "was started with model.path = " in (said := ends(2, words).err)
    assert "org/tiny@" in said


def test_a_folder_that_holds_another_run_is_said_before_anything_is_fetched(hub, recipe, tmp_path, ends):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    assert "exists already" in ends(2, ["run", str(recipe), "--out", str(tmp_path / "run")]).err
    assert hub.server.asked == []


def test_a_dry_run_asks_nobody(hub, recipe, ends):
    assert "path: org/tiny\n" in ends(0, ["run", str(recipe), "--dry-run"]).out
    assert hub.server.asked == []


def test_ranks_are_given_what_their_parent_was(hub, recipe, monkeypatch):
    loaded = load_recipe([recipe])
    first, record = fetch_recipe(loaded)
    for made in hub.server.repositories.values():
        made.commit({"config.json": b"{}", "model.safetensors": b""})
    hub.server.asked.clear()
    for name, value in rank_variables(record).items():
        monkeypatch.setenv(name, value)
    assert fetch_recipe(loaded) == (first, record)
    assert hub.server.asked == []


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json"])
def test_files_in_the_cache_that_are_damaged_are_found(hub, recipe, hub_model, tmp_path, capsys, name):
    fetch_recipe(load_recipe([recipe]))
    kept = (hub.cache / "models--org--tiny" / "snapshots").rglob(name)
    damaged = bytearray(hub_model[name])
    damaged[-1] ^= 1 if name.endswith("safetensors") else ord("\n") ^ ord(" ")
    next(kept).resolve().write_bytes(damaged)
    assert main(["run", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert "is not what the Hub gave; delete " in capsys.readouterr().err


def test_the_doctor_and_the_plan_fetch_what_they_look_at(hub, recipe, tmp_path, ends):
    assert "student: llama" in ends(0, ["doctor", str(recipe), "--out", str(tmp_path / "run")]).out
    assert main(["plan", str(recipe)]) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("model.path", "org/nothing", "model.path: there is no folder org/nothing here and no model of"),
        ("model.path", "org/tiny@v9", "model.path: org/tiny has no revision v9"),
        ("teachers.a.path", "org/nothing", "teachers.a.path: there is no folder"),
        ("model.chat_template", "org/nothing", "model.chat_template: there is no folder"),
        ("domains.a.source", "hf://datasets/org/set/x.jsonl", "source: org/set has no file x.jsonl"),
        ("domains.a.source", "hf://datasets/org/../x.jsonl", "../x.jsonl' names nothing on the Hub"),
        ("model.path", "hf://org", "model.path: 'hf://org' names nothing on the Hub"),
        ("model.path", "hf://datasets/org/set/train.jsonl", "names no model on the Hub"),
    ],
)
def test_a_wrong_name_is_one_sentence(hub, recipe, tmp_path, capsys, setting, value, sentence):
    assert main(["run", str(recipe), "--out", str(tmp_path / "run"), f"--{setting}", value]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("opd: ")]
    assert [line for line in said if sentence in line], said
    assert not (tmp_path / "run").exists()
