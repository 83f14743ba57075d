"""Hugging Face folders out: sharded safetensors, tokenizer, checksums and a model card, all or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.errors import writing
from opd.models.card import model_card
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import CARD, write_checksums
from opd.models.hf_weights import quiet

MAX_SHARD_BYTES = 4 * 2**30


def save_checkpoint(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    card: dict[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write `folder` so that it loads with `CausalLM.from_pretrained` and with plain transformers.

    `card` becomes README.md (see `opd.models.card.model_card`). Everything is written to a temporary sibling,
    flushed to disk and renamed, so `folder` is never half a checkpoint; an older one there is replaced, and
    what a killed save left beside it is removed. One writer per `folder`. `beside(draft)` may add files of
    its own.
    """
    target = Path(folder).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        with writing(target):
            with quiet():
                model.module.save_pretrained(draft, max_shard_size=max_shard_bytes)
            tokenizer.save_pretrained(draft)
            (draft / CARD).write_text(model_card(target.name, card), "utf-8")
            if beside is not None:
                beside(draft)
            write_checksums(draft)
            draft.chmod(0o755)
            _flush(draft)
            _replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(draft: Path, target: Path) -> None:
    # A folder cannot be renamed over a filled one, so the old one steps aside first.
    aside = Path(f"{draft}.old")
    if target.exists():
        target.rename(aside)
    draft.rename(target)
    for sibling in target.parent.iterdir():
        if sibling.name.startswith(f".{target.name}.") and sibling.name.endswith((".tmp", ".tmp.old")):
            shutil.rmtree(sibling, ignore_errors=True)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
