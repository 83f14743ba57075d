"""The character tokenizer, loading it back, and telling two tokenizers apart."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from opd.errors import CheckpointError, ModelError
from opd.models import tokenizers
from opd.models.tokenizers import (
    character_tokenizer,
    compare_tokenizers,
    fingerprint,
    load_tokenizer,
    set_chat_template,
)

ALPHABET = "0123456789=<>[](.*)\\|^$-+ \n\té→ab"
TAGS = ["<sort>", "<sort2>", "[x.*]", "ab", "é→"]
TOKENIZER = character_tokenizer(ALPHABET, TAGS)


@given(st.lists(st.sampled_from([*TAGS, *ALPHABET]), max_size=20))
def test_text_survives_and_tags_are_single_tokens(pieces):
    text = "".join(pieces)
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids) == text
    assert len(ids) <= len(pieces)
    assert ids == TOKENIZER.encode(text, add_special_tokens=False)


def test_ids_are_laid_out_as_documented():
    tokenizer = character_tokenizer("cab", ["<t>"])
    assert tokenizer("<t>abc").input_ids == [2, 4, 5, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 6)
    assert tokenizer("a<eos>").input_ids == [4, 1]
    assert tokenizer.decode([4, 1], skip_special_tokens=True) == "a"


def test_the_longest_tag_wins():
    tokenizer = character_tokenizer("x>2", ["<s", "<s>", "<s>2"])
    assert tokenizer("<s>2<s>x<sx").input_ids == [4, 3, 5, 2, 5]


def test_a_character_outside_the_alphabet_is_refused():
    with pytest.raises(Exception, match=r"\[UNK\]"):
        character_tokenizer("01")("2")


@pytest.mark.parametrize(
    ("alphabet", "tags"), [("", []), ("a", ["<t>", "<t>"]), ("a", ["b"]), ("a", ["<eos>"]), ("a", [""])]
)
def test_bad_alphabets_and_tags_are_refused(alphabet, tags):
    with pytest.raises(ModelError):
        character_tokenizer(alphabet, tags)


def test_it_loads_back_from_disk(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path)
    text = "<sort2>31415=[x.*]\n→ab"
    for loaded in (
        load_tokenizer(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False),
    ):
        assert loaded(text).input_ids == TOKENIZER(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == text
        assert fingerprint(loaded) == fingerprint(TOKENIZER)


def test_missing_and_broken_tokenizers_are_named(tmp_path: Path):
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no readable tokenizer"):
        load_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        TOKENIZER.save_pretrained(tmp_path)
        (tmp_path / name).write_text('{"half": ')
        with pytest.raises(
            (ModelError, CheckpointError), match=rf"no readable tokenizer|{name} cannot be read"
        ):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("inputs.json", "is a run's folder, and no model's; it holds no model yet"),
        ("latest", "is a published model, which only teachers are read from"),
        ("checkpoint-7/model.safetensors", "is the folder above models, .* such as .*checkpoint-7"),
        ("adapter_model.safetensors", r"without the adapter_config\.json"),
    ],
)
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, file: str, sentence: str):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=sentence):
        load_tokenizer(tmp_path)


VOCABULARY = {"vocab.json": b'{"a": 0}', "merges.txt": b"#version: 0.2\n"}
ODD = {
    "sentencepiece without its package": (
        {"tokenizer.model": b"\n\x0e"},
        r"pip install sentencepiece protobuf",
    ),
    "sentencepiece of t5": ({"spiece.model": b"\n\x0e"}, r"AutoTokenizer\.from_pretrained"),
    "tiktoken without its package": ({"tokenizer.model": b"IQ== 0\n"}, r"pip install tiktoken"),
    "an empty file": ({"tokenizer.model": b""}, r"tokenizer\.model is empty; copy it again"),
    "a vocabulary without a class": (VOCABULARY, r"vocab\.json and merges\.txt .*tokenizer_class"),
    "word pieces without a class": ({"vocab.txt": b"[UNK]\na\n"}, r"vocab\.txt .*tokenizer_class"),
    "an empty object": ({"tokenizer.json": b"{}"}, r"tokenizer\.json is damaged \(.*\); copy it again"),
    "a template in bytes": ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja is not UTF-8 text"),
    "a template of many in bytes": (
        {"additional_chat_templates/tool.jinja": b"\xff"},
        r"tool\.jinja is not UTF-8 text",
    ),
    "a length by text, no template": (
        {"tokenizer_config.json": b'{"model_max_length": "big"}'},
        r"tokenizer_config\.json says model_max_length big; write a number",
    ),
    "a list as token, no template": (
        {"tokenizer_config.json": b'{"pad_token": ["a"]}'},
        r"tokenizer_config\.json or special_tokens_map\.json is of no use",
    ),
    "a number as template": (
        {"tokenizer_config.json": b'{"chat_template": 5}'},
        "a chat_template that is no text",
    ),
    "a number in a list of templates": (
        {"tokenizer_config.json": b'{"chat_template": [{"name": "default", "template": 5}]}'},
        "a chat_template that is no text",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_files_that_make_no_tokenizer_are_named_with_what_to_do(tmp_path: Path, monkeypatch, case: str):
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)
    files, words = ODD[case]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    if "template" in case:
        TOKENIZER.save_pretrained(tmp_path / "other")
        (tmp_path / "other" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match=words):
        load_tokenizer(tmp_path)


def words(ids: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(ids)), **special)


STUDENT = {"<eos>": 0, "<pad>": 1, "a": 2, "b": 3}
SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>"}
COMPARED = {
    "the same": (STUDENT, SPECIAL, [], []),
    "another pad token": (STUDENT, SPECIAL | {"pad_token": "<eos>"}, [], ["its pad token has id 0"]),
    "no pad token": (STUDENT, {"eos_token": "<eos>"}, [], ["its pad token has id None"]),
    "more tokens": (STUDENT | {"c": 4}, SPECIAL, [], ["it knows 1 more tokens"]),
    "a special token of another name": (
        {"<eos>": 0, "<think>": 1, "a": 2, "b": 3},
        {"eos_token": "<eos>", "additional_special_tokens": ["<think>"]},
        [],
        ["1 of the student's 4 ids stand for other special tokens", "its pad token"],
    ),
    "letters swapped": (
        {"<eos>": 0, "<pad>": 1, "b": 2, "a": 3},
        SPECIAL,
        ["2 of the student's 4 ids stand for other tokens: id 2 is 'a' for the student and 'b'"],
        [],
    ),
    "a letter missing": ({"<eos>": 0, "<pad>": 1, "a": 2}, SPECIAL, ["id 3 is 'b' for the student"], []),
    "a letter made special": (
        {"<eos>": 0, "<pad>": 1, "<a>": 2, "b": 3},
        SPECIAL | {"additional_special_tokens": ["<a>"]},
        ["id 2 is 'a'"],
        [],
    ),
    "another stop": (
        {"<end>": 0, "<pad>": 1, "a": 2, "b": 3},
        {"eos_token": "<end>", "pad_token": "<pad>"},
        ["id 0 is '<eos>' for the student and '<end>'"],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPARED)
def test_only_what_is_scored_is_wrong(case: str):
    ids, special, wrong, harmless = COMPARED[case]
    found = compare_tokenizers(words(STUDENT, **SPECIAL), words(ids, **special), {0})
    for told, expected in ((found.wrong, wrong), (found.harmless, harmless)):
        assert len(told) == len(expected), told
        assert all(part in sentence for part, sentence in zip(expected, told, strict=True)), told


@given(st.permutations(range(2, 8)), st.integers(0, 3))
def test_any_moved_letter_is_found_and_any_longer_vocabulary_is_not(order: list[int], more: int):
    letters = {chr(97 + place): index for place, index in enumerate(order)}
    longer = {f"more{index}": 8 + index for index in range(more)}
    mine = {"<eos>": 0, "<pad>": 1} | {chr(95 + index): index for index in range(2, 8)}
    found = compare_tokenizers(
        words(mine, **SPECIAL), words({"<eos>": 0, "<pad>": 1} | letters | longer, **SPECIAL), {0}
    )
    assert bool(found.wrong) == (order != sorted(order))


def test_a_chat_template_is_taken_from_a_file_or_a_folder(tmp_path: Path):
    other = character_tokenizer("ab")
    with pytest.raises(ModelError, match="cannot be read"):
        set_chat_template(other, str(tmp_path / "none.jinja"))
    (tmp_path / "plain").mkdir()
    other.save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelError, match="without a chat template"):
        set_chat_template(other, str(tmp_path / "plain"))
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    set_chat_template(other, str(tmp_path / "mine.jinja"))
    other.save_pretrained(tmp_path / "folder")
    again = character_tokenizer("ab")
    set_chat_template(again, str(tmp_path / "folder"))
    rendered = again.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "ab"
