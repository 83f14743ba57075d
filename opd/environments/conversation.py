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
from opd.untrusted import MAX_DEPTH, depth_exceeds, safe_excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WRITTEN = "WrittenByTheModel0"
"""Stands for the model's text, to find the template's text behind it."""
_SAID = "SaidByTheEnvironment"
_CUT = "\n[... {} characters left out ...]\n"


def shorten_text(text: str, most: int) -> str:
    """Return `text`, with its middle replaced by a note if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return text[: most - half] + _CUT.format(f"{len(text) - most:,}") + text[len(text) - half :]


def bound_messages(said: str | Sequence[Message], most: int) -> str | list[Message]:
    """Shorten an environment's messages to about `most` characters. Long messages use the space that short
    ones leave.
    """
    if isinstance(said, str):
        return shorten_text(said, most)
    texts = [str(one["content"]) for one in said]
    left, waiting = most, len(texts)
    for place in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        texts[place] = shorten_text(texts[place], left // waiting)
        left, waiting = max(0, left - len(texts[place])), waiting - 1
    return [{**one, "content": text} for one, text in zip(said, texts, strict=True)]


class Conversation:
    """Encodes an environment's messages.

    Args:
        tokenizer: The student's.
        template: Arguments of the chat template's own, with `tools`.
        stops: Token ids that end a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], stops: Collection[int]
    ) -> None:
        self._tokenizer, self._template, self._stops = tokenizer, template, frozenset(stops)
        special = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
        special |= {str(tokenizer.convert_ids_to_tokens(one)) for one in stops}
        self._special = sorted(special, key=len, reverse=True)
        """Texts of special tokens, the longest first."""

    def special_in(self, text: str) -> str | None:
        """Return the text of a special token that `text` holds, or None."""
        return next((one for one in self._special if one in text), None)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Return the model's text in a turn, without the token that ended it."""
        kept = ids[:-1] if len(ids) and ids[-1] in self._stops else ids
        said = self._tokenizer.decode(
            list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(said, str)
        return said

    def encode_opening(self, messages: Sequence[Message], said: Sequence[Message] | str) -> np.ndarray:
        """[C] int32: the prompt `messages` and the environment's `said`, up to where the assistant begins.
        Raises `RolloutError`.
        """
        messages, first = list(messages), len(messages)
        if isinstance(said, str) and messages and messages[-1].get("role") == "user":
            # Many templates refuse two consecutive messages of the user.
            asked, first = messages.pop(), first - 1
            said = [{**asked, "content": f"{asked.get('content')}\n\n{said}"}]
        told, held = self._mask_special([*messages, *_as_messages(said)], first)
        return self._encode_masked(self._render_messages(told), held)

    def encode_verbatim(self, said: Sequence[Message] | str) -> np.ndarray:
        """[R] int32: `said` verbatim, behind a prompt of text."""
        text = said if isinstance(said, str) else "".join(str(one.get("content") or "") for one in said)
        return self._encode_masked(_SAID, {_SAID: text})

    def encode_answer(self, written: np.ndarray, said: Sequence[Message] | str, role: str) -> np.ndarray:
        """[R] int32: the tokens behind a turn whose tokens are `written`: the template's text behind it, the
        messages `said` (a text is one message of `role`), and the start of the next turn. Raises
        `RolloutError`.
        """
        # One question stands for everything before, because the template's text behind an answer does not
        # depend on it.
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WRITTEN}]
        told, held = self._mask_special([*before, *_as_messages(said, role)], len(before))
        whole = self._render_messages(told)
        if whole.count(_WRITTEN) != 1:
            raise RolloutError(
                "the chat template does not write what an assistant said once and as it is, so nothing can be"
                " put behind it; give model.chat_template one that does."
            )
        ids = self._encode_masked(whole.partition(_WRITTEN)[2], held)
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
        held: dict[str, str] = {}

        def mask_value(value: Any) -> Any:
            if isinstance(value, dict):
                return {mask_value(key): mask_value(one) for key, one in value.items()}
            if isinstance(value, list):
                return [mask_value(one) for one in value]
            if isinstance(value, str) and any(one in value for one in (*self._special, _WRITTEN, _SAID)):
                name = f"{_SAID}{len(held)}_"
                held[name] = value
                return name
            return value

        return [*messages[:first], *(mask_value(message) for message in messages[first:])], held

    def _encode_masked(self, text: str, held: Mapping[str, str]) -> np.ndarray:
        """[R] int32: `text` with `held` inserted. Held text is never read as special tokens."""
        parts: list[int] = []
        names = "|".join(map(re.escape, held))
        # A template may write one twice, or never.
        for piece in re.split(f"({names})", text) if held else [text]:
            parts += self._encode_plain(held[piece]) if piece in held else self._encode(piece)
        return np.array(parts, np.int32)

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # tokenizers raise errors of any kind
            raise RolloutError(
                f"the tokenizer cannot encode {safe_excerpt(text)} ({reason_of(error)}); give the model one"
                " that has"
                " tokens for every character, or let the environment say what it can."
            ) from error

    def _encode_plain(self, text: str) -> list[int]:
        """Encode text in which a special token is just its characters."""
        if not any(special in text for special in self._special):
            return self._encode(text)
        ids: list[int] = []
        for piece in _split_special(text, self._special):
            ids += self._encode(piece)
        return ids


