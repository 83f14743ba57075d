"""Keys and values of interrupted requests in one file; see `opd.rollout.preemption.KVStore`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opd.errors import CheckpointError
from opd.storage.files import fsync_folder
from opd.storage.sealed import read_sealed, write_sealed
from opd.storage.tensors import load_tensors, save_tensors

if TYPE_CHECKING:
    from torch import Tensor


class KVFile:
    """One safetensors file, whole or absent, with its digest beside it. What cannot be written or read, or is
    not what was written, is computed again, so that is no error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seal = path.with_name(f"{path.name}.json")

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace what is kept; on a full disk nothing is kept."""
        try:
            write_sealed(self._seal, {"file": save_tensors(self.path, tensors)})
        except OSError:
            self.clear()

    def load(self) -> dict[str, Tensor] | None:
        """What is kept; `None` if there is nothing or it is damaged."""
        if not (self.path.exists() and self._seal.exists()):
            return None
        try:
            digest = read_sealed(self._seal, "they are computed again", CheckpointError)["file"]
            return load_tensors(self.path, str(digest))
        except (CheckpointError, KeyError):
            return None

    def clear(self) -> None:
        """Keep nothing."""
        if self.path.exists() or self._seal.exists():
            for path in (self._seal, self.path):
                path.unlink(missing_ok=True)
            fsync_folder(self.path.parent)
