"""Calls in what models write, in the formats of the families; and what cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.environments.conversation import LONGEST_CALL, MOST_CALLS, parse_calls
from opd.environments.protocol import ToolCall

ADD = ToolCall("add", {"a": 1, "b": [2]})
LOOK = ToolCall("look", {})
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", 'so <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}'),
        ("llama", '{"name": "add", "parameters": {"a": 1, "b": [2]}}'),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2]}}'),
        ("llama", "[add(a=1, b=[2])]"),
        ("deepseek", f'{BEGIN}function{SEP}add\n```json\n{{"a": 1, "b": [2]}}\n```{END}'),
        ("deepseek", f'{BEGIN}add{SEP}{{"a": 1, "b": [2]}}{END}'),
    ],
)
def test_a_call_is_found(form, text):
    assert parse_calls(text, form) == ([ADD], [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "look"}</tool_call>x<tool_call>{"name": "look", "arguments": null}'),
        ("llama", '<|python_tag|>{"name": "look"}; {"name": "look", "parameters": {}}'),
        ("llama", "[look(), look()]"),
        ("deepseek", f"{BEGIN}look{SEP}{{}}{END}\n{BEGIN}look{SEP}{END}"),
    ],
)
def test_several_at_once_keep_their_order(form, text):
    assert parse_calls(text, form) == ([LOOK, LOOK], [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{"),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": "x"}</tool_call>'),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}</tool_call>",
        ),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", "<tool_call>" + "x" * (LONGEST_CALL + 1)),
        ("llama", '{"name": "a", "parameters": {'),
        ("llama", "<|python_tag|>print(1)"),
        ("llama", "[__import__('os').system('ls')]"),
        ("llama", "[f(x)]"),
        ("llama", "[f(a=g())]"),
        ("llama", "[f(a={1, 2})]"),
        ("llama", "[f(a=b'x')]"),
        ("llama", "[f(a=...)]"),
        ("llama", "[f(a=1j)]"),
        ("llama", "[f(a=1e999)]"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'),
        ("deepseek", f"{BEGIN}look"),
        ("deepseek", f"{BEGIN}look{SEP}nonsense{END}"),
    ],
)
def test_what_cannot_be_read_is_reported_and_nothing_is_called(form, text):
    calls, broken = parse_calls(text, form)
    assert calls == []
    assert len(broken) == 1
    assert len(broken[0]) < 300


def test_plain_text_has_no_calls():
    for form in ("hermes", "llama", "deepseek", "none"):
        assert parse_calls("go north, then {look} [around]", form) == ([], [])
    assert parse_calls('<tool_call>{"name": "look"}</tool_call>', "none") == ([], [])


def test_blanks_without_end_are_read_at_once():
    """A pattern with three runs of blanks would be at it for years."""
    calls, broken = parse_calls(f"{BEGIN}f{SEP}```json{' ' * 500_000}x", "deepseek")
    assert calls == []
    assert len(broken) == 1


def test_only_so_many_calls_of_a_turn_count():
    calls, broken = parse_calls('<tool_call>{"name": "look"}</tool_call>' * 1000, "hermes")
    assert len(calls) == MOST_CALLS
    assert len(broken) == 1


@given(st.text(max_size=200), st.sampled_from(["hermes", "llama", "deepseek"]))
def test_no_text_raises(text, form):
    for piece in (text, f"<tool_call>{text}", f"<|python_tag|>{text}", f"{BEGIN}{text}", f"[f(a={text})]"):
        parse_calls(piece, form)
