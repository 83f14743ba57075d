"""Messages in the forms that people bring, and what a chat template gets of them, from files and requests."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.config import DomainConfig
from opd.data.demonstrations import DemonstrationEncoder, read_demonstrations
from opd.data.load import load_domain, prompt_of
from opd.data.messages import MessageError, read_messages
from opd.environments.gateway_requests import RefusedRequestError, read_request
from opd.errors import DataError
from opd.models.chat_templates import UnreadError, refuse_unread, render_messages
from opd.models.tokenizers import character_tokenizer
from opd.rollout.prompts import encode_prompt

# Shows all that it is given; thoughts stand before an answer, as Qwen's and others' have them.
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}{% if brief %}<|brief|>{% endif %}"
    "{% for m in messages %}<|head|>{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</call>"
    "{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant:{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)
TAGS = ["<|tools|>", "<|brief|>", "<|head|>", "<|end|>"]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tokenizer(template: str = TEMPLATE) -> Any:
    found = character_tokenizer(string.printable, TAGS)
    found.chat_template = template
    return found


SAME = {
    "text": (user("Hi"), user("Hi")),
    "parts": (user([{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]), user("Hi\nyou")),
    "parts of the responses API": (user([{"type": "input_text", "text": "Hi"}]), user("Hi")),
    "parts without a type": (user([{"text": "Hi"}]), user("Hi")),
    "parts that are texts": (user(["Hi"]), user("Hi")),
    "one part": (user({"type": "text", "text": "Hi"}), user("Hi")),
    "output parts": (said([{"type": "output_text", "text": "4"}]), said("4")),
    "developer": ({"role": "developer", "content": "Be brief"}, {"role": "system", "content": "Be brief"}),
    "sharegpt, user": ({"from": "human", "value": "Hi"}, user("Hi")),
    "sharegpt, answer": ({"from": "gpt", "value": "4"}, said("4")),
    "sharegpt, system": ({"from": "system", "value": "x"}, {"role": "system", "content": "x"}),
    "sharegpt, observation": ({"from": "observation", "value": "x"}, {"role": "tool", "content": "x"}),
    "sharegpt, call": (
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sky"}}'},
        CALLING,
    ),
    "sharegpt's roles, called role": ({"role": "Human", "content": "Hi"}, user("Hi")),
    "a role in capitals": ({"role": "USER ", "content": "Hi"}, user("Hi")),
    "call, null arguments": (
        said(None, tool_calls=[{"function": {"name": "look", "arguments": None}}]),
        said("", tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {}}}]),
    ),
    "parts with what caches read": (user([{"text": "Hi", "cache_control": {"type": "x"}}]), user("Hi")),
    "human and gpt as roles": ({"role": "gpt", "content": "4"}, said("4")),
    "call": (CALLING, CALLING),
    "call, arguments as JSON": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "sky"}'}}]},
        CALLING,
    ),
    "call, all as JSON": ({"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}, CALLING),
    "call, bare": (said(None, tool_calls=[CALL["function"]]), CALLING),
    "call, no arguments": (
        said(None, tool_calls=[{"function": {"name": "look", "arguments": ""}}]),
        said("", tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {}}}]),
    ),
    "function_call": (said(None, function_call={"name": "look", "arguments": '{"at": "sky"}'}), CALLING),
    "answer of a tool": (
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "blue"},
        {"role": "tool", "content": "blue", "name": "look", "tool_call_id": "c1"},
    ),
    "role function": (
        {"role": "function", "name": "look", "content": "blue"},
        {"role": "tool", "content": "blue", "name": "look"},
    ),
    "name": (user("Hi", name="Ann"), user("Hi", name="Ann")),
    "reasoning_content": (said("4", reasoning_content="2+2"), said("4", reasoning_content="2+2")),
    "thinking": (said("4", thinking="2+2"), said("4", reasoning_content="2+2")),
    "reasoning": (said("4", reasoning="2+2"), said("4", reasoning_content="2+2")),
    "nulls of a table": (
        user("Hi", name=None, tool_calls=None, tool_call_id=None, weight=None, reasoning_content=None),
        user("Hi"),
    ),
    "what clients keep": (said("4", refusal=None, annotations=[], audio=None, function_call=None), said("4")),
    "weights": (said("4", weight=0, train=False, training=False), said("4")),
    "weights of others": (
        said("4", loss=False, loss_weight=0.0, trainable=False, train_on_turn=False), said("4"),
    ),
    "no parts": (said("4", train_detail=[], training_detail=None), said("4")),
}  # fmt: skip


@pytest.mark.parametrize("form", SAME)
def test_every_form_is_the_one_that_templates_take(form):
    brought, wanted = SAME[form]
    assert read_messages([brought]) == [wanted]
    assert read_messages([wanted]) == [wanted]


REFUSED = {
    "image": (user([{"type": "image_url", "image_url": {"url": "x"}}]), r"part of the type 'image_url'"),
    "image of TRL": (user([{"type": "image"}, {"type": "text", "text": "?"}]), r"part of the type 'image'"),
    "image without a type": (user([{"text": "?", "image_url": {"url": "x"}}]), "of the type 'image_url'"),
    "image beside a text": (user([{"type": "text", "text": "?", "image": "x"}]), "part of the type 'image'"),
    "value and content": ({"from": "human", "value": "a", "content": "b"}, "give one"),
    "audio": (user([{"type": "input_audio"}]), "input_audio"),
    "thinking part": (said([{"type": "thinking", "thinking": "x"}]), "part of the type 'thinking'"),
    "tool_result": (user([{"type": "tool_result", "content": "x"}]), "tool_result"),
    "number": (user(3), "content is text"),
    "part without text": (user([{"type": "text"}]), "without `text`"),
    "refusal": (said("", refusal="I cannot"), "`refusal`"),
    "train_detail": (
        said("ab", train_detail=[{"begin_offset": 0, "end_offset": 0}]),
        "`train_detail`.*`train: false`",
    ),
    "training_detail": (said("ab", training_detail=[{"begin_offset": 0}]), "learnt whole or"),
    "prefix": (said("ab", prefix=True), "`prefix`"),
    "call without name": (said(None, tool_calls=[{"function": {}}]), "names no function"),
    "arguments": (
        said(None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        "call of f .* JSON",
    ),
    "calls": (said(None, tool_calls=3), "no list"),
    "two thoughts": (said("4", thinking="a", reasoning="b"), "give one"),
    "thoughts": (said("4", reasoning_content=["a"]), "no text"),
    "no content": ({"role": "user"}, "`role` and `content`"),
    "no value": ({"from": "human"}, "no `value`"),
    "no role": ({"content": "x"}, "`role` and `content`"),
    "name": (user("x", name=3), "`name` is no text"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_a_template_could_not_be_told_is_refused_in_files_and_requests(form, tmp_path):
    brought, told = REFUSED[form]
    with pytest.raises(MessageError, match=told):
        read_messages([brought])
    with pytest.raises(DataError, match=rf"a\.jsonl:1: `prompt`, message 2: .*{told}"):
        prompt_of("a.jsonl:1", {"prompt": [user("x"), brought, user("y")]}, "d")


TEXT = st.text(string.ascii_letters + " 0123", min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(st.sampled_from(["at", "n"]), st.integers(0, 9) | TEXT, max_size=2)
CALLS = st.builds(
    lambda name, given: {"type": "function", "function": {"name": name, "arguments": given}},
    st.sampled_from(["look", "go"]),
    ARGUMENTS,
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT},
    optional={"tool_calls": st.lists(CALLS, min_size=1, max_size=2), "reasoning_content": TEXT},
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool"]), "content": TEXT}, optional={"name": TEXT}
)
TOLD = st.lists(ANSWERS | OTHERS, max_size=4).map(lambda some: [*some, user("?")])


def otherwise(messages: list[dict[str, Any]], choices: list[int]) -> list[dict[str, Any]]:
    """The same in the forms of others, which requests may have, too."""
    found = []
    for number, one in enumerate(messages):
        made, choice = dict(one), choices[number % len(choices)]
        if choice & 1:
            made["content"] = [{"type": "text", "text": one["content"]}]
        if choice & 2 and "tool_calls" in made:
            called = [call["function"] for call in made["tool_calls"]]
            as_text = [{**each, "arguments": json.dumps(each["arguments"])} for each in called]
            made["tool_calls"] = [{"type": "function", "function": each} for each in as_text]
        if choice & 4 and "reasoning_content" in made:
            made["thinking"] = made.pop("reasoning_content")
        if choice & 4 and made["role"] == "system":
            made["role"] = "developer"
        found.append({**made, "refusal": None, "audio": None})
    return found


@settings(max_examples=cases(40), deadline=None)
@given(TOLD, st.lists(st.integers(0, 7), min_size=1, max_size=4), st.booleans())
def test_files_and_requests_are_rendered_as_transformers_renders_the_plain_form(messages, choices, tools):
    own = tokenizer()
    given_tools = {"tools": [TOOL]} if tools else {}
    wanted = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given_tools)
    brought = otherwise(messages, choices)
    prompt = prompt_of(
        "a.jsonl:1", {"prompt": brought, "tools": json.dumps(given_tools.get("tools", []))}, "d"
    )
    assert own.decode(encode_prompt(prompt, own)) == wanted
    asked = read_request(json.dumps({"messages": brought, **given_tools}).encode(), chat=True)
    of_tools = {"tools": list(asked.tools)} if asked.tools else {}
    assert render_messages(own, asked.messages, of_tools, answer=True) == wanted


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"tools": [TOOL]}, "<|tools|>"),
        ({"tools": json.dumps([TOOL])}, "<|tools|>"),
        ({"tools": [json.dumps(TOOL)]}, "<|tools|>"),
        ({"tools": json.dumps([TOOL["function"]])}, '<|tools|>[{"type": "function"'),
        ({"functions": [TOOL["function"]]}, "<|tools|>"),
        ({"chat_template_kwargs": {"brief": True}}, "<|brief|>"),
        ({"chat_template_kwargs": '{"brief": true}'}, "<|brief|>"),
    ],
)
def test_what_a_row_gives_the_template_is_shown_to_the_model(row, shown, tmp_path):
    own = tokenizer()
    plain, prompt = (prompt_of("", {"prompt": [user("Hi")], **more}, "d") for more in ({}, row))
    assert own.decode(encode_prompt(prompt, own)).startswith(shown)
    assert prompt.key != plain.key
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [user("Hi"), said("4")], **row}))
    (demonstration,) = read_demonstrations(str(path), None)
    assert own.decode(DemonstrationEncoder(own, {}, []).encode(demonstration).prompt_ids).startswith(shown)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"tools": "look"}, "`tools` is no list, and no JSON of one"),
        ({"tools": [3]}, r"`tools\[0\]` is no object"),
        ({"tools": [TOOL], "functions": [TOOL]}, "two lists of tools"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "set by opd"),
        ({"chat_template_kwargs": 3}, "no object"),
        ({"chat_template_kwargs": f"{{{' ' * (16 << 20)}}}"}, "no object"),
        ({"chat_template_kwargs": {"self": 3}}, "set by opd"),
        ({"images": ["a.png"]}, "it has `images`, and models here read text alone"),
        ({"image": {"bytes": "x"}}, "it has `image`"),
    ],
)
def test_columns_that_cannot_be_used_are_refused_by_name(row, told, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [user("Hi"), said("4")], **row}))
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{told}"):
        read_demonstrations(str(path), None)
    with pytest.raises(DataError, match=f"a: .*{told}"):
        prompt_of("a", {"prompt": [user("Hi")], **row}, "d")


def test_a_system_column_is_said_before_prompts_and_demonstrations():
    empty = {"tools": "[]", "chat_template_kwargs": {"brief": None}}  # as a table has them
    found = prompt_of("a", {"prompt": [user("Hi")], "system": "Be brief", **empty}, "d")
    assert found.messages == [{"role": "system", "content": "Be brief"}, user("Hi")]
    assert not found.arguments
    with pytest.raises(DataError, match="`system`, which a `prompt` of text has no place for"):
        prompt_of("a", {"prompt": "Hi", "system": "Be brief"}, "d")


def test_a_text_goes_through_no_template_and_an_episode_has_its_own_arguments(tmp_path):
    with pytest.raises(DataError, match="no `prompt` of text goes through"):
        prompt_of("a", {"prompt": "Hi", "tools": [TOOL]}, "d")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": [user("Hi")], "tools": [TOOL]}))
    settings = {"source": str(path), "environment": "worlds:Sum"}
    with pytest.raises(DataError, match=r"a\.jsonl:1: it gives the chat template tools, .*d\.environment"):
        load_domain("d", DomainConfig.model_validate(settings), seed=0, held_out_prompts=1)


@pytest.mark.parametrize(
    ("message", "more", "told"),
    [
        (
            said("4", reasoning_content="2+2"),
            {},
            r"message 2 has thoughts \(`reasoning_content`, `thinking`, `reasoning`\), which the chat",
        ),
        (said("4", thinking="2+2"), {}, r"message 2 has thoughts \(`reasoning_content`, `thinking`"),
        (
            CALLING,
            {},
            r"message 2 has calls of tools \(`tool_calls`, .*which the chat template does not read",
        ),
        (
            said("4", function_call=CALL["function"]),
            {},
            r"message 2 has calls of tools \(.*`function_call`\)",
        ),
        (said("4", mood="glad"), {}, "message 2 has `mood`.*leave it out, or give model.chat_template one"),
        *[
            (
                said("4", **{name: value}),
                {},
                f"message 2 has `{name}`.*; write `train: false` .or `weight: 0`. in its",
            )
            for name, value in {
                "mask": True,
                "masked": 1,
                "is_masked": False,
                "loss_mask": 0,
                "loss_scale": 0.5,
                "ignore_loss": True,
                "compute_loss": False,
                "do_train": 0,
                "learn": False,
                "trainOn": True,
            }.items()
        ],
        (said("4"), {"tools": [TOOL]}, "its `tools` is nothing that the chat template reads"),
        (said("4"), {"chat_template_kwargs": {"brief": True}}, "its `brief` is nothing"),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_name(message, more, told, tmp_path):
    own = tokenizer(PLAIN)
    prompt = prompt_of("a.jsonl:7", {"prompt": [user("Hi"), message, user("?")], **more}, "d")
    with pytest.raises(DataError, match=rf"a\.jsonl:7: {told}") as caught:
        encode_prompt(prompt, own)
    sentence = str(caught.value).partition(": ")[2]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [user("Hi"), message], **more}))
    (row,) = read_demonstrations(str(path), None)
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {told}") as caught:
        DemonstrationEncoder(own, {}, []).encode(row)
    assert str(caught.value).endswith(sentence)
    assert sentence.count(";") == 1


def test_a_template_that_writes_whole_messages_reads_all_of_them():
    own = tokenizer("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    refuse_unread(own, [said("4", mood="glad")], {})
    with pytest.raises(UnreadError):
        refuse_unread(own, [said("4")], {"brief": True}, ["brief"])


def test_thoughts_have_the_name_that_the_template_reads():
    for name in ("thinking", "reasoning"):
        own = tokenizer(PLAIN.replace("{{ m.content }}", "{{ m." + name + " }}/{{ m.content }}"))
        prompt = prompt_of("", {"prompt": [user("?"), said("4", reasoning_content="2+2"), user("?")]}, "d")
        assert "2+2/4" in own.decode(encode_prompt(prompt, own))


def test_a_cell_that_holds_messages_is_read_as_messages():
    messages = [user("Hi"), said("4"), user("?")]
    assert prompt_of("", {"prompt": json.dumps(messages)}, "d").messages == messages
    assert prompt_of("", {"prompt": json.dumps(json.dumps(messages))}, "d").messages == messages
    shared = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "4"},
        {"from": "human", "value": "?"},
    ]
    assert prompt_of("", {"prompt": json.dumps(shared)}, "d").messages == messages
    plain = ("[1, 2]", '[{"a": 1}]', "[{", '{"role": "user"}', '{"a": 1}', '"Hi"', '"[1]"', '"[{', "[{x}]")
    for text in (*plain, '{"from": "Rome", "value": "3"}', "{'a': 1}", "'role' and 'content'"):
        assert prompt_of("", {"prompt": text}, "d").text == text
    for text, told in (
        ("[]", "is an empty list; give at least one message"),
        (" [] ", "is an empty list"),
        (json.dumps(messages[0]), "the JSON of one message; write a list of messages"),
        (json.dumps(json.dumps(messages[0])), "the JSON of one message"),
        (json.dumps(messages[:2]), "ends with what the assistant says"),
        (str(shared), "what Python prints of messages"),
    ):
        with pytest.raises(DataError, match=f"a:1: `prompt` .*{told}"):
            prompt_of("a:1", {"prompt": text}, "d")
    with pytest.raises(DataError, match="what Python prints of messages"):
        prompt_of("", {"prompt": str(messages)}, "d")


def test_a_tables_nulls_are_nobodys_arguments(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    def row(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"prompt": [user("Hi"), said(None, tool_calls=[call]), user("?")], "label": name}

    path = tmp_path / "a.parquet"
    rows = [row("look", at="sky"), row("go", to="sea", n=2), row("look", at="sea")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = DomainConfig.model_validate({"source": str(path), "held_out": 0.5})
    found = load_domain("d", config, seed=0, held_out_prompts=9)
    own = tokenizer()
    texts = {str(own.decode(encode_prompt(one, own))) for one in [*found.train, *found.held_out]}
    assert texts == {
        f"<|head|>user:Hi<|end|><|head|>assistant:<call>{call}</call><|end|>"
        "<|head|>user:?<|end|><|head|>assistant:"
        for call in ("look at=sky", "go to=sea n=2", "look at=sea")
    }


def test_requests_name_the_field():
    for body, param in (
        (user([{"type": "image_url"}]), "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls"),
        (user("x", name=3), "messages[0].name"),
    ):
        with pytest.raises(RefusedRequestError) as caught:
            read_request(json.dumps({"messages": [body, user("?")]}).encode(), chat=True)
        assert caught.value.param == param


def demonstrated(folder: Path, *rows: dict[str, Any], template: str = TEMPLATE) -> list[list[str]]:
    """What is learnt of each row: its answers, each with its end."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    own = tokenizer(template)
    writes = DemonstrationEncoder(own, {}, [own.convert_tokens_to_ids("<|end|>")])
    found = []
    for row in read_demonstrations(str(path), None):
        encoded = writes.encode(row)
        text = str(own.decode(encoded.response_ids[encoded.mask]))
        assert text.endswith("<|end|>")
        found.append(text.split("<|end|>")[:-1])
    return found


