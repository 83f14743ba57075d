"""The identity of named weights: sha256 over their names, shapes, dtypes and bytes, in their order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class WeightsDigest:
    """The digest of weights that pass by."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`weights`, as they are."""
        for name, tensor in weights:
            self._sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            self._sha.update(raw_bytes(tensor).numpy().data)
            yield name, tensor

    def hex(self) -> str:
        """Of what has passed so far."""
        return self._sha.hexdigest()


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 (hex) over the names, shapes, dtypes and bytes of `weights`, in their order."""
    digest = WeightsDigest()
    for _ in digest.watch(weights):
        pass
    return digest.hex()


def raw_bytes(tensor: Tensor) -> Tensor:
    """[nbytes] uint8 on the CPU: the bytes of `tensor`, shared where it lies there in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
