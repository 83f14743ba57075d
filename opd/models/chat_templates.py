"""Chat templates are programs that come with models: they run in a process of their own, within limits.

transformers' sandbox keeps them from Python's objects, not from looping for hours or filling the memory. One
`LimitedProcess` serves all conversations of the process that asks; it imports this module for `answer`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from opd.foreign import decoding, read_document, shown
from opd.limited import LONGEST, LimitedProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS, MEMORY = 5, 1 << 30
"""Of processor time a conversation; bytes beside what the process takes at rest."""
MOST_TEMPLATE = 1 << 20
"""Characters of a template; those of today's models have 500 to 20,000."""
_ENDLESS = (
    f"the chat template took more than {SECONDS} s of processor time or {MEMORY >> 20} MiB of memory, or"
    f" wrote more than {LONGEST >> 20} MiB"
)


class TemplateError(Exception):
    """A chat template raised, ran too long, or wrote too much; the text says which."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    answer: bool = False,
    day: str | None = None,
) -> str:
    """`messages` as the chat template of `tokenizer` writes them, as `apply_chat_template` would.

    Args:
        arguments: Of the template's own.
        answer: Whether it goes on to where the assistant's answer begins.
        day: In place of the current time for a template that asks for it, `2020-01-01`.

    Raises `TemplateError`.
    """
    return _ask(tokenizer, messages, {**arguments, "add_generation_prompt": answer}, day=day)[0]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """`render`, and where in it stand the parts that the template puts between `{% generation %}` and
    `{% endgeneration %}`: the first character of each and the one after its last.

    Raises `TemplateError`.
    """
    return _ask(tokenizer, messages, arguments, marked=True)


def _ask(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    day: str | None = None,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    template: Any = tokenizer.chat_template
    if not template:
        raise TemplateError("the tokenizer has no chat template")
    if len(str(template)) > MOST_TEMPLATE:
        raise TemplateError(f"the chat template has more than {MOST_TEMPLATE} characters")
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _renderer().render(
        {
            "template": template,
            "special": special,
            "messages": list(messages),
            "arguments": dict(arguments),
            "marked": marked,
            "day": day,
        }
    )


class _Renderer:
    """The process that renders, and the templates that ended it: they are not waited for again."""

    def __init__(self) -> None:
        self.process = LimitedProcess(__name__, MEMORY)
        self._endless: list[Any] = []

    def render(self, request: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        said = None if request["template"] in self._endless else self.process.ask(request, SECONDS)
        if said is None:
            self._endless.append(request["template"])
            raise TemplateError(_ENDLESS)
        with decoding(lambda cause: TemplateError(f"the chat template's process answered with {cause}")):
            answer = read_document(said, LONGEST)
            text, error = answer.get("text"), shown(answer.get("error"), 500)
            if not isinstance(text, str):
                raise TemplateError(f"the chat template raised {error}")
            return text, [(int(start), int(end)) for start, end in answer.get("marks", ())]


_shared: _Renderer | None = None
_making = threading.Lock()


def _renderer() -> _Renderer:
    """This process's own: a forked one does not share pipes with its parent."""
    global _shared
    with _making:
        if _shared is None or _shared.process.owner != os.getpid():
            _shared = _Renderer()
        return _shared


_clock = SimpleNamespace(now=datetime.now)


def prepare() -> None:
    """In the process that renders: import what does it."""
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = _clock  # pyright: ignore[reportPrivateImportUsage]


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """In the process that renders: the text of a conversation, and its marks."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    day = asked["day"]
    _clock.now = datetime.now if day is None else partial(datetime.fromisoformat, day)
    stand_in: Any = SimpleNamespace(chat_template=asked["template"], special_tokens_map=asked["special"])
    stand_in.get_chat_template = partial(PreTrainedTokenizerBase.get_chat_template, stand_in)
    if not asked["marked"]:
        text = PreTrainedTokenizerBase.apply_chat_template(
            stand_in,  # pyright: ignore[reportArgumentType]
            asked["messages"],
            tokenize=False,
            **asked["arguments"],
        )
        return {"text": str(text), "marks": []}
    chosen = stand_in.get_chat_template(None, asked["arguments"].get("tools"))
    said = [{k: v for k, v in m.items() if v is not None} for m in asked["messages"]]
    texts, found = chat_template_utils.render_jinja_template(
        conversations=[said],
        chat_template=chosen,
        return_assistant_tokens_mask=True,
        **{**asked["special"], **asked["arguments"]},
    )
    return {"text": str(texts[0]), "marks": list(found[0])}
