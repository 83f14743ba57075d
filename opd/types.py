"""The nouns of a training step, from prompt to gradient. Importable without torch.

Shapes: `C` prompt tokens, `R` response tokens, `T` packed tokens of a micro-batch, `N` packed response tokens
of a micro-batch, `K` a top-k support, `D` hidden size, `V` vocabulary, `B` sequences.

Row convention: hidden row `i` predicts token `i + 1`. So a response of `R` tokens after a prompt of `C` is
predicted by the rows `C-1 ... C+R-2` of its sequence. A response of length 0 has no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from opd.models.routing import RoutedTokens

Int32 = np.ndarray
Float32 = np.ndarray


class Status(StrEnum):
    """The end of a rollout. Only `COMPLETED` and `TRUNCATED` samples are trained on."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


def no_ids() -> Int32:
    """[0] int32."""
    return np.zeros(0, dtype=np.int32)


def prompt_text(metadata: Mapping[str, object]) -> str:
    """Return the prompt that a sample's `metadata` holds: its messages, a line each, or its text."""
    messages = metadata.get("messages")
    said = [one for one in messages if isinstance(one, Mapping)] if isinstance(messages, Sequence) else []
    lines = [f"{one.get('role')}: {one.get('content')}" for one in said]
    return "\n".join(lines) or str(metadata.get("prompt", ""))


