"""Normalise messages to the one form of chat templates, for files, requests and commands.

OpenAI's, TRL's, axolotl's and ShareGPT's forms are read. Fields that a template cannot be given are refused
by name, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opd.config.recipe import NOT_THE_TEMPLATES
from opd.untrusted import read_document, safe_excerpt

Message = dict[str, Any]
"""`role`, `content` (a text), and if present `name`, `tool_call_id`, `tool_calls` with arguments as objects,
`reasoning_content`, and fields of other formats that the chat template has to read."""

TEXTS = ("text", "input_text", "output_text")
"""Types of content parts that are text."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of the thoughts before an answer."""
WEIGHTS = ("weight", "loss_weight", "train", "training", "trainable", "train_on_turn", "loss")
"""Fields that say whether an answer is trained."""
_OF_ANY_ROLE = ("weight", "loss_weight")
"""Some formats give these to every message; the role then decides."""
_OF_TEXT = ("type", "text", "annotations", "cache_control", "id", "index")
"""Keys of a content part that is text."""
_LONGEST = 16 << 20
"""Maximum bytes of JSON within a text."""
_ROLES = {
    **dict.fromkeys(("developer",), "system"),
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "function_response"), "tool"),
}
"""Role of other formats -> the chat templates' role."""
_KNOWN = ("system", "user", "assistant", "tool")
_ASIDE = ("refusal", "annotations", "audio", "audios", "images", "videos", "tool_plan", "prefix")
"""Fields that would change the text and are not supported."""
_IN_PART = ("train_detail", "training_detail")
"""Fields that select the trained parts of an answer."""


class MessageError(ValueError):
    """A fault of messages; `where` is its location: `[0].content`."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


def read_messages(messages: Sequence[object]) -> list[Message]:
    """Return `messages` in the form of chat templates, one for one. Raises `MessageError`."""
    return [_read_message(message, f"[{index}]") for index, message in enumerate(messages)]


def trained_flags(messages: Sequence[Any]) -> list[bool]:
    """Return for each message whether it may be trained on, by its `weight` or `train`, else by the
    assistant's role. Raises `MessageError`.
    """
    return [
        all(_weight_fields(message, f"[{index}]").values())
        and _read_role(message, f"[{index}]") == "assistant"
        for index, message in enumerate(messages)
    ]


def refuse_learnt(messages: Sequence[Any]) -> None:
    """Raise `MessageError` for a prompt's message that asks to be trained."""
    for index, message in enumerate(messages):
        weights = _weight_fields(message, f"[{index}]")
        name = next((name for name, value in weights.items() if value), None)
        if name is not None and _read_role(message, f"[{index}]") == "assistant":
            text = f"`{name}` says that it is learnt, and nothing of a prompt is"
            raise MessageError(f"[{index}].{name}", f"{text}; leave the field out, or give the row to `sft`")


def _weight_fields(message: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the message's fields that say whether it is trained, each 0 or 1."""
    role = _read_role(message, where)
    weights = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
    for name, value in weights.items():
        if isinstance(value, str) or value not in (0, 1):
            raise MessageError(f"{where}.{name}", f"its `{name}` is {safe_excerpt(repr(value))}; give 0 or 1")
        if role != "assistant" and name not in _OF_ANY_ROLE and value:
            text = f"its role is {safe_excerpt(role)} and `{name}` says that it is learnt: only answers are"
            raise MessageError(f"{where}.{name}", f"{text}; leave the field out")
    return weights


def from_text(text: str) -> list[Any] | None:
    """Return the messages if `text` is their JSON, such as a table's cell; `None` for any other text. Raises
    `MessageError` for Python's `repr` of messages.
    """
    head = text[:200].strip()
    if head[:1] == '"' and head[1:].lstrip().startswith(("[", "{")):  # JSON of JSON
        try:
            inner = read_document(text, _LONGEST)
        except (ValueError, RecursionError):
            return None
        return from_text(inner) if isinstance(inner, str) else None
    if not head.startswith(("[", "{")) or not head.lstrip("[{ \t\r\n").startswith(('"', "'")):
        return None
    try:
        value = read_document(text, _LONGEST)
    except (ValueError, RecursionError):
        value = None
        if ("'role':" in head and "'content':" in text) or ("'from':" in head and "'value':" in text):
            fault = "it is what Python prints of messages; write the list itself, or its JSON"
            raise MessageError("", fault) from None
    if isinstance(value, dict) and _is_message(value):
        raise MessageError("", "it is the JSON of one message; write a list of messages, with this one in it")
    return value if isinstance(value, list) and all(map(_is_message, value)) else None


def _is_message(value: object) -> bool:
    """Return True if `value` is an object with the keys of a message."""
    return isinstance(value, dict) and (
        ("role" in value and bool(value.keys() & {"content", "tool_calls"}))
        or (value.keys() >= {"from", "value"} and str(value["from"]).lower() in (*_ROLES, *_KNOWN))
    )


def arguments_of(row: Mapping[str, object]) -> dict[str, Any]:
    """Return the chat template's arguments of one row: `tools` (or `functions`) and `chat_template_kwargs`,
    if it has these columns, as lists and objects or their JSON. Raises `MessageError`.
    """
    arguments: dict[str, Any] = {}
    if row.get("chat_template_kwargs"):
        keywords = _parse_json(row["chat_template_kwargs"], "chat_template_kwargs", dict)
        for key in keywords:
            if key in NOT_THE_TEMPLATES:
                fault = f"`chat_template_kwargs` gives {key}, which is set by opd; leave it out"
                raise MessageError("chat_template_kwargs", fault)
        arguments |= {key: value for key, value in keywords.items() if value is not None}
    for column in ("tools", "functions"):
        if row.get(column):
            tools = _parse_json(row[column], column, list)
            if not tools:
                continue
            if "tools" in arguments:
                raise MessageError(column, f"there are two lists of tools, one of them `{column}`; give one")
            arguments["tools"] = []
            for index, entry in enumerate(tools):
                where = f"{column}[{index}]"
                tool = _parse_json(entry, where, dict)
                function = tool.get("function", tool)
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    form = '{"type": "function", "function": {"name": ...}}'
                    raise MessageError(where, f"`{where}` is not {form}")
                arguments["tools"].append(
                    tool if "function" in tool else {"type": "function", "function": function}
                )
    return arguments


def _parse_json(value: object, where: str, kind: type) -> Any:
    """Return a value, or parse its JSON: tables have no column of objects with other keys in each row."""
    if isinstance(value, str):
        try:
            value = read_document(value or "{}", _LONGEST)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, kind):
        noun = "list" if kind is list else "object"
        raise MessageError(where, f"`{where}` is no {noun}, and no JSON of one")
    return value


