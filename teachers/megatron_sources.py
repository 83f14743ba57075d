"""Where a rank's slice of a teacher comes from: a Hugging Face folder, or a published model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from opd.errors import TeacherError
from opd.megatron.convert import assemble, check_tensors, read_from
from opd.megatron.form import MegatronForm
from opd.megatron.layout import HEAD, Cut, Piece
from opd.models.hf_config import read_config
from opd.models.hf_folder import check_folder, weight_files
from opd.storage.checkpoint_source import read_headers
from opd.storage.published import PublishedModel
from opd.storage.sealed import file_digest
from opd.teachers.gather import UnitGather
from opd.teachers.unit_tensors import unit_tensors

if TYPE_CHECKING:
    import torch.distributed as dist


class WeightSource(Protocol):
    """A model's weights, read piece by piece."""

    @property
    def form(self) -> MegatronForm: ...

    @property
    def digest(self) -> str:
        """Identity of the weights."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes of weights this rank has read so far."""
        ...

    def read(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Each of `pieces` by name, in their order, in the source's dtype and memory of its own.

        With a group all its ranks read the same pieces together.
        """
        ...

    def close(self) -> None: ...


class FolderSource:
    """A Hugging Face folder. A rank reads the bytes of its own slices and no others."""

    def __init__(self, folder: str | Path) -> None:
        """Raises `CheckpointError` for a missing or damaged folder, `ModelError` for an unknown form."""
        self.folder = Path(folder)
        check_folder(self.folder)
        self.form = MegatronForm.from_config(read_config(self.folder))
        self._tensors = read_headers(self.folder)
        shapes = {name: entry.shape for name, entry in self._tensors.items()}
        check_tensors(self.form, shapes, str(self.folder))
        self.bytes_read = 0
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """sha256 over configuration and weight files, which are read for it, once."""
        if self._digest is None:
            digest = hashlib.sha256()
            for name in ["config.json", *weight_files(self.folder)]:
                digest.update(f"{name} {file_digest(self.folder / name)}\n".encode())
            self._digest = digest.hexdigest()
        return self._digest

    def read(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
        """The slices are copied out of the mapped files, which are open while this runs."""
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}

            def slices(cut: Cut) -> Tensor:
                path = self._tensors[cut.source].path
                if path not in handles:
                    handles[path] = stack.enter_context(safe_open(path, framework="pt"))
                tensor = handles[path].get_slice(cut.source)
                stop = tensor.get_shape()[cut.axis] if cut.stop is None else cut.stop
                part = tensor[cut.start : stop] if cut.axis == 0 else tensor[:, cut.start : stop]
                self.bytes_read += part.nbytes
                return part

            for piece in pieces:
                yield piece.name, assemble(piece, self.form, slices)

    def close(self) -> None:
        """Nothing is kept open between reads."""


class PublishedSource:
    """A model written by `opd publish`. Each rank of the group reads 1/N of every unit from the store.

    Blocks are verified as they arrive and do not end where Megatron-Core cuts: a projection back is cut by
    columns, which lie all over its bytes. So the ranks read disjoint parts, gather the unit, keep their
    slices and drop the rest: every byte leaves the store once, and beyond the slices one unit is in memory.
    """

    def __init__(self, url: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Raises `StorageError` if nothing is published there, `ModelError` for an unknown form."""
        self.published = PublishedModel.open(url)
        try:
            self.form = _published_form(self.published)
            units = self.published.manifest.units.values()
            shapes = {name: entry.shape for unit in units for name, entry in unit.tensors.items()}
            check_tensors(self.form, shapes, f"published model {self.published.manifest.digest[:12]}")
        except BaseException:
            self.published.close()
            raise
        shared = group is not None and group.size() > 1
        self._gather = UnitGather(device, group if shared else None)
        self._device = device

    @property
    def digest(self) -> str:
        """Digest of the published weights."""
        return self.published.manifest.digest

    @property
    def bytes_read(self) -> int:
        """Manifest and repeated reads included."""
        return self.published.bytes_read

    def read(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Raises `StorageError` from the reader, and `TeacherError` if another rank could not read."""
        for unit, members in groupby(pieces, key=_unit):
            weights = self._tensors(unit)
            for piece in members:
                yield piece.name, assemble(piece, self.form, read_from(weights))

    def close(self) -> None:
        """Let the store go."""
        self.published.close()

    def _tensors(self, unit: str) -> dict[str, Tensor]:
        entry = self.published.manifest.unit(unit)
        into = torch.empty(self._gather.room(self.published, unit), dtype=torch.uint8, device=self._device)
        tensors = unit_tensors(entry, self._gather.read(self.published, unit, into))
        if unit == "head" and self.form.tied:
            # The published copy of a tied head has a name of its own.
            weight = next(tensor for name, tensor in tensors.items() if name.endswith(".weight"))
            tensors["model.embed_tokens.weight"] = weight
        return tensors


def open_source(source: str, group: dist.ProcessGroup, device: torch.device) -> WeightSource:
    """The weights at a URL of a published model, or in a Hugging Face folder."""
    from opd.teachers.download import is_published

    return PublishedSource(source, group, device) if is_published(source) else FolderSource(source)


def _unit(piece: Piece) -> str:
    """The published unit all cuts of `piece` lie in."""
    if piece.name == HEAD:
        return "head"
    parts = piece.name.split(".")
    if parts[0] == "embedding":
        return "embedding"
    return f"layer.{parts[2]}" if parts[1] == "layers" else "norm"


def _published_form(published: PublishedModel) -> MegatronForm:
    entry = published.manifest.head
    with TemporaryDirectory(prefix="opd-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(published.manifest.config)), "utf-8")
        form = MegatronForm.from_config(read_config(Path(folder)))
    if entry.bias or entry.scale != 1.0 or entry.softcap is not None:
        raise TeacherError(
            f"published model {published.manifest.digest[:12]} has a head with bias, scale or softcap, which"
            " a Megatron-Core teacher cannot have; leave distill.backend at torch for it."
        )
    return form
