"""Importance corrections for tokens that the trainer's policy would have drawn with another probability.

The ratio is `pi_train / pi_rollout` of a sampled token: the trainer's log-probability at the start of the
step against the one the engine logged when it drew the token. It is 1 for a synchronous run on one kind of
kernel, and not for stale rollouts, quantised engines or other kernels.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from opd.config.base import Config


class TruncatedIS(Config):
    """TIS: every token counts with its ratio, held between the bounds (Yao et al. 2025)."""

    type: Literal["tis"] = "tis"
    lower: float = Field(default=0.0, ge=0, le=1)
    """A smaller ratio counts as this."""
    upper: float = Field(default=2.0, ge=1)
    """A larger ratio counts as this."""


class _Bounds(Config):
    lower: float = Field(default=0.5, ge=0, le=1)
    """What has a smaller ratio is rejected."""
    upper: float = Field(default=2.0, ge=1)
    """What has a larger ratio is rejected."""

    @model_validator(mode="after")
    def _refuse_empty(self) -> _Bounds:
        if self.lower == self.upper:
            raise ValueError("lower and upper are both 1: nearly every token would be rejected; widen them")
        return self


class MaskedIS(_Bounds):
    """MIS: the ratio inside the bounds; outside them the token, or the whole response, is rejected
    (Liu et al. 2025, "When speed kills stability")."""

    type: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the ratio of the whole response (the product over its tokens) is what is bounded, and what
    every token of it counts with: exact for the response, and of a variance that grows with its length."""


class IcePop(_Bounds):
    """IcePop (Ring-1T, 2510.18855): the token ratio inside wide bounds; tokens outside them are rejected."""

    type: Literal["icepop"] = "icepop"
    upper: float = Field(default=5.0, ge=1)
    """What has a larger ratio is rejected."""


class SequenceMaskedTIS(_Bounds):
    """Responses whose geometric mean ratio is outside the bounds are rejected; in the others tokens count
    with their ratio, truncated at `truncate`."""

    type: Literal["seq_mask_tis"] = "seq_mask_tis"
    truncate: float = Field(default=2.0, ge=1)
    """A larger ratio of a token counts as this."""


CorrectionConfig = Annotated[TruncatedIS | MaskedIS | IcePop | SequenceMaskedTIS, Field(discriminator="type")]
