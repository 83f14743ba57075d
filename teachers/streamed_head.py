"""The head of a published model, read by itself."""

from __future__ import annotations

import mmap
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
    model.require_memory(UNIT)
    unit, entry = model.manifest.units[UNIT], model.manifest.head
    cuda = device.type == "cuda"
    host = torch.empty(unit.nbytes, dtype=torch.uint8, pin_memory=True) if cuda else own_pages(unit.nbytes)
    model.read_part(UNIT, 0, 1, host.numpy().data)
    read = unit_tensors(unit, host.to(device))
    tensors = {name: _converted(tensor, dtype) for name, tensor in read.items()}
    weight = next(tensor for name, tensor in tensors.items() if name.endswith(".weight"))
    bias = next((tensor for name, tensor in tensors.items() if name.endswith(".bias")), None)
    if vocabulary is not None and vocabulary > weight.shape[0]:
        raise ModelError(
            f"the head of published teacher {model.manifest.digest[:12]} has {weight.shape[0]} rows, fewer"
            f" than the {vocabulary} tokens asked for; use the tokenizer the model was made for."
        )
    return Head(weight, bias=bias, scale=entry.scale, softcap=entry.softcap, vocab_size=vocabulary)


def own_pages(nbytes: int) -> Tensor:
    """[nbytes] uint8 of pages that go back to the system with the last tensor on them.

    Heads are read by one thread after another; what `malloc` gives a thread, it keeps for threads of that
    arena after it is freed: several heads' worth for ten teachers.
    """
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    if tensor.device.type != "cpu":
        return tensor.to(dtype)
    copy = own_pages(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
    return copy.copy_(tensor)


def head_bytes(head: Head) -> int:
    """Bytes `head` keeps in memory."""
    tensors: list[Tensor] = [head.weight] if head.bias is None else [head.weight, head.bias]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
