"""From a recipe's domain to prompts, and from a prompt to token ids.

Prompts that leave no room for their response: found before anything is written, dealt with by choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.config.data import DomainConfig
from opd.data.files import load_file
from opd.data.procedural import load_procedural
from opd.data.prompts import Domain, Prompt
from opd.data.reasoning_gym_source import load_reasoning_gym
from opd.errors import DataError
from opd.models.chat_templates import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SOURCES = {"procedural": load_procedural, "reasoning-gym": load_reasoning_gym}


def load_domain(name: str, config: DomainConfig, *, seed: int, held_out_prompts: int) -> Domain:
    """The prompts of `config.source`, split into training and held-out.

    Generated sources give exactly the numbers asked for; a file gives at most `held_out_prompts` held-out
    prompts. The same arguments give the same prompts in the same order. Raises `DataError` if the source is
    unknown, unreadable, malformed or empty, and `MissingExtraError` if it needs an optional package.
    """
    kind, separator, argument = config.source.partition(":")
    if separator and kind in _SOURCES:
        return _SOURCES[kind](argument, name, config, seed=seed, held_out_prompts=held_out_prompts)
    if config.source.endswith((".jsonl", ".parquet")):
        return load_file(name, config, held_out_prompts=held_out_prompts)
    raise DataError(
        f"domains.{name}.source {config.source!r} is unknown; give procedural:NAME, reasoning-gym:NAME, or a "
        "path ending in .jsonl or .parquet."
    )


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> np.ndarray:
    """[C] int32: messages through the tokenizer's chat template, up to where the assistant begins; text as it
    is, with the special tokens (such as a BOS) the tokenizer itself puts before text. `template`: arguments
    of the chat template's own.

    Raises `DataError` naming the prompt if the tokenizer has no chat template for messages or cannot encode
    the text, for example a character that a character tokenizer does not have.
    """
    try:
        if prompt.messages is None:
            ids = tokenizer(prompt.text or "")["input_ids"]
        else:
            text = render(tokenizer, prompt.messages, template or {}, answer=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # tokenizers raise plain Exceptions of many kinds
        shown = repr(prompt.text if prompt.text is not None else prompt.messages)
        raise DataError(
            f"domain {prompt.domain}: the tokenizer cannot encode the prompt {shown[:80]} "
            f"({' '.join(str(error).split())}); give another model.tokenizer or model.chat_template, or mend "
            "the prompt."
        ) from error
    return np.array(ids, dtype=np.int32)


Encode = Callable[[Prompt], np.ndarray]
LongPrompts = Literal["drop", "truncate", "error"]
_SLACK = 8
"""Tokens a tokenizer may put before text on its own."""
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens a prompt may have."""

    tokens: int
    why: str
    """What leaves so many: words for a sentence."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A domain whose prompts have room for their responses."""

    domain: Domain
    long: list[Prompt] = field(default_factory=list)
    """The prompts that were too long, in their order."""

    def sentence(self, room: Room, policy: LongPrompts) -> str:
        """What was too long, where it stands, and what became of it."""
        one = len(self.long) == 1
        done = f"{'its' if one else 'their'} beginning is cut off"
        if policy != "truncate":
            done = "it is left out" if one else "they are left out"
        return (
            f"{self.count()} longer than the {room.tokens} tokens that {room.why}: {done} ({self.places()})"
        )

    def count(self) -> str:
        """`3 of 400 prompts are`."""
        left = len(self.domain.train) + len(self.domain.held_out)
        known = {id(prompt) for prompt in (*self.domain.train, *self.domain.held_out)}
        total = left + sum(id(prompt) not in known for prompt in self.long)
        return f"{len(self.long)} of {total} prompts {'is' if len(self.long) == 1 else 'are'}"

    def places(self) -> str:
        """Where the first of them stand."""
        shown = ", ".join(prompt.where or f"prompt {prompt.key[:12]}" for prompt in self.long[:_SHOWN])
        return f"{shown} and {len(self.long) - _SHOWN} more" if len(self.long) > _SHOWN else shown


def fit(domain: Domain, room: Room, policy: LongPrompts, encode: Encode) -> Fitted:
    """`domain` with those of its prompts that have at most `room` tokens, or all of them to be `truncated`.

    Raises `DataError` naming file and line where `policy` is `error` and one is longer, and where nothing is
    left to train or to evaluate on.
    """
    piles = (domain.train, domain.held_out)
    long = [prompt for pile in piles for prompt in _too_long(pile, room.tokens, encode)]
    if not long or policy == "truncate":
        return Fitted(domain, long)
    gone = {id(prompt) for prompt in long}
    train, held_out = ([prompt for prompt in pile if id(prompt) not in gone] for pile in piles)
    fitted = Fitted(replace(domain, train=train, held_out=held_out), long)
    if policy == "error" or not train or not held_out:
        missing = "" if policy == "error" else f", so no {'held-out' if train else 'training'} prompt is left"
        raise DataError(
            f"domain {domain.name}: {fitted.count()} longer than the {room.tokens} tokens that"
            f" {room.why}{missing} ({fitted.places()}); shorten them, raise the limit, or set"
            f" domains.{domain.name}.long_prompts to truncate."
        )
    return fitted


def truncated(ids: np.ndarray, room: int, bos: int | None) -> np.ndarray:
    """[C] the last `room` of `ids`, where the question stands, and the very first if that is `bos`."""
    if len(ids) <= room:
        return ids
    if room > 1 and ids[0] == bos:
        return np.concatenate([ids[:1], ids[len(ids) - room + 1 :]])
    return ids[len(ids) - room :]


def _too_long(prompts: Sequence[Prompt], room: int, encode: Encode) -> Iterator[Prompt]:
    # A token holds a byte of text or more: most prompts need not be encoded to know that they fit.
    frame: int | None = None
    for prompt in prompts:
        if prompt.text is not None and len(prompt.text.encode()) + _SLACK <= room:
            continue
        size = _content_bytes(prompt)
        if size is not None and prompt.messages is not None:
            if frame is None:  # a whole prompt, which is more than a chat template writes around a message
                frame = len(encode(prompt)) + _SLACK
            if size + frame * (len(prompt.messages) + 1) <= room:
                continue
        if len(encode(prompt)) > room:
            yield prompt


def _content_bytes(prompt: Prompt) -> int | None:
    """Bytes of the messages' contents; `None` where a message holds anything else."""
    sizes = []
    for message in prompt.messages or []:
        if message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            return None
        sizes.append(len(message["content"].encode()) + len(message["role"]))
    return sum(sizes)
