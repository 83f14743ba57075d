"""Name the stages and the models that they make.

base, merge           base, merged
sft-DOMAIN            sft:DOMAIN
specialist-DOMAIN     specialist:DOMAIN
baseline-METHOD       METHOD
evaluate              none

Of round N above the first, stages and models end in `+N`: merge+2, merged+2, specialist-DOMAIN+2. A stage
evaluate+N measures the gain of round N.
"""

from __future__ import annotations

import re

KINDS = ("base", "sft", "specialist", "merge", "baseline", "evaluate")
"""Kinds in the order in which they run."""
_OF_ROUND = re.compile(r"(.+)\+([1-9][0-9]{0,3})", re.DOTALL)


def split_round(name: str) -> tuple[str, int]:
    """Split the name of a stage or model into its name in the first round, and its round."""
    match = _OF_ROUND.fullmatch(name)
    return (name, 1) if match is None else (match[1], int(match[2]))


def of_round(name: str, number: int) -> str:
    """Return the name in round `number` of what is called `name` in the first."""
    return name if number == 1 else f"{name}+{number}"


def gain_stage(number: int) -> str:
    """Return the stage that measures the gain of round `number`."""
    return f"evaluate+{number}"


def kind_of(stage: str) -> str:
    """Return the kind of a stage, "" for an unknown name."""
    kind = split_round(stage)[0].partition("-")[0]
    return kind if kind in KINDS else ""


def model_stage(name: str) -> str:
    name, number = split_round(name)
    kind, colon, domain = name.partition(":")
    if colon and kind in ("sft", "specialist"):
        return of_round(f"{kind}-{domain}", number)
    return of_round({"base": "base", "merged": "merge"}.get(name, f"baseline-{name}"), number)


def stage_model(stage: str) -> str:
    stage, number = split_round(stage)
    kind, dash, name = stage.partition("-")
    if dash and kind in ("sft", "specialist"):
        return of_round(f"{kind}:{name}", number)
    return of_round(name if kind == "baseline" else {"merge": "merged"}.get(kind, "base"), number)


def specialist_stage(domain: str) -> str:
    """Return the stage that trains the specialist of `domain` in the first round."""
    return model_stage(f"specialist:{domain}")
