"""Sampling one token per request: counter-based noise, and the inverse of the cumulative distribution.

Shapes: `B` requests, `V` vocabulary, `K` tokens of a sampling mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from opd.errors import RolloutError

ROUNDS = 10
WORDS = 4
"""Numbers per counter value."""
BLOCK = 16
"""Positions computed at once, a multiple of `WORDS`."""

_MULTIPLIER = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER_LOW = _MULTIPLIER & _LOW
_MULTIPLIER_HIGH = _MULTIPLIER >> _HALF
_TO_UNIT = 2.0**-53


def uid_keys(uids: Iterable[str]) -> np.ndarray:
    """[B] uint64: keys of requests, the same on every machine (BLAKE2b of their UTF-8 bytes)."""
    digests = b"".join(blake2b(uid.encode(), digest_size=8).digest() for uid in uids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


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
        # The high 64 bits of the 128-bit products `_MULTIPLIER * mixed`, from halves of 32 bits.
        low, high = mixed & _LOW, mixed >> _HALF
        middle = _MULTIPLIER_HIGH * low + ((_MULTIPLIER_LOW * low) >> _HALF)
        carry = _MULTIPLIER_LOW * high + (middle & _LOW)
        overflow = _MULTIPLIER_HIGH * high + (middle >> _HALF) + (carry >> _HALF)
        mixed = overflow[::-1] ^ carried ^ round_key
        carried = product[::-1]
    return np.stack([mixed[0], carried[0], mixed[1], carried[1]], axis=1)


class NoiseTable:
    """The next uniforms of every running request, one row per slot, refilled a block at a time."""

    def __init__(self, slots: int) -> None:
        self._keys = np.zeros((2, slots), dtype=np.uint64)
        self._block = np.full(slots, -1, dtype=np.int64)
        self._uniforms = np.zeros((slots, BLOCK), dtype=np.float64)
        self._rows = np.arange(slots)

    def assign_slots(self, rows: slice, seeds: np.ndarray, keys: np.ndarray) -> None:
        """Give the slots `rows` to new requests."""
        self._keys[0, rows], self._keys[1, rows] = seeds, keys
        self._block[rows] = -1

    def slot_keys(self, count: int) -> np.ndarray:
        """[2, count] uint64: seeds and keys of the first slots."""
        return self._keys[:, :count]

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move requests to other slots."""
        self._keys[:, target] = self._keys[:, source]
        self._block[target] = self._block[source]
        self._uniforms[target] = self._uniforms[source]

    def uniforms_at(self, positions: np.ndarray) -> np.ndarray:
        """Uniforms of the first `len(positions)` slots at these response positions: [B] float64."""
        count = len(positions)
        blocks = positions // BLOCK
        stale = np.flatnonzero(self._block[:count] != blocks)
        if stale.size:
            per_block = BLOCK // WORDS
            # numpy's Philox increments its counter before the first draw, hence the 1.
            first = blocks[stale].astype(np.uint64) * np.uint64(per_block) + np.uint64(1)
            counter = (first[:, None] + np.arange(per_block, dtype=np.uint64)).ravel()
            words = philox(counter, np.repeat(self._keys[:, stale], per_block, axis=1))
            self._uniforms[stale] = ((words >> np.uint64(11)) * _TO_UNIT).reshape(len(stale), BLOCK)
            self._block[stale] = blocks[stale]
        return self._uniforms[self._rows[:count], positions % BLOCK]


LONG, CDF_BLOCK = 16384, 128
"""Vocabulary from which a distribution is inverted in two steps, and the tokens of a block."""
CHUNK_BYTES, CHUNK_BYTES_GPU = 64 * 2**20, 2**30
"""Most bytes of float64 cumulative sums. Long vocabularies are done some rows at a time."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The sampling settings of a batch as tensors, or None if no request of the batch needs the work."""

    temperature: Tensor | None
    """[B, 1] float32, 1 for greedy requests, or None if all are 1."""
    greedy: Tensor | None
    """[B] bool."""
    top_k: Tensor | None
    """[B, 1] int64. `V` or more keeps everything."""
    top_p: Tensor | None
    """[B, 1] float64."""

    @classmethod
    def build(
        cls, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, device: torch.device
    ) -> SamplingPlan:
        """Build from `[B]` arrays in the conventions of `SamplingParams` (temperature 0 is greedy)."""

        def as_column(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)[:, None]

        greedy = temperature == 0
        divisor = np.where(greedy, 1.0, temperature).astype(np.float32)
        limit = np.where(top_k == 0, np.iinfo(np.int64).max, top_k)
        return cls(
            temperature=as_column(divisor) if (divisor != 1).any() else None,
            greedy=as_column(greedy)[:, 0] if greedy.any() else None,
            top_k=as_column(limit) if (top_k > 0).any() else None,
            top_p=as_column(top_p.astype(np.float64)) if (top_p < 1).any() else None,
        )


