"""Tokens of two tokenizers for one text, aligned by their bytes.

A student's response is written again with a teacher's tokenizer. Where both have a boundary after the same
bytes, the tokens between two such boundaries are a chunk: the same bytes for both. Both models predict the
beginning of a chunk from the same text.

Their next tokens are compared by class. A class is a token that both vocabularies have, with the other tokens
of either whose text begins with it in the other's tokens: a student's ` Carlos`, which the teacher writes as
` Carl` and `os`, is in the class of ` Carl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from opd.errors import ModelError, is_of_library
from opd.kernels.token_classes import TokenClasses
from opd.models.token_ids import id_count
from opd.models.tokenizers import end_of_turn

_PROBES = ("0", "a b", "Words, and  more: x1 = 23\n\tend", "naïve 漢字 😀")
"""Texts with which a tokenizer shows that its tokens' bytes are known. It must know one of them."""


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """A teacher's tokens for a response of `R` tokens of the student.

    Positions without a chunk have -1: tokens behind bytes that are no UTF-8, or that the teacher's tokenizer
    changes.
    """

    teacher_ids: np.ndarray
    """[R'] int32."""
    student_chunks: np.ndarray
    """[R] int64: the chunk of each of the student's tokens. Chunks count up from 0."""
    teacher_chunks: np.ndarray
    """[R'] int64: the chunk of each of the teacher's tokens."""
    exact: np.ndarray
    """[R] int64: the teacher's position of a token of the same class after the same bytes, else -1."""


class _Side(NamedTuple):
    """A tokenizer and the bytes of its tokens."""

    tokenizer: PreTrainedTokenizerBase
    spelled: Mapping[int, bytes]


class TokenTranslator:
    """Writes responses of a student with a teacher's tokenizer.

    Args:
        student: The student's tokenizer.
        teacher: The teacher's.
        stops: Ids at which the student's responses end. Each stands for the teacher's end of a turn.
        template: Arguments of the chat template.
    """

    def __init__(
        self,
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        stops: Sequence[int],
        template: Mapping[str, object] | None = None,
    ) -> None:
        """Raises `ModelError` if a tokenizer's tokens do not spell its texts, if the teacher has no token
        that ends a turn, or if the two share no token.
        """
        self._teacher = teacher
        self._bytes, self._teacher_bytes = (token_bytes(each) for each in (student, teacher))
        by_text = {text: index for index, text in self._teacher_bytes.items() if text}
        special = _special_tokens(student)
        teacher_special = {text: index for index, text in _special_tokens(teacher).items()}
        self._special = {**special, **{stop: special.get(stop, "") for stop in stops}}
        self._partners: dict[int, int] = {}
        """Student's id -> teacher's id with the same bytes, or with the same role."""
        for index, text in self._bytes.items():
            if text in by_text and index not in self._special:
                self._partners[index] = by_text[text]
        if len(self._partners) < 2:
            raise ModelError("its tokenizer shares no token with the student's.")
        self._partners |= {
            index: teacher_special[text] for index, text in special.items() if text in teacher_special
        }
        eos: Any = teacher.eos_token_id  # one number, though its annotation allows more
        end = end_of_turn(teacher, template or {})
        end = eos if end is None else end
        if end is None and stops:
            raise ModelError("its tokenizer has no token that ends an answer; set its eos_token.")
        self._partners |= {} if end is None else dict.fromkeys(stops, int(end))
        self.shared = _one_to_one(self._partners, [*stops])
        """[2, S] int64: ids of the student and of the teacher, one to one, each pair the first of a class."""
        sides = _Side(student, self._bytes), _Side(teacher, self._teacher_bytes)
        self._classes = _token_classes(sides, self.shared)
        ours, theirs = map(_build_classes, self._classes, self.shared)
        self.classes = ours, theirs
        """Of the student's tokens and of the teacher's."""
        self.teacher_count = id_count(teacher)
        """Number of the teacher's ids."""
        self._adds_blank = [any(self._spells_blank(start + sign) for sign in "a0=") for start in ("", " ")]
        """Whether the teacher's tokenizer puts a blank before a text, and before one that begins with one."""

    def translate(self, response: np.ndarray) -> TokenAlignment:
        """Return the teacher's tokens for `response` `[R]`, the student's."""
        alignment = _Alignment(len(response))
        run: list[int] = []
        for token in map(int, response):
            if token not in self._special:
                run.append(token)
                continue
            if not self._add_text(alignment, run):
                return self._build(alignment, response)
            run = []
            if token in self._partners:
                alignment.add_pair(self._partners[token])
            elif not self._add_text(alignment, [token]):  # the teacher reads it as text
                return self._build(alignment, response)
        self._add_text(alignment, run)
        return self._build(alignment, response)

    def _build(self, alignment: _Alignment, response: np.ndarray) -> TokenAlignment:
        """Return what was added; the rest of `response` has no chunk."""
        student, teacher = alignment.student, np.array(alignment.teacher, np.int64)
        ids, exact = np.array(alignment.ids, np.int32), np.full(len(student), -1, np.int64)
        starts = [
            np.flatnonzero((side >= 0) & (np.diff(side, prepend=-1) != 0)) for side in (student, teacher)
        ]
        ours, theirs = (
            classes[np.minimum(tokens[at], len(classes) - 1)]
            for classes, tokens, at in zip(self._classes, (response, ids), starts, strict=True)
        )
        agree = (ours == theirs) & (ours >= 0)
        exact[starts[0][agree]] = starts[1][agree]
        return TokenAlignment(ids, student, teacher, exact)

    def _add_text(self, alignment: _Alignment, run: Sequence[int]) -> bool:
        """Add a run of ordinary tokens. Return whether text may follow."""
        spelled = [self._bytes.get(token, b"") for token in run]
        data = b"".join(spelled)
        try:
            text, is_whole = data.decode(), True
        except UnicodeDecodeError as error:
            text, is_whole = data[: error.start].decode(), False
        if not text:
            return is_whole
        written = text.encode()
        adds = self._adds_blank[text.startswith(" ")]
        own = adds and text.startswith(" ") and len(text) > 1  # the blank that it adds is the text's own
        ids = _known_ids(self._teacher, text[own:])
        theirs = [self._teacher_bytes.get(token, b"") for token in ids]
        if adds and not own and theirs:
            theirs[0] = theirs[0].removeprefix(b" ")
        ends = np.cumsum([len(part) for part in theirs])
        agree = _common_length(b"".join(theirs), written)
        kept = int(np.searchsorted(ends, agree, side="right"))
        alignment.add_run(
            [len(part) for part in spelled],
            [int(token) for token in ids[:kept]],
            [len(part) for part in theirs[:kept]],
        )
        return is_whole and agree == len(written)

    def _spells_blank(self, text: str) -> bool:
        ids = _known_ids(self._teacher, text)
        return b"".join(self._teacher_bytes.get(token, b"") for token in ids) == b" " + text.encode()


