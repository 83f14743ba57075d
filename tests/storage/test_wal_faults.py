"""Full disks, forbidden folders, failed syncs, second writers, newer formats, clocks that jump: one sentence
each, and nothing that was acknowledged is lost.
"""

import errno
import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from wal_helpers import UIDS, chunk, request, started, tokens
from watched import wait_until

from opd.errors import OpdError, StorageError
from opd.storage.framed_log import FRAME_BYTES, HEADER_BYTES, FileHeader, LogIO, scan_frames
from opd.storage.wal import TokenWAL, read_log


class FaultyIO(LogIO):
    """Real files; `on_append` and `on_sync` run first and may raise."""

    def __init__(self) -> None:
        self.on_append: Callable[[], None] = lambda: None
        self.on_sync: Callable[[], None] = lambda: None
        self.syncs = 0

    def append(self, file: int, buffers: list) -> None:
        try:
            self.on_append()
        except BaseException:
            super().append(file, [buffers[0][:17]])
            raise
        super().append(file, buffers)

    def sync(self, file: int) -> None:
        self.on_sync()
        self.syncs += 1
        super().sync(file)


def fail(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path):
    io = FaultyIO()
    log = started(tmp_path, 5, io=io, fsync="always")
    io.on_append = fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(StorageError, match="No space left on device") as caught:
        log.append(chunk(5))
    assert "\n" not in str(caught.value)
    io.on_append = lambda: None  # there is room again, and half a frame in the file: still nothing goes on
    for call in (lambda: log.append(chunk(5)), lambda: log.open(request("c"), {}), lambda: log.retire(["a"])):
        with pytest.raises(StorageError, match="takes nothing more"):
            call()
    assert log.find("a").token_ids.tolist() == list(range(100, 105))
    log.shutdown()
    with TokenWAL(tmp_path) as again:
        assert again.recovery.cut_bytes == 17
        again.append(chunk(5))
    assert tokens(tmp_path) == {uid: list(range(100, 106)) for uid in UIDS}


LIMITED = """
import resource, signal, sys
import numpy as np
from opd.errors import StorageError
from opd.storage.wal import TokenWAL
from wal_helpers import started, chunk
log = started(sys.argv[1], 0, fsync="os")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
position = 0
try:
    while True:
        log.append(chunk(position))
        position += 1
except StorageError as error:
    print(position, error)
"""


