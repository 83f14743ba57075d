"""Atomic files and folders, and the lock: behaviour seen from other processes too."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from sample_data import record, values
from synced import watched

from opd.environments.trajectory import TrajectoryLog
from opd.errors import RunFolderError, from_system
from opd.metrics import FlagsWriter
from opd.models.checkpoint import save_checkpoint
from opd.storage import files
from opd.storage.checkpoints import CheckpointStore
from opd.storage.files import FileLock, atomic_folder, open_plain, write_atomic, write_sealed
from opd.storage.object_store import ObjectStore
from opd.storage.sample_store import SampleWriter
from opd.storage.wal import TokenWAL


def _run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def test_write_atomic_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.json"
    write_atomic(target, b"one")
    write_atomic(target, b"two" * 1000)
    assert target.read_bytes() == b"two" * 1000
    assert os.listdir(target.parent) == ["file.json"]


def test_write_atomic_keeps_the_old_content_when_the_rename_fails(tmp_path: Path) -> None:
    target = tmp_path / "file.json"
    target.mkdir()
    (target / "inside").write_bytes(b"kept")
    with pytest.raises(OSError):  # noqa: PT011 - which subclass depends on the system
        write_atomic(target, b"data")
    assert (target / "inside").read_bytes() == b"kept"
    assert os.listdir(tmp_path) == ["file.json"]


def nested(path: Path) -> None:
    with atomic_folder(path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_bytes(b"x")
        (folder / "file").write_bytes(b"y" * 5000)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: write_atomic(path, b"x" * 5000),
    "a sealed document": lambda path: write_sealed(path, {"x": 1}),
    "a folder": nested,
    "a model": lambda path: save_checkpoint(tiny.model(), tiny.tokenizer(), path, {}),
    "a checkpoint": lambda path: CheckpointStore(path.parent).save(1, {"model": {"w": torch.ones(2)}}, {}),
    "an object": lambda path: ObjectStore.open(path.parent.as_uri()).put(path.name, b"x" * 5000),
}


@pytest.mark.parametrize("what", WRITERS)
def test_what_has_its_name_is_on_the_disk_and_then_its_name_is(tmp_path: Path, monkeypatch, what: str):
    target = tmp_path / "new" / ("step_1" if what == "a checkpoint" else "target")
    told = watched(monkeypatch)
    WRITERS[what](target)
    name = max(i for i, one in enumerate(told) if one.what == "named" and one.inode == target.stat().st_ino)
    for path in [target, *target.rglob("*")]:
        found = path.stat()
        synced = [one.size for one in told[:name] if one.what == "synced" and one.inode == found.st_ino]
        assert synced, f"{path.name} was not synced before it had its name"
        assert path.is_dir() or synced[-1] == found.st_size, path.name
    assert ("synced", target.parent.stat().st_ino) in [one[:2] for one in told[name:]]


def kept_sample(folder: Path) -> None:
    SampleWriter(folder / "store").put([(record(0), values(0))])


KEPT: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a flag": (lambda folder: FlagsWriter(folder).append({"step": 1}), ["flags.jsonl"]),
    "a sample": (kept_sample, [".", "store", "store/*.safetensors"]),
    "files of a command": (
        lambda folder: TrajectoryLog(folder, fsync="always").store.put_bytes(b"x"),
        ["snapshots/objects/*", "snapshots/objects/*/*"],
    ),
    "a new log": (
        lambda folder: TokenWAL(folder / "deep" / "log", fsync="always"),
        [".", "deep", "deep/log", "**/*.wal"],
    ),
}
"""What keeps something in a folder, and what of it is on the disk when that has returned."""


@pytest.mark.parametrize("what", KEPT)
def test_what_is_acknowledged_is_on_the_disk_with_the_folders_that_name_it(tmp_path, monkeypatch, what: str):
    keep, patterns = KEPT[what]
    told = watched(monkeypatch)
    keep(tmp_path)
    synced = {one.inode for one in told if one.what == "synced"}
    for pattern in patterns:
        found = [path for path in tmp_path.glob(pattern) if path.exists()] if pattern != "." else [tmp_path]
        assert found, pattern
        assert [path for path in found if path.stat().st_ino not in synced] == []


def test_atomic_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with atomic_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text("a")
        assert not target.exists()
    assert (target / "sub" / "a.txt").read_text() == "a"
    assert os.listdir(tmp_path) == ["merged"]


def test_atomic_folder_leaves_nothing_after_an_error(tmp_path: Path) -> None:
    def fail_inside() -> None:
        with atomic_folder(tmp_path / "merged") as folder:
            (folder / "a.txt").write_text("a")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["link", "dead link", "file"])
def test_atomic_folder_replaces_what_is_no_folder_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    """Of a link the folder that it leads to stays as it is."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("old")
    target = tmp_path / "model"
    if kind == "file":
        target.write_text("old")
    else:
        target.symlink_to("other" if kind == "link" else "nowhere")
    with atomic_folder(target, replace=True) as folder:
        (folder / "a").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]
    assert not target.is_symlink()
    assert (target / "a").read_text() == "new"
    assert (tmp_path / "other" / "a").read_text() == "old"


