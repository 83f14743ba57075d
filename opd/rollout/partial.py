"""Groups taken as they finish: a step begins with the first ones, and the others go on in a later step.

More groups are written than a step takes. Once enough have ended, the engine stops. The others keep their
tokens and go on after them, under the next weights. None is dropped and each is taken once, so no length is
favoured.

Which groups ended first is a function of the tokens alone. Each token has the version that wrote it, and all
requests are decoded together. So the newest version of a group, and the number of its tokens of that version,
say at which decode step it ended. The token log has both. In turn a resumed stage takes the same groups.

If weights change while responses are written (`schedule: async`), it depends on the clock which groups have
ended. If samples are on disk, those of a step leave the log. So in both cases the token log also has whom
each step took, before anyone sees them: a request without tokens that names them. A resumed stage takes the
same groups in the same steps.

Of several ranks each writes the prompts that it would write without this, and takes as many of them as a step
asks it for. So no rank waits for another's token.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from opd.errors import CheckpointError
from opd.protocols import TokenLog
from opd.rollout.collect import EncodedPrompt, SamplingEngine, check_end, set_response
from opd.rollout.request_state import ENDS
from opd.rollout.streams import StoppedError, Stream
from opd.storage.transcript import Tokens, Transcript
from opd.types import Chunk, RolloutRequest, Sample, SampleGroup, SamplingParams, Status, no_ids
from opd.untrusted import safe_excerpt


@dataclass(slots=True)
class _OpenGroup:
    """A group that no step has taken."""

    group: SampleGroup
    batch: int
    """Batch of its prompt."""
    begun: int
    """Step whose rollout it began in."""
    ended: tuple[int, int] | None = None
    """Once it has ended: the version of its last token, and the decode steps of that version until then, or
    with asynchronous weights the number of groups that ended before."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The groups that stay after a step."""

    by_rank: list[list[list[Any]]] = field(default_factory=list)
    """[batch, uid, begun] of each rank's groups, for a checkpoint. This rank's alone until `merge_ranks`."""
    uids: frozenset[str] = frozenset()
    """This rank's requests of them, which its log has to keep."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def note(self) -> list[Any]:
        """Return what all ranks have to know."""
        return [*self.by_rank, dict(self.metrics)]

    def merge_ranks(self, notes: list[Any]) -> Carried:
        """Return all ranks' groups, by the `notes` of each. Counts are summed, of ages it is the largest."""
        metrics = {
            name: (max if name == "rollout/age" else sum)(one[name] for _, one in notes)
            for name in self.metrics
        }
        return Carried([entries for entries, _ in notes], self.uids, metrics)


