"""A published teacher as a Hugging Face folder again, for whoever needs the whole model at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from opd.models.hf_folder import INDEX, described_in, made_once, write_checksums
from opd.storage.files import atomic_folder, write_atomic
from opd.storage.manifest import LATEST, MANIFEST
from opd.storage.published import PublishedModel
from opd.storage.tensors import save_tensors
from opd.teachers.published_adapter import DESCRIPTION, PublishedAdapter, is_adapter
from opd.teachers.unit_tensors import unit_tensors


def download(url: str, folder: Path) -> Path:
    """Write the published model at `url` to `folder`, one safetensors file per unit; returns `folder`.

    A folder that is there already is kept if it was written from what is published now and no byte of it has
    changed; else it is written again. Memory is that of the largest unit. Raises `StorageError` if the model
    cannot be read, or its bytes are not what was published.
    """
    adapter = PublishedAdapter.open(url) if is_adapter(url) else None
    with PublishedModel.open(adapter.base if adapter else url) as published:
        if adapter is not None:
            adapter.require_base(published.manifest.digest)
        digest = adapter.digest if adapter else published.manifest.digest
        return made_once(folder, digest, lambda: _write(published, adapter, folder))


def _write(published: PublishedModel, adapter: PublishedAdapter | None, folder: Path) -> None:
    manifest = published.manifest
    with atomic_folder(folder, replace=True) as target:
        _write_small_files(published, target)
        weight_map: dict[str, str] = {}
        for unit in manifest.units.values():
            if unit.name == "head" and manifest.head.tied:
                continue
            published.require_memory(unit.name)
            buffer = bytearray(max(unit.nbytes, 1))
            published.read_unit(unit.name, memoryview(buffer))
            file = f"{unit.name}.safetensors"
            tensors = unit_tensors(unit, torch.frombuffer(buffer, dtype=torch.uint8))
            save_tensors(target / file, adapter.merge(tensors) if adapter else tensors)
            weight_map |= dict.fromkeys(unit.tensors, file)
        write_atomic(target / INDEX, _json({"metadata": {}, "weight_map": weight_map}))
        write_checksums(target)


@contextmanager
def small_files(source: str) -> Iterator[Path]:
    """A folder with the configuration and tokenizer of a teacher while the block runs.

    For a Hugging Face folder it is that folder. Raises `StorageError` if a published one cannot be read.
    """
    if not is_published(source):
        yield described_in(Path(source))
        return
    adapter = PublishedAdapter.open(source) if is_adapter(source) else None
    url = adapter.base if adapter else source
    with TemporaryDirectory(prefix="opd-") as folder, PublishedModel.open(url) as published:
        if adapter is not None:
            adapter.require_base(published.manifest.digest)
        _write_small_files(published, Path(folder))
        yield Path(folder)


def is_published(source: str) -> bool:
    """Whether `source` is what `opd publish` wrote and not a Hugging Face folder."""
    scheme, _, path = source.rpartition("://")
    if scheme not in ("", "file"):
        return True
    return any((Path(path) / name).exists() for name in (LATEST, MANIFEST, DESCRIPTION))


def _write_small_files(published: PublishedModel, folder: Path) -> None:
    manifest = published.manifest
    write_atomic(folder / "config.json", _json(manifest.config))
    if manifest.generation_config is not None:
        write_atomic(folder / "generation_config.json", _json(manifest.generation_config))
    for name, content in published.tokenizer_files().items():
        write_atomic(folder / name, content)


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()