MARKED = PLAIN.replace(
    "{{ m.content }}<|end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}",
)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize(
    "field",
    [
        *[{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"trainable": 0}],
        *[{"loss": False}, {"loss": 0}, {"loss_weight": 0.0}, {"train_on_turn": False}],
        {"loss": False, "weight": 1},
    ],
)
def test_answers_of_no_weight_are_read_and_not_learnt(field, template, tmp_path):
    talk = [user("a"), said("one"), user("b"), said("two"), user("c"), said("three")]
    for unlearnt in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        turns = [{**one, **field} if n // 2 in unlearnt and n % 2 else one for n, one in enumerate(talk)]
        (answers,) = demonstrated(tmp_path, {"messages": turns}, template=template)
        assert answers == [word for n, word in enumerate(("one", "two", "three")) if n not in unlearnt]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [user("a"), said("b", weight=0)]}, "no answer in it is learnt"),
        ({"messages": [user("a"), said("b", weight=0.5)]}, "message 2: its `weight` is 0.5; give 0 or 1"),
        ({"messages": [user("a"), said("b", train="no")]}, "its `train` is 'no'; give 0 or 1"),
        ({"messages": [user("a", train=True), said("b")]}, "message 1: its role is user and `train` says"),
        ({"messages": [user("a", loss=True), said("b")]}, "message 1: its role is user and `loss` says"),
        ({"messages": [user("a"), said("b", weight=1, loss="no")]}, "its `loss` is 'no'; give 0 or 1"),
        ({"messages": [user("a"), said("b", loss_weight=0.3)]}, "its `loss_weight` is 0.3; give 0 or 1"),
        (
            {"prompt": [user("a"), said("b", train=True), user("c")], "completion": "d"},
            "`prompt`, message 2: `train` says that it is learnt, and nothing of a prompt is",
        ),
        ({"messages": [user("a"), said("b")], "loss": False}, "its `loss` is 0"),
        ({"prompt": "a", "completion": "b", "label": False}, "`label` is false"),
        ({"messages": [user("a"), said("b")], "weight": 0}, "its `weight` is 0"),
        ({"prompt": "a", "completion": "b", "train": False}, "its `train` is 0"),
        ({"messages": [user("a"), said("b")], "completion": "c"}, "`messages` and `completion`"),
        ({"messages": [user("a"), said("b")], "conversations": [user("c"), said("d")]}, "`conversations`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "of `chosen`: rename it to `completion`"),
        ({"segments": [{"label": True, "text": "a"}]}, "of `segments`: write its parts as messages"),
        ({"instruction": "a", "input": "", "output": "b"}, "of `instruction`: write `prompt`"),
        ({"text": "a b"}, "of `text`: write `prompt` and `completion`"),
        ({"messages": [user("a"), said("b")], "assistant_masks": [0, 1]}, "`assistant_masks` speaks"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "`labels` speaks of tokens"),
        ({"conversations": [{"from": "gpt", "value": "b"}]}, "`conversations` begin with the assistant's"),
        ({"system": "x", "messages": [{"role": "system", "content": "y"}, user("a"), said("b")]}, "both say"),
    ],
)  # fmt: skip
def test_other_forms_of_demonstrations_are_refused_by_name(row, told, tmp_path):
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{told}") as caught:
        demonstrated(tmp_path, {"prompt": "a", "completion": "b"}, row)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("name", ["weight", "loss_weight", "train", "training", "trainable", "loss"])
