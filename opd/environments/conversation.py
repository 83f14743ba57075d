"""Encoding of an environment's messages, and parsing of the model's tool calls.

The tokens of a conversation only grow. The engine's tokens are kept as generated and never rebuilt from text.
Behind them go the tokens that the chat template adds for the environment's messages, from the end of the
assistant's text to the start of the next turn.

Tool calls are parsed by the formats of the common families. Nothing here trusts the text. The environment
reports an unreadable call to the model as one sentence, and the episode goes on.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config.environments import ToolFormat
from opd.environments.protocol import Message, ToolCall
from opd.errors import RolloutError, reason_of
from opd.models.chat_templates import TemplateError, render_messages
from opd.models.token_ids import decode_ids, encode_held, special_texts
from opd.untrusted import MAX_DEPTH, depth_exceeds, safe_excerpt, shorten_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WRITTEN = "WrittenByTheModel0"
"""Stands for the model's text, to find the template's text behind it."""
_OBSERVED = "SaidByTheEnvironment"


def bound_messages(messages: str | Sequence[Message], most: int) -> str | list[Message]:
    """Shorten an environment's messages to about `most` characters. Long ones use what short ones leave."""
    if isinstance(messages, str):
        return shorten_text(messages, most)
    texts = [str(one["content"]) for one in messages]
    remaining, waiting = most, len(texts)
    for index in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        texts[index] = shorten_text(texts[index], remaining // waiting)
        remaining, waiting = max(0, remaining - len(texts[index])), waiting - 1
    return [{**one, "content": text} for one, text in zip(messages, texts, strict=True)]


class Conversation:
    """Encodes an environment's messages.

    Args:
        tokenizer: The student's.
        template: Arguments of the chat template's own, with `tools`.
        stops: Token ids that end a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, object], stops: Collection[int]
    ) -> None:
        self._tokenizer, self._template, self._stops = tokenizer, template, frozenset(stops)
        self._special = special_texts(tokenizer, stops)

    def special_in(self, text: str) -> str | None:
        """Return the text of a special token that `text` holds, or None."""
        return next((one for one in self._special if one in text), None)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Return the model's text in a turn, without the token that ended it."""
        answer_ids = ids[:-1] if len(ids) and ids[-1] in self._stops else ids
        return decode_ids(self._tokenizer, answer_ids)

    def encode_opening(self, messages: Sequence[Message], observation: Sequence[Message] | str) -> np.ndarray:
        """[C] int32: the prompt `messages` and the environment's `observation`, up to where the assistant
        begins. Raises `RolloutError`.
        """
        messages, first = list(messages), len(messages)
        if isinstance(observation, str) and messages and messages[-1].get("role") == "user":
            # Many templates refuse two consecutive messages of the user.
            question, first = messages.pop(), first - 1
            observation = [{**question, "content": f"{question.get('content')}\n\n{observation}"}]
        masked, masked_texts = self._mask_special([*messages, *_as_messages(observation)], first)
        return self._encode_masked(self._render_messages(masked), masked_texts)

    def encode_verbatim(self, observation: Sequence[Message] | str) -> np.ndarray:
        """[R] int32: `observation` verbatim, behind a prompt of text."""
        text = (
            observation
            if isinstance(observation, str)
            else "".join(str(one.get("content") or "") for one in observation)
        )
        return self._encode_masked(_OBSERVED, {_OBSERVED: text})

    def encode_answer(
        self, written: np.ndarray, observation: Sequence[Message] | str, role: str
    ) -> np.ndarray:
        """[R] int32: the tokens behind a turn whose tokens are `written`: the template's text behind it, the
        messages `observation` (a text is one message of `role`), and the start of the next turn. Raises
        `RolloutError`.
        """
        # One question stands for everything before, because the template's text behind an answer does not
        # depend on it.
        exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WRITTEN}]
        masked, masked_texts = self._mask_special(
            [*exchange, *_as_messages(observation, role)], len(exchange)
        )
        text = self._render_messages(masked)
        if text.count(_WRITTEN) != 1:
            raise RolloutError(
                "the chat template does not write what an assistant said once and as it is, so nothing can be"
                " put behind it; give model.chat_template one that does."
            )
        ids = self._encode_masked(text.partition(_WRITTEN)[2], masked_texts)
        # The model has generated the token that ends its turn, unless it was cut.
        return ids[1:] if len(written) and len(ids) and written[-1] == ids[0] else ids

    def _render_messages(self, messages: Sequence[Message]) -> str:
        try:
            return render_messages(self._tokenizer, messages, self._template, answer=True)
        except TemplateError as error:
            roles = ", ".join(str(one.get("role")) for one in messages)
            raise RolloutError(
                f"{error} for messages of the roles {roles}; give environment.observation_role another role,"
                " or model.chat_template another template."
            ) from error

    def _mask_special(self, messages: list[Message], first: int) -> tuple[list[Message], dict[str, str]]:
        """Return `messages`, with names from index `first` on in place of text that would be read as special
        tokens, and those texts by name.
        """
        masked_texts: dict[str, str] = {}

        def mask_value(value: object) -> Any:
            if isinstance(value, dict):
                return {mask_value(key): mask_value(one) for key, one in value.items()}
            if isinstance(value, list):
                return [mask_value(one) for one in value]
            if isinstance(value, str) and any(one in value for one in (*self._special, _WRITTEN, _OBSERVED)):
                name = f"{_OBSERVED}{len(masked_texts)}_"
                masked_texts[name] = value
                return name
            return value

        return [*messages[:first], *(mask_value(message) for message in messages[first:])], masked_texts

    def _encode_masked(self, text: str, masked_texts: Mapping[str, str]) -> np.ndarray:
        """[R] int32: `text` with `masked_texts` inserted. Held text is never read as special tokens."""
        return np.array(encode_held(text, masked_texts, self._special, self._encode), np.int32)

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # tokenizers raise errors of any kind
            raise RolloutError(
                f"the tokenizer cannot encode {safe_excerpt(text)} ({reason_of(error)}); give the model one"
                " that has tokens for every character, or let the environment say what it can."
            ) from error


