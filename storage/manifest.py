"""A published model: the position of every byte, its description, and checksums of its bytes.

A unit is loaded at once by a streamed model: the embedding, one layer, the final norm, or the head. Its
tensors stand one after another in one flat buffer, which is cut into blocks with a checksum each. Rank `r` of
`W` owns a run of whole blocks. Shard file `r` of `N` holds the blocks of rank `r` of `N`, unit after unit:
one contiguous range a unit.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from opd.errors import StorageError, reason_of
from opd.untrusted import bounded_integer, depth_exceeds, read_document, safe_excerpt

ALIGNMENT = 64
"""Bytes. Tensors in a unit and slices in a shard file start at multiples of it."""
MAX_BLOCK_BYTES = 4 * 2**20
CHECKSUM_BYTES = 16

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors' name of the type."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Position of a tensor in its unit's buffer."""

    dtype: str
    """As safetensors names it: "BF16", "F32", ..."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of tensors that is loaded at once."""

    name: str
    """"embedding", "layer.0", ..., "norm" or "head"."""
    nbytes: int
    tensors: Mapping[str, TensorEntry]
    """By the checkpoint's names, in the order of their offsets."""
    block_bytes: int
    """The last block may be shorter."""
    checksum: str
    """xxh3-128 of the whole buffer, hex, independent of the blocks."""
    blocks: bytes
    """xxh3-128 of every block, 16 bytes each."""

    @property
    def block_count(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    def block_range(self, index: int) -> tuple[int, int]:
        """Return (start, stop) of a block in the buffer."""
        return index * self.block_bytes, min((index + 1) * self.block_bytes, self.nbytes)

    def block_checksum(self, index: int) -> bytes:
        """[16] bytes."""
        return self.blocks[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]

    def rank_blocks(self, rank: int, world: int) -> tuple[int, int]:
        """Return (first, one past the last) block that rank `rank` of `world` owns."""
        if not 0 <= rank < world:
            raise StorageError(f"there is no rank {rank} among {world}; ranks count from 0.")
        return rank * self.block_count // world, (rank + 1) * self.block_count // world

    def rank_range(self, rank: int, world: int) -> tuple[int, int]:
        """Return (start, stop) in the buffer of the blocks that rank `rank` of `world` owns."""
        first, last = self.rank_blocks(rank, world)
        return first * self.block_bytes, min(last * self.block_bytes, self.nbytes)


@dataclass(frozen=True, slots=True)
class ShardExtent:
    """A contiguous slice of a unit in a shard file."""

    shard: int
    offset: int
    """In the shard file."""
    start: int
    """In the unit's buffer."""
    stop: int


def block_checksum(data: bytes | bytearray | memoryview) -> bytes:
    """Return [16] bytes of xxh3-128, for its speed (above memory bandwidth, blake2b and sha256 1-2 GB/s)."""
    return xxhash.xxh3_128(data).digest()


def block_size(nbytes: int, shards: int) -> int:
    """Return the bytes of a block, at most `MAX_BLOCK_BYTES`, equally many for each shard."""
    per_shard = max(1, -(-nbytes // (shards * MAX_BLOCK_BYTES)))
    return align_offset(max(1, -(-nbytes // (shards * per_shard))))


def align_offset(offset: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def shard_path(shard: int, shards: int) -> str:
    """Return the name of a shard file below the version's folder."""
    return f"shard-{shard:05d}-of-{shards:05d}.bin"


def unit_order(names: Iterable[str]) -> list[str]:
    """Return "embedding", the layers by number, "norm", "head", restricted to `names`."""
    rank = {"embedding": -2, "norm": 10**9, "head": 10**9 + 1}
    return sorted(names, key=lambda name: rank[name] if name in rank else int(name.removeprefix("layer.")))


HEAD_WEIGHT, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
EMBEDDING_WEIGHT = "model.embed_tokens.weight"
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,4})\..+")
_FIXED = {
    "model.embed_tokens.": "embedding",
    "model.norm.": "norm",
    "model.final_layernorm.": "norm",
    "model.embedding_norm.": "norm",
    "lm_head.": "head",
}
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")
"""Suffixes of buffers that old checkpoints hold and every loader computes again."""


def unit_of(name: str) -> str | None:
    """Return the unit of the tensor `name`, or `None` if it is not part of the weights.

    Knows the names of Hugging Face's plain decoders. Raises `StorageError` for any other name.
    """
    if name.endswith(_BUFFERS):
        return None
    layer = _LAYER.fullmatch(name)
    is_valid = _TENSOR_NAME.fullmatch(name) is not None
    if is_valid and layer is not None:
        return f"layer.{int(layer[1])}"
    for prefix, unit in _FIXED.items():
        if is_valid and name.startswith(prefix):
            return unit
    raise StorageError(
        f"the checkpoint's tensor {safe_excerpt(name)} belongs to no known part of a decoder"
        " (model.embed_tokens, model.layers.N, model.norm, lm_head), and only models of these can be"
        " published; give its folder to a teacher of type local."
    )


def lay_out_tensors(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[dict[str, TensorEntry], int]:
    """Lay (name, dtype, shape) out one after another, each aligned. Return the entries and the buffer's size.

    Raises `StorageError` for an unknown element type.
    """
    entries, end = {}, 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BYTES:
            raise StorageError(
                f"the tensor {name} is of type {safe_excerpt(dtype)}, which cannot be published."
            )
        nbytes = DTYPE_BYTES[dtype] * math.prod(shape)
        entries[name] = TensorEntry(dtype, tuple(shape), align_offset(end), nbytes)
        end = align_offset(end) + nbytes
    return entries, end


def shard_extents(
    unit: Unit, rank: int, world: int, shards: int, offsets: Sequence[int]
) -> Iterator[ShardExtent]:
    """Yield the ranges of shard files that rank `rank` of `world` reads. `offsets` are the unit's per shard.

    One extent if `world` is the number of shards.
    """
    start, stop = unit.rank_range(rank, world)
    for shard in range(shards):
        low, high = unit.rank_range(shard, shards)
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield ShardExtent(shard, offsets[shard] + first - low, first, last)


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
"""Limit of a tokenizer's file."""
_MAX_LENGTH = 2**40
"""Limit of one dimension of a tensor."""
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
    """Whether the weight is the embedding's. Its bytes are then published once."""
    vocabulary: int
    """Rows of the weight. They may exceed the tokenizer's vocabulary."""
    hidden: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A small file that lies beside the weights."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Complete description of a published model, without its weights."""

    digest: str
    """sha256, hex: identity of weights, configuration, head and tokenizer, the same for any `shards`."""
    shards: int
    config: Mapping[str, Any]
    """The Hugging Face config.json."""
    generation_config: Mapping[str, Any] | None
    head: HeadEntry
    fingerprint: Mapping[str, Any] | None
    """Fingerprint of the tokenizer's vocabulary, special ids and chat template."""
    tokenizer: Mapping[str, FileEntry]
    """Name -> entry of the tokenizer's files."""
    units: Mapping[str, Unit]
    """In the order a forward pass needs them."""
    _offsets: list[dict[str, int]] = field(init=False, repr=False, compare=False)
    sizes: list[int] = field(init=False, repr=False, compare=False)
    """Bytes of every shard file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_offsets", [])
        object.__setattr__(self, "sizes", [])
        for shard in range(self.shards):
            offsets: dict[str, int] = {}
            by_content: dict[tuple[str, int, bytes], int] = {}
            end = 0
            for unit in self.units.values():
                content = (unit.checksum, unit.block_bytes, unit.blocks)
                if content not in by_content:  # else a tied head, which has the embedding's offset
                    by_content[content] = align_offset(end)
                    start, stop = unit.rank_range(shard, self.shards)
                    end = by_content[content] + stop - start
                offsets[unit.name] = by_content[content]
            self._offsets.append(offsets)
            self.sizes.append(end)

    @property
    def version_name(self) -> str:
        return f"{self.digest[:16]}-{self.shards}"

    @property
    def nbytes(self) -> int:
        """Bytes of all units."""
        return sum(unit.nbytes for unit in self.units.values())

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for unit in self.units.values() for name, entry in unit.tensors.items()}

    @property
    def tensor_formats(self) -> dict[str, str]:
        """Safetensors' names of the types of all tensors, by name."""
        return {name: entry.dtype for unit in self.units.values() for name, entry in unit.tensors.items()}

    def unit(self, name: str) -> Unit:
        """Return the unit `name`. Raises `StorageError` naming the known ones if there is none."""
        if name not in self.units:
            raise StorageError(f"the published model has no unit {name}; it has {', '.join(self.units)}.")
        return self.units[name]

    def shard_path(self, shard: int) -> str:
        """Return the path of a shard file below the URL the model was published under."""
        return f"{self.version_name}/{shard_path(shard, self.shards)}"

    def shard_offset(self, unit: str, shard: int) -> int:
        return self._offsets[shard][unit]

    def rank_extents(self, unit: str, rank: int, world: int) -> list[ShardExtent]:
        """Return the ranges that rank `rank` of `world` reads of `unit`, in the unit buffer's order."""
        offsets = [self._offsets[shard][unit] for shard in range(self.shards)]
        return list(shard_extents(self.unit(unit), rank, world, self.shards, offsets))


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest: sha256 over all that changes the model's results or inputs, not its blocks."""
    described = {key: manifest[key] for key in ("config", "generation_config", "head", "tokenizer")}
    units = [
        [name, unit["nbytes"], unit["checksum"], unit["tensors"]] for name, unit in manifest["units"].items()
    ]
    return hashlib.sha256(_canonical_json({**described, "units": sorted(units)})).hexdigest()


def to_document(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as JSON data, without its seal."""
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
    """Parse the result of `to_document`. Raises `KeyError`, `TypeError` or `ValueError` for anything else.

    Few numbers are trusted. Offsets of tensors and blocks are computed again, the files are those that
    `publish` writes, and the digest is that of the content.
    """
    shards = bounded_integer(document["shards"], 1, MAX_SHARDS, "shards")
    order, entries = document["order"], document["units"]
    if not isinstance(order, list) or not isinstance(entries, dict) or not 3 <= len(order) <= MAX_LAYERS + 3:
        raise ValueError(f"its units are not an embedding, at most {MAX_LAYERS} layers, a norm and a head")
    for name in order:
        _require_match(name, _UNIT, "a unit's name")
    due = ["embedding", *(f"layer.{index}" for index in range(len(order) - 3)), "norm", "head"]
    if order != due or set(entries) != set(due):
        raise ValueError("its units are not an embedding, layers in order, a norm and a head")
    if sum(len(entry["tensors"]) for entry in entries.values()) > MAX_TENSORS:
        raise ValueError(f"it has more than {MAX_TENSORS} tensors")
    units = {name: _parse_entry(name, entries[name], shards) for name in order}
    digest = _require_match(document["digest"], _DIGEST, "its digest")
    if digest != manifest_digest(document):
        raise ValueError("its digest is not that of its content: it was changed after it was published")
    tokenizer = document["tokenizer"]
    return Manifest(
        digest=digest,
        shards=shards,
        config=_require_settings(document["config"], "config"),
        generation_config=_maybe_settings(document["generation_config"], "generation_config"),
        head=_parse_head(document["head"], units["head"]),
        fingerprint=_maybe_settings(tokenizer["fingerprint"], "the tokenizer's fingerprint"),
        tokenizer={name: _parse_file(name, entry) for name, entry in tokenizer["files"].items()},
        units=units,
    )


def _parse_entry(name: str, entry: Any, shards: int) -> Unit:
    """Parse one unit. All its offsets are computed from the tensors' types and shapes."""
    described = []
    for key, (dtype, shape, _, _) in sorted(entry["tensors"].items()):
        if unit_of(key) != name:
            raise ValueError(f"{name} holds the tensor {safe_excerpt(key)}, which belongs elsewhere")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{key} has a shape that no tensor has")
        described.append(
            (key, dtype, [bounded_integer(side, 0, _MAX_LENGTH, f"a side of {key}") for side in shape])
        )
    tensors, nbytes = lay_out_tensors(described)
    written = {key: [t.dtype, list(t.shape), t.offset, t.nbytes] for key, t in tensors.items()}
    if entry["tensors"] != written or entry["nbytes"] != nbytes:
        raise ValueError(f"the tensors of {name} overlap, leave gaps, or have other sizes than their shapes")
    blocks = bytes.fromhex(entry["blocks"])
    checksum = _require_match(entry["checksum"], _CHECKSUM, f"the checksum of {name}")
    unit = Unit(name, nbytes, tensors, block_size(nbytes, shards), checksum, blocks)
    if entry["block_bytes"] != unit.block_bytes or len(blocks) != CHECKSUM_BYTES * unit.block_count:
        raise ValueError(f"the blocks of {name} are not those of {nbytes} bytes in {shards} shards")
    return unit


def _parse_head(entry: Any, unit: Unit) -> HeadEntry:
    weight = unit.tensors.get(HEAD_WEIGHT)
    head = HeadEntry(**entry)
    bounded_integer(head.vocabulary, 1, _MAX_LENGTH, "the vocabulary")
    bounded_integer(head.hidden, 1, _MAX_LENGTH, "the hidden size")
    if weight is None or weight.shape != (head.vocabulary, head.hidden):
        raise ValueError("its head's weight is not of the shape it gives")
    if head.bias is not (HEAD_BIAS in unit.tensors) or not isinstance(head.tied, bool):
        raise ValueError("its head is not the one whose tensors it holds")
    for value in (head.scale, 1.0 if head.softcap is None else head.softcap):
        if type(value) not in (int, float) or not -_MAX_SCALE <= value <= _MAX_SCALE:
            raise ValueError("its head's scale or softcap is no finite number")
    return head


def _parse_file(name: str, entry: Any) -> FileEntry:
    if name not in TOKENIZER_FILES:
        raise ValueError(
            f"it lists {safe_excerpt(name, 60)!r} among the tokenizer's files, which is none of them"
        )
    file = FileEntry(**entry)
    _require_match(file.sha256, _DIGEST, f"the sha256 of {name}")
    bounded_integer(file.size, 0, MAX_FILE_BYTES, f"the size of {name}")
    return file


def _require_settings(value: object, label: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or depth_exceeds(value, _MAX_CONFIG_DEPTH):
        raise ValueError(f"{label} is no object of at most {_MAX_CONFIG_DEPTH} levels")
    return value


def _maybe_settings(value: object, label: str) -> Mapping[str, Any] | None:
    return None if value is None else _require_settings(value, label)


def _require_match(value: object, pattern: re.Pattern[str], label: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{label} is not one that is ever written")
    return value


def seal_document(document: Mapping[str, object]) -> bytes:
    """Return JSON in its one canonical form, with a sha256 over the rest, to detect any change."""
    return _canonical_json({**document, "sha256": hashlib.sha256(_canonical_json(document)).hexdigest()})


def unseal_document(data: bytes, where: str, most: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """Return the document of at most `most` bytes that `data` seals.

    Raises `StorageError` naming `where` if a byte has changed, or if a newer release wrote it.
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
        if (
            hashlib.sha256(_canonical_json(document)).hexdigest() != expected
            or seal_document(document) != data
        ):
            raise StorageError(broken)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(broken) from error
    return document


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse the manifest in `data`. Raises `StorageError` naming `where` if it cannot be trusted."""
    document = unseal_document(data, where)
    try:
        manifest = from_document(document)
        if seal_document(to_document(manifest)) != data:
            raise ValueError("it says more, or otherwise, than what is published")
    except (KeyError, TypeError, ValueError, AttributeError, StorageError) as error:
        cause = safe_excerpt(reason_of(error), 200)
        raise StorageError(f"{where} is not a whole manifest ({cause}); publish the model again.") from error
    return manifest


def parse_latest(data: bytes, where: str) -> str:
    """Return the version in `latest`. Raises `StorageError` naming `where` if it cannot be trusted."""
    document = unseal_document(data, where, MAX_LATEST_BYTES)
    try:
        return _require_match(document["version"], _VERSION, "the version")
    except (KeyError, ValueError) as error:
        raise StorageError(f"{where} names no version; publish the model again.") from error


def is_version(name: str) -> bool:
    """Return whether `name` is a valid name of a version's folder."""
    return _VERSION.fullmatch(name) is not None


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
