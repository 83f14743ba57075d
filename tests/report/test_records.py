"""What results.json says of the checkout and of the extras that a recipe takes."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from recipes import tiny_recipe

from opd.kernels import ops, tilelang_rows
from opd.pipelines.evaluation.measure import accuracy_of
from opd.pipelines.launch.machine import git_state, kernel_implementation
from opd.pipelines.records import results
from opd.pipelines.records.results import used_extras
from opd.types import SampleGroup


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *own, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_checkout_and_whether_it_was_changed(tmp_path, monkeypatch):
    assert git_state(tmp_path) == {}
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {}  # without a commit
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert git_state(tmp_path) == clean
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "results").write_text("what a run leaves is no change")
    assert git_state(tmp_path) == clean
    assert git_state(tmp_path / "runs") == {}  # a package installed below somebody's checkout is not its
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook
    assert git_state(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == clean | {"dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {}  # without git


def test_the_extras_that_a_recipe_takes(monkeypatch):
    sort = {"source": "procedural:sort", "params": {"digits": 3}}
    assert used_extras(tiny_recipe()) == []
    domains = {
        "a": sort | {"reward": "math", "environment": {"type": "agent", "params": {"run": "agents:plain"}}},
        "b": sort | {"reward": {"type": "judge", "urls": ["http://h"]}},
    }
    recipe = tiny_recipe(
        domains=domains,
        storage={"published": "s3://bucket/x"},
        model=tiny_recipe().model.model_dump() | {"lora": {}},
        runtime={"tensorboard": True},
    )
    assert used_extras(recipe) == ["s3", "verifiers", "sglang", "agents", "lora", "tensorboard"]
    monkeypatch.setenv("OPD_KERNELS", "reference")
    assert kernel_implementation() == "reference"
    monkeypatch.setenv("OPD_KERNELS", "no such")
    assert kernel_implementation() == "no such"


def test_kernels_are_named_when_they_were_used(monkeypatch):
    monkeypatch.setattr(ops, "implementation", lambda: SimpleNamespace(name="rows"))
    monkeypatch.setattr(tilelang_rows, "PROVED", set())
    assert kernel_implementation() == "chunked"
    tilelang_rows.PROVED.add("reverse")
    assert kernel_implementation() == "chunked, rows by TileLang"


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"launch": "ray"}, "ray"),
        ({"train": {"backend": "megatron"}}, "megatron"),
        ({"rollout": {"engine": {"type": "sglang", "urls": ["http://h"]}}}, "sglang"),
        ({"distill": {"teachers": "megatron"}}, "megatron"),
        ({"base": None, "sft": {"source": "shown.parquet"}}, "parquet"),
        ({"evaluation": {"sets": {"x": {"source": "shown.jsonl", "reward": "math"}}}}, "verifiers"),
        ({"evaluation": {"sets": {"x": {"source": "shown.parquet", "reward": "exact"}}}}, "parquet"),
    ],
)
def test_what_a_field_takes(changes, extra):
    assert used_extras(tiny_recipe(**changes)) == [extra]


def test_intervals_of_accuracies_have_the_confidence_that_is_asked_for():
    samples = [replace(one, reward=reward) for one in tiny.samples([(1, 1)] * 4) for reward in (0.0, 1.0)]
    groups = [SampleGroup(one.uid, "a", [one]) for one in samples]
    narrow, wide = (accuracy_of(groups, confidence) for confidence in (0.5, 0.95))
    assert wide.low < narrow.low < narrow.accuracy == 0.5 < narrow.high < wide.high


def test_intervals_of_recovery_have_the_recipes_confidence(monkeypatch):
    monkeypatch.setattr(results, "best_teachers", lambda *_: {"d": "specialist:d"})
    right = {"base": 10, "specialist:d": 90, "merged": 60}
    models = {name: {"d": {"sampled": {"correct": count, "total": 100}}} for name, count in right.items()}

    def width(confidence):
        evaluation = SimpleNamespace(confidence=confidence)
        recipe = SimpleNamespace(domains={"d": None}, evaluation=evaluation, seed=0)
        found = results._recovery_entries(recipe, models)
        assert found.keys() == {"merged"}  # the base and the teacher are what it is measured with
        return found["merged"]["d"]["high"] - found["merged"]["d"]["low"]

    assert width(0.5) < 0.6 * width(0.95)
