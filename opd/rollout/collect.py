"""From prompts to finished sample groups, by `collect` or by a rollout of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from opd.errors import ConfigError, RolloutError
from opd.imports import GENERATE, calling, import_function
from opd.rollout.transcript import Tokens, Transcript
from opd.types import Chunk, RolloutRequest, Sample, SampleGroup, SamplingParams, Status


class Generates(Protocol):
    """The one verb of a `RolloutEngine` that sampling needs."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]: ...


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
    for uid, status, tokens in responses(engine, requests):
        _fill(samples[uid], status, tokens, getattr(engine, "failures", {}))
    for sample in samples.values():
        _check(sample, keep_failed)
    return groups


def stream(
    engine: Generates, samples: Sequence[Sample], sampling: SamplingParams, seed: int
) -> Iterator[Sample]:
    """Sample a response to each of `samples`, which have a uid and a prompt; they come whole, as they end;
    nothing of them stays here.

    Raises `RolloutError` as `collect` does.
    """
    waiting = {sample.uid: sample for sample in samples}
    requests = [RolloutRequest(uid, sample.prompt_ids, sampling, seed) for uid, sample in waiting.items()]
    for uid, status, tokens in responses(engine, requests):
        sample = waiting.pop(uid)
        _fill(sample, status, tokens, getattr(engine, "failures", {}))
        _check(sample, keep_failed=False)
        yield sample
    for sample in waiting.values():
        _check(sample, keep_failed=False)


def responses(engine: Generates, requests: Sequence[RolloutRequest]) -> Iterator[tuple[str, Status, Tokens]]:
    """What `engine` writes to `requests`: uid, how it ended and its tokens, each as it ends. Nothing of those
    that have ended stays here. A request that the engine leaves unfinished does not come.
    """
    transcript = Transcript({request.uid: Tokens.empty() for request in requests})
    for chunk in engine.generate(requests):
        transcript.add(chunk)
        for uid, status in chunk.finished.items():
            yield uid, status, transcript.tokens(uid)
        transcript.end(chunk.finished)


def _fill(sample: Sample, status: Status, tokens: Tokens, reasons: dict[str, str]) -> None:
    sample.status = status
    sample.response_ids, sample.rollout_logprobs = tokens.token_ids, tokens.logprobs
    sample.policy_versions, sample.loss_mask = tokens.policy_versions, np.ones(len(tokens), bool)
    if status in (Status.FAILED, Status.ABORTED):
        sample.failure = reasons.get(sample.uid, "the engine gave no reason")


def _check(sample: Sample, keep_failed: bool) -> None:
    if sample.status is Status.PENDING:
        raise RolloutError(f"the engine ended without finishing request {sample.uid}; restart with --resume.")
    if sample.status not in _ENDED and not keep_failed:
        raise RolloutError(f"request {sample.uid} ended as {sample.status}: {sample.failure}.")


Generate = Callable[..., list[SampleGroup]]
"""`generate(engine, prompts, group_size, sampling, seed) -> groups`, as `collect`.

It may call `engine.generate` as often as it likes, each request with a uid of its own that a resumed run
gives again. A response of several turns is one `Sample`: what the student wrote has `loss_mask` True and the
engine's log-probabilities, what an environment answered has `loss_mask` False and zeros.
"""

_ARRAYS = {
    "response_ids": ("iu", "token ids"),
    "rollout_logprobs": ("f", "log-probabilities"),
    "policy_versions": ("iu", "versions"),
    "loss_mask": ("b", "booleans"),
}
"""Of a sample: the kinds of numbers that each holds."""
_ENDED = (Status.COMPLETED, Status.TRUNCATED)


def load_generate(path: str | None) -> Generate:
    """The function at `path`, its results checked; `collect` for `None`.

    Raises `ConfigError` if it cannot be loaded. What it returns raises `RolloutError`, naming the group or
    sample, unless every prompt has its group under its own uid and every sample has ended and is complete.
    """
    if path is None:
        return collect
    found: Any = import_function(path, "rollout.generate", ConfigError, GENERATE)

    def generate(
        engine: Generates,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        with calling(f"rollout.generate {path}", RolloutError):
            groups = found(engine, prompts, group_size, sampling, seed)
        with calling(f"rollout.generate {path}: checking what it returned", RolloutError):
            _check_groups(path, groups, prompts, group_size)
        return groups

    return generate


def _check_groups(path: str, groups: Any, prompts: Sequence[EncodedPrompt], group_size: int) -> None:
    if not isinstance(groups, list | tuple) or not all(isinstance(group, SampleGroup) for group in groups):
        raise RolloutError(
            f"rollout.generate {path} returned {_shown(groups)}; return a list of SampleGroup, one a prompt."
        )
    returned = [group.uid for group in groups]
    asked = [prompt.uid for prompt in prompts]
    if returned != asked:
        odd = next((uid for uid in asked if uid not in returned), "in another order")
        raise RolloutError(
            f"rollout.generate {path} did not return one group for each prompt, in their order ({odd})."
        )
    for group in groups:
        if len(group.samples) != group_size:
            raise RolloutError(
                f"rollout.generate {path} returned {len(group.samples)} samples for prompt {group.uid}, but"
                f" {group_size} were asked for."
            )
        for sample in group.samples:
            if not isinstance(sample, Sample):
                raise RolloutError(
                    f"rollout.generate {path}: group {group.uid} holds {_shown(sample)}; give it samples."
                )
            _check_sample(path, sample, group)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    return type(value).__name__


def _check_sample(path: str, sample: Sample, group: SampleGroup) -> None:
    for name, (kinds, meant) in _ARRAYS.items():
        value = getattr(sample, name)
        if not isinstance(value, np.ndarray) or value.ndim != 1:
            raise RolloutError(
                f"rollout.generate {path}: {name} of sample {sample.uid} is {type(value).__name__}; give a"
                " NumPy array with one entry a response token."
            )
        if value.dtype.kind not in kinds or not np.isfinite(value).all():
            raise RolloutError(
                f"rollout.generate {path}: {name} of sample {sample.uid} is of {value.dtype}, or not all of"
                f" it is finite; give {meant}."
            )
        setattr(sample, name, np.asarray(value))  # no class of the user's own
    tokens = len(sample.response_ids)
    lengths = {
        "rollout_logprobs": len(sample.rollout_logprobs),
        "policy_versions": len(sample.policy_versions),
        "loss_mask": len(sample.loss_mask),
    }
    for name, length in lengths.items():
        if length != tokens:
            raise RolloutError(
                f"rollout.generate {path}: sample {sample.uid} has {tokens} response tokens and {length} of"
                f" {name}; give one each."
            )
    if sample.group_uid != group.uid or sample.status not in _ENDED:
        raise RolloutError(
            f"rollout.generate {path}: sample {sample.uid} needs group_uid {group.uid} (has"
            f" {sample.group_uid}) and a status completed or truncated (has {sample.status})."
        )
