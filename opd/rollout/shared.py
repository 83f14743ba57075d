"""Prompts shared out to the ranks, and every rank's responses told to all of them.

What is sent is lengths and arrays behind a JSON header. Prompts, labels and metadata stay where they are:
every rank has them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from opd.errors import RanksError, RolloutError
from opd.ranks import Ranks
from opd.rollout.collect import EncodedPrompt
from opd.types import Sample, SampleGroup, Status

_ARRAYS = {
    "prompt_ids": np.dtype(np.int32),
    "response_ids": np.dtype(np.int32),
    "rollout_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
}
_HEADER = 8
_BEGIN, _STOP = b"begin", b"stop"
_SOONEST, _LATEST = 0.001, 0.05
"""Seconds between two looks whether all ranks have come."""


class WriterBarrier:
    """Where ranks that write wait for each other, batch after batch, until one of them stops.

    Whoever waits in a collective for a rank that has stopped waits until it times out. So each rank first
    says in the store that it is there, and the collective begins when all have said so. That it begins, or
    will never, is decided once for all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._board = ranks, ranks.board()
        self._batch = 0
        self._off = False

    def wait(self) -> None:
        """Return once every rank is here. Raises `RanksError` if one of them, or this one, has stopped, or
        does not come for as long as a collective would wait.
        """
        if self._board is None:
            return
        with self._ranks.collective("the responses of a batch"):
            begins = self._decided(self._board) == _BEGIN
        self._batch += 1
        if not begins:
            raise RanksError(
                "another rank has stopped writing, and its responses are missing; look for that rank's own"
                " error and start again with --resume."
            )

    def _decided(self, board: Store) -> bytes:
        """What becomes of this batch. Raises `RuntimeError` if that is open for too long."""
        said, pause = f"decided/{self._batch}", _SOONEST
        limit = self._ranks.patience
        until = time.monotonic() + limit
        if board.add(f"here/{self._batch}", 1) == self._ranks.size:
            self._decide(_BEGIN)
        while not board.check([said]):
            if self._off:
                self._decide(_STOP)
            if time.monotonic() > until:
                raise RuntimeError(f"timed out after {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LATEST)
        return board.get(said)

    def abandon(self) -> None:
        """This rank writes no more: nobody is to wait for it, and it waits for nobody."""
        self._off = True
        with suppress(RuntimeError):  # where the store is gone, so are the others
            self._decide(_STOP)

    def _decide(self, what: bytes) -> None:
        if self._board is not None:
            self._board.compare_set(f"decided/{self._batch}", "", what.decode())


def write_shared(
    ranks: Ranks,
    prompts: Sequence[EncodedPrompt],
    write: Callable[[list[EncodedPrompt]], list[SampleGroup]],
    barrier: WriterBarrier | None = None,
) -> list[SampleGroup]:
    """What `write` makes of `prompts`, of which it is given this rank's; the same on all ranks, in the order
    of the prompts. They wait for each other at `barrier`, if one may stop before it has written.

    Raises `RanksError` if a rank fails to write its own.
    """
    if ranks.alone:
        return write(list(prompts))
    mine = ranks.mine(prompts)
    known = {prompt.uid: prompt for prompt in prompts}
    try:
        groups = write(mine) if mine else []
    except BaseException:
        if barrier is not None:
            barrier.abandon()
        raise
    if barrier is not None:
        barrier.wait()
    said = ranks.gather(encode_groups(groups, known), "the responses of a batch")
    everyone = [group for part in said for group in decode_groups(part, known)]
    order = {prompt.uid: place for place, prompt in enumerate(prompts)}
    return sorted(everyone, key=lambda group: order.get(group.uid, len(order)))


def encode_groups(groups: Sequence[SampleGroup], prompts: Mapping[str, EncodedPrompt]) -> bytes:
    """`groups` as bytes, without what `prompts` (by uid of the group) say already."""
    samples = [sample for group in groups for sample in group.samples]
    header = [[g.uid, g.domain, [_fields(s, prompts.get(g.uid)) for s in g.samples]] for g in groups]
    try:
        head = json.dumps(header).encode()
    except TypeError as error:
        raise RolloutError(
            f"a sample cannot be sent to the other ranks ({error}); keep label and metadata to what JSON can"
            " hold."
        ) from error
    arrays = [
        np.asarray(getattr(sample, name), dtype).tobytes()
        for name, dtype in _ARRAYS.items()
        for sample in samples
    ]
    return b"".join([len(head).to_bytes(_HEADER, "little"), head, *arrays])


def decode_groups(data: bytes, prompts: Mapping[str, EncodedPrompt]) -> list[SampleGroup]:
    """What `encode_groups` was given."""
    at = _HEADER + int.from_bytes(data[:_HEADER], "little")
    groups = []
    for uid, domain, fields in json.loads(data[_HEADER:at]):
        samples = [_sample(own, uid, prompts.get(uid)) for own in fields]
        groups.append((SampleGroup(uid, domain, [s for s, _ in samples]), samples))
    pairs = [pair for _, samples in groups for pair in samples]
    for name, dtype in _ARRAYS.items():
        for sample, lengths in pairs:
            count = lengths[0] if name == "prompt_ids" else lengths[1]
            setattr(sample, name, np.frombuffer(data, dtype, count, at).copy())
            at += count * dtype.itemsize
    return [group for group, _ in groups]


def _fields(sample: Sample, prompt: EncodedPrompt | None) -> dict[str, Any]:
    known = {} if prompt is None else prompt.metadata
    own = {key: value for key, value in sample.metadata.items() if known.get(key, sample) is not value}
    fields = {
        "uid": sample.uid,
        "domain": sample.domain,
        "status": sample.status,
        "metadata": own,
        "lengths": [len(sample.prompt_ids), len(sample.response_ids)],
    }
    if prompt is None or sample.label is not prompt.label:
        fields["label"] = sample.label
    optional = {
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "failure": sample.failure,
        "teacher": sample.teacher,
    }
    return fields | {name: value for name, value in optional.items() if value}


def _sample(fields: dict[str, Any], group: str, prompt: EncodedPrompt | None) -> tuple[Sample, list[int]]:
    lengths = fields.pop("lengths")
    own = fields.pop("metadata")
    label = fields.pop("label", None if prompt is None else prompt.label)
    metadata = ({} if prompt is None else dict(prompt.metadata)) | own
    status = Status(fields.pop("status"))
    empty = np.zeros(0, np.int32)
    sample = Sample(
        group_uid=group, prompt_ids=empty, label=label, metadata=metadata, status=status, **fields
    )
    return sample, lengths
