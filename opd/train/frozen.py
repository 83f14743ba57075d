"""A model that is never trained, for log-probabilities of the student's responses: a reference, or the base.

With several ranks each holds its FSDP2 shard, and all make each pass together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from opd.config.train import BatchConfig
from opd.models.causal_lm import CausalLM
from opd.models.expert_parallel import ExpertParallel
from opd.models.sharded import ForwardRoot, close_up, shard_model
from opd.ranks import Ranks
from opd.train.backend import response_logprobs
from opd.train.micro_batches import scored_tokens
from opd.train.packing import split_samples
from opd.types import Sample

_LABEL = "the log-probabilities of a frozen model"


class FrozenModel:
    """`response_logprobs` of `model`, which `ranks` share. All ranks make the same calls.

    Args:
        model: Complete, or without weights (`open_empty`); they are read then.
        batch: How samples are packed.
        expert_parallel: Whether the ranks share its experts; see `shard_model`.
    """

    def __init__(
        self, model: CausalLM, batch: BatchConfig, ranks: Ranks, expert_parallel: ExpertParallel = "auto"
    ) -> None:
        self.model, self._batch, self._ranks = model, batch, ranks
        self._root: ForwardRoot | None = None
        if not ranks.is_alone:
            pieces = batch.sequence_chunk is not None
            self._root = shard_model(model, ranks, None, expert_parallel, pieces=pieces)

    @torch.no_grad()
    def local_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
        """Return `[R]` float32 of each of this rank's `samples`, at `temperature`."""
        root, batch = self._root, self._batch
        if root is None:
            return response_logprobs(self.model, samples, temperature, batch)
        with self._ranks.collective(_LABEL):
            tokens = scored_tokens(batch.max_tokens, self.model.device)
            passes = len(split_samples(samples, range(len(samples)), tokens, by_teacher=False))
            missing = self._ranks.max_over_ranks(passes, _LABEL) - passes
            logprobs = response_logprobs(self.model, samples, temperature, batch, root)
            for _ in range(missing):
                ids = torch.zeros(1, dtype=torch.int64, device=self.model.device)
                root(lambda ids=ids: self.model.hidden(ids, ids, [0, 1]))
        close_up(root)
        return logprobs
