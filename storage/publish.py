"""Publishing: a Hugging Face folder becomes shard files and a manifest in an object store.

Two passes over the checkpoint, each in constant memory. The first computes every checksum and so the digest
that names the version. The second writes the shard files, then the small files, then `manifest.json`, then
`latest`. Until the manifest exists nothing looks like a model. Tensors are read as byte ranges of their
safetensors files, so nothing is loaded as a whole.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from opd.errors import StorageError, limit_fix
from opd.storage.files import fill_from, read_description
from opd.storage.manifest import (
    EMBEDDING_WEIGHT,
    FILES,
    FORMAT,
    FORMAT_VERSION,
    HEAD_BIAS,
    HEAD_WEIGHT,
    LATEST,
    MANIFEST,
    MAX_FILE_BYTES,
    MAX_LAYERS,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    TOKENIZER_FILES,
    FileEntry,
    HeadEntry,
    Manifest,
    TensorEntry,
    Unit,
    block_checksum,
    block_size,
    from_document,
    lay_out_tensors,
    manifest_digest,
    parse_manifest,
    seal_document,
    to_document,
    unit_of,
    unit_order,
)
from opd.storage.object_store import ObjectStore
from opd.storage.weight_folder import TensorSource, are_numbers, convert_read_errors, no_number, read_headers

MEND = "copy the folder again."


class UnitSource:
    """The flat buffer of one unit, read from the checkpoint range by range.

    Safe between threads. Close it, or use `with`.
    """

    def __init__(
        self, entries: Mapping[str, TensorEntry], sources: Mapping[str, TensorSource], nbytes: int
    ) -> None:
        """`sources` holds the bytes of each tensor, under the names of `entries`."""
        self.nbytes = nbytes
        self._entries = entries
        self._pieces = [(entry, sources[name]) for name, entry in entries.items()]
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()

    def read(self, start: int, stop: int) -> bytearray:
        """Return bytes `start ... stop - 1` of the buffer. Gaps between tensors are zero."""
        buffer = bytearray(stop - start)
        view = memoryview(buffer)
        for entry, source in self._pieces:
            low, high = max(start, entry.offset), min(stop, entry.offset + entry.nbytes)
            if low >= high:
                continue
            with convert_read_errors(source.path, StorageError):
                with self._opening:
                    if source.path not in self._descriptors:
                        descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
                        self._descriptors[source.path] = descriptor
                    descriptor = self._descriptors[source.path]
                fill_from(descriptor, source.start + low - entry.offset, view[low - start : high - start])
        return buffer

    def require_numbers(self, start: int, data: bytearray) -> None:
        """Raise `CheckpointError` naming a tensor with NaN or infinity in `data`, from byte `start` on."""
        view = memoryview(data)
        for entry, source in self._pieces:
            low, high = max(start, entry.offset), min(start + len(data), entry.offset + entry.nbytes)
            if low < high and not are_numbers(entry.dtype, view[low - start : high - start]):
                name = next(name for name, other in self._entries.items() if other is entry)
                raise no_number(source.path.parent, name)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> UnitSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ModelForm:
    """Settings of head and tokenizer in the configuration, which storage does not interpret."""

    scale: float = 1.0
    softcap: float | None = None
    tied: bool = False
    """Whether a missing `lm_head.weight` is the embedding."""
    layers: int | None = None
    """Number of layers there must be. `None` trusts the checkpoint."""
    fingerprint: Mapping[str, Any] | None = None
    """Of the tokenizer; JSON-able."""
    left_out: frozenset[str] = frozenset()
    """Names of the checkpoint's tensors that are no part of the model."""


@dataclass(frozen=True, slots=True)
class PublishResult:
    manifest: Manifest
    written: bool
    """False if the same bytes had been published already."""


