"""Tool calls in what a model writes, by the formats of the common families.

Nothing here trusts the text: a call that cannot be read is reported to the model by its environment, as one
sentence, and ends nothing.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from opd.config.environments import ToolFormat
from opd.environments.protocol import ToolCall
from opd.foreign import MAX_DEPTH, depth_exceeds

MOST_CALLS = 32
"""Of a turn; more are not looked at."""
LONGEST_CALL = 1 << 20
"""Characters."""
Found = tuple[list[ToolCall], list[str]]
"""Calls, and what is wrong with those that cannot be read."""


def parse(text: str, form: ToolFormat) -> Found:
    """The calls in `text`, in their order, and a sentence for each that cannot be read."""
    calls: list[ToolCall] = []
    broken: list[str] = []
    if form == "none":
        return calls, broken
    for number, piece in enumerate(_FORMATS[form](text), start=1):
        if number > MOST_CALLS:
            broken.append(f"only the first {MOST_CALLS} calls of a turn count")
            break
        try:
            calls += _read(piece) if isinstance(piece, str) else [_call(piece)]
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            broken.append(f"call {number} cannot be read: {str(error)[:200]}")
    return calls, broken


def without_calls(text: str, form: ToolFormat) -> str:
    """What `text`, in which calls were read, says beside them."""
    if form == "hermes":
        return _HERMES.sub("", text).strip()
    if form == "llama":
        return text.partition(_PYTHON_TAG)[0].strip() if _PYTHON_TAG in text else ""
    begin = [place for sign in _DEEPSEEK_BEGIN if (place := text.find(sign)) >= 0]
    return text[: min(begin, default=len(text))].strip()


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>|\Z)",  # noqa: RUF001
    re.DOTALL,
)
_DEEPSEEK_BEGIN = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")  # noqa: RUF001
_DEEPSEEK_SEP = "<｜tool▁sep｜>"  # noqa: RUF001
_FENCE = "```"


def _hermes(text: str) -> Iterator[str]:
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    for match in _HERMES.finditer(text):
        yield match[1]


def _llama(text: str) -> Iterator[str]:
    """Llama 3: an object with `name` and `parameters`, alone or behind `<|python_tag|>`, several after `;`,
    or a list of calls in Python's form, `[f(a=1), g()]`.
    """
    tagged = _PYTHON_TAG in text
    body = text.partition(_PYTHON_TAG)[2] if tagged else text.strip()
    if body.lstrip().startswith("{"):
        yield from _objects(body)
    elif tagged or re.match(r"\[\s*\w+\(", body):
        yield body


def _deepseek(text: str) -> Iterator[str | dict[str, Any]]:
    """DeepSeek V3 and R1: name and a JSON object of arguments, in a fence or not, between its own tokens."""
    for match in _DEEPSEEK.finditer(text):
        head, separator, rest = match[1].partition(_DEEPSEEK_SEP)
        if not separator:
            yield match[1]
            continue
        # V3 and R1 write `function<sep>NAME\n```json ...```, V3.1 `NAME<sep>{...}`.
        name, _, body = rest.partition("\n") if head.strip() == "function" else (head, "", rest)
        yield {"name": name.strip(), "arguments": _unfenced(body.strip())}


def _unfenced(text: str) -> str:
    """What is in a fence, or all. By no pattern: one with three runs of blanks takes their number cubed."""
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    return text[len(_FENCE) : -len(_FENCE)].removeprefix("json").strip()


_FORMATS: dict[str, Callable[[str], Iterator[Any]]] = {
    "hermes": _hermes,
    "llama": _llama,
    "deepseek": _deepseek,
}


def _objects(text: str) -> Iterator[str]:
    """The JSON objects of `a; b`."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1
        if at == len(text):
            return
        try:
            end = decoder.raw_decode(text, at)[1]
        except ValueError:
            yield text[at:]
            return
        yield text[at:end]
        at = end


def _read(piece: str) -> list[ToolCall]:
    if len(piece) > LONGEST_CALL:
        raise ValueError(f"it has more than {LONGEST_CALL:,} characters")
    stripped = piece.strip()
    if re.match(r"\[\s*\w+\(", stripped):
        return _pythonic(stripped)
    return [_call(json.loads(stripped))]


def _call(said: Any) -> ToolCall:
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or not said["name"]:
        raise ValueError('a call is an object with "name" and "arguments"')
    arguments = said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):
        if len(arguments) > LONGEST_CALL:
            raise ValueError(f"its arguments have more than {LONGEST_CALL:,} characters")
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {said['name'][:100]} are not an object")
    return _checked(said["name"], arguments)


def _checked(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Raises `ValueError` or `TypeError` for what is no JSON, or no text: no client could send it back."""
    if depth_exceeds(arguments, MAX_DEPTH):
        raise ValueError(f"the arguments of {name[:100]} are nested deeper than {MAX_DEPTH}")
    try:
        plain = json.dumps([name, arguments], ensure_ascii=False, allow_nan=False)
        plain.encode()
    except UnicodeEncodeError:
        raise ValueError("its name or arguments hold halves of characters") from None
    return ToolCall(*json.loads(plain))


def _pythonic(text: str) -> list[ToolCall]:
    """`[f(a=1), g()]`: literals only, nothing is run."""
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("it is no list of calls")
    found = []
    for node in tree.elts:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
            raise ValueError("a call is `name(argument=value, ...)`")
        arguments = {str(given.arg): ast.literal_eval(given.value) for given in node.keywords if given.arg}
        found.append(_checked(node.func.id, arguments))
    return found
