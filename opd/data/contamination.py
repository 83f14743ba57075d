"""Find evaluation prompts in training data, by shared n-grams of words.

The evaluation side is an index of a few bytes per n-gram. Training texts are compared one at a time and leave
only marks. An n-gram of many different training texts is phrasing (an instruction, a template) and does not
count, nor does one mostly made of such. Prompts with fewer words are compared in full, signs and all, because
`2 + 3` is not `2 - 3`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from opd.rollout.prompts import Prompt

# Scripts without blanks between words: each sign counts as one.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")
_COMMON = 10
"""An n-gram of more training texts than this is common (GPT-3's rule: Brown et al. 2020, appendix C)."""
_MOST = 4_000_000
"""Maximum n-grams of the index. Above it only every second, or third, ... is indexed, and a shared text must
be a word or two longer to be found for sure."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHOWN = 3
_CHARACTERS = 300


def word_tokens(text: str) -> list[str]:
    """Return the words of `text` without case and signs. NFKC makes forms of one letter equal."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def text_hash(text: str) -> int:
    """Return a hash of `text`, ignoring case and blanks."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return xxhash.xxh64_intdigest(plain.encode("utf-8", "surrogatepass"))


def text_of(prompt: Prompt) -> str:
    """Return a prompt's text, or that of its messages."""
    return prompt.text if prompt.text is not None else messages_text(prompt.messages or [])


def messages_text(messages: Sequence[Mapping[str, object]]) -> str:
    """Return the text of messages, one after the other."""
    parts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            texts = (part.get("text") for part in content if isinstance(part, Mapping))
            parts += [text for text in texts if isinstance(text, str)]
    return "\n".join(parts)


def _word_grams(text: str, size: int) -> np.ndarray:
    """Return `[N]` uint64, a hash of each `size` consecutive words."""
    words = word_tokens(text)
    count = max(0, len(words) - size + 1)
    numbers = np.array([xxhash.xxh64_intdigest(word.encode()) for word in words], dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for offset in range(size if count else 0):
        total = total * _FACTOR + numbers[offset : offset + count]
    return total


@dataclass(slots=True)
class ContaminationIndex:
    """Evaluation prompts by set, and the parts of them seen in training.

    Args:
        texts: Set -> its prompts' texts.
        size: Words of an n-gram.
    """

    texts: Mapping[str, Sequence[str]]
    size: int
    stride: int = 1
    """The index has every `stride`-th n-gram."""
    seen: int = 0
    """Number of training texts compared."""
    _owners: list[tuple[str, int]] = field(default_factory=list)
    _keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """[U] uint64, sorted: the n-grams."""
    _of: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[P, 2]: n-gram, and a prompt that has it."""
    _marks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """[U] uint64: a bit for each training text with the n-gram, one of 64 by the text's hash. The number of
    bits is a lower bound on the number of different texts."""
    _first: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[U]: index in `_places` of the first text with it; -1 if there is none."""
    _places: list[str] = field(default_factory=list)
    _wholes: dict[int, list[int]] = field(default_factory=dict)
    _equal: dict[int, str] = field(default_factory=dict)
    """Prompt -> location of an equal training prompt."""

    def __post_init__(self) -> None:
        self._owners = [(name, index) for name, texts in self.texts.items() for index in range(len(texts))]
        counts = [
            max(0, len(word_tokens(self._prompt_text(number))) - self.size + 1)
            for number in self._prompt_numbers()
        ]
        self.stride = max(1, -(-sum(counts) // _MOST))
        keys, owners = [], []
        for number in self._prompt_numbers():
            self._wholes.setdefault(text_hash(self._prompt_text(number)), []).append(number)
            grams = np.unique(_word_grams(self._prompt_text(number), self.size)[:: self.stride])
            keys.append(grams)
            owners.append(np.full(len(grams), number, np.int64))
        if not keys:
            return
        self._keys, places = np.unique(np.concatenate(keys), return_inverse=True)
        self._of = np.stack([places.reshape(-1), np.concatenate(owners)], axis=1)
        self._marks = np.zeros(len(self._keys), np.uint64)
        self._first = np.full(len(self._keys), -1, np.int64)

    def _prompt_numbers(self) -> range:
        return range(len(self._owners))

    def _prompt_text(self, number: int) -> str:
        name, index = self._owners[number]
        return self.texts[name][index]

    def compare_text(self, prompt: str, where: str, answer: str = "") -> None:
        """Compare with a training prompt at `where`, and with its answer."""
        self.seen += 1
        key = text_hash(prompt)
        for number in self._wholes.get(key, ()):
            self._equal.setdefault(number, where)
        if not len(self._keys):
            return
        grams = np.unique(_word_grams(f"{prompt}\n{answer}", self.size))
        places = np.minimum(np.searchsorted(self._keys, grams), len(self._keys) - 1)
        hits = places[self._keys[places] == grams]
        if not len(hits):
            return
        self._marks[hits] |= np.uint64(1 << (key % 64))
        new = hits[self._first[hits] < 0]
        if len(new):
            self._first[new] = len(self._places)
            self._places.append(where)

    def report_matches(self) -> dict[str, Any]:
        """Return, by set, the number of `prompts`, the number `contaminated`, and a few `examples`: the
        prompt, the `shared` words, and their training location (`where`).
        """
        bits = np.array([int(mark).bit_count() for mark in self._marks.tolist()], np.int64)
        candidates = self._of[(bits > 0)[self._of[:, 0]], 1] if len(self._of) else self._of[:, 0]
        matches = {int(number): self._first_match(int(number), bits) for number in np.unique(candidates)}
        shared = {number: index for number, index in matches.items() if index is not None}
        result: dict[str, Any] = {
            name: {"prompts": len(texts), "contaminated": 0, "examples": []}
            for name, texts in self.texts.items()
        }
        for number in sorted(self._equal.keys() | shared.keys()):
            row = result[self._owners[number][0]]
            row["contaminated"] += 1
            if len(row["examples"]) >= _SHOWN:
                continue
            index = shared.get(number)
            text = self._prompt_text(number)
            if number in self._equal or index is None:
                words, where = text, self._equal[number]
            else:
                gram = np.searchsorted(self._keys, _word_grams(text, self.size)[index])
                words = " ".join(word_tokens(text)[index : index + self.size])
                where = self._places[int(self._first[gram])]
            row["examples"].append(
                {"prompt": text[:_CHARACTERS], "shared": words[:_CHARACTERS], "where": where}
            )
        return result

    def _first_match(self, number: int, bits: np.ndarray) -> int | None:
        """Return the index of the first n-gram of a prompt that was seen in training and is at most half
        covered by common ones, or `None`. `bits` [U] counts the different texts of each.
        """
        grams = _word_grams(self._prompt_text(number), self.size)
        at = np.minimum(np.searchsorted(self._keys, grams), len(self._keys) - 1)
        counts = np.where(self._keys[at] == grams, bits[at], 0)
        covered = np.zeros(len(grams) + self.size, np.int64)
        for index in np.flatnonzero(counts > _COMMON).tolist():
            covered[index : index + self.size] = 1
        covered_before = np.concatenate([[0], np.cumsum(covered)])
        for index in np.flatnonzero((counts > 0) & (counts <= _COMMON)).tolist():
            if 2 * (covered_before[index + self.size] - covered_before[index]) <= self.size:
                return int(index)
        return None


def training_texts(prompts: Sequence[Prompt], name: str) -> Iterator[tuple[str, str]]:
    """Yield (text, location) of the training prompts of domain `name`."""
    for prompt in prompts:
        yield text_of(prompt), prompt.where or f"training prompt {prompt.key} of domain {name}"
