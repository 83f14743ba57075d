"""A model folder is data: no code in it runs, and nobody is asked whether it may."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from opd.config import Recipe
from opd.errors import ModelError, TeacherError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import read_config
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.check.examine import run_checks
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.skeleton import Skeleton

ROOT = Path(__file__).parents[2]
CODE = """
from pathlib import Path
Path(__file__).with_name("it-ran").write_text("it ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "{model_type}"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast): ...
"""
MAPS = {
    "config.json": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    "tokenizer_config.json": {"AutoTokenizer": ["own.OwnTokenizer", None]},
    "generation_config.json": {"AutoModelForCausalLM": "own.OwnModel"},
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    made = save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path_factory.mktemp("honest") / "m", {})
    (made / "checksums.json").unlink(missing_ok=True)  # as an attacker would
    return made


def trap(honest: Path, folder: Path, file: str, model_type: str) -> Path:
    """`honest` with code of its own, named in `file`."""
    shutil.copytree(honest, folder)
    (folder / "checksums.json").unlink(missing_ok=True)
    (folder / "own.py").write_text(CODE.format(model_type=model_type))
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "own.py", folder / "custom_generate" / "generate.py")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    if file == "inside config.json":
        change = {"text_config": {"model_type": "llama", "auto_map": MAPS["config.json"]}}
        file = "config.json"
    else:
        change = {"auto_map": MAPS[file]}
    described = json.loads((folder / file).read_text()) | change
    (folder / file).write_text(json.dumps(described))
    return folder


def recipe(student: Path, teacher: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "trap",
            "model": {"path": str(student)},
            "teachers": {"t": {"path": str(teacher)}},
            "domains": {"sort": {"source": "procedural:sort", "prompts": 50, "teacher": "t"}},
        }
    )


ENTRIES = {
    "load": lambda folder, tmp: CausalLM.from_pretrained(folder),
    "config": lambda folder, tmp: read_config(folder),
    "tokenizer": lambda folder, tmp: load_tokenizer(folder),
    "teacher": lambda folder, tmp: LocalTeacher("t", folder, vocabulary=10).load_head(),
    "publish": lambda folder, tmp: publish_checkpoint(folder, tmp / "published"),
}


@pytest.mark.parametrize(
    "file", ["config.json", "inside config.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("model_type", ["llama", "unheard-of"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_folder_that_names_code_is_refused(honest, tmp_path, monkeypatch, file, model_type, entry):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    folder = trap(honest, tmp_path / "trap", file, model_type)
    with pytest.raises(ModelError, match="names Python code of its own"):
        ENTRIES[entry](folder, tmp_path)
    assert not list(tmp_path.rglob("it-ran"))


def test_code_that_nothing_names_does_not_run_either(honest, tmp_path, monkeypatch):
    """transformers imports custom_generate/generate.py without being told of it, where code is trusted."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    folder = trap(honest, tmp_path / "trap", "config.json", "llama")
    shutil.copy(honest / "config.json", folder / "config.json")
    assert CausalLM.from_pretrained(folder).digest() == CausalLM.from_pretrained(honest).digest()
    assert not list(tmp_path.rglob("it-ran"))


@pytest.mark.parametrize("place", ["student", "teacher"])
def test_the_doctor_says_so_first(honest, tmp_path, place):
    folder = trap(honest, tmp_path / "trap", "config.json", "unheard-of")
    pair = (folder, honest) if place == "student" else (honest, folder)
    errors = {
        f.title: f.detail for f in run_checks(recipe(*pair), run_dir=tmp_path / "run") if f.level == "error"
    }
    assert "names Python code of its own" in errors["student" if place == "student" else "teacher t"]
    assert not list(tmp_path.rglob("it-ran"))


@pytest.mark.slow
def test_a_terminal_is_not_asked(honest, tmp_path):
    """`opd doctor` with a person at the keyboard who says yes to everything."""
    folder = trap(honest, tmp_path / "trap", "config.json", "unheard-of")
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(folder, honest).model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "opd.pipelines.cli", "doctor", str(file)]
    done = subprocess.run(
        command, input="y\n" * 20, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "Do you wish to run" not in done.stdout + done.stderr
    assert not list(tmp_path.rglob("it-ran"))


def test_a_published_configuration_that_names_code_is_refused(honest):
    config = json.loads((honest / "config.json").read_text()) | {"auto_map": MAPS["config.json"]}
    with pytest.raises(TeacherError, match="names Python code of its own"):
        Skeleton(config, torch.float32, torch.device("cpu"))


@pytest.mark.slow
def test_every_call_of_transformers_says_that_code_is_not_trusted():
    """Reads the source: a loader of Hugging Face called without `trust_remote_code=False` is a fault."""
    faults, calls = [], 0
    for top in ("opd", "teachers", "storage", "pipelines", "kernels", "examples"):
        for path in sorted((ROOT / top).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | {
                "cls",
                "CausalLM",
            }
            own |= {"MegatronForm"}
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if node.func.attr not in ("from_pretrained", "from_config"):
                    continue
                if ast.unparse(node.func.value) in own:
                    continue
                calls += 1
                said = [k.value for k in node.keywords if k.arg == "trust_remote_code"]
                if not said or not isinstance(said[0], ast.Constant) or said[0].value is not False:
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert calls >= 5
    assert faults == []
