"""Keys and values of interrupted requests in one file; see `opd.rollout.preemption.KVStore`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opd.errors import CheckpointError
from opd.storage.files import fsync_folder
from opd.storage.tensors import load_tensors, save_tensors

if TYPE_CHECKING:
    from torch import Tensor


class KVFile:
    """One safetensors file, whole or absent. What cannot be written or read is computed again, so that is no
    error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace what is kept; on a full disk nothing is kept."""
        try:
            save_tensors(self.path, tensors)
        except CheckpointError:
            self.clear()

    def load(self) -> dict[str, Tensor] | None:
        """What is kept; `None` if there is nothing or it is damaged."""
        if not self.path.exists():
            return None
        try:
            return load_tensors(self.path)
        except CheckpointError:
            return None

    def clear(self) -> None:
        """Keep nothing."""
        if self.path.exists():
            self.path.unlink()
            fsync_folder(self.path.parent)
