"""Checks what a reward function returned for one sample."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from opd.errors import RewardError
from opd.rewards.functions import RewardFunction, RewardSample


def reward_value(
    function: RewardFunction, sample: RewardSample, value: Any
) -> tuple[float, dict[str, float]]:
    """(reward, parts). Raises `RewardError` naming function, domain and sample for anything not finite."""
    where = f"reward function {function.name} (domain {sample.domain}, sample {sample.uid})"
    if not isinstance(value, dict):
        return _number(value, where, "returned"), {}
    if not value:
        raise RewardError(f"{where} returned an empty dict; give at least one entry.")
    parts = {str(key): _number(part, where, f"returned {key} =") for key, part in value.items()}
    return parts["reward"] if "reward" in parts else math.fsum(parts.values()), parts


def _number(value: Any, where: str, verb: str) -> float:
    plain = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy and torch scalars
    if not isinstance(plain, Real):
        raise RewardError(
            f"{where} {verb} {plain!r}, a {type(plain).__name__}; return a number or a dict of numbers."
        )
    number = float(plain)
    if not math.isfinite(number):
        raise RewardError(f"{where} {verb} {number}; return finite numbers only.")
    return number
