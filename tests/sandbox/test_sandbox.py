"""Commands, files and states of a sandbox, in each substrate that works here."""

import asyncio
import logging
import os
import resource
import subprocess
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from boxes import SMALL, gone, named, opened, running

from opd import lockdown
from opd.errors import StorageError
from opd.sandbox import warden
from opd.sandbox.protocol import HomeEntry, SandboxError
from opd.sandbox.substrates import find_substrate


async def test_a_command_has_input_output_status_and_says_which_files_it_changed(tmp_path, substrate):
    async with opened(tmp_path, substrate) as box:
        first = await box.exec(["sh", "-c", "cat; echo no >&2; mkdir a; echo 1 > a/b; exit 3"], b"given")
        second = await box.exec(["sh", "-c", "rm a/b; ln -s a c; cat /dev/null"])
        entries = await box.list()
        missing = await box.exec(["no-such-program"])
    assert (first.exit, first.stdout, first.stderr) == (3, b"given", b"no\n")
    assert first.files_changed == ("a", "a/b")
    assert (second.exit, second.files_changed) == (0, ("a/b", "c"))
    assert entries == [HomeEntry("a", "folder", entries[0].size), HomeEntry("c", "link", 1)]
    assert (missing.exit, missing.killed_by) == (127, None)
    assert b"no-such-program" in missing.stderr


async def test_python_runs_with_its_library_and_without_this_project(tmp_path, substrate):
    async with opened(tmp_path, substrate) as box:
        code = "import json, sqlite3, statistics; print(json.dumps(statistics.median([1, 2, 9])))"
        found = await box.exec(["python3", "-c", code])
        own = await box.exec(["python3", "-c", "import opd.types"])
    assert (found.stdout, found.exit) == (b"2\n", 0)
    assert own.exit == 1


async def test_no_variable_of_this_process_reaches_a_command(tmp_path, substrate, monkeypatch):
    monkeypatch.setenv("OPD_TEST_SECRET", "hf_do_not_tell")

    known = {b"PATH", b"HOME", b"TMPDIR", b"LANG", b"PYTHONDONTWRITEBYTECODE", b"PYTHONHASHSEED"}
    if substrate.container:  # the engine's and the shell's own
        known |= {b"container", b"HOSTNAME", b"TERM", b"PWD", b"SHLVL"}
    async with opened(tmp_path, substrate) as box:
        found = await box.exec(["env"])
    assert {line.split(b"=")[0] for line in found.stdout.splitlines()} == known


async def test_files_are_written_read_and_listed(tmp_path, substrate):
    async with opened(tmp_path, substrate) as box:
        await box.write("data/in.txt", b"five\n")
        counted = await box.exec(["wc", "-c", "data/in.txt"])
        await box.exec(["sh", "-c", "echo more >> data/in.txt"])
        await box.write("data/in.txt", b"other")
        data = await box.read("data/in.txt")
        start = await box.read("data/in.txt", 2)
    assert counted.stdout.split()[0] == b"5"
    assert (data, start) == (b"other", b"ot")


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b", "a/" * 70 + "b"]
)
async def test_a_path_that_leaves_the_home_is_refused(tmp_path, path):
    async with opened(tmp_path, find_substrate()) as box:
        with pytest.raises(SandboxError):
            await box.read(path)
        with pytest.raises(SandboxError):
            await box.write(path, b"x")


async def test_a_state_comes_back_with_its_files_links_and_modes(tmp_path, substrate):
    made = (
        "mkdir -p d/e; printf 1 > d/e/f; printf same > g; printf same > h; ln -s /etc/passwd l;"
        " umask 077; mkdir own; printf '#!/bin/sh\\necho ran' > own/run"
    )

    async with opened(tmp_path, substrate) as box:
        empty = await box.snapshot()
        await box.exec(["sh", "-c", made])
        full = await box.snapshot()
        await box.exec(["sh", "-c", "rm -r d l own; printf other > g; mkdir h2"])
        await box.restore(full)
        again = await box.snapshot()
        told = await box.exec(["sh", "-c", "cat d/e/f g h; readlink l; stat -c %a own own/run"])
        await box.restore(empty)
        left = await box.list()
    assert full == again
    assert told.stdout == b"1samesame/etc/passwd\n700\n600\n"
    assert left == []
    assert len(list((tmp_path / "store/objects").glob("*/*"))) == 3, "the same bytes are kept once"


async def test_what_is_unknown_or_damaged_restores_nothing(tmp_path, substrate):
    async with opened(tmp_path, substrate) as box:
        await box.write("a", b"first")
        digest = await box.snapshot()
        await box.write("a", b"second")
        object_file = next((tmp_path / "store/objects").glob("*/*"))
        object_file.write_bytes(b"fir\0t")
        with pytest.raises(StorageError, match="damaged"):
            await box.restore(digest)
        object_file.unlink()
        with pytest.raises(StorageError, match="missing"):
            await box.restore(digest)
        for wrong in ("0" * 64, "../../etc/passwd", ""):
            with pytest.raises(StorageError):
                await box.restore(wrong)
        data = await box.read("a")
        left = [path.name for path in (tmp_path / "boxes/one").iterdir()]
    assert data == b"second"
    assert sorted(left) == ["home", "tmp"]


