"""Prompts, their domains, and an endless, shuffled, resumable sequence over them.

Hashes and randomness are stable: the same on every machine, in every process. Prompts that leave too few
tokens for their response are found before generation, and handled by policy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from opd.config.teachers import FROM_GROUP, TeacherPromptConfig, template_columns
from opd.errors import DataError, is_of_library, reason_of
from opd.models.chat_templates import UnreadError, refuse_unread, render_messages
from opd.models.token_ids import HeldTexts, encode_prompt_text, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def content_key(content: object) -> str:
    """Return 16 hexadecimal digits that identify JSON-able `content`. Equal content gives equal keys."""
    text = _CANONICAL.encode(content)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def hash_fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on `text` alone and is uniform over different texts."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def raw_stream(*parts: int | str) -> np.random.Philox:
    """Return a Philox bit generator keyed by `parts`.

    Use its `random_raw`: unlike the methods of `numpy.random.Generator`, NumPy never changes its results.
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "big"))


def keyed_permutation(length: int, *parts: int | str) -> np.ndarray:
    """[length] int64: a permutation of `0 ... length - 1` keyed by `parts`."""
    return np.argsort(raw_stream(*parts).random_raw(length), kind="stable")


def plain_label(label: object) -> Any:
    """Return `label` as its column meant it, whatever a table or a library made of it. Whole floats become
    integers, because a column of numbers with a gap is one of floats. Decimals and NumPy's numbers become
    numbers, UTF-8 bytes become text, and NaN becomes None.
    """
    if isinstance(label, np.generic | np.ndarray):
        label = label.tolist()
    if isinstance(label, Decimal):
        integral = label.is_finite() and label.adjusted() < _DIGITS and label == label.to_integral_value()
        return int(label) if integral else plain_label(float(label))
    if isinstance(label, float):
        if math.isnan(label):
            return None
        return int(label) if label.is_integer() and abs(label) < _EXACT else label
    if isinstance(label, bytes):
        try:
            return label.decode()
        except UnicodeDecodeError:
            return label
    if isinstance(label, list | tuple):
        return [plain_label(one) for one in label]
    return label


_EXACT, _DIGITS = 2.0**53, 100
"""Below the first, floats hold every whole number. Most digits of a decimal label."""

Checker = Callable[[str, Any], float]
"""`checker(completion, label) -> reward`. The completion comes without its end-of-sequence token."""

