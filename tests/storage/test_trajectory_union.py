"""Several stores read as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_data import SMALL, record, values

from opd.errors import StorageError
from opd.storage.trajectories import TrajectoryBatch, TrajectoryStore, TrajectoryUnion, TrajectoryWriter

FIELDS = ["token_ids", "rollout_logprobs", "policy_versions", "loss_mask"]
PARTS = [range(5), range(5, 5), range(5, 12)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Three stores, of which the second is empty."""
    root = tmp_path_factory.mktemp("union")
    for number, part in enumerate(PARTS):
        with TrajectoryWriter(root / str(number), **SMALL) as writer:
            for trajectory in part:
                writer.put(record(trajectory), **values(trajectory))
    return [root / str(number) for number in range(len(PARTS))]


@settings(max_examples=cases(30), deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 11), unique=True, max_size=6), max_size=5), st.booleans())
def test_any_batches_of_any_rows_are_those_of_their_stores(folders, plan, ahead):
    with TrajectoryUnion.open(folders) as union:
        assert list(union.table.uid) == [f"run/{number}" for number in range(12)]
        assert union.heavy_bytes(FIELDS).tolist() == [
            sum(values(number)[name].nbytes for name in FIELDS) for number in range(12)
        ]
        assert union.counters.bytes_read == 0
        seen = []
        for batch in union.batches(plan, FIELDS, ahead=ahead):
            seen.append(batch.rows)
            for row in batch.rows:
                sample, expected = batch.sample(row), values(row)
                assert sample.uid == f"run/{row}"
                assert np.array_equal(sample.token_ids, expected["token_ids"])
                count = len(sample.response_ids)
                part = batch.read(row, "rollout_logprobs", count // 3, count)
                assert np.array_equal(part, expected["rollout_logprobs"][count // 3 :])
        assert seen == plan
        assert (union.counters.bytes_read > 0) == any(plan)


def test_every_lease_ends_with_its_batch_also_where_one_store_refuses(folders, tmp_path, monkeypatch):
    held: set[int] = set()
    lease, release = TrajectoryStore.lease, TrajectoryBatch.release
    refusing: list[TrajectoryStore] = []

    def noted(store, rows):
        if store in refusing:
            raise StorageError("it is gone")
        batch = lease(store, rows)
        held.add(id(batch))
        return batch

    monkeypatch.setattr(TrajectoryStore, "lease", noted)
    monkeypatch.setattr(TrajectoryBatch, "release", lambda b: (held.discard(id(b)), release(b))[1])
    with TrajectoryUnion.open(folders) as union:
        with union.lease([0, 5]):
            assert len(held) == 2
        assert not held
        refusing.append(union.stores[2])
        with pytest.raises(StorageError, match="it is gone"):
            union.lease([0, 5])
        assert not held
        with pytest.raises(StorageError, match="it is gone"):
            list(union.batches([[0, 1], [2, 6], [3]], FIELDS))
        assert not held
    with pytest.raises(StorageError, match="there is no trajectory store in"):
        TrajectoryUnion.open([folders[0], tmp_path / "nothing"])