def publish(
    checkpoint: str | Path,
    store: ObjectStore,
    *,
    shards: int,
    form: ModelForm,
    progress: Callable[[str, int, int], None] | None = None,
) -> PublishResult:
    """Publish the Hugging Face folder `checkpoint` in `store` for `shards` ranks.

    Does nothing if the same model is completely published with as many shards, except that `latest` then
    names it. `progress` is called with ("checksums" or "upload", bytes done, bytes in all). Raises
    `StorageError` if the checkpoint is incomplete, holds tensors of unknown position, changes meanwhile, or
    the store fails. A second call repairs the remains of an interruption.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise StorageError(f"a model cannot be published in {shards} shards; choose 1 to {MAX_SHARDS}.")
    folder = Path(checkpoint)
    report = progress or (lambda stage, done, total: None)
    units, sources = units_of(folder, form)
    with ExitStack() as stack:
        readers = {
            name: stack.enter_context(UnitSource(unit.tensors, sources, unit.nbytes))
            for name, unit in units.items()
        }
        manifest = _build_manifest(folder, form, _compute_checksums(units, readers, shards, report), shards)
        path = f"{manifest.version_name}/{MANIFEST}"
        if _is_complete(store, manifest):
            _point_latest(store, manifest)
            return PublishResult(manifest, written=False)
        store.delete(path)
        _upload_shards(store, manifest, readers, report)
    for name in manifest.tokenizer:
        store.put(f"{manifest.version_name}/{FILES}/{name}", _read_small(folder / name))
    store.put(path, seal_document(to_document(manifest)))
    _point_latest(store, manifest)
    return PublishResult(manifest, written=True)


def units_of(folder: Path, form: ModelForm) -> tuple[dict[str, Unit], dict[str, TensorSource]]:
    """Return the checkpoint's units, without checksums, and the source of each tensor."""
    sources = read_headers(folder)
    for absent, present in ((HEAD_WEIGHT, EMBEDDING_WEIGHT), (EMBEDDING_WEIGHT, HEAD_WEIGHT)):
        if form.tied and absent not in sources and present in sources:
            sources[absent] = sources[present]
    members: dict[str, list[str]] = {"norm": []}  # OLMo's norms have no weights
    for name in sorted(sources.keys() - form.left_out):
        unit = unit_of(name)
        if unit is not None:
            members.setdefault(unit, []).append(name)
    layers = sum(unit.startswith("layer.") for unit in members)
    count = layers if form.layers is None else form.layers
    if count > MAX_LAYERS:
        raise StorageError(f"{folder} has {count} layers; models of at most {MAX_LAYERS} can be published.")
    for needed in ["embedding", *(f"layer.{i}" for i in range(count)), "head"]:
        if needed not in members:
            raise StorageError(
                f"{folder} has no tensors for the {needed.replace('.', ' ')}; copy it again from its source."
            )
    if layers > count:
        raise StorageError(f"{folder} has {layers} layers and config.json says {count}; check the folder.")
    units = {}
    for name in unit_order(members):
        entries, nbytes = lay_out_tensors(
            (key, sources[key].dtype, sources[key].shape) for key in members[name]
        )
        units[name] = Unit(name, nbytes, entries, 1, "", b"")
    return units, sources


def _compute_checksums(
    units: Mapping[str, Unit],
    readers: Mapping[str, UnitSource],
    shards: int,
    report: Callable[[str, int, int], None],
) -> dict[str, Unit]:
    total, done = sum(unit.nbytes for unit in units.values()), 0
    summed = {}
    for name, unit in units.items():
        sized = replace(unit, block_bytes=block_size(unit.nbytes, shards))
        digest, blocks = xxhash.xxh3_128(), bytearray()
        for index in range(sized.block_count):
            data = readers[name].read(*sized.block_range(index))
            readers[name].require_numbers(sized.block_range(index)[0], data)
            digest.update(data)
            blocks += block_checksum(data)
            done += len(data)
            report("checksums", done, total)
        summed[name] = replace(sized, checksum=digest.hexdigest(), blocks=bytes(blocks))
    return summed