Demonstrator = Callable[[str, np.random.Generator, float, float], str]
"""`demonstrate(prompt_text, rng, right, wrong_rule) -> completion`, without an end-of-sequence token. It is
right with probability `right`, follows the domain's one wrong rule with `wrong_rule`, else is corrupted at
random."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the student. Exactly one of `text` and `messages` is given."""

    text: str | None
    messages: list[dict[str, Any]] | None
    """Chat messages, `[{"role": "user", "content": "..."}]`, for the tokenizer's chat template."""
    label: Any
    """Reference for the reward function. JSON-able."""
    domain: str
    key: str
    """Hash of the text or messages alone. Equal prompts have equal keys in every domain, file and run."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Other columns of its source, also `messages` if it has them."""
    where: str = field(default="", compare=False)
    """`FILE:LINE`, or empty for a generated prompt."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Its further arguments of the chat template: `tools`, and the template's own. They are part of `key`."""

    @classmethod
    def from_content(
        cls,
        content: str | list[dict[str, Any]],
        label: object,
        domain: str,
        metadata: dict[str, Any] | None = None,
        where: str = "",
        arguments: dict[str, Any] | None = None,
    ) -> Prompt:
        """Make a prompt of text or of messages, with its key and its `plain_label`."""
        metadata, arguments, label = dict(metadata or {}), arguments or {}, plain_label(label)
        key = content_key([content, arguments] if arguments else content)
        if isinstance(content, str):
            return cls(content, None, label, domain, key, metadata, where, arguments)
        return cls(None, content, label, domain, key, metadata | {"messages": content}, where, arguments)


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain of a recipe, loaded."""

    name: str
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """For evaluation only. Shares no prompt with `train`, whatever the seed."""
    checker: Checker | None = None
    """`None` if only a reward function of the recipe can score answers."""
    demonstrations: Demonstrator | None = None
    """Answers of mixed quality to warm a new model up on, if the domain can generate them."""
    alphabet: str = ""
    """Characters of its prompts and answers, for a character tokenizer. Empty for text domains."""
    tags: list[str] = field(default_factory=list)
    """Character sequences that are one token each."""


Item = TypeVar("Item")


class PromptCursor(Generic[Item]):
    """Every epoch is a fresh permutation. Prompt (or demonstration) number `i` is a function of (seed, name,
    i) and the prompts alone. So a resumed run needs only the number of prompts taken.
    """

    def __init__(self, prompts: Sequence[Item], seed: int, name: str) -> None:
        """Raises `DataError` if there are no prompts."""
        if not prompts:
            raise DataError(f"domain {name} has no training prompts; check its source and its filters.")
        self._prompts = prompts
        self._seed = seed
        self._name = name
        self._order = -1, np.zeros(0, dtype=np.int64)
        """An epoch and its order. Another thread may replace both."""

    def renamed(self, name: str) -> PromptCursor[Item]:
        """Return a cursor over the same prompts in another order."""
        return PromptCursor(self._prompts, self._seed, name)

    def next_prompts(self, start: int, n: int) -> list[Item]:
        """Return prompts number `start ... start + n - 1`."""
        if start < 0 or n < 0:
            raise ValueError(f"start {start} and n {n} must not be negative")
        items = []
        order_epoch, order = self._order
        for number in range(start, start + n):
            epoch, index = divmod(number, len(self._prompts))
            if epoch != order_epoch:
                order = keyed_permutation(len(self._prompts), self._seed, self._name, epoch)
                order_epoch = epoch
                self._order = epoch, order
            items.append(self._prompts[int(order[index])])
        return items


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, object] | None = None,
    held: HeldTexts | None = None,
) -> np.ndarray:
    """[C] int32. Messages go through the tokenizer's chat template, up to the start of the assistant's turn.
    Text stays as it is, after the special tokens (such as a BOS) that the tokenizer itself puts before text
    that has none. None follow it.

    `template`: arguments of the chat template's own. `held`: texts of others in the prompt.

    Raises `DataError` naming the prompt if the tokenizer has no chat template for messages or cannot encode
    the text, for example a character that a character tokenizer does not have.
    """
    try:
        text = prompt.text or ""
        if prompt.messages is not None:
            arguments = {**(template or {}), **prompt.arguments}
            refuse_unread(tokenizer, prompt.messages, arguments, prompt.arguments)
            text = render_messages(tokenizer, prompt.messages, arguments, answer=True)
        ids = encode_prompt_text(tokenizer, text, held, rendered=prompt.messages is not None)
    except UnreadError as error:
        raise DataError(f"{prompt.where or f'domain {prompt.domain}'}: {error}.") from None
    except BaseException as error:  # tokenizers raise plain Exceptions of many kinds
        if not is_of_library(error):
            raise
        shown = repr(prompt.text if prompt.text is not None else prompt.messages)
        where = prompt.where or f"domain {prompt.domain}"
        if "TemplateSyntaxError" in reason_of(error):
            raise DataError(
                f"{where}: the chat template is no template that Jinja reads ({reason_of(error)}); mend"
                " model.chat_template, or the tokenizer's own where the recipe gives none."
            ) from error
        raise DataError(
            f"{where}: the tokenizer cannot encode the prompt {shown[:80]} ({reason_of(error)}); give another"
            " model.tokenizer or model.chat_template, or mend the prompt."
        ) from error
    return np.array(ids, dtype=np.int32)


def teacher_prompt(
    prompt: Prompt, config: TeacherPromptConfig, texts: Mapping[str, str] | None = None
) -> Prompt:
    """Return the prompt that teachers read in place of `prompt`. `texts` fills what the template names of
    `FROM_GROUP`, which is empty by default.

    Raises `DataError` naming the prompt if it lacks a column of the template, has one that a step fills, or
    has no text to put in, or if a column holds what JSON cannot.
    """
    from_group = {name: (texts or {}).get(name, "") for name in config.group_columns}
    where = f"{prompt.where or f'domain {prompt.domain}'}: teacher_prompt"

    def fill(template: str, content: str) -> str:
        if taken := sorted(from_group.keys() & prompt.metadata.keys()):
            raise DataError(
                f"{where} names {{{taken[0]}}}, which is of the step's answers and a column of the data, too;"
                " rename the column."
            )
        columns = {**prompt.metadata, "label": prompt.label, "prompt": content, **from_group}
        parts = []
        for text, column in template_columns(template):
            value = "" if column is None else plain_label(columns.get(column))
            if value is None:
                has = [name for name, one in columns.items() if plain_label(one) is not None]
                answers = ", ".join(name for name in FROM_GROUP if name not in columns)
                raise DataError(
                    f"{where} names {{{column}}}, which this prompt lacks; it has {', '.join(sorted(has))},"
                    f" and a step's answers have {answers}."
                )
            try:
                parts += [text, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
                if column not in from_group:
                    parts[-1].encode()
            except (TypeError, UnicodeEncodeError) as error:
                raise DataError(
                    f"{where} names {{{column}}}, whose value no text stands for ({error}); make that column"
                    " one of text."
                ) from None
        return "".join(parts)

    if prompt.messages is None:
        if config.system is not None:
            raise DataError(f"{where}.system needs prompts of messages, not of text; give user alone.")
        return replace(prompt, text=fill(config.user, prompt.text or ""))
    messages = [dict(message) for message in prompt.messages]
    last = next((one for one in reversed(messages) if one.get("role") == "user"), None)
    if last is None or not isinstance(last.get("content"), str):
        raise DataError(f"{where} needs a message of the user whose content is text; this prompt has none.")
    content = last["content"]
    last["content"] = fill(config.user, content)
    if config.system is not None:
        rest = messages[1:] if messages[0].get("role") == "system" else messages
        messages = [{"role": "system", "content": fill(config.system, content)}, *rest]
    return replace(prompt, messages=messages)


def fit_domain(
    domain: Domain, budget: TokenBudget, policy: LongPrompts, encode: Encode, read: TeacherPromptConfig | None
) -> tuple[Domain, list[str]]:
    """Return `domain` with the prompts that fit, for the student and as teachers `read` them, and a sentence
    for each kind that was too long. Raises as `fit_prompts` and `teacher_prompt` do.
    """
    fitted, notes = fit_prompts(domain, budget, policy, encode), []
    if fitted.long:
        notes.append(fitted.describe_long(budget, policy))
    for one in read.alternatives() if read is not None and fitted.domain.train else ():
        fitted = fit_teacher_prompts(fitted.domain, one, budget, policy, encode)
        if fitted.long:
            notes.append(f"as teachers read them, {fitted.describe_long(budget, policy)}")
    return fitted.domain, notes


def fit_teacher_prompts(
    domain: Domain, config: TeacherPromptConfig, budget: TokenBudget, policy: LongPrompts, encode: Encode
) -> FittedDomain:
    """Return `domain` without the prompts whose teacher's prompt is longer than `budget`, or with all if
    `policy` is `truncate`. Raises as `fit_prompts` does, and as `teacher_prompt` for any prompt.
    """
    piles = (domain.train, domain.held_out)
    train, held_out = ([teacher_prompt(prompt, config) for prompt in pile] for pile in piles)
    try:
        fitted = fit_prompts(replace(domain, train=train, held_out=held_out), budget, policy, encode)
    except DataError as error:
        raise DataError(f"as teachers read them, {error}") from error
    long = {id(prompt) for prompt in fitted.long}
    pairs = [*zip(domain.train, train, strict=True), *zip(domain.held_out, held_out, strict=True)]
    asked = [prompt for prompt, read in pairs if id(read) in long]
    gone = set() if policy == "truncate" else {id(prompt) for prompt in asked}
    left = ([prompt for prompt in pile if id(prompt) not in gone] for pile in piles)
    return FittedDomain(replace(domain, train=next(left), held_out=next(left)), asked)


_AT_ONCE = 1024
"""Texts in one call of the tokenizer. Its result takes a hundred times their memory."""


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> list[np.ndarray]:
    """Encode each prompt as `encode_prompt` does, with texts in few calls of the tokenizer. Raises the error
    of the first prompt that cannot be encoded.
    """
    encoded: list[np.ndarray] = []
    for start in range(0, len(prompts), _AT_ONCE):
        part = prompts[start : start + _AT_ONCE]
        texts = [prompt.text or "" for prompt in part if prompt.messages is None]
        try:
            ids = iter(encode_texts(tokenizer, texts))
        except BaseException as error:
            if not is_of_library(error):
                raise
            return [encode_prompt(prompt, tokenizer, template) for prompt in prompts]  # names the prompt
        for prompt in part:
            if prompt.messages is None:
                encoded.append(np.array(next(ids), dtype=np.int32))
            else:
                encoded.append(encode_prompt(prompt, tokenizer, template))
    return encoded


def encode_taught(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, object], source: str
) -> list[np.ndarray]:
    """Encode prompts for a teacher whose own tokenizer is that of the folder `source`. Raises the error of
    the first prompt that cannot be encoded.
    """
    try:
        return encode_prompts(prompts, tokenizer, template)
    except DataError as error:  # it names fields of the recipe that are the student's
        said = str(error).replace("another model.tokenizer or model.chat_template", "the teacher another one")
        said = said.replace(", or the tokenizer's own where the recipe gives none", "")
        said = said.replace("model.chat_template", f"the tokenizer in {source}")
        raise DataError(f"as a teacher with the tokenizer in {source} reads it, {said}") from error


Encode = Callable[[Sequence[Prompt]], list[np.ndarray]]
LongPrompts = Literal["drop", "truncate", "error"]
_SLACK = 8
"""Tokens a tokenizer may put before text on its own."""
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Most tokens a prompt may have."""

    tokens: int
    why: str
    """Reason of the limit, as words of a sentence."""


