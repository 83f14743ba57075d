"""Name the stages and the models that they make.

base, merge           base, merged
sft-DOMAIN            sft:DOMAIN
specialist-DOMAIN     specialist:DOMAIN
baseline-METHOD       METHOD
evaluate              none
"""

from __future__ import annotations

KINDS = ("base", "sft", "specialist", "merge", "baseline", "evaluate")
"""Kinds in the order in which they run."""


def kind_of(stage: str) -> str:
    """Return the kind of a stage, "" for an unknown name."""
    kind = stage.partition("-")[0]
    return kind if kind in KINDS else ""


def model_stage(name: str) -> str:
    """Return the stage that makes the model `name`."""
    kind, colon, domain = name.partition(":")
    if colon and kind in ("sft", "specialist"):
        return f"{kind}-{domain}"
    return {"base": "base", "merged": "merge"}.get(name, f"baseline-{name}")


def stage_model(stage: str) -> str:
    """Return the model that a stage makes."""
    kind, dash, name = stage.partition("-")
    if dash and kind in ("sft", "specialist"):
        return f"{kind}:{name}"
    return name if kind == "baseline" else {"merge": "merged"}.get(kind, "base")


def specialist_stage(domain: str) -> str:
    """Return the stage that trains the specialist of `domain`."""
    return model_stage(f"specialist:{domain}")
