"""Prompts to token ids: as text, through a chat template, and what cannot be encoded."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from opd.errors import DataError
from opd.models.tokenizers import character_tokenizer, load_tokenizer
from opd.rollout.prompts import Prompt, encode_prompt

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
        "import sys; import opd.data.load, opd.rollout.prompts, opd.rollout.rewards; "
        "assert not {'torch', 'transformers', 'pyarrow', 'reasoning_gym'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_keys_identify_content_in_every_domain() -> None:
    messages = [{"role": "user", "content": "31"}]
    assert Prompt.of("31", 1, "a").key == Prompt.of("31", 2, "b").key
    assert Prompt.of("31", 1, "a").key != Prompt.of("32", 1, "a").key
    assert Prompt.of(messages, 1, "a").key == Prompt.of([dict(reversed(messages[0].items()))], 1, "a").key
    assert Prompt.of("31", 1, "a").key == "227e4918add1d796"


THINKING = "{% if enable_thinking %}0{% else %}1{% endif %}{{ messages[0].content }}="


def test_the_recipes_chat_template_and_its_arguments_write_every_prompt(tmp_path) -> None:
    from opd.config import Recipe
    from opd.pipelines.stages.domains import DomainSet, student_tokenizer

    (tmp_path / "mine.jinja").write_text(THINKING)
    lines = [{"prompt": [{"role": "user", "content": f"{n}"}], "label": ""} for n in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    character_tokenizer("0123456789=").save_pretrained(tmp_path / "tokenizer")
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    for thinking, first in ((True, "0"), (False, "1"), (None, "1")):
        model = {"config": config, "tokenizer": str(tmp_path / "tokenizer")}
        model |= {"chat_template": str(tmp_path / "mine.jinja")}
        model |= {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        source = {"source": str(tmp_path / "a.jsonl"), "reward": "math:sqrt", "held_out": 0.3}
        recipe = Recipe.model_validate({"name": "r", "model": model, "domains": {"d": source}})
        tokenizer = student_tokenizer(recipe, [])
        taken = DomainSet.open(recipe, tokenizer).take("d", 0, 5, "s")
        assert {tokenizer.decode(prompt.token_ids[:1]) for prompt in taken} == {first}
        tokenizer.save_pretrained(tmp_path / "out")  # as with a model that comes out
        assert load_tokenizer(tmp_path / "out").chat_template == THINKING


@pytest.mark.parametrize("key", ["tokenize", "add_generation_prompt", "return_dict", "chat_template"])
def test_arguments_that_are_not_the_templates_own_are_refused(key: str) -> None:
    from opd.config import Recipe

    model = {"path": "x", "chat_template_kwargs": {key: True}}
    with pytest.raises(ValueError, match=f"{key} is set by opd"):
        Recipe.model_validate({"name": "r", "model": model, "domains": {"d": {"source": "a.jsonl"}}})
