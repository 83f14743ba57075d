"""Store the samples of a stage on disk: each rank writes its own, and reads those of every rank.

A response is here from its end until a checkpoint covers its training. A killed run finds it here, so neither
the token log nor any process has to store it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from opd.errors import RolloutError, StorageError
from opd.ranks import Ranks, path_of_rank
from opd.storage.files import write_at
from opd.storage.sample_lot import SampleRecord, record_of
from opd.storage.sample_store import BATCHES, SampleStore, SampleWriter, fields_of
from opd.types import Sample, SampleGroup
from opd.untrusted import bounded_integer, convert_decode_errors, safe_excerpt


@dataclass(frozen=True, slots=True)
class ResponseEntry:
    """The data of a response that need no read of the files."""

    group_uid: str
    index: int
    """Index in its group, or for a branch among its branches."""
    request: str
    """Digest of prompt, sampling settings and seed."""
    branch_of: str = ""
    """Uid of the episode, if this is its branch."""


class SampleFiles:
    """One stage's responses. Any number of threads may write, one reads.

    Args:
        folders: One for each rank.
        writer: The writer of this rank's folder.
    """

    def __init__(self, folders: Sequence[Path], writer: SampleWriter) -> None:
        self._folders, self._writer = list(folders), writer
        self._groups: dict[tuple[int, str], dict[int, str]] = {}
        """(batch, uid of a group) -> uids of its samples by their index in it."""
        self._branches: dict[tuple[int, str], dict[int, str]] = {}
        """The same for its branches."""
        self._written: dict[tuple[int, str], ResponseEntry] = {}
        """Entries by batch and uid."""
        self._mutex = threading.Lock()
        for record in SampleStore.open([writer.folder]).records:
            self._add_entry(record)

    @classmethod
    @contextmanager
    def open(
        cls, folder: Path, ranks: Ranks | None = None, *, keep: bool = False, durable: bool = False
    ) -> Iterator[SampleFiles]:
        """Open the files in `folder`, or for other ranks beside it. `keep`: retain an earlier attempt's
        samples. Otherwise its batches are generated again. `durable`: nothing is lost in a power cut.
        """
        ranks = ranks or Ranks()
        folders = [path_of_rank(folder, rank) for rank in range(ranks.size)]
        with SampleWriter(folders[ranks.rank], durable=durable) as writer:
            if not keep:
                writer.retire_before(BATCHES)
            yield cls(folders, writer)

    def put(
        self,
        samples: Sequence[Sample],
        batch: int,
        digests: Mapping[str, str],
        places: Mapping[str, int],
        drops: Iterable[str] = (),
    ) -> None:
        """Write finished samples, and remove those in `drops`. Both are done on return.

        `digests`: the request's digest by group. `places`: index in the group by uid. Raises `StorageError`
        if the disk is full. Then none of them is stored.
        """
        records = []
        for sample in samples:
            record = record_of(sample)
            extra = {"batch": batch, "asked": digests[sample.group_uid], "place": places[sample.uid]}
            records.append(replace(record, extra={**record.extra, **extra}))
        items = [(record, fields_of(sample)) for record, sample in zip(records, samples, strict=True)]
        removed = sorted(set(drops))
        if items or removed:
            self._writer.put(items, batch, removed)
        self._remove_entries([(batch, uid) for uid in removed])
        for record in records:
            self._add_entry(record)

    def group_uids(self, group_uid: str, digest: str, batch: int) -> dict[int, str]:
        """Return the stored samples of a group: uids by their index in it.

        Those of another `batch` are excluded because they are deleted with that batch. Raises `RolloutError`
        if `digest` differs from theirs, because their prompt or settings do.
        """
        with self._mutex:
            uids = dict(self._groups.get((batch, group_uid), {}))
            digests = {uid: self._written[batch, uid].request for uid in uids.values()}
        for uid, stored in digests.items():
            if stored != digest:
                raise RolloutError(
                    f"{self._writer.folder} holds response {uid} to another prompt, or with other sampling"
                    " settings or another seed: it was written by another run; remove the folder."
                )
        return uids

    def branch_uids(self, group_uid: str, batch: int) -> dict[str, str]:
        """Return a group's stored branches of a batch, in their order: their uid -> that of their episode."""
        with self._mutex:
            branches = self._branches.get((batch, group_uid), {})
            return {uid: self._written[batch, uid].branch_of for _, uid in sorted(branches.items())}

    def retire_before(self, batch: int) -> None:
        """Delete the responses of every batch before number `batch`, and free their disk space."""
        self._writer.retire_before(batch)
        with self._mutex:
            old = [key for key in self._written if key[0] < batch]
        self._remove_entries(old)

    def open_view(self, batch: int | None = None) -> SampleStore:
        """Return all ranks' samples of a `batch`, or of all, so far."""
        return SampleStore.open(self._folders, batch)

    def _remove_entries(self, keys: Iterable[tuple[int, str]]) -> None:
        with self._mutex:
            for batch, uid in keys:
                entry = self._written.pop((batch, uid), None)
                if entry is None:
                    continue
                groups = self._branches if entry.branch_of else self._groups
                group = groups[batch, entry.group_uid]
                if group.get(entry.index) == uid:
                    del group[entry.index]
                if not group:
                    del groups[batch, entry.group_uid]

    def _add_entry(self, record: SampleRecord) -> None:
        batch, index = -1, -1
        with convert_decode_errors(
            lambda cause: StorageError(f"{self._writer.folder}: {safe_excerpt(record.uid)}: {cause}")
        ):
            batch, index = (
                bounded_integer(record.extra[name], 0, BATCHES, name) for name in ("batch", "place")
            )
        branch_of = str(record.extra.get("branch_of", ""))
        entry = ResponseEntry(record.group_uid, index, str(record.extra.get("asked", "")), branch_of)
        with self._mutex:
            self._written[batch, record.uid] = entry
            groups = self._branches if branch_of else self._groups
            groups.setdefault((batch, record.group_uid), {})[index] = record.uid


