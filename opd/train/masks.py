"""Replay of sampling masks: log-probabilities over the tokens from which a top-p or top-k let each be drawn.

An engine that cuts its distribution draws from another policy than the whole softmax. If it recorded the kept
tokens (`Sample.sampling_masks`), the trainer's policy is over the same ones: the log-probability of the whole
vocabulary minus the log of the kept mass ("keep sampling mask" of DeepSeek-V3.2). Both come from one call of
the kernels, so `[N, V]` never exists, and a vocabulary may be spread over ranks.

Shapes: `N` response tokens, `K` tokens of the longest mask, `R` response tokens and `M` mask ids of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from opd.config.writing import MOST_KEPT
from opd.errors import TrainingError
from opd.kernels import checks
from opd.kernels.ops import linear_logprobs_entropy
from opd.kernels.vocab_parallel import AnyHead
from opd.storage.transcript import split_masks
from opd.types import Sample

_FAR = -1e30
"""The log-probability of a filler: `exp` of it is 0, and 0 times it is 0."""


class ForeignTokenError(Exception):
    """A sampling mask names a token beyond the vocabulary, which is the argument."""

    def naming(self, samples: Sequence[Sample]) -> TrainingError:
        """Return the error that names the first of `samples` with such a mask."""
        (vocabulary,) = self.args
        masks = [(one.uid, len(one.response_ids), one.sampling_masks) for one in samples]
        tokens = [(uid, ids[count:].max(initial=0)) for uid, count, ids in masks if ids is not None]
        uid, token = next(pair for pair in tokens if pair[1] >= vocabulary)
        return TrainingError(
            f"a sampling mask of sample {uid} names token {token}, and the student has {vocabulary}; let the"
            " engine write with the model that is trained, or set rollout.replay_masks to false."
        )


def pack_masks(samples: Sequence[Sample]) -> Tensor | None:
    """Return the masks [N, K] int64 of the response tokens of `samples`, end to end, as of
    `MicroBatch.masks`, on the CPU. `None` if no token has any. Raises `TrainingError` naming a sample whose
    masks cannot be its own.
    """
    parts = [_checked_masks(sample) for sample in samples]
    counts = np.concatenate([counts for counts, _ in parts])
    packed = np.full((len(counts), int(counts.max(initial=0))), -1, np.int64)
    packed[np.arange(packed.shape[1]) < counts[:, None]] = np.concatenate([ids for _, ids in parts])
    return torch.from_numpy(packed) if packed.size else None


def _checked_masks(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of mask ids [R] of each token of `sample`, and the ids [M]."""
    if (masks := sample.sampling_masks) is None:
        return np.zeros(len(sample.response_ids), np.int64), np.zeros(0, np.int64)
    try:
        return split_masks(sample.response_ids, np.asarray(masks), MOST_KEPT)
    except ValueError as error:
        raise TrainingError(
            f"sampling_masks of sample {sample.uid} {error}; they are not the engine's, so let it write again"
            " with rollout.replay_masks false, or remove the samples and the log."
        ) from None


def policy_logprobs(
    hidden: Tensor, head: AnyHead, targets: Tensor, masks: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities and the entropies [N] of the policy that drew `targets` [N] from `masks`
    [N, K], both differentiable in `hidden` [N, D] and `head`, and the probability of each mask, 0 without
    one. Raises `ForeignTokenError` for an id of a mask outside the vocabulary.
    """
    scale = {"temperature": temperature, "chunk": chunk}
    vocabulary = head.vocabulary

    def fail() -> None:
        raise ForeignTokenError(vocabulary)

    checks.require_true((masks < vocabulary).all(), fail)
    ids = torch.cat([targets[:, None], torch.where(masks < 0, targets[:, None], masks)], 1)
    logprobs, whole_entropy = linear_logprobs_entropy(hidden, head, ids.clamp(max=vocabulary - 1), **scale)
    drawn, kept = logprobs[:, 0], logprobs[:, 1:].masked_fill(masks < 0, _FAR)
    log_mass = kept.logsumexp(1)
    inside = kept - log_mass[:, None]
    entropy = -(inside.exp() * inside).sum(1)
    masked = masks[:, 0] >= 0
    mass = log_mass.detach().exp() * masked
    return torch.where(masked, drawn - log_mass, drawn), torch.where(masked, entropy, whole_entropy), mass
