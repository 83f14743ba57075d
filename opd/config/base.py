"""What every configuration model shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Strict and frozen: an unknown key is an error, a value never changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
