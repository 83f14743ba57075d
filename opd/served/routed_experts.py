"""Expert choices as servers give them: base64 of int32, a row for each position and layer.

SGLang (`--enable-return-routed-experts`) gives them with the last message of a response, for the positions
from `routed_experts_start_len` to the one before its last token. It has a row for each layer of the decoder,
also for layers without experts. vLLM's streams give none.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.served.http_client import UnavailableError
from opd.served.scoring import unreadable_error
from opd.types import ExpertSpan
from opd.untrusted import convert_decode_errors

FLAG = "enable-return-routed-experts"
"""Without it a server of SGLang gives none."""


@dataclass(frozen=True, slots=True)
class ServedRouting:
    """The routed blocks of the student whose weights servers hold."""

    layers: Sequence[int]
    """[L]: the decoder's layers that have one."""
    depth: int
    """All layers of the decoder."""
    experts: int
    per_token: int

    @convert_decode_errors(unreadable_error)
    def read_span(self, text: Any, start: int, stop: int) -> ExpertSpan:
        """Return the choices of the positions `start ... stop - 1`, or of all before `stop` if those came.
        Raises `UnavailableError` for another number of them, or an expert that there is not.
        """
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        forms = [(first, depth) for first in (start, 0) for depth in (self.depth, len(self.layers))]
        sizes = [(stop - first) * depth * self.per_token for first, depth in forms]
        if numbers.size not in sizes:
            raise UnavailableError(
                f"{numbers.size} expert choices came of positions {start} to {stop}, of which"
                f" {len(self.layers)} layers have {self.per_token} each",
                answered=True,
            )
        first, depth = forms[sizes.index(numbers.size)]
        choices = numbers.reshape(stop - first, depth, self.per_token)
        if depth > len(self.layers):
            choices = choices[:, list(self.layers)]
        if choices.size and not 0 <= choices.min() <= choices.max() < self.experts:
            raise UnavailableError(
                f"expert choices name an expert that there is not among {self.experts}", answered=True
            )
        return ExpertSpan(first, choices.astype(np.uint8 if self.experts <= 256 else np.uint16))

    def most_bytes(self, positions: int) -> int:
        """Return the most bytes of their text for so many positions."""
        return 64 + positions * self.depth * self.per_token * 16 // 3
