"""A tokenizer's ids: how many there are, and those of a text that a model is to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opd.errors import is_of_library

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = ("0", "a", "A", " ")
"""Texts of which any tokenizer knows one."""


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id. `len(tokenizer)` counts tokens: fewer, where ids are left out."""
    return _id_count(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _id_count(tokenizer: PreTrainedTokenizerBase, tokens: int) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """`text` with the special tokens, such as a BOS, that the tokenizer itself puts before it, and without
    those that it puts behind (`add_eos_token`): the model goes on there. Text that begins with a BOS, such as
    what a chat template has written, gets no second one.

    Raises `ValueError` if the tokenizer's post-processor does anything else, and what the tokenizer raises.
    """
    if _adds_nothing(tokenizer, tokenizer.num_special_tokens_to_add(pair=False)):
        return _ids(tokenizer, text, framed=False)
    return _begun(tokenizer, text, *_both(tokenizer, text))


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """`encode_text` of each, by one call of the tokenizer: a call takes longer than a short text in it."""
    if len(texts) < 2:
        return [encode_text(tokenizer, text) for text in texts]
    plain = ids_of_texts(tokenizer, texts)
    if _adds_nothing(tokenizer, tokenizer.num_special_tokens_to_add(pair=False)):
        return plain
    framed = ids_of_texts(tokenizer, texts, framed=True)
    return [_begun(tokenizer, *one) for one in zip(texts, framed, plain, strict=True)]


def ids_of_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, framed: bool = False
) -> list[list[int]]:
    """The ids of each of `texts`, of which there is one at least; `framed`: with special tokens."""
    masks: dict[str, Any] = {"return_attention_mask": False, "return_token_type_ids": False}
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=framed, **masks)["input_ids"]]


def _begun(tokenizer: PreTrainedTokenizerBase, text: str, framed: list[int], plain: list[int]) -> list[int]:
    """What `encode_text` says of `text`, whose ids are these with special tokens and without."""
    bos = tokenizer.bos_token
    twice = [tokenizer.bos_token_id, *plain]
    if bos is not None and text.startswith(str(bos)) and framed[: len(twice)] == twice:
        framed = framed[1:]
    if framed == plain:
        return plain
    if not plain:  # the frame alone
        return framed[:-1] if framed[-1] == tokenizer.eos_token_id else framed
    start = _place(framed, plain)
    around = [] if start is None else framed[:start] + framed[start + len(plain) :]
    if start is None or not set(around) <= tokenizer.added_tokens_decoder.keys():
        raise ValueError("its post-processor does more than put special tokens before and behind it")
    return framed[: start + len(plain)]


def appended(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer itself puts behind a text, which prompts are left without."""
    framed, plain = _probed(tokenizer)
    start = _place(framed, plain)
    return [] if start is None or not plain else framed[start + len(plain) :]


@lru_cache(maxsize=8)
def _adds_nothing(tokenizer: PreTrainedTokenizerBase, added: int) -> bool:
    """Whether a tokenizer, which says that it adds so many special tokens, gives a text no other ids."""
    framed, plain = _probed(tokenizer)
    return added == 0 and framed == plain != []


def _probed(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids of a text that the tokenizer knows, with its special tokens and without; none of neither where it
    knows none.
    """
    for text in _PROBES:
        try:
            return _both(tokenizer, text)
        except BaseException as error:  # a tokenizer of other characters
            if not is_of_library(error):
                raise
    return [], []


def _both(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    return _ids(tokenizer, text, framed=True), _ids(tokenizer, text, framed=False)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, framed: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=framed)["input_ids"])


def _place(framed: Sequence[int], plain: Sequence[int]) -> int | None:
    """Where `plain` begins in `framed`; `None` if it is not there in one piece."""
    starts = range(len(framed) - len(plain) + 1)
    return next((start for start in starts if framed[start : start + len(plain)] == plain), None)
