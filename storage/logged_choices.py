"""Expert choices and sampling masks in the log of tokens: frames that come before the frame of their tokens.

A frame of choices names the digest of the frame of tokens that it belongs to, and counts only if that one
follows. So a chunk is logged with its choices or not at all. A reader that does not know these frames reads
the tokens.

    digest (8)  xxh3-64 of the payload of the frame of tokens
    L, K, bytes of a number, spans, rows of tokens, rows (4 each)
    spans       request number, first position, rows, 0 (4 each), index of the first row (8)
    rows        [rows, L, K]: those of the chunk's tokens, if any, then those of its spans

A frame of masks has the same digest, and then the int32 ids of the masks of the tokens, end to end: the index
of its first id and the number of ids (4 each), and these. Few are in one frame. The tokens themselves say how
many ids each has (`wal_table.TOKEN`).

All little-endian. Requests that share a prompt share its rows. Shapes: `B` tokens of a chunk, `L` routed
blocks, `K` experts of a token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from opd.errors import StorageError
from opd.storage.framed_log import MAX_PAYLOAD
from opd.types import Chunk, ExpertSpan

_HEAD = struct.Struct("<QIIIIII")
_MASKS = struct.Struct("<QII")
_SPAN = np.dtype(
    [("request", "<u4"), ("first", "<u4"), ("count", "<u4"), ("zero", "<u4"), ("row", "<u8")],
)
_DTYPES = (np.dtype("u1"), np.dtype("<u2"))
_LARGEST = 1 << 28
"""Bytes of a frame beyond which the next span begins another."""
_LIMIT = 1 << 20
"""Limit of `L` and of `K`."""


class LoggedChoices(NamedTuple):
    digest: int
    rows: np.ndarray | None
    """[B, L, K], or `None` if no token of the chunk has any."""
    spans: list[tuple[int, ExpertSpan]]
    """Request numbers, each with choices of further positions."""


def payload_digest(payload: bytes | memoryview) -> int:
    """Return the digest by which choices name their frame of tokens."""
    return xxh3_64_intdigest(payload)


def check_choices(chunk: Chunk) -> None:
    """Raise `StorageError` if the expert choices of `chunk` are not of one form that the log holds."""
    rows = chunk.expert_choices
    arrays = [span.choices for _, span in chunk.expert_spans]
    arrays += [] if rows is None else [rows]
    forms = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(forms) > 1 or any(array.ndim != 3 or array.dtype not in _DTYPES for array in arrays):
        raise StorageError(
            f"a chunk has expert choices of the forms {sorted(map(str, forms))}; give uint8 or uint16"
            " [n, L, K], all of one model"
        )
    if rows is not None and len(rows) != len(chunk.uids):
        raise StorageError(
            f"a chunk has {len(chunk.uids)} tokens and {len(rows)} expert choices; give one each"
        )


def encode_choices(
    tokens: bytes | memoryview, rows: np.ndarray | None, spans: Sequence[tuple[int, ExpertSpan]]
) -> Iterator[bytes]:
    """Yield the payloads of the frames that come before the frame whose payload is `tokens`. `rows`
    [B, L, K]: choices of the tokens; `spans`: of further positions, by request number.
    """
    if rows is None and not spans:
        return
    digest = payload_digest(tokens)
    waiting: list[tuple[int, ExpertSpan]] = []
    size, counted = 0, set[int]()
    for number, span in spans:
        size += 0 if id(span.choices) in counted else span.choices.nbytes
        counted.add(id(span.choices))
        if waiting and size > _LARGEST:
            yield _encode_frame(digest, None, waiting)
            waiting, size, counted = [], span.choices.nbytes, {id(span.choices)}
        waiting.append((number, span))
    if waiting or (rows is not None and len(rows)):
        yield _encode_frame(digest, rows, waiting)


def _encode_frame(digest: int, rows: np.ndarray | None, spans: Sequence[tuple[int, ExpertSpan]]) -> bytes:
    arrays = [] if rows is None else [rows]
    table, first, end = np.zeros(len(spans), _SPAN), dict[int, int](), 0 if rows is None else len(rows)
    for index, (number, (position, choices)) in enumerate(spans):
        if id(choices) not in first:
            first[id(choices)] = end
            arrays.append(choices)
            end += len(choices)
        table[index] = number, position, len(choices), 0, first[id(choices)]
    form = arrays[0]
    count = 0 if rows is None else len(rows)
    head = _HEAD.pack(digest, *form.shape[1:], form.dtype.itemsize, len(spans), count, end)
    data = b"".join([head, table.tobytes(), *(np.ascontiguousarray(array).tobytes() for array in arrays)])
    payload = data.ljust(-(-len(data) // 8) * 8, b"\0")
    if len(payload) > MAX_PAYLOAD:
        raise StorageError("expert choices of one prompt do not fit into one commit; shorten the prompts")
    return payload


def decode_choices(payload: memoryview) -> LoggedChoices:
    """Decode a payload of `encode_choices`. Raises `ValueError` and `struct.error` for another."""
    digest, layers, per_token, width, count, token_rows, total = _HEAD.unpack_from(payload)
    if not (0 < layers < _LIMIT and 0 < per_token < _LIMIT and width in (1, 2) and token_rows <= total):
        raise ValueError("expert choices of a form that there is not")
    start = _HEAD.size + count * _SPAN.itemsize
    numbers = total * layers * per_token
    if start + numbers * width > len(payload):
        raise ValueError(f"{total} expert choices in {len(payload)} bytes")
    table = np.frombuffer(payload, _SPAN, count, _HEAD.size)
    flat = np.frombuffer(payload, _DTYPES[width - 1], numbers, start)
    rows = flat.reshape(total, layers, per_token)
    if ((table["row"] > total) | (table["count"] > total - table["row"].clip(0, total))).any():
        raise ValueError("expert choices of more positions than there are")
    copies: dict[tuple[int, int], np.ndarray] = {}  # what requests share, they share again
    spans = []
    for number, first, length, _, row in table.tolist():
        if (row, length) not in copies:
            copies[row, length] = rows[row : row + length].copy()
        spans.append((number, ExpertSpan(first, copies[row, length])))
    return LoggedChoices(digest, rows[:token_rows] if token_rows else None, spans)


def encode_masks(tokens: bytes | memoryview, masks: np.ndarray) -> Iterator[bytes]:
    """Yield the payloads of frames of sampling `masks` [B] object, before the frame with payload `tokens`."""
    ids = b"".join(mask for mask in masks if mask is not None)
    for start in range(0, len(ids), _LARGEST):
        part = ids[start : start + _LARGEST]
        data = _MASKS.pack(payload_digest(tokens), start // 4, len(part) // 4) + part
        yield data.ljust(-(-len(data) // 8) * 8, b"\0")


class LoggedMasks(NamedTuple):
    digest: int
    first: int
    ids: bytes


def decode_masks(payload: memoryview) -> LoggedMasks:
    """Decode a payload of `encode_masks`. Raises `ValueError` and `struct.error` for another."""
    digest, first, count = _MASKS.unpack_from(payload)
    if 4 * count > len(payload) - _MASKS.size:
        raise ValueError(f"sampling masks of {count} ids in {len(payload)} bytes")
    return LoggedMasks(digest, first, bytes(payload[_MASKS.size : _MASKS.size + 4 * count]))


def mask_counts(masks: np.ndarray) -> np.ndarray:
    """Return [B] uint32: the number of ids in each of `masks` [B] object."""
    return np.array([0 if mask is None else len(mask) // 4 for mask in masks], "<u4")


def join_logged(frames: Sequence[LoggedMasks], payload: memoryview, counts: np.ndarray) -> np.ndarray | None:
    """Return the masks [B] object of the tokens in the frame `payload`, which have `counts` [B] ids in
    `frames` before it, or `None` without any. Raises `ValueError` if the frames have more or fewer.
    """
    if not frames and not counts.any():
        return None
    digest = payload_digest(payload)
    # A frame may be there twice, if a process died before it wrote the tokens and another drew the same.
    parts = {one.first: one.ids for one in frames if one.digest == digest}
    ids = b"".join(parts[first] for first in sorted(parts))
    ends = 4 * np.cumsum(counts, dtype=np.int64)
    if len(ids) != (ends[-1] if len(ends) else 0):
        raise ValueError(f"{len(ids)} bytes of sampling masks for {int(counts.sum())} ids")
    if not ids:
        return None
    masks, starts = np.full(len(counts), None), ends - 4 * counts.astype(np.int64)
    for row in np.flatnonzero(counts).tolist():
        masks[row] = ids[starts[row] : ends[row]]
    return masks
