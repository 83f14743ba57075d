"""The tensors of one unit of a published model as views on the bytes it was read into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.errors import TeacherError

if TYPE_CHECKING:
    from opd.storage.manifest import Unit

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names safetensors gives them."""


def unit_tensors(unit: Unit, flat: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of `unit` by name, from its bytes `flat` [nbytes] uint8.

    A tensor that has the right dtype (default: its own) is a view: it is valid as long as `flat` is. Other
    floating-point tensors are converted copies. Raises `TeacherError` for a dtype that has no torch
    counterpart here.
    """
    found = {}
    for name, entry in unit.tensors.items():
        if entry.dtype not in _DTYPES:
            raise TeacherError(
                f"tensor {name} of a published teacher is {entry.dtype}, which cannot be computed with;"
                f" publish a checkpoint in one of {', '.join(_DTYPES)}."
            )
        raw = flat[entry.offset : entry.offset + entry.nbytes]
        tensor = raw.view(_DTYPES[entry.dtype]).view(tuple(entry.shape))
        found[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return found


def converted_bytes(unit: Unit, dtype: torch.dtype) -> int:
    """Bytes of those tensors of `unit` that `unit_tensors` has to copy into another dtype."""
    kinds = [(entry, _DTYPES.get(entry.dtype)) for entry in unit.tensors.values()]
    return sum(
        entry.nbytes // kind.itemsize * dtype.itemsize
        for entry, kind in kinds
        if kind is not None and kind.is_floating_point and kind != dtype
    )
