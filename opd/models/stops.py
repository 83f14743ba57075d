"""Where a model's responses end: every token id at which the model itself, or its tokenizer, says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.errors import CheckpointError
from opd.models.hf_folder import described_in, read_object

_FILES = ("generation_config.json", "config.json")
_ANSWER = "zebra"
"""Stands for an answer in a conversation that is rendered to see what follows it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A token that ends a response."""

    token_id: int
    token: str
    said_by: tuple[str, ...]
    """Where it is written: files of the model's folder, its tokenizer, or a field of the recipe."""

    def __str__(self) -> str:
        return f"{self.token_id} {self.token!r} ({', '.join(self.said_by)})"


def stops_of(
    tokenizer: PreTrainedTokenizerBase, folder: Path | None = None, added: Iterable[int] = ()
) -> list[Stop]:
    """The ids `added` by the recipe, the tokenizer's EOS and what generation_config.json and config.json of
    `folder` call `eos_token_id`, a number or a list; each once.

    Ids of the folder's files beyond the tokenizer are left out, as they are never sampled. Raises
    `CheckpointError` for an `eos_token_id` that is neither.
    """
    said: dict[int, list[str]] = {int(token): ["rollout.stop_ids"] for token in added}
    own: list[tuple[str, list[int]]] = []
    if tokenizer.eos_token_id is not None:
        own.append(("tokenizer", [int(tokenizer.eos_token_id)]))
    if folder is not None:
        own += [(name, _eos_ids(described_in(folder) / name)) for name in _FILES]
    for where, ids in own:
        for token in ids:
            if token < len(tokenizer):
                places = said.setdefault(token, [])
                places += [where] if where not in places else []
    return [Stop(token, _name(tokenizer, token), tuple(where)) for token, where in said.items()]


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> int | None:
    """The added token that the chat template writes after an assistant's answer; `None` if it writes none.

    `template`: its own arguments.
    """
    if not tokenizer.chat_template:
        return None
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False, **template))
        rest = text.rpartition(_ANSWER)[2].lstrip()
        ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
    except Exception:  # templates raise whatever they like; prompts that cannot be rendered say so themselves
        return None
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def _eos_ids(path: Path) -> list[int]:
    """`eos_token_id` of a configuration file, or of the text model's inside it; none without a file."""
    if not path.is_file():
        return []
    described = read_object(path)
    inner = described.get("text_config")
    found = described.get("eos_token_id")
    if found is None and isinstance(inner, dict):
        found = inner.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token) is not int or token < 0 for token in ids):
        raise CheckpointError(f"{path} says eos_token_id {found!r}; write a token id or a list of them.")
    return ids


def _name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token)) if token < len(tokenizer) else "unknown"