def placeholder_array(value: object, count: int) -> np.ndarray:
    """Return an array [count] of one value without memory, as a placeholder for one on disk."""
    return np.broadcast_to(np.asarray(value), (count,))


GroupUids = list[tuple[str, list[str]]]
"""A rank's groups: their uid, and those of their samples and branches."""


def gather_uids(mine: Sequence[SampleGroup], ranks: Ranks) -> list[GroupUids]:
    """Return every rank's uids, from the groups of each. All ranks call this."""
    uids = [[group.uid, [sample.uid for sample in (*group.samples, *group.branches)]] for group in mine]
    return ranks.gather_json(uids, "the responses of a batch")


def groups_of(store: SampleStore, written: Sequence[GroupUids]) -> tuple[list[SampleGroup], dict[str, int]]:
    """Return all groups of the ranks' uids in `written`, and the row of each sample in `store`. They
    are in the order of their prompts, if those were shared out at once.
    """
    uids = [record.uid for record in store.records]
    by_rank: list[list[tuple[str, list[int]]]] = []
    for rank, part in enumerate(written):
        first, end = store.starts[rank : rank + 2].tolist()
        row_of = {uid: first + row for row, uid in enumerate(uids[first:end])}
        if lost := [uid for _, group in part for uid in group if uid not in row_of]:
            raise StorageError(
                f"response {safe_excerpt(lost[0])}, which rank {rank} has written, is not on the disk; start"
                " again with --resume, in a run folder that all ranks see at once"
            )
        by_rank.append([(uid, [row_of[sample] for sample in group]) for uid, group in part])
    groups, rows = [], {}
    in_turn = [group for turn in zip_longest(*by_rank) for group in turn if group is not None]
    for uid, numbers in in_turn:
        samples = [light_sample(store, row) for row in numbers]
        groups.append(SampleGroup.from_samples(uid, samples[0].domain, samples))
        rows |= {sample.uid: row for sample, row in zip(samples, numbers, strict=True)}
    return groups, rows


def light_sample(store: SampleStore, row: int) -> Sample:
    """Return a sample from its metadata. Its mask is read if the student generated only some tokens."""
    record = store.records[row]
    prompt, response = record.prompt_tokens, record.response_tokens
    if record.trainable_tokens in (0, response):
        mask = placeholder_array(record.trainable_tokens > 0, response)
    else:
        with store.lease([row]) as batch:
            mask = np.array(batch.read(row, "loss_mask"))
    metadata = record.extra.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return Sample(
        record.uid,
        record.group_uid,
        record.domain,
        placeholder_array(np.int32(0), prompt),
        teacher=record.teacher or None,
        response_ids=placeholder_array(np.int32(0), response),
        rollout_logprobs=placeholder_array(np.float32(0), response),
        policy_versions=placeholder_array(np.int32(record.last_version), response),
        loss_mask=mask,
        status=record.status,
        metadata={"episode": metadata["episode"]} if "episode" in metadata else {},
        branch_of=str(record.extra.get("branch_of", "")),
        expert_choices=store.choices_placeholder(row),
    )


class SignalFiles:
    """A step's signals, one file a kind. A repeated step computes them again, so they need not outlive it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._places: dict[tuple[str, str], tuple[int, int]] = {}
        self._ends: dict[str, int] = {}

    def put(self, name: str, uid: str, values: np.ndarray) -> None:
        """Store signal `name`, `[R]`, of one sample. Raises `StorageError` if the disk fails."""
        data = np.ascontiguousarray(values, np.float32).tobytes()
        start = self._ends.get(name, 0)
        try:
            write_at(self._signal_file(name), start, data)
        except OSError as error:
            raise StorageError(
                f"the signals of a step in {self._folder} cannot be written ({error.strerror or error});"
                " free disk space and continue with --resume."
            ) from error
        self._places[name, uid] = start, len(data)
        self._ends[name] = start + len(data)

    def get(self, name: str, uid: str) -> np.ndarray:
        """Return the stored signal, [R] float32, empty for a sample without a response."""
        start, size = self._places.get((name, uid), (0, 0))
        data = os.pread(self._signal_file(name), size, start) if size else b""
        if len(data) != size:
            raise StorageError(
                f"the signals of a step in {self._folder} were cut short; continue with --resume."
            )
        return np.frombuffer(data, np.float32)

    def _signal_file(self, name: str) -> int:
        if name not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / name
            path.unlink(missing_ok=True)
            self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            path.unlink()  # it goes with the process
        return self._files[name]

    def __enter__(self) -> SignalFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
