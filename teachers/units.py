"""A published model's units as tensors, its head by itself, and all of it as a Hugging Face folder again."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.errors import ModelError, TeacherError
from opd.kernels.head import Head
from opd.models.hf_folder import INDEX, described_in, made_once, write_checksums
from opd.storage.files import atomic_folder, write_atomic
from opd.storage.manifest import LATEST, MANIFEST
from opd.storage.published import PublishedModel
from opd.storage.tensors import save_tensors
from opd.teachers.published_adapter import DESCRIPTION, PublishedAdapter, is_adapter

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
