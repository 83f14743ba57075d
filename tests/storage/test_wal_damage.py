"""Every byte of a log flipped, and every file cut at every byte: noticed, and a valid prefix comes back."""

import random
from pathlib import Path

import pytest
from full import FULL
from log_model import LogModel, random_call, state_of
from simulated_disk import SimulatedDisk

from opd.errors import StorageError
from opd.storage.wal import LogContents, TokenWAL, read_log

FOLDER = Path("log")


def write_log(calls: int, *, close: bool, compact: bool = False) -> tuple[dict[str, bytes], list[tuple]]:
    """(the files, the state after each call) of a log in several segments."""
    rng, model, disk = random.Random(5), LogModel(), SimulatedDisk()
    log = TokenWAL(FOLDER, fsync="always" if close else "os", segment_bytes=600, io=disk)
    history = [model.state()]
    for serial in range(calls):
        name, arguments = random_call(model, rng, serial)
        if name != "retire":
            getattr(model, name)(*arguments)
            getattr(log, name)(*arguments)
            history.append(model.state())
        if compact and serial == calls // 2:
            log.compact()
    if close:
        log.shutdown()
    return {name: bytes(file.data) for name, file in disk.names_now.items()}, history


def read(files: dict[str, bytes]) -> LogContents:
    return read_log(FOLDER, io=SimulatedDisk(files))


def flipped(files: dict[str, bytes], name: str, at: int, mask: int) -> dict[str, bytes]:
    data = bytearray(files[name])
    data[at] ^= mask
    return {**files, name: bytes(data)}


def damage_offset(contents: LogContents, name: str) -> int:
    report = contents.report
    if report.damage is None:
        assert report.cut_file == name
        return report.cut_offset
    assert name in report.damage
    return int(report.damage.partition(" at byte ")[2].partition(":")[0])


def test_a_whole_log_is_read_whole():
    files, history = write_log(24, close=True)
    contents = read(files)
    assert len(files) >= 3
    assert state_of(contents.requests()) == history[-1]
    assert contents.report.clean
    assert contents.report.damage is None
    assert contents.report.cut_bytes == 0


def test_every_flipped_byte_is_noticed_and_cuts_the_log_before_it():
    files, history = write_log(24, close=True)
    last = max(files)
    for name, data in files.items():
        for at in range(0, len(data), 1 if FULL else 7):
            contents = read(flipped(files, name, at, 1 << at % 8))
            assert not contents.report.clean
            assert damage_offset(contents, name) <= at
            assert state_of(contents.requests()) in history
            if name != last or at < len(data) - 40:  # only the mark of the end itself may look like a crash
                assert contents.report.damage is not None, (name, at)


@pytest.mark.slow
def test_every_flipped_byte_of_a_log_that_was_not_closed_is_noticed():
    files, history = write_log(24, close=False)
    for name, data in files.items():
        for at in range(len(data)):
            contents = read(flipped(files, name, at, 0xFF))
            assert damage_offset(contents, name) <= at
            assert state_of(contents.requests()) in history


@pytest.mark.slow
def test_a_file_cut_at_any_byte_is_noticed():
    files, history = write_log(24, close=True)
    last = max(files)
    for name, data in files.items():
        for length in range(len(data)):
            contents = read({**files, name: data[:length]})
            assert not contents.report.clean
            assert (contents.report.damage is not None) >= (name != last)
            assert state_of(contents.requests()) in history


@pytest.mark.slow
def test_a_snapshot_flipped_or_cut_anywhere_is_noticed():
    files, history = write_log(40, close=True, compact=True)
    name = next(name for name in files if name.endswith(".snapshot"))
    final = {entry[0]: entry for entry in history[-1]}
    variants = [flipped(files, name, at, 0x04) for at in range(len(files[name]))]
    variants += [{**files, name: files[name][:length]} for length in range(0, len(files[name]), 3)]
    for variant in variants:
        contents = read(variant)
        assert contents.report.damage is not None
        for uid, logged in contents.requests().items():
            assert final[uid][5].startswith(logged.token_ids.tobytes())


def test_a_missing_file_is_noticed():
    files, history = write_log(24, close=True)
    for name in sorted(files)[:-1]:
        contents = read({other: data for other, data in files.items() if other != name})
        assert "is missing" in (contents.report.damage or "")
        assert state_of(contents.requests()) in history


def test_a_file_of_another_log_is_noticed():
    files, _ = write_log(24, close=True)
    others, _ = write_log(24, close=True)
    second = sorted(files)[1]
    assert "another log" in (read({**files, second: others[second]}).report.damage or "")


def test_a_writer_refuses_a_damaged_log_and_mends_it_when_told():
    files, history = write_log(24, close=True)
    first = min(files)
    for at in range(0, len(files[first]), 29):
        disk = SimulatedDisk(flipped(files, first, at, 0xFF))
        with pytest.raises(StorageError, match=r"at byte \d+: .*`opd wal repair log`"):
            TokenWAL(FOLDER, io=disk)
        log = TokenWAL(FOLDER, repair=True, io=disk)
        kept = state_of(log.requests())
        assert kept in history
        log.shutdown()
        assert sum(name.endswith(".damaged") for name in disk.names_now) == len(files)
        again = TokenWAL(FOLDER, io=disk)
        assert state_of(again.requests()) == kept
        again.shutdown()
