"""A chat template comes with a model folder and is a program: it reaches nothing, and ends within limits."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import tiny

from opd.errors import DataError
from opd.models import chat_templates
from opd.models.chat_templates import TemplateError, render_messages
from opd.rollout.prompts import Prompt, encode_prompt

MESSAGES = [
    {"role": "system", "content": "1 2", "name": None},
    {"role": "user", "content": "34"},
    {"role": "assistant", "content": "5", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
]
HONEST = [
    "{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}",
    "{%- for m in messages if m.role != 'system' %}\n  {{ m.content|trim }}\n{%- endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "{% macro call(c) %}{{ c.function.arguments|tojson }}{% endmacro %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ call(c) }}{% endfor %}{% endfor %}"
    "{{ thinking }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}"
    "{% if loop.last %}{% continue %}{% endif %}{{ 'name' in m }}{% endfor %}{{ ns.n }}é\U0001f600",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "a long text": ("{{ 'a' * 20000000 }}", "took more than"),
    "an endless text": ("{{ 'a' * 10**10 }}", "MemoryError"),
    "a wide field": ("{{ '%01999999999d' % 1 }}", "MemoryError"),
    "doubled": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "MemoryError",
    ),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    "deep": ("{{" + "(" * 100_000 + "1" + ")" * 100_000 + "}}", "RecursionError"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "globals": ("{{ cycler.__init__.__globals__.os.environ }}", "SecurityError"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "an import": ("{% import 'os' as os %}", "no loader"),
    "it raises": ("{{ raise_exception('never') }}", "never"),
    "it raises at length": ("{{ raise_exception('x' * 100000) }}", "xxx"),
    "syntax": ("{% if %}", "TemplateSyntaxError"),
    "undefined": ("{{ nothing.of.this }}", "UndefinedError"),
    "large": ("a" * 2_000_000, "more than 1048576 characters"),
    "none": (None, "no chat template"),
}


@pytest.mark.parametrize("template", HONEST)
@pytest.mark.parametrize("answer", [False, True])
def test_what_is_rendered_apart_is_what_transformers_renders(template, answer):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    arguments = {"thinking": True}
    expected = tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=answer, **arguments
    )
    assert render_messages(tokenizer, MESSAGES, arguments, answer=answer) == expected


def test_tokens_are_those_of_transformers():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<a>{{ m.content }}<b>{% endfor %}{{ eos_token }}"
    messages = [{"role": "user", "content": "34"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode_prompt(Prompt.from_content(messages, "", "d"), tokenizer).tolist() == expected


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_one_sentence(kind):
    template, said = HOSTILE[kind]
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    prompt = Prompt.from_content([{"role": "user", "content": "34"}], "", "d")
    with pytest.raises(DataError) as caught:
        encode_prompt(prompt, tokenizer)
    assert said in str(caught.value)
    assert "model.chat_template" in str(caught.value)
    assert len(str(caught.value)) < 1200
    tokenizer.chat_template = HONEST[0]  # the next conversation is rendered again
    assert "34" in render_messages(tokenizer, MESSAGES, {})


@pytest.mark.slow
def test_what_ended_the_process_is_not_waited_for_again(monkeypatch):
    monkeypatch.setattr(chat_templates, "SECONDS", 1)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = ENDLESS
    for _ in range(2):
        with pytest.raises(TemplateError, match="took more than"):
            render_messages(tokenizer, MESSAGES, {})
        assert chat_templates._shared_renderer().process._child is None  # the second time none was started


@pytest.mark.slow
@pytest.mark.parametrize("at_work", [False, True])
def test_a_process_that_somebody_else_ended_is_not_the_templates_fault(at_work):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HONEST[0]
    expected = render_messages(tokenizer, MESSAGES, {})
    process = chat_templates._shared_renderer().process._child
    assert process is not None
    if at_work:
        os.kill(process.pid, signal.SIGSTOP)  # it has the conversation, and is ended before it answers
        threading.Timer(0.5, process.send_signal, [signal.SIGKILL]).start()
    else:
        os.kill(process.pid, signal.SIGKILL)
    assert render_messages(tokenizer, MESSAGES, {}) == expected
    assert process.status() == -signal.SIGKILL


def test_templates_see_no_secret_and_their_process_ends_with_ours(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_user")
    chat_templates._shared_renderer().process.close()
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HONEST[0]
    render_messages(tokenizer, MESSAGES, {})
    process = chat_templates._shared_renderer().process._child
    assert process is not None
    seen = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"hf_secret" not in seen
    assert b"PATH=" in seen
    assert os.getpgid(process.pid) != os.getpgid(0)
    chat_templates._shared_renderer().process.close()
    assert process.status() is not None


@pytest.mark.slow
def test_a_forked_process_renders_with_one_of_its_own():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HONEST[0]
    expected = render_messages(tokenizer, MESSAGES, {})
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = render_messages(tokenizer, MESSAGES, {}) == expected
        finally:
            chat_templates._shared_renderer().process.close()
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render_messages(tokenizer, MESSAGES, {}) == expected


def test_the_day_can_be_given():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}"
    assert render_messages(tokenizer, MESSAGES, {}, day="2020-01-02") == "02 Jan 2020"
    assert render_messages(tokenizer, MESSAGES, {}) != "02 Jan 2020"


def test_messages_of_any_text_pass():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    text = json.dumps({"a": "\0\x1b\u2028</s>"}) + "\r\n{{ 1 }}\U0001f600"
    assert render_messages(tokenizer, [{"role": "user", "content": text}], {}) == text