class _Alignment:
    """The chunks of a response while they are found."""

    def __init__(self, count: int) -> None:
        self.student = np.full(count, -1, np.int64)
        self.teacher: list[int] = []
        self.ids: list[int] = []
        self._chunks = self._done = 0

    def add_pair(self, teacher_id: int) -> None:
        """Add one token of each."""
        self.student[self._done] = self._chunks
        self.ids.append(teacher_id)
        self.teacher.append(self._chunks)
        self._done, self._chunks = self._done + 1, self._chunks + 1

    def add_run(self, student: Sequence[int], ids: Sequence[int], teacher: Sequence[int]) -> None:
        """Add tokens of `student` and `teacher` bytes each, the latter with `ids`."""
        ours, theirs = np.cumsum(student), np.cumsum(teacher)
        common = np.intersect1d(ours, theirs)
        # A token is in the chunk that ends at the first common boundary at or behind its own end.
        mine, other = (np.searchsorted(common, side) for side in (ours, theirs))
        mine, other = (np.where(at < len(common), at + self._chunks, -1) for at in (mine, other))
        self.student[self._done : self._done + len(ours)] = mine
        self.teacher += other.tolist()
        self.ids += ids
        self._done += len(student)
        self._chunks += len(common)


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Token of one byte."""
_SPELLED = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
"""Decoders under which each token stands for its own bytes."""


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes that each id stands for, in the order of the ids.

    Raises `ModelError` if the tokenizer's tokens do not spell its texts byte by byte, as those of byte-level
    BPE, of SentencePiece with a blank marker and byte tokens, and of plain words do.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("its tokenizer is not of the tokenizers library; save it as tokenizer.json.")
    described = json.loads(backend.to_str())
    decoder = described.get("decoder") or {}
    steps = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
    if not steps <= _SPELLED:
        kinds = ", ".join(sorted(steps - _SPELLED))
        raise ModelError(
            f"its tokenizer decodes by {kinds}, so that its tokens cannot be aligned byte by byte; give a"
            " teacher with the student's tokenizer."
        )
    kinds = str(decoder) + str(described.get("pre_tokenizer"))
    added = tokenizer.added_tokens_decoder
    unicode = {sign: byte for byte, sign in bytes_to_unicode().items()}
    spelled: dict[int, bytes] = {}
    for index, token in sorted((index, token) for token, index in tokenizer.get_vocab().items()):
        if index in added:
            spelled[index] = str(added[index].content).encode()
        elif "ByteLevel" in kinds:
            known = all(sign in unicode for sign in token)
            spelled[index] = bytes(unicode[sign] for sign in token) if known else token.encode()
        elif _BYTE.fullmatch(token):
            spelled[index] = bytes([int(token[3:5], 16)])
        else:
            spelled[index] = (token.replace("\u2581", " ") if "\u2581" in kinds else token).encode()
    _check_spelling(tokenizer, spelled)
    return spelled


def _check_spelling(tokenizer: PreTrainedTokenizerBase, spelled: Mapping[int, bytes]) -> None:
    """Raise `ModelError` unless the probes that the tokenizer knows are spelled by their tokens."""
    known = 0
    for text in (*_PROBES, *_own_words(tokenizer)):
        ids = _try_ids(tokenizer, text)
        if ids is None or tokenizer.unk_token_id in ids:
            continue
        if not all(_plain_ids(tokenizer, sign) for sign in text):
            continue  # it leaves out characters that it does not have
        known += 1
        written = b"".join(spelled.get(token, b"") for token in ids)
        if written.removeprefix(b" ") != text.encode().removeprefix(b" "):
            raise ModelError(
                f"its tokenizer does not spell texts byte by byte ({text!r} comes out otherwise), so that its"
                " tokens cannot be aligned; give a teacher with the student's tokenizer."
            )
    if not known:
        raise ModelError("its tokenizer knows none of its own words; check its files.")


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text`, of which nothing is a special token."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _try_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int] | None:
    """Return `_plain_ids`, `None` if a tokenizer without an unknown token refuses a character."""
    try:
        return _plain_ids(tokenizer, text)
    except BaseException as error:  # it raises a plain Exception
        if not is_of_library(error):
            raise
        return None


def _known_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text` up to the first character that the tokenizer refuses."""
    ids = _try_ids(tokenizer, text)
    if ids is None:
        end = next((place for place, sign in enumerate(text) if _try_ids(tokenizer, sign) is None), 0)
        ids = _try_ids(tokenizer, text[:end])
    return ids or []


