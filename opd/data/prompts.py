"""A prompt, and a domain: prompts with a way to tell right answers from wrong ones.

An endless, shuffled, resumable sequence over a domain's training prompts.

Stable hashes and counter-based randomness: the same on every machine, in every process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.errors import DataError


def content_key(content: Any) -> str:
    """16 hexadecimal digits that identify JSON-able `content`; equal content gives equal keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def fraction(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone and is uniform over different texts."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def raw_stream(*parts: int | str) -> np.random.Philox:
    """A Philox bit generator keyed by `parts`.

    Use its `random_raw`: unlike the methods of `numpy.random.Generator`, NumPy never changes what it gives.
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "big"))


def permutation(length: int, *parts: int | str) -> np.ndarray:
    """[length] int64: a permutation of `0 ... length - 1` keyed by `parts`."""
    return np.argsort(raw_stream(*parts).random_raw(length), kind="stable")


Checker = Callable[[str, Any], float]
"""`checker(completion, label) -> reward`; the completion comes without its end-of-sequence token."""

Demonstrator = Callable[[str, np.random.Generator, float, float], str]
"""`demonstrate(prompt_text, rng, right, wrong_rule) -> completion`, without an end-of-sequence token: right
with probability `right`, by the domain's one wrong rule with `wrong_rule`, else corrupted at random."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the student answers. Exactly one of `text` and `messages` is given."""

    text: str | None
    messages: list[dict[str, Any]] | None
    """Chat messages, `[{"role": "user", "content": "..."}]`, for the tokenizer's chat template."""
    label: Any
    """What the reward function compares with; JSON-able."""
    domain: str
    key: str
    """Hash of the text or messages alone: equal prompts have equal keys in every domain, file and run."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Other columns of its source; `messages` too, if it has them."""
    where: str = field(default="", compare=False)
    """`FILE:LINE`, or nothing for a prompt that was generated."""

    @classmethod
    def of(
        cls,
        content: str | list[dict[str, Any]],
        label: Any,
        domain: str,
        metadata: dict[str, Any] | None = None,
        where: str = "",
    ) -> Prompt:
        """A prompt of text or of messages, with its key."""
        extra = dict(metadata or {})
        if isinstance(content, str):
            return cls(content, None, label, domain, content_key(content), extra, where)
        return cls(None, content, label, domain, content_key(content), extra | {"messages": content}, where)


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain of a recipe, loaded."""

    name: str
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """For evaluation only; shares no prompt with `train`, whatever the seed."""
    checker: Checker | None = None
    """`None` if answers can only be scored by a reward function of the recipe."""
    demonstrations: Demonstrator | None = None
    """Answers of mixed quality to warm a new model up on, if the domain can write them."""
    alphabet: str = ""
    """Characters of its prompts and answers, for a character tokenizer; empty for text domains."""
    tags: list[str] = field(default_factory=list)
    """Character sequences that are one token each."""


class PromptCursor:
    """Every epoch is a fresh permutation. Prompt number `i` is a function of (seed, name, i) and the prompts
    alone, so a resumed run needs to remember nothing but how many it has taken.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, name: str) -> None:
        """Raises `DataError` if there are no prompts."""
        if not prompts:
            raise DataError(f"domain {name} has no training prompts; check its source and its filters.")
        self._prompts = prompts
        self._seed = seed
        self._name = name
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def take(self, start: int, n: int) -> list[Prompt]:
        """Prompts number `start ... start + n - 1`."""
        if start < 0 or n < 0:
            raise ValueError(f"start {start} and n {n} must not be negative")
        return [self._at(number) for number in range(start, start + n)]

    def _at(self, number: int) -> Prompt:
        epoch, place = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            self._order = permutation(len(self._prompts), self._seed, self._name, epoch)
            self._epoch = epoch
        return self._prompts[int(self._order[place])]