def _as_messages(observation: Sequence[Message] | str, role: str = "user") -> list[Message]:
    return (
        [{"role": role, "content": observation}]
        if isinstance(observation, str)
        else [dict(one) for one in observation]
    )


MOST_CALLS = 32
"""Calls of a turn. More are ignored."""
LONGEST_CALL = 1 << 20
"""Characters."""


def parse_calls(text: str, form: ToolFormat) -> tuple[list[ToolCall], list[str]]:
    """Return the calls in `text`, in their order, and a sentence for each that cannot be read."""
    calls: list[ToolCall] = []
    broken: list[str] = []
    if form == "none":
        return calls, broken
    for number, piece in enumerate(_FORMATS[form](text), start=1):
        if number > MOST_CALLS:
            broken.append(f"only the first {MOST_CALLS} calls of a turn count")
            break
        try:
            calls += _read_calls(piece) if isinstance(piece, str) else [_read_call(piece)]
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            broken.append(f"call {number} cannot be read: {str(error)[:200]}")
    return calls, broken


def without_calls(text: str, form: ToolFormat) -> str:
    if form == "hermes":
        return _HERMES.sub("", text).strip()
    if form == "llama":
        return text.partition(_PYTHON_TAG)[0].strip() if _PYTHON_TAG in text else ""
    starts = [index for sign in _DEEPSEEK_BEGIN if (index := text.find(sign)) >= 0]
    return text[: min(starts, default=len(text))].strip()


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>|\Z)",  # noqa: RUF001
    re.DOTALL,
)
_DEEPSEEK_BEGIN = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")  # noqa: RUF001
_DEEPSEEK_SEP = "<｜tool▁sep｜>"  # noqa: RUF001
_FENCE = "```"


def _hermes_calls(text: str) -> Iterator[str]:
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    for match in _HERMES.finditer(text):
        yield match[1]


def _llama_calls(text: str) -> Iterator[str]:
    """Llama 3: an object with `name` and `parameters`, alone or behind `<|python_tag|>`, several after `;`,
    or a list of calls in Python's form, `[f(a=1), g()]`.
    """
    tagged = _PYTHON_TAG in text
    body = text.partition(_PYTHON_TAG)[2] if tagged else text.strip()
    if not body.lstrip().startswith("{"):
        if tagged or re.match(r"\[\s*\w+\(", body):
            yield body
        return
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        while at < len(body) and (body[at].isspace() or body[at] == ";"):
            at += 1
        if at == len(body):
            return
        try:
            end = decoder.raw_decode(body, at)[1]
        except ValueError:
            yield body[at:]
            return
        yield body[at:end]
        at = end


def _deepseek_calls(text: str) -> Iterator[str | dict[str, Any]]:
    """DeepSeek V3 and R1: name and a JSON object of arguments, in a fence or not, between its own tokens."""
    for match in _DEEPSEEK.finditer(text):
        head, separator, content = match[1].partition(_DEEPSEEK_SEP)
        if not separator:
            yield match[1]
            continue
        # V3 and R1 write `function<sep>NAME\n```json ...```, V3.1 `NAME<sep>{...}`.
        name, _, body = content.partition("\n") if head.strip() == "function" else (head, "", content)
        body = body.strip()
        # No pattern: three runs of blanks would take cubic time.
        if len(body) >= 2 * len(_FENCE) and body.startswith(_FENCE) and body.endswith(_FENCE):
            body = body[len(_FENCE) : -len(_FENCE)].removeprefix("json").strip()
        yield {"name": name.strip(), "arguments": body}


_FORMATS: dict[str, Callable[[str], Iterator[Any]]] = {
    "hermes": _hermes_calls,
    "llama": _llama_calls,
    "deepseek": _deepseek_calls,
}


def _read_calls(piece: str) -> list[ToolCall]:
    if len(piece) > LONGEST_CALL:
        raise ValueError(f"it has more than {LONGEST_CALL:,} characters")
    stripped = piece.strip()
    if re.match(r"\[\s*\w+\(", stripped):
        # Literals only, nothing is run.
        tree = ast.parse(stripped, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("it is no list of calls")
        calls = []
        for node in tree.elts:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
                raise ValueError("a call is `name(argument=value, ...)`")
            arguments = {
                str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg
            }
            calls.append(_check_call(node.func.id, arguments))
        return calls
    return [_read_call(json.loads(stripped))]


def _read_call(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError('a call is an object with "name" and "arguments"')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        if len(arguments) > LONGEST_CALL:
            raise ValueError(f"its arguments have more than {LONGEST_CALL:,} characters")
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call['name'][:100]} are not an object")
    return _check_call(call["name"], arguments)


def _check_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Raise `ValueError` or `TypeError` for invalid JSON or text, which no client could send back."""
    if depth_exceeds(arguments, MAX_DEPTH):
        raise ValueError(f"the arguments of {name[:100]} are nested deeper than {MAX_DEPTH}")
    try:
        plain = json.dumps([name, arguments], ensure_ascii=False, allow_nan=False)
        plain.encode()
    except UnicodeEncodeError:
        raise ValueError("its name or arguments hold halves of characters") from None
    return ToolCall(*json.loads(plain))
