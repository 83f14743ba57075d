"""Samples on disk: written in lots, filtered by their table, read where they are needed."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.numpy import load_file
from sample_data import assert_right, choices, items, lengths, record, values, write

from opd.errors import StorageError
from opd.storage import sample_lot
from opd.storage.sample_lot import EVERY_FIELD, EXPERT_CHOICES, FIELDS, SampleRecord, record_of
from opd.storage.sample_store import SampleBatch, SampleStore, SampleWriter, fields_of
from opd.types import Sample, Status

NUMBERS = st.sets(st.integers(0, 30), max_size=5)
PARTS = [range(5), range(5, 5), range(5, 12)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Three, of which the second is empty."""
    root = tmp_path_factory.mktemp("folders")
    for number, part in enumerate(PARTS):
        with SampleWriter(root / str(number), durable=False) as writer:
            for lot in np.array_split(np.array(part, np.int64), 2):
                if len(lot):
                    writer.put(items(lot.tolist()))
    return [root / str(number) for number in range(len(PARTS))]


@settings(max_examples=cases(30), deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 11), unique=True, max_size=6), max_size=5), st.booleans())
def test_any_batches_of_any_rows_are_those_of_their_folders(folders, plan, ahead):
    store = SampleStore.open(folders)
    assert [record.uid for record in store.records] == [f"run/{number}" for number in range(12)]
    assert store.starts.tolist() == [0, 5, 5, 12]
    sizes = [sum(array.nbytes for array in values(number).values()) for number in range(12)]
    assert store.heavy_bytes().tolist() == sizes
    assert (store.counters.bytes_read, store.counters.bytes_checked) == (0, 0)
    seen = []
    for batch in store.lease_batches(plan, tuple(FIELDS), ahead=ahead):
        seen.append(batch.rows)
        for row in batch.rows:
            sample, expected = batch.get_sample(row), values(row)
            assert sample.uid == f"run/{row}"
            assert np.array_equal(sample.token_ids, expected["token_ids"])
            count = len(sample.response_ids)
            part = batch.read(row, "policy_versions", count // 3, count)
            assert np.array_equal(part, expected["policy_versions"][count // 3 :])
    assert seen == plan
    assert (store.counters.bytes_read > 0) == any(plan)


@pytest.mark.parametrize("block", [64, 4096, 1 << 20])
def test_rows_come_back_across_every_block_boundary(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sample_lot, "BLOCK_BYTES", block)
    write(tmp_path, range(9))
    store = SampleStore.open([tmp_path])
    assert assert_right(store) == list(range(9))
    whole = {name: sum(v[name].nbytes for v in map(values, range(9)) if name in v) for name in FIELDS}
    assert store.counters.bytes_checked == sum(whole.values())
    with store.lease([3]) as batch:
        tokens = values(3)["token_ids"]
        for start in range(0, len(tokens), 7):
            assert np.array_equal(
                batch.read(3, "token_ids", start, start + 7 if start + 7 < len(tokens) else None),
                tokens[start : start + 7],
            )
    fresh = SampleStore.open([tmp_path])
    with fresh.lease([3]) as batch:
        batch.read(3, "token_ids", 5, 6)
    assert fresh.counters.bytes_checked <= min(block, whole["token_ids"])
    assert fresh.counters.bytes_read == 4


def test_a_lot_is_safetensors_which_any_program_opens(tmp_path):
    write(tmp_path, range(3), batch=7)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.name == "00000007-00000001.safetensors"
    found = load_file(path)
    assert np.array_equal(found["token_ids"], np.concatenate([values(n)["token_ids"] for n in range(3)]))
    assert json.loads(found["records"].tobytes())["prompt_tokens"] == [lengths(n)[0] for n in range(3)]


def _write_routed(folder: Path, experts: int, numbers: range = range(8)) -> None:
    """Write a lot in which every other sample has expert choices, and one in which none has."""
    with SampleWriter(folder, durable=False) as writer:
        routed = {number: {EXPERT_CHOICES: choices(number, experts)} for number in numbers if number % 2}
        writer.put([(record(n), values(n) | routed.get(n, {})) for n in numbers])
        writer.put(items([90, 91]))


@pytest.mark.parametrize("experts", [256, 300])
def test_expert_choices_come_back_beside_samples_without(tmp_path, monkeypatch, experts):
    monkeypatch.setattr(sample_lot, "BLOCK_BYTES", 512)
    _write_routed(tmp_path, experts)
    store = SampleStore.open([tmp_path])
    sizes = store.heavy_bytes()
    assert store.counters.bytes_read == 0
    for row, number in enumerate([*range(8), 90, 91]):
        light, due = store.choices_placeholder(row), choices(number, experts)
        with store.lease([row]) as batch:
            stored = batch.get_sample(row).expert_choices
            assert batch.has_field(row, EXPERT_CHOICES) == (stored is not None) == (light is not None)
        extra = sum(array.nbytes for array in values(number).values())
        if number % 2 == 0 or number > 90:
            assert stored is None
            assert sizes[row] == extra
            continue
        assert light is not None
        assert light.strides == (0, 0, 0)
        assert (light.shape, light.dtype) == (due.shape, due.dtype)
        assert stored is not None
        assert stored.dtype == due.dtype
        assert np.array_equal(stored, due)
        assert sizes[row] == extra + due.nbytes
    assert store.counters.bytes_read == int(sizes.sum())
    list(store.lease_batches([range(10)], EVERY_FIELD))  # reads ahead
    assert store.counters.bytes_read == 2 * int(sizes.sum())


def test_a_flipped_bit_of_expert_choices_is_noticed(tmp_path):
    _write_routed(tmp_path, 256, range(1, 2))
    (path, _) = sorted(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    at = bytes(data).index(choices(1).tobytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    store = SampleStore.open([tmp_path])
    with store.lease([0]) as batch, pytest.raises(StorageError, match="do not have their digest"):
        batch.get_sample(0)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 2), np.uint8), r"give uint8 or uint16 \[N, L, K\]"),
        (np.zeros((3, 2, 2), np.int64), "expert_choices of sample run/1 is int64"),
        (np.zeros((9999, 2, 2), np.uint8), "with N of 1 to"),
        (np.zeros((3, 2, 2), np.uint8), "give all samples of a lot one form"),
    ],
)
def test_expert_choices_of_another_form_are_refused(tmp_path, array, words):
    others = [(record(3), values(3) | {EXPERT_CHOICES: choices(3)})]
    with SampleWriter(tmp_path) as writer, pytest.raises(ValueError, match=words):
        writer.put([*others, (record(1), values(1) | {EXPERT_CHOICES: array})])


