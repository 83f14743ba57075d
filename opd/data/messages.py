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
_ASIDE = (*("refusal", "annotations", "audio", "audios", "images", "videos", "tool_plan", "prefix"),)
"""Fields that would change the text and are not supported."""
_IN_PART = ("train_detail", "training_detail")
"""Fields that select the trained parts of an answer."""


class MessageError(ValueError):
    """A fault of messages; `place` is its location: `[0].content`."""

    def __init__(self, place: str, said: str) -> None:
        super().__init__(said)
        self.place = place


def read_messages(given: Sequence[Any]) -> list[Message]:
    """Return `given` in the form of chat templates, one for one. Raises `MessageError`."""
    return [_read_message(one, f"[{place}]") for place, one in enumerate(given)]


def trained_flags(given: Sequence[Any]) -> list[bool]:
    """Return for each message whether it may be trained on, by its `weight` or `train`, else by the
    assistant's role. Raises `MessageError`.
    """
    return [
        all(_weight_fields(one, f"[{place}]").values()) and _read_role(one, f"[{place}]") == "assistant"
        for place, one in enumerate(given)
    ]


def refuse_learnt(given: Sequence[Any]) -> None:
    """Raise `MessageError` for a prompt's message that asks to be trained."""
    for place, one in enumerate(given):
        said = _weight_fields(one, f"[{place}]")
        name = next((name for name, value in said.items() if value), None)
        if name is not None and _read_role(one, f"[{place}]") == "assistant":
            text = f"`{name}` says that it is learnt, and nothing of a prompt is"
            raise MessageError(f"[{place}].{name}", f"{text}; leave the field out, or give the row to `sft`")


