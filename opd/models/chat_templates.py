"""Chat templates are programs that come with models, so they run in their own limited process.

transformers' sandbox keeps them from Python's objects, but not from looping for hours or filling the memory.
One `LimitedProcess` serves all conversations of a process. It imports this module for `answer`.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from opd.child import LONGEST, LimitedProcess
from opd.data.messages import THOUGHTS
from opd.untrusted import convert_decode_errors, read_document, safe_excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS, MEMORY = 5, 1 << 30
"""Processor time per conversation, and bytes above the process at rest."""
MOST_TEMPLATE = 1 << 20
"""Maximum characters of a template. Those of today's models have 500 to 20,000."""
_ENDLESS = (
    f"the chat template took more than {SECONDS} s of processor time or {MEMORY >> 20} MiB of memory, or"
    f" wrote more than {LONGEST >> 20} MiB"
)


class TemplateError(Exception):
    """A chat template raised, ran too long, or wrote too much; the text says which."""


class UnreadError(TemplateError):
    """A chat template ignores part of its input; the text says which and the fix."""


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    arguments: Mapping[str, object],
    *,
    answer: bool = False,
    day: str | None = None,
) -> str:
    """Render `messages` by the chat template of `tokenizer`, as `apply_chat_template` would.

    Args:
        arguments: Arguments of the template.
        answer: Continue to the start of the assistant's answer.
        day: Replaces the current time for the template, `2020-01-01` or `2020-01-01T12:00:00`. Its random
            draws are the same each time then.

    Raises `TemplateError`.
    """
    return _render_template(tokenizer, messages, {**arguments, "add_generation_prompt": answer}, day=day)[0]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of `render_messages` and the character ranges `[start, end)` between `{% generation %}`
    and `{% endgeneration %}` of the template.

    Raises `TemplateError`.
    """
    return _render_template(tokenizer, messages, arguments, marked=True)


def refuse_unread(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    arguments: Mapping[str, object],
    row_arguments: Collection[str] = (),
) -> None:
    """Raise `UnreadError` for a chat template that leaves out a role's text, a field of a message, or one of
    `row_arguments`, because the model would see less than the data holds. Names may go unread.
    """
    if tokenizer.chat_template:
        _refuse_unread_roles(tokenizer, messages)
        _refuse_unread_turns(tokenizer, messages, arguments)
    extra: dict[str, int] = {}
    for index, one in enumerate(messages):
        for field in one.keys() - _KNOWN:
            extra.setdefault(field, index)
    if not extra and not row_arguments:
        return
    read = _template_names(str(tokenizer.chat_template))
    render_all = partial(_render_template, tokenizer, messages, arguments)
    for field, index in extra.items():
        fewer = [{key: value for key, value in one.items() if key != field} for one in messages]
        is_read = not read.isdisjoint(THOUGHTS if field in THOUGHTS else {field})
        if not is_read and render_all() == _render_template(tokenizer, fewer, arguments):
            has = _AS_WRITTEN.get(field, f"`{safe_excerpt(field)}`")
            mend = "leave it out, or give model.chat_template one that does"
            if _OF_LEARNING.search(field):
                mend = (
                    "write `train: false` (or `weight: 0`) in its place where nothing of an answer is learnt"
                )
            raise UnreadError(f"message {index + 1} has {has}, which the chat template does not read; {mend}")
    for name in row_arguments:
        others = {key: value for key, value in arguments.items() if key != name}
        if name not in read and render_all() == _render_template(tokenizer, messages, others):
            raise UnreadError(
                f"its `{safe_excerpt(name)}` is nothing that the chat template reads; leave it out, or give"
                " model.chat_template one that does"
            )


_KNOWN = ("role", "content", "name", "tool_call_id")
_AS_WRITTEN = {
    "reasoning_content": f"thoughts ({', '.join(f'`{name}`' for name in THOUGHTS)})",
    "tool_calls": "calls of tools (`tool_calls`, `function_call`)",
}
"""Field of a message -> its description, with all its names in files."""
_OF_LEARNING = re.compile("mask|loss|train|learn|weight|ignore", re.IGNORECASE)


@lru_cache(maxsize=8)
def _template_names(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))


def _render_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    arguments: Mapping[str, object],
    *,
    day: str | None = None,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    template: Any = tokenizer.chat_template
    if not template:
        raise TemplateError("the tokenizer has no chat template")
    if len(str(template)) > MOST_TEMPLATE:
        raise TemplateError(f"the chat template has more than {MOST_TEMPLATE} characters")
    special = _special_of(tokenizer)
    names = _template_names(str(template))
    thoughts = next((name for name in THOUGHTS if name in names), THOUGHTS[0])
    conversation = [{thoughts if k == THOUGHTS[0] else k: v for k, v in one.items()} for one in messages]
    conversation = [
        _with_parts(one) if _content_form(template, special, str(one.get("role"))) == "parts" else one
        for one in conversation
    ]
    return _shared_renderer().render_request(
        {
            "template": template,
            "special": special,
            "messages": conversation,
            "arguments": dict(arguments),
            "marked": marked,
            "day": day,
        }
    )


def _special_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items()}


def _with_parts(message: Mapping[str, object]) -> dict[str, Any]:
    """Return `message` with its text as a list of one part."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