def test_views_share_the_files_pages_and_are_read_only(tmp_path):
    write(tmp_path, range(3))
    store = SampleStore.open([tmp_path])
    with store.lease([0]) as batch:
        view = batch.read(0, "token_ids")
        assert np.shares_memory(view, batch.read(0, "token_ids", 1))
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        with pytest.raises(StorageError, match="run/1 is not in this batch"):
            batch.read(1, "token_ids")
    assert np.array_equal(view, values(0)["token_ids"])  # a late look is right
    with pytest.raises(StorageError, match="or it was released"):
        batch.read(0, "token_ids")


def test_samples_go_in_and_come_back(tmp_path):
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
            label=[{"answer": 1}, 0, "", False][i],
            metadata={"level": i},
            branch_of="g/0" if i == 3 else "",
            failure="slow" if i == 2 else None,
            expert_choices=None if i == 2 else rng.integers(0, 8, (2 + i, 3, 2)).astype(np.uint8),
        )
        for i in range(4)
    ]
    with SampleWriter(tmp_path) as writer:
        writer.put([(record_of(sample), fields_of(sample)) for sample in samples])
    store = SampleStore.open([tmp_path])
    with store.lease(range(4)) as batch:
        assert [one.trainable_tokens for one in store.records] == [s.trainable_tokens for s in samples]
        assert [one.last_version for one in store.records] == [0, 0, 1, 2]
        for row, sample in enumerate(samples):
            found = batch.get_sample(row)
            for name in Sample.__slots__:
                one, other = getattr(found, name), getattr(sample, name)
                if isinstance(other, np.ndarray):
                    assert one.dtype == other.dtype
                    assert np.array_equal(one, other), name
                else:
                    assert one == other, name


