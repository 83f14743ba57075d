"""The manifest of a published model: what it is, where its bytes are, and how to tell that they are right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from opd.errors import StorageError
from opd.storage.layout import (
    CHECKSUM_BYTES,
    TensorEntry,
    Unit,
    extents,
    shard_offsets,
    shard_path,
)
from opd.storage.layout import Extent as Extent

FORMAT = "opd-published-model"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
FILES = "files"


@dataclass(frozen=True, slots=True)
class HeadEntry:
    """The form of the head: `logits = softcap * tanh(scale * (h W^T + b) / softcap)`."""

    scale: float
    softcap: float | None
    bias: bool
    """Whether the unit "head" holds `lm_head.bias`."""
    tied: bool
    """Whether the weight is a copy of the embedding's."""
    vocabulary: int
    """Rows of the weight; may exceed the tokenizer's."""
    hidden: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A small file that lies beside the weights."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known of a published model without reading its weights."""

    digest: str
    """sha256, hex: identity of weights, configuration, head and tokenizer; the same for any `shards`."""
    shards: int
    config: Mapping[str, Any]
    """The Hugging Face config.json."""
    generation_config: Mapping[str, Any] | None
    head: HeadEntry
    fingerprint: Mapping[str, Any] | None
    """Of the tokenizer's vocabulary, special ids and chat template."""
    tokenizer: Mapping[str, FileEntry]
    """Name -> entry of the tokenizer's files."""
    units: Mapping[str, Unit]
    """In the order a forward pass needs them."""
    _offsets: list[dict[str, int]] = field(init=False, repr=False, compare=False)
    sizes: list[int] = field(init=False, repr=False, compare=False)
    """Bytes of every shard file."""

    def __post_init__(self) -> None:
        units = list(self.units.values())
        placed = [shard_offsets(units, shard, self.shards) for shard in range(self.shards)]
        object.__setattr__(self, "_offsets", [offsets for offsets, _ in placed])
        object.__setattr__(self, "sizes", [size for _, size in placed])

    @property
    def version(self) -> str:
        """Name of its folder."""
        return f"{self.digest[:16]}-{self.shards}"

    @property
    def nbytes(self) -> int:
        """Bytes of all units."""
        return sum(unit.nbytes for unit in self.units.values())

    def unit(self, name: str) -> Unit:
        """`StorageError` naming the known ones if there is no unit `name`."""
        if name not in self.units:
            known = ", ".join(self.units)
            raise StorageError(f"the published model has no unit {name}; it has {known}.")
        return self.units[name]

    def shard_path(self, shard: int) -> str:
        """Below the URL the model was published under."""
        return f"{self.version}/{shard_path(shard, self.shards)}"

    def shard_offset(self, unit: str, shard: int) -> int:
        """Where the part of `unit` starts in a shard file."""
        return self._offsets[shard][unit]

    def extents(self, unit: str, rank: int, world: int) -> list[Extent]:
        """What rank `rank` of `world` reads of `unit`, in the order of the unit's buffer."""
        offsets = [self._offsets[shard][unit] for shard in range(self.shards)]
        return list(extents(self.unit(unit), rank, world, self.shards, offsets))


def identity(manifest: Mapping[str, Any]) -> str:
    """The digest: sha256 over everything that can change what the model computes or reads, not its blocks."""
    described = {key: manifest[key] for key in ("config", "generation_config", "head", "tokenizer")}
    units = [
        [name, unit["nbytes"], unit["checksum"], unit["tensors"]] for name, unit in manifest["units"].items()
    ]
    return hashlib.sha256(_canonical({**described, "units": sorted(units)})).hexdigest()


def to_document(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON data, without its seal."""
    units = {
        name: {
            "nbytes": unit.nbytes,
            "block_bytes": unit.block_bytes,
            "checksum": unit.checksum,
            "blocks": unit.blocks.hex(),
            "tensors": {key: [t.dtype, list(t.shape), t.offset, t.nbytes] for key, t in unit.tensors.items()},
        }
        for name, unit in manifest.units.items()
    }
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "digest": manifest.digest,
        "shards": manifest.shards,
        "config": dict(manifest.config),
        "generation_config": manifest.generation_config,
        "head": asdict(manifest.head),
        "tokenizer": {
            "fingerprint": manifest.fingerprint,
            "files": {name: asdict(entry) for name, entry in manifest.tokenizer.items()},
        },
        "order": list(manifest.units),
        "units": units,
        "files": {shard_path(s, manifest.shards): size for s, size in enumerate(manifest.sizes)},
    }


def from_document(document: Mapping[str, Any]) -> Manifest:
    """The inverse of `to_document`; `KeyError`, `TypeError` or `ValueError` for anything else."""
    units = {}
    for name in document["order"]:
        entry = document["units"][name]
        tensors = {
            key: TensorEntry(dtype, tuple(shape), offset, nbytes)
            for key, (dtype, shape, offset, nbytes) in entry["tensors"].items()
        }
        in_order = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        blocks = bytes.fromhex(entry["blocks"])
        units[name] = Unit(name, entry["nbytes"], in_order, entry["block_bytes"], entry["checksum"], blocks)
        if len(blocks) != CHECKSUM_BYTES * units[name].block_count:
            raise ValueError(f"{name} has {len(blocks)} bytes of checksums")
    return Manifest(
        digest=document["digest"],
        shards=document["shards"],
        config=document["config"],
        generation_config=document["generation_config"],
        head=HeadEntry(**document["head"]),
        fingerprint=document["tokenizer"]["fingerprint"],
        tokenizer={name: FileEntry(**entry) for name, entry in document["tokenizer"]["files"].items()},
        units=units,
    )


def seal(document: Mapping[str, Any]) -> bytes:
    """JSON in its one canonical form, with a sha256 over the rest, so that no changed byte goes unnoticed."""
    return _canonical({**document, "sha256": hashlib.sha256(_canonical(document)).hexdigest()})


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The document `data` seals.

    Raises `StorageError` naming `where` if a byte differs from what was written, or if it was written by a
    newer release.
    """
    broken = f"{where} is incomplete or corrupt; publish the model again."
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise StorageError(f"{where} is no file of a published model; check the URL.")
        if document["format_version"] != FORMAT_VERSION:
            raise StorageError(
                f"{where} is of format {document['format_version']!r} and this release reads format"
                f" {FORMAT_VERSION}; update opd, or publish the model again."
            )
        expected = document.pop("sha256")
        if hashlib.sha256(_canonical(document)).hexdigest() != expected or seal(document) != data:
            raise StorageError(broken)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(broken) from error
    return document


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in `data`; `StorageError` naming `where` if it cannot be trusted."""
    document = unseal(data, where)
    try:
        return from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{where} is not a whole manifest ({error}); publish the model again.") from error


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
