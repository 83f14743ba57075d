"""`opd publish` on a real checkpoint, and what the manifest then says of it."""

import dataclasses
import json

import pytest
import tiny
import torch
from watched import without_waiting

from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import fingerprint
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.storage.published import PublishedModel

GRANITE = {"model_type": "granite", "logits_scaling": 4.0, "tie_word_embeddings": True}


@pytest.fixture
def checkpoint(tmp_path):
    save_checkpoint(tiny.model(**GRANITE), tiny.tokenizer(), tmp_path / "model", {})
    return tmp_path / "model"


def test_the_command_publishes_once(checkpoint, tmp_path, ends):
    words = ["publish", str(checkpoint), str(tmp_path / "store"), "--shards", "2"]
    first = ends(0, words)
    second = ends(0, words)
    with PublishedModel.open(tmp_path / "store") as model:
        manifest = model.manifest
    assert first.out.startswith(f"{checkpoint} published: {tmp_path / 'store'}/{manifest.version_name}\n")
    assert manifest.digest in first.out
    assert "2 shards" in first.out
    assert second.out.startswith(f"{checkpoint} was published already: ")


def test_what_is_published_and_a_runs_folder_are_named_for_what_they_are(checkpoint, tmp_path, ends):
    ends(0, ["publish", str(checkpoint), str(tmp_path / "store")])
    run = tmp_path / "run"
    run.mkdir()
    for name in ("inputs.json", "config.json"):
        (run / name).write_text("{}")
    asked = {"sample": ["--prompt", "1"], "publish": [str(tmp_path / "other")], "push": ["me/mine"]}
    for command, words in asked.items():
        for place, sentence in ((tmp_path / "store", "is a published model"), (run, "it holds no model yet")):
            assert sentence in ends(2, [command, str(place), *words]).err
    checkpoint.rename(run / "merged")
    for command, words in asked.items():
        assert f"give one of its models, such as {run}/merged" in ends(2, [command, str(run), *words]).err


def test_the_manifest_describes_head_tokenizer_and_weights(checkpoint, tmp_path):
    manifest = publish_checkpoint(checkpoint, tmp_path / "store", shards=3).manifest
    assert manifest.head.scale == 0.25
    assert manifest.head.softcap is None
    assert manifest.head.tied
    assert manifest.head.vocabulary == len(tiny.tokenizer())
    assert manifest.config["model_type"] == "granite"
    expected = json.loads(json.dumps(dataclasses.asdict(fingerprint(tiny.tokenizer()))))
    state = tiny.model(**GRANITE).module.state_dict()
    with PublishedModel.open(tmp_path / "store") as model:
        assert model.manifest.fingerprint == expected
        for name, unit in model.manifest.units.items():
            buffer = bytearray(unit.nbytes)
            model.read_unit(name, memoryview(buffer))
            for key, entry in unit.tensors.items():
                raw = buffer[entry.offset : entry.offset + entry.nbytes]
                assert torch.equal(
                    torch.frombuffer(raw, dtype=torch.float32).reshape(entry.shape), state.pop(key)
                )
    assert state == {}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["publish", "none", "{store}"], "none is not a folder"),
        (["publish", "{model}", "{store}", "--shards", "0"], "of 1 to 15 digits, at least 1, not '0'"),
        (["publish", "{model}", "{store}", "--shards", "two"], "of 1 to 15 digits, at least 1, not 'two'"),
        (["publish", "{model}", "{store}", "--seed", "1"], "remove --seed"),
        (["publish", "{model}", "nonsense://x"], "nonsense://x cannot be opened (Protocol not known"),
        (
            ["publish", "{model}", "s3:/bucket/x"],
            "where a URL has two; write s3://bucket/x, or ./s3:/bucket/x",
        ),
        (["publish", "{model}", "ftp://127.0.0.1:1/x"], "ftp://127.0.0.1:1/x cannot be opened (["),
        (
            ["publish", "{model}", "http://127.0.0.1:1/x"],
            "a store of its protocol cannot do that; give a folder",
        ),
        (["publish", "{model}", "{file}"], "file is a file; give a folder"),
        (["publish", "{model}", "{file}/below"], "file is a file; give a folder"),
        (["publish", "{model}", "{other}"], "other is the folder of a model or a run; publish into one of"),
        (["publish", "{model}"], "the following arguments are required: URL"),
    ],
)
def test_a_users_error_is_one_line_and_status_2(checkpoint, tmp_path, words, part, ends):
    places = {"model": checkpoint, "store": tmp_path / "store"}
    places |= {"file": tmp_path / "file", "other": tmp_path / "other"}
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    captured = ends(2, [word.format(**places) for word in words])
    assert captured.out == ""
    assert without_waiting(captured.err).startswith("opd: error: ")
    assert without_waiting(captured.err).strip().count("\n") == 0
    assert part in captured.err
    assert not (tmp_path / "store").exists()
