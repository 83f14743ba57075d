"""Prompts to token ids: as text, through a chat template, and what cannot be encoded."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from opd.data.load import encode_prompt
from opd.data.prompts import Prompt
from opd.errors import DataError
from opd.models.tokenizers import character_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def test_text_is_encoded_as_it_is() -> None:
    tokenizer = character_tokenizer("0123456789=", ["<sort>"])
    ids = encode_prompt(Prompt.of("<sort>31=", "13", "sort"), tokenizer)
    assert ids.dtype == np.int32
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["<sort>", "3", "1", "="]


def test_messages_go_through_the_chat_template_up_to_the_assistants_turn() -> None:
    tokenizer = character_tokenizer("0123456789=<>")
    tokenizer.chat_template = TEMPLATE
    ids = encode_prompt(Prompt.of([{"role": "user", "content": "31"}], "13", "sort"), tokenizer)
    assert ids.dtype == np.int32
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == list("<31>=")


def test_what_cannot_be_encoded_names_domain_and_prompt() -> None:
    tokenizer = character_tokenizer("0123456789=")
    with pytest.raises(DataError, match="domain sort: the tokenizer cannot encode the prompt '12a'"):
        encode_prompt(Prompt.of("12a", "", "sort"), tokenizer)
    with pytest.raises(DataError, match="chat"):
        encode_prompt(Prompt.of([{"role": "user", "content": "31"}], "", "sort"), tokenizer)


def test_data_and_rewards_need_no_torch() -> None:
    code = (
        "import sys; import opd.data.load, opd.data.cursor, opd.rewards.runner, opd.rewards.functions; "
        "assert not {'torch', 'transformers', 'pyarrow', 'reasoning_gym'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_keys_identify_content_in_every_domain() -> None:
    messages = [{"role": "user", "content": "31"}]
    assert Prompt.of("31", 1, "a").key == Prompt.of("31", 2, "b").key
    assert Prompt.of("31", 1, "a").key != Prompt.of("32", 1, "a").key
    assert Prompt.of(messages, 1, "a").key == Prompt.of([dict(reversed(messages[0].items()))], 1, "a").key
    assert Prompt.of("31", 1, "a").key == "227e4918add1d796"
