"""The proof that a server holds the weights it was given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

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
            if "rotary" in name or "cos_sin" in name:
                continue  # computed from the configuration
            raise RolloutError(
                f"{url} holds {name}, which was not pushed; serve the student's own architecture."
            )
        joined = _padded(name, torch.cat([known[part] for part in parts]).to(dtype))
        content = joined.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if hashlib.sha256(content).hexdigest()[: len(checksum)] != checksum:
            raise RolloutError(
                f"after the push {url} holds another {name} than the trainer; restart it and --resume."
            )


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
