"""Tensors through Ray's object store: written once, read in place by every process of the node."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.kernels.head import Head
from opd.models.digest import raw_bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as bytes, which travel apart from the message and are not copied on the node."""

    data: np.ndarray
    """[bytes] uint8."""
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        """Shares memory with a contiguous tensor on the CPU."""
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(raw_bytes(tensor).numpy(), name, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        """The tensor, on the CPU, without a copy: read-only if the store holds the bytes, so that writing to
        it ends the process. It keeps the store's object alive.
        """
        dtype = getattr(torch, self.dtype)
        if not self.data.nbytes:
            return torch.zeros(self.shape, dtype=dtype)
        memory = (ctypes.c_uint8 * self.data.nbytes).from_address(self.data.ctypes.data)
        memory.owner = self.data  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class PackedHead:
    """An `opd.kernels.head.Head` on its way."""

    weight: Packed
    bias: Packed | None
    scale: float
    softcap: float | None
    vocab_size: int | None
    allow_bf16_logits: bool

    @classmethod
    def of(cls, head: Head) -> PackedHead:
        bias = None if head.bias is None else Packed.of(head.bias)
        weight = Packed.of(head.weight)
        return cls(weight, bias, head.scale, head.softcap, head.vocab_size, head.allow_bf16_logits)

    def head(self, device: torch.device) -> Head:
        """The head on `device`; on the CPU its weight stays where the store has it."""
        weight = self.weight.tensor().to(device)
        bias = None if self.bias is None else self.bias.tensor().to(device)
        return Head(weight, bias, self.scale, self.softcap, self.vocab_size, self.allow_bf16_logits)
