"""Stable hashes and counter-based randomness: the same on every machine, in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np


def content_key(content: Any) -> str:
    """16 hexadecimal digits that identify JSON-able `content`; equal content gives equal keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def fraction(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone and is uniform over different texts."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def raw_stream(*parts: int | str) -> np.random.Philox:
    """A Philox bit generator keyed by `parts`.

    Use its `random_raw`: unlike the methods of `numpy.random.Generator`, NumPy never changes what it gives.
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "big"))


def permutation(length: int, *parts: int | str) -> np.ndarray:
    """[length] int64: a permutation of `0 ... length - 1` keyed by `parts`."""
    return np.argsort(raw_stream(*parts).random_raw(length), kind="stable")
