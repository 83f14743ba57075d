"""How far the engine that wrote the tokens is from the trainer that learns from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Arrays = np.ndarray | Sequence[np.ndarray]


def mismatch(rollout_logprobs: Arrays, recomputed_logprobs: Arrays, mask: Arrays) -> dict[str, float]:
    """Difference between the engine's and the trainer's log-probabilities of the same tokens.

    Arguments are [N] arrays, or lists of one `[R]` array a sample; only tokens where `mask` is True count.
    `mismatch/mean_abs` and `mismatch/max_abs` are in nats. `mismatch/ess` is the effective sample size of the
    importance weights `w = exp(recomputed - rollout)` as a fraction, `(sum w)^2 / (N sum w^2)`: 1 if both
    agree, towards `1/N` if a few tokens carry everything. Without tokens: 0, 0 and 1.
    """
    kept = _flat(mask).astype(bool)
    difference = (_flat(recomputed_logprobs).astype(np.float64) - _flat(rollout_logprobs))[kept]
    if not len(difference):
        return {"mismatch/mean_abs": 0.0, "mismatch/max_abs": 0.0, "mismatch/ess": 1.0}
    magnitude = np.abs(difference)
    # ESS does not change when all weights are scaled: the largest becomes 1 and nothing overflows.
    weights = np.exp(difference - difference.max())
    return {
        "mismatch/mean_abs": float(magnitude.mean()),
        "mismatch/max_abs": float(magnitude.max()),
        "mismatch/ess": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }


def _flat(arrays: Arrays) -> np.ndarray:
    if isinstance(arrays, np.ndarray):
        return arrays
    return np.concatenate([np.asarray(array) for array in arrays]) if len(arrays) else np.zeros(0)
