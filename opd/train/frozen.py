"""A model that is never trained, for log-probabilities of the student's responses: a reference, or the base.

With several ranks each holds its FSDP2 shard, and all make each pass together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from opd.config.train import BatchConfig
from opd.kernels.ops import linear_logprobs
from opd.kernels.projection import tokens_per_chunk
from opd.models.causal_lm import CausalLM
from opd.models.expert_parallel import ExpertParallel
from opd.models.long_sequence import LayerMemory
from opd.models.sharded import ForwardRoot, close_up, shard_model
from opd.ranks import Ranks
from opd.train.masks import policy_logprobs
from opd.train.packing import of_packed
from opd.train.plan import scored_tokens
from opd.types import Sample


class FrozenModel:
    """Log-probabilities of responses under `model`, which `ranks` share. All ranks make the same calls.

    Args:
        model: Complete, or without weights (`open_empty`); they are read then.
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
        """Return `[R]` float32 log-probabilities of each of this rank's `samples`, at `temperature`, over the
        sampling masks of those that have some.
        """
        model, root, batch = self.model, self._root, self._batch
        memory = LayerMemory(batch.recompute_layers, batch.sequence_chunk)
        tokens = scored_tokens(batch.max_tokens, model.device)

        def one_pass(
            input_ids: Tensor,
            position_ids: Tensor,
            cu_seqlens: Tensor,
            rows: Tensor,
            masks: Tensor | None = None,
        ) -> Tensor:
            hidden = model.hidden(input_ids, position_ids, cu_seqlens, memory)[rows]
            head, targets = model.head(), input_ids[rows + 1]
            chunk = tokens_per_chunk(batch.kl_chunk, model.device, head.vocabulary)
            if masks is not None:
                return policy_logprobs(hidden, head, targets, masks, temperature, chunk)[0]
            return linear_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)

        if root is None:
            return of_packed(samples, tokens, model.device, one_pass, masked=True)
        ids = torch.zeros(1, dtype=torch.int64, device=model.device)
        with self._ranks.collective("the log-probabilities of a frozen model"):
            logprobs = of_packed(
                samples,
                tokens,
                model.device,
                lambda *packed, **masks: root(lambda: one_pass(*packed, **masks)),
                ranks=self._ranks,
                idle=lambda: root(lambda: model.hidden(ids, ids, [0, 1])),
                masked=True,
            )
        close_up(root)
        return logprobs
