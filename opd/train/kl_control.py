"""A coefficient that follows the distance to the reference (Ziegler et al. 2019, 1909.08593, 2.2)."""

from __future__ import annotations

CLIP = 0.2
"""No step counts as further off than this share of the target."""
SMALLEST, LARGEST = 1e-12, 1e9
"""Where it stays however long it is pushed: a coefficient of 0 would never come back."""


def next_coefficient(coef: float, measured: float, target: float, gain: float) -> float:
    """`coef (1 + gain clip(measured / target - 1, -0.2, 0.2))`: more where the KL that was `measured` (nats a
    token) is above `target`, less where it is below.
    """
    off = min(max(measured / target - 1.0, -CLIP), CLIP)
    return min(max(coef * (1.0 + gain * off), SMALLEST), LARGEST)
