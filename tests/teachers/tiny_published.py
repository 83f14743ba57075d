"""Tiny checkpoints, published."""

from pathlib import Path

import tiny

from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.stages.publishing import publish_checkpoint

_FAMILIES = tiny.conftest_of("models")
FAMILIES = [*_FAMILIES.FAMILIES, "olmo"]
"""The families every model test runs on, and one whose norms have no weights."""


def family_model(name: str) -> CausalLM:
    """A tiny random model of family `name`."""
    if name != "olmo":
        return _FAMILIES.family_model(name)
    shape = {key: value for key, value in _FAMILIES._SHAPE.items() if key != "head_dim"}
    return CausalLM.from_config({"model_type": name} | shape, tokenizer=tiny.tokenizer(), seed=3)


def publish(model: CausalLM, folder: Path, *, shards: int = 1) -> tuple[Path, str]:
    """Save `model` and publish it: (its Hugging Face folder, the published folder)."""
    checkpoint = save_checkpoint(model, tiny.tokenizer(), folder / "checkpoint", {})
    publish_checkpoint(checkpoint, folder / "published", shards=shards)
    return checkpoint, str(folder / "published")
