"""Wrong files, folders and paths, table by table: status 2, sentences alone, nothing trained."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import tiny
from recipes import write_recipe
from watched import without_waiting

from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.cli import main

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small random model that knows the tags of the tiny recipe."""
    folder = tmp_path_factory.mktemp("models") / "whole"
    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    save_checkpoint(CausalLM.from_config(tiny.LLAMA, tokenizer=tokenizer, seed=0), tokenizer, folder, {})
    return folder


def answer(*words: str) -> tuple[int, list[str]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(words))
    return status, without_waiting(err.getvalue()).splitlines()


def refused(*words: str, named: str = "") -> str:
    """The sentences of a command that must end with status 2, one a line."""
    status, lines = answer(*words)
    assert status == 2, lines
    assert lines
    for line in lines:
        assert line.startswith(("opd: error: ", "opd: warning: ")), lines
        assert "Errno" not in line, line
        assert len(line) < 1500
    assert named in "".join(lines), lines
    return lines[0]


def changed(**keys):
    """A change of config.json."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))

    return change


def text(name: str, content: str | bytes):
    def change(folder: Path) -> None:
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        (folder / name).write_bytes(data)

    return change


def as_folder(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


MODELS = {
    **{
        f"layers {value!r}": changed(num_hidden_layers=value)
        for value in (0, -1, 10**9, 10**30, "x", None, [2])
    },
    **{f"hidden {value!r}": changed(hidden_size=value) for value in (0, -8, 10**15, "x", 33)},
    **{f"heads {value!r}": changed(num_attention_heads=value) for value in (0, -1, 5, "x")},
    **{f"vocabulary {value!r}": changed(vocab_size=value) for value in (0, -1, 3, 10**15)},
    **{f"type {value!r}": changed(model_type=value) for value in ("nothing", "bert", None, 3, "../..")},
    **{
        f"quantised {value!r}": changed(quantization_config=value)
        for value in ({"quant_method": "gptq"}, {}, 3)
    },
    **{
        f"{name} {kind}": text(name, content)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
        for kind, content in {
            "empty": "",
            "no JSON": "{",
            "list": "[]",
            "null": "null",
            "deep": DEEP,
            "bytes": bytes(range(256)),
            "long length": b"\xff" * 64,
        }.items()
    },
    **{f"{name} folder": as_folder(name) for name in ("config.json", "model.safetensors")},
    "index outside": text("model.safetensors.index.json", json.dumps({"weight_map": {"a": "../../x"}})),
    "index of numbers": text("model.safetensors.index.json", json.dumps({"weight_map": {"a": 3}})),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("role", [pytest.param("model", marks=pytest.mark.long), "teacher"])
def test_wrong_model_folders(tmp_path, whole, role):
    faults = []
    for name, change in MODELS.items():
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        (folder / "checksums.json").unlink()
        change(folder)
        settings = {"model": {"path": str(folder if role == "model" else whole)}, "base": None}
        if role == "teacher":
            settings |= {"teachers": {"sort": {"path": str(folder)}}}
        recipe = write_recipe(tmp_path / "recipe.yaml", **settings)
        status, lines = answer("run", str(recipe), "--out", str(tmp_path / "run"))
        said = [line for line in lines if line.startswith("opd: error: ")]
        if status != 2 or len(said) != 1 or any(word in said[0] for word in ("Errno", "Traceback")):
            faults.append(f"{name}: {status} {lines[-3:]}")
    assert not faults, "\n".join(faults)


PATHS = [
    "x" * 300,
    "a/" * 3000,
    "{}/file",
    "{}/file/below",
    "{}/missing",
    "{}/empty",
    "a\\nb",
    "~nobody/x",
    "{}/loop",
]


@pytest.mark.some(12)
@pytest.mark.parametrize("place", PATHS)
@pytest.mark.parametrize(
    "key", ["--model.path", "--teachers.sort.path", "--out", "--run_dir", "--model.tokenizer"]
)
def test_wrong_paths(tmp_path, whole, key, place):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    changes = {"model": {"path": str(whole)}, "base": None}
    recipe = write_recipe(tmp_path / "recipe.yaml", **changes)
    given = place.format(tmp_path)
    words = [
        "run",
        str(recipe),
        key,
        given,
        *([] if key in ("--out", "--run_dir") else ["--out", str(tmp_path / "run")]),
    ]
    if key in ("--out", "--run_dir") and place in ("{}/missing", "{}/empty", "a\\nb", "~nobody/x"):
        return  # where a run may well be
    refused(*words)


ROWS = {
    "deep": b'{"prompt": "a", "label": ' + DEEP.encode() + b"}",
    "deep alone": DEEP.encode(),
    "huge number": b'{"prompt": "a", "label": ' + b"9" * 10_000 + b"}",
    "no JSON": b"{",
    "bytes": bytes(range(256)),
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "null": b"null",
    "prompt 3": b'{"prompt": 3}',
    "prompt empty": b'{"prompt": ""}',
    "messages of text": b'{"prompt": ["a"]}',
    "message without role": b'{"prompt": [{"content": "a"}]}',
    "role 3": b'{"prompt": [{"role": 3, "content": "a"}]}',
    "one row": b'{"prompt": "1"}',
    "empty": b"",
    "surrogate": b'{"prompt": "\\ud800"}',
}


@pytest.mark.some(1)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_wrong_data(tmp_path, whole, suffix):
    for name, content in ROWS.items():
        data = tmp_path / f"data.{suffix}"
        data.write_bytes(content)
        source = {"sort": {"source": str(data), "reward": "operator:truth"}}
        recipe = write_recipe(tmp_path / "recipe.yaml", model={"path": str(whole)}, base=None, domains=source)
        status, lines = answer("run", str(recipe), "--out", str(tmp_path / "run"))
        assert status == 2, (name, lines)
        assert all(line.startswith("opd: ") and len(line) < 1500 for line in lines), (name, lines)


CONFIGS = {
    "num_hidden_layers": (0, -1, 10**9, "x", None, 1.5),
    "hidden_size": (0, -8, 10**15, "x", 33),
    "num_attention_heads": (0, -1, 5, "x"),
    "intermediate_size": (-1, "x", 10**15),
    "vocab_size": (0, "x", 3, 10**15, [1]),
    "model_type": ("nothing", [], {}, 3, None),
    "max_position_embeddings": ("x",),
}


@pytest.mark.slow
def test_wrong_configurations_of_new_models(tmp_path):
    faults = []
    plain = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    for key, values in CONFIGS.items():
        for value in values:
            recipe = write_recipe(tmp_path / "recipe.yaml", model={"config": plain | {key: value}})
            status, lines = answer("run", str(recipe), "--out", str(tmp_path / "run"))
            said = [line for line in lines if line.startswith("opd: error: ")]
            if status != 2 or len(said) != 1 or "Errno" in said[0]:
                faults.append(f"{key} {value!r}: {status} {lines[-3:]}")
    assert not faults, "\n".join(faults)
