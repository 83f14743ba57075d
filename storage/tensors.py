"""Named tensors in one safetensors file, with its sha256, and the cache's arrays as tensors.

The only file of `storage/` that needs torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from opd.errors import CheckpointError, reason_of, way_out
from opd.storage.files import read_plain, write_atomic
from opd.storage.leases import Lease


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> str:
    """Write `tensors` (any shapes, dtypes, devices) to `path`, atomically; return the file's sha256 in hex.

    Tensors that share memory are written as copies of their own. Raises `OSError` if the file cannot be
    written, for example on a full disk.
    """
    data = safetensors.torch.save(_unshared(tensors))
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def load_tensors(path: str | os.PathLike[str], expected_digest: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of `path` onto the CPU; with `expected_digest`, only if the file's sha256 is that.

    Raises `CheckpointError` naming `path` if it is missing, truncated, no safetensors, or has another digest.
    """
    try:
        data = read_plain(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error});"
            f" {way_out(error, 'restore it or use an older checkpoint')}"
        ) from error
    if expected_digest is not None and (found := hashlib.sha256(data).hexdigest()) != expected_digest:
        raise CheckpointError(
            f"{path} is corrupt: its sha256 is {found[:16]}... where {expected_digest[:16]}... was written; "
            "restore it or use an older checkpoint"
        )
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is truncated or is no safetensors file ({reason_of(error)}); restore it or use an"
            " older checkpoint"
        ) from error


def rows_tensor(lease: Lease) -> Tensor:
    """[R, D] the leased rows on the CPU, in their own dtype, without a copy.

    The tensor stays readable after the lease has ended. Writing to it changes the tensor, not the cache.
    """
    rows = torch.from_numpy(lease.private_rows)
    return rows.view(torch.bfloat16) if lease.record.dtype == "bfloat16" else rows


def rows_array(rows: Tensor) -> np.ndarray:
    """`rows` (`[R, D]` bfloat16, float16 or float32) as `HiddenStateCache.put` takes them: bfloat16 as its
    uint16 bit pattern. Shares memory with a contiguous tensor on the CPU.
    """
    plain = rows.detach().cpu().contiguous()
    return plain.view(torch.uint16).numpy() if plain.dtype == torch.bfloat16 else plain.numpy()


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two use the same memory, as safetensors asks."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        values = tensor.detach().cpu().contiguous()
        if values.untyped_storage().data_ptr() in seen:
            values = values.clone()
        seen.add(values.untyped_storage().data_ptr())
        plain[name] = values
    return plain