@dataclass(slots=True)
class Sample:
    """One rollout: a prompt, the response the student wrote to it, and the facts about each token."""

    uid: str
    """Unique in the run. Keys the sampling noise, the log and the caches."""
    group_uid: str
    """The group (one prompt, `G` responses) it belongs to: identity travels here, never in a position."""
    domain: str
    """Selects reward function and teacher."""
    prompt_ids: Int32
    """[C] int32. Never counted in a loss."""
    label: Any = None
    """The reference of the reward function, JSON-able."""
    teacher: str | None = None
    """Name of its route: its teacher, or several of a mixture joined by `+`. `None` without a teacher."""
    response_ids: Int32 = field(default_factory=no_ids)
    """[R] int32."""
    rollout_logprobs: Float32 = field(default_factory=partial(np.zeros, 0, np.float32))
    """[R] float32, nats: the engine's (behaviour policy's) log-probabilities at the sampling temperature.

    Never used as the policy's log-probabilities in a loss; see `TokenTerms.old_logprobs`."""
    policy_versions: Int32 = field(default_factory=no_ids)
    """[R] int32: version of the weights that sampled each token."""
    loss_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """[R] bool: True if the student wrote the token, False for environment tokens."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    feedback: str = ""
    """What its reward function says of it, for teachers' prompts. Empty: nothing."""
    status: Status = Status.PENDING
    failure: str | None = None
    """The reason, if `status` is `FAILED` or `ABORTED`."""
    metadata: dict[str, Any] = field(default_factory=dict)
    branch_of: str = ""
    """Uid of the sample whose episode it is a further conversation of, see `SampleGroup.branches`."""
    expert_choices: np.ndarray | None = None
    """[N, L, K] uint8 for at most 256 experts, else uint16: the `K` experts to which each of the `L` routed
    blocks of the engine's model sent the token at each of the first `N` positions of prompt and response.
    `N` is at most C + R - 1, because no engine reads the last token. `None`: the engine recorded none.
    """
    sampling_masks: Int32 | None = None
    """[R + M] int32: for each response token the number of tokens from which a top-p or top-k let it be
    drawn, 0 for the whole vocabulary, and then these `M` token ids, ascending for each. `rollout_logprobs` of
    tokens with a mask are over it. `None`: all are of the whole vocabulary."""
    teacher_prompt_ids: Int32 | None = None
    """[C'] int32: the prompt that its teachers read in place of `prompt_ids`, if they read another one or in
    tokens of their own. Empty: something that it names is missing, so it has no teacher in this step."""

    @property
    def is_taught(self) -> bool:
        """Return False if its teachers have nothing to read."""
        return self.teacher_prompt_ids is None or len(self.teacher_prompt_ids) > 0

    def as_taught(self) -> Sample:
        """Return the sample as its teachers read it: the same response, after their prompt."""
        if self.teacher_prompt_ids is None:
            return self
        taught = {"prompt_ids": self.teacher_prompt_ids, "teacher_prompt_ids": None}
        # Choices are of the student's prompt, and masks of its own distribution.
        return replace(self, **taught, expert_choices=None, sampling_masks=None)

    @property
    def episode(self) -> str:
        """Id of the episode this sample belongs to: its own uid, or that of the sample whose branch it is.
        Responses of one id count as one.
        """
        return self.branch_of or self.uid

    @property
    def token_ids(self) -> Int32:
        """[C + R] int32."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def trainable_tokens(self) -> int:
        """Number of tokens the loss counts."""
        return int(self.loss_mask.sum())


@dataclass(slots=True)
class SampleGroup:
    """The `G` responses to one prompt, the unit on which a group-relative advantage is estimated."""

    uid: str
    domain: str
    samples: list[Sample]
    branches: list[Sample] = field(default_factory=list)
    """Further conversations of the samples' episodes (`Sample.branch_of`). They are learnt from with the
    reward and the advantage of their episode, but no estimate, filter or metric of responses counts them. If
    several begin with the same tokens, only one has these in its loss mask.
    """

    @classmethod
    def from_samples(cls, uid: str, domain: str, every: Sequence[Sample]) -> SampleGroup:
        """Build the group of mixed samples and branches."""
        samples, branches = ([one for one in every if bool(one.branch_of) is side] for side in (False, True))
        return cls(uid, domain, samples, branches)

    @property
    def samples_with_branches(self) -> list[Sample]:
        """All sequences to learn from: each sample, and behind it its branches."""
        if not self.branches:
            return self.samples
        branches: dict[str, list[Sample]] = {}
        for branch in self.branches:
            branches.setdefault(branch.branch_of, []).append(branch)
        return [one for sample in self.samples for one in (sample, *branches.get(sample.uid, ()))]

    def share_rewards(self) -> None:
        """Give the branches the rewards of their episodes."""
        if self.branches:
            by_uid = {sample.uid: sample for sample in self.samples}
            for branch in self.branches:
                episode = by_uid[branch.branch_of]
                branch.reward, branch.reward_parts = episode.reward, episode.reward_parts

    @property
    def rewards(self) -> Float32:
        """[G] float64. NaN for a sample that has not been scored."""
        return np.array([s.reward for s in self.samples], dtype=np.float64)


@dataclass(slots=True)
class TokenTerms:
    """The loss's inputs for each response token of one sample. All `[R]` float32.

    The weights are separate streams, each already divided by its own normaliser over the *whole* optimiser
    step (all micro-batches, all ranks), so `loss = sum(weight * per_token_loss)` needs no further division.
    """

    advantages: Float32
    old_logprobs: Float32 | None
    """Log-probabilities under the weights at the start of the step, recomputed by the trainer. `None` if the
    loss is computed with the same weights: then they are the loss's own, detached.
    """
    policy_weight: Float32
    """Weight of the policy-gradient stream."""
    kl_weight: Float32
    """Weight of the distillation stream (KL between student and teacher)."""
    ce_weight: Float32
    """Weight of the cross-entropy stream (supervised tokens)."""
    ref_logprobs: Float32 | None = None
    """Log-probabilities under the frozen reference policy, if a reference KL is asked for."""
    importance: Float32 | None = None
    """Importance weight of each sampled token in an expectation over the student's own tokens, for
    distillation losses on sampled tokens that others drew. `None`: no correction.
    """
    values: Float32 | None = None
    """For a critic: its value of the state before each token, at the start of the step."""
    returns: Float32 | None = None
    """For a critic: the targets that replace `values`."""

    @classmethod
    def zeros(cls, length: int) -> TokenTerms:
        """Return all streams off for a response of `length` tokens."""
        return cls(*(np.zeros(length, dtype=np.float32) for _ in range(5)))


@dataclass(slots=True)
class RolloutBatch:
    """The samples of one optimiser step with their per-token terms, same length and order."""

    samples: list[Sample]
    terms: list[TokenTerms]

    def __post_init__(self) -> None:
        for sample, terms in zip(self.samples, self.terms, strict=True):
            if len(terms.advantages) != len(sample.response_ids):
                raise ValueError(
                    f"sample {sample.uid}: {len(terms.advantages)} terms for"
                    f" {len(sample.response_ids)} tokens"
                )

    def __iter__(self) -> Iterator[tuple[Sample, TokenTerms]]:
        return zip(self.samples, self.terms, strict=True)

    def select_samples(self, places: Sequence[int]) -> RolloutBatch:
        """Return the samples at `places`, in that order, with their terms."""
        return RolloutBatch([self.samples[i] for i in places], [self.terms[i] for i in places])


@dataclass(slots=True)
class MicroBatch:
    """Several whole samples packed end to end without padding.

    Example: prompts of 2 and 1 tokens with responses of 1 and 2 give `cu_seqlens = [0, 3, 6]`,
    `rows = [1, 3, 4]`, `targets = input_ids[[2, 4, 5]]`.
    """

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, restarting at 0 in every sequence."""
    cu_seqlens: Tensor
    """[B + 1] int32, on the CPU: sequence `b` is `input_ids[cu_seqlens[b]:cu_seqlens[b + 1]]`."""
    rows: Tensor
    """[N] int64: the packed positions whose hidden state predicts a response token."""
    targets: Tensor
    """[N] int64: the response tokens."""
    advantages: Tensor
    """[N] float32."""
    old_logprobs: Tensor | None
    """[N] float32 or None: those of the loss itself."""
    policy_weight: Tensor
    """[N] float32."""
    kl_weight: Tensor
    """[N] float32."""
    ce_weight: Tensor
    """[N] float32."""
    ref_logprobs: Tensor | None
    """[N] float32 or None."""
    samples: list[Sample]
    """The `B` samples, in packing order."""
    runs: Sequence[tuple[slice, slice]]
    """The samples of each run of one teacher, and their part of the `N` rows."""
    importance: Tensor | None = None
    """[N] float32 or None."""
    values: Tensor | None = None
    """[N] float32 or None."""
    returns: Tensor | None = None
    """[N] float32 or None."""
    routed: RoutedTokens | None = None
    """The engine's choices of experts, to be replayed: [T, L, K]. `None`: the model chooses."""
    counted: Tensor | None = None
    """[M] int64: the rows whose `kl_weight` is not 0, in order, if the host knows them."""
    masks: Tensor | None = None
    """[N, K] int64: the tokens from which each response token was drawn, filled up with -1. A row of -1 is
    the whole vocabulary. `None`: all rows are."""
    counts: Sequence[int] = ()
    """[B]: how many of `counted` each sample has."""
    kl_covers: bool = False
    """Whether every token of a loss mask is known to have a `kl_weight` that is not 0."""
    kept: Tensor | None = None
    """[N] int64: indices of these tokens among the samples' response tokens, if ranks share sequences. `None`
    is all of them, in order.
    """

    def select_rows(self, rows: slice | Tensor) -> dict[str, Tensor]:
        """Return the fields `[N]` or `[N, K]` of response tokens at `rows`, by name, those that are there."""
        names = ("targets", "masks", *(field.name for field in fields(TokenTerms)))
        found = ((name, getattr(self, name)) for name in names)
        return {name: values[rows] for name, values in found if values is not None}