def test_a_file_that_may_not_grow_ends_the_log_after_what_was_acknowledged(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    count, _, sentence = done.stdout.partition(" ")
    assert "could not be written (File too large)" in sentence
    assert int(count) > 40
    assert tokens(tmp_path) == {uid: list(range(100, 100 + int(count))) for uid in UIDS}
    assert read_log(tmp_path).report.cut_bytes > 0


@pytest.fixture
def open_folder():
    """A folder that every user can reach, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder / "log"
    (folder / "log").chmod(0o755)
    shutil.rmtree(folder)


def test_a_folder_that_may_not_be_written(open_folder):
    started(open_folder, 3).shutdown()
    for path in [*open_folder.iterdir(), open_folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    source, sink = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            if os.geteuid() == 0:  # to whom nothing is forbidden
                os.setuid(65534)
            TokenWAL(open_folder)
            os.write(sink, b"it was opened")
        except OpdError as error:
            os.write(sink, str(error).encode())
        finally:
            os._exit(0)
    os.close(sink)
    os.waitpid(process, 0)
    with os.fdopen(source) as file:
        assert "cannot be opened for writing (Permission denied)" in file.read()
    assert tokens(open_folder) == {uid: [100, 101, 102] for uid in UIDS}


@pytest.mark.parametrize("policy", ["always", "interval"])
def test_after_a_failed_sync_nothing_is_acknowledged(tmp_path, policy):
    io = FaultyIO()
    log = started(tmp_path, 3, io=io, fsync=policy, interval_seconds=0.01)
    log.sync()
    io.on_sync = fail(OSError(errno.EIO, os.strerror(errno.EIO)))
    if policy == "always":
        with pytest.raises(StorageError, match="Input/output error"):
            log.append(chunk(3))
    else:
        log.append(chunk(3))
        wait_until(lambda: not log._guard.is_intact)
        with pytest.raises(StorageError, match="Input/output error"):
            log.retire([])
    io.on_sync = lambda: None
    with pytest.raises(StorageError, match="takes nothing more"):
        log.append(chunk(4))
    log.shutdown()
    assert all(found[:3] == [100, 101, 102] for found in tokens(tmp_path).values())


def test_a_failure_in_the_background_is_told_at_the_latest_by_shutdown(tmp_path):
    io = FaultyIO()
    log = started(tmp_path, 0, io=io, fsync="interval", interval_seconds=0.01)
    log.sync()
    io.on_sync = fail(OSError(errno.EIO, os.strerror(errno.EIO)))
    log.append(chunk(0))
    wait_until(lambda: not log._guard.is_intact)
    with pytest.raises(StorageError, match="Input/output error"):
        log.shutdown()
    log.shutdown()


def test_interval_syncs_by_itself_and_only_when_there_is_something(tmp_path):
    io = FaultyIO()
    log = started(tmp_path, 3, io=io, fsync="interval", interval_seconds=0.01)
    wait_until(lambda: not log._files._segment.is_dirty)
    before = io.syncs
    time.sleep(0.1)
    assert io.syncs == before
    log.shutdown()


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    clock = itertools.cycle([4e9, 0.0, -1e9, 1e300])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    log = started(tmp_path, 40, fsync="interval", interval_seconds=0.01, segment_bytes=600)
    log.shutdown()
    log = TokenWAL(tmp_path)
    log.append(chunk(40))
    log.compact()
    log.shutdown()
    assert tokens(tmp_path) == {uid: list(range(100, 141)) for uid in UIDS}


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path):
    log = started(tmp_path, 4)
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}.*one writer at a time"):
        TokenWAL(tmp_path)
    assert tokens(tmp_path) == {uid: list(range(100, 104)) for uid in UIDS}
    log.append(chunk(4))
    log.shutdown()
    TokenWAL(tmp_path).shutdown()


def test_a_newer_format_is_said_and_left_alone(tmp_path):
    started(tmp_path, 4).shutdown()
    file = tmp_path / "000000000001.wal"
    data = file.read_bytes()
    header = FileHeader.decode(data)
    newer = FileHeader(header.sequence, header.first_lsn, header.log_id, format=3).encode()
    file.write_bytes(newer + data[len(newer) :])
    for call in (
        lambda: TokenWAL(tmp_path),
        lambda: TokenWAL(tmp_path, repair=True),
        lambda: read_log(tmp_path),
    ):
        with pytest.raises(StorageError, match=r"format 3 by a newer version.*format 2; upgrade opd"):
            call()
    assert file.read_bytes()[64:] == data[64:]


@pytest.mark.parametrize("closed", [True, False])
def test_a_log_of_the_format_before_is_read_and_goes_on(tmp_path, closed):
    """Format 1 differs in its frames' checksums, which were CRC-32."""
    log = started(tmp_path, 4, fsync="os")
    if closed:
        log.shutdown()
    file = tmp_path / "000000000001.wal"
    data, frames = bytearray(file.read_bytes()), []
    header = FileHeader.decode(data)
    for frame in scan_frames(memoryview(bytes(data)), HEADER_BYTES, 1, header):
        head = bytearray(data[frame.start : frame.start + FRAME_BYTES])
        payload, salt = bytes(data[frame.start + FRAME_BYTES : frame.end]), crc32(header.log_id)
        struct.pack_into("<I", head, FRAME_BYTES - 8, crc32(payload, salt))
        struct.pack_into("<I", head, FRAME_BYTES - 4, crc32(head[:-4], salt))
        frames += [bytes(head), payload]
    log.shutdown()
    older = FileHeader(1, 1, header.log_id, format=1).encode()
    file.write_bytes(older + b"".join(frames))
    assert len(frames) == 2 * (6 + closed)
    assert tokens(tmp_path) == {uid: list(range(100, 104)) for uid in UIDS}
    with TokenWAL(tmp_path) as again:
        again.append(chunk(4))
        found = read_log(tmp_path)
        assert found.report.damage is None
    assert tokens(tmp_path) == {uid: list(range(100, 105)) for uid in UIDS}
    assert read_log(tmp_path).report.clean


def test_an_interrupted_write_ends_the_log(tmp_path):
    io = FaultyIO()
    log = started(tmp_path, 3, io=io)
    io.on_append = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        log.append(chunk(3))
    io.on_append = lambda: None
    with pytest.raises(StorageError, match="broken off by KeyboardInterrupt"):
        log.append(chunk(3))
    with pytest.raises(RuntimeError), log:
        raise RuntimeError("the caller's own error is not replaced")
    assert tokens(tmp_path) == {uid: [100, 101, 102] for uid in UIDS}


def test_a_signal_handler_cannot_write_in_the_middle_of_a_write(tmp_path):
    io, told = FaultyIO(), []
    log = started(tmp_path, 3, io=io)

    def handler(*_: object) -> None:
        with pytest.raises(StorageError, match="signal handler") as caught:
            log.append(chunk(3))
        told.append(caught.value)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        io.on_append = lambda: signal.raise_signal(signal.SIGUSR2)
        log.append(chunk(3))
    finally:
        io.on_append = lambda: None
        signal.signal(signal.SIGUSR2, before)
    assert len(told) == 1
    log.shutdown()
    assert tokens(tmp_path) == {uid: list(range(100, 104)) for uid in UIDS}


def test_a_forked_child_cannot_write(tmp_path):
    log = started(tmp_path, 3, fsync="os")
    process = os.fork()
    if process == 0:
        try:
            log.append(chunk(3))
        except StorageError as error:
            os._exit(42 if "forked child" in str(error) else 43)
        finally:
            os._exit(44)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 42
    log.append(chunk(3))
    log.shutdown()
