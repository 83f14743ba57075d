"""From prompts to finished sample groups, by `collect` or by a rollout of the user's own.

With several ranks, prompts are divided among them, and every rank's responses are sent to all. A message is a
JSON header with the lengths, then the arrays. Prompts, labels and metadata are not sent, because every rank
has them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from opd.config.base import GENERATE
from opd.config.writing import MOST_KEPT
from opd.errors import ConfigError, RanksError, RolloutError
from opd.imports import import_function
from opd.ranks import Ranks, ask_store
from opd.rollout.engine_pool import LockstepEngine
from opd.rollout.request_state import ENDS
from opd.rollout.requests import EpisodeKind, RequestWriter
from opd.rollout.streams import More
from opd.storage.transcript import Tokens, Transcript, choices_of, masks_of, split_masks
from opd.types import Chunk, RolloutRequest, Sample, SampleGroup, SamplingParams, Status
from opd.user_code import call_user_code

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
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


_SHARED_ARRAYS = {
    "prompt_ids": np.dtype(np.int32),
    "response_ids": np.dtype(np.int32),
    "rollout_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
}
_HEADER = 8
_BEGIN, _STOP = b"begin", b"stop"
_SOONEST, _LATEST = 0.001, 0.05
"""Seconds between two polls for the arrival of all ranks."""
_GRACE = 10.0
"""Seconds for the store's answer to one question."""


