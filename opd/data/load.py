"""From a recipe's domain to prompts, and from a prompt to token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config.data import DomainConfig
from opd.data.files import load_file
from opd.data.procedural import load_procedural
from opd.data.prompts import Domain, Prompt
from opd.data.reasoning_gym_source import load_reasoning_gym
from opd.errors import DataError

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
            ids = tokenizer.apply_chat_template(
                prompt.messages,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **(template or {}),
            )
    except Exception as error:  # tokenizers and chat templates raise plain Exceptions of many kinds
        shown = repr(prompt.text if prompt.text is not None else prompt.messages)
        raise DataError(
            f"domain {prompt.domain}: the tokenizer cannot encode the prompt {shown[:80]} "
            f"({' '.join(str(error).split())}); give another model.tokenizer or model.chat_template, or mend "
            "the prompt."
        ) from error
    return np.array(ids, dtype=np.int32)
