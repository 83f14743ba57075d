"""Random histories of two openings of one cache against a dictionary, exact in every answer."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from cached_rows import BLOCK, disk_bytes, flip, holds, key_of, keys, put, rows_of
from full import cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opd.storage.node_cache import Lease, NodeCache

NUMBERS = st.integers(0, 7)
SIDES = st.integers(0, 1)


def _rows(number: int) -> int:
    """Blobs of one, two and three blocks."""
    return 5 + 20 * (number % 3)


class CacheMachine(RuleBasedStateMachine):
    """The model: the cached numbers from the least to the most recently used, and the leases."""

    @initialize(blocks=st.integers(3, 9))
    def open(self, blocks: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="opd-cache-"))
        self.quota = blocks * BLOCK
        self.order: list[int] = []
        self.leases: list[tuple[int, int, Lease]] = []
        self.sides = [self._opened(), self._opened()]

    def _opened(self) -> NodeCache:
        return NodeCache(self.folder, quota_bytes=self.quota)

    def _size(self, number: int) -> int:
        return (1 + number % 3) * BLOCK

    def _used(self) -> int:
        return sum(map(self._size, self.order))

    def _make_room(self, need: int) -> bool:
        """Evict in the model as the cache promises to; False if that is not enough."""
        if need > self.quota:
            return False
        leased = {number for _, number, _ in self.leases}
        for number in [n for n in self.order if n not in leased]:
            if self._used() + need <= self.quota:
                break
            self.order.remove(number)
        return self._used() + need <= self.quota

    @rule(side=SIDES, number=NUMBERS)
    def put(self, side: int, number: int) -> None:
        expected = True
        if number in self.order:
            self.order.remove(number)
        else:
            expected = self._make_room(self._size(number))
        assert put(self.sides[side], number, _rows(number)) == expected
        if expected:
            self.order.append(number)

    @rule(side=SIDES, number=NUMBERS)
    def look(self, side: int, number: int) -> None:
        assert holds(self.sides[side], number, _rows(number)) == (number in self.order)
        if number in self.order:
            self.order.remove(number)
            self.order.append(number)

    @precondition(lambda self: len(self.order) > 0)
    @rule(side=SIDES, data=st.data())
    def lease(self, side: int, data) -> None:
        number = data.draw(st.sampled_from(self.order))
        lease = self.sides[side].get(key_of(number))
        assert lease is not None
        self.leases.append((side, number, lease))
        self.order.remove(number)
        self.order.append(number)

    @precondition(lambda self: len(self.leases) > 0)
    @rule(data=st.data())
    def release(self, data) -> None:
        _, number, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()
        assert np.array_equal(lease.rows, rows_of(number, _rows(number)))

    @rule(side=SIDES)
    def reopen(self, side: int) -> None:
        self.sides[side].close()
        self.leases = [lease for lease in self.leases if lease[0] != side]
        self.sides[side] = self._opened()

    @precondition(lambda self: len(self.order) > 0)
    @rule(side=SIDES, offset=st.integers(0, 900), bit=st.integers(0, 7), data=st.data())
    def damage(self, side: int, offset: int, bit: int, data) -> None:
        leased = {number for _, number, _ in self.leases}
        victims = [number for number in self.order if number not in leased]
        if not victims:
            return
        number = data.draw(st.sampled_from(victims))
        flip(self.folder, number, offset, 1 << bit)
        assert self.sides[side].get(key_of(number)) is None
        self.order.remove(number)

    @invariant()
    def the_folder_is_what_the_model_says(self) -> None:
        if not hasattr(self, "folder"):
            return
        assert keys(self.folder) == sorted(key_of(number).hex() for number in self.order)
        assert self._used() == disk_bytes(self.folder) == self.sides[0].used_bytes() <= self.quota
        for _, number, lease in self.leases:
            assert np.array_equal(lease.rows, rows_of(number, _rows(number)))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for side in self.sides:
                side.close()
            shutil.rmtree(self.folder)


TestCacheAgainstAModel = CacheMachine.TestCase
TestCacheAgainstAModel.settings = settings(max_examples=cases(60), stateful_step_count=40)
