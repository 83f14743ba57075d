"""Demonstrations: rows of a file, as tokens, with a mask of the assistant's tokens.

If the chat template marks answers (`{% generation %}`), its marks are used. Otherwise an answer is the text
that the template adds to the conversation before it. It starts at the end of the prompt at which the model
would begin, and stops at the end of the conversation with the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.data.file_kinds import SHOWN, THOUGHT, rename_hint
from opd.data.load import (
    check_messages,
    check_text,
    json_kind,
    locating_errors,
    refuse_beside_text,
    refuse_media,
    refuse_unshown,
    rows_of,
    said_in,
    template_arguments,
    with_system,
)
from opd.data.messages import WEIGHTS, refuse_learnt, trained_flags
from opd.errors import DataError, reason_of
from opd.models.chat_templates import (
    TemplateError,
    UnreadError,
    refuse_unread,
    render_marked,
    render_messages,
)
from opd.models.token_ids import encode_text
from opd.rollout.prompts import Prompt, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MEND = (
    "give model.chat_template one that marks answers with {% generation %}, or rows of one answer each"
    " (`prompt`, `completion`)"
)
_MEND_HEADER = (
    "give model.chat_template one that writes answers whole, thoughts too, or write `prompt` and `completion`"
    " as the texts that the model is to read and to write"
)


def _template_mismatch(index: int) -> str:
    return (
        f"the chat template writes message {index + 1} otherwise, or what is before it, once more follows, so"
        " what the assistant writes cannot be told"
    )


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A row. It has either `completion` or `messages`."""

    prompt: Prompt
    """The question: a text, or the messages before the first trained answer."""
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    """The full conversation."""
    unlearnt: Collection[int] = ()
    """Indices of answers after the prompt that are not trained."""


def read_demonstrations(source: str, domain: str | None) -> list[Demonstration]:
    """Return the rows of a .jsonl or .parquet file. If it has a column `domain`, only those of `domain`
    (`None`: all).

    Raises `DataError` naming file and line for a row without an answer or of another form, and for a file
    without any remaining row.
    """
    names: set[str] = set()
    rows = list(iter_demonstrations(source, domain, names))
    if not rows:
        others = f"; it has rows of {', '.join(sorted(names))}" if names else ""
        of_domain = "" if domain is None else f" of domain {domain}"
        raise DataError(f"{source} has no demonstrations{of_domain}{others}; add some, or leave out `sft`.")
    return rows


def iter_demonstrations(source: str, domain: str | None, names: set[str]) -> Iterator[Demonstration]:
    """Yield the rows; an empty file is no error. The names in the column `domain` are added to `names`."""
    for where, row in rows_of(Path(source), domain, names):
        yield _parse_row(where, row, domain or str(row.get("domain") or ""))


_TOKENS = ("assistant_masks", "assistant_mask", "completion_mask", "loss_mask", "labels", "input_ids")
"""Columns of other formats with a mask by token."""
_PARTS = (*SHOWN, *THOUGHT)
_OTHERS = {
    "segments": "write its parts as messages, with `train: false` where nothing is learnt",
    "chosen": "rename it to `completion` (or to `messages`, where it has the question too)",
    "instruction": "write `prompt` (with its `input` behind it) and `completion`",
    "text": "write `prompt` and `completion`, or messages: what is learnt has to be told from what is asked",
}
"""Columns of other formats that belong in `messages`, or `prompt` and `completion`."""


def _parse_row(where: str, row: dict[str, Any], domain: str) -> Demonstration:
    _refuse_other(where, row)
    column = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
    if column is not None:
        other = next((name for name in ("conversations", "completion") if row.get(name)), column)
        if other != column:
            raise DataError(
                f"{where}: it has `{column}` and `{other}`, of which one is learnt; leave one out."
            )
        messages = with_system(where, row, said_in(where, row[column], column))
        return _parse_conversation(where, row, domain, messages, None, column)
    question, answer = (said_in(where, row.get(name), name) for name in ("prompt", "completion"))
    if question is None or answer is None:
        empty = [name for name in ("prompt", "completion") if name in row and row[name] is None]
        if len(empty) == 1:
            raise DataError(f"{where}: `{empty[0]}` is null; mend the row, or remove it.")
        columns = ", ".join(row) or "none"
        hint = next((f"; of `{name}`: {mend}" for name, mend in _OTHERS.items() if row.get(name)), None)
        hint = rename_hint(row, "prompt", "completion") if hint is None else hint
        raise DataError(
            f"{where}: a demonstration has `messages`, or `prompt` and `completion` (columns:"
            f" {columns}){hint}."
        )
    question = with_system(where, row, question)
    if isinstance(question, str):
        return _of_texts(where, row, domain, question, answer)
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    for name, part in (("prompt", question), ("completion", messages)):
        check_messages(where, part, name)
    with locating_errors(where):
        refuse_learnt(question)
    return _parse_conversation(where, row, domain, [*question, *messages], len(question), "prompt")