@dataclass(frozen=True, slots=True)
class FittedDomain:
    """A domain whose prompts leave enough tokens for their responses."""

    domain: Domain
    long: list[Prompt] = field(default_factory=list)
    """The prompts that were too long, in their order."""

    def describe_long(self, budget: TokenBudget, policy: LongPrompts) -> str:
        """Describe the prompts that were too long, their places, and their handling."""
        one = len(self.long) == 1
        done = f"{'its' if one else 'their'} beginning is cut off"
        if policy != "truncate":
            done = "it is left out" if one else "they are left out"
        longer = f"{self.count_phrase()} longer than the {budget.tokens} tokens that {budget.why}"
        return f"{longer}: {done} ({self.list_locations()})"

    def count_phrase(self) -> str:
        """`3 of 400 prompts are`."""
        prompts = {id(prompt) for prompt in (*self.domain.train, *self.domain.held_out)}
        removed = sum(id(prompt) not in prompts for prompt in self.long)
        total = len(self.domain.train) + len(self.domain.held_out) + removed
        return f"{len(self.long)} of {total} prompts {'is' if len(self.long) == 1 else 'are'}"

    def list_locations(self) -> str:
        """Places of the first of them."""
        shown = ", ".join(prompt.where or f"prompt {prompt.key[:12]}" for prompt in self.long[:_SHOWN])
        return f"{shown} and {len(self.long) - _SHOWN} more" if len(self.long) > _SHOWN else shown


