"""What models are computed in, learn in and are written in, from the checkpoint a run starts from."""

from pathlib import Path

import pytest
import tiny
import tiny_types
import torch
from attempts import run_only
from recipes import tiny_recipe
from safetensors.torch import load_file

from opd.errors import ModelError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.check.models import Models
from opd.pipelines.check.resources import check_precision
from opd.pipelines.check.shapes import ModelShape
from opd.pipelines.stages.precision import checkpoint_dtype, lost_share, model_dtype, some_weights
from opd.storage.published import PublishedModel

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def save(folder: Path, dtype: torch.dtype, seed: int = 0, **options) -> Path:
    """A folder of a tiny model whose tokenizer is that of the tiny recipe's domains."""
    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    config = tiny.LLAMA | {"num_key_value_heads": 4}
    model = CausalLM.from_config(config, tokenizer=tokenizer, seed=seed)
    for name, parameter in model.module.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in options.get("exact", ()) else dtype)
    return save_checkpoint(model, tokenizer, folder, {}, max_shard_bytes=options.get("shard", 2**30))


@pytest.mark.parametrize("name", KINDS)
def test_the_dtype_is_what_the_files_hold_unless_the_recipe_names_one(tmp_path, name):
    save(tmp_path / "m", KINDS[name], shard=8192, exact=("model.norm.weight",))
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert checkpoint_dtype(tmp_path / "m") == name
    model = {"path": str(tmp_path / "m")}
    assert model_dtype(tiny_recipe(model=model, base=None)) == name
    for other in KINDS:
        assert model_dtype(tiny_recipe(model=model | {"dtype": other}, base=None)) == other
    assert model_dtype(tiny_recipe()) == "float32"


def merge(tmp_path: Path, out: str, **changes) -> Path:
    """The run folder of a short merge of two given teachers."""
    teachers = {name: {"path": str(tmp_path / name)} for name in ("sort", "add3")}
    settings = {
        "model": {"path": str(tmp_path / "base")} | changes.pop("model", {}),
        "base": None,
        "teachers": teachers,
        "distill": {"steps": 2, "prompts_per_domain": 4, "checkpoint_every": 1, "optim": {"lr": 1e-5}},
        "baselines": {"methods": []},
    }
    recipe = tiny_recipe(**settings | changes)
    run_only(recipe, tmp_path / out, "merge")
    return tmp_path / out


def kinds(file: Path) -> set[str]:
    return {str(t.dtype).removeprefix("torch.") for t in load_file(file).values() if t.is_floating_point()}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_merge_is_written_and_its_teachers_are_streamed_in_the_checkpoints_dtype(tmp_path, name):
    for seed, place in enumerate(("base", "sort", "add3")):
        save(tmp_path / place, KINDS[name], seed)
    run = merge(tmp_path, "run")
    assert kinds(run / "merged" / "model.safetensors") == {name}
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    assert abs((run / "merged" / "model.safetensors").stat().st_size - size) < 1000
    [checkpoint] = (run / "stages/merge/checkpoints").glob("step*2")
    assert kinds(checkpoint / "model.safetensors") == {"float32"}
    with PublishedModel.open(run / "published" / "sort") as published:
        stored = {
            entry.dtype for unit in published.manifest.units.values() for entry in unit.tensors.values()
        }
    assert stored == {STORED[name]}


def test_a_checkpoint_of_a_merge_without_masters_is_small(tmp_path):
    for seed, place in enumerate(("base", "sort", "add3")):
        save(tmp_path / place, torch.bfloat16, seed)
    run = merge(tmp_path, "run", train={"precision": "pure"})
    [checkpoint] = (run / "stages/merge/checkpoints").glob("step*2")
    assert kinds(checkpoint / "model.safetensors") == {"bfloat16"}


@pytest.mark.parametrize(("lr", "share"), [(1e-6, 0.98), (1e-5, 0.845), (1e-4, 0.118), (1e-2, 0.0)])
def test_the_doctor_knows_which_share_of_the_weights_would_not_move(tmp_path, lr, share):
    config = tiny.LLAMA | {"hidden_size": 64, "intermediate_size": 256}
    model = CausalLM.from_config(config, tokenizer=tiny.tokenizer(), dtype="bfloat16")
    save_checkpoint(model, tiny.tokenizer(), tmp_path / "m", {})
    weights = [t for t in some_weights(tmp_path / "m") if len(t) > 64]
    assert abs(lost_share(weights, "bfloat16", lr) - share) < 0.02
    moved = (
        [(t.float() - lr).bfloat16() != t for t in weights],
        [(t.float() + lr).bfloat16() != t for t in weights],
    )
    counted = 1 - torch.cat([*moved[0], *moved[1]]).float().mean()
    assert abs(lost_share(weights, "bfloat16", lr) - counted) < 0.01  # a half goes to the even one


@pytest.mark.parametrize(
    ("dtype", "train", "level", "words"),
    [
        ("float32", {}, "ok", "float32"),
        ("float32", {"precision": "pure"}, "ok", "float32"),
        ("bfloat16", {}, "ok", "what learns in float32"),
        ("float16", {}, "warning", "the loss is not scaled"),
        ("float16", {"backend": "deepspeed"}, "ok", "what learns in float32"),
        (
            "bfloat16",
            {"precision": "pure"},
            "warning",
            "84% of the weights do not move at the lr 1e-05 of the merge",
        ),
    ],
)
def test_the_doctor_says_what_weights_without_masters_cost(dtype, train, level, words):
    recipe = tiny_recipe(train=train, distill={"optim": {"lr": 1e-5}})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    shape = ModelShape(parameters=10**6, hidden_size=64, windows=(None,) * 4, vocabulary=1000, kv_width=64)
    [finding] = check_precision(recipe, Models(student=shape))
    assert finding.level == level
    assert words in finding.detail


def test_the_doctor_refuses_an_average_of_weights_that_are_rounded():
    average = {"a": {"type": "student", "moving_average": 0.9}}
    of_domain = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 50, "teacher": "a"}
    for train, words in (({"precision": "pure"}, "would stand still; set it to mixed"), ({}, "float32")):
        recipe = tiny_recipe(
            train=train, teachers=average, domains={"sort": of_domain}, baselines={"methods": []}
        )
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
        shape = ModelShape(parameters=10**6, hidden_size=64, windows=(None,) * 4, vocabulary=99, kv_width=64)
        [finding] = check_precision(recipe, Models(student=shape))
        assert finding.level == ("error" if train else "ok")
        assert words in finding.detail


def test_the_doctor_says_what_is_rounded_to_fp8():
    config = tiny_types.tiny_config("llama")
    recipe = tiny_recipe(model={"config": tiny_recipe().model.config, "quantize": "fp8"})
    shape = ModelShape(parameters=10**6, hidden_size=64, windows=(None,) * 4, vocabulary=1000, kv_width=64)
    [finding] = check_precision(recipe, Models(student=shape, config=config))
    assert finding.detail == "float32; 14 matrices of layers are rounded to FP8"
    with pytest.raises(ModelError, match="gpt2 has no matrix in its layers that FP8 is for"):
        check_precision(recipe, Models(student=shape, config=tiny_types.tiny_config("gpt2")))