def test_a_batch_that_is_given_up_stays_with_who_has_it_open(tmp_path):
    with SampleWriter(tmp_path, durable=False) as writer:
        for batch in (3, 4, 5):
            writer.put(items([batch]), batch)
        store = SampleStore.open([tmp_path])
        assert store.batch.tolist() == [3, 4, 5]
        writer.retire_before(5)
        assert sorted(os.listdir(tmp_path)) == ["00000005-00000003.safetensors", "writer"]
        assert assert_right(store) == [3, 4, 5]
        assert assert_right(SampleStore.open([tmp_path])) == [5]
        writer.put(items([6]), 5)
    assert not SampleStore.open([tmp_path], batch=4).records
    assert assert_right(SampleStore.open([tmp_path], batch=5)) == [5, 6]


def test_a_later_lot_takes_the_place_of_what_it_names(tmp_path):
    with SampleWriter(tmp_path, durable=False) as writer:
        writer.put(items([0, 1, 2]))
        writer.put(items([1, 3]), drops=["run/0", "run/1", "unknown"])
        assert assert_right(SampleStore.open([tmp_path])) == [2, 1, 3]
        found = SampleStore.open([tmp_path]).records
        assert sorted(one.uid for one in found) == ["run/1", "run/2", "run/3"]
        changed = SampleRecord("run/2", 1, 0)
        writer.put([(changed, {"token_ids": np.array([5], np.int32)})])
        writer.put([], drops=["run/3"])
    store = SampleStore.open([tmp_path])
    uids = [one.uid for one in store.records]
    assert sorted(uids) == ["run/1", "run/2"]
    row = uids.index("run/2")
    assert store.records[row].token_count == 1
    with store.lease([row]) as batch:
        assert batch.read(row, "token_ids").tolist() == [5]


def test_misuse_says_what_is_wrong_and_writes_nothing(tmp_path):
    one = SampleRecord("a", 2, 3)
    with SampleWriter(tmp_path, durable=False) as writer:
        for words, wrong in [
            (
                r"token_ids of sample a is int32 \[4\], and its record asks for int32 \[5\]",
                {"token_ids": np.zeros(4, "i4")},
            ),
            (r"is float64 \[5\]", {"token_ids": np.zeros(5)}),
            (r"loss_mask .* asks for bool \[3\]", {"loss_mask": np.zeros(5, bool)}),
        ]:
            with pytest.raises(ValueError, match=words):
                writer.put([(one, wrong)])
        for batch in (-1, 10**8):
            with pytest.raises(ValueError, match="give a number from 0 to 99999999"):
                writer.put([(one, {})], batch)
        with pytest.raises(StorageError, match="what a sample carries cannot be kept"):
            writer.put([(SampleRecord("\udc80", 0, 0), {})])
        with pytest.raises(ValueError, match="drops of these samples take more"):
            writer.put([], drops=["a" * (17 << 20)])
        with pytest.raises(ValueError, match="given twice"):
            writer.put([(one, {}), (one, {})])
        with pytest.raises(StorageError, match="one writer at a time"):
            SampleWriter(tmp_path)
        assert os.listdir(tmp_path) == ["writer"]
        writer.put([(one, {"token_ids": np.arange(5, dtype=np.int32)})])
    with pytest.raises(StorageError, match="was closed"):
        writer.put([(one, {})])
    store = SampleStore.open([tmp_path])
    with store.lease([0]) as batch:
        assert batch.read(0, "token_ids").tolist() == [0, 1, 2, 3, 4]
        assert not batch.has_field(0, "loss_mask")
        for wrong in [(2, 9), (-1, 2), (3, 2)]:
            with pytest.raises(ValueError, match=f"rows {wrong[0]} to {wrong[1]} of token_ids"):
                batch.read(0, "token_ids", *wrong)
        with pytest.raises(StorageError, match="sample a has no loss_mask"):
            batch.read(0, "loss_mask")
    write(tmp_path / "light", [])
    with SampleWriter(tmp_path / "light", durable=False) as writer:
        writer.put([(SampleRecord("b", 2**47, 0), {})])
    light = SampleStore.open([tmp_path / "light"])
    with light.lease([0]) as batch, pytest.raises(StorageError, match="sample b has no token_ids"):
        batch.get_sample(0)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="there are no samples in"):
        SampleStore.open([tmp_path / "nothing"])
    with pytest.raises(StorageError, match=r"cannot be written \(Not a directory\)"):
        SampleWriter(tmp_path / "file" / "store")


