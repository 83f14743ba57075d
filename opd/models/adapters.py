"""Adapter folders in peft's form, kept inside the Hugging Face folder of the merged model.

FOLDER/                          the merged model, as any other
FOLDER/adapter/                  adapter_config.json and adapter_model.safetensors: peft loads it
FOLDER/adapter/base.json         where its base lies, and the sha256 of each of the base's weight files
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.errors import CheckpointError
from opd.foreign import is_file_name
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_base,
    check_shard,
    check_small_files,
    read_checksums,
    read_object,
    weight_files,
)
from opd.models.lora import AdaptedLM, peft_config
from opd.models.peft_folder import PREFIX, read_peft
from opd.storage.sealed import file_digest

FOLDER = "adapter"
CONFIG, WEIGHTS, BASE = ADAPTER_CONFIG, ADAPTER_WEIGHTS, "base.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter folder holds."""

    base: Path
    """The Hugging Face folder of its base."""
    base_files: dict[str, str]
    """sha256 of each of the base's weight files."""
    scaling: float
    """`W + scaling * B A`."""
    pairs: dict[str, tuple[Tensor, Tensor]]
    """`A` `[r, in]` and `B` `[out, r]` by the name of the weight they are added to."""


def save_adapted(
    model: AdaptedLM, tokenizer: PreTrainedTokenizerBase, folder: str | Path, card: dict[str, Any]
) -> str:
    """Write the merged model to `folder` as `save_checkpoint` does, with its adapters in `folder/adapter`.

    Returns the digest of the merged weights.
    """

    def beside(draft: Path) -> None:
        (draft / FOLDER).mkdir()
        tensors = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in model.adapters()}
        safetensors.torch.save_file(tensors, draft / FOLDER / WEIGHTS, metadata={"format": "pt"})
        described = peft_config(model.module, model.lora, base=str(model.base_path), inference_mode=True)
        described.save_pretrained(draft / FOLDER)
        base = {"path": str(model.base_path.absolute()), "files": weight_digests(model.base_path)}
        (draft / FOLDER / BASE).write_text(json.dumps(base, indent=2) + "\n", "utf-8")

    card = {**card, "adapter": f"LoRA, rank {model.lora.rank}, alpha {model.lora.alpha:g}; in {FOLDER}/"}
    plain = model.merge()
    save_checkpoint(plain, tokenizer, folder, card, beside=beside)
    return plain.digest()


def has_adapter(folder: str | Path) -> bool:
    """Whether `folder` is an adapter of peft's, or a merged model that kept its adapters and their base."""
    place = Path(folder)
    return (place / FOLDER / BASE).is_file() or (place.is_dir() and adapter_base(place) is not None)


def read_adapter(folder: str | Path) -> Adapter:
    """The adapters in `folder`, or kept in the merged model's `folder`.

    Raises `CheckpointError` naming the file that is missing or damaged, or if the adapters are of a kind
    other than plain LoRA.
    """
    place = Path(folder) / FOLDER
    if not (place / BASE).is_file():
        base = adapter_base(Path(folder))
        if base is None:
            raise CheckpointError(f"{folder} holds no adapter; give a folder that does.")
        found = read_peft(Path(folder))
        return Adapter(base, weight_digests(base), found.scaling, found.pairs)
    check_small_files(Path(folder))
    check_shard(place / WEIGHTS, read_checksums(Path(folder)).get(f"{FOLDER}/{WEIGHTS}"))
    found, described = read_peft(place), read_object(place / BASE)
    try:
        path, files = Path(described["path"]), dict(described["files"])
        if not all(is_file_name(name) and isinstance(digest, str) for name, digest in files.items()):
            raise ValueError("files that are no names with digests")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{place} is not a whole adapter ({error}); copy it again.") from error
    return Adapter(path, files, found.scaling, found.pairs)


def weight_digests(folder: Path) -> dict[str, str]:
    """sha256 of each weight file of a Hugging Face folder: as its `checksums.json` says, or computed."""
    known = read_checksums(folder)
    return {name: known.get(name) or file_digest(folder / name) for name in weight_files(folder)}
