"""An endless, shuffled, resumable sequence over a domain's training prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.data.hashing import permutation
from opd.data.prompts import Prompt
from opd.errors import DataError


class PromptCursor:
    """Every epoch is a fresh permutation. Prompt number `i` is a function of (seed, name, i) and the prompts
    alone, so a resumed run needs to remember nothing but how many it has taken.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, name: str) -> None:
        """Raises `DataError` if there are no prompts."""
        if not prompts:
            raise DataError(f"domain {name} has no training prompts; check its source and its filters.")
        self._prompts = prompts
        self._seed = seed
        self._name = name
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def take(self, start: int, n: int) -> list[Prompt]:
        """Prompts number `start ... start + n - 1`."""
        if start < 0 or n < 0:
            raise ValueError(f"start {start} and n {n} must not be negative")
        return [self._at(number) for number in range(start, start + n)]

    def _at(self, number: int) -> Prompt:
        epoch, place = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            self._order = permutation(len(self._prompts), self._seed, self._name, epoch)
            self._epoch = epoch
        return self._prompts[int(self._order[place])]
