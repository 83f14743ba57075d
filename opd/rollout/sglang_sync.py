"""The proof that a server holds the weights it was given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opd.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What a server keeps as one tensor, and of what."""
VOCABULARY_ROWS = 64
FORM = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""What two configurations of models with the same tensors have in common."""


def check_form(
    url: str, info: Mapping[str, Any], held: Iterable[str], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """`RolloutError` if a server holds tensors that are not in `weights`, or lacks some: giving it weights of
    another form ends its process.

    Args:
        url: Names the server.
        info: What it says of its model.
        held: Names of its tensors.
        weights: What it is to be given.
    """
    known, used = dict(weights), set()
    for name in held:
        parts = _parts(name, known)
        if parts is None and not _computed(name):
            raise RolloutError(
                f"{url} serves {info.get('model_path')} with a tensor {name}, which the student has not;"
                " serve the student's own architecture."
            )
        used.update(parts or ())
    missing = known.keys() - used
    if missing:
        raise RolloutError(
            f"{url} serves {info.get('model_path')} without {min(missing)}, which the student has; serve the"
            " student's own architecture."
        )


def check_config(url: str, info: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """`RolloutError` if a server's model has another form than the student's Hugging Face `config`. Sizes are
    compared where its folder can be read here; the kind it says itself.
    """
    theirs = {key: info.get(key) for key in FORM}
    file = Path(str(info.get("model_path"))) / "config.json"
    if file.is_file():
        theirs |= json.loads(file.read_bytes())
    for key in FORM:
        there, here = theirs.get(key), config.get(key)
        if there is not None and here is not None and there != here:
            raise RolloutError(
                f"{url} serves {info.get('model_path')} with {key} {there}, the student has {here}; serve the"
                " student's own architecture."
            )


def check_checksums(
    url: str, held: Mapping[str, str], weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """`RolloutError` unless a server on a CPU holds `weights`: its checksum of a tensor is the beginning of
    the sha256 of its bytes. Every tensor it has must be one of them, or several joined (`FUSED`).
    """
    known = dict(weights)
    for name, checksum in held.items():
        parts = _parts(name, known)
        if parts is None:
            if _computed(name):
                continue
            raise RolloutError(
                f"{url} holds {name}, which was not pushed; serve the student's own architecture."
            )
        joined = _padded(name, torch.cat([known[part] for part in parts]).to(dtype))
        content = joined.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if hashlib.sha256(content).hexdigest()[: len(checksum)] != checksum:
            raise RolloutError(
                f"after the push {url} holds another {name} than the trainer; restart it and --resume."
            )


def _computed(name: str) -> bool:
    """Whether a server computes the tensor from the configuration."""
    return "rotary" in name or "cos_sin" in name


def _padded(name: str, weight: Tensor) -> Tensor:
    """A server keeps the rows of embedding and head padded with zeros to a multiple of 64."""
    if "embed_tokens" not in name and "lm_head" not in name:
        return weight
    missing = -len(weight) % VOCABULARY_ROWS
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])


def _parts(name: str, known: Mapping[str, Tensor]) -> list[str] | None:
    if name in known:
        return [name]
    if name == "lm_head.weight" and "model.embed_tokens.weight" in known:
        return ["model.embed_tokens.weight"]
    for fused, singles in FUSED.items():
        parts = [name.replace(fused, single) for single in singles]
        if fused in name and all(part in known for part in parts):
            return parts
    return None
