"""Divide prompts among ranks, and send every rank's responses to all.

A message is a JSON header with the lengths, then the arrays. Prompts, labels and metadata are not sent,
because every rank has them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import RanksError, RolloutError
from opd.ranks import Ranks, ask_store
from opd.rollout.collect import EncodedPrompt
from opd.rollout.engine_pool import LockstepEngine
from opd.types import Sample, SampleGroup, Status

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

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
