"""A dry run refuses what the folders of its models rule out, in the sentence of the doctor and of the run."""

import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_types
import yaml
from safetensors.torch import load_file, save_file

from opd.pipelines.cli import main
from opd.pipelines.stages.publishing import publish_checkpoint

SERVED = {
    "servers": {"student": {"type": "sglang", "command": [sys.executable, "-m", "sglang.launch_server"]}},
    "rollout": {"max_sequence": 64, "engine": {"type": "sglang", "servers": "student"}},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[str, Path], Path]:
    """Copies a tiny model of a type to a folder."""

    @functools.cache
    def made(model_type: str) -> Path:
        return tiny_types.write_folder(model_type, tmp_path_factory.mktemp(model_type) / "model")

    def copied(model_type: str, folder: Path) -> Path:
        shutil.copytree(made(model_type), folder)
        return folder

    return copied


def configured(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def renamed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.more.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def adapter(folder: Path) -> None:
    """An adapter of another kind than plain LoRA on the model that was in `folder`."""
    base = folder.rename(folder.with_name("base"))
    folder.mkdir()
    described = {"peft_type": "LORA", "base_model_name_or_path": str(base), "use_dora": True, "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file({}, folder / "adapter_model.safetensors")


def other_tokens(folder: Path) -> None:
    tiny_types.character_tokenizer("=9876543210", ["<sort>"]).save_pretrained(folder)


def published(folder: Path) -> None:
    base = folder.rename(folder.with_name("base"))
    publish_checkpoint(base, folder)


def recipe(room: Path, student: Path, teacher: Path, kind: str = "local", **changes: Any) -> str:
    settings = {
        "name": "dry",
        "model": {"path": str(student)} | changes.pop("model", {}),
        "teachers": {"sort": {"type": kind, "path": str(teacher)}},
        "domains": {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}},
        "rollout": {"max_sequence": 64, "max_new_tokens": 8},
        "distill": {"steps": 1, "prompts_per_domain": 2},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 2, "every": 0},
    } | changes
    path = room / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


STUDENTS: dict[str, tuple[str, Callable[[Path], None], dict[str, Any], str]] = {
    "a mixture on served engines": ("granitemoe", lambda _: None, SERVED, "is one tensor where servers"),
    "attention of its own": ("falcon", lambda _: None, {}, "takes none from outside"),
    "recurrences": ("mamba", lambda _: None, {}, "does not attend through the attention interface"),
    "a model of pictures": ("llama", lambda f: configured(f, model_type="vit"), {}, "has no causal language"),
    "no such type": ("llama", lambda f: configured(f, model_type="llamo"), {}, "does not know"),
    "code of its own": ("llama", lambda f: configured(f, auto_map={"AutoModel": "m.M"}), {}, "never run"),
    "quantised": (
        "llama", lambda f: configured(f, quantization_config={"quant_method": "fp8"}), {}, "quantised",
    ),
    "no such activation": ("llama", lambda f: configured(f, hidden_act="swiglu"), {}, "write silu"),
    "no such rope": (
        "llama", lambda f: configured(f, rope_parameters={"rope_type": "yarm"}), {}, "write yarn",
    ),
    "no configuration": ("llama", without("config.json"), {}, "config.json is missing"),
    "no weights": ("llama", without("model.safetensors"), {}, "neither model.safetensors nor"),
    "no tokenizer": ("llama", without("tokenizer.json"), {}, "tokenizer"),
    "cut weights": ("llama", cut, {}, "truncated or corrupt"),
    "another tensor": ("llama", renamed, {}, "copy both again"),
    "more layers": ("llama", lambda f: configured(f, num_hidden_layers=3), {}, "lacks"),
    "no layers for adapters": (
        "llama", lambda _: None, {"model": {"lora": {"rank": 2, "targets": ["c_attn"]}}}, "c_attn",
    ),
    "ends nowhere": (
        "llama", lambda _: None, {"rollout": {"max_sequence": 64, "stop_ids": [99]}}, "lie outside",
    ),
}  # fmt: skip
"""What is wrong -> type, damage, settings, and a part of the sentence, where the student has it."""
TEACHERS: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    "a streamed model that is no chain": ("nanochat", lambda _: None, "streamed", "cannot be streamed"),
    "a published one": ("nanochat", published, "streamed", "cannot be streamed"),
    "streamed, named otherwise": ("gpt2", lambda _: None, "streamed", "cannot be streamed"),
    "angles of the longest": (
        "llama",
        lambda f: configured(f, rope_parameters=DYNAMIC, max_position_embeddings=32),
        "local",
        "its angles change",
    ),
    "other tokens": ("llama", other_tokens, "local", "ids stand for other"),
    "fewer rows": ("llama", lambda f: configured(f, vocab_size=8), "local", "in the shape"),
    "an adapter of another kind": ("llama", adapter, "local", "plain LoRA"),
    "recurrences": ("mamba", lambda _: None, "local", "does not attend through the attention interface"),
    "no weights": ("llama", without("model.safetensors"), "local", "neither model.safetensors nor"),
}
"""The same, with the kind of the teacher that has it."""


