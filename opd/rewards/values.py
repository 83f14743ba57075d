"""From what a reward function returned for one sample to plain numbers, or one sentence."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from opd.errors import RewardError
from opd.imports import calling, told
from opd.rewards.functions import RewardFunction, RewardSample

LARGEST = 1e9
"""Of a reward or an advantage: squared and summed in float32 it is still far from infinity."""


def reward_value(
    function: RewardFunction, sample: RewardSample, value: Any
) -> tuple[float, dict[str, float]]:
    """(reward, parts). Raises `RewardError` naming function, domain and sample for anything but finite
    numbers of at most `LARGEST`.
    """
    where = f"reward function {function.name} (domain {sample.domain}, sample {sample.uid})"
    with calling(f"{where} returned a {type(value).__name__}, and reading it", RewardError):
        if not isinstance(value, dict):
            return _number(value, where, "returned"), {}
        # Of the dict itself: a class of the user's own may have methods of its own.
        parts = {
            str.__str__(str(key)): _number(part, where, f"returned {key} =")
            for key, part in dict.items(value)
        }
        if not parts:
            raise RewardError(f"{where} returned an empty dict; give at least one entry.")
        if "reward" in parts:
            return parts["reward"], parts
        return _number(math.fsum(parts.values()), where, "returned parts whose sum is"), parts


def _number(value: Any, where: str, verb: str) -> float:
    plain = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy and torch scalars
    if not isinstance(plain, Real):
        raise RewardError(
            f"{where} {verb} {told(plain, repr)}, a {type(plain).__name__}; return a number or a dict of"
            " numbers."
        )
    number = float(plain)
    if not math.isfinite(number):
        raise RewardError(f"{where} {verb} {number}; return finite numbers only.")
    if abs(number) > LARGEST:
        raise RewardError(f"{where} {verb} {number:g}; scale rewards to {LARGEST:g} at most.")
    return number