@dataclass(slots=True)
class TokenLogprobs:
    """A teacher's log-probability of each response token."""

    logprobs: Tensor
    """[N] float32, nats, at the sampling temperature."""


@dataclass(slots=True)
class TopKLogprobs:
    """A teacher's `K` most likely tokens at each response position. The rest is its tail mass."""

    ids: Tensor
    """[N, K] int64."""
    logprobs: Tensor
    """[N, K] float32, nats, at the sampling temperature."""
    sampled: Tensor | None = None
    """[N] float32, nats: the response tokens' own log-probabilities, if the teacher gave them too."""


@dataclass(slots=True)
class HiddenStates:
    """A teacher's last hidden states (after the final norm). With its head they give the full vocabulary."""

    rows: Tensor
    """[N, D]."""


TeacherTargets = TokenLogprobs | TopKLogprobs | HiddenStates


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a response. `temperature = 0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_new_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the response. One is kept as the response's last token."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One response to generate."""

    uid: str
    """Keys the sampling noise together with `seed`: the same (seed, uid, position) draws the same noise."""
    prompt_ids: Int32
    """[C] int32, C >= 1."""
    sampling: SamplingParams
    seed: int = 0
    prefix_ids: Int32 = field(default_factory=no_ids)
    """[P] int32: response tokens emitted before an interruption. They are prefilled, not sampled again. They
    count towards `max_new_tokens`, and the next token has response position `P`.
    """
    session: str = ""
    """Requests of one session begin alike (the answers to a prompt, the turns of an episode). An engine of
    several workers sends them to the worker that caches that beginning. It changes no token, and no log keeps
    it.
    """
    continues: bool = False
    """Whether another request of the session will begin with the tokens of this one and its response. Then an
    engine may keep their keys and values. It changes no token either.
    """
    routed: int = 0
    """First positions of prompt and prefix whose expert choices the caller has. An engine that records them
    gives those of all others. It changes no token, and no log keeps it.
    """


class ExpertSpan(NamedTuple):
    """The expert choices of consecutive positions of a request."""

    first: int
    """Position of the first, in prompt and response."""
    choices: np.ndarray
    """[n, L, K] uint8 or uint16, see `Sample.expert_choices`."""


@dataclass(slots=True)
class Chunk:
    """Tokens of one policy version that became known at once: the unit of an engine's stream, and of a
    commit. The tokens of a request follow one another, here and from chunk to chunk.
    """

    uids: list[str]
    """[B]: the request of each token. A request may have several."""
    positions: Int32
    """[B] int32: position within the response."""
    token_ids: Int32
    """[B] int32."""
    logprobs: Float32
    """[B] float32, nats, at the sampling temperature, before any top-p or top-k cut. Of a token with a
    sampling mask: over the mask."""
    policy_version: int
    finished: dict[str, Status]
    """The requests that ended with these tokens, each `COMPLETED` (a stop id) or `TRUNCATED` (length)."""
    expert_choices: np.ndarray | None = None
    """[B, L, K] uint8 or uint16: the experts that served the position before each token, which predicts it.
    `None` if the engine records none, or gives them in `expert_spans` alone.
    """
    expert_spans: list[tuple[str, ExpertSpan]] = field(default_factory=list)
    """Requests with expert choices of further positions, such as the prompt's. Several may share an array."""
    sampling_masks: np.ndarray | None = None
    """[B] object: the ascending ids from which each token was drawn, as bytes of int32, or `None` for the
    whole vocabulary. `None` alone if all are of that.
    """

    @classmethod
    def join(cls, parts: list[Chunk]) -> Chunk:
        """Concatenate `parts` of one policy version, at least one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            [uid for part in parts for uid in part.uids],
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            parts[0].policy_version,
            {uid: status for part in parts for uid, status in part.finished.items()},
            join_choices([part.expert_choices for part in parts]),
            [pair for part in parts for pair in part.expert_spans],
            join_masks([(len(part.uids), part.sampling_masks) for part in parts]),
        )

    def select_rows(self, rows: Sequence[int], finished: dict[str, Status]) -> Chunk:
        """Return the tokens `rows`, with other ends."""
        indices = np.array(rows, dtype=np.int64)
        return Chunk(
            [self.uids[row] for row in rows],
            self.positions[indices],
            self.token_ids[indices],
            self.logprobs[indices],
            self.policy_version,
            finished,
            None if self.expert_choices is None else self.expert_choices[indices],
            self.expert_spans,
            None if self.sampling_masks is None else self.sampling_masks[indices],
        )

    def without_requests(self, uids: Collection[str]) -> Chunk:
        """Return the tokens and ends of requests other than `uids`."""
        rows = [row for row, uid in enumerate(self.uids) if uid not in uids]
        part = self.select_rows(
            rows, {uid: status for uid, status in self.finished.items() if uid not in uids}
        )
        part.expert_spans = [(uid, span) for uid, span in self.expert_spans if uid not in uids]
        return part


def join_choices(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate expert choices [n, L, K]. `None` if a part has none."""
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays and len(arrays) == len(parts) else None


def join_masks(parts: Sequence[tuple[int, np.ndarray | None]]) -> np.ndarray | None:
    """Concatenate sampling masks [n] object, each with its `n`. `None` if no part has any."""
    if all(masks is None for _, masks in parts):
        return None
    return np.concatenate([np.full(n, None) if masks is None else masks for n, masks in parts])


@dataclass(slots=True)
class LoggedRequest:
    """A token log's record of one request."""

    request: RolloutRequest
    """As it was opened, with empty `prefix_ids`."""
    metadata: dict[str, Any]
    """The caller's metadata from the opening, JSON-able."""
    token_ids: Int32
    """[R] int32: response tokens so far."""
    logprobs: Float32
    """[R] float32, nats."""
    policy_versions: Int32
    """[R] int32: version that sampled each token."""
    status: Status = Status.PENDING
    """`PENDING` while it is open."""
    failure: str | None = None
    """The reason, if it was closed as failed or aborted."""
    expert_choices: np.ndarray | None = None
    """[R, L, K]: see `Chunk`. `None` if not all of these tokens were logged with theirs."""
    expert_spans: tuple[ExpertSpan, ...] = ()
    """Expert choices of further positions, in the order in which they were logged."""
    sampling_masks: np.ndarray | None = None
    """[R] object, see `Chunk`."""