def errors(text: str, mark: str) -> list[str]:
    return [line.removeprefix(mark).strip() for line in text.splitlines() if line.startswith(mark)]


def check_words(path: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["run", path, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = errors(err, "opd: error:")
    assert part in " ".join(said), said
    assert said
    assert main(["run", path, "--out", str(Path(path).with_name("run"))]) == 2
    assert errors(capsys.readouterr().err, "opd: error:") == said
    assert main(["doctor", path]) == 2
    assert errors(capsys.readouterr().out, "error") == said


@pytest.mark.some(6)
@pytest.mark.parametrize("what", STUDENTS)
@pytest.mark.filterwarnings("ignore")
def test_a_dry_run_says_of_a_student_what_a_run_says(what: str, model, tmp_path, capsys):
    model_type, damage, changes, part = STUDENTS[what]
    folder, other = model(model_type, tmp_path / "model"), model("llama", tmp_path / "other")
    damage(folder)
    check_words(recipe(tmp_path, folder, other, **changes), part, capsys)


@pytest.mark.some(3)
@pytest.mark.parametrize("what", TEACHERS)
@pytest.mark.filterwarnings("ignore")
def test_a_dry_run_says_of_a_teacher_what_a_run_says(what: str, model, tmp_path, capsys):
    model_type, damage, kind, part = TEACHERS[what]
    folder, other = model(model_type, tmp_path / "model"), model("llama", tmp_path / "other")
    damage(folder)
    check_words(recipe(tmp_path, other, folder, kind), part, capsys)


def test_a_specialist_that_is_to_be_streamed_is_of_the_students_form(model, tmp_path, capsys):
    changes = {"teachers": {}, "distill": {"steps": 1, "teachers": "streamed"}}
    path = recipe(tmp_path, model("nanochat", tmp_path / "model"), tmp_path, **changes)
    check_words(path, "cannot be streamed", capsys)


def test_a_teacher_is_looked_at_beside_a_student_that_is_elsewhere(model, tmp_path, ends):
    student = {"path": "org/name"}
    path = recipe(tmp_path, tmp_path, model("nanochat", tmp_path / "model"), "streamed", model=student)
    assert "cannot be streamed" in ends(2, ["run", path, "--dry-run"]).err


NAMED = {
    "functions": {"distill": {"steps": 1, "to_batch": "gone:x"}},
    "rewards": {"domains": {"sort": {"source": "procedural:sort", "reward": "gone:x"}}},
    "sources": {"domains": {"sort": {"source": "/none/gone.jsonl", "reward": "exact"}}},
    "demonstrations": {"sft": {"source": "/none/gone.jsonl"}, "base": None},
    "sets": {"evaluation": {"sets": {"other": {"source": "/none/gone.jsonl", "reward": "exact"}}}},
}
"""What a recipe names that is not there, beside its models."""


def test_what_is_not_there_is_refused_in_the_words_of_the_doctor(model, tmp_path, capsys, ends):
    path = recipe(tmp_path, tmp_path / "none", tmp_path / "neither")
    out, err = ends(2, ["run", path, "--dry-run"])
    assert out == ""
    nothing = "is not a folder: nothing is there; check the path."
    said = [f"student: model.path: {tmp_path}/none {nothing}", f"teacher sort: {tmp_path}/neither {nothing}"]
    assert errors(err, "opd: error:") == said
    folder = model("llama", tmp_path / "model")
    for what, changes in NAMED.items():
        path = recipe(tmp_path, folder, folder, **changes)
        assert main(["run", path, "--dry-run"]) == 2, what
        said = errors(capsys.readouterr().err, "opd: error:")
        assert said, what
        assert "gone" in " ".join(said), what
        assert set(said) <= set(errors(ends(2, ["doctor", path]).out, "error")), what


def test_a_sound_recipe_is_printed_without_reading_weights(model, tmp_path, ends, monkeypatch):
    def never(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("opd.storage.weight_folder.check_numbers", never)
    folder = model("llama", tmp_path / "model")
    (folder / "checksums.json").write_text(json.dumps({"model.safetensors": "0" * 64}))
    out, err = ends(0, ["run", recipe(tmp_path, folder, folder), "--dry-run"])
    assert "name: dry" in out
    assert "error" not in err
