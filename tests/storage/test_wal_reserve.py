"""Zeros put ahead of the frames of a log that waits for the disk: never read as anything, and given back."""

import errno
import os
from pathlib import Path

from wal_helpers import UIDS, chunk, request, started, tokens

from opd.storage.framed_log import LogIO
from opd.storage.framed_log_writer import RESERVE
from opd.storage.wal import TokenWAL, read_log
from opd.types import Status


class CountingIO(LogIO):
    """Real files that count what is asked of the system."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.appends, self.reserves = full, 0, 0

    def append(self, file: int, buffers: list) -> None:
        self.appends += 1
        super().append(file, buffers)

    def reserve(self, file: int, start: int, count: int) -> None:
        self.reserves += 1
        if self.full:
            super().reserve(file, start, count // 3)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(file, start, count)


def size_of(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.glob("*.wal"))


def test_a_log_that_waits_for_the_disk_reserves_ahead_and_gives_back_what_is_left(tmp_path):
    log = started(tmp_path, 5, fsync="always")
    assert size_of(tmp_path) > RESERVE
    report = read_log(tmp_path).report
    assert (report.cut_bytes, report.damage, report.clean) == (0, None, False)
    size = log.stored_bytes
    assert size < 1000
    log.shutdown()
    assert size_of(tmp_path) == size + 40  # the mark of the end
    assert read_log(tmp_path).report.clean
    assert tokens(tmp_path) == {uid: list(range(100, 105)) for uid in UIDS}


def test_other_policies_reserve_nothing(tmp_path):
    for policy in ("interval", "os"):
        log = started(tmp_path / policy, 5, fsync=policy)
        assert size_of(tmp_path / policy) == log.stored_bytes
        log.shutdown()


def test_a_writer_that_died_leaves_zeros_and_the_next_one_goes_on(tmp_path):
    process = os.fork()
    if process == 0:
        started(tmp_path, 5, fsync="always")
        os._exit(0)
    os.waitpid(process, 0)
    assert size_of(tmp_path) > RESERVE
    with TokenWAL(tmp_path, fsync="always") as log:
        assert (log.recovery.cut_bytes, log.recovery.damage) == (0, None)
        log.append(chunk(5))
    assert tokens(tmp_path) == {uid: list(range(100, 106)) for uid in UIDS}


def test_zeros_after_the_mark_of_the_end_are_no_damage(tmp_path):
    started(tmp_path, 5, fsync="always").shutdown()
    with next(tmp_path.glob("*.wal")).open("ab") as file:
        file.write(bytes(5000))
    report = read_log(tmp_path).report
    assert (report.clean, report.damage, report.cut_bytes) == (True, None, 0)


def test_without_room_to_reserve_the_file_just_grows(tmp_path):
    io = CountingIO(full=True)
    log = started(tmp_path, 20, fsync="always", io=io)
    assert io.reserves == 1
    log.shutdown()
    assert tokens(tmp_path) == {uid: list(range(100, 120)) for uid in UIDS}
    assert read_log(tmp_path).report.clean


def test_segments_stay_within_their_size(tmp_path):
    log = started(tmp_path, 40, fsync="always", segment_bytes=700)
    files = sorted(tmp_path.glob("*.wal"))
    assert len(files) > 3
    assert all(path.stat().st_size <= 700 for path in files)
    log.shutdown()
    assert tokens(tmp_path) == {uid: list(range(100, 140)) for uid in UIDS}


def test_a_batch_is_opened_in_one_write_and_a_chunk_is_one(tmp_path):
    io = CountingIO()
    log = TokenWAL(tmp_path, fsync="always", io=io)
    before = io.appends
    log.open_many([(request(f"{i}"), {"number": i}) for i in range(300)])
    assert io.appends - before == 1
    log.append(chunk(0, [f"{i}" for i in range(300)]))
    assert io.appends - before == 2
    log.retire([f"{i}" for i in range(300)])
    assert log.uids() == []
    log.open(request("0"), {})  # a retired uid is free again, and begins at position 0
    log.append(chunk(0, ["0"]))
    log.close("0", Status.FAILED, "enough")
    log.shutdown()
    assert tokens(tmp_path) == {"0": [100]}


def test_a_batch_that_does_not_fit_into_one_segment_takes_several(tmp_path):
    log = TokenWAL(tmp_path, fsync="os", segment_bytes=1200)
    log.open_many([(request(f"{i}"), {}) for i in range(50)])
    log.shutdown()
    assert len(list(tmp_path.glob("*.wal"))) > 5
    assert all(path.stat().st_size <= 1200 + 40 for path in tmp_path.glob("*.wal"))
    assert read_log(tmp_path).uids() == [f"{i}" for i in range(50)]


class CutMeanwhileIO(LogIO):
    """Lets the writer close the log, which gives back what it reserved, as soon as a reader has a file."""

    def __init__(self, log: TokenWAL) -> None:
        self._log = log

    def read(self, path: Path) -> memoryview:
        return self._closing(super().read(path))

    def map_file(self, path: Path) -> memoryview:
        return self._closing(super().map_file(path))

    def _closing(self, data: memoryview) -> memoryview:
        self._log.shutdown()
        return data


def test_a_reader_survives_that_the_writer_gives_back_what_it_reserved(tmp_path):
    process = os.fork()  # bytes that are gone from under a map would end this process
    if process == 0:
        log = started(tmp_path, 5, fsync="always")
        held = read_log(tmp_path, io=CutMeanwhileIO(log))
        os._exit(0 if (held.report.damage, held.report.tokens) == (None, 10) else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert tokens(tmp_path) == {uid: list(range(100, 105)) for uid in UIDS}


class LookingIO(LogIO):
    """Shows a file once with a byte that its writer has not written yet, then as it is."""

    def __init__(self, at: int) -> None:
        self.at: int | None = at

    def read(self, path: Path) -> memoryview:
        data = bytearray(super().read(path))
        if self.at is not None:
            data[self.at], self.at = 0, None
        return memoryview(data)


def test_a_frame_that_becomes_whole_while_it_is_read_is_no_damage(tmp_path):
    log = started(tmp_path, 5, fsync="always")
    last_but_one = log.stored_bytes - 2 * (40 + 2 * 24)
    looked = read_log(tmp_path, io=LookingIO(last_but_one)).report  # the frame after it says it was durable
    assert (looked.damage, looked.tokens) == (None, 10)
    log.shutdown()