def _weight_fields(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the message's fields that say whether it is trained, each 0 or 1."""
    role, said = (
        _read_role(given, where),
        {name: given[name] for name in WEIGHTS if given.get(name) is not None},
    )
    for name, value in said.items():
        if isinstance(value, str) or value not in (0, 1):
            raise MessageError(f"{where}.{name}", f"its `{name}` is {safe_excerpt(repr(value))}; give 0 or 1")
        if role != "assistant" and name not in _OF_ANY_ROLE and value:
            text = f"its role is {safe_excerpt(role)} and `{name}` says that it is learnt: only answers are"
            raise MessageError(f"{where}.{name}", f"{text}; leave the field out")
    return said


def from_text(text: str) -> list[Any] | None:
    """Return the messages if `text` is their JSON, such as a table's cell; `None` for any other text. Raises
    `MessageError` for Python's `repr` of messages.
    """
    begin = text[:200].strip()
    if begin[:1] == '"' and begin[1:].lstrip().startswith(("[", "{")):  # JSON of JSON
        inner = _text_within(text)
        return None if inner is None else from_text(inner)
    if not begin.startswith(("[", "{")) or not begin.lstrip("[{ \t\r\n").startswith(('"', "'")):
        return None
    try:
        found = read_document(text, _LONGEST)
    except (ValueError, RecursionError):
        found = None
        if ("'role':" in begin and "'content':" in text) or ("'from':" in begin and "'value':" in text):
            said = "it is what Python prints of messages; write the list itself, or its JSON"
            raise MessageError("", said) from None
    if isinstance(found, dict) and _is_message(found):
        raise MessageError("", "it is the JSON of one message; write a list of messages, with this one in it")
    return found if isinstance(found, list) and all(map(_is_message, found)) else None


def _is_message(given: Any) -> bool:
    """Return True if `given` is an object with the keys of a message."""
    return isinstance(given, dict) and (
        ("role" in given and bool(given.keys() & {"content", "tool_calls"}))
        or (given.keys() >= {"from", "value"} and str(given["from"]).lower() in (*_ROLES, *_KNOWN))
    )


def _text_within(text: str) -> str | None:
    """Return the text if `text` is its JSON; `None` otherwise."""
    try:
        found = read_document(text, _LONGEST)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def arguments_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments of one row: `tools` (or `functions`) and `chat_template_kwargs`,
    if it has these columns, as lists and objects or their JSON. Raises `MessageError`.
    """
    found: dict[str, Any] = {}
    if row.get("chat_template_kwargs"):
        own = _parse_json(row["chat_template_kwargs"], "chat_template_kwargs", dict)
        for key in own:
            if key in NOT_THE_TEMPLATES:
                said = f"`chat_template_kwargs` gives {key}, which is set by opd; leave it out"
                raise MessageError("chat_template_kwargs", said)
        found |= {key: value for key, value in own.items() if value is not None}
    for column in ("tools", "functions"):
        if row.get(column):
            given = _parse_json(row[column], column, list)
            if not given:
                continue
            if "tools" in found:
                raise MessageError(column, f"there are two lists of tools, one of them `{column}`; give one")
            found["tools"] = [_read_tool(one, f"{column}[{place}]") for place, one in enumerate(given)]
    return found


def _read_tool(given: Any, where: str) -> dict[str, Any]:
    given = _parse_json(given, where, dict)
    told = given.get("function", given)
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        raise MessageError(where, f'`{where}` is not {{"type": "function", "function": {{"name": ...}}}}')
    return given if "function" in given else {"type": "function", "function": told}


def _parse_json(given: Any, where: str, kind: type) -> Any:
    """Return a value, or parse its JSON: tables have no column of objects with other keys in each row."""
    if isinstance(given, str):
        try:
            given = read_document(given or "{}", _LONGEST)
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, kind):
        what = "list" if kind is list else "object"
        raise MessageError(where, f"`{where}` is no {what}, and no JSON of one")
    return given


def _read_role(given: Any, where: str) -> str:
    role = (given.get("role") or given.get("from")) if isinstance(given, Mapping) else None
    if not isinstance(role, str):
        said = (
            f"{safe_excerpt(repr(given))} is not an object with `role` and `content` (or `from` and `value`)"
        )
        raise MessageError(where, said)
    plain = role.strip().lower()
    return _ROLES.get(plain, plain if plain in _KNOWN else role)


def _read_message(given: Any, where: str) -> Message:
    role = _read_role(given, where)
    given = _from_sharegpt(given, where) if "role" not in given else given
    for name in _ASIDE:
        if given.get(name):
            said = f"it has `{name}`, which no text is made of; leave the field out, or the row"
            raise MessageError(f"{where}.{name}", said)
    for name in _IN_PART:
        if given.get(name):
            said = f"it has `{name}`, and an answer is learnt whole or, with `train: false`, not at all"
            raise MessageError(f"{where}.{name}", f"{said}; leave the field out, or the row")
    calls = _read_calls(given, where)
    content = given.get("content")
    if "content" not in given and not calls:
        raise MessageError(where, f"{safe_excerpt(repr(given))} is not an object with `role` and `content`")
    made: Message = {"role": role, "content": _read_content(content, where)}
    if calls:
        made["tool_calls"] = calls
    made |= _read_thoughts(given, where) | _read_names(given, role, where)
    used = ("role", "content", "tool_calls", "function_call", "name", "tool_call_id")
    known = {*used, *THOUGHTS, *WEIGHTS, *_ASIDE, *_IN_PART}
    return made | {key: value for key, value in given.items() if key not in known and value is not None}


def _from_sharegpt(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rename `from` and `value` to `role` and `content`. A `function_call` has the JSON of calls as value."""
    made = {key: value for key, value in given.items() if key not in ("from", "value")}
    if "value" not in given:
        raise MessageError(where, "it has `from` and no `value`; name them `role` and `content`")
    if given.get("content"):
        raise MessageError(where, "it has `value` and `content`; give one")
    if given["from"] != "function_call":
        return {**made, "role": given["from"], "content": given["value"]}
    called = _parse_json(given["value"], "value", object)
    return {**made, "role": "assistant", "tool_calls": called if isinstance(called, list) else [called]}


def _read_thoughts(given: Mapping[str, Any], where: str) -> dict[str, str]:
    found = {name: given[name] for name in THOUGHTS if given.get(name)}
    for name, value in found.items():
        if not isinstance(value, str):
            raise MessageError(f"{where}.{name}", f"its `{name}` is no text")
    if len(set(found.values())) > 1:
        raise MessageError(where, f"it has {' and '.join(f'`{name}`' for name in found)}; give one")
    return {"reasoning_content": next(iter(found.values()))} if found else {}


def _read_names(given: Mapping[str, Any], role: str, where: str) -> dict[str, str]:
    """Return `name`, and for a tool's message the id of its call."""
    made = {}
    for name in ("name", "tool_call_id"):
        value = given.get(name)
        if value is not None and not isinstance(value, str):
            raise MessageError(f"{where}.{name}", f"its `{name}` is no text")
        if value is not None and (name == "name" or role == "tool"):
            made[name] = value
    return made


def _read_content(given: Any, where: str) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    parts = [given] if isinstance(given, Mapping) else given
    if not isinstance(parts, list):
        raise MessageError(f"{where}.content", "its content is text, or a list of parts of the type text")
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind in TEXTS and isinstance(part, Mapping):
            kind = next((key for key, value in part.items() if key not in _OF_TEXT and value), kind)
        if kind not in TEXTS:
            said = (
                f"its content has a part of the type {safe_excerpt(kind)!r}, and parts of text alone are read"
            )
            raise MessageError(f"{where}.content", f"{said}; write it as text, or leave it out")
        if not isinstance(text, str):
            raise MessageError(f"{where}.content", "its content has a part without `text`")
        texts.append(text)
    return "\n".join(texts)


def _read_calls(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return tool calls, including `function_call` of OpenAI's older API."""
    calls, old = given.get("tool_calls"), given.get("function_call")
    place = f"{where}.tool_calls"
    if isinstance(calls, str):
        calls = _parse_json(calls, "tool_calls", list)
    if calls and not isinstance(calls, list):
        raise MessageError(place, "its `tool_calls` are no list")
    if old:
        calls, place = [*(calls or []), old], f"{where}.function_call"
    return [_read_call(one, place) for one in calls or []]


def _read_call(given: Any, where: str) -> dict[str, Any]:
    called = given.get("function") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and called is None:
        called = given
    name = called.get("name") if isinstance(called, Mapping) else None
    if not isinstance(called, Mapping) or not isinstance(name, str):
        raise MessageError(where, "one of its tool calls names no function")
    arguments = called.get("arguments")
    if arguments is None and "parameters" in called:
        arguments = called["parameters"]
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = read_document(arguments or "{}", _LONGEST)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise MessageError(where, f"the arguments of its call of {safe_excerpt(name)} are no object of JSON")
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": given["id"], **made} if isinstance(given.get("id"), str) else made