class WriterBarrier:
    """A barrier of the ranks that generate, batch after batch, until one of them stops.

    Threads may generate several batches at once. All ranks meet for them in one order.

    A rank that waits in a collective for a stopped rank waits until the time-out. So each rank first writes
    to the store that it is there. The collective begins when all have done so. One decision, to begin or to
    stop, is made for all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self._store = ranks, ranks.group_store()
        self._batch = 0
        self._off = False
        self._turn = threading.Condition()
        self._next: int | None = None
        """Batch whose turn it is, if they have an order."""

    def order_from(self, first: int) -> None:
        """Let ranks meet for batch `first`, then for the next one, and so on."""
        self._next = first

    @contextmanager
    def meet(self, batch: int) -> Iterator[None]:
        """Run the block once every rank has generated its share of `batch`, and blocks of earlier ones have
        ended on this rank. Raises as `wait_for_ranks`.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._next is None or self._next >= batch or self._off)
        try:
            self.wait_for_ranks()
            yield
        except BaseException:
            self.exit_barrier()  # of which later batches of this rank learn, too
            raise
        with self._turn:
            self._next = None if self._next is None else max(self._next, batch + 1)
            self._turn.notify_all()

    def wait_for_ranks(self) -> None:
        """Return once every rank is here. Raises `RanksError` if this rank or another has stopped, or if one
        does not come within a collective's time-out.
        """
        store, limit = self._store, self.ranks.timeout
        if store is None:
            return
        with self.ranks.collective("the responses of a batch"):
            try:
                decision = ask_store(lambda: self._decide(store), limit + _GRACE)
            except TimeoutError:
                raise RuntimeError(f"timed out after {limit:g} s: the store does not answer") from None
        self._batch += 1
        if decision != _BEGIN:
            raise RanksError(
                "another rank has stopped writing, and its responses are missing; look for that rank's own"
                " error and start again with --resume."
            )

    def _decide(self, store: Store) -> bytes:
        """Return what was decided for this batch, once all are here or one has stopped."""
        key, pause = f"decided/{self._batch}", _SOONEST
        until = time.monotonic() + self.ranks.timeout
        if self._off:  # first: this rank's other thread may have said that it is there
            self._set_decision(_STOP)
        if store.add(f"here/{self._batch}", 1) == self.ranks.size:
            self._set_decision(_BEGIN)
        while not store.check([key]):
            if self._off:
                self._set_decision(_STOP)
            if time.monotonic() > until:
                raise RuntimeError(f"timed out after {self.ranks.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LATEST)
        return store.get(key)

    def exit_barrier(self) -> None:
        """Leave the barrier: no rank waits for this one, and this one waits for none."""
        with self._turn:
            self._off = True
            self._turn.notify_all()
        with suppress(RuntimeError, TimeoutError):  # if the store is gone, so are the others
            ask_store(lambda: self._set_decision(_STOP), _GRACE)

    def _set_decision(self, decision: bytes) -> None:
        """Make `decision` that of all ranks, unless one was made before."""
        if self._store is not None:
            self._store.compare_set(f"decided/{self._batch}", "", decision.decode())


@contextmanager
def in_step(engine: LockstepEngine | None, barrier: WriterBarrier | None) -> Iterator[None]:
    """Run this rank's share of the generation with `engine`. If the block fails, the other ranks wait neither
    for its passes nor at `barrier`. When it has nothing left to generate, it makes the passes that they need.
    """
    try:
        yield
        if engine is not None:
            engine.drain()
    except BaseException:
        if barrier is not None:
            barrier.exit_barrier()
        if engine is not None:
            engine.stop_passes()
        raise


def write_shared(
    ranks: Ranks,
    prompts: Sequence[EncodedPrompt],
    write: Callable[[list[EncodedPrompt]], list[SampleGroup]],
    barrier: WriterBarrier | None = None,
    engine: LockstepEngine | None = None,
    batch: int = 0,
) -> list[SampleGroup]:
    """Return the groups of all `prompts`, the same on all ranks, in their order. `write` is given this rank's
    share. Ranks meet for `batch` at `barrier`, if one may stop before it has written. `engine` generates for
    `write`; ranks may share its model.

    Raises `RanksError` if a rank fails to write its share.
    """
    if ranks.is_alone:
        return write(list(prompts))
    mine = ranks.shard(prompts)
    everyone, _ = share_groups(ranks, lambda: write(mine) if mine else [], prompts, barrier, engine, batch)
    order = {prompt.uid: index for index, prompt in enumerate(prompts)}
    return sorted(everyone, key=lambda group: order.get(group.uid, len(order)))


def share_groups(
    ranks: Ranks,
    write: Callable[[], list[SampleGroup]],
    prompts: Sequence[EncodedPrompt] = (),
    barrier: WriterBarrier | None = None,
    engine: LockstepEngine | None = None,
    batch: int = 0,
    note: Callable[[], object] = lambda: None,
) -> tuple[list[SampleGroup], list[Any]]:
    """Return the groups that each rank's `write` returns, rank by rank, and every rank's `note`, JSON from
    after its `write`. Both are the same on all ranks. What all of them know of `prompts` is not sent.
    Otherwise as `write_shared`.
    """
    if ranks.is_alone:
        return write(), [note()]
    by_uid = {prompt.uid: prompt for prompt in prompts}
    with in_step(engine, barrier):
        groups = write()
    with nullcontext() if barrier is None else barrier.meet(batch):
        messages = ranks.gather(encode_groups(groups, by_uid, note()), "the responses of a batch")
    received = [decode_groups(message, by_uid) for message in messages]
    return [group for groups, _ in received for group in groups], [noted for _, noted in received]


def encode_groups(
    groups: Sequence[SampleGroup], prompts: Mapping[str, EncodedPrompt], note: object = None
) -> bytes:
    """Encode `groups` and a JSON `note`, without the fields that `prompts` (by uid of the group) hold."""
    samples = [sample for group in groups for sample in (*group.samples, *group.branches)]
    header = [
        [
            g.uid,
            g.domain,
            [_sample_fields(s, prompts.get(g.uid)) for s in (*g.samples, *g.branches)],
            None if g.uid in prompts or (ids := g.samples[0].teacher_prompt_ids) is None else ids.tolist(),
        ]
        for g in groups
    ]
    try:
        head = json.dumps([header, note]).encode()
    except TypeError as error:
        raise RolloutError(
            f"a sample cannot be sent to the other ranks ({error}); keep label and metadata to what JSON can"
            " hold."
        ) from error
    arrays = [
        np.asarray(getattr(sample, name), dtype).tobytes()
        for name, dtype in _SHARED_ARRAYS.items()
        for sample in samples
    ]
    arrays += [sample.expert_choices.tobytes() for sample in samples if sample.expert_choices is not None]
    arrays += [sample.sampling_masks.tobytes() for sample in samples if sample.sampling_masks is not None]
    return b"".join([len(head).to_bytes(_HEADER, "little"), head, *arrays])


def decode_groups(data: bytes, prompts: Mapping[str, EncodedPrompt]) -> tuple[list[SampleGroup], Any]:
    """Decode the groups and the note of `encode_groups`."""
    at = _HEADER + int.from_bytes(data[:_HEADER], "little")
    header, note = json.loads(data[_HEADER:at])
    groups = []
    for uid, domain, fields, taught in header:
        samples = [_read_sample(sample, uid, prompts.get(uid)) for sample in fields]
        for sample, _ in samples if taught is not None else ():
            sample.teacher_prompt_ids = None if sample.branch_of else np.array(taught, np.int32)
        groups.append((SampleGroup.from_samples(uid, domain, [sample for sample, _ in samples]), samples))
    pairs = [pair for _, samples in groups for pair in samples]
    for name, dtype in _SHARED_ARRAYS.items():
        for sample, lengths in pairs:
            count = lengths[0] if name == "prompt_ids" else lengths[1]
            setattr(sample, name, np.frombuffer(data, dtype, count, at).copy())
            at += count * dtype.itemsize
    for sample, lengths in pairs:
        if len(lengths) > 3:
            *shape, width = lengths[3:]
            count = int(np.prod(shape, dtype=np.int64))
            choices = np.frombuffer(data, np.uint8 if width == 1 else np.uint16, count, at)
            sample.expert_choices, at = choices.reshape(shape).copy(), at + count * width
    for sample, lengths in pairs:
        if count := lengths[2]:
            sample.sampling_masks, at = np.frombuffer(data, np.int32, count, at).copy(), at + 4 * count
    return [group for group, _ in groups], note


def _sample_fields(sample: Sample, prompt: EncodedPrompt | None) -> dict[str, Any]:
    shared = {} if prompt is None else prompt.metadata
    metadata = {key: value for key, value in sample.metadata.items() if shared.get(key, sample) is not value}
    fields = {
        "uid": sample.uid,
        "domain": sample.domain,
        "status": sample.status,
        "metadata": metadata,
        "lengths": [
            len(sample.prompt_ids),
            len(sample.response_ids),
            0 if sample.sampling_masks is None else len(sample.sampling_masks),
        ],
    }
    if (choices := sample.expert_choices) is not None:
        fields["lengths"] += [*choices.shape, choices.itemsize]
    if prompt is None or sample.label is not prompt.label:
        fields["label"] = sample.label
    optional = {
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "failure": sample.failure,
        "teacher": sample.teacher,
        "branch_of": sample.branch_of,
    }
    return fields | {name: value for name, value in optional.items() if value}


def _read_sample(
    fields: dict[str, Any], group: str, prompt: EncodedPrompt | None
) -> tuple[Sample, list[int]]:
    lengths = fields.pop("lengths")
    label = fields.pop("label", None if prompt is None else prompt.label)
    metadata = ({} if prompt is None else dict(prompt.metadata)) | fields.pop("metadata")
    status = Status(fields.pop("status"))
    empty = np.zeros(0, np.int32)
    sample = Sample(
        group_uid=group, prompt_ids=empty, label=label, metadata=metadata, status=status, **fields
    )
    if prompt is not None and not sample.branch_of:
        sample.teacher_prompt_ids = prompt.teacher_ids
    return sample, lengths