@dataclass(slots=True)
class PartialRollouts:
    """The groups of one stage, from their prompts to the step that takes them."""

    prompts: Callable[[int], list[EncodedPrompt]]
    """Returns the prompts of a batch, by its number. The same on all ranks."""
    size: int
    """Number of answers to each."""
    early: Callable[[int], int]
    """Returns how many of a domain's prompts in a batch begin a step early, of their number."""
    sampling: Mapping[str, SamplingParams]
    """By domain."""
    seed: int
    steps: int | None = None
    """Steps of the stage, of which the last takes all groups. `None`: not known."""
    max_age: int | None = None
    """Steps for which a group may be carried. It is waited for in the last of them."""
    share: Callable[[list[EncodedPrompt]], list[EncodedPrompt]] = list
    """Returns what this rank writes of a batch."""
    log: TokenLog | None = None
    """Keeps whom each step took, if its tokens alone do not say so in a later attempt."""
    asynchronous: bool = False
    """Weights change while responses are written."""
    is_stored: Callable[[SampleGroup, int], bool] = lambda group, step: False
    """Returns whether an earlier attempt's step has stored a group that it took, which left the log then."""
    carried: dict[int, Carried] = field(init=False, default_factory=dict)
    """By step, what it leaves, until somebody takes it from here."""
    _open: dict[str, _OpenGroup] = field(init=False, default_factory=dict)
    _transcript: Transcript = field(init=False, default_factory=Transcript)
    _batches: dict[int, list[EncodedPrompt]] = field(init=False, default_factory=dict)
    _taken: dict[int, list[str]] = field(init=False, default_factory=dict)
    """By step that the learner does not have yet: the groups that it took, from the log too."""
    _ends: Iterator[int] = field(init=False, default_factory=count)
    _turn: threading.Condition = field(init=False, default_factory=threading.Condition)
    _next: int | None = field(init=False, default=0)
    """Step that takes its groups next, or `None` after a failure."""

    def restore(self, step: int, entries: object) -> None:
        """Open the groups that a checkpoint before `step` left. Raises `CheckpointError` if it names others
        than the stage's.
        """
        for entry in entries if isinstance(entries, list) else [entries]:
            match entry:
                case [int(batch), str(uid), int(begun)] if 0 <= begun <= batch <= step:
                    if prompt := next((one for one in self._own_batch(batch) if one.uid == uid), None):
                        self._begin_group(prompt, batch, begun)
                        continue
            raise CheckpointError(
                f"the checkpoint of step {step} names the unfinished group {safe_excerpt(entry)}, which is"
                " not of this run; restore the data the run was started with."
            )
        self._next = step
        while self.log is not None and (found := self.log.find(_record_uid(step))) is not None:
            uids = found.metadata.get("taken")
            self._taken[step] = list(map(str, uids)) if isinstance(uids, list) else []
            step += 1

    def pop_carried(self, step: int) -> Carried:
        """Return what `step` left, for the learner, which has its groups now."""
        self._taken.pop(step, None)
        return self.carried.pop(step)

    def record_uids(self) -> set[str]:
        """Return the uids in the log of those whom steps took and the learner does not have yet."""
        return set(map(_record_uid, list(self._taken)))

    def write(
        self, engine: SamplingEngine, step: int, version: int, is_replaying: Callable[[], bool]
    ) -> list[SampleGroup]:
        """Write with weights of `version` until `step` has its groups, and return them, the oldest first. It
        has as many of each domain as it has prompts. `is_replaying` says that the next chunk comes from the
        log. Raises `RolloutError` as `collect`. Several threads may write a step each, and take turns in the
        order of the steps.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._next in (step, None))
            if self._next is None:
                raise StoppedError
            self._next = None
            try:
                groups = self._write(engine, step, step if self.asynchronous else version, is_replaying)
                self._next = step + 1
            finally:
                self._turn.notify_all()
        return groups

    def _write(
        self, engine: SamplingEngine, step: int, version: int, is_replaying: Callable[[], bool]
    ) -> list[SampleGroup]:
        quota = Counter(prompt.domain for prompt in self._own_batch(step))
        self._begin_batch(step)
        due = {uid for uid, one in self._open.items() if self._is_due(one, step, version)}
        if taken := self._recorded(step, quota):
            due = taken
            for uid in taken:
                self._skip_stored(self._open[uid], step)
        if not self._is_enough(quota, due, min(version, step - 1)):  # by what ended in the steps before
            waiting = {sample.uid: sample for sample in self._samples() if sample.status not in ENDS}
            stream = cast("Stream", engine.generate([self._request(sample) for sample in waiting.values()]))
            try:
                while is_replaying() or not self._is_enough(quota, due, version):
                    chunk = next(stream, None)
                    if chunk is None:
                        break
                    self._add_chunk(chunk, waiting, getattr(engine, "failures", {}))
            finally:
                stream.abort()
        return self._take_groups(step, quota, due)

    def _recorded(self, step: int, quota: Counter[str]) -> set[str]:
        """Return whom an earlier attempt's `step` took. Empty if it took none, or was of another `quota`."""
        uids = set(self._taken.get(step, ()))
        fits = uids <= self._open.keys() and Counter(self._open[uid].group.domain for uid in uids) == quota
        return uids if fits else set()

    def _skip_stored(self, one: _OpenGroup, step: int) -> None:
        """End a group whose answers are stored. They have no tokens here."""
        if self.is_stored(one.group, step):
            one.ended = (-1, 0)
            for sample in one.group.samples:
                sample.status = Status.COMPLETED
            self._transcript.drop_requests(sample.uid for sample in one.group.samples)

    def _batch(self, index: int) -> list[EncodedPrompt]:
        if index not in self._batches:
            self._batches = {number: batch for number, batch in self._batches.items() if number == index - 1}
            self._batches[index] = self.prompts(index)
        return self._batches[index]

    def _own_batch(self, index: int) -> list[EncodedPrompt]:
        return self.share(self._batch(index))

    def _begin_batch(self, step: int) -> None:
        """Begin the batch of `step`, and the first prompts of the next one."""
        # Nothing is open after the last step, which may have got others after it.
        begun = {prompt.uid for prompt in self._early_prompts(step)} if self._open else ()
        for prompt in self._own_batch(step):
            if prompt.uid not in begun:
                self._begin_group(prompt, step, step)
        for prompt in self._early_prompts(step + 1):
            self._begin_group(prompt, step + 1, step)

    def _early_prompts(self, batch: int) -> Iterator[EncodedPrompt]:
        """Yield this rank's prompts of `batch` that begin a step early: the first ones of each domain."""
        if batch == self.steps:
            return
        prompts = self._batch(batch)
        own = {prompt.uid for prompt in self._own_batch(batch)}
        counts = Counter(prompt.domain for prompt in prompts)
        early = {domain: self.early(count) for domain, count in counts.items()}
        for prompt in prompts:
            early[prompt.domain] -= 1
            if early[prompt.domain] >= 0 and prompt.uid in own:
                yield prompt

    def _begin_group(self, prompt: EncodedPrompt, batch: int, begun: int) -> None:
        group = prompt.empty_group(self.size)
        self._open[prompt.uid] = _OpenGroup(group, batch, begun)
        self._transcript.add_requests({sample.uid: Tokens.empty() for sample in group.samples})

    def _samples(self) -> Iterator[Sample]:
        return (sample for one in self._open.values() for sample in one.group.samples)

    def _request(self, sample: Sample) -> RolloutRequest:
        written = self._transcript.request_tokens(sample.uid).token_ids
        params = self.sampling[sample.domain]
        return RolloutRequest(
            sample.uid, sample.prompt_ids, params, self.seed, written, session=sample.group_uid
        )

    def _is_due(self, one: _OpenGroup, step: int, version: int) -> bool:
        """Return whether `one` would be too old in the step after `step`. One that the log says to end under
        weights after `version` is not waited for, because these are not there.
        """
        is_later = one.ended is not None and one.ended[0] > version
        return self.max_age is not None and step + 1 - one.begun > self.max_age and not is_later

    def _add_chunk(self, chunk: Chunk, waiting: Mapping[str, Sample], failures: Mapping[str, str]) -> None:
        """Add new tokens, and end the samples and groups that end with them."""
        self._transcript.add_chunk(chunk)
        for uid, status in chunk.finished.items():
            set_response(waiting[uid], status, self._transcript.request_tokens(uid), failures)
            check_end(waiting[uid])
        self._transcript.drop_requests(chunk.finished)
        for uid in {waiting[uid].group_uid for uid in chunk.finished}:
            samples = self._open[uid].group.samples
            if all(sample.status in ENDS for sample in samples):
                newest = max(int(sample.policy_versions.max(initial=-1)) for sample in samples)
                in_turn = max(map(_end_of, samples))
                self._open[uid].ended = (newest, next(self._ends)) if self.asynchronous else in_turn

    def _is_enough(self, quota: Counter[str], due: Set[str], version: int) -> bool:
        """Return whether a step that takes `quota` groups of each domain has them under weights of `version`
        and before. Later ends are those of an earlier attempt.
        """
        ended = {
            uid: one.group.domain
            for uid, one in self._open.items()
            if one.ended is not None and one.ended[0] <= version
        }
        return ended.keys() >= due and quota <= Counter(ended.values())

    def _take_groups(self, step: int, quota: Counter[str], due: Set[str]) -> list[SampleGroup]:
        """Take the groups that are due, then those that ended first."""
        ends = {uid: one.ended for uid, one in self._open.items() if one.ended is not None}
        left, taken = quota.copy(), set[str]()
        for uid in sorted(ends, key=lambda uid: (uid not in due, ends[uid])):
            domain = self._open[uid].group.domain
            if left[domain]:
                left[domain] -= 1
                taken.add(uid)
        if self.log is not None and taken != set(self._taken.get(step, ())):
            self._taken[step] = sorted(taken)
            self.log.retire([_record_uid(step)])  # of an attempt that had other checkpoints
            record = RolloutRequest(_record_uid(step), no_ids(), SamplingParams())
            self.log.open(record, {"taken": self._taken[step]})
            self.log.close(record.uid, Status.COMPLETED)
        groups = [self._open.pop(uid) for uid in list(self._open) if uid in taken]
        self.carried[step] = Carried(
            [[[one.batch, uid, one.begun] for uid, one in self._open.items()]],
            frozenset(sample.uid for sample in self._samples()),
            {
                "rollout/carried": float(len(self._open)),
                "rollout/out_of_order": float(sum(one.batch != step for one in groups)),
                "rollout/age": max((float(step - one.begun) for one in groups), default=0.0),
            },
        )
        return [one.group for one in groups]


def _record_uid(step: int) -> str:
    return f"taken/{step}"


def _end_of(sample: Sample) -> tuple[int, int]:
    """Return the version of the last token, and the number of tokens of that version."""
    versions = sample.policy_versions
    return (int(versions[-1]), int((versions == versions[-1]).sum())) if len(versions) else (-1, 0)
