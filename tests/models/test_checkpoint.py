"""Folders out and in: bit-equal round trips, and a clear sentence for every way a folder can be broken."""

import json
import os
import re
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from opd.errors import CheckpointError, ModelError, StorageError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import model_card, save_checkpoint
from opd.models.hf_folder import read_config, require_folder
from opd.models.hf_weights import quiet_loading
from opd.models.tokenizers import fingerprint, load_tokenizer
from opd.storage.weight_folder import read_headers

CARD = {"base": "random", "results": {"sort": {"sampled": 0.98765, "greedy": 1.0}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of several shards."""
    return save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "model", CARD, max_shard_bytes=20_000)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.some(2)
def test_round_trip_is_bit_equal_for_every_family(family: CausalLM, tmp_path: Path):
    save_checkpoint(family, tiny.tokenizer(), tmp_path / "m", CARD, max_shard_bytes=20_000)
    loaded = CausalLM.from_pretrained(tmp_path / "m")
    assert loaded.digest() == family.digest()
    assert [name for name, _ in loaded.weights()] == [name for name, _ in family.weights()]
    tokenizer = load_tokenizer(tmp_path / "m")
    assert fingerprint(tiny.tokenizer()) == fingerprint(tokenizer)
    assert tokenizer("<a>12=").input_ids == tiny.tokenizer()("<a>12=").input_ids


def test_half_precision_round_trip_is_bit_equal(tmp_path: Path):
    model = CausalLM.from_config(tiny.LLAMA, tokenizer=tiny.tokenizer(), dtype="bfloat16")
    save_checkpoint(model, tiny.tokenizer(), tmp_path / "m", {})
    assert CausalLM.from_pretrained(tmp_path / "m", dtype="bfloat16").digest() == model.digest()


def test_plain_transformers_reads_it(folder: Path):
    with quiet_loading():
        plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(2, 12)
    model = CausalLM.from_pretrained(folder)
    with torch.no_grad():
        own = model.head().logits(model.hidden(ids, torch.arange(10), [0, 10]))
        torch.testing.assert_close(plain(ids[None]).logits[0], own, atol=1e-5, rtol=1e-5)


def test_the_folder_is_complete_and_leaves_nothing_beside_it(folder: Path):
    assert len(shards(folder)) > 2
    assert {"config.json", "tokenizer.json", "README.md", "checksums.json"} <= set(os.listdir(folder))
    assert os.listdir(folder.parent) == ["model"]
    assert "| sort | 0.9877 | 1 |" in (folder / "README.md").read_text()


def test_an_older_checkpoint_is_replaced(folder: Path):
    newer = tiny.model(seed=9)
    save_checkpoint(newer, tiny.tokenizer(), folder, CARD)
    assert CausalLM.from_pretrained(folder).digest() == newer.digest()
    assert len(shards(folder)) == 1
    assert os.listdir(folder.parent) == ["model"]


def test_a_failed_save_leaves_the_older_checkpoint_whole(folder: Path):
    before = CausalLM.from_pretrained(folder).digest()
    with pytest.raises(Exception, match="cannot represent an object"):
        save_checkpoint(tiny.model(seed=9), tiny.tokenizer(), folder, {"data": [object()]})
    assert CausalLM.from_pretrained(folder).digest() == before
    assert os.listdir(folder.parent) == ["model"]


def test_what_a_killed_save_left_behind_is_swept_away(folder: Path):
    (folder.parent / ".model.0123abcd.tmp").mkdir()
    (folder.parent / ".model2.0123abcd.tmp").mkdir()
    save_checkpoint(tiny.model(), tiny.tokenizer(), folder, CARD)
    assert sorted(os.listdir(folder.parent)) == [".model2.0123abcd.tmp", "model"]


def test_a_missing_shard_is_named(folder: Path):
    lost = shards(folder)[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} is missing"):
        CausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a pipe"),
        (os.mkdir, "a folder"),
        (lambda path: os.symlink("/nowhere/at/all", path), "a link that leads nowhere"),
    ],
)
@pytest.mark.parametrize("file", ["shard", "model.safetensors", "config.json"])
def test_what_is_in_the_place_of_a_file_is_said(folder: Path, make, kind: str, file: str):
    path = shards(folder)[1] if file == "shard" else folder / file
    if file != "shard":  # a model from elsewhere
        (folder / "checksums.json").unlink()
    if file == "model.safetensors":
        (folder / "model.safetensors.index.json").unlink()
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(
        CheckpointError, match=f"{path.name} is {kind} in the place of a file; remove it, and"
    ):
        CausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 7, 200, -1])
@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_truncated_shard_is_named(folder: Path, kept: int, with_checksums: bool):
    cut = shards(folder)[-1]
    cut.write_bytes(cut.read_bytes()[:kept])
    if not with_checksums:
        (folder / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=f"{cut.name} is truncated or corrupt"):
        CausalLM.from_pretrained(folder)


def test_a_flipped_bit_is_found_by_the_checksum(folder: Path):
    victim = shards(folder)[0]
    data = bytearray(victim.read_bytes())
    data[-5] ^= 4
    victim.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{victim.name} does not have the sha256"):
        CausalLM.from_pretrained(folder)


SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("file", SMALL)
@pytest.mark.parametrize("read", [CausalLM.from_pretrained, load_tokenizer, read_config])
def test_every_reader_compares_the_small_files_with_their_digests(folder: Path, file: str, read):
    """Other numbers in a configuration would be other results without a word; sentences name the file."""
    read(folder)
    where = "^" + re.escape(str(folder / file))
    whole = (folder / file).read_bytes()
    for damaged in (whole.replace(b"1", b"2", 1), whole + b" ", whole[:-3], b""):
        (folder / file).write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match=f"{where} (does not have the sha256|cannot be read as JSON)"
        ):
            read(folder)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"{where} is missing"):
        read(folder)
    (folder / file).write_bytes(whole)
    read(folder)
    (folder / "special_tokens_map.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not among the files"):
        read(folder)


def test_pickles_are_never_read(folder: Path):
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        CausalLM.from_pretrained(folder)
    (folder / "model.gguf").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"holds GGUF files.*convert one: see docs/recipes/hub\.md"):
        CausalLM.from_pretrained(folder)
    (folder / "model.gguf").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, which is never read"):
        CausalLM.from_pretrained(folder)


def test_tensors_that_the_weights_lack_are_not_made_up(folder: Path):
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    gone = listed["weight_map"].pop("model.norm.weight")
    for name in [name for name, file in listed["weight_map"].items() if file == gone]:
        del listed["weight_map"][name]
    (folder / gone).unlink()
    index.write_text(json.dumps(listed))
    (folder / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks \d+ of the model's tensors"):
        CausalLM.from_pretrained(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "checksums.json"])
def test_broken_json_is_named(folder: Path, file: str):
    if file != "checksums.json":
        (folder / "checksums.json").unlink()
    (folder / file).write_text('{"half": ')
    with pytest.raises(CheckpointError, match=f"{file} cannot be read as JSON"):
        CausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({}, "it has no weight_map; copy it again"),
        ({"metadata": {}, "weight_map": ["a"]}, "its weight_map is a list and no object"),
        ({"metadata": {}, "weight_map": {}}, "its weight_map is empty"),
        (
            {"weight_map": {"a": "../../x"}},
            "it names '../../x' as the file of 'a', which is no file beside it",
        ),
        ({"weight_map": {"a": {"b": "c"}}}, "it has a dict as the file of 'a', which is no file beside it"),
        ({"weight_map": {"a": "b.safetensors"}}, 'no object `metadata`; write `"metadata": {}` into it'),
        ({"metadata": [], "weight_map": {"a": "b.safetensors"}}, "no object `metadata`"),
        ({"metadata": {}, "weight_map": {"a": "b.safetensors"}}, "b.safetensors is missing; copy it again"),
        ([], "holds no JSON object"),
    ],
)
def test_a_malformed_index_is_told_in_one_sentence(folder: Path, index: dict, told: str):
    path = folder / "model.safetensors.index.json"
    (folder / "checksums.json").unlink()
    path.write_text(json.dumps(index))
    readers = [CausalLM.from_pretrained]
    if "metadata`" not in told:  # which publishing needs not
        readers.append(read_headers)
    for read in readers:
        with pytest.raises((CheckpointError, StorageError), match=re.escape(told)) as caught:
            read(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("runs/none/merged", "is not a folder: there is no runs; check the path."),
        ("here/none/merged", "is not a folder: there is no here/none; check the path."),
        ("here/merged", "is not a folder; download the model first and give its path."),
        ("runs/merged", "is not a folder: there is no runs; check the path."),
        ("../none/merged", "is not a folder: there is no ../none; check the path."),
        ("{0}/none", "is not a folder: nothing is there; check the path."),
        ("{0}/a/b/c", "is not a folder: there is no {0}/a; check the path."),
        ("~/a/b", "is not a folder: there is no ~; check the path."),
        ("gpt2", "is not a folder: nothing is there; check the path; names on the Hub are written org/name."),
        ("here/file", "is not a folder: here/file is a file; give the folder that holds the model."),
        ("here/file/x/y", "is not a folder: here/file is a file; give the folder that holds the model."),
        ("s3:/bucket/model", "is not a folder but a URL; give a folder of this machine."),
        ("org/name", "is not a folder; download the model first and give its path."),
    ],
)
def test_a_folder_that_is_not_there_is_named(path, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    path, told = (one.replace("{0}", str(tmp_path / "here")) for one in (path, told))
    with pytest.raises(CheckpointError) as caught:
        require_folder(Path(path))
    assert str(caught.value) == f"{path} {told}"


def test_a_missing_folder_and_a_missing_configuration_are_named(folder: Path):
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        CausalLM.from_pretrained(folder / "nowhere")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        CausalLM.from_pretrained(folder)


def test_an_unknown_architecture_is_named(folder: Path):
    (folder / "checksums.json").unlink()
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="says model_type no_such_model, which transformers"):
        CausalLM.from_pretrained(folder)


def test_the_card_shows_every_kind_of_value():
    card = {
        "extra_notes": "By hand.",
        "results": {"a": {"x": 0.5}, "b": {"y": "p|q"}},
        "teachers": ["one", "two"],
        "settings": {"distill": {"lr": 1e-3, "betas": [0.9, 0.99]}},
        "data": {"prompts": 64},
    }
    text = model_card("merged", card)
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles == ["# merged", "## Teachers", "## Data", "## Settings", "## Results", "## Extra notes"]
    assert "- one\n- two" in text
    assert "- prompts: 64" in text
    assert "| a | 0.5 |  |\n| b |  | p\\|q |" in text
    assert "```yaml\ndistill:\n  lr: 0.001" in text
