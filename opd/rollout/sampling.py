"""Sampling one token per request by inverting the cumulative distribution, a batch at a time.

Shapes: `B` requests, `V` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.errors import RolloutError

CHUNK_BYTES = 64 * 2**20
"""Bound on the float64 cumulative sums held at once; long vocabularies are done some rows at a time."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The sampling settings of a batch as tensors; `None` where no request of the batch needs the work."""

    temperature: Tensor | None
    """[B, 1] float32, 1 for greedy requests; `None` when all are 1."""
    greedy: Tensor | None
    """[B] bool."""
    top_k: Tensor | None
    """[B, 1] int64; `V` or more keeps everything."""
    top_p: Tensor | None
    """[B, 1] float64."""

    @classmethod
    def build(
        cls, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, device: torch.device
    ) -> SamplingPlan:
        """From `[B]` arrays in the conventions of `SamplingParams` (temperature 0 greedy, top-k 0 off)."""

        def column(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]

        greedy = temperature == 0
        heat = np.where(greedy, 1.0, temperature).astype(np.float32)
        limit = np.where(top_k == 0, np.iinfo(np.int64).max, top_k)
        return cls(
            temperature=column(heat) if (heat != 1).any() else None,
            greedy=column(greedy)[:, 0] if greedy.any() else None,
            top_k=column(limit) if (top_k > 0).any() else None,
            top_p=column(top_p.astype(np.float64)) if (top_p < 1).any() else None,
        )

    def rows(self, start: int, stop: int) -> SamplingPlan:
        """The plan of the requests `start:stop`."""
        parts = (self.temperature, self.greedy, self.top_k, self.top_p)
        return SamplingPlan(*(None if part is None else part[start:stop] for part in parts))


def sample(logits: Tensor, uniforms: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """Token ids [B] int64 and their log-probabilities [B] float32.

    `logits` [B, V] float32, `uniforms` [B] float64 in [0, 1). The token is the first whose cumulative
    probability, in the order of token ids, exceeds the uniform. Log-probabilities are at the sampling
    temperature (1 for greedy requests), before any top-k or top-p cut. Raises `RolloutError` if a row of
    logits is not finite.
    """
    rows = max(1, CHUNK_BYTES // (8 * logits.shape[1]))
    if len(logits) <= rows:
        return _sample_rows(logits, uniforms, plan)
    parts = [
        _sample_rows(logits[i : i + rows], uniforms[i : i + rows], plan.rows(i, i + rows))
        for i in range(0, len(logits), rows)
    ]
    ids, logprobs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _sample_rows(logits: Tensor, uniforms: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    scaled = logits if plan.temperature is None else logits / plan.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = logprobs.exp()
    if plan.top_k is not None or plan.top_p is not None:
        probabilities = cut(probabilities, plan.top_k, plan.top_p)
    ids = invert_cdf(probabilities, uniforms)
    if plan.greedy is not None:
        ids = torch.where(plan.greedy, logits.argmax(-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[B] int64: the first token whose cumulative probability exceeds `uniforms` times the row's sum.

    `probabilities` [B, V] need not sum to 1; a token of probability 0 is never chosen.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not math.isfinite(float(total.sum())):
        row = int(torch.nonzero(~torch.isfinite(total[:, 0]))[0])
        raise RolloutError(
            f"the model gave logits that are not finite for row {row} of the decode batch; its weights are"
            " not usable, go back to an earlier checkpoint or lower the learning rate."
        )
    # The largest float64 below 1 times the total still rounds to less than it: some token exceeds it.
    return torch.searchsorted(cumulative, total * uniforms[:, None], right=True)[:, 0]


def cut(probabilities: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Probabilities [B, V] with everything outside the top-k, then the top-p set, at 0 (not renormalised).

    `top_p` keeps the smallest set whose share of what top-k left reaches `top_p`; equal probabilities are
    ranked by token id, so that exactly `k` tokens stay.
    """
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(ranked.shape[1], device=ranked.device)
        ranked = ranked.masked_fill(rank >= top_k, 0.0)
    if top_p is not None:
        cumulative = ranked.cumsum(-1, dtype=torch.float64)
        before = cumulative - ranked
        ranked = ranked.masked_fill((before >= top_p * cumulative[:, -1:]) & (top_p < 1), 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ranked)
