"""The log of commands and steps, and what is read from it in place of running again."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
from boxes import SMALL

from opd.environments.recorded import RecordedSandbox
from opd.environments.trajectory import Command, LoggedStep, TrajectoryLog, read_trajectories
from opd.errors import StorageError
from opd.sandbox.home import Home
from opd.sandbox.local import Sandboxes
from opd.sandbox.protocol import Limits, Outcome, SandboxError
from opd.sandbox.snapshots import SnapshotStore
from opd.sandbox.substrates import find_substrate

SETTINGS = {"type": "test"}


def shell(line: str, **marks) -> Command:
    return Command(("sh", "-c", line), **marks)


class Life:
    """One process's time with a log: what a kill would end is just dropped, the log is closed."""

    def __init__(self, folder, limits=SMALL):
        self.log = TrajectoryLog(folder / "log")
        self.boxes = Sandboxes(folder / "boxes", self.log.store, limits, substrate=find_substrate())
        self.opened = []
        self.sandbox = RecordedSandbox(self.log, "e", SETTINGS, self._open)

    async def _open(self, state):
        box = self.boxes.open("e")
        self.opened.append(state)
        if state is not None:
            await box.restore(state)
        return box

    def run(self, *commands, turn=0):
        async def steps():
            try:
                return [await self.sandbox.run(command, turn) for command in commands]
            finally:
                await self.sandbox.close()

        return asyncio.run(steps())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.boxes.close()
        self.log.shutdown()


def test_what_ended_is_answered_from_the_log_without_a_sandbox(tmp_path):
    commands = [shell("echo 1 >> f; cat f"), shell("date +%N > now; cat now"), shell("exit 3")]
    with Life(tmp_path) as first:
        before = first.run(*commands)
    with Life(tmp_path) as second:
        assert second.run(*commands) == before
        assert second.opened == []
        (added,) = second.run(shell("echo 2 >> f; cat f now"))
        assert second.opened == [second.sandbox.logged_episode.commands[2].state]
    assert added.stdout == b"1\n2\n" + before[1].stdout


def test_output_of_any_kind_and_size_comes_back(tmp_path):
    commands = [
        Command(("cat",), bytes(range(256))),
        Command(("cat",), b"x" * 50_000),
        Command(("sh", "-c", "echo e >&2"), "ü\n".encode()),
    ]
    from dataclasses import replace

    with Life(tmp_path, replace(SMALL, output=1 << 16)) as life:
        before = life.run(*commands)
    assert [len(one.stdout) for one in before] == [256, 50_000, 0]
    episodes, report = read_trajectories(tmp_path / "log")
    assert [one.outcome for one in episodes["e"].commands] == before
    assert [one.command for one in episodes["e"].commands] == commands
    assert (report.commands, report.clean) == (3, True)


def test_a_command_in_flight_is_reported_and_its_files_are_as_before_it(tmp_path):
    with Life(tmp_path) as life:
        life.run(shell("echo 1 >> f"))
        life.log.log_intent("e", 0, shell("echo 2 >> f"))
    with Life(tmp_path) as life:
        _, cut = life.run(shell("echo 1 >> f"), shell("echo 2 >> f"))
        assert cut == Outcome(None, interrupted=True)
        assert life.run(shell("cat f"))[0].stdout == b"1\n"
    with Life(tmp_path) as life:
        assert life.run(shell("echo 1 >> f"), shell("echo 2 >> f"))[1].interrupted


def test_one_that_is_marked_runs_again_from_the_files_before_it(tmp_path):
    marked = shell("echo 2 >> f; cat f", repeatable=True)
    with Life(tmp_path) as life:
        life.run(shell("echo 1 >> f"))
        life.log.log_intent("e", 0, marked)
    with Life(tmp_path) as life:
        assert life.run(shell("echo 1 >> f"), marked)[1].stdout == b"1\n2\n"
        assert [one.attempts for one in life.sandbox.logged_episode.commands] == [1, 2]


def test_after_deterministic_commands_no_state_is_kept_and_they_run_again(tmp_path):
    marked = [shell(f"echo {n} >> f; cat f", deterministic=True) for n in range(3)]
    with Life(tmp_path) as life:
        life.run(shell("echo start > f"), *marked)
        assert [one.state is None for one in life.sandbox.logged_episode.commands] == [
            False,
            True,
            True,
            True,
        ]
    with Life(tmp_path) as life:
        last = life.run(shell("echo start > f"), *marked, shell("cat f"))[-1]
    assert last.stdout == b"start\n0\n1\n2\n"


