"""The character tokenizer, loading it back, and telling two tokenizers apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from opd.errors import ModelError
from opd.models.tokenizers import character_tokenizer, differences, fingerprint, load_tokenizer

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
        with pytest.raises(ModelError, match="no readable tokenizer"):
            load_tokenizer(tmp_path)


def test_differences_are_plain_sentences():
    base = character_tokenizer("abc", ["<t>"])
    mine = fingerprint(base)
    assert differences(mine, fingerprint(character_tokenizer("abc", ["<t>"]))) == []
    assert differences(mine, fingerprint(character_tokenizer("abcd", ["<t>"]))) == [
        "the vocabularies have 6 and 7 tokens"
    ]
    assert differences(mine, fingerprint(character_tokenizer("acb", ["<t>"]))) == [
        "the vocabularies have 6 tokens each but not the same ones at the same ids"
    ]
    base.chat_template = "{{ messages }}"
    assert differences(mine, fingerprint(base)) == ["the chat templates are different"]


def test_other_special_ids_are_told():
    words = {"<eos>": 0, "<pad>": 1, "a": 2}
    pair = [
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token=eos, pad_token=pad
        )
        for eos, pad in (("<eos>", "<pad>"), ("<pad>", "<pad>"))
    ]
    assert differences(*map(fingerprint, pair)) == ["the eos token has id 0 in one and 1 in the other"]