def _refuse_other(where: str, row: dict[str, Any]) -> None:
    """Raise `DataError` for a row with columns that training here would ignore."""
    refuse_media(where, row)
    for column in _TOKENS:
        if isinstance(row.get(column), list):
            raise DataError(
                f"{where}: `{column}` speaks of tokens that others made, and here a row is text; leave the"
                " column out, and write `train: false` in messages of which nothing is learnt."
            )
    # A number in `loss` is a measurement.
    weights = {name: row[name] for name in WEIGHTS if row.get(name) is not None}
    zero = next(
        (name for name, value in weights.items() if value == 0 and (name != "loss" or value is False)), None
    )
    if zero is not None:
        raise DataError(f"{where}: its `{zero}` is 0, so that nothing of it is learnt; leave such rows out.")
    bad = row.get("label")
    if isinstance(bad, bool | int | float) and bad == 0:
        raise DataError(
            f"{where}: its `label` is {str(bad).lower()}, which says that its answer is a bad one, and all"
            " that stands in `sft` is learnt; leave such rows out, or write as a text what else it says."
        )


def _of_texts(where: str, row: dict[str, Any], domain: str, question: str, answer: object) -> Demonstration:
    if not isinstance(answer, str):
        raise DataError(
            f"{where}: `prompt` is a text and `completion` is {json_kind(answer)}; give two texts, or"
            " messages."
        )
    if not question:
        raise DataError(f"{where}: `prompt` is empty; there is nothing that is answered.")
    _refuse_empty(where, answer)
    for column, text in (("prompt", question), ("completion", answer)):
        check_text(where, text, column)
    refuse_beside_text(where, row)
    refuse_unshown(where, row, "prompt", f"{question}\n{answer}", _PARTS)
    return Demonstration(Prompt.from_content(question, None, domain, where=where), completion=answer)


def _parse_conversation(
    where: str, row: dict[str, Any], domain: str, raw_messages: Any, prompt_count: int | None, column: str
) -> Demonstration:
    """Build a demonstration from messages. The first `prompt_count` are the prompt, for `None` all before the
    first trained answer.
    """
    messages = check_messages(where, raw_messages, column)
    with locating_errors(where, column):
        counts = trained_flags(raw_messages)
    answers = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    if not answers or (prompt_count is None and not answers[0]):
        wrong = "begin with the assistant's" if answers else "have no message of the assistant's"
        raise DataError(f"{where}: `{column}` {wrong}; they need a question and its answer.")
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: the last message is of role {messages[-1]['role']!r}, and demonstrations end with what"
            " the assistant answers; cut the rest off, or leave the row out."
        )
    learns = [index for index in answers if counts[index] and index >= (prompt_count or 0)]
    if not learns:
        raise DataError(f"{where}: no answer in it is learnt, by their weights; leave the row out.")
    for index in learns:
        if messages[index].keys() <= {"role", "content"}:
            _refuse_empty(where, messages[index]["content"])
    refuse_unshown(where, row, column, messages, _PARTS)
    first = prompt_count or learns[0]
    arguments = template_arguments(where, row)
    prompt = Prompt.from_content(messages[:first], None, domain, where=where, arguments=arguments)
    unlearnt = [index for index in answers if index >= first and index not in learns]
    return Demonstration(prompt, messages=messages, unlearnt=unlearnt)


def _refuse_empty(where: str, answer: object) -> None:
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise DataError(f"{where}: the completion is empty, and nothing can be learnt of it; remove the row.")


