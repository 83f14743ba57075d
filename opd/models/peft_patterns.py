"""The patterns in an adapter's `rank_pattern` and `alpha_pattern`, matched as peft matches them.

They are regular expressions that somebody else wrote. Names alone, such as `self_attn.q_proj`, are matched
here; anything with repetitions in a process that is ended if it takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from opd.foreign import read_document
from opd.limited import LONGEST, LimitedProcess

_NAME = re.compile(r"[\w.]*")
_MOST = 10_000
"""Patterns of an adapter: as many as it has layers, at most."""
_SECONDS, _MEMORY = 5.0, 1 << 29


def match_patterns(patterns: list[str], layers: list[str]) -> dict[str, str]:
    """The first of `patterns` that matches the end of each layer's name, for those that one matches.

    Raises `ValueError`, saying why, for what is no regular expression, or takes too long.
    """
    if len(patterns) > _MOST:
        raise ValueError(f"there are {len(patterns):,} patterns where {_MOST:,} are read")
    if all(_NAME.fullmatch(pattern) for pattern in patterns):
        return _matched(patterns, layers)
    process = LimitedProcess(__name__, _MEMORY)
    try:
        said = process.ask({"patterns": patterns, "layers": layers}, _SECONDS)
    finally:
        process.close()
    if said is None:
        raise ValueError(f"its patterns take more than {_SECONDS:g} seconds")
    found = read_document(said, LONGEST)
    if "error" in found:
        raise ValueError(str(found["error"]))
    return {str(layer): patterns[int(place)] for layer, place in found["matched"].items()}


def _matched(patterns: Iterable[str], layers: Iterable[str]) -> dict[str, str]:
    expressions = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns}
    found = {}
    for layer in layers:
        first = next((one for one, expression in expressions.items() if expression.match(layer)), None)
        if first is not None:
            found[layer] = first
    return found


def prepare() -> None:
    """In the process that looks: nothing to import."""


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """In the process that looks: which pattern, by its place, matches each layer."""
    try:
        found = _matched(asked["patterns"], asked["layers"])
    except (re.error, RecursionError, OverflowError) as error:
        return {"error": f"a pattern is no regular expression ({str(error)[:100]})"}
    return {"matched": {layer: asked["patterns"].index(one) for layer, one in found.items()}}
