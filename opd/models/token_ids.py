"""A tokenizer's ids: their number, the ids of a text for a model to continue, and the text of ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from opd.errors import is_of_library

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = ("0", "a", "A", " ")
"""Texts; any tokenizer knows one of them."""


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id + 1. `len(tokenizer)` counts tokens, which are fewer if ids are left out."""
    return _id_count(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _id_count(tokenizer: PreTrainedTokenizerBase, tokens: int) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def decode_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of `ids` as it is: with special tokens, and with blanks before full stops."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode `text` with the tokenizer's own leading special tokens, such as a BOS, and without its trailing
    ones (`add_eos_token`), because the model continues there. Text that begins with a BOS, such as a chat
    template's, gets no second one.

    Raises `ValueError` if the tokenizer's post-processor does anything else, and the tokenizer's errors.
    """
    if _adds_nothing(tokenizer, tokenizer.num_special_tokens_to_add(pair=False)):
        return _encode_ids(tokenizer, text, framed=False)
    return _strip_suffix(tokenizer, text, *_framed_and_plain(tokenizer, text))


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """`encode_text` of each in one call of the tokenizer, because a call takes longer than a short text."""
    if len(texts) < 2:
        return [encode_text(tokenizer, text) for text in texts]
    plain = ids_of_texts(tokenizer, texts)
    if _adds_nothing(tokenizer, tokenizer.num_special_tokens_to_add(pair=False)):
        return plain
    framed = ids_of_texts(tokenizer, texts, framed=True)
    return [_strip_suffix(tokenizer, *one) for one in zip(texts, framed, plain, strict=True)]


def ids_of_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, framed: bool = False
) -> list[list[int]]:
    """Return the ids of each of `texts` (at least one). With `framed`, include special tokens."""
    masks: dict[str, Any] = {"return_attention_mask": False, "return_token_type_ids": False}
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=framed, **masks)["input_ids"]]


def _strip_suffix(
    tokenizer: PreTrainedTokenizerBase, text: str, framed: list[int], plain: list[int]
) -> list[int]:
    """Return `encode_text` of `text`, from its ids with special tokens and without."""
    bos = tokenizer.bos_token
    twice = [tokenizer.bos_token_id, *plain]
    if bos is not None and text.startswith(str(bos)) and framed[: len(twice)] == twice:
        framed = framed[1:]
    if framed == plain:
        return plain
    if not plain:  # only the frame
        return framed[:-1] if framed[-1] == tokenizer.eos_token_id else framed
    start = _find_start(framed, plain)
    around = [] if start is None else framed[:start] + framed[start + len(plain) :]
    if start is None or not set(around) <= tokenizer.added_tokens_decoder.keys():
        raise ValueError("its post-processor does more than put special tokens before and behind it")
    return framed[: start + len(plain)]


def appended_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the tokenizer appends to a text. Prompts omit them."""
    framed, plain = _known_text_ids(tokenizer)
    start = _find_start(framed, plain)
    return [] if start is None or not plain else framed[start + len(plain) :]


@lru_cache(maxsize=8)
def _adds_nothing(tokenizer: PreTrainedTokenizerBase, added: int) -> bool:
    """Return True if the tokenizer, which reports `added` special tokens, leaves a text's ids unchanged."""
    framed, plain = _known_text_ids(tokenizer)
    return added == 0 and framed == plain != []


def _known_text_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return ids of a text that the tokenizer knows, with special tokens and without; both empty if it knows
    none.
    """
    for text in _PROBES:
        try:
            return _framed_and_plain(tokenizer, text)
        except BaseException as error:  # a tokenizer of other characters
            if not is_of_library(error):
                raise
    return [], []


def _framed_and_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    return _encode_ids(tokenizer, text, framed=True), _encode_ids(tokenizer, text, framed=False)


def _encode_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, framed: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=framed)["input_ids"])


def _find_start(framed: Sequence[int], plain: Sequence[int]) -> int | None:
    """Return the index of `plain` in `framed`, or `None` if it is not there contiguously."""
    starts = range(len(framed) - len(plain) + 1)
    return next((start for start in starts if framed[start : start + len(plain)] == plain), None)


def special_texts(tokenizer: PreTrainedTokenizerBase, stops: Collection[int] = ()) -> list[str]:
    """Return what the tokenizer reads as a special token or one of `stops`, the longest first."""
    texts = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    texts |= {str(tokenizer.convert_ids_to_tokens(one)) for one in stops}
    return sorted(texts, key=len, reverse=True)


class HeldTexts(NamedTuple):
    """Texts of others that stand in a prompt by their names."""

    texts: Mapping[str, str]
    special: Sequence[str]
    """Texts of special tokens, which are just their characters in those."""


def encode_prompt_text(
    tokenizer: PreTrainedTokenizerBase, text: str, held: HeldTexts | None = None, *, rendered: bool
) -> list[int]:
    """`encode_text` of a prompt with the texts `held` in it. One that a chat template has `rendered` gets no
    special token of the tokenizer's own.
    """
    encode = partial(_encode_ids, tokenizer, framed=False)
    begin = encode if rendered else partial(encode_text, tokenizer)
    if held is None or not held.texts:
        return begin(text)
    first, name, rest = next(iter(re.findall(f"(?s)^(.*?)({_names(held.texts)})(.*)$", text)), (text, "", ""))
    return begin(first) + encode_held(name + rest, *held, encode)


def _names(texts: Mapping[str, str]) -> str:
    return "|".join(map(re.escape, texts))


def encode_held(
    text: str, held: Mapping[str, str], special: Sequence[str], encode: Callable[[str], list[int]]
) -> list[int]:
    """Encode `text` with the texts `held` in place of their names, in which special tokens are just their
    characters.
    """
    ids: list[int] = []
    # A template may write one twice, or never.
    for piece in re.split(f"({_names(held)})", text) if held else [text]:
        if piece:
            ids += _encode_plain(held[piece], special, encode) if piece in held else encode(piece)
    return ids


def _encode_plain(text: str, special: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
    """Encode `text`, cut in the middle of every special token's text, so that no piece holds one."""
    found = [one for one in special if len(one) > 1 and one in text]
    ids: list[int] = []
    start = 0
    while True:
        # The first to end: the text before its middle holds no other.
        spans = [(at + len(one), at, one) for one in found if (at := text.find(one, start)) >= 0]
        if not spans:
            return ids + encode(text[start:])
        _, at, one = min(spans)
        cut = at + max(1, len(one) // 2)
        ids += encode(text[start:cut])
        start = cut