def _as_messages(said: Sequence[Message] | str, role: str = "user") -> list[Message]:
    return [{"role": role, "content": said}] if isinstance(said, str) else [dict(one) for one in said]


def _split_special(text: str, special: Sequence[str]) -> list[str]:
    """Cut `text` in the middle of every special token's text, so that no piece holds one."""
    found, pieces, begin = [one for one in special if len(one) > 1 and one in text], [], 0
    while True:
        # The first to end: the text before its middle holds no other.
        places = [(place + len(one), place, one) for one in found if (place := text.find(one, begin)) >= 0]
        if not places:
            return [*pieces, text[begin:]]
        _, place, one = min(places)
        cut = place + max(1, len(one) // 2)
        pieces.append(text[begin:cut])
        begin = cut


MOST_CALLS = 32
"""Calls of a turn. More are ignored."""
LONGEST_CALL = 1 << 20
"""Characters."""
Found = tuple[list[ToolCall], list[str]]
"""Calls, and the errors of those that cannot be read."""


def parse_calls(text: str, form: ToolFormat) -> Found:
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
    """Return the rest of `text` without its calls."""
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
    if body.lstrip().startswith("{"):
        yield from _json_objects(body)
    elif tagged or re.match(r"\[\s*\w+\(", body):
        yield body


def _deepseek_calls(text: str) -> Iterator[str | dict[str, Any]]:
    """DeepSeek V3 and R1: name and a JSON object of arguments, in a fence or not, between its own tokens."""
    for match in _DEEPSEEK.finditer(text):
        head, separator, rest = match[1].partition(_DEEPSEEK_SEP)
        if not separator:
            yield match[1]
            continue
        # V3 and R1 write `function<sep>NAME\n```json ...```, V3.1 `NAME<sep>{...}`.
        name, _, body = rest.partition("\n") if head.strip() == "function" else (head, "", rest)
        yield {"name": name.strip(), "arguments": _strip_fence(body.strip())}


def _strip_fence(text: str) -> str:
    """Return the contents of a fence, or all. No pattern: three runs of blanks would take cubic time."""
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    return text[len(_FENCE) : -len(_FENCE)].removeprefix("json").strip()


_FORMATS: dict[str, Callable[[str], Iterator[Any]]] = {
    "hermes": _hermes_calls,
    "llama": _llama_calls,
    "deepseek": _deepseek_calls,
}


def _json_objects(text: str) -> Iterator[str]:
    """Yield the JSON objects of `a; b`."""
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


def _read_calls(piece: str) -> list[ToolCall]:
    if len(piece) > LONGEST_CALL:
        raise ValueError(f"it has more than {LONGEST_CALL:,} characters")
    stripped = piece.strip()
    if re.match(r"\[\s*\w+\(", stripped):
        return _pythonic_calls(stripped)
    return [_read_call(json.loads(stripped))]


def _read_call(said: Any) -> ToolCall:
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
    return _check_call(said["name"], arguments)


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


def _pythonic_calls(text: str) -> list[ToolCall]:
    """Parse `[f(a=1), g()]`. Literals only, nothing is run."""
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("it is no list of calls")
    found = []
    for node in tree.elts:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
            raise ValueError("a call is `name(argument=value, ...)`")
        arguments = {str(given.arg): ast.literal_eval(given.value) for given in node.keywords if given.arg}
        found.append(_check_call(node.func.id, arguments))
    return found
