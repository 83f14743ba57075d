"""One cached array as bytes that describe and check themselves, and never change once they have a name.

    magic 8 | header bytes u32 | record bytes u32 | payload bytes u64 | key 32 | xxh3-128 of the payload 16
    record as JSON | zeros up to a multiple of 64 bytes | xxh3-128 of all header bytes before it 16
    payload: the array, C order, little endian

One of the two checksums covers every byte. The number of bytes follows from the header.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, replace

import numpy as np
import xxhash

from opd.untrusted import bounded_integer, convert_decode_errors, read_document

_MAGIC = b"OPDROWS1"
_PREFIX = struct.Struct("<8sIIQ32s16s")
KEY_BYTES = 32
_MAX_HEADER = 1 << 24
_ALIGNMENT = 64
_DTYPES = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "uint8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def cache_key(teacher_digest: str, token_ids: np.ndarray, first_row: int, variant: str = "") -> bytes:
    """Return the 32-byte key of the hidden states of `token_ids` (`[C + R]` integers) from `first_row` on.

    BLAKE2b over all of it. `variant` covers anything else that changes the rows: the dtype they were computed
    in, an adapter.
    """
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not 0 <= first_row <= len(tokens):
        raise ValueError(
            f"{tokens.dtype} {list(tokens.shape)} from row {first_row}: give [T] token ids and a row within"
        )
    name = hashlib.blake2b(digest_size=KEY_BYTES, person=b"opd.rows.1")
    for text in (teacher_digest.encode(), variant.encode()):
        name.update(len(text).to_bytes(8, "little") + text)
    name.update(first_row.to_bytes(8, "little"))
    name.update(np.ascontiguousarray(tokens, dtype="<i4").data)
    return name.digest()


def check_key(key: bytes) -> None:
    """Raise `ValueError` for a key that `cache_key` cannot have made."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {len(key)} bytes; make it with cache_key, which gives {KEY_BYTES}")


class CorruptBlobError(Exception):
    """A blob's bytes have changed. Never leaves `storage/`."""


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """Metadata of one cached array. `put` fills in the fields that follow from the array."""

    uid: str
    """The sample it was computed for."""
    teacher: str
    version: int | str
    """Version of the teacher's weights."""
    rows: int = 0
    width: int = 0
    dtype: str = ""
    """`bfloat16`, `float16` or `float32`, or `uint8` for plain bytes."""
    checksum: str = ""
    """xxh3-128 of the array's bytes, in hex."""


def complete_record(rows: np.ndarray, record: CacheRecord) -> CacheRecord:
    """Return `record` with the fields that follow from `rows` (`[R, D]`, C order).

    Raises `ValueError` for another shape or dtype. Pass bfloat16 as its uint16 bit pattern.
    """
    name = _NAMES.get(rows.dtype)
    if rows.ndim != 2 or name is None:
        raise ValueError(
            f"rows are {rows.dtype} {list(rows.shape)}; give [R, D] as float32, float16, uint8,"
            " or uint16 holding bfloat16"
        )
    checksum = xxhash.xxh3_128_hexdigest(bytes_of(rows))
    return replace(record, rows=rows.shape[0], width=rows.shape[1], dtype=name, checksum=checksum)


def encode_header(key: bytes, record: CacheRecord) -> bytes:
    """The header of a described record, ready to be followed by the array's bytes."""
    fields = asdict(record)
    checksum = bytes.fromhex(fields.pop("checksum"))
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    size = -(-(_PREFIX.size + len(text) + 16) // _ALIGNMENT) * _ALIGNMENT
    prefix = _PREFIX.pack(_MAGIC, size, len(text), _payload_bytes(record), key, checksum)
    body = (prefix + text).ljust(size - 16, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def decode_header(data: np.ndarray, key: bytes) -> tuple[CacheRecord, int]:
    """Return the record of the blob `data` (`[B]` uint8, all of it) and the offset of its array.

    Raises `CorruptBlobError` unless header, lengths and key are exactly those written for `key`.
    """
    if len(data) < _PREFIX.size + 16:
        raise CorruptBlobError("shorter than a header")
    magic, size, length, payload, own_key, checksum = _PREFIX.unpack_from(data.data)
    if magic != _MAGIC or not _PREFIX.size + 16 + length <= size <= len(data):
        raise CorruptBlobError("not a header")
    if xxhash.xxh3_128_digest(data[: size - 16].data) != data[size - 16 : size].tobytes():
        raise CorruptBlobError("wrong header checksum")
    if own_key != key or len(data) != size + payload:
        raise CorruptBlobError("another blob, or cut short")
    with convert_decode_errors(lambda cause: CorruptBlobError(f"a record that nobody wrote ({cause})")):
        fields = read_document(data[_PREFIX.size : _PREFIX.size + length].tobytes(), length)
        record = CacheRecord(**fields, checksum=checksum.hex())
        for side in (record.rows, record.width):
            bounded_integer(side, 0, 1 << 48, "a side of the array")
        texts = (record.uid, record.teacher)
        if not all(isinstance(text, str) for text in texts) or not isinstance(record.version, int | str):
            raise ValueError("names that are no strings")
        if _payload_bytes(record) != payload or size % _ALIGNMENT:
            raise ValueError("an array of another size")
    return record, size


def verify_payload(data: np.ndarray, record: CacheRecord, start: int) -> None:
    """Raise `CorruptBlobError` unless the array that begins at `start` has the record's checksum."""
    if xxhash.xxh3_128_hexdigest(data[start:].data) != record.checksum:
        raise CorruptBlobError("wrong checksum")


def array_view(data: np.ndarray, record: CacheRecord, start: int) -> np.ndarray:
    """The array `[R, D]` within the blob, without a copy."""
    return data[start:].view(_DTYPES[record.dtype]).reshape(record.rows, record.width)


def bytes_of(rows: np.ndarray) -> memoryview:
    """The bytes of an array in C order, without a copy."""
    return rows.reshape(-1).view(np.uint8).data


def _payload_bytes(record: CacheRecord) -> int:
    return record.rows * record.width * _DTYPES[record.dtype].itemsize
