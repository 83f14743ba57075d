"""Where the bytes of a published model lie: units, tensors, blocks, parts of ranks, shard files.

A unit is what a streamed model loads at once: the embedding, one layer, the final norm, or the head. Its
tensors stand one after another in one flat buffer, which is cut into blocks with a checksum each. Rank `r`
of `W` owns a run of whole blocks. Shard file `r` of `N` holds, unit after unit, what rank `r` of `N` owns:
one contiguous range a unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from opd.errors import StorageError
from opd.foreign import shown

ALIGNMENT = 64
"""Bytes; tensors in a unit and parts in a shard file start at multiples of it."""
MAX_BLOCK_BYTES = 4 * 2**20
CHECKSUM_BYTES = 16

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors' name of the type."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in its unit's buffer."""

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
    """xxh3-128 of the whole buffer, hex; does not depend on the blocks."""
    blocks: bytes
    """xxh3-128 of every block, 16 bytes each."""

    @property
    def block_count(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    def block(self, index: int) -> tuple[int, int]:
        """(start, stop) of a block in the buffer."""
        return index * self.block_bytes, min((index + 1) * self.block_bytes, self.nbytes)

    def block_checksum(self, index: int) -> bytes:
        """[16] bytes."""
        return self.blocks[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]

    def part_blocks(self, rank: int, world: int) -> tuple[int, int]:
        """(first, one past the last) block that rank `rank` of `world` owns."""
        if not 0 <= rank < world:
            raise StorageError(f"there is no rank {rank} among {world}; ranks count from 0.")
        return rank * self.block_count // world, (rank + 1) * self.block_count // world

    def part(self, rank: int, world: int) -> tuple[int, int]:
        """(start, stop) in the buffer of what rank `rank` of `world` owns."""
        first, last = self.part_blocks(rank, world)
        return first * self.block_bytes, min(last * self.block_bytes, self.nbytes)


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous piece of a unit in a shard file."""

    shard: int
    offset: int
    """In the shard file."""
    start: int
    """In the unit's buffer."""
    stop: int


def block_checksum(data: bytes | bytearray | memoryview) -> bytes:
    """[16] bytes: xxh3-128, chosen by speed (beyond memory bandwidth; blake2b and sha256 reach 1-2 GB/s)."""
    return xxhash.xxh3_128(data).digest()


def block_size(nbytes: int, shards: int) -> int:
    """Bytes a block, so that every shard gets the same number of blocks, each at most `MAX_BLOCK_BYTES`."""
    per_shard = max(1, -(-nbytes // (shards * MAX_BLOCK_BYTES)))
    return aligned(max(1, -(-nbytes // (shards * per_shard))))


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def shard_path(shard: int, shards: int) -> str:
    """Name of a shard file below the version's folder."""
    return f"shard-{shard:05d}-of-{shards:05d}.bin"


def shard_offsets(units: Sequence[Unit], shard: int, shards: int) -> tuple[dict[str, int], int]:
    """Where each unit's part starts in the shard file, and the file's size. A unit of the same bytes as one
    before it, a tied head, lies where that does.
    """
    offsets: dict[str, int] = {}
    placed: dict[tuple[str, int, bytes], int] = {}
    end = 0
    for unit in units:
        content = (unit.checksum, unit.block_bytes, unit.blocks)
        if content not in placed:
            placed[content] = aligned(end)
            start, stop = unit.part(shard, shards)
            end = placed[content] + stop - start
        offsets[unit.name] = placed[content]
    return offsets, end


def unit_order(names: Iterable[str]) -> list[str]:
    """ "embedding", the layers by number, "norm", "head"; only those among `names`."""
    rank = {"embedding": -2, "norm": 10**9, "head": 10**9 + 1}
    return sorted(names, key=lambda name: rank[name] if name in rank else int(name.removeprefix("layer.")))


HEAD_WEIGHT, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,4})\..+")
_FIXED = {
    "model.embed_tokens.": "embedding",
    "model.norm.": "norm",
    "model.final_layernorm.": "norm",
    "lm_head.": "head",
}
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")
"""Ends of names of buffers that old checkpoints hold and every loader computes anew."""


def unit_of(name: str) -> str | None:
    """The unit the tensor `name` belongs to; `None` if it is not part of the weights.

    Knows the names of Hugging Face's plain decoders (Llama, Mistral, Qwen, Gemma, Granite, Cohere, Phi,
    OLMo). Raises `StorageError` for any other name.
    """
    if name.endswith(_BUFFERS):
        return None
    layer = _LAYER.fullmatch(name)
    known = _TENSOR_NAME.fullmatch(name) is not None
    if known and layer is not None:
        return f"layer.{int(layer[1])}"
    for prefix, unit in _FIXED.items():
        if known and name.startswith(prefix):
            return unit
    raise StorageError(
        f"the checkpoint's tensor {shown(name)} belongs to no known part of a decoder (model.embed_tokens,"
        " model.layers.N, model.norm, lm_head); only plain causal language models can be published."
    )


def place(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[dict[str, TensorEntry], int]:
    """Put (name, dtype, shape) one after another, each aligned: the entries and the buffer's size.

    Raises `StorageError` for a type of element that is not known.
    """
    entries, end = {}, 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BYTES:
            raise StorageError(f"the tensor {name} is of type {shown(dtype)}, which cannot be published.")
        nbytes = DTYPE_BYTES[dtype] * math.prod(shape)
        entries[name] = TensorEntry(dtype, tuple(shape), aligned(end), nbytes)
        end = aligned(end) + nbytes
    return entries, end


def extents(unit: Unit, rank: int, world: int, shards: int, offsets: Sequence[int]) -> Iterator[Extent]:
    """What to read, from which shard file, for rank `rank` of `world`; `offsets` are the unit's per shard.

    One extent if `world` is the number of shards.
    """
    start, stop = unit.part(rank, world)
    for shard in range(shards):
        low, high = unit.part(shard, shards)
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield Extent(shard, offsets[shard] + first - low, first, last)