def sample_tokens(
    logits: Tensor, uniforms: Tensor, plan: SamplingPlan, most: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Token ids [B] int64, their log-probabilities [B] float32, and their sampling masks [B, K] int64.

    `logits` [B, V] float32, `uniforms` [B] float64 in [0, 1). The token is the first whose cumulative
    probability, in the order of token ids, exceeds the uniform. Log-probabilities are at the sampling
    temperature (1 for greedy requests), before any top-k or top-p cut. They are NaN if a row of logits is not
    finite (see `check_finite`).

    The mask of a row that was cut to at most `most` tokens has their ids, ascending, and `V` behind them. Its
    log-probability is over them. Other rows have `V` alone. There are no masks without `most` or without a
    cut.
    """
    memory = CHUNK_BYTES if logits.device.type == "cpu" else CHUNK_BYTES_GPU
    rows = max(1, memory // (8 * logits.shape[1]))
    if len(logits) <= rows:
        return _sample_rows(logits, uniforms, plan, most)
    parts = []
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        columns = (plan.temperature, plan.greedy, plan.top_k, plan.top_p)
        plan_part = SamplingPlan(*(None if column is None else column[part] for column in columns))
        parts.append(_sample_rows(logits[part], uniforms[part], plan_part, most))
    ids, logprobs, masks = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs), None if masks[0] is None else torch.cat(masks)


def _sample_rows(
    logits: Tensor, uniforms: Tensor, plan: SamplingPlan, most: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    scaled = logits if plan.temperature is None else logits / plan.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities, masks = logprobs.exp(), None
    if plan.top_k is not None or plan.top_p is not None:
        ranked, order = rank_probs(probabilities, plan.top_k, plan.top_p)
        probabilities = torch.zeros_like(probabilities).scatter_(1, order, ranked)
        if most:
            masks, kept_mass = _masks_of(ranked, order, plan, most)
    ids = invert_cdf(probabilities, uniforms)
    if plan.greedy is not None:
        ids = torch.where(plan.greedy, logits.argmax(-1), ids)
    drawn = logprobs.gather(1, ids[:, None])[:, 0]
    return ids, drawn if masks is None else drawn - kept_mass.log(), masks


def _masks_of(ranked: Tensor, order: Tensor, plan: SamplingPlan, most: int) -> tuple[Tensor, Tensor]:
    """Return the masks [B, K] of `rank_probs`'s result, and the probability [B] of each, 1 without one."""
    vocabulary = ranked.shape[1]
    counts = (ranked > 0).sum(-1, keepdim=True)
    masked = counts <= most
    cuts = [plan.top_k < vocabulary] if plan.top_k is not None else []
    cuts += [plan.top_p < 1] if plan.top_p is not None else []
    masked &= cuts[0] | cuts[-1]
    if plan.greedy is not None:
        masked &= ~plan.greedy[:, None]
    rank = torch.arange(min(most, vocabulary), device=order.device)
    ids = order[:, : len(rank)].masked_fill(~masked | (rank >= counts), vocabulary)
    return ids.sort(-1).values, torch.where(masked[:, 0], ranked.sum(-1), 1.0)


def mask_rows(masks: np.ndarray, vocabulary: int) -> np.ndarray | None:
    """[B] object, see `Chunk.sampling_masks`: the rows of `masks` [B, K] without the filler `vocabulary`."""
    counts = (masks < vocabulary).sum(1).tolist()
    if not any(counts):
        return None
    rows, ids = np.full(len(masks), None), masks.astype("<i4")
    for row, count in enumerate(counts):
        rows[row] = ids[row, :count].tobytes() or None
    return rows


def check_finite(logprobs: np.ndarray) -> None:
    """Raise `RolloutError` if one of the sampled tokens' `logprobs` [B] comes from non-finite logits."""
    if not np.isfinite(logprobs).all():
        row = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise RolloutError(
            f"the model gave logits that are not finite for row {row} of the decode batch; its weights are"
            " not usable, go back to an earlier checkpoint or lower the learning rate."
        )


def invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[B] int64: the first token whose cumulative probability exceeds `uniforms` times the row's sum.

    `probabilities` [B, V] need not sum to 1. A token of probability 0 is never chosen. A row with NaN gives
    any token, because a check here would wait for the device.
    """
    if probabilities.shape[1] < LONG:
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        # The largest float64 below 1 times the total still rounds to less than it, so some token exceeds it.
        target = cumulative[:, -1:] * uniforms[:, None]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
        return tokens.clamp_(max=probabilities.shape[1] - 1)
    # Over many tokens a float64 scan costs more than the rest of sampling. So sum blocks [B, N, CDF_BLOCK],
    # then scan the one in which the sum exceeds the target.
    blocks = functional.pad(probabilities, (0, -probabilities.shape[1] % CDF_BLOCK))
    blocks = blocks.unflatten(1, (-1, CDF_BLOCK))
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = cumulative[:, -1:] * uniforms[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].double()
    earlier = functional.pad(cumulative, (1, 0)).gather(1, block)
    offset = torch.searchsorted(inside.cumsum(-1).add_(earlier), target, right=True)
    # If the block's sum and its scan round differently, the target may lie behind all. Then take its last
    # token of nonzero probability.
    last = CDF_BLOCK - 1 - (inside.flip(1) > 0).to(torch.uint8).argmax(-1, keepdim=True)
    tokens = (block * CDF_BLOCK + torch.minimum(offset, last))[:, 0]
    return tokens.clamp_(max=probabilities.shape[1] - 1)


def rank_probs(probabilities: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities [B, V], largest first, with everything outside the top-k, then the top-p set, at 0 (not
    renormalised), and their token ids [B, V].

    `top_p` keeps the smallest set whose share of the probability after top-k reaches `top_p`. Equal
    probabilities are ranked by token id, so that exactly `k` tokens stay.
    """
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(ranked.shape[1], device=ranked.device)
        ranked = ranked.masked_fill(rank >= top_k, 0.0)
    if top_p is not None:
        cumulative = ranked.cumsum(-1, dtype=torch.float64)
        earlier = cumulative - ranked
        ranked = ranked.masked_fill((earlier >= top_p * cumulative[:, -1:]) & (top_p < 1), 0.0)
    return ranked, order
