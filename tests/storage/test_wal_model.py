"""The log against a plain dictionary, in any order of calls, restarts, compactions and mistakes."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from full import cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_model import ENDS, LogModel, key, random_chunk, random_request, state_of

from opd.errors import StorageError
from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Power cuts are tested elsewhere; here a file system in memory saves the waiting."""
seeds = st.integers(0, 2**32).map(random.Random)


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.model = LogModel()
        self.serial = 0

    @initialize(
        policy=st.sampled_from(["os", "interval", "always"]), size=st.sampled_from([600, 1500, 1 << 20])
    )
    def start(self, policy, size):
        self.arguments = {"fsync": policy, "segment_bytes": size, "interval_seconds": 0.01}
        self.log = TokenWAL(self.folder, **self.arguments)

    def teardown(self) -> None:
        self.log.shutdown()
        shutil.rmtree(self.folder)

    def both(self, name, *arguments):
        getattr(self.model, name)(*arguments)
        getattr(self.log, name)(*arguments)

    @rule(rng=seeds)
    def open(self, rng):
        self.serial += 1
        self.both("open", random_request(rng, f"r{self.serial}"), {"n": self.serial})

    @rule(rng=seeds, count=st.integers(0, 5))
    def open_many(self, rng, count):
        requests = [random_request(rng, f"r{self.serial + 1 + i}") for i in range(count)]
        self.serial += count
        for request in requests:
            self.model.open(request, {})
        self.log.open_many([(request, {}) for request in requests])

    @precondition(lambda self: self.model.running())
    @rule(rng=seeds)
    def append(self, rng):
        self.both("append", random_chunk(self.model, rng))

    @precondition(lambda self: self.model.running())
    @rule(rng=seeds, status=st.sampled_from(ENDS), reason=st.none() | st.text(max_size=5))
    def close(self, rng, status, reason):
        self.both("close", rng.choice(self.model.running()), status, reason)

    @precondition(lambda self: self.model.running())
    @rule(rng=seeds)
    def finish_without_a_token(self, rng):
        empty = np.zeros(0, np.int32)
        ended = {rng.choice(self.model.running()): rng.choice(ENDS)}
        self.both("append", Chunk([], empty, empty, np.zeros(0, np.float32), 1, ended))

    @rule(rng=seeds, count=st.integers(0, 4))
    def retire(self, rng, count):
        uids = list(self.model.requests)
        self.both("retire", [*rng.sample(uids, min(count, len(uids))), "never opened"])

    @rule(how=st.sampled_from(["sync", "compact"]))
    def tidy(self, how):
        getattr(self.log, how)()

    @rule()
    def restart(self):
        self.log.shutdown()
        self.log = TokenWAL(self.folder, **self.arguments)
        assert self.log.recovery.clean

    @precondition(lambda self: self.model.requests)
    @rule(rng=seeds)
    def mistakes_write_nothing(self, rng):
        uid = rng.choice(list(self.model.requests))
        one = np.ones(1, np.int32)
        wrong = Chunk([uid], one * 999, one, np.zeros(1, np.float32), 0, {})
        unknown = Chunk(["never opened"], one * 0, one, np.zeros(1, np.float32), 0, {})
        before = self.log.stored_bytes
        for chunk in (wrong, unknown):
            with pytest.raises(StorageError, match=r"positions must follow on|takes no more|open it first"):
                self.log.append(chunk)
        with pytest.raises(StorageError, match="in the log already"):
            self.log.open(random_request(rng, uid), {})
        assert self.log.stored_bytes == before

    @precondition(lambda self: self.model.requests)
    @rule(rng=seeds)
    def find(self, rng):
        uid = rng.choice(list(self.model.requests))
        logged = self.log.find(uid)
        assert logged is not None
        assert key(logged) == key(self.model.requests[uid].logged())
        assert self.log.find("never opened") is None

    @invariant()
    def a_reader_sees_what_the_writer_wrote(self):
        if hasattr(self, "log") and self.serial % 3 == 0:
            contents = read_log(self.folder)
            assert contents.report.damage is None
            assert state_of(contents.requests()) == self.model.state()


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=cases(25), stateful_step_count=40, deadline=None)