def _read_role(message: object, where: str) -> str:
    role = (message.get("role") or message.get("from")) if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        fault = "is not an object with `role` and `content` (or `from` and `value`)"
        raise MessageError(where, f"{safe_excerpt(repr(message))} {fault}")
    plain = role.strip().lower()
    return _ROLES.get(plain, plain if plain in _KNOWN else role)


def _read_message(message: Any, where: str) -> Message:
    role = _read_role(message, where)
    message = _from_sharegpt(message, where) if "role" not in message else message
    for name in _ASIDE:
        if message.get(name):
            fault = f"it has `{name}`, which no text is made of; leave the field out, or the row"
            raise MessageError(f"{where}.{name}", fault)
    for name in _IN_PART:
        if message.get(name):
            fault = f"it has `{name}`, and an answer is learnt whole or, with `train: false`, not at all"
            raise MessageError(f"{where}.{name}", f"{fault}; leave the field out, or the row")
    calls = _read_calls(message, where)
    content = message.get("content")
    if "content" not in message and not calls:
        raise MessageError(where, f"{safe_excerpt(repr(message))} is not an object with `role` and `content`")
    plain: Message = {"role": role, "content": _read_content(content, where)}
    if calls:
        plain["tool_calls"] = calls
    thoughts = {name: message[name] for name in THOUGHTS if message.get(name)}
    for name, value in thoughts.items():
        if not isinstance(value, str):
            raise MessageError(f"{where}.{name}", f"its `{name}` is no text")
    if len(set(thoughts.values())) > 1:
        raise MessageError(where, f"it has {' and '.join(f'`{name}`' for name in thoughts)}; give one")
    if thoughts:
        plain["reasoning_content"] = next(iter(thoughts.values()))
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise MessageError(f"{where}.{name}", f"its `{name}` is no text")
        if value is not None and (name == "name" or role == "tool"):
            plain[name] = value

    used = ("role", "content", "tool_calls", "function_call", "name", "tool_call_id")
    read = {*used, *THOUGHTS, *WEIGHTS, *_ASIDE, *_IN_PART}
    return plain | {key: value for key, value in message.items() if key not in read and value is not None}


def _from_sharegpt(message: Mapping[str, object], where: str) -> dict[str, Any]:
    """Rename `from` and `value` to `role` and `content`. A `function_call` has the JSON of calls as value."""
    fields = {key: value for key, value in message.items() if key not in ("from", "value")}
    if "value" not in message:
        raise MessageError(where, "it has `from` and no `value`; name them `role` and `content`")
    if message.get("content"):
        raise MessageError(where, "it has `value` and `content`; give one")
    if message["from"] != "function_call":
        return {**fields, "role": message["from"], "content": message["value"]}
    called = _parse_json(message["value"], "value", object)
    return {**fields, "role": "assistant", "tool_calls": called if isinstance(called, list) else [called]}


def _read_content(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list):
        raise MessageError(f"{where}.content", "its content is text, or a list of parts of the type text")
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind in TEXTS and isinstance(part, Mapping):
            kind = next((key for key, value in part.items() if key not in _OF_TEXT and value), kind)
        if kind not in TEXTS:
            fault = (
                f"its content has a part of the type {safe_excerpt(kind)!r}, and parts of text alone are read"
            )
            raise MessageError(f"{where}.content", f"{fault}; write it as text, or leave it out")
        if not isinstance(text, str):
            raise MessageError(f"{where}.content", "its content has a part without `text`")
        texts.append(text)
    return "\n".join(texts)


def _read_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return tool calls, including `function_call` of OpenAI's older API."""
    calls, old = message.get("tool_calls"), message.get("function_call")
    field = f"{where}.tool_calls"
    if isinstance(calls, str):
        calls = _parse_json(calls, "tool_calls", list)
    if calls and not isinstance(calls, list):
        raise MessageError(field, "its `tool_calls` are no list")
    if old:
        calls, field = [*(calls or []), old], f"{where}.function_call"
    return [_read_call(one, field) for one in calls or []]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(call, Mapping) and function is None:
        function = call
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise MessageError(where, "one of its tool calls names no function")
    arguments = function.get("arguments")
    if arguments is None and "parameters" in function:
        arguments = function["parameters"]
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = read_document(arguments or "{}", _LONGEST)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise MessageError(where, f"the arguments of its call of {safe_excerpt(name)} are no object of JSON")
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain
