"""What an environment says, as the tokens that follow what the model wrote.

The tokens of a conversation only ever grow: what the model wrote is kept as the engine wrote it and never
made from text again. Behind it go the tokens that the chat template adds for the environment's messages, from
where the assistant's text ends to where the next turn begins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.environments.protocol import Message
from opd.errors import RolloutError, reason_of
from opd.foreign import shown
from opd.models.chat_templates import TemplateError, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WRITTEN = "WrittenByTheModel0"
"""Stands for the model's text where the template is asked what comes behind it."""
_SAID = "SaidByTheEnvironment"
_CUT = "\n[... {} characters left out ...]\n"


def shortened(text: str, most: int) -> str:
    """`text`, without its middle if it has more than `most` characters, and a line that says so."""
    if len(text) <= most:
        return text
    half = most // 2
    return text[: most - half] + _CUT.format(f"{len(text) - most:,}") + text[len(text) - half :]


def bounded(said: str | Sequence[Message], most: int) -> str | list[Message]:
    """What an environment says, with some `most` characters: short messages leave long ones their room."""
    if isinstance(said, str):
        return shortened(said, most)
    texts = [str(one["content"]) for one in said]
    left, waiting = most, len(texts)
    for place in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        texts[place] = shortened(texts[place], left // waiting)
        left, waiting = max(0, left - len(texts[place])), waiting - 1
    return [{**one, "content": text} for one, text in zip(said, texts, strict=True)]


class Conversation:
    """Makes tokens of what an environment says.

    Args:
        tokenizer: Of the model that writes.
        template: Arguments of the chat template's own, `tools` included.
        stops: Token ids that end a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], stops: Collection[int]
    ) -> None:
        self._tokenizer, self._template, self._stops = tokenizer, template, frozenset(stops)
        special = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
        special |= {str(tokenizer.convert_ids_to_tokens(one)) for one in stops}
        self._special = sorted(special, key=len, reverse=True)
        """Texts that are one token with a meaning of its own, the longest first."""

    def special_in(self, text: str) -> str | None:
        """The text of a special token that `text` holds, if it holds one."""
        return next((one for one in self._special if one in text), None)

    def text(self, ids: Sequence[int]) -> str:
        """What the model wrote in a turn, without the token that ended it."""
        kept = ids[:-1] if len(ids) and ids[-1] in self._stops else ids
        said = self._tokenizer.decode(
            list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(said, str)
        return said

    def opening(self, messages: Sequence[Message], said: Sequence[Message] | str) -> np.ndarray:
        """[C] int32: the prompt `messages` and what the environment says behind them, up to where the
        assistant begins. Raises `RolloutError`.
        """
        messages, first = list(messages), len(messages)
        if isinstance(said, str) and messages and messages[-1].get("role") == "user":
            # Many templates refuse two messages of the user's in a row.
            asked, first = messages.pop(), first - 1
            said = [{**asked, "content": f"{asked.get('content')}\n\n{said}"}]
        told, held = self._held([*messages, *_messages(said)], first)
        return self._ids(self._render(told), held)

    def plain(self, said: Sequence[Message] | str) -> np.ndarray:
        """[R] int32: behind a prompt of text, what is said as it stands."""
        text = said if isinstance(said, str) else "".join(str(one.get("content") or "") for one in said)
        return self._ids(_SAID, {_SAID: text})

    def answer(self, written: np.ndarray, said: Sequence[Message] | str, role: str) -> np.ndarray:
        """[R] int32: what follows a turn whose tokens are `written`: what the template puts behind it, the
        messages `said`, a text as one of `role`, and where the next turn begins. Raises `RolloutError`.
        """
        # The question stands for all that came before: what a template writes behind an answer is its own.
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WRITTEN}]
        told, held = self._held([*before, *_messages(said, role)], len(before))
        whole = self._render(told)
        if whole.count(_WRITTEN) != 1:
            raise RolloutError(
                "the chat template does not write what an assistant said once and as it is, so nothing can be"
                " put behind it; give model.chat_template one that does."
            )
        ids = self._ids(whole.partition(_WRITTEN)[2], held)
        # The model has written the token that ends its turn, unless it was cut.
        return ids[1:] if len(written) and len(ids) and written[-1] == ids[0] else ids

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return render(self._tokenizer, messages, self._template, answer=True)
        except TemplateError as error:
            roles = ", ".join(str(one.get("role")) for one in messages)
            raise RolloutError(
                f"{error} for messages of the roles {roles}; give environment.observation_role another role,"
                " or model.chat_template another template."
            ) from error

    def _held(self, messages: list[Message], first: int) -> tuple[list[Message], dict[str, str]]:
        """`messages`, of which those from `first` on hold names in place of text that would be read as
        special tokens, and those texts by name.
        """
        held: dict[str, str] = {}

        def hold(value: Any) -> Any:
            if isinstance(value, dict):
                return {hold(key): hold(one) for key, one in value.items()}
            if isinstance(value, list):
                return [hold(one) for one in value]
            if isinstance(value, str) and any(one in value for one in (*self._special, _WRITTEN, _SAID)):
                name = f"{_SAID}{len(held)}_"
                held[name] = value
                return name
            return value

        return [*messages[:first], *(hold(message) for message in messages[first:])], held

    def _ids(self, text: str, held: Mapping[str, str]) -> np.ndarray:
        """[R] int32: `text` with `held` put in; what is held is never read as special tokens."""
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
        except Exception as error:  # whatever a tokenizer raises
            raise RolloutError(
                f"the tokenizer cannot encode {shown(text)} ({reason_of(error)}); give the model one that has"
                " tokens for every character, or let the environment say what it can."
            ) from error

    def _encode_plain(self, text: str) -> list[int]:
        """Text in which a special token is just its characters."""
        if not any(special in text for special in self._special):
            return self._encode(text)
        ids: list[int] = []
        for piece in _split(text, self._special):
            ids += self._encode(piece)
        return ids


def _messages(said: Sequence[Message] | str, role: str = "user") -> list[Message]:
    return [{"role": role, "content": said}] if isinstance(said, str) else [dict(one) for one in said]


def _split(text: str, special: Sequence[str]) -> list[str]:
    """`text` cut in the middle of every special token's text, so that no piece holds one."""
    found, pieces, begin = [one for one in special if len(one) > 1 and one in text], [], 0
    while True:
        # The one that ends first: what lies before its middle holds no other.
        places = [(place + len(one), place, one) for one in found if (place := text.find(one, begin)) >= 0]
        if not places:
            return [*pieces, text[begin:]]
        _, place, one = min(places)
        cut = place + max(1, len(one) // 2)
        pieces.append(text[begin:cut])
        begin = cut