def test_atomic_folder_refuses_or_replaces_an_existing_target(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with atomic_folder(target) as folder:
        (folder / "old").write_text("old")
    with pytest.raises(FileExistsError, match="exists already"), atomic_folder(target):
        pass
    with atomic_folder(target, replace=True) as folder:
        (folder / "new").write_text("new")
    assert os.listdir(target) == ["new"]
    assert os.listdir(tmp_path) == ["merged"]


_DIES = """
import os, sys
from opd.storage.files import atomic_folder
with atomic_folder(sys.argv[1]) as folder:
    (folder / "a.txt").write_text("a")
    os.kill(os.getpid(), 9)
"""


def test_a_dead_writers_folder_is_swept_and_a_live_ones_is_not(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    assert _run(_DIES, target).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    with atomic_folder(target) as live:
        assert os.listdir(tmp_path) == [live.name]
        write_atomic(target.with_name("other"), b"x")
        code = "import sys; from opd.storage.files import write_atomic; write_atomic(sys.argv[1], b'theirs')"
        assert _run(code, target).returncode == 0  # sweeps, and finds the live writer's lock
        assert live.exists()
        target.unlink()
    assert sorted(os.listdir(tmp_path)) == ["merged", "other"]


def test_writers_of_one_file_at_once_leave_one_whole_version(tmp_path: Path) -> None:
    target = tmp_path / "file"
    versions = [bytes([65 + i]) * 50_000 for i in range(4)]
    threads = [
        threading.Thread(target=lambda v=v: [write_atomic(target, v) for _ in range(20)]) for v in versions
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not target.exists() or target.read_bytes() in versions
    assert target.read_bytes() in versions
    assert os.listdir(tmp_path) == ["file"]


def test_sweeping_spares_files_of_the_user_with_similar_names(tmp_path: Path) -> None:
    names = [".merged.tmp", ".merged.notes.tmp.txt", ".merged2.0123abcd.tmp", "merged.0123abcd.tmp"]
    for name in names:
        (tmp_path / name).write_text("mine")
    write_atomic(tmp_path / "merged", b"data")
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "merged"])


_TAKES_LOCK = """
import sys
from opd.storage.files import FileLock
from opd.errors import RunFolderError
try:
    with FileLock(sys.argv[1]):
        print("taken")
except RunFolderError as error:
    print(error)
"""


def test_lock_excludes_another_process_and_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    with FileLock(path):
        told = _run(_TAKES_LOCK, path).stdout
        assert f"process {os.getpid()}" in told
        assert str(path.parent) in told
    assert _run(_TAKES_LOCK, path).stdout.strip() == "taken"


def test_lock_excludes_a_second_holder_in_the_same_process(tmp_path: Path) -> None:
    first = FileLock(tmp_path / "lock")
    with first:
        with pytest.raises(RunFolderError, match=str(os.getpid())):
            FileLock(tmp_path / "lock").acquire()
        with pytest.raises(RunFolderError, match="already"):
            first.acquire()
    first.release()  # a second release is harmless
    with FileLock(tmp_path / "lock"):
        pass


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from opd.storage.files import FileLock; "
        "FileLock(sys.argv[1]).acquire(); os.kill(os.getpid(), 9)"
    )
    assert _run(code, tmp_path / "lock").returncode == -9
    with FileLock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("waited", [60.0, 0.2])
def test_what_a_killed_holder_has_forked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: float
) -> None:
    """It has the lock too, until it begins a program of its own or ends; one that stays is refused."""
    monkeypatch.setattr(files, "LINGERS", waited)
    code = (
        "import os, sys, time; from opd.storage.files import FileLock; FileLock(sys.argv[1]).acquire()\n"
        "if os.fork(): os.kill(os.getpid(), 9)\n"
        "time.sleep(3)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")])
    assert killed.wait(60) == -9
    if waited < 3:
        with pytest.raises(RunFolderError, match=f"in use by process {killed.pid}"):
            FileLock(tmp_path / "lock").acquire()
    else:
        FileLock(tmp_path / "lock").refuse_locked()
        with FileLock(tmp_path / "lock"):
            pass


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


NOT_FILES = {
    "a folder": (Path.mkdir, "a folder where"),
    "a pipe": (os.mkfifo, "a pipe or a device"),
    "a socket": (_listen, "a pipe or a device"),
    "a link": (lambda path: path.symlink_to(__file__), "a link, a pipe"),
    "a link to itself": (lambda path: path.symlink_to(path), "a link, a pipe"),
    "a device": (lambda path: path.symlink_to(os.devnull), "a pipe or a device"),
}


@pytest.mark.parametrize("what", NOT_FILES)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_what_is_no_plain_file_is_one_sentence_and_never_waited_for(
    tmp_path: Path, what: str, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    make, said = NOT_FILES[what]
    make(Path("there"))
    with pytest.raises(OSError) as caught:  # noqa: PT011 - what it is called depends on the kind
        open_plain("there", flags, follow=what == "a device")
    sentence = str(from_system(caught.value))
    assert sentence.startswith("there: ")
    assert said in sentence
