"""Chat templates that read what a message says as text, as parts alone, or not at all."""

import pytest
import tiny

from opd.errors import DataError
from opd.models import chat_templates
from opd.models.chat_templates import refuse_unread, render_messages
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
    return Prompt.from_content([{"role": "user", "content": "123"}], None, "d", where="data.jsonl:7")


@pytest.mark.parametrize("form", READ)
def test_what_users_say_is_given_as_the_template_reads_it(form: str):
    made = tokenizer(READ[form])
    assert render_messages(made, [{"role": "user", "content": "123"}], {}) == "123"
    assert encode_prompt(prompt(), made).tolist() == made("123", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("form", LOST)
def test_a_template_that_leaves_some_of_it_out_is_refused(form: str):
    with pytest.raises(DataError, match=r"data\.jsonl:7: the chat template leaves out what `user`"):
        encode_prompt(prompt(), tokenizer(LOST[form]))


TURNS = {
    role: "{% for m in messages %}{% if " + read + " %}{{ m.content }}{% endif %}{% endfor %}"
    for role, read in {
        "system": "m.role != 'system'",
        "tool": "m.role in ('system', 'user', 'assistant')",
        "assistant": "m.role != 'assistant'",
    }.items()
}
SAID = {
    "system": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}],
    "assistant": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ],
    "tool": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": [chat_templates._CALL]},
        {"role": "tool", "content": "3", "name": "look", "tool_call_id": "call00000"},
    ],
}


@pytest.mark.parametrize("role", TURNS)
def test_a_role_that_the_template_leaves_out_is_refused_where_it_speaks(role: str):
    made = tiny.tokenizer()
    made.chat_template = TURNS[role]
    with pytest.raises(DataError, match=f"leaves out what `{role}` messages say"):
        encode_prompt(Prompt.from_content(SAID[role], None, "d", where="data.jsonl:7"), made)
    assert encode_prompt(prompt(), made).tolist() == made("123", add_special_tokens=False)["input_ids"]


def test_each_role_is_given_the_form_that_it_is_read_in():
    made = tiny.tokenizer()
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        + PARTS
        + "{% endif %}{% endfor %}"
    )
    assert render_messages(made, SAID["assistant"], {}) == "123"


SHOWN = {
    "the last": "{{ messages[-1].content }}",
    "the first": "{{ messages[0].content }}",
    "the last that users say": "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
    "the last two": "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
    "both ends": "{{ messages[0].content }}{% if messages[1:] %}{{ messages[-1].content }}{% endif %}",
    "up to the second": "{% for m in messages[:2] %}{{ m.content }}{% endfor %}",
    "what users say": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("shown", SHOWN)
def test_a_template_that_leaves_out_turns_is_refused_where_there_are_several(shown: str):
    made = tiny.tokenizer()
    made.chat_template = SHOWN[shown]
    with pytest.raises(DataError, match=r"data\.jsonl:7: the chat template leaves out (message|what)"):
        encode_prompt(Prompt.from_content(SAID["assistant"], None, "d", where="data.jsonl:7"), made)
    assert encode_prompt(prompt(), made).tolist() == made("123", add_special_tokens=False)["input_ids"]


WHOLE = {
    "thoughts of earlier turns": "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    "the system's first": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    "in turn alone": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('in turn') }}{% endif %}{{ m.content | trim }}{% endfor %}",
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_template_that_shows_every_turn_is_used(kind: str):
    made = tiny.tokenizer()
    made.chat_template = WHOLE[kind]
    answers = {"assistant": "9</think>2"}
    thought = [{**one, "content": answers.get(one["role"], one["content"])} for one in SAID["assistant"]]
    refuse_unread(made, thought, {})
    assert render_messages(made, thought, {}) == (
        "123" if kind == "thoughts of earlier turns" else "19</think>23"
    )
