"""Sampling masks in the token log and in samples on disk: with their tokens or not at all."""

import numpy as np
import pytest
from test_samples import items, record, values
from wal_helpers import UIDS, cut_logs, started
from wal_helpers import chunk as chunk_of

from opd.errors import StorageError
from opd.storage import logged_choices, wal
from opd.storage.sample_store import SampleStore, SampleWriter
from opd.storage.transcript import Tokens, masks_of
from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk, LoggedRequest


def mask(position: int, row: int) -> bytes | None:
    """Every third token has none."""
    ids = np.arange(position, position + 3 + row, dtype="<i4") * 7
    return None if position % 3 == 2 else ids.tobytes()


def masked(position: int) -> Chunk:
    chunk = chunk_of(position)
    chunk.sampling_masks = np.empty(len(UIDS), object)
    chunk.sampling_masks[:] = [mask(position, row) for row in range(len(UIDS))]
    return chunk


def due(uid: str, count: int) -> list[bytes | None]:
    return [mask(position, UIDS.index(uid)) for position in range(count)]


def masks_in(logged: LoggedRequest) -> list[bytes | None]:
    return [None] * len(logged.token_ids) if logged.sampling_masks is None else [*logged.sampling_masks]


@pytest.mark.parametrize("largest", [8, 1 << 20])
def test_masks_come_back_also_from_a_snapshot(tmp_path, monkeypatch, largest):
    """A small limit makes several frames of one chunk."""
    monkeypatch.setattr(wal, "_TOKENS_PER_FRAME", 2)
    monkeypatch.setattr(logged_choices, "_LARGEST", largest)
    log = started(tmp_path, 1)  # the first token has no mask
    for position in range(1, 5):
        log.append(masked(position))
    log.compact()
    log.append(masked(5))
    log.append(chunk_of(6))
    for requests in (log.requests(), read_log(tmp_path).requests()):
        for uid in UIDS:
            assert masks_in(requests[uid]) == [None, *due(uid, 6)[1:], None]
            flat = masks_of(Tokens.from_logged(requests[uid]))
            assert flat is not None
            assert flat[7:].tobytes() == b"".join(one for one in due(uid, 6)[1:] if one)
    size = log._table.live_bytes
    log.shutdown()
    with TokenWAL(tmp_path) as log:
        assert log._table.live_bytes == pytest.approx(size, rel=0.05)
        assert size > 7 * 24 * 2 + 100


def test_a_log_without_masks_has_the_bytes_it_had(tmp_path):
    plain, other = started(tmp_path / "a", 3), started(tmp_path / "b", 0)
    for position in range(3):
        chunk = masked(position)
        chunk.sampling_masks = np.full(len(UIDS), None) if position else None
        other.append(chunk)
    plain.shutdown()
    other.shutdown()
    one, two = (
        [len(path.read_bytes()) for path in sorted((tmp_path / name).glob("*.wal"))] for name in ("a", "b")
    )
    assert one == two


def test_a_chunk_cut_anywhere_has_its_masks_or_no_tokens(tmp_path):
    """Also when the next process has drawn the same token again, or another, behind what was left."""
    counts = []
    for same in (True, False):
        for folder in cut_logs(tmp_path / str(same), [masked(0), masked(1)]):
            count = len(read_log(folder).requests()["a"].token_ids)
            counts.append(count)
            with TokenWAL(folder) as log:
                chunk = masked(count)
                if not same:
                    chunk.token_ids, chunk.sampling_masks = chunk.token_ids + 1, None
                log.append(chunk)
            for uid in UIDS:
                found = masks_in(read_log(folder).requests()[uid])
                assert found == (due(uid, count + 1) if same else [*due(uid, count), None])
    assert set(counts) == {1, 2}


@pytest.mark.parametrize("change", ["missing", "fewer", "longer"])
def test_masks_that_are_not_those_of_their_tokens_are_damage(tmp_path, monkeypatch, change):
    encode = wal.encode_masks

    def damaged(payload, masks):
        for data in encode(payload, masks):
            if change == "fewer":
                yield data[:12] + (1).to_bytes(4, "little") + data[16:]
            elif change == "longer":
                yield data[:12] + (1 << 30).to_bytes(4, "little") + data[16:]

    monkeypatch.setattr(wal, "encode_masks", damaged)
    with started(tmp_path, 0) as log:
        log.append(masked(0))
    with pytest.raises(StorageError, match=r"holds what no log does .*sampling masks (for|of)"):
        read_log(tmp_path)


def test_masks_of_samples_come_back_beside_samples_without(tmp_path):
    flat = {n: np.arange(len(values(n)["loss_mask"]) + n, dtype=np.int32) for n in range(4)}
    with SampleWriter(tmp_path, durable=False) as writer:
        given = {n: {"sampling_masks": flat[n]} for n in (1, 3)}
        writer.put([(record(n), values(n) | given.get(n, {})) for n in range(4)])
        writer.put(items([90, 91]))
    store = SampleStore.open([tmp_path])
    for row, number in enumerate([*range(4), 90, 91]):
        with store.lease([row]) as batch:
            stored = batch.get_sample(row).sampling_masks
        assert (stored is not None) == (number in (1, 3))
        assert stored is None or np.array_equal(stored, flat[number])


@pytest.mark.parametrize(
    "array", [np.zeros(0, np.int32), np.zeros(99, np.int64), np.zeros((99, 1), np.int32)]
)
def test_masks_of_another_form_are_refused(tmp_path, array):
    with (
        SampleWriter(tmp_path) as writer,
        pytest.raises(ValueError, match="sampling_masks of sample run/1 is"),
    ):
        writer.put([(record(1), values(1) | {"sampling_masks": array})])