@pytest.mark.parametrize("line", ["while :; do cat /dev/zero; done", "date +%N; kill -9 $$"])
def test_after_one_that_was_cut_short_a_state_is_kept_whatever_its_mark(tmp_path, line):
    """How far it came is another matter each time, and no fault of the mark."""
    marked = shell(line, deterministic=True, timeout=0.5)
    with Life(tmp_path) as life:
        (before,) = life.run(marked)
        assert life.sandbox.logged_episode.commands[0].state is not None
    with Life(tmp_path) as life:
        again, last = life.run(marked, shell("echo on"))
    assert (again, last.stdout) == (before, b"on\n")


def test_a_wrong_mark_is_found_out(tmp_path):
    wrong = shell("date +%N%s | tee f", deterministic=True)
    with Life(tmp_path) as life:
        life.run(wrong)
    with Life(tmp_path) as life, pytest.raises(StorageError, match="marked deterministic"):
        life.run(wrong, shell("true"))


def test_another_command_than_before_stops_the_episode(tmp_path):
    with Life(tmp_path) as life:
        life.run(shell("echo 1"))
    with Life(tmp_path) as life, pytest.raises(StorageError, match=r"where it had run sh -c echo 1"):
        life.run(shell("echo 2"))
    with TrajectoryLog(tmp_path / "log") as log, pytest.raises(StorageError, match="other settings"):
        log.begin_episode("e", {"type": "another"})


def test_who_used_up_its_disk_stays_so(tmp_path):
    large = shell("for n in 1 2 3; do head -c 4000000 /dev/zero > $n; done")
    for _ in range(2):
        with Life(tmp_path) as life:
            assert life.run(large)[0].killed_by == "disk"
            with pytest.raises(SandboxError, match="quota"):
                life.run(shell("true"))


def test_episodes_are_forgotten_with_the_files_that_no_other_names(tmp_path):
    with Life(tmp_path) as life:
        life.run(Command(("sh", "-c", "cat > f; cat f"), b"y" * 40_000))
        life.log.begin_episode("other", SETTINGS)
        kept = life.boxes.store
        state = life.sandbox.logged_episode.commands[0].state
        life.log.retire(["other", "unknown"])
        assert len(kept.read_nodes(state, SMALL)) == 1
        life.log.retire(["e"])
        assert not [path for path in (tmp_path / "log/snapshots").rglob("*") if path.is_file()]
        assert life.log.uids() == []
    with TrajectoryLog(tmp_path / "log") as log:
        assert log.uids() == []


@pytest.mark.parametrize("linked", ["", "objects", "objects/{}"])
def test_a_sweep_removes_nothing_behind_a_link(tmp_path, linked):
    """Not where the store's folder is one, one in it, or one of those that files are sorted into."""
    first = SnapshotStore(tmp_path / "elsewhere")
    digest = first.put_bytes(b"somebody's")
    assert first.remove_unreferenced([], [], Limits()) == 0, "nothing names it yet"
    first.release_digests([digest])
    place = linked.format(digest[:2])
    store = tmp_path / "store"
    if place:
        (store / place).parent.mkdir(parents=True)
    (store / place if place else store).symlink_to(tmp_path / "elsewhere" / place)
    assert SnapshotStore(store).get_bytes(digest, 100) == b"somebody's"
    assert SnapshotStore(store).remove_unreferenced([], [], Limits()) == 0
    assert first.get_bytes(digest, 100) == b"somebody's"
    assert first.remove_unreferenced([], [], Limits()) == 1
    with pytest.raises(StorageError, match="is missing"):
        first.get_bytes(digest, 100)


