"""The power goes after every operation of the log: what was durable is there, and nothing else.

`kill -9` does not test syncing: the system's cache survives it. Here a simulated disk forgets whatever was
not synced. Every state it may be found in must be read as a prefix of what was logged, with everything that
was acknowledged as durable, and a writer must be able to go on from it.
"""

import copy
import os
import random
from pathlib import Path

import pytest
from full import FULL
from log_model import LogModel, random_call, state_of
from simulated_disk import SimulatedDisk

from opd.errors import StorageError
from opd.storage.wal import TokenWAL, read_log

FOLDER = Path("log")
CUTS_AT_EACH_OPERATION = 6


class Workload:
    """Random calls on a log, checked after every operation of its disk."""

    def __init__(self, seed: int, policy: str, *, failures: bool) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.failures = failures
        self.disk = SimulatedDisk()
        self.disk.after = self._cut_the_power
        self.model = LogModel()
        self.history = [self.model.state()]
        self.durable = 0
        """Index into `history`: a power cut may not take this state away."""
        self.cuts = self.continued = self.failed = 0
        self.dead = False
        """The process of `log` has ended; its object is only a leftover."""
        self.images: set[int] = set()
        self.log = self._open()

    def _open(self) -> TokenWAL:
        return TokenWAL(FOLDER, fsync=self.policy, segment_bytes=700, io=self.disk)  # type: ignore[arg-type]

    def run(self, calls: int) -> None:
        for serial in range(calls):
            if self.failures and self.rng.random() < 0.1:
                self.disk.fail_in = self.rng.randrange(12)
            before = copy.deepcopy(self.model)
            try:
                self._one(serial)
            except StorageError:
                self.failed += 1
                self._recover_from_failure(before)
        self.disk.fail_in = None
        assert state_of(self.log.requests()) == self.history[-1]
        self.log.shutdown()

    def _one(self, serial: int) -> None:
        choice = self.rng.random()
        if choice < 0.06:
            if self.rng.random() < 0.5:
                self.log.shutdown()
            self._restart()
            return
        if choice < 0.12:
            self.log.sync()
        elif choice < 0.15:
            self.log.compact()
        else:
            name, arguments = random_call(self.model, self.rng, serial)
            getattr(self.model, name)(*arguments)
            self.history.append(self.model.state())
            getattr(self.log, name)(*arguments)
        if choice < 0.15 or self.policy == "always":
            self.durable = len(self.history) - 1
            self._cut_the_power()

    def _restart(self) -> None:
        """The process ends, the machine does not: the system's cache is still there."""
        self.dead = True
        self.log, self.dead = self._open(), False
        assert state_of(self.log.requests()) == self.history[-1]
        self.durable = len(self.history) - 1  # opening makes everything it found durable

    def _recover_from_failure(self, before: LogModel) -> None:
        """After a failure the log refuses everything; a new one goes on, with the last call or without it."""
        self.disk.fail_in = None
        for call in () if self.dead else (self.log.sync, self.log.compact, lambda: self.log.retire([])):
            with pytest.raises(StorageError, match=r"takes nothing more|has been shut down"):
                call()
        self.log, self.dead = self._open(), False
        found = state_of(self.log.requests())
        if found != self.history[-1]:
            assert found == self.history[-2] == before.state()
            self.history.pop()
            self.model = before
        self.durable = len(self.history) - 1

    def _cut_the_power(self) -> None:
        for _ in range(CUTS_AT_EACH_OPERATION):
            image = self.disk.power_cut(self.rng)
            self.cuts += 1
            fingerprint = hash((self.durable, len(self.history), tuple(sorted(image.items()))))
            if fingerprint not in self.images:
                self.images.add(fingerprint)
                self._check(image)

    def _check(self, image: dict[str, bytes]) -> None:
        if not any(name.endswith((".wal", ".snapshot")) for name in image):
            assert self.durable == 0
            return
        contents = read_log(FOLDER, io=SimulatedDisk(image))
        assert contents.report.damage is None, contents.report.damage
        found = state_of(contents.requests())
        allowed = self.history[self.durable :]
        assert found in allowed, f"lost, invented or reordered: {found} is none of {len(allowed)} states"
        if self.rng.random() < 0.05:
            self._continue_from(image, found)

    def _continue_from(self, image: dict[str, bytes], found: tuple) -> None:
        """A writer goes on from the state, and a second power cut takes nothing from it."""
        disk = SimulatedDisk(image)
        log = TokenWAL(FOLDER, fsync="always", segment_bytes=700, io=disk)
        assert state_of(log.requests()) == found
        log.open(random_call(LogModel(), random.Random(1), 10**6)[1][0], {})
        expected = state_of(log.requests())
        again = disk.power_cut(self.rng)
        assert state_of(read_log(FOLDER, io=SimulatedDisk(again)).requests()) == expected
        self.continued += 1


def cut_power(workloads: range, calls: int = 60) -> tuple[int, int, int, int]:
    """(power cuts, distinct disks, writers that went on, failed operations) of these random workloads."""
    totals = [0, 0, 0, 0]
    for seed in workloads:
        work = Workload(seed, ("always", "os")[seed % 2], failures=seed % 4 >= 2)
        work.run(calls)
        counts = (work.cuts, len(work.images), work.continued, work.failed)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    return totals[0], totals[1], totals[2], totals[3]


def test_a_few_power_cuts_take_nothing_that_was_durable():
    cuts, distinct, continued, _ = cut_power(range(2), 25)
    assert cuts >= 1_000
    assert distinct >= 800
    assert continued >= 10


@pytest.mark.slow
def test_power_cuts_take_nothing_that_was_durable():
    cuts, distinct, continued, failed = cut_power(range(4))
    assert cuts >= 5_000
    assert distinct >= 2_500
    assert continued >= 100
    assert failed >= 4


@pytest.mark.slow
@pytest.mark.long
def test_many_power_cuts():
    """A hundred thousand with `--full`; `OPD_POWER_CUTS=1000000` for as many as one likes."""
    usual = "100000" if FULL else "20000"
    wanted, cuts, first = int(os.environ.get("OPD_POWER_CUTS", usual)), 0, 1000
    while cuts < wanted:
        cuts += cut_power(range(first, first + 8))[0]
        first += 8
