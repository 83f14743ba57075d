"""From prompts to finished sample groups, by `collect` or by a rollout of the user's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np

from opd.config.base import GENERATE
from opd.config.writing import MOST_KEPT
from opd.errors import ConfigError, RolloutError
from opd.imports import import_function
from opd.rollout.request_state import ENDS
from opd.rollout.requests import EpisodeKind, RequestWriter
from opd.rollout.streams import More
from opd.storage.transcript import Tokens, Transcript, choices_of, masks_of, split_masks
from opd.types import Chunk, RolloutRequest, Sample, SampleGroup, SamplingParams, Status
from opd.user_code import call_user_code

_log = logging.getLogger(__name__)


class SamplingEngine(Protocol):
    """The interface of an engine that sampling needs; see also `opd.rollout.streams`."""

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Iterator[Chunk]:
        """Stream the chunks of requests, and of those that `more` adds meanwhile, until all have ended."""
        ...


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
    """Further fields that a reward function sees."""
    teacher_ids: np.ndarray | None = None
    """[C'] int32: the prompt that teachers read, if it is another or in tokens of their own. Empty: each
    answer gets one once it has its reward."""

    def for_teacher(self) -> EncodedPrompt:
        """Return the prompt that a teacher answers in place of the student."""
        made = self.teacher_ids is not None and len(self.teacher_ids) > 0
        return replace(self, token_ids=self.teacher_ids) if made else self

    def empty_sample(self, index: int) -> Sample:
        """Return the sample at `index` of this prompt's group, without a response."""
        return Sample(
            f"{self.uid}/{index}",
            self.uid,
            self.domain,
            self.token_ids,
            label=self.label,
            metadata=dict(self.metadata),
            teacher_prompt_ids=self.teacher_ids,
        )

    def empty_group(self, size: int) -> SampleGroup:
        """Return `size` samples of this prompt, without responses."""
        return SampleGroup(self.uid, self.domain, [self.empty_sample(index) for index in range(size)])


@dataclass(frozen=True, slots=True)
class DomainSampling:
    """Sampling parameters and generate function of a domain."""

    sampling: SamplingParams
    generate: Generate


def generate_groups(
    engine: SamplingEngine,
    prompts: Sequence[EncodedPrompt],
    group_size: int,
    settings: Mapping[str, DomainSampling],
    seed: int,
) -> list[SampleGroup]:
    """Generate `group_size` responses to every prompt, in the order of `prompts`, by the `settings` of its
    domain.

    All prompts of `collect` go to the engine in one batch, and so do the turns of episodes of all domains. A
    rollout of the user's own is called once for all domains that share it and their sampling.
    """
    plain: list[EncodedPrompt] = []
    others: dict[DomainSampling, list[EncodedPrompt]] = {}
    for prompt in prompts:
        domain = settings[prompt.domain]
        batch = plain if domain.generate is collect else others.setdefault(domain, [])
        batch.append(prompt)
    sampling = {name: domain.sampling for name, domain in settings.items()}
    episodes = {domain: batch for domain, batch in others.items() if is_played(domain)}
    groups: list[SampleGroup] = []
    if episodes:
        with RequestWriter(engine) as writer:
            plays = start_episodes(writer, episodes, group_size, seed)
            if plain:
                groups += collect(writer, plain, group_size, sampling, seed)
            writer.finish()
            groups += [group for play in plays for group in play.result()]
    elif plain:
        groups += collect(engine, plain, group_size, sampling, seed)
    for domain, batch in others.items():
        if domain not in episodes:
            groups += domain.generate(engine, batch, group_size, domain.sampling, seed)
    by_uid = {group.uid: group for group in groups}
    return [by_uid[prompt.uid] for prompt in prompts]


def is_played(domain: DomainSampling) -> bool:
    """Return True if `domain` plays episodes, which run concurrently with other domains."""
    return isinstance(domain.generate, EpisodeKind)


def start_episodes(
    writer: RequestWriter,
    prompts: Mapping[DomainSampling, Sequence[EncodedPrompt]],
    group_size: int,
    seed: int,
) -> list[Future[list[SampleGroup]]]:
    """Start the episodes of `prompts`. Returns their groups by domain, in the order of the mapping."""
    return [
        writer.start_coroutine(
            cast("EpisodeKind", domain.generate).play(writer, batch, group_size, domain.sampling, seed)
        )
        for domain, batch in prompts.items()
    ]


def collect(
    engine: SamplingEngine,
    prompts: Sequence[EncodedPrompt],
    group_size: int,
    sampling: SamplingParams | Mapping[str, SamplingParams],
    seed: int,
    *,
    keep_failed: bool = False,
) -> list[SampleGroup]:
    """Sample `group_size` responses to every prompt with the engine's current weights; `sampling`: of all, or
    by domain.

    Every sample is returned, in the order of `prompts`, completed or truncated. With `keep_failed`, failed or
    aborted ones are returned too, with the reason in `failure`. Otherwise they raise `RolloutError`, because
    leaving them out would favour short answers. So does a request that the engine left unfinished.
    """
    groups = [prompt.empty_group(group_size) for prompt in prompts]
    if isinstance(sampling, SamplingParams):
        sampling = dict.fromkeys((prompt.domain for prompt in prompts), sampling)
    samples = [sample for group in groups for sample in group.samples]
    for _ in stream_samples(engine, samples, sampling, seed, keep_failed=True):
        pass
    for sample in samples if not keep_failed else ():
        check_end(sample)
    return groups


def stream_samples(
    engine: SamplingEngine,
    samples: Sequence[Sample],
    sampling: Mapping[str, SamplingParams],
    seed: int,
    *,
    keep_failed: bool = False,
) -> Iterator[Sample]:
    """Sample a response to each of `samples`, which have a uid and a prompt, with the sampling of its domain.
    Each is yielded as it ends. Nothing of it stays here. Raises `RolloutError` as `collect` does.
    """
    waiting = {sample.uid: sample for sample in samples}
    requests = [
        RolloutRequest(uid, sample.prompt_ids, sampling[sample.domain], seed, session=sample.group_uid)
        for uid, sample in waiting.items()
    ]
    for uid, status, tokens in responses(engine, requests):
        sample = waiting.pop(uid)
        set_response(sample, status, tokens, getattr(engine, "failures", {}))
        if not keep_failed:
            check_end(sample)
        yield sample
    if waiting:  # an engine of the caller's own ended early
        raise RolloutError(
            f"the engine ended without finishing request {min(waiting)}; restart with --resume."
        )


def responses(
    engine: SamplingEngine, requests: Sequence[RolloutRequest]
) -> Iterator[tuple[str, Status, Tokens]]:
    """Yield uid, status and tokens of each of `requests` as it ends. Nothing of an ended request stays here.
    A request that the engine leaves unfinished is not yielded.
    """
    transcript = Transcript({request.uid: Tokens.empty() for request in requests})
    for chunk in engine.generate(requests):
        transcript.add_chunk(chunk)
        for uid, status in chunk.finished.items():
            yield uid, status, transcript.request_tokens(uid)
        transcript.drop_requests(chunk.finished)


def set_response(sample: Sample, status: Status, tokens: Tokens, reasons: Mapping[str, str]) -> None:
    """Give `sample` its response. `reasons`: of failed requests, by uid."""
    sample.status = status
    sample.response_ids, sample.rollout_logprobs = tokens.token_ids, tokens.logprobs
    sample.policy_versions, sample.loss_mask = tokens.policy_versions, np.ones(len(tokens), bool)
    sample.sampling_masks = masks_of(tokens)
    sample.expert_choices = choices_of([(len(sample.prompt_ids), tokens)])
    if status in (Status.FAILED, Status.ABORTED):
        sample.failure = reasons.get(sample.uid, "the engine gave no reason")


def check_end(sample: Sample) -> None:
    """Raise `RolloutError` if `sample` has failed or was aborted."""
    if sample.status not in ENDS:
        raise RolloutError(f"request {sample.uid} ended as {sample.status}: {sample.failure}.")


Generate = Callable[..., list[SampleGroup]]
"""`generate(engine, prompts, group_size, sampling, seed) -> groups`, as `collect`.

It may call `engine.generate` any number of times. Each request has a uid of its own, and a resumed run gives
the same uid. A response of several turns is one `Sample`. Tokens of the student have `loss_mask` True and the
engine's log-probabilities. Tokens of the environment have `loss_mask` False and zeros. With
`rollout.replay_masks: true` it sets `sampling_masks`, too (`opd.storage.transcript.masks_of`).
"""

_ARRAYS = {
    "response_ids": ("iu", "token ids"),
    "rollout_logprobs": ("f", "log-probabilities"),
    "policy_versions": ("iu", "versions"),
    "loss_mask": ("b", "booleans"),
}
"""Array of a sample -> the NumPy kinds it may have, and their name in errors."""


def load_generate(path: str | None, masked: bool = False) -> Generate:
    """Return the function at `path`, with its results checked, or `collect` if `path` is None. `masked`: the
    engine gives sampling masks. It is logged once if responses drawn with a cut come without.

    Raises `ConfigError` if it cannot be loaded. The returned function raises `RolloutError`, naming the group
    or sample, unless every prompt has its group under its own uid and every sample has ended and is complete.
    """
    if path is None:
        return collect
    function: Any = import_function(path, "rollout.generate", ConfigError, GENERATE)
    told = not masked

    def generate(
        engine: SamplingEngine,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        nonlocal told
        with call_user_code(f"rollout.generate {path}", RolloutError):
            groups = function(engine, prompts, group_size, sampling, seed)
        with call_user_code(f"rollout.generate {path}: checking what it returned", RolloutError):
            _check_groups(path, groups, prompts, group_size)
        samples = [one for group in groups for one in (*group.samples, *group.branches)]
        bare = [one.uid for one in samples if one.sampling_masks is None and one.loss_mask.any()]
        if not told and bare and (sampling.top_p < 1 or sampling.top_k):
            told = True
            _log.warning(
                "rollout.generate %s gives %d of %d samples, such as %s, no sampling_masks: they are learnt"
                " from over the whole vocabulary, and their log-probabilities are over the tokens that a cut"
                " kept, where these are at most %d; set masks_of (opd.storage.transcript) of their tokens, or"
                " rollout.replay_masks to false",
                *(path, len(bare), len(samples), bare[0], MOST_KEPT),
            )
        return groups

    return generate


def _check_groups(path: str, groups: object, prompts: Sequence[EncodedPrompt], group_size: int) -> None:
    if not isinstance(groups, list | tuple) or not all(isinstance(group, SampleGroup) for group in groups):
        raise RolloutError(
            f"rollout.generate {path} returned {_describe_type(groups)}; return a list of SampleGroup, one"
            " a prompt."
        )
    returned = [group.uid for group in groups]
    expected = [prompt.uid for prompt in prompts]
    if returned != expected:
        odd = next((uid for uid in expected if uid not in returned), "in another order")
        raise RolloutError(
            f"rollout.generate {path} did not return one group for each prompt, in their order ({odd})."
        )
    for group in groups:
        episodes = {sample.uid for sample in group.samples if isinstance(sample, Sample)}
        uids = set(episodes)
        for branch in group.branches:
            if not isinstance(branch, Sample) or branch.branch_of not in episodes or branch.uid in uids:
                raise RolloutError(
                    f"rollout.generate {path}: branches of group {group.uid} hold {_describe_type(branch)};"
                    " give samples with uids of their own and branch_of one of the group's."
                )
            uids.add(branch.uid)
            _check_sample(path, branch, group)
        if len(group.samples) != group_size:
            raise RolloutError(
                f"rollout.generate {path} returned {len(group.samples)} samples for prompt {group.uid}, but"
                f" {group_size} were asked for."
            )
        for sample in group.samples:
            if not isinstance(sample, Sample):
                raise RolloutError(
                    f"rollout.generate {path}: group {group.uid} holds {_describe_type(sample)}; give it"
                    " samples."
                )
            _check_sample(path, sample, group)


def _describe_type(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    return type(value).__name__


def _check_sample(path: str, sample: Sample, group: SampleGroup) -> None:
    for name, (kinds, noun) in _ARRAYS.items():
        value = getattr(sample, name)
        if not isinstance(value, np.ndarray) or value.ndim != 1:
            raise RolloutError(
                f"rollout.generate {path}: {name} of sample {sample.uid} is {type(value).__name__}; give a"
                " NumPy array with one entry a response token."
            )
        if value.dtype.kind not in kinds or not np.isfinite(value).all():
            raise RolloutError(
                f"rollout.generate {path}: {name} of sample {sample.uid} is of {value.dtype}, or not all of"
                f" it is finite; give {noun}."
            )
        setattr(sample, name, np.asarray(value))  # no class of the user's own
    tokens, choices = len(sample.response_ids), sample.expert_choices
    most = len(sample.prompt_ids) + tokens
    if choices is not None and not (
        isinstance(choices, np.ndarray)
        and choices.dtype in (np.uint8, np.uint16)
        and choices.ndim == 3
        and len(choices) <= most
    ):
        raise RolloutError(
            f"rollout.generate {path}: expert_choices of sample {sample.uid} are no uint8 or uint16 array"
            f" [N, L, K] of at most {most} positions; give those of the engine, or None."
        )
    if (masks := sample.sampling_masks) is not None:
        try:
            if not isinstance(masks, np.ndarray) or masks.dtype != np.int32 or masks.ndim != 1:
                raise ValueError("are no int32 array [R + M]")
            split_masks(sample.response_ids, masks, MOST_KEPT)
        except ValueError as error:
            raise RolloutError(
                f"rollout.generate {path}: sampling_masks of sample {sample.uid} {error}; give those of the"
                " engine, or None."
            ) from None
    for name in _ARRAYS:
        if (length := len(getattr(sample, name))) != tokens:
            raise RolloutError(
                f"rollout.generate {path}: sample {sample.uid} has {tokens} response tokens and {length} of"
                f" {name}; give one each."
            )
    if sample.group_uid != group.uid or sample.status not in ENDS:
        raise RolloutError(
            f"rollout.generate {path}: sample {sample.uid} needs group_uid {group.uid} (has"
            f" {sample.group_uid}) and a status completed or truncated (has {sample.status})."
        )