def test_nothing_of_a_prompt_is_learnt_and_a_prompt_says_nothing_else(name):
    for value in (0, False, None):
        row = {"prompt": [user("a", **{name: value}), said("b", **{name: value}), user("c")]}
        assert prompt_of("a:1", row, "d").messages == [user("a"), said("b"), user("c")]
    with pytest.raises(
        DataError, match=f"a:1: `prompt`, message 2: `{name}` says that it is learnt, .*`sft`"
    ):
        prompt_of("a:1", {"prompt": [user("a"), said("b", **{name: True}), user("c")]}, "d")
    with pytest.raises(DataError, match=f"message 2: its `{name}` is 'yes'; give 0 or 1"):
        prompt_of("a:1", {"prompt": [user("a"), said("b", **{name: "yes"}), user("c")]}, "d")


def test_a_loss_that_was_measured_is_no_weight(tmp_path):
    assert demonstrated(tmp_path, {"messages": [user("a"), said("b")], "loss": 0.0}) == [["b"]]


def test_sharegpt_and_parts_are_learnt_as_their_text(tmp_path):
    shared = {
        "conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}],
        "system": "x",
    }
    parts = {"messages": [user([{"type": "text", "text": "2+2"}]), said([{"type": "text", "text": "4"}])]}
    asked = {"prompt": [user("2+2")], "completion": [said([{"type": "text", "text": "4"}])]}
    called = {"messages": [user("?"), said(None, function_call={"name": "look", "arguments": "{}"})]}
    found = demonstrated(tmp_path, shared, parts, asked, called)
    assert found == [["4"], ["4"], ["4"], ["<call>look</call>"]]
