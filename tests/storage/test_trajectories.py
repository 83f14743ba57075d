"""The trajectory store in use: written piece by piece, filtered light, read where it is needed."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import numpy as np
import pytest
from full import cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trajectory_data import (
    FIELDS,
    SMALL,
    assert_right,
    disk_bytes,
    lengths,
    record,
    resident,
    values,
    write,
)

from opd.errors import StorageError
from opd.storage.trajectories import (
    Field,
    TrajectoryRecord,
    TrajectoryStore,
    TrajectoryWriter,
    put_samples,
)
from opd.train.plan import CostModel, DeviceBudget, PlanSettings, Workload, make_plan
from opd.types import Sample, Status


def _append_in_pieces(writer: TrajectoryWriter, number: int, step: int) -> None:
    for name, array in values(number, hidden=True).items():
        for start in range(0, len(array), step):
            writer.append(record(number).uid, **{name: array[start : start + step]})


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_interleaved_pieces_come_back_whole(tmp_path: Path, step: int) -> None:
    numbers = range(6 if step == 1 else 24)
    with TrajectoryWriter(tmp_path, fields=FIELDS, **SMALL) as writer:
        for n in numbers:
            writer.begin(record(n).uid, lengths(n)[0], 1000)
        for n in reversed(numbers):
            _append_in_pieces(writer, n, step)
        for n in numbers:
            writer.seal(record(n))
    with TrajectoryStore.open(tmp_path) as store:
        assert assert_right(store, hidden=True) == list(numbers)


def test_long_pieces_and_short_ones_meet_at_every_block_boundary(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, 100_000).astype(np.int32)
    tokens[30_000:60_000] = 0  # left as a hole
    with TrajectoryWriter(tmp_path, block_bytes=4096, durable=False) as writer:
        writer.begin("a", 0, 200_000)
        place = 0
        while place < len(tokens):
            size = int(rng.choice([1, 3, 1000, 9000, 20_000]))
            writer.append("a", token_ids=tokens[place : place + size])
            place += size
        writer.seal(TrajectoryRecord("a", 0, len(tokens)))
    with TrajectoryStore.open(tmp_path) as store, store.lease([0]) as batch:
        for start, stop in [(0, 100_000), (0, 0), (1023, 1025), (29_999, 60_001), (99_999, 100_000)]:
            assert np.array_equal(batch.read(0, "token_ids", start, stop), tokens[start:stop])


def test_opening_reads_no_heavy_file_and_ranges_read_little(tmp_path: Path) -> None:
    write(tmp_path, range(20), block_bytes=512)
    with TrajectoryStore.open(tmp_path) as store:
        segments = tmp_path / "segments"
        segments.rename(tmp_path / "elsewhere")
        table = store.table
        assert table.domain.equals("code").sum() == 7
        assert table.has_status(Status.COMPLETED).all()
        assert table.uid[3] == "run/3"
        assert store.heavy_bytes().sum() == sum(
            array.nbytes for n in range(20) for array in values(n, hidden=True).values()
        )
        assert store.counters.bytes_mapped == store.counters.bytes_checked == 0
        with pytest.raises(StorageError, match=r"run/0 of .* is gone"), store.lease([0]) as batch:
            batch.read(0, "token_ids")
        (tmp_path / "elsewhere").rename(segments)
        with store.lease([1]) as batch:
            assert np.array_equal(batch.read(1, "hidden", 5, 6), values(1, hidden=True)["hidden"][5:6])
        assert 0 < store.counters.bytes_checked <= 512


def test_a_thousand_trajectories_of_a_million_tokens_are_planned_from_metadata_alone(tmp_path: Path) -> None:
    """Sparse files stand for the heavy field; they are not even there while the plan is made."""
    count, tokens = 1000, 1_000_000
    mask = Field("loss_mask", "bool")
    zeros = np.zeros(tokens, bool)
    with TrajectoryWriter(tmp_path, fields=(mask,), durable=False) as writer:
        for i in range(count):
            writer.put(TrajectoryRecord(str(i), 0, tokens, teacher=f"t{i % 4}"), loss_mask=zeros)
    files = list((tmp_path / "segments").iterdir())
    assert sum(path.stat().st_size for path in files) >= count * tokens
    assert disk_bytes(tmp_path) < 2 << 20
    (tmp_path / "segments").rename(tmp_path / "away")
    before = resident()
    with TrajectoryStore.open(tmp_path) as store:
        work = Workload(store.table.tokens, store.table.teacher.codes, store.heavy_bytes())
        plan = make_plan(work, PlanSettings(16, 2), CostModel(quadratic=1e-3), DeviceBudget(1e8))
        assert sorted(plan.order.tolist()) == list(range(count))
        assert (store.counters.bytes_mapped, store.counters.bytes_checked) == (0, 0)
        assert resident() - before < 16 << 20
        (tmp_path / "away").rename(tmp_path / "segments")
        with store.lease(plan[0].rows[:1]) as batch:
            assert not batch.read(batch.rows[0], "loss_mask").any()
        assert store.counters.bytes_mapped == store.counters.bytes_checked == tokens


def test_views_share_the_files_pages_and_are_read_only(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    with TrajectoryStore.open(tmp_path) as store:
        with store.lease([0]) as batch:
            view = batch.read(0, "token_ids")
            again = batch.read(0, "token_ids", 1)
            assert np.shares_memory(view, again)
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        assert np.array_equal(view, values(0)["token_ids"])  # a late look is right
        with pytest.raises(StorageError, match="the batch was released"):
            batch.read(0, "token_ids")


def test_a_table_of_many_rows_filters_sorts_and_shuffles(tmp_path: Path) -> None:
    write(tmp_path, range(300), fields=FIELDS)
    with TrajectoryStore.open(tmp_path) as store:
        table = store.table
        chosen = table.take(table.domain.equals("größe") & (table.tokens > 200))
        expected = [n for n in range(300) if n % 3 == 2 and sum(lengths(n)) > 200]
        assert list(chosen.uid) == [f"run/{n}" for n in expected]
        assert [chosen.teacher[i] for i in range(len(chosen))] == [f"t{n % 2}" for n in expected]
        shuffled = table.take(np.random.default_rng(0).permutation(300))
        assert sorted(shuffled.uid) == sorted(table.uid)
        assert shuffled.record(7) == table.record(list(table.uid).index(shuffled.uid[7]))
        assert table.take(np.zeros(300, bool)).uid.offsets.tolist() == [0]


@pytest.mark.slow
def test_a_reader_beside_the_writer_sees_what_is_sealed(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path, fields=FIELDS, **SMALL) as writer:
        store = TrajectoryStore.open(tmp_path)
        assert len(store.table) == 0
        writer.begin("run/1", lengths(1)[0], 500)
        _append_in_pieces(writer, 1, 50)
        assert not store.refresh()
        writer.seal(record(1))
        assert store.refresh()
        assert assert_right(store) == [1]
        for n in range(2, 700):  # over several bases
            writer.begin(record(n).uid, lengths(n)[0], 400)
            writer.append(record(n).uid, **values(n))
            writer.seal(record(n))
            if n % 50 == 0:
                store.refresh()
                assert list(store.table.uid) == [f"run/{k}" for k in range(1, n + 1)]
        assert store.refresh()
        assert assert_right(store) == list(range(1, 700))
        assert not store.refresh()
        assert TrajectoryStore.open(tmp_path).table.uid[600] == "run/601"
        store.close()


def test_a_sealed_trajectory_takes_further_fields(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path, fields=FIELDS, **SMALL) as writer:
        writer.put_many([(record(n), values(n)) for n in range(9)])
        store = TrajectoryStore.open(tmp_path)
        with pytest.raises(StorageError, match="run/4 has no field hidden"), store.lease([4]) as batch:
            batch.read(4, "hidden")
        with pytest.raises(StorageError, match="has no field logits; it has token_ids"):
            store.lease([4]).read(4, "logits")
        for n in (4, 2):
            writer.reopen(record(n).uid)
            with pytest.raises(StorageError, match="has field token_ids already"):
                writer.append(record(n).uid, token_ids=values(n)["token_ids"])
            writer.append(record(n).uid, hidden=values(n, hidden=True)["hidden"])
            writer.seal(writer.record(record(n).uid))
        assert store.refresh()
        assert assert_right(store) == list(range(9))  # in their old places
        with store.lease([4]) as batch:
            assert batch.has(4, "hidden")
            assert not batch.has(5, "hidden")
        writer.reopen("run/5")
        writer.append("run/5", hidden=values(5, hidden=True)["hidden"])
        writer.abort("run/5")
        assert assert_right(TrajectoryStore.open(tmp_path)) == list(range(9))
        store.close()


def test_samples_go_in_and_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    samples = [
        Sample(
            uid=f"g/{i}",
            group_uid="g",
            domain="math",
            teacher="t" if i else None,
            prompt_ids=rng.integers(0, 99, 3).astype(np.int32),
            response_ids=rng.integers(0, 99, i).astype(np.int32),
            rollout_logprobs=rng.standard_normal(i).astype(np.float32),
            policy_versions=np.arange(i, dtype=np.int32),
            loss_mask=rng.random(i) < 0.5,
            reward=None if i == 1 else 0.5,
            reward_parts={"format": 1.0} if i else {},
            status=Status.TRUNCATED if i % 2 else Status.COMPLETED,
            label={"answer": i},
            metadata={"level": i},
        )
        for i in range(4)
    ]
    with TrajectoryWriter(tmp_path) as writer:
        put_samples(writer, samples)
    with TrajectoryStore.open(tmp_path) as store, store.lease(range(4)) as batch:
        assert store.table.trainable_tokens.tolist() == [s.trainable_tokens for s in samples]
        for row, sample in enumerate(samples):
            found = batch.sample(row)
            for name in Sample.__slots__:
                one, other = getattr(found, name), getattr(sample, name)
                if isinstance(other, np.ndarray):
                    assert one.dtype == other.dtype
                    assert np.array_equal(one, other), name
                else:
                    assert one == other, name


def test_retired_trajectories_give_their_disk_back(tmp_path: Path) -> None:
    big = Field("hidden", "float32", 64)
    rows = np.ones((1000, 64), np.float32)
    with TrajectoryWriter(tmp_path, fields=(big,), segment_bytes=1 << 20, durable=False) as writer:
        for i in range(16):
            writer.put(TrajectoryRecord(f"{i}", 0, 1000), hidden=rows)
        full = disk_bytes(tmp_path)
        assert full >= 16 * rows.nbytes
        store = TrajectoryStore.open(tmp_path)
        held = store.lease([0])
        writer.retire([f"{i}" for i in range(12)])
        assert np.array_equal(held.read(0, "hidden"), rows)  # held: still there
        between = disk_bytes(tmp_path)
        assert between < full - 6 * rows.nbytes
        held.release()
        writer.retire([])
        assert disk_bytes(tmp_path) < between - 3 * rows.nbytes
        with pytest.raises(StorageError, match=r"trajectory 1 of .* is gone"), store.lease([1]) as batch:
            batch.read(1, "hidden")
        writer.put(TrajectoryRecord("0", 0, 1000), hidden=rows)  # the name is free again
        writer.retire([*writer.uids, "unknown"])
        store.close()
    assert disk_bytes(tmp_path) < 100_000
    assert len(TrajectoryStore.open(tmp_path).table) == 0


def test_one_retired_trajectory_of_a_shared_segment_is_gone_too(tmp_path: Path) -> None:
    field = Field("hidden", "float32", 64)
    rows = np.ones((4000, 64), np.float32)
    with TrajectoryWriter(tmp_path, fields=(field,), durable=False) as writer:
        writer.put_many([(TrajectoryRecord(f"{i}", 0, 4000), {"hidden": rows * i}) for i in range(1, 4)])
        before, store = disk_bytes(tmp_path), TrajectoryStore.open(tmp_path)
        writer.retire(["2"])
        assert disk_bytes(tmp_path) <= before - rows.nbytes + 2 * mmap.PAGESIZE + 10_000
        with store.lease([0, 1, 2]) as batch:
            assert np.array_equal(batch.read(0, "hidden"), rows)
            assert np.array_equal(batch.read(2, "hidden"), rows * 3)
            with pytest.raises(StorageError, match=r"trajectory 2 of .* is gone"):
                batch.read(1, "hidden")
        store.close()


def test_misuse_says_what_is_wrong_and_changes_nothing(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path, fields=FIELDS, **SMALL) as writer:
        writer.begin("a", 2, 5)
        for error, words, call in [
            (StorageError, "a is in .* already", lambda: writer.begin("a", 1, 1)),
            (StorageError, "trajectory b is not open", lambda: writer.append("b")),
            (StorageError, "b is not sealed", lambda: writer.reopen("b")),
            (StorageError, "no field logits", lambda: writer.append("a", logits=np.zeros(1))),
            (ValueError, "takes int32", lambda: writer.append("a", token_ids=np.zeros(1))),
            (
                ValueError,
                r"takes uint16 \['R', 12\]",
                lambda: writer.append("a", hidden=np.zeros((1, 3), "u2")),
            ),
            (StorageError, "8 rows of token_ids", lambda: writer.append("a", token_ids=np.zeros(8, "i4"))),
        ]:
            with pytest.raises(error, match=words):
                call()
        writer.append("a", token_ids=np.arange(5, dtype=np.int32))
        for words, wrong in [("ask for 6", (2, 4)), ("begun with 2 prompt tokens", (1, 4))]:
            with pytest.raises(StorageError, match=words):
                writer.seal(TrajectoryRecord("a", *wrong))
        writer.seal(TrajectoryRecord("a", 2, 3))
        with pytest.raises(StorageError, match=r"a is in .* already"):
            writer.begin("a", 2, 5)
        with pytest.raises(StorageError, match="one writer at a time"):
            TrajectoryWriter(tmp_path, fields=FIELDS)
    with pytest.raises(StorageError, match="has been shut down"):
        writer.begin("c", 1, 1)
    with pytest.raises(StorageError, match="made with other fields"):
        TrajectoryWriter(tmp_path)
    with TrajectoryStore.open(tmp_path) as store, store.lease([0]) as batch:
        assert batch.read(0, "token_ids").tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="rows 2 to 9 of token_ids"):
            batch.read(0, "token_ids", 2, 9)


def test_a_forgotten_batch_holds_nothing(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    with TrajectoryStore.open(tmp_path) as store, TrajectoryWriter(tmp_path, fields=FIELDS) as writer:
        batch = store.lease([0, 1])
        writer.retire(writer.uids)
        assert disk_bytes(tmp_path / "segments") > 0
        del batch
        writer.retire([])
        assert disk_bytes(tmp_path / "segments") == 0


def test_batches_are_released_when_the_loop_is_left(tmp_path: Path) -> None:
    write(tmp_path, range(12))
    with TrajectoryStore.open(tmp_path) as store, TrajectoryWriter(tmp_path, fields=FIELDS) as writer:
        seen = []
        for batch in store.batches(np.arange(12).reshape(4, 3), ["token_ids"]):
            seen += [np.array_equal(batch.read(r, "token_ids"), values(r)["token_ids"]) for r in batch.rows]
            if len(seen) == 6:
                break
        assert seen == [True] * 6
        del batch
        for ahead in (False, True):
            rows = [b.rows for b in store.batches(np.arange(12).reshape(4, 3), ["hidden"], ahead=ahead)]
            assert rows == np.arange(12).reshape(4, 3).tolist()
        writer.retire(writer.uids)
        assert disk_bytes(tmp_path / "segments") == 0


class StoreMachine(RuleBasedStateMachine):
    """Any order of calls, closings and readings against a dictionary."""

    @initialize(folder=st.builds(lambda: None))
    def start(self, folder: None) -> None:
        del folder
        self.folder = Path(__import__("tempfile").mkdtemp(prefix="opd-trajectories-"))
        self.sealed: dict[int, bool] = {}
        self.open: dict[int, dict[str, int]] = {}
        self.writer = TrajectoryWriter(self.folder, fields=FIELDS, **SMALL)
        self.reader = TrajectoryStore.open(self.folder)

    @rule(number=st.integers(0, 30))
    def begin(self, number: int) -> None:
        if number not in self.sealed and number not in self.open:
            self.writer.begin(record(number).uid, *lengths(number))
            self.open[number] = {}

    @precondition(lambda self: self.open)
    @rule(data=st.data(), size=st.integers(1, 300))
    def append(self, data: st.DataObject, size: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        name = data.draw(st.sampled_from([field.name for field in FIELDS]))
        done = self.open[number]
        start = done.get(name, 0)
        piece = values(number, hidden=True)[name][start : start + size]
        self.writer.append(record(number).uid, **{name: piece})
        done[name] = start + len(piece)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), hidden=st.booleans())
    def seal(self, data: st.DataObject, hidden: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        done = self.open.pop(number)
        hidden = hidden or "hidden" in done
        rest = {name: array[done.get(name, 0) :] for name, array in values(number, hidden).items()}
        self.writer.append(record(number).uid, **rest)
        self.writer.seal(record(number))
        self.sealed[number] = hidden

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.writer.abort(record(number).uid)
        del self.open[number]

    @precondition(lambda self: any(not hidden for hidden in self.sealed.values()))
    @rule(data=st.data())
    def add_hidden(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(n for n, hidden in self.sealed.items() if not hidden)))
        self.writer.reopen(record(number).uid)
        self.writer.append(record(number).uid, hidden=values(number, hidden=True)["hidden"])
        self.writer.seal(record(number))
        self.sealed[number] = True

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from(sorted(self.sealed))))
        self.writer.retire([record(n).uid for n in gone])
        for n in gone:
            del self.sealed[n]

    @rule()
    def reopen_the_store(self) -> None:
        self.writer.close()
        self.open.clear()
        self.writer = TrajectoryWriter(self.folder, fields=FIELDS, **SMALL)

    @invariant()
    def readers_agree(self) -> None:
        self.reader.refresh()
        assert sorted(assert_right(self.reader)) == sorted(self.sealed)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            with TrajectoryStore.open(self.folder) as fresh:
                assert sorted(assert_right(fresh)) == sorted(self.sealed)
            self.reader.close()
            self.writer.close()
            shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=cases(40), stateful_step_count=30, deadline=None)
