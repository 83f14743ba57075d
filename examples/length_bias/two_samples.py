"""Two-sample tests on lengths and rewards, and a test of tokens against the model's probabilities."""

from __future__ import annotations

import math

import numpy as np
import torch

from opd.models.causal_lm import CausalLM
from opd.types import RolloutRequest

SMALLEST = 20
"""Responses of both samples a bin holds at least."""


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees of freedom > `statistic`)."""
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def kolmogorov_smirnov(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Largest distance between the distribution functions of `x` and `y`, and its asymptotic p-value.

    The p-value is too large for discrete values with ties, so a rejection can be trusted.
    """
    values = np.unique(np.concatenate([x, y]))
    below = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (x, y)]
    distance = float(np.abs(below[0] - below[1]).max())
    scaled = distance * math.sqrt(len(x) * len(y) / (len(x) + len(y)))
    if scaled < 0.2:
        return distance, 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, 2 * series))


def same_lengths(x: np.ndarray, y: np.ndarray) -> float:
    """p-value of a chi-square test that two samples of lengths have one distribution."""
    top = int(max(x.max(), y.max())) + 1
    counts = np.stack([np.bincount(sample, minlength=top) for sample in (x, y)])
    columns: list[np.ndarray] = []
    column = np.zeros(2)
    for length in range(top):
        column = column + counts[:, length]
        if column.sum() >= SMALLEST:
            columns.append(column)
            column = np.zeros(2)
    columns[-1] = columns[-1] + column
    table = np.stack(columns, axis=1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return chi_square_tail(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1)


def same_mean(x: np.ndarray, y: np.ndarray) -> float:
    """Two-sided p-value of a z-test that two samples have one mean."""
    error = math.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y))
    return math.erfc(abs(float(x.mean() - y.mean())) / error / math.sqrt(2)) if error else 1.0


def next_token_fit(
    model: CausalLM,
    requests: dict[str, RolloutRequest],
    responses: dict[str, np.ndarray],
    points: list[tuple[str, int]],
) -> tuple[np.ndarray, np.ndarray, float]:
    """How often each token came first after a resume, how often the model says it should, and a p-value.

    `points`: (uid, position). With `p_i` [V] the model's distribution at point `i`, the counts have mean
    `sum p_i` and covariance `sum diag(p_i) - p_i p_i^T`; the chi-square statistic uses its pseudo-inverse,
    which has rank `V - 1`. Returns ([V] counts, [V] float64 expected counts, p-value).
    """
    expected = np.zeros(model.vocab_size)
    covariance = np.zeros((model.vocab_size, model.vocab_size))
    by_length: dict[int, list[np.ndarray]] = {}
    for uid, position in points:
        known = np.concatenate([requests[uid].prompt_ids, responses[uid][:position]])
        by_length.setdefault(len(known), []).append(known)
    head = model.head()
    for length, sequences in by_length.items():
        for start in range(0, len(sequences), 256):
            chunk = np.stack(sequences[start : start + 256]).astype(np.int64)
            ids = torch.from_numpy(chunk.ravel())
            bounds = torch.arange(len(chunk) + 1, dtype=torch.int32) * length
            places = torch.arange(length).repeat(len(chunk))
            with torch.no_grad():
                hidden = model.hidden(ids, places, bounds)[length - 1 :: length]
                table = torch.softmax(head.logits(hidden).double(), dim=-1).numpy()
            expected += table.sum(0)
            covariance += np.diag(table.sum(0)) - table.T @ table
    seen = np.bincount([responses[uid][position] for uid, position in points], minlength=model.vocab_size)
    difference = seen - expected
    statistic = float(difference @ np.linalg.pinv(covariance, hermitian=True, rcond=1e-9) @ difference)
    return seen, expected, chi_square_tail(statistic, model.vocab_size - 1)
