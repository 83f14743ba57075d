"""How responses are written: the settings that domains and evaluation sets may have of their own."""

from __future__ import annotations

from pydantic import Field

from opd.config.base import Config


class WritingConfig(Config):
    """How responses are written; a domain or an evaluation set may have settings of its own."""

    temperature: float = Field(default=1.0, ge=0.001, le=1000)
    """Sampling temperature; student and teacher are scored at it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest tokens with at least this probability together; 1 is all of them."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens; 0 is all of them."""
    max_new_tokens: int = Field(default=16, gt=0, le=100_000_000)
    """Response tokens after which a response is cut; it then counts as truncated."""
    generate: str | None = None
    """Dotted path of `generate(engine, prompts, group_size, sampling, seed) -> groups`, for responses of
    several turns with an environment, tools or search (`opd.rollout.collect`)."""