def test_records_keep_their_order_over_a_rewrite(tmp_path):
    def orders(log):
        return {
            uid: ([(c.order, c.ended) for c in e.commands], [s.order for s in e.steps])
            for uid in log.uids()
            if (e := log.find(uid))
        }

    with TrajectoryLog(tmp_path / "log", segment_bytes=512) as log:
        for uid in ("a", "b", "gone"):
            log.begin_episode(uid, SETTINGS)
        for number in range(3):
            for uid in ("a", "b", "gone"):
                log.log_intent(uid, number, shell(f"echo {number}"))
            for uid in ("b", "a", "gone"):
                log.log_result(uid, number, Outcome(0, b"\xff\n", files_changed=("a\udcff",)), None)
                log.log_step(uid, LoggedStep(number, 0, "0" * 64, [{"role": "tool"}], 0.5, False, {"n": 1}))
        before = orders(log)
        log._gone = 1000
        log.retire(["gone"])
        assert orders(log) == {uid: before[uid] for uid in ("a", "b")}
    with TrajectoryLog(tmp_path / "log") as log:
        assert orders(log) == {uid: before[uid] for uid in ("a", "b")}
        every = sorted(n for commands, steps in orders(log).values() for n in [*sum(commands, ()), *steps])
        assert len(set(every)) == len(every) == 18
        log.log_intent("a", 3, shell("more"))
        assert log.find("a").commands[-1].order > every[-1]


def test_another_log_adopts_episodes_whole(tmp_path):
    long = b"y" * 40_000
    with TrajectoryLog(tmp_path / "log") as log, TrajectoryLog(tmp_path / "kept") as kept:
        for n in range(3):
            log.begin_episode(f"e{n}", {"n": n})
            log.log_intent(f"e{n}", 0, Command(("cat", str(n)), stdin=b"x" * 40_000))
            log.log_result(f"e{n}", 0, Outcome(0, long, b"", None, ("f",)), "0" * 64)
            log.log_step(f"e{n}", LoggedStep(0, 0, "abc", "said", 1.0, True, {"k": n}))
        known = {uid: log.find(uid) for uid in log.uids()}
        for uid in ("e0", "e1", "e2", "e1"):  # one that is written again takes its own place
            kept.adopt_episode(known[uid])
        kept.retire(["e0"])
        log.retire(list(known))
    found, report = read_trajectories(tmp_path / "kept")
    assert report.damage is None
    assert list(found) == ["e2", "e1"]
    for uid, episode in found.items():
        (command,), (before,) = episode.commands, known[uid].commands
        assert command.command == before.command
        assert (command.outcome, command.state) == (before.outcome, before.state)
        assert [step.info for step in episode.steps] == [step.info for step in known[uid].steps]


def test_a_record_that_makes_no_sense_is_refused_with_its_file(tmp_path):
    from opd.environments.trajectory import RecordKind, _encode_record

    for number, (kind, record) in enumerate(
        [
            (RecordKind.INTENT, {"uid": "nobody"}),
            (RecordKind.EPISODE, {"uid": "e"}),
            (RecordKind.EPISODE, {"uid": 3, "settings": {}, "order": 0}),
            (RecordKind.EPISODE, {"uid": "e", "settings": {}, "order": -1}),
            (9, {"uid": "e"}),
        ]
    ):
        folder = tmp_path / str(number)
        with TrajectoryLog(folder) as log:
            log._files.append(kind, _encode_record(record))
        with pytest.raises(StorageError, match="restore the file"):
            TrajectoryLog(folder)


@pytest.mark.parametrize("timeout", [None, 0.25, 3, 10**9, -1, -0.5, "9", [9], True, {"s": 1}])
def test_the_timeout_of_a_logged_command_is_a_number_of_seconds(tmp_path, timeout):
    from opd.environments.trajectory import LoggedCommand, RecordKind, _encode_record

    command = Command(("true",), timeout=timeout)
    with TrajectoryLog(tmp_path / "log") as log:
        log.begin_episode("e", SETTINGS)
        record = {**log._intent_record("e", LoggedCommand(0, 0, 0, command)), "order": 1}
        log._files.append(RecordKind.INTENT, _encode_record(record))
    if timeout is None or (type(timeout) in (int, float) and timeout > 0):
        with TrajectoryLog(tmp_path / "log") as log:
            found = log.find("e")
        assert found is not None
        assert found.commands[0].command == command
    else:
        with pytest.raises(StorageError, match="are no seconds"):
            TrajectoryLog(tmp_path / "log")


