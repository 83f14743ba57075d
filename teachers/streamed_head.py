"""The head of a published model, read by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.teachers.unit_tensors import unit_tensors

if TYPE_CHECKING:
    from opd.storage.published import PublishedModel

UNIT = "head"


def read_head(
    model: PublishedModel, dtype: torch.dtype, device: torch.device, vocabulary: int | None = None
) -> Head:
    """The head of `model` over the first `vocabulary` tokens (default: all rows).

    Every rank reads all of it: ranks come to a teacher's head at different times, and some not at all.
    Raises `StorageError` from the reader, and `ModelError` if it has fewer rows than `vocabulary`.
    """
    unit, entry = model.manifest.units[UNIT], model.manifest.head
    host = torch.empty(unit.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    model.read_part(UNIT, 0, 1, host.numpy().data)
    tensors = unit_tensors(unit, host.to(device), dtype)
    weight = next(tensor for name, tensor in tensors.items() if name.endswith(".weight"))
    bias = next((tensor for name, tensor in tensors.items() if name.endswith(".bias")), None)
    if vocabulary is not None and vocabulary > weight.shape[0]:
        raise ModelError(
            f"the head of published teacher {model.manifest.digest[:12]} has {weight.shape[0]} rows, fewer"
            f" than the {vocabulary} tokens asked for; use the tokenizer the model was made for."
        )
    return Head(weight, bias=bias, scale=entry.scale, softcap=entry.softcap, vocab_size=vocabulary)


def head_bytes(head: Head) -> int:
    """Bytes `head` keeps in memory."""
    tensors: list[Tensor] = [head.weight] if head.bias is None else [head.weight, head.bias]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
