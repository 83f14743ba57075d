"""From prompts to finished sample groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.errors import RolloutError
from opd.protocols import RolloutEngine
from opd.types import RolloutRequest, Sample, SampleGroup, SamplingParams, Status


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine needs it."""

    uid: str
    """Becomes the group's uid."""
    domain: str
    token_ids: np.ndarray
    """[C] int32."""
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    """What a reward function sees beside prompt, response and label."""


def collect(
    engine: RolloutEngine,
    prompts: Sequence[EncodedPrompt],
    group_size: int,
    sampling: SamplingParams,
    seed: int,
) -> list[SampleGroup]:
    """Sample `group_size` responses to every prompt with the engine's current weights.

    Every sample comes back, in the order of `prompts`, completed or truncated. Raises `RolloutError` if the
    engine left one unfinished.
    """
    groups = [
        SampleGroup(
            prompt.uid,
            prompt.domain,
            [
                Sample(
                    uid=f"{prompt.uid}/{index}",
                    group_uid=prompt.uid,
                    domain=prompt.domain,
                    prompt_ids=prompt.token_ids,
                    label=prompt.label,
                    metadata=dict(prompt.metadata),
                )
                for index in range(group_size)
            ],
        )
        for prompt in prompts
    ]
    samples = {sample.uid: sample for group in groups for sample in group.samples}
    requests = [RolloutRequest(uid, sample.prompt_ids, sampling, seed) for uid, sample in samples.items()]
    _run(engine, requests, samples)
    return groups


def _run(engine: RolloutEngine, requests: list[RolloutRequest], samples: dict[str, Sample]) -> None:
    tokens: dict[str, list[tuple[int, float, int]]] = {uid: [] for uid in samples}
    for step in engine.generate(requests):
        version = step.policy_version
        for uid, token, logprob in zip(
            step.uids, step.token_ids.tolist(), step.logprobs.tolist(), strict=True
        ):
            tokens[uid].append((token, logprob, version))
        for uid, status in step.finished.items():
            samples[uid].status = status
    for uid, sample in samples.items():
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            raise RolloutError(f"the engine ended without finishing request {uid}; restart with --resume.")
        ids, logprobs, versions = zip(*tokens[uid], strict=True) if tokens[uid] else ((), (), ())
        sample.response_ids = np.array(ids, dtype=np.int32)
        sample.rollout_logprobs = np.array(logprobs, dtype=np.float32)
        sample.policy_versions = np.array(versions, dtype=np.int32)
        sample.loss_mask = np.ones(len(ids), dtype=bool)
