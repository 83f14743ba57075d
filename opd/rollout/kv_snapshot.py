"""Keys and values of interrupted requests as named tensors, to be written to a file and read again.

Sequences are known by their tokens, not by their requests: keys and values depend on tokens and weights
alone.

Shapes: `B` sequences, `T` tokens of all of them, `Hkv` key-value heads, `d` head size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from opd.errors import RolloutError
from opd.rollout.kv_cache import PromptKV


@dataclass(frozen=True, slots=True)
class Origin:
    """What computed the keys and values."""

    digest: str
    """Of the weights."""
    version: int
    """Policy version."""
    lean: bool
    """Whether by the lean decoder, which orders the features of keys in its own way."""

    def __str__(self) -> str:
        decoder = "lean" if self.lean else "general"
        return f"weights {self.digest[:12]} (version {self.version}, {decoder} decoder)"


def pack(held: Iterable[tuple[np.ndarray, PromptKV]], origin: Origin) -> dict[str, Tensor]:
    """`tokens` [T] int32, `lengths` [B] int64, `origin` (JSON as uint8) and per layer `layer.I.keys` and
    `layer.I.values` [Hkv, T, d], all on the CPU. Sequences with equal tokens are stored once.
    """
    distinct = {tokens.astype(np.int32).tobytes(): kv for tokens, kv in held}
    sequences = [np.frombuffer(tokens, dtype=np.int32) for tokens in distinct]
    tensors = {
        "tokens": torch.from_numpy(np.concatenate(sequences)),
        "lengths": torch.tensor([len(tokens) for tokens in sequences]),
        "origin": torch.frombuffer(bytearray(json.dumps(asdict(origin)).encode()), dtype=torch.uint8),
    }
    prompts = list(distinct.values())
    for index in prompts[0].layers:
        for part, name in enumerate(("keys", "values")):
            joined = torch.cat([prompt.layers[index][part] for prompt in prompts], dim=1)
            tensors[f"layer.{index}.{name}"] = joined.cpu()
    return tensors


def unpack(tensors: Mapping[str, Tensor]) -> tuple[dict[bytes, PromptKV], Origin]:
    """The sequences by the bytes of their tokens, and what computed them.

    Raises `RolloutError` if `tensors` are not what `pack` made.
    """
    try:
        origin = Origin(**json.loads(bytes(tensors["origin"].numpy())))
        tokens, lengths = tensors["tokens"].numpy(), tensors["lengths"].tolist()
        layers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("layer.")})
        pairs = {
            index: [tensors[f"layer.{index}.{part}"].split(lengths, dim=1) for part in ("keys", "values")]
            for index in layers
        }
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        names = [tokens[a:b].tobytes() for a, b in pairwise(bounds)]
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise RolloutError(
            f"the saved keys and values are not readable ({error}); let the engine prefill."
        ) from error
    saved = {
        name: PromptKV({index: (keys[row], values[row]) for index, (keys, values) in pairs.items()})
        for row, name in enumerate(names)
    }
    return saved, origin
