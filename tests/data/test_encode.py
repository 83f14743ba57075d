"""Prompts to token ids: as text, through a chat template, and what cannot be encoded."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from opd.errors import DataError
from opd.models.token_ids import encode_text
from opd.models.tokenizers import character_tokenizer, load_tokenizer
from opd.rollout.prompts import Prompt, encode_prompt, encode_prompts

TEMPLATE = (
    "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def test_text_is_encoded_as_it_is() -> None:
    tokenizer = character_tokenizer("0123456789=", ["<sort>"])
    ids = encode_prompt(Prompt.from_content("<sort>31=", "13", "sort"), tokenizer)
    assert ids.dtype == np.int32
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["<sort>", "3", "1", "="]


def test_messages_go_through_the_chat_template_up_to_the_assistants_turn() -> None:
    tokenizer = character_tokenizer("0123456789=<>")
    tokenizer.chat_template = TEMPLATE
    ids = encode_prompt(Prompt.from_content([{"role": "user", "content": "31"}], "13", "sort"), tokenizer)
    assert ids.dtype == np.int32
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == list("<31>=")


def test_what_cannot_be_encoded_names_domain_and_prompt() -> None:
    tokenizer = character_tokenizer("0123456789=")
    with pytest.raises(DataError, match="domain sort: the tokenizer cannot encode the prompt '12a'"):
        encode_prompt(Prompt.from_content("12a", "", "sort"), tokenizer)
    messages = [{"role": "user", "content": "31"}]
    with pytest.raises(DataError, match="chat"):
        encode_prompt(Prompt.from_content(messages, "", "sort"), tokenizer)
    tokenizer.chat_template = "{% for m in messages %}"
    with pytest.raises(DataError, match=r"no template that Jinja reads .*; mend model\.chat_template"):
        encode_prompt(Prompt.from_content(messages, "", "sort"), tokenizer)


CONTENTS = st.lists(
    st.text("0123456789=<>", min_size=1, max_size=9)
    | st.just("<eos>1")
    | st.text("01", min_size=1, max_size=3).map(lambda text: [{"role": "user", "content": text}]),
    max_size=12,
)


@settings(derandomize=True, deadline=None)
@given(CONTENTS, st.sampled_from(["$A", "<eos> $A", "$A <eos>"]))
def test_many_prompts_are_encoded_as_each_by_itself(contents, single) -> None:
    tokenizer = character_tokenizer("0123456789=<>")
    tokenizer.chat_template, tokenizer.bos_token = TEMPLATE, "<eos>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<eos>", 1)]
    )
    prompts = [Prompt.from_content(content, None, "d") for content in contents]
    together = encode_prompts(prompts, tokenizer)
    assert [ids.dtype for ids in together] == [np.int32] * len(prompts)
    assert [ids.tolist() for ids in together] == [encode_prompt(one, tokenizer).tolist() for one in prompts]


def test_the_one_of_many_that_cannot_be_encoded_is_named() -> None:
    tokenizer = character_tokenizer("0123456789=")
    prompts = [Prompt.from_content(text, None, "d", where=f"f:{text}") for text in ("1", "2", "3a", "4b")]
    with pytest.raises(DataError, match="f:3a: the tokenizer cannot encode"):
        encode_prompts(prompts, tokenizer)


def test_data_and_rewards_need_no_torch() -> None:
    code = (
        "import sys; import opd.data.load, opd.rollout.prompts, opd.rollout.rewards; "
        "assert not {'torch', 'transformers', 'pyarrow', 'reasoning_gym'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_keys_identify_content_in_every_domain() -> None:
    messages = [{"role": "user", "content": "31"}]
    assert Prompt.from_content("31", 1, "a").key == Prompt.from_content("31", 2, "b").key
    assert Prompt.from_content("31", 1, "a").key != Prompt.from_content("32", 1, "a").key
    assert (
        Prompt.from_content(messages, 1, "a").key
        == Prompt.from_content([dict(reversed(messages[0].items()))], 1, "a").key
    )
    assert Prompt.from_content("31", 1, "a").key == "227e4918add1d796"


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
        taken = DomainSet.open(recipe, tokenizer).next_prompts("d", 0, 5, "s")
        assert {tokenizer.decode(prompt.token_ids[:1]) for prompt in taken} == {first}
        tokenizer.save_pretrained(tmp_path / "out")  # as with a model that comes out
        assert load_tokenizer(tmp_path / "out").chat_template == THINKING


@pytest.mark.parametrize("key", ["tokenize", "add_generation_prompt", "return_dict", "chat_template"])
def test_arguments_that_are_not_the_templates_own_are_refused(key: str) -> None:
    from opd.config import Recipe

    model = {"path": "x", "chat_template_kwargs": {key: True}}
    with pytest.raises(ValueError, match=f"{key} is set by opd"):
        Recipe.model_validate({"name": "r", "model": model, "domains": {"d": {"source": "a.jsonl"}}})


def wrapped(before: str = "", behind: str = "") -> Any:
    """A tokenizer that puts these special tokens around a text."""
    from tokenizers import processors

    tokenizer = character_tokenizer("0123456789=a")
    tokenizer.add_special_tokens({"bos_token": "<x>"})
    used = [token for token in (before, behind) if token]
    if used:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, (before, "$A", behind))),
            special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in used],
        )
    return tokenizer


FRAMES = {"none": ("", ""), "bos": ("<x>", ""), "eos": ("", "<eos>"), "both": ("<x>", "<eos>")}


@pytest.mark.parametrize("frame", FRAMES)
@settings(max_examples=cases(60), deadline=None)
@given(st.lists(st.sampled_from(["0", "1", "a", "=", "<x>", "<eos>"]), max_size=8).map("".join))
def test_a_text_has_what_the_tokenizer_puts_before_it_and_nothing_behind(frame, text):
    before, behind = FRAMES[frame]
    tokenizer = wrapped(before, behind)
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    begun = text.startswith("<x>") if before else True
    wanted = plain if begun else [tokenizer.bos_token_id, *plain]
    if not text:
        wanted = [tokenizer.bos_token_id] if before else []
    assert encode_text(tokenizer, text) == wanted


@pytest.mark.parametrize("frame", FRAMES)
def test_a_text_is_split_once_where_nothing_is_put_around_it(frame, monkeypatch):
    tokenizer, asked = wrapped(*FRAMES[frame]), []
    encode_text(tokenizer, "12")
    whole = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, *a, **more: (asked.append(a), whole(self, *a, **more))[1]
    )
    assert encode_text(tokenizer, "12")
    assert len(asked) == (1 if frame == "none" else 2)


def test_a_post_processor_that_is_changed_is_followed():
    tokenizer = wrapped()
    assert encode_text(tokenizer, "12") == tokenizer("12")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = wrapped("<x>").backend_tokenizer.post_processor
    assert encode_text(tokenizer, "12")[0] == tokenizer.bos_token_id


def test_marks_of_the_template_in_what_a_user_says_are_its_tokens():
    """As transformers and servers have it: a text that holds a special token is split at it."""
    tokenizer = character_tokenizer("0123456789=", ["<|im_start|>"])
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    ids = encode_prompt(
        Prompt.from_content([{"role": "user", "content": "3<|im_start|>1"}], "", "d"), tokenizer
    )
    mark = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids.tolist().count(mark) == 2
    assert ids.tolist() == tokenizer("<|im_start|>3<|im_start|>1", add_special_tokens=False)["input_ids"]