def _build_manifest(folder: Path, form: ModelForm, units: dict[str, Unit], shards: int) -> Manifest:
    weight = units["head"].tensors.get(HEAD_WEIGHT)
    if weight is None or len(weight.shape) != 2:
        raise StorageError(f"{folder} has no head {HEAD_WEIGHT} of shape [V, D]; check the folder.")
    generation = folder / "generation_config.json"
    tokenizer = {name: _read_small(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    manifest = Manifest(
        digest="",
        shards=shards,
        config=read_description(folder / "config.json", MEND, StorageError),
        generation_config=read_description(generation, MEND, StorageError) if generation.is_file() else None,
        head=HeadEntry(
            scale=form.scale,
            softcap=form.softcap,
            bias=HEAD_BIAS in units["head"].tensors,
            tied=form.tied,
            vocabulary=weight.shape[0],
            hidden=weight.shape[1],
        ),
        fingerprint=form.fingerprint,
        tokenizer={
            name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in tokenizer.items()
        },
        units=units,
    )
    try:
        described = replace(manifest, digest=manifest_digest(to_document(manifest)))
        from_document(to_document(described))  # refuses here anything that a reader would refuse
    except ValueError as error:
        raise StorageError(f"{folder} cannot be published: {error}; check its files.") from error
    return described


def _is_complete(store: ObjectStore, manifest: Manifest) -> bool:
    """Return whether this very version exists: its manifest intact, every file of the right size."""
    path = f"{manifest.version_name}/{MANIFEST}"
    if not store.exists(path):
        return False
    try:
        published = parse_manifest(store.get(path, most=MAX_MANIFEST_BYTES), store.object_address(path))
    except StorageError:
        return False
    files = {manifest.shard_path(shard): size for shard, size in enumerate(manifest.sizes)}
    files |= {f"{manifest.version_name}/{FILES}/{name}": e.size for name, e in manifest.tokenizer.items()}
    present = (store.exists(name) and store.size(name) == size for name, size in files.items())
    return seal_document(to_document(published)) == seal_document(to_document(manifest)) and all(present)


def _upload_shards(
    store: ObjectStore,
    manifest: Manifest,
    readers: Mapping[str, UnitSource],
    report: Callable[[str, int, int], None],
) -> None:
    total = sum(manifest.sizes)
    done = [0] * manifest.shards

    def upload_shard(shard: int) -> None:
        def counted_chunks() -> Iterator[bytes]:
            done[shard] = 0
            for chunk in _shard_chunks(manifest, readers, shard):
                yield chunk
                done[shard] += len(chunk)
                report("upload", sum(done), total)

        store.put(manifest.shard_path(shard), counted_chunks)

    with ThreadPoolExecutor(min(store.options.threads, manifest.shards)) as pool:
        futures = [pool.submit(upload_shard, shard) for shard in range(manifest.shards)]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _shard_chunks(manifest: Manifest, readers: Mapping[str, UnitSource], shard: int) -> Iterator[bytes]:
    """Yield the content of a shard file, block by block, each compared with the first pass."""
    end = 0
    for name, unit in manifest.units.items():
        offset = manifest.shard_offset(name, shard)
        if offset < end:
            continue  # written already: a tied head
        if offset > end:
            yield bytes(offset - end)
        end = offset
        for index in range(*unit.rank_blocks(shard, manifest.shards)):
            data = readers[name].read(*unit.block_range(index))
            if block_checksum(data) != unit.block_checksum(index):
                raise StorageError(
                    f"the checkpoint changed while its {name} was published; wait until it is whole, then"
                    " publish it again."
                )
            yield bytes(data)
            end += len(data)


def _point_latest(store: ObjectStore, manifest: Manifest) -> None:
    """Let `latest` name this version, unless it does already."""
    entry = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": manifest.version_name}
    data = seal_document({**entry, "digest": manifest.digest})
    if not store.exists(LATEST) or store.size(LATEST) != len(data) or store.get(LATEST) != data:
        store.put(LATEST, data)


def _read_small(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise StorageError(
                f"{path} has {size} bytes, and no tokenizer's file has more than {MAX_FILE_BYTES}."
            )
        return path.read_bytes()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}); {limit_fix(error, 'copy the folder again')}."
        ) from error