@dataclass(frozen=True, slots=True)
class EncodedDemonstration:
    """A demonstration as tokens: the prompt `[C]` int32, the rest up to the last trained token `[R]` int32,
    and the mask of trained tokens `[R]` bool.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class DemonstrationEncoder:
    """Encodes rows as tokens.

    Args:
        tokenizer: The student's.
        template: Arguments of the chat template.
        stops: End ids of responses. After the last of them in an answer only text is trained.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Mapping[str, Any]
    stops: Collection[int]

    def encode(self, row: Demonstration) -> EncodedDemonstration:
        """Encode `row`. Raises `DataError` naming it if its tokens, or the assistant's, are undetermined."""
        if row.completion is not None:
            return self._encode_texts(row.prompt, row.completion)
        try:
            text, answers = self._answer_spans(row)
        except UnreadError as error:
            raise DataError(f"{row.prompt.where}: {error}.") from None
        except TemplateError as error:
            raise DataError(f"{row.prompt.where}: {error}; mend the row, or the chat template.") from None
        where = row.prompt.where
        # Each part continues the text before it, and the prompt is encoded as when the model answers it.
        ids: list[int] = []
        mask: list[bool] = []
        position = 0
        for start, end in answers:
            for stop, counts in ((start, False), (end, True)):
                prefix_ids = self._encode_ids(text[:stop], where)
                new = (
                    prefix_ids[len(ids) :]
                    if prefix_ids[: len(ids)] == ids
                    else self._encode_ids(text[position:stop], where)
                )
                ids += new
                mask += [True] * self._generated_count(new) if counts else []
                mask += [False] * (len(ids) - len(mask))
                position = stop
        prompt_length = mask.index(True) if True in mask else 0
        if not prompt_length:
            raise DataError(f"{where}: the chat template leaves no question or no answer of it; remove it.")
        length = len(mask) - mask[::-1].index(True)
        return _make_encoded(ids[:prompt_length], ids[prompt_length:length], mask[prompt_length:length])

    def _encode_texts(self, prompt: Prompt, completion: str) -> EncodedDemonstration:
        prompt_ids = encode_prompt(prompt, self.tokenizer).tolist()
        eos: Any = self.tokenizer.eos_token_id  # one number, though its annotation allows more
        if eos is None:
            raise DataError(
                f"{prompt.where}: the tokenizer has no end-of-sequence token for `completion` to end with;"
                " set its eos_token, or give messages."
            )
        all_ids = self._encode_ids(f"{prompt.text}{completion}", prompt.where, framed=True)
        # If the texts share a token, the answer is the text that the model would generate after the prompt.
        answer_ids = (
            all_ids[len(prompt_ids) :]
            if all_ids[: len(prompt_ids)] == prompt_ids
            else self._encode_ids(completion, prompt.where)
        )
        if answer_ids[-1:] != [eos]:
            answer_ids.append(eos)
        return _make_encoded(prompt_ids, answer_ids, [True] * len(answer_ids))

    def _answer_spans(self, row: Demonstration) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation and the ranges of its answers."""
        messages, where = row.messages or [], row.prompt.where
        arguments = {**self.template, **row.prompt.arguments}
        refuse_unread(self.tokenizer, messages, arguments, row.prompt.arguments)
        first = len(row.prompt.messages or [])
        if not _MARKED.search(str(self.tokenizer.chat_template)):
            text = render_messages(self.tokenizer, messages, arguments)
            places = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
            spans = [
                self._answer_span(row, index, text, arguments)
                for index in places
                if index not in row.unlearnt
            ]
        else:
            text, spans = render_marked(self.tokenizer, messages, arguments)
            if any(message["role"] == "assistant" for message in messages[:first]):  # these do not count
                first_character = len(render_messages(self.tokenizer, messages[:first], arguments))
                spans = [(start, end) for start, end in spans if start >= first_character]
            for index in row.unlearnt:
                before, after = (
                    render_messages(self.tokenizer, messages[:n], arguments) for n in (index, index + 1)
                )
                if not (text.startswith(after) and after.startswith(before)):
                    raise DataError(f"{where}: {_template_mismatch(index)}; {_MEND}.")
                start, end = len(before), len(after)
                spans = [mark for mark in spans if not start <= mark[0] < end]
        if not spans:
            raise DataError(f"{where}: the chat template marks no answer in it with generation.")
        if "</think>" in messages[-1]["content"] and "</think>" not in text[spans[-1][0] :]:
            raise DataError(
                f"{where}: the chat template leaves out what the last answer has up to </think>, so that it"
                f" would be learnt without its thoughts; {_MEND_HEADER}."
            )
        return text, spans

    def _answer_span(
        self, row: Demonstration, index: int, text: str, arguments: Mapping[str, object]
    ) -> tuple[int, int]:
        """The range in `text` of the answer at `index`, from the position where the model would begin it."""
        messages, where = row.messages or [], row.prompt.where
        before = render_messages(self.tokenizer, messages[:index], arguments, answer=True)
        last = index == len(messages) - 1
        after = text if last else render_messages(self.tokenizer, messages[: index + 1], arguments)
        if text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        plain = render_messages(self.tokenizer, messages[:index], arguments)
        if after.startswith(plain) and before.startswith(plain):  # the text before it is unchanged
            same = next(
                (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after)
            )
            if same < len(before):
                raise DataError(
                    f"{where}: the chat template writes {before[same:][:80]!r} where the model is to answer,"
                    " and leaves that out of an answer that it is given, so that another text would be learnt"
                    f" than is asked for; {_MEND_HEADER}."
                )
        raise DataError(f"{where}: {_template_mismatch(index)}; {_MEND}.")

    def _generated_count(self, ids: list[int]) -> int:
        """Return how many of an answer's tokens the model generates. Tokens after the end id do not count."""
        ends = [index for index, token in enumerate(ids) if token in self.stops]
        if not ends or str(self.tokenizer.decode(ids[ends[-1] + 1 :])).strip():
            return len(ids)
        return ends[-1] + 1

    def _encode_ids(self, text: str, where: str, *, framed: bool = False) -> list[int]:
        try:
            if framed:
                return encode_text(self.tokenizer, text)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # tokenizers raise plain Exceptions of many kinds
            raise DataError(
                f"{where}: the tokenizer cannot encode {text[-80:]!r} ({reason_of(error)})."
            ) from error


