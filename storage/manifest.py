"""The manifest of a published model: what it is, where its bytes are, and how to tell that they are right."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from opd.errors import StorageError
from opd.foreign import depth_exceeds, read_document, shown, whole
from opd.storage.layout import (
    CHECKSUM_BYTES,
    HEAD_BIAS,
    HEAD_WEIGHT,
    Unit,
    block_size,
    extents,
    place,
    shard_offsets,
    shard_path,
    unit_of,
)
from opd.storage.layout import Extent as Extent

FORMAT = "opd-published-model"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
LATEST = "latest"
FILES = "files"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""The only small files that are published, and the only ones a reader ever writes."""

MAX_SHARDS = 4096
MAX_LAYERS = 512
MAX_MANIFEST_BYTES = 48 * 2**20
"""Enough for the checksums of four TiB in blocks of 4 MiB."""
MAX_TENSORS = 2**18
MAX_LATEST_BYTES = 4096
MAX_FILE_BYTES = 256 * 2**20
"""Of a tokenizer's file."""
_MAX_LENGTH = 2**40
"""Of one dimension of a tensor."""
_MAX_DIMENSIONS = 8
_MAX_SCALE = 1e30
_MAX_CONFIG_DEPTH = 16

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"[0-9a-f]{16}-[1-9][0-9]{0,3}")
_UNIT = re.compile(r"embedding|norm|head|layer\.(0|[1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class HeadEntry:
    """The form of the head: `logits = softcap * tanh(scale * (h W^T + b) / softcap)`."""

    scale: float
    softcap: float | None
    bias: bool
    """Whether the unit "head" holds `lm_head.bias`."""
    tied: bool
    """Whether the weight is the embedding's; its bytes are then published once."""
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
    """The inverse of `to_document`; `KeyError`, `TypeError` or `ValueError` for anything else.

    Only what follows from few numbers is believed: where tensors and blocks lie is computed again, the files
    are those that `publish` writes, and the digest is that of the content.
    """
    shards = whole(document["shards"], 1, MAX_SHARDS, "shards")
    units = _units(document["order"], document["units"], shards)
    found = document["digest"]
    if _matching(found, _DIGEST, "its digest") != identity(document):
        raise ValueError("its digest is not that of its content: it was changed after it was published")
    tokenizer = document["tokenizer"]
    return Manifest(
        digest=found,
        shards=shards,
        config=_settings(document["config"], "config"),
        generation_config=_maybe_settings(document["generation_config"], "generation_config"),
        head=_head(document["head"], units["head"]),
        fingerprint=_maybe_settings(tokenizer["fingerprint"], "the tokenizer's fingerprint"),
        tokenizer={name: _file(name, entry) for name, entry in tokenizer["files"].items()},
        units=units,
    )


def _units(order: Any, entries: Any, shards: int) -> dict[str, Unit]:
    if not isinstance(order, list) or not isinstance(entries, dict) or not 3 <= len(order) <= MAX_LAYERS + 3:
        raise ValueError(f"its units are not an embedding, at most {MAX_LAYERS} layers, a norm and a head")
    for name in order:
        _matching(name, _UNIT, "a unit's name")
    due = ["embedding", *(f"layer.{index}" for index in range(len(order) - 3)), "norm", "head"]
    if order != due or set(entries) != set(due):
        raise ValueError("its units are not an embedding, layers in order, a norm and a head")
    if sum(len(entry["tensors"]) for entry in entries.values()) > MAX_TENSORS:
        raise ValueError(f"it has more than {MAX_TENSORS} tensors")
    return {name: _unit(name, entries[name], shards) for name in order}


def _unit(name: str, entry: Any, shards: int) -> Unit:
    """One unit, all places in it computed from the tensors' types and shapes."""
    described = []
    for key, (dtype, shape, _, _) in sorted(entry["tensors"].items()):
        if unit_of(key) != name:
            raise ValueError(f"{name} holds the tensor {shown(key)}, which belongs elsewhere")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{key} has a shape that no tensor has")
        described.append((key, dtype, [whole(side, 0, _MAX_LENGTH, f"a side of {key}") for side in shape]))
    tensors, nbytes = place(described)
    written = {key: [t.dtype, list(t.shape), t.offset, t.nbytes] for key, t in tensors.items()}
    if entry["tensors"] != written or entry["nbytes"] != nbytes:
        raise ValueError(f"the tensors of {name} overlap, leave gaps, or have other sizes than their shapes")
    blocks = bytes.fromhex(entry["blocks"])
    checksum = _matching(entry["checksum"], _CHECKSUM, f"the checksum of {name}")
    unit = Unit(name, nbytes, tensors, block_size(nbytes, shards), checksum, blocks)
    if entry["block_bytes"] != unit.block_bytes or len(blocks) != CHECKSUM_BYTES * unit.block_count:
        raise ValueError(f"the blocks of {name} are not those of {nbytes} bytes in {shards} shards")
    return unit


def _head(entry: Any, unit: Unit) -> HeadEntry:
    weight = unit.tensors.get(HEAD_WEIGHT)
    head = HeadEntry(**entry)
    whole(head.vocabulary, 1, _MAX_LENGTH, "the vocabulary")
    whole(head.hidden, 1, _MAX_LENGTH, "the hidden size")
    if weight is None or weight.shape != (head.vocabulary, head.hidden):
        raise ValueError("its head's weight is not of the shape it gives")
    if head.bias is not (HEAD_BIAS in unit.tensors) or not isinstance(head.tied, bool):
        raise ValueError("its head is not the one whose tensors it holds")
    for value in (head.scale, 1.0 if head.softcap is None else head.softcap):
        if type(value) not in (int, float) or not -_MAX_SCALE <= value <= _MAX_SCALE:
            raise ValueError("its head's scale or softcap is no finite number")
    return head


def _file(name: str, entry: Any) -> FileEntry:
    if name not in TOKENIZER_FILES:
        raise ValueError(f"it lists {shown(name, 60)!r} among the tokenizer's files, which is none of them")
    found = FileEntry(**entry)
    _matching(found.sha256, _DIGEST, f"the sha256 of {name}")
    whole(found.size, 0, MAX_FILE_BYTES, f"the size of {name}")
    return found


def _settings(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or depth_exceeds(value, _MAX_CONFIG_DEPTH):
        raise ValueError(f"{what} is no object of at most {_MAX_CONFIG_DEPTH} levels")
    return value


def _maybe_settings(value: Any, what: str) -> Mapping[str, Any] | None:
    return None if value is None else _settings(value, what)


def _matching(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is not one that is ever written")
    return value


def seal(document: Mapping[str, Any]) -> bytes:
    """JSON in its one canonical form, with a sha256 over the rest, so that no changed byte goes unnoticed."""
    return _canonical({**document, "sha256": hashlib.sha256(_canonical(document)).hexdigest()})


def unseal(data: bytes, where: str, most: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """The document of at most `most` bytes that `data` seals.

    Raises `StorageError` naming `where` if a byte differs from what was written, or if it was written by a
    newer release.
    """
    broken = f"{where} is incomplete or corrupt; publish the model again."
    try:
        document = read_document(data, most)
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
        manifest = from_document(document)
        if seal(to_document(manifest)) != data:
            raise ValueError("it says more, or otherwise, than what is published")
    except (KeyError, TypeError, ValueError, AttributeError, StorageError) as error:
        reason = f"it has no entry {error}" if isinstance(error, KeyError) else str(error).removesuffix(".")
        reason = shown(reason, 200)
        raise StorageError(f"{where} is not a whole manifest ({reason}); publish the model again.") from error
    return manifest


def parse_latest(data: bytes, where: str) -> str:
    """Name of the version that `latest` points to; `StorageError` naming `where` if it cannot be trusted."""
    document = unseal(data, where, MAX_LATEST_BYTES)
    try:
        return _matching(document["version"], _VERSION, "the version")
    except (KeyError, ValueError) as error:
        raise StorageError(f"{where} names no version; publish the model again.") from error


def is_version(name: str) -> bool:
    """Whether `name` is one that a version's folder may have."""
    return _VERSION.fullmatch(name) is not None


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