async def test_who_is_cancelled_ends_the_command(tmp_path, substrate):
    mark = f"mark-{uuid.uuid4().hex}"

    async with opened(tmp_path, substrate) as box:
        task = asyncio.create_task(box.exec(["python3", "-c", "import time; time.sleep(900)", mark]))
        while not running(mark):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gone(mark)
        found = await box.exec(["echo", "on"])
    assert found.stdout == b"on\n"


async def test_other_sandboxes_go_on_while_one_waits(tmp_path, substrate):
    """A command that ends only once another sandbox's command has run."""

    async with opened(tmp_path / "a", substrate) as slow, opened(tmp_path / "b", substrate) as fast:
        waiting = asyncio.create_task(slow.exec(["sh", "-c", "while [ ! -e go ]; do sleep 0.05; done"]))
        assert (await fast.exec(["echo", "quick"])).stdout == b"quick\n"
        assert not waiting.done()
        (tmp_path / "a/boxes/one/home/go").touch()
        found = await waiting
    assert found.exit == 0


KILLED = """
import asyncio, sys
from pathlib import Path
from boxes import found, opened

async def steps():
    async with opened(Path(sys.argv[1]), found(sys.argv[2])) as box:
        code = "import os, sys, time\\nif os.fork() == 0: os.setsid()\\nprint(1); time.sleep(900)"
        await box.exec(["python3", "-c", code, "in", sys.argv[3]])

asyncio.run(steps())
"""


@pytest.mark.some(1)
def test_commands_end_with_the_process_that_runs_them(tmp_path, substrate):
    mark = f"mark-{uuid.uuid4().hex}"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), named(substrate), mark])
    beside = 2 if substrate.container else 0  # the engine's client and the container's shell
    try:
        while len([pid for pid in running(f"in\0{mark}")]) < 2 + beside:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert gone(mark)


def test_without_bubblewrap_one_warning_says_what_is_not_kept_apart(caplog, monkeypatch):
    monkeypatch.setattr("opd.sandbox.isolation.bubblewrap_path", lambda: None)
    monkeypatch.setattr(lockdown, "landlock_version", lambda: 0)
    find_substrate.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            found = find_substrate()
            find_substrate()
        with pytest.raises(SandboxError, match="bubblewrap"):
            find_substrate("bubblewrap")
    finally:
        find_substrate.cache_clear()
    assert found.kind == "process"
    assert found.keeps["network"]
    assert not found.keeps["reading"]
    (said,) = caplog.messages
    assert ", ".join(found.allowed_attempts) in said


async def test_time_is_up_and_the_sandbox_goes_on(tmp_path, substrate):
    async with opened(tmp_path, substrate) as box:
        slept = await box.exec(["sh", "-c", "echo before; sleep 900"], timeout=0.5)
        after = await box.exec(["echo", "after"])
    assert (slept.killed_by, slept.exit, after.stdout) == ("wall", None, b"after\n")


@pytest.mark.some(1)
async def test_no_command_is_given_more_time_than_its_sandbox_has(tmp_path, substrate):
    async with opened(tmp_path, substrate, replace(SMALL, seconds=0.5)) as box:
        found = await box.exec(["sleep", "20"], timeout=900.0)
    assert found.killed_by == "wall"


@pytest.mark.some(1)
async def test_processor_time_is_a_quota_of_its_own(tmp_path, substrate):
    async with opened(tmp_path, substrate, replace(SMALL, cpu_seconds=1)) as box:
        found = await box.exec(["sh", "-c", "while :; do :; done"])
    assert found.exit == (137 if substrate.container else -9)


def test_folders_that_are_named_can_be_read_and_not_written(tmp_path, substrate):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/table.csv").write_text("a,b\n")
    place = tmp_path / "shared"

    async def steps():
        from opd.sandbox.local import Sandboxes
        from opd.sandbox.snapshots import SnapshotStore

        store = SnapshotStore(tmp_path / "store")
        boxes = Sandboxes(tmp_path / "boxes", store, SMALL, substrate=substrate, reads=[str(place)])
        box = boxes.open("one")
        try:
            return await box.exec(["sh", "-c", f"cat {place}/table.csv; echo x > {place}/new"])
        finally:
            await box.close()
            boxes.close()

    outcome = asyncio.run(steps())
    assert outcome.stdout == b"a,b\n"
    assert outcome.exit != 0
    assert os.listdir(place) == ["table.csv"]


QUOTA = {"kind": "process", "disk": 4 << 20, "files": 1000, "processes": 9, "memory": 1 << 30}


def as_nobody(call) -> int:
    """The status with which `call` ends in a process without root's rights, and with few open files."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os._exit(call())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("hidden", ["names alone", "deep"])
def test_no_folder_hides_files_from_the_quota(hidden):
    def count() -> int:
        place = home
        for _ in range(150 if hidden == "deep" else 1):
            place = place / "d"
            place.mkdir()
        (place / "large").write_bytes(bytes(8 << 20))
        if hidden == "names alone":
            place.chmod(0o400)
        return int(warden.CommandUsage(QUOTA | {"filled": [str(home)]})._too_much())

    with tempfile.TemporaryDirectory() as folder:  # which nobody can reach
        os.chmod(folder, 0o777)
        home = Path(folder)
        assert as_nobody(count) == 1
