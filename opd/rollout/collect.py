"""From prompts to finished sample groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from opd.errors import RolloutError
from opd.rollout.transcript import Tokens, Transcript
from opd.types import DecodeStep, RolloutRequest, Sample, SampleGroup, SamplingParams, Status


class Generates(Protocol):
    """The one verb of a `RolloutEngine` that sampling needs."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[DecodeStep]: ...


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

    def sample(self, place: int) -> Sample:
        """The sample at `place` of this prompt's group, without a response."""
        return Sample(
            f"{self.uid}/{place}",
            self.uid,
            self.domain,
            self.token_ids,
            label=self.label,
            metadata=dict(self.metadata),
        )


def collect(
    engine: Generates,
    prompts: Sequence[EncodedPrompt],
    group_size: int,
    sampling: SamplingParams,
    seed: int,
    *,
    keep_failed: bool = False,
) -> list[SampleGroup]:
    """Sample `group_size` responses to every prompt with the engine's current weights.

    Every sample comes back, in the order of `prompts`, completed or truncated; with `keep_failed` also failed
    or aborted ones, whose `failure` says why. Raises `RolloutError` for those otherwise (leaving them out
    would favour short answers), and if the engine left a request unfinished.
    """
    groups = [
        SampleGroup(prompt.uid, prompt.domain, [prompt.sample(place) for place in range(group_size)])
        for prompt in prompts
    ]
    samples = {sample.uid: sample for group in groups for sample in group.samples}
    requests = [RolloutRequest(uid, sample.prompt_ids, sampling, seed) for uid, sample in samples.items()]
    _run(engine, requests, samples)
    _check(samples, keep_failed)
    return groups


def stream(
    engine: Generates, samples: Sequence[Sample], sampling: SamplingParams, seed: int
) -> Iterator[list[Sample]]:
    """Sample a response to each of `samples`, which have a uid and a prompt; they come as they end, whole,
    those of a decode step together, and nothing of them stays here.

    Raises `RolloutError` as `collect` does.
    """
    waiting = {sample.uid: sample for sample in samples}
    requests = [RolloutRequest(uid, sample.prompt_ids, sampling, seed) for uid, sample in waiting.items()]
    transcript = Transcript({uid: Tokens.empty() for uid in waiting})
    for step in engine.generate(requests):
        transcript.add(step)
        ended = {uid: waiting.pop(uid) for uid in step.finished}
        for uid, sample in ended.items():
            sample.status = step.finished[uid]
            _fill(sample, transcript.tokens(uid), getattr(engine, "failures", {}))
        transcript.end(ended)
        _check(ended, keep_failed=False)
        if ended:
            yield list(ended.values())
    _check(waiting, keep_failed=False)


def _run(engine: Generates, requests: list[RolloutRequest], samples: dict[str, Sample]) -> None:
    transcript = Transcript({uid: Tokens.empty() for uid in samples})
    for step in engine.generate(requests):
        transcript.add(step)
        for uid, status in step.finished.items():
            samples[uid].status = status
    reasons: dict[str, str] = getattr(engine, "failures", {})
    for uid, sample in samples.items():
        _fill(sample, transcript.tokens(uid), reasons)


def _fill(sample: Sample, tokens: Tokens, reasons: dict[str, str]) -> None:
    sample.response_ids, sample.rollout_logprobs = tokens.token_ids, tokens.logprobs
    sample.policy_versions, sample.loss_mask = tokens.policy_versions, tokens.loss_mask
    if sample.status in (Status.FAILED, Status.ABORTED):
        sample.failure = reasons.get(sample.uid, "the engine gave no reason")


def _check(samples: dict[str, Sample], keep_failed: bool) -> None:
    ended = (Status.COMPLETED, Status.TRUNCATED)
    for uid, sample in samples.items():
        if sample.status is Status.PENDING:
            raise RolloutError(f"the engine ended without finishing request {uid}; restart with --resume.")
        if sample.status not in ended and not keep_failed:
            raise RolloutError(f"request {uid} ended as {sample.status}: {sample.failure}.")