def _own_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a few words of a tokenizer, for one of few characters."""
    words = [token for token in sorted(tokenizer.get_vocab()) if token.isalnum() and token.isascii()]
    return words[:: max(1, len(words) // 4)][:4]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def _one_to_one(partners: Mapping[int, int], first: Sequence[int]) -> np.ndarray:
    """[2, S] int64: `partners`, in the order of the student's ids, with each of the teacher's ids once. Of
    several the first of `first` has it, or else the smallest.
    """
    taken: dict[int, int] = {}
    for student in (*first, *sorted(partners)):
        taken.setdefault(partners[student], student)
    pairs = sorted((student, teacher) for teacher, student in taken.items())
    return np.array(pairs, np.int64).reshape(-1, 2).T.copy()


def _first_tokens(spelled: Mapping[int, bytes], other: _Side) -> dict[int, int]:
    """Return the first token of `other` for each text of `spelled` that it writes in the same bytes."""
    left: dict[int, str] = {}
    for index, data in spelled.items():
        try:
            left[index] = data.decode()
        except UnicodeDecodeError:  # a piece of a character has no class
            continue
    firsts: dict[int, int] = {}
    for cut in (0, 1):  # one that puts a blank before a text is given a text's own blank that way
        if cut:
            left = {i: text for i, text in left.items() if i not in firsts and text.startswith(" ")}
        for index, ids in zip(
            left, _many_ids(other.tokenizer, [text[cut:] for text in left.values()]), strict=True
        ):
            if ids and b"".join(other.spelled.get(token, b"") for token in ids) == spelled[index]:
                firsts[index] = ids[0]
    return firsts


def _many_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return `_known_ids` of all `texts`."""
    if not texts:
        return []
    try:
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    except BaseException as error:
        if not is_of_library(error):
            raise
        return [_known_ids(tokenizer, text) for text in texts]


def _token_classes(sides: Sequence[_Side], shared: np.ndarray) -> list[np.ndarray]:
    """Return the class of each id of the student and of the teacher, -1 for none. The last is of no token."""
    begins: list[dict[int, int]] = []
    for mine, other, taken in zip(sides, sides[::-1], shared, strict=True):
        skipped = {*taken.tolist(), *_special_tokens(mine.tokenizer)}
        texts = {index: data for index, data in mine.spelled.items() if index not in skipped}
        begins.append(_first_tokens(texts, other))
    classes = [np.full(id_count(side.tokenizer) + 1, -1, np.int64) for side in sides]
    for mine, first in zip(classes, shared, strict=True):
        mine[first] = np.arange(len(first))
    for _ in range(8):  # a token's first token may itself be one that is not shared
        for mine, other, firsts in zip(classes, classes[::-1], begins, strict=True):
            left = np.array([index for index in firsts if mine[index] < 0], np.int64)
            mine[left] = other[np.array([firsts[index] for index in left.tolist()], np.int64)]
    return classes


def _build_classes(classes: np.ndarray, first: np.ndarray) -> TokenClasses:
    """Build the `classes` of all ids, of which each begins with one of `first`."""
    ids = np.concatenate([first, np.setdiff1d(np.flatnonzero(classes >= 0), first)])
    return TokenClasses(torch.from_numpy(ids), torch.from_numpy(classes[ids]), len(first))


def _common_length(left: bytes, right: bytes) -> int:
    """Return the number of first bytes in which two texts agree."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(np.frombuffer(left[:size], np.uint8) != np.frombuffer(right[:size], np.uint8))
    return int(differ[0]) if len(differ) else size
