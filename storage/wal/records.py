"""What the frames of a log say: requests opened, tokens written, requests ended, requests forgotten.

Every payload is a multiple of 8 bytes. A request is known by a number that its `OPEN` frame gives it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from opd.errors import StorageError
from opd.types import RolloutRequest, SamplingParams, Status


class FrameKind(IntEnum):
    """What a frame's payload holds."""

    OPEN = 1
    STEP = 2
    CLOSE = 3
    RETIRE = 4


TOKEN = np.dtype(
    [
        ("request", "<u4"),
        ("position", "<i4"),
        ("token", "<i4"),
        ("logprob", "<f4"),
        ("version", "<i4"),
        ("flags", "<u4"),
    ]
)
"""One token, 24 bytes: its request's number, position in the response, id, log-probability and version."""
RAW = np.dtype("V24")
"""The same 24 bytes without fields: numpy moves these ten times faster."""
WORDS = TOKEN.itemsize // 4
"""Every field is one 32-bit word; `[B, WORDS]` of `<i4` are the same bytes without a view's checks."""
END_OF_REQUEST = np.dtype([("request", "<u4"), ("status", "<u4")])
ENVIRONMENT = 1
"""Flag of a token that the environment wrote, not the student."""
MAX_NUMBER = (1 << 32) - 2

STATUSES = (Status.PENDING, Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)
STATUS_CODES = {status: code for code, status in enumerate(STATUSES)}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_OPEN = struct.Struct("<IIII")
_CLOSE = struct.Struct("<IIII")
_NO_REASON = 0xFFFF_FFFF


class Opening(NamedTuple):
    """The content of an `OPEN` frame."""

    number: int
    request: RolloutRequest
    metadata: dict[str, Any]


class Closing(NamedTuple):
    """The content of a `CLOSE` frame."""

    number: int
    status: Status
    reason: str | None


def encode_open(number: int, request: RolloutRequest, metadata: Mapping[str, Any]) -> bytes:
    """Number and prompt of a request in binary, the rest as JSON. Raises `StorageError` for what JSON cannot
    hold.
    """
    try:
        own = _JSON.encode({"uid": request.uid, "seed": int(request.seed), "metadata": dict(metadata)})
        text = f'{own[:-1]},"sampling":{_sampling_text(request.sampling)}}}'.encode("ascii")
    except (TypeError, ValueError) as error:
        raise StorageError(
            f"request {request.uid}: its metadata cannot be written as JSON ({error}); give plain values"
        ) from None
    prompt = np.ascontiguousarray(request.prompt_ids, dtype="<i4").tobytes()
    head = _OPEN.pack(number, len(text), len(prompt) // 4, 0)
    return head + _padded(text) + _padded(prompt)


@lru_cache(maxsize=64)
def _sampling_text(sampling: SamplingParams) -> str:
    """As JSON; the requests of a batch share it."""
    return _JSON.encode(
        {
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": int(sampling.top_k),
            "max_new_tokens": int(sampling.max_new_tokens),
            "stop_ids": [int(token) for token in sampling.stop_ids],
        }
    )


def decode_open(payload: memoryview) -> Opening:
    """What `encode_open` wrote."""
    number, text_bytes, prompt_tokens, _ = _OPEN.unpack_from(payload)
    prompt_at = _OPEN.size + _round_up(text_bytes)
    document = json.loads(bytes(payload[_OPEN.size : _OPEN.size + text_bytes]))
    prompt = np.frombuffer(payload, dtype="<i4", count=prompt_tokens, offset=prompt_at).astype(np.int32)
    uid, metadata, sampling = document["uid"], document["metadata"], document["sampling"]
    if not isinstance(uid, str) or not isinstance(metadata, dict):
        raise ValueError("a request without a uid or metadata")
    parameters = SamplingParams(
        temperature=float(sampling["temperature"]),
        top_p=float(sampling["top_p"]),
        top_k=int(sampling["top_k"]),
        max_new_tokens=int(sampling["max_new_tokens"]),
        stop_ids=tuple(map(int, sampling["stop_ids"])),
    )
    return Opening(number, RolloutRequest(uid, prompt, parameters, int(document["seed"])), metadata)


def encode_close(number: int, status: Status, reason: str | None) -> bytes:
    """How a request ended outside a chunk, and why."""
    text = b"" if reason is None else reason.encode("utf-8", "surrogatepass")
    length = _NO_REASON if reason is None else len(text)
    return _CLOSE.pack(number, STATUS_CODES[status], length, 0) + _padded(text)


def decode_close(payload: memoryview) -> Closing:
    """What `encode_close` wrote."""
    number, code, length, _ = _CLOSE.unpack_from(payload)
    reason = None
    if length != _NO_REASON:
        reason = bytes(payload[_CLOSE.size : _CLOSE.size + length]).decode("utf-8", "surrogatepass")
    return Closing(number, STATUSES[code], reason)


def encode_retire(numbers: list[int]) -> bytes:
    """The numbers of requests that the log may forget; an odd count is filled up by repeating the last."""
    even = numbers + numbers[-1:] * (len(numbers) % 2)
    return np.array(even, dtype="<u4").tobytes()


def decode_retire(payload: memoryview) -> list[int]:
    """What `encode_retire` wrote, perhaps with the last number twice."""
    return np.frombuffer(payload, dtype="<u4").tolist()


def _round_up(length: int) -> int:
    return -(-length // 8) * 8


def _padded(data: bytes) -> bytes:
    return data.ljust(_round_up(len(data)), b"\0")