def _make_encoded(prompt: Sequence[int], answer: Sequence[int], mask: Sequence[bool]) -> EncodedDemonstration:
    prompt_ids, response_ids = (np.array(part, dtype=np.int32) for part in (prompt, answer))
    return EncodedDemonstration(prompt_ids, response_ids, np.array(mask, dtype=bool))


_ANSWER = "zebra"
"""An answer in a probe conversation, to find the text before it."""


def missing_header(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, object]) -> str | None:
    """Return the text that the chat template writes before an answer but not at the end of a prompt, so that
    the model would have to generate it, such as the header of a template without a generation prompt. `None`
    if there is none.
    """
    question = [{"role": "user", "content": "?"}]
    try:
        plain = render_messages(tokenizer, question, template)
        prompt = render_messages(tokenizer, question, template, answer=True)
        conversation = render_messages(
            tokenizer, [*question, {"role": "assistant", "content": _ANSWER}], template
        )
    except TemplateError:  # conversations that cannot be rendered are reported elsewhere
        return None
    if prompt != plain or not conversation.startswith(prompt):
        return None
    return conversation[len(prompt) :].partition(_ANSWER)[0].strip() or None


@dataclass(slots=True)
class SizedDemonstrations:
    """Demonstrations within a length limit, and the locations of longer ones."""

    rows: list[tuple[Demonstration, EncodedDemonstration]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Locations of dropped rows."""
    cut: list[str] = field(default_factory=list)
    """Locations of truncated rows."""

    def describe_dropped(self, limit: int, why: str) -> str:
        """Describe the rows that were too long and their fate; empty if there are none."""
        total, parts = len(self.rows) + len(self.dropped), []
        for places, done in ((self.dropped, "left out"), (self.cut, "cut at their end")):
            if places:
                remainder = f" and {len(places) - 3} more" if len(places) > 3 else ""
                parts.append(f"{len(places)} of {total} {done} ({', '.join(places[:3])}{remainder})")
        return f"of demonstrations longer than {limit} tokens ({why}) {'; '.join(parts)}" if parts else ""


def limit_lengths(
    rows: Sequence[Demonstration], encoder: DemonstrationEncoder, limit: int, policy: str, why: str
) -> SizedDemonstrations:
    """Encode `rows` as at most `limit` tokens. Raises `DataError` for a row that cannot be encoded, and for a
    longer one if `policy` is `error`.
    """
    sized = SizedDemonstrations()
    for row in rows:
        where, encoded = row.prompt.where, encoder.encode(row)
        if len(encoded) <= limit:
            sized.rows.append((row, encoded))
            continue
        if policy == "error":
            raise DataError(
                f"{where}: it has {len(encoded)} tokens, more than {limit} ({why}); shorten it, raise"
                " max_length, or set too_long to drop or truncate."
            )
        count = max(0, limit - len(encoded.prompt_ids))
        short = replace(encoded, response_ids=encoded.response_ids[:count], mask=encoded.mask[:count])
        if policy == "drop" or not short.mask.any():
            sized.dropped.append(where)
        else:
            sized.cut.append(where)
            sized.rows.append((row, short))
    return sized