_PROBE = " ".join(["zebra"] * 200)
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}


def _test_conversation(role: str) -> list[dict[str, Any]]:
    """Return a short conversation in which `role` says `_PROBE`."""
    turn, question = {"role": role, "content": _PROBE}, {"role": "user", "content": "?"}
    if role == "user":
        return [turn]
    if role == "assistant":
        return [question, turn, question]
    if role == "tool":
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        return [question, called, {**turn, "name": "look", "tool_call_id": _CALL["id"]}]
    return [turn, question]


def _refuse_unread_roles(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UnreadError` for a role of `messages` whose text the chat template leaves out."""
    special = _special_of(tokenizer)
    for role in dict.fromkeys(["user", *(str(one.get("role")) for one in messages)]):
        if _content_form(tokenizer.chat_template, special, role) is None:
            mend = "put it into what the user says, or give" if role == "system" else "give"
            raise UnreadError(
                f"the chat template leaves out what `{role}` messages say, or a part of it; {mend}"
                " model.chat_template one that writes their `content` as it is"
            )


def _refuse_unread_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> None:
    """Raise `UnreadError` for a message that the chat template leaves out by position, such as all but the
    last. It renders a conversation of the same form with a unique text in each message.
    """
    if len(messages) < 2 or messages[0].get("role") not in _FIRST:
        return  # a later chunk of a conversation, which a template need not support
    probes = {index: f"zebra{index}x" for index, one in enumerate(messages) if _only_speaks(one)}
    shape = tuple((str(one.get("role")), index in probes) for index, one in enumerate(messages))
    key, lost = (str(tokenizer.chat_template), shape), _shared_renderer().lost
    if key not in lost:
        probed = [{**one, "content": probes.get(n, one.get("content"))} for n, one in enumerate(messages)]
        try:
            text = _render_template(tokenizer, probed, arguments)[0].casefold()
        except TemplateError:
            return  # reported where the conversation itself is rendered
        lost[key] = next((index for index, probe in probes.items() if probe not in text), None)
    if (index := lost[key]) is not None:
        raise UnreadError(
            f"the chat template leaves out message {index + 1} of {len(messages)}, which `{shape[index][0]}`"
            " says; give model.chat_template one that writes every message"
        )


_FIRST = ("system", "developer", "user")
"""Roles that begin a conversation."""


def _only_speaks(message: Mapping[str, object]) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and not message.get("tool_calls")


def _content_form(
    template: object, special: Mapping[str, str], role: str = "user"
) -> Literal["text", "parts"] | None:
    """Return how a chat template reads the text of a `role`: as text, or as a list of parts only, as
    templates of vision models do. `None` if it drops some of either. If it raises at both, use text.
    """
    if len(str(template)) > MOST_TEMPLATE:
        return "text"  # refused when it is rendered
    forms = _shared_renderer().forms
    source = template if isinstance(template, str) else repr(template)  # its hash is cached
    key = source, tuple(special.items()), role
    if key not in forms:
        forms[key] = _find_form(template, special, role)
    return forms[key]


def _find_form(template: object, special: Mapping[str, str], role: str) -> Literal["text", "parts"] | None:
    form: Literal["text", "parts"]
    fallback: Literal["text", "parts"] | None = "text"
    others = "text" if role == "user" else _content_form(template, special)
    for form in ("text", "parts"):
        parts = {one: kind == "parts" for one, kind in (("user", others), (role, form))}
        messages = [_with_parts(one) if parts.get(one["role"]) else one for one in _test_conversation(role)]
        request = {
            "template": template,
            "special": special,
            "messages": messages,
            "arguments": {"add_generation_prompt": role != "assistant"},
            "marked": False,
            "day": None,
        }
        try:
            text = _shared_renderer().render_request(request)[0].casefold()
        except TemplateError:
            continue
        if _PROBE in text and (form == "text" or "'type'" not in text):
            return form
        fallback = None
    return fallback


class _Renderer:
    """The rendering process, and templates that ended it. They are not tried again."""

    def __init__(self) -> None:
        self.process = LimitedProcess(__name__, MEMORY)
        self._endless: list[Any] = []
        self.forms: dict[tuple[Any, ...], Literal["text", "parts"] | None] = {}
        """Results of `_find_form` by template."""
        self.lost: dict[tuple[Any, ...], int | None] = {}
        """Index of the first message that a template leaves out, by template and form."""

    def render_request(self, request: Mapping[str, object]) -> tuple[str, list[tuple[int, int]]]:
        reply = (
            None if request["template"] in self._endless else self.process.request_answer(request, SECONDS)
        )
        if reply is None:
            self._endless.append(request["template"])
            raise TemplateError(_ENDLESS)
        with convert_decode_errors(
            lambda cause: TemplateError(f"the chat template's process answered with {cause}")
        ):
            answer = read_document(reply, LONGEST)
            text, error = answer.get("text"), safe_excerpt(answer.get("error"), 500)
            if not isinstance(text, str):
                raise TemplateError(f"the chat template raised {error}")
            return text, [(int(start), int(end)) for start, end in answer.get("marks", ())]


_shared: _Renderer | None = None
_making = threading.Lock()


def _shared_renderer() -> _Renderer:
    """Return this process's renderer. A forked process does not share pipes with its parent."""
    global _shared
    with _making:
        if _shared is None or _shared.process.owner != os.getpid():
            _shared = _Renderer()
        return _shared


_clock = SimpleNamespace(now=datetime.now)


def prepare() -> None:
    """Import the renderer; runs in the rendering process."""
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = _clock  # pyright: ignore[reportPrivateImportUsage]


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of a conversation and its marks; runs in the rendering process."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    day = request["day"]
    _clock.now = datetime.now if day is None else partial(datetime.fromisoformat, day)
    random.seed(None if day is None else 0)
    stand_in: Any = SimpleNamespace(chat_template=request["template"], special_tokens_map=request["special"])
    stand_in.get_chat_template = partial(PreTrainedTokenizerBase.get_chat_template, stand_in)
    if not request["marked"]:
        text = PreTrainedTokenizerBase.apply_chat_template(
            stand_in,  # pyright: ignore[reportArgumentType]
            request["messages"],
            tokenize=False,
            **request["arguments"],
        )
        return {"text": str(text), "marks": []}
    chosen = stand_in.get_chat_template(None, request["arguments"].get("tools"))
    conversation = [{k: v for k, v in m.items() if v is not None} for m in request["messages"]]
    texts, marks = chat_template_utils.render_jinja_template(
        conversations=[conversation],
        chat_template=chosen,
        return_assistant_tokens_mask=True,
        **{**request["special"], **request["arguments"]},
    )
    return {"text": str(texts[0]), "marks": list(marks[0])}