def fit_prompts(domain: Domain, budget: TokenBudget, policy: LongPrompts, encode: Encode) -> FittedDomain:
    """Return `domain` without the prompts longer than `budget`, or with all if `policy` is `truncate`.

    Raises `DataError` naming file and line if `policy` is `error` and a prompt is longer, or if no prompt is
    left to train or to evaluate on.
    """
    piles = (domain.train, domain.held_out)
    long = [prompt for pile in piles for prompt in _too_long(pile, budget.tokens, encode)]
    if not long or policy == "truncate":
        return FittedDomain(domain, long)
    removed = {id(prompt) for prompt in long}
    train, held_out = ([prompt for prompt in pile if id(prompt) not in removed] for pile in piles)
    fitted = FittedDomain(replace(domain, train=train, held_out=held_out), long)
    emptied = "training" if domain.train and not train else ""
    emptied = emptied or ("held-out" if domain.held_out and not held_out else "")
    if policy == "error" or emptied:
        missing = "" if policy == "error" else f", so no {emptied} prompt is left"
        raise DataError(
            f"domain {domain.name}: {fitted.count_phrase()} longer than the {budget.tokens} tokens that"
            f" {budget.why}{missing} ({fitted.list_locations()}); shorten them, raise the limit, or set"
            f" domains.{domain.name}.long_prompts to truncate."
        )
    return fitted


def truncate_prompt(ids: np.ndarray, limit: int, bos: int | None) -> np.ndarray:
    """[C]: the last `limit` of `ids`, where the question is, and the very first if it is `bos`."""
    if len(ids) <= limit:
        return ids
    if limit > 1 and ids[0] == bos:
        return np.concatenate([ids[:1], ids[len(ids) - limit + 1 :]])
    return ids[len(ids) - limit :]


def _too_long(prompts: Sequence[Prompt], limit: int, encode: Encode) -> Iterator[Prompt]:
    """Yield the prompts of more than `limit` tokens."""
    # A token holds at least a byte of text, so most prompts need not be encoded to know that they fit.
    frame: int | None = None
    unsure: list[Prompt] = []
    for prompt in prompts:
        if prompt.text is not None and len(prompt.text.encode()) + _SLACK <= limit:
            continue
        size = _content_bytes(prompt)
        if size is not None and prompt.messages is not None:
            if frame is None:  # a full prompt is longer than the template's text around one message
                frame = len(encode([prompt])[0]) + _SLACK
            if size + frame * (len(prompt.messages) + 1) <= limit:
                continue
        unsure.append(prompt)
    for start in range(0, len(unsure), _AT_ONCE):
        part = unsure[start : start + _AT_ONCE]
        yield from (prompt for prompt, ids in zip(part, encode(part), strict=True) if len(ids) > limit)


def _content_bytes(prompt: Prompt) -> int | None:
    """Bytes of the messages' contents. `None` if a message, or the prompt, has any other field."""
    if prompt.arguments:
        return None
    sizes = []
    for message in prompt.messages or []:
        if message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            return None
        sizes.append(len(message["content"].encode()) + len(message["role"]))
    return sum(sizes)
