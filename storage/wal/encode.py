"""From a decode step to the records of one frame, with every check that keeps a log right."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from opd.errors import StorageError
from opd.storage.wal.records import END_OF_REQUEST, ENVIRONMENT, STATUS_CODES, TOKEN, WORDS, Closing
from opd.storage.wal.table import RequestTable
from opd.types import DecodeStep, Status

_REQUEST, _POSITION, _TOKEN, _LOGPROB, _VERSION, _FLAGS = range(WORDS)


class StepFrame(NamedTuple):
    """One decode step, checked and in the form in which it is stored."""

    records: np.ndarray
    """[B, WORDS] of `<i4`: the bytes of `[B]` of `TOKEN`."""
    closings: list[Closing]

    @property
    def payload(self) -> bytes:
        if not self.closings:
            return self.records.tobytes()
        ends = [(closing.number, STATUS_CODES[closing.status]) for closing in self.closings]
        return self.records.tobytes() + np.array(ends, dtype=END_OF_REQUEST).tobytes()


class StepEncoder:
    """Checks decode steps against a table. Consecutive steps mostly name the same requests: those are looked
    up once.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._uids: list[str] | None = None
        self._slots = np.zeros(0, dtype=np.int64)
        self._template = np.zeros((0, WORDS), dtype="<i4")
        """[B, WORDS]: what one step of the same requests shares with the next."""
        self._version = 0
        """The policy version in `template`."""
        self._expected = np.zeros(0, dtype=np.int32)
        """[B]: the position at which each of the requests goes on."""
        self._written = 0
        """Steps of these requests that the table's lengths do not count yet."""

    def forget(self) -> None:
        """A request is to be opened, ended or retired: count what was written, look everything up again."""
        if self._written:
            self._table.lengths[self._slots] += self._written
            self._written = 0
        self._uids = None

    def wrote_step(self) -> None:
        """The newest step is in the log."""
        self._expected += 1
        self._written += 1

    def step(self, step: DecodeStep) -> StepFrame:
        """Check and encode a decode step. Raises `StorageError` if it does not continue the log."""
        if not len(step.positions) == len(step.token_ids) == len(step.logprobs) == len(step.uids):
            _refuse_shape(step)
        if step.uids != self._uids:
            self._look_up(step.uids)
        if step.policy_version != self._version:
            self._version = self._checked_version(step.policy_version)
            self._template[:, _VERSION] = self._version
        if step.positions.tobytes() != self._expected.tobytes():
            self._check_positions(step)
        records = self._template.copy()
        records[:, _POSITION] = step.positions
        records[:, _TOKEN] = step.token_ids
        records.view("<f4")[:, _LOGPROB] = step.logprobs
        closings = [self._closing(uid, status) for uid, status in step.finished.items()]
        return StepFrame(records, closings)

    def observation(self, uid: str, token_ids: np.ndarray, policy_version: int) -> StepFrame:
        """Encode `[K]` environment tokens at the end of one request's response."""
        self.forget()
        slot = self._open_slot(uid)
        records = np.empty(len(token_ids), dtype=TOKEN)
        records["request"] = self._table.numbers[slot]
        records["position"] = self._table.lengths[slot] + np.arange(len(token_ids))
        records["token"] = token_ids
        records["logprob"] = 0
        records["version"] = self._checked_version(policy_version)
        records["flags"] = ENVIRONMENT
        return StepFrame(records.view("<i4").reshape(-1, WORDS), [])

    def wrote_observation(self, uid: str, count: int) -> None:
        """`count` environment tokens of `uid` are in the log."""
        self._table.lengths[self._open_slot(uid)] += count

    @staticmethod
    def _checked_version(version: int) -> int:
        if not 0 <= version < 1 << 31:
            raise StorageError(f"policy version {version} does not fit into the log; use 0 to 2147483647")
        return version

    def open_number(self, uid: str) -> int:
        """The number of a request that may still take tokens."""
        return int(self._table.numbers[self._open_slot(uid)])

    def _closing(self, uid: str, status: Status) -> Closing:
        if Status(status) is Status.PENDING:
            raise StorageError(f"request {uid} cannot end as pending; say how it ended")
        return Closing(self.open_number(uid), Status(status), None)

    def _look_up(self, uids: list[str]) -> None:
        self.forget()
        entries = list(map(self._table.entry, uids))
        slots = np.fromiter((-1 if entry is None else entry.slot for entry in entries), np.int64, len(uids))
        if (slots < 0).any() or not self._table.is_open[slots].all():
            for uid in uids:
                self._open_slot(uid)  # says which one, and why
        if len(set(uids)) != len(uids):
            raise StorageError("a decode step names a request twice; give each running request once")
        template = np.zeros((len(uids), WORDS), dtype="<i4")
        template[:, _REQUEST] = self._table.numbers[slots].view(np.int32)
        self._uids, self._slots, self._template, self._version = list(uids), slots, template, 0
        self._expected = self._table.lengths[slots].astype(np.int32)

    def _open_slot(self, uid: str) -> int:
        slot = self._table.slot(uid)
        if slot is None:
            raise StorageError(f"request {uid} is not in the log; open it first")
        if not self._table.is_open[slot]:
            raise StorageError(f"request {uid} has ended and takes no more tokens")
        return slot

    def _check_positions(self, step: DecodeStep) -> None:
        expected = self._expected
        unequal = np.flatnonzero(np.asarray(step.positions) != expected)
        if not len(unequal):
            return  # the same numbers in another dtype
        wrong = int(unequal[0])
        raise StorageError(
            f"request {step.uids[wrong]} has {expected[wrong]} tokens in the log and was given one for"
            f" position {step.positions[wrong]}; positions must follow on"
        )


def _refuse_shape(step: DecodeStep) -> None:
    for name in ("positions", "token_ids", "logprobs"):
        given = len(getattr(step, name))
        if given != len(step.uids):
            raise StorageError(
                f"a decode step has {len(step.uids)} requests and {given} {name}; give one each"
            )
