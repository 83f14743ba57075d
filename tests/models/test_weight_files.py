"""Which files hold a folder's weights: every reader takes the same ones, or all refuse with one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_types
import torch
from recipes import folder_recipe
from safetensors.torch import load_file, save_file
from settings import SETTINGS
from transformers import AutoModelForCausalLM, Llama4ForConditionalGeneration

from opd.errors import CheckpointError, StorageError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import check_folder
from opd.models.hf_weights import check_weights
from opd.models.sharded import open_empty
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.check.examine import run_checks
from opd.pipelines.commands.sample import model_folder
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.storage.weight_folder import check_numbers, read_headers
from opd.teachers.hf_reader import HFFolderReader

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
META = {"format": "pt"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    tokenizer = character_tokenizer("0123456789=", ["<sort>"])
    model = CausalLM.from_config(tiny.LLAMA, tokenizer=tokenizer)
    folder = save_checkpoint(model, tokenizer, tmp_path_factory.mktemp("whole") / "m", {})
    (folder / "checksums.json").unlink()
    return folder


@pytest.fixture(scope="module")
def cut(whole, tmp_path_factory) -> Path:
    """The same in two shards, with its index."""
    folder = tmp_path_factory.mktemp("cut") / "m"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names, placed = sorted(tensors), {}
    for number, part in enumerate((names[:8], names[8:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata=META)
        placed |= dict.fromkeys(part, file)
    write_index(folder, placed)
    return folder


def write_index(folder: Path, placed: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def placed_in(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def other(folder: Path, name: str) -> None:
    """Weights of another seed, whole, in a file."""
    made = {name: tensor + 1 for name, tensor in tiny.model().weights()}
    save_file(made, folder / name, metadata=META)


def twice(folder: Path) -> None:
    file = placed_in(folder)["model.layers.0.mlp.up_proj.weight"]
    assert file != placed_in(folder)[NORM]
    tensors = load_file(folder / file)
    save_file(tensors | {NORM: torch.full((32,), 7.0)}, folder / file, metadata=META)


def moved(folder: Path) -> None:
    """The index gives the norm to the other shard."""
    placed = placed_in(folder)
    write_index(folder, placed | {NORM: next(file for file in placed.values() if file != placed[NORM])})


def several(folder: Path) -> None:
    added("b.safetensors", b=torch.ones(2))(folder)
    write_index(folder, {"b": "b.safetensors", NORM: SINGLE})


def index_of(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        placed = placed_in(folder)
        change(placed)
        write_index(folder, placed)

    return edit


def added(name: str, **tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors or {"x": torch.ones(2)}, folder / name, metadata=META)


def filled(value: float, name: str = NORM) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            if name in tensors:
                tensors[name].view(-1)[-1] = value
                save_file(tensors, path, metadata=META)

    return edit


def renamed(change: Callable[[str], str]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = {change(name): tensor for name, tensor in load_file(folder / SINGLE).items()}
        save_file(tensors, folder / SINGLE, metadata=META)

    return edit


def inside(part: str, before: str) -> Callable[[Path], None]:
    """`part` stands before `before` in the names that have it."""
    return renamed(lambda name: name.replace(before, part + before))


WRAPPED = {
    "torch.compile": inside("_orig_mod.", "model."),
    "torch.compile of a layer": inside("_orig_mod.", "self_attn."),
    "DistributedDataParallel": inside("module.", "model."),
    "peft": inside("base_model.model.", "model."),
    "FSDP": inside("_fsdp_wrapped_module.", "model."),
    "FSDP of layers": inside("_fsdp_wrapped_module.", "mlp."),
    "activation checkpointing": inside("_checkpoint_wrapped_module.", "mlp."),
    "torch.compile of DistributedDataParallel": inside("_orig_mod.module.", "model."),
}
REFUSED = {
    **{
        f"from inside {name}": ("whole", change, rf"as {name.partition(' of ')[0]} .*save_pretrained")
        for name, change in WRAPPED.items()
    },
    "one file beside an index": ("cut", lambda f: other(f, SINGLE), "take different weights"),
    "an index of nothing beside one file": (
        "whole",
        lambda f: write_index(f, {NORM: "gone.safetensors"}),
        "an index .*names gone|names gone",
    ),
    "an index of one file and others": ("whole", several, "take different weights"),
    "a tensor in two shards": ("cut", twice, r"model\.norm\.weight stands in .* too"),
    "a tensor elsewhere": ("cut", moved, r"model\.norm\.weight is in .*, and it is in"),
    "a tensor nowhere": (
        "cut",
        index_of(lambda p: p.update({"model.extra.weight": p[NORM]})),
        r"extra\.weight is in .*it is not",
    ),
    "a tensor that is not named": ("cut", index_of(lambda p: p.pop(NORM)), r"does not name model\.norm"),
    "a shard that is not named": ("cut", added("model-00003-of-00003.safetensors"), "does not name it"),
    "a shard beside one file": ("whole", added("model-00001-of-00001.safetensors"), "is not part of model"),
    "an adapter without its description": ("whole", added("adapter_model.safetensors"), "lies beside"),
    "a head beside the weights": ("whole", added("value_head.safetensors"), "lies beside the weights"),
    "NaN": ("whole", filled(float("nan")), r"NaN or infinity in model\.norm\.weight"),
    "infinity in a row nobody asks for": (
        "cut",
        filled(float("-inf"), EMBEDDING),
        r"NaN or infinity in model\.embed_tokens",
    ),
}
HARMLESS = {
    "the pickle that was converted": ("whole", lambda f: (f / "pytorch_model.bin").write_bytes(b"x")),
    "Mistral's own form": ("cut", lambda f: other(f, "consolidated.safetensors")),
    "an index of the one file": (
        "whole",
        lambda f: write_index(f, dict.fromkeys(load_file(f / SINGLE), SINGLE)),
    ),
    "a folder beside": ("cut", lambda f: (f / "onnx").mkdir()),
}


def doctor(folder: Path, tmp: Path) -> None:
    said = [
        one.detail for one in run_checks(folder_recipe(folder), run_dir=tmp / "run") if one.level == "error"
    ]
    if said:
        raise CheckpointError(said[0])


DOORS: dict[str, Callable[[Path, Path], object]] = {
    "memory": lambda folder, tmp: CausalLM.from_pretrained(folder),
    "publish": lambda folder, tmp: publish_checkpoint(folder, tmp / "published"),
    "doctor": doctor,
}
ONLY_FILES: dict[str, Callable[[Path, Path], object]] = {
    "check": lambda folder, tmp: check_weights(folder),
    "empty": lambda folder, tmp: open_empty(folder),
    "streamed": lambda folder, tmp: HFFolderReader(folder),
    "sample": lambda folder, tmp: model_folder(str(folder)),
    "headers": lambda folder, tmp: read_headers(folder),
}
"""Doors that read no values, or later."""


@pytest.mark.parametrize("case", REFUSED)
def test_every_door_refuses_what_programs_read_differently(request, tmp_path, case):
    form, change, told = REFUSED[case]
    folder = tmp_path / "m"
    shutil.copytree(request.getfixturevalue(form), folder)
    change(folder)
    sentences = set()
    for door in (DOORS if "infinity" in told else DOORS | ONLY_FILES).values():
        with pytest.raises(CheckpointError, match=told) as caught:
            door(folder, tmp_path)
        sentences.add(str(caught.value).partition(";")[0].rstrip("."))
    assert len(sentences) == 1, sentences
    assert "\n" not in sentences.pop()


OTHERS = {
    "adapters that were not merged": (
        renamed(lambda name: name.replace("q_proj.", "q_proj.base_layer.")),
        r"q_proj\.base_layer\.weight, as peft does .*merge_and_unload",
    ),
    "what holds the model": (
        renamed(lambda name: f"policy.net.{name}"),
        r"has policy\.net\. before the names .*save the model itself",
    ),
    "a tensor less": (
        lambda f: save_file({k: v for k, v in load_file(f / SINGLE).items() if k != NORM}, f / SINGLE, META),
        rf"lacks 1 of the model's tensors, among them {NORM}; copy",
    ),
    "another shape": (
        lambda f: save_file(load_file(f / SINGLE) | {NORM: torch.ones(7)}, f / SINGLE, META),
        rf"holds {NORM} in the shape \[7\] where its config\.json asks for \[32\]; the two",
    ),
    "other names": (renamed(lambda name: name.replace("mlp.up", "mlp.over")), r"lacks 2 .*holds 2 others"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_weights_of_another_model_say_in_what_they_differ(whole, tmp_path, case):
    change, told = OTHERS[case]
    folder = shutil.copytree(whole, tmp_path / "m")
    change(folder)
    for door in (check_weights, CausalLM.from_pretrained, lambda f: publish_checkpoint(f, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=told):
            door(folder)


@pytest.mark.parametrize("name", [INDEX, "config.json", "generation_config.json"])
def test_a_pointer_in_place_of_a_description_is_called_one(cut, tmp_path, name):
    folder = shutil.copytree(cut, tmp_path / "m")
    (folder / name).write_bytes(b"version https://git-lfs/spec/v1\noid sha256:0\nsize 9\n")
    for door in (check_weights, CausalLM.from_pretrained, lambda f: publish_checkpoint(f, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=rf"{name} .* a pointer of Git LFS .*git lfs pull"):
            door(folder)


@pytest.mark.some(1)
@pytest.mark.parametrize("case", HARMLESS)
def test_what_no_reader_of_safetensors_takes_for_weights_does_no_harm(request, tmp_path, case, whole):
    form, change = HARMLESS[case]
    folder = tmp_path / "m"
    shutil.copytree(request.getfixturevalue(form), folder)
    change(folder)
    for door in (ONLY_FILES | DOORS).values():
        door(folder, tmp_path)
    assert CausalLM.from_pretrained(folder).digest() == CausalLM.from_pretrained(whole).digest()


@pytest.mark.parametrize("ask", [check_folder, read_headers])
def test_a_pointer_in_place_of_the_weights_is_called_one(whole, tmp_path, ask):
    folder = shutil.copytree(whole, tmp_path / "m")
    (folder / SINGLE).write_bytes(b"version https://git-lfs/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises((CheckpointError, StorageError), match=r"it is a pointer of Git LFS .*git lfs pull"):
        ask(folder)


def test_weights_of_another_name_are_named(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "m")
    (folder / SINGLE).rename(folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"holds weights\.safetensors and neither"):
        check_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_number_is_told_from_what_is_none(tmp_path, dtype):
    limits = torch.finfo(dtype)
    numbers = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, 1.0], dtype=dtype)
    save_file({"a": numbers, "b": torch.ones(3, dtype=torch.int64)}, tmp_path / SINGLE)
    check_numbers(tmp_path)
    for value in (float("nan"), float("inf"), -float("inf")):
        for place in range(len(numbers)):
            changed = numbers.clone()
            changed[place] = value
            save_file({"a": changed}, tmp_path / SINGLE)
            with pytest.raises(CheckpointError, match="NaN or infinity in a"):
                check_numbers(tmp_path)


def test_what_sees_images_is_left_out_of_a_language_model(tmp_path: Path):
    """Llama 4 is published with it. Gemma 4's files hold keys of layers that use those of others."""
    config: Any = tiny_types.tiny_config("llama4")
    config.vision_config.num_hidden_layers = 1
    whole = Llama4ForConditionalGeneration(config)
    for parameter in whole.parameters():
        parameter.data.normal_(0, 0.2)
    whole.save_pretrained(tmp_path / "llama4")
    sharing = SETTINGS["gemma4_text"]["keys of earlier layers"]
    folder = tiny_types.write_folder("gemma4_text", tmp_path / "gemma4", **sharing)
    tensors = load_file(folder / "model.safetensors")
    unused = {
        name.replace("layers.0", "layers.5"): tensors[name] for name in tensors if ".0.self_attn.k" in name
    }
    save_file(tensors | {name: one.clone() for name, one in unused.items()}, folder / "model.safetensors")
    for path in (tmp_path / "llama4", folder):
        ids = torch.arange(20)
        with torch.no_grad():
            ours = CausalLM.from_pretrained(path)
            hidden = ours.hidden(ids, ids, [0, 20])
            plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
            torch.testing.assert_close(ours.head().logits(hidden), plain(ids[None]).logits[0])