def test_batches_are_released_when_the_loop_is_left_or_one_is_refused(tmp_path, monkeypatch):
    write(tmp_path, range(12))
    store = SampleStore.open([tmp_path])
    held: set[int] = set()
    lease, release = SampleStore.lease, SampleBatch.release
    refused: list[int] = []

    def noted(store, rows):
        batch = lease(store, rows)
        if batch.rows[0] in refused:
            raise StorageError("it is gone")
        held.add(id(batch))
        return batch

    monkeypatch.setattr(SampleStore, "lease", noted)
    monkeypatch.setattr(SampleBatch, "release", lambda b: (held.discard(id(b)), release(b))[1])
    plan = np.arange(12).reshape(4, 3)
    for ahead in (False, True):
        running = store.lease_batches(plan, ["token_ids"], ahead=ahead)
        assert next(running).rows == [0, 1, 2]
        assert len(held) <= 1 + ahead
        running.close()
        assert not held
        assert [
            batch.rows for batch in store.lease_batches(plan, ["token_ids"], ahead=ahead)
        ] == plan.tolist()
        assert not held
        refused.append(6)
        with pytest.raises(StorageError, match="it is gone"):
            list(store.lease_batches(plan, ["token_ids"], ahead=ahead))
        assert not held
        refused.clear()


class StoreMachine(RuleBasedStateMachine):
    """Any order of calls, closings and readings against a set of batches and numbers."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="opd-samples-"))
        self.known: set[tuple[int, int]] = set()
        self.writer = SampleWriter(self.folder, durable=False)

    @rule(
        numbers=st.sets(st.integers(0, 30), max_size=5),
        batch=st.integers(0, 9),
        gone=st.sets(st.integers(0, 30)),
    )
    def put(self, numbers: set[int], batch: int, gone: set[int]) -> None:
        self.writer.put(items(sorted(numbers)), batch, [f"run/{number}" for number in gone])
        self.known -= {(batch, number) for number in gone}
        self.known |= {(batch, number) for number in numbers}

    @rule(batch=st.integers(0, 9))
    def retire(self, batch: int) -> None:
        self.writer.retire_before(batch)
        self.known = {one for one in self.known if one[0] >= batch}

    @rule()
    def reopen(self) -> None:
        self.writer.close()
        self.writer = SampleWriter(self.folder, durable=False)

    @invariant()
    def readers_agree(self) -> None:
        store = SampleStore.open([self.folder])
        found = list(zip(store.batch.tolist(), assert_right(store), strict=True))
        assert (len(found), set(found)) == (len(self.known), self.known)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.writer.close()
            shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=cases(40), stateful_step_count=20, deadline=None)