def test_damage_is_told_and_the_log_not_written_to(tmp_path):
    with TrajectoryLog(tmp_path / "log") as log:
        for number in range(20):
            log.begin_episode(f"e{number}", SETTINGS)
    file = next((tmp_path / "log").glob("*.wal"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert read_trajectories(tmp_path / "log")[1].damage
    with pytest.raises(StorageError, match="begin again"):
        TrajectoryLog(tmp_path / "log")


@pytest.mark.parametrize(
    ("path", "node"),
    [
        ("../out", ["file", 420, 1, "0" * 64]),
        ("/out", ["file", 420, 1, "0" * 64]),
        ("a/../../out", ["link", 511, 0, "x"]),
        ("a\0b", ["folder", 448, 0, ""]),
        ("x" * 300, ["folder", 448, 0, ""]),
        ("link/out", ["file", 420, 1, "0" * 64]),
        ("f", ["device", 420, 0, ""]),
        ("f", ["file", 0o4755, 1, "0" * 64]),
        ("f", ["file", 420, 1 << 40, "0" * 64]),
        ("f", ["file", 420, 1, "../../secret"]),
        ("f", ["file", 420, 1]),
        ("f", ["link", 511, 0, "a\0b"]),
        ("f", "file"),
    ],
)
def test_a_state_that_somebody_else_made_changes_nothing(tmp_path, path, node):
    import hashlib

    document = {"version": 1, "nodes": {"link": ["link", 511, 0, str(tmp_path)], path: node}}
    data = json.dumps(document).encode()
    digest = hashlib.sha256(data).hexdigest()
    place = tmp_path / "log/snapshots/manifests" / digest[:2] / digest
    place.parent.mkdir(parents=True)
    place.write_bytes(data)
    with Life(tmp_path) as life:
        box = life.boxes.open("other")

        async def steps():
            await box.write("own", b"kept")
            with pytest.raises(StorageError):
                await box.restore(digest)
            assert await box.read("own") == b"kept"
            await box.close()

        asyncio.run(steps())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", ["half", "fifo", "symlink", "folder"])
@pytest.mark.parametrize("kind", ["objects", "manifests"])
def test_what_is_no_whole_file_of_a_state_is_neither_waited_for_nor_followed(tmp_path, make, kind):
    store, content = SnapshotStore(tmp_path / "store"), b"bytes"
    (tmp_path / "home").mkdir()
    (tmp_path / "home/f").write_bytes(content)
    home = Home(tmp_path / "home", Limits())
    digest = store.store_snapshot(home, home.scan_nodes())
    (found,) = (tmp_path / "store" / kind).glob("??/*")
    found.replace(tmp_path / "elsewhere")
    if make == "half":  # which a power cut leaves
        found.write_bytes((tmp_path / "elsewhere").read_bytes()[:-1])
    elif make == "fifo":
        os.mkfifo(found)
    elif make == "symlink":
        found.symlink_to(tmp_path / "elsewhere")
    else:
        found.mkdir()
    with pytest.raises(StorageError, match="begin the episode again"):
        store.restore(digest, home, Limits())
    assert home.read("f", 100) == content
    if make != "folder":
        assert store.store_snapshot(home, home.scan_nodes()) == digest  # in its place
        assert store.restore(digest, home, Limits()).keys() == {"f"}


@pytest.mark.parametrize(("age", "remembered"), [(0, 0), (10**12, 1)])
def test_only_the_digest_of_a_file_that_has_settled_is_remembered(tmp_path, monkeypatch, age, remembered):
    """A clock of the file system is coarse: one just written may change again at the same time."""
    home = Home(tmp_path, Limits())
    home.write("f", b"x")
    now = (tmp_path / "f").stat().st_ctime_ns + age
    monkeypatch.setattr("opd.sandbox.home.time", SimpleNamespace(time_ns=lambda: now))
    home.scan_nodes()
    assert len(home._digests) == remembered


@pytest.mark.parametrize(
    ("less", "told"), [({"files": 4}, "more than 4 files"), ({"disk": 29}, "30 bytes where 29 are allowed")]
)
def test_a_quota_is_of_all_folders_together(tmp_path, less, told):
    home = Home(tmp_path, Limits(files=5, disk=30))
    for name in ("a", "b/c", "b/d/e"):
        home.write(name, b"0123456789")
    assert len(home.scan_nodes()) == 5
    with pytest.raises(SandboxError, match=told):
        Home(tmp_path, Limits(**less)).scan_nodes()
