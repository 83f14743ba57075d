"""Numbers about a rollout that every stage with a student reports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.algorithms.filters import zero_variance_fraction
from opd.algorithms.staleness import drop_stale, staleness
from opd.monitor.mismatch import mismatch
from opd.types import Sample, SampleGroup, Status


def rollout_metrics(
    groups: Sequence[SampleGroup], lengths: Sequence[int] | np.ndarray | None = None
) -> dict[str, float]:
    """Rewards (overall and by domain), lengths, truncation; where prompts have several responses, the share
    of them without signal.

    `lengths`: the samples' response tokens, where these are not in memory.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    lengths = np.array([len(s.response_ids) for s in samples] if lengths is None else lengths)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "truncated": float(np.mean([s.status is Status.TRUNCATED for s in samples])),
    }
    for share, value in zip((10, 50, 90), np.quantile(lengths, (0.1, 0.5, 0.9)), strict=True):
        metrics[f"length/p{share}"] = float(value)
    if any(len(group.samples) > 1 for group in groups):
        metrics["frac_reward_zero_std"] = zero_variance_fraction(groups)
    for domain in dict.fromkeys(s.domain for s in samples):
        metrics[f"reward/{domain}"] = float(np.mean([s.reward for s in samples if s.domain == domain]))
    return metrics


def mismatch_metrics(samples: Sequence[Sample], recomputed: Sequence[np.ndarray]) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's; empty if there are no tokens."""
    if not sum(s.trainable_tokens for s in samples):
        return {}
    return mismatch(
        np.concatenate([s.rollout_logprobs for s in samples]),
        np.concatenate(list(recomputed)),
        np.concatenate([s.loss_mask for s in samples]),
    )


def staleness_metrics(samples: Sequence[Sample], version: int, limit: int | None) -> dict[str, float]:
    """Ages of the tokens; those beyond `limit` leave the loss masks. Empty if all are of `version`."""
    metrics = staleness(samples, version)
    if not metrics.get("staleness/max"):
        return {}
    return metrics | (drop_stale(samples, version, limit) if limit is not None else {})


def generated_tokens(groups: Sequence[SampleGroup]) -> int:
    """Response tokens the student wrote."""
    return sum(sample.trainable_tokens for group in groups for sample in group.samples)
