"""Chat templates that read what a message says as text, as parts alone, or not at all."""

from __future__ import annotations

import pytest
import tiny

from opd.errors import DataError
from opd.models.chat_templates import render
from opd.rollout.prompts import Prompt, encode_prompt

PARTS = "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
READ = {
    "text": "{{ m.content }}",
    "parts": PARTS,
    "either": "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}",
    "text alone": "{% if m.content is not string %}{{ raise_exception('text') }}{% endif %}{{ m.content }}",
    "parts alone": "{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}" + PARTS,
    "other letters": "{{ m.content | upper | lower }}",
    "no blanks around": "{{ m.content | trim }}",
}
LOST = {
    "nothing": "{{ m.role }}",
    "the beginning alone": "{{ m.content[:3] }}",
    "a hundred letters": "{{ m.content[:100] }}",
    "parts by another name": "{% for p in m.content %}{{ p.value }}{% endfor %}",
}


def tokenizer(body: str):
    made = tiny.tokenizer()
    made.chat_template = "{% for m in messages %}" + body + "{% endfor %}"
    return made


def prompt() -> Prompt:
    return Prompt.of([{"role": "user", "content": "123"}], None, "d", where="data.jsonl:7")


@pytest.mark.parametrize("form", READ)
def test_what_users_say_is_given_as_the_template_reads_it(form: str):
    made = tokenizer(READ[form])
    assert render(made, [{"role": "user", "content": "123"}], {}) == "123"
    assert encode_prompt(prompt(), made).tolist() == made("123", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("form", LOST)
def test_a_template_that_leaves_some_of_it_out_is_refused(form: str):
    with pytest.raises(DataError, match=r"data\.jsonl:7: the chat template leaves out what the user says"):
        encode_prompt(prompt(), tokenizer(LOST[form]))
