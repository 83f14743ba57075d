"""Expert choices of the embedded engine's passes, for each token and for the positions before it.

A decode step, a prefill and a pass over added tokens all run the model on packed tokens. Each writes the
choices of its tokens here, and says which slots they belong to. A token goes out with the choices of the
position before it, which predicts it. Those of other positions that its pass has computed go out with it as a
span, unless the caller has them (`RolloutRequest.routed`).

Shapes: `T` packed tokens of a pass, `B` running requests, `R` slots of a pass, `P` distinct sequences among
them, `L` routed blocks, `K` experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.rollout.batch import RunningBatch
from opd.types import ExpertSpan


class ExpertRecorder:
    """Records the passes of one decode step at a time."""

    def __init__(self, model: CausalLM) -> None:
        """Raises `RolloutError` if the choices of `model` cannot be recorded."""
        routing = model.routing
        if routing is None:
            why = model.unroutable or "has no experts"
            raise RolloutError(
                f"expert choices cannot be recorded, because {model.config.model_type} {why}; set"
                " rollout.replay_experts to false."
            )
        self._routing, self._device = routing, model.device
        self._dtype = np.uint8 if routing.experts <= 256 else np.uint16
        self._recorded = torch.empty(0)
        """[T, L, K]: of the newest pass."""
        self.buffer: Tensor | None = None
        """[S, L, K]: memory in which the next passes write, if they are captured."""
        self._tokens: list[tuple[Tensor | np.ndarray, np.ndarray]] = []
        """Choices [T, L, K], and the indices of those of each slot's newest position, in the slots' order."""
        self._spans: list[tuple[str, ExpertSpan]] = []

    def new_buffer(self, tokens: int) -> Tensor:
        """Return memory for the choices of a pass, [T, L, K]."""
        return self._routing.new_choices(tokens, self._device)

    @contextmanager
    def record(self, tokens: int) -> Iterator[None]:
        """Record the one pass over `tokens` packed tokens that the block makes."""
        into = self.new_buffer(tokens) if self.buffer is None else self.buffer[:tokens]
        with self._routing.record(into):
            yield
        self._recorded = into

    def begin_step(self) -> None:
        """Forget the step before, whatever became of it."""
        self._tokens, self._spans = [], []

    def note_decoded(self, choices: Tensor | None, rows: int) -> None:
        """Note that the newest pass, or a captured one that wrote `choices`, decoded the first `rows`."""
        self._tokens.append((self._recorded if choices is None else choices, np.arange(rows)))

    def note_prefilled(
        self,
        batch: RunningBatch,
        first: int,
        bounds: np.ndarray,
        source: np.ndarray,
        *,
        start: np.ndarray | None = None,
        choices: np.ndarray | None = None,
    ) -> np.ndarray:
        """Note that the newest pass, or an earlier one with `choices`, computed the slots from `first` on.
        Returns its choices [T, L, K].

        `source` [R]: index of each slot's sequence among those packed with `bounds` [P + 1]. `start` [R]: the
        tokens of each slot that were cached before, by default none.
        """
        choices = self._as_array(self._recorded) if choices is None else choices
        start = np.zeros(len(source), np.int64) if start is None else start
        self._tokens.append((choices, bounds[source + 1] - 1))
        shared: dict[tuple[int, int], np.ndarray] = {}  # requests of one prompt share its choices
        for slot, sequence, cached in zip(
            range(first, first + len(source)), source.tolist(), start.tolist(), strict=True
        ):
            begin = max(int(batch.routed[slot]), cached)
            low, high = int(bounds[sequence]) + begin - cached, int(bounds[sequence + 1]) - 1
            if low < high:
                rows = shared.setdefault((low, high), choices[low:high])
                self._spans.append((batch.uids[slot], ExpertSpan(begin, rows)))
        return choices

    def step_choices(self) -> tuple[np.ndarray, list[tuple[str, ExpertSpan]]]:
        """Return the choices [B, L, K] that predict the step's tokens, and those of further positions."""
        parts = [
            self._as_array(choices[: len(rows)]) if isinstance(choices, Tensor) else choices[rows]
            for choices, rows in self._tokens
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts), self._spans

    def _as_array(self, choices: Tensor) -> np.ndarray:
        array = choices.cpu().numpy()
        if array.size and array.min() < 0:
            raise RolloutError(
                "a routed block chose no experts for some token, so there is nothing to replay; set"
                " rollout.replay_experts to false."
            )
        return array.astype(self._dtype)
