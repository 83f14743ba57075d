"""Counter-based sampling noise: one uniform per (seed, request, position), whatever else happens.

Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the generator behind
`numpy.random.Philox`, evaluated for many keys at once. A request's uniforms are exactly those of
`numpy.random.Generator(numpy.random.Philox(key=[seed, uid_key(uid)])).random()` drawn in order, but any
position is reached at the same cost. So a request's tokens do not depend on its batch mates, nor on being
interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

ROUNDS = 10
WORDS = 4
"""Numbers one counter value gives."""
BLOCK = 16
"""Positions computed together; a multiple of `WORDS`."""

_MULTIPLIER = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER_LOW = _MULTIPLIER & _LOW
_MULTIPLIER_HIGH = _MULTIPLIER >> _HALF
_TO_UNIT = 2.0**-53


def uid_key(uid: str) -> int:
    """64-bit key of a request, the same on every machine (BLAKE2b of its UTF-8 bytes)."""
    return int.from_bytes(blake2b(uid.encode(), digest_size=8).digest(), "little")


def uid_keys(uids: Iterable[str]) -> np.ndarray:
    """[B] uint64: `uid_key` of each."""
    digests = b"".join(blake2b(uid.encode(), digest_size=8).digest() for uid in uids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def _multiply_high(value: np.ndarray) -> np.ndarray:
    """High 64 bits of the 128-bit products `_MULTIPLIER * value`; `value` is [2, N] uint64."""
    low, high = value & _LOW, value >> _HALF
    middle = _MULTIPLIER_HIGH * low + ((_MULTIPLIER_LOW * low) >> _HALF)
    carry = _MULTIPLIER_LOW * high + (middle & _LOW)
    return _MULTIPLIER_HIGH * high + (middle >> _HALF) + (carry >> _HALF)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox 4x64-10 of the counters `(counter, 0, 0, 0)`.

    `counter` [N] uint64 and `key` [2, N] uint64 -> [N, 4] uint64.
    """
    # Words 0 and 2 of the state are the lanes of `mixed`, words 1 and 3 those of `carried`.
    mixed = np.stack([counter, np.zeros_like(counter)])
    carried = np.zeros_like(mixed)
    for round_number in range(ROUNDS):
        round_key = key + _WEYL * np.uint64(round_number)
        product = _MULTIPLIER * mixed
        mixed = _multiply_high(mixed)[::-1] ^ carried ^ round_key
        carried = product[::-1]
    return np.stack([mixed[0], carried[0], mixed[1], carried[1]], axis=1)


def uniform_blocks(keys: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Uniforms in [0, 1) for the positions `blocks * BLOCK ... blocks * BLOCK + BLOCK - 1` of each request.

    `keys` [2, B] uint64 (seeds and `uid_keys`), `blocks` [B] integers -> [B, BLOCK] float64.
    """
    per_block = BLOCK // WORDS
    # numpy's Philox increments its counter before the first draw, hence the 1.
    first = blocks.astype(np.uint64) * np.uint64(per_block) + np.uint64(1)
    counter = (first[:, None] + np.arange(per_block, dtype=np.uint64)).ravel()
    words = philox(counter, np.repeat(keys, per_block, axis=1))
    return ((words >> np.uint64(11)) * _TO_UNIT).reshape(len(blocks), BLOCK)


class NoiseTable:
    """The next uniforms of every running request, one row per slot, refilled a block at a time."""

    def __init__(self, slots: int) -> None:
        self._keys = np.zeros((2, slots), dtype=np.uint64)
        self._block = np.full(slots, -1, dtype=np.int64)
        self._uniforms = np.zeros((slots, BLOCK), dtype=np.float64)
        self._rows = np.arange(slots)

    def assign(self, rows: slice, seeds: np.ndarray, keys: np.ndarray) -> None:
        """Give the slots `rows` to new requests."""
        self._keys[0, rows], self._keys[1, rows] = seeds, keys
        self._block[rows] = -1

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move requests to other slots."""
        self._keys[:, target] = self._keys[:, source]
        self._block[target] = self._block[source]
        self._uniforms[target] = self._uniforms[source]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Uniforms of the first `len(positions)` slots at these response positions: [B] float64."""
        count = len(positions)
        blocks = positions // BLOCK
        stale = np.flatnonzero(self._block[:count] != blocks)
        if stale.size:
            self._uniforms[stale] = uniform_blocks(self._keys[:, stale], blocks[stale])
            self._block[stale] = blocks[stale]
        return self._uniforms[self._rows[:count], positions % BLOCK]
