"""The checkpoint store: retention, damage, and `kill -9` in the middle of a save."""

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full import FULL, cases

from opd.errors import CheckpointError
from opd.storage.checkpoints import CheckpointStore


def _save(store: CheckpointStore, step: int) -> None:
    tensors = {"model": {"w": torch.full((4, 3), float(step))}, "optimizer": {"m": torch.arange(step)}}
    store.save(step, tensors, {"step": step, "cursor": {"sort": step * 64}})


def test_latest_gives_back_tensors_and_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    _save(store, 20)
    _save(store, 100)
    latest = CheckpointStore(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert latest.step == 100
    assert latest.state == {"step": 100, "cursor": {"sort": 6400}}
    assert torch.equal(latest.load("model")["w"], torch.full((4, 3), 100.0))
    assert torch.equal(latest.load("optimizer")["m"], torch.arange(100))
    with pytest.raises(CheckpointError, match="no tensors 'scheduler'; it has model, optimizer"):
        latest.load("scheduler")


def test_only_the_newest_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (8, 9, 10, 100):
        _save(store, step)
    assert sorted(os.listdir(tmp_path)) == ["step_10", "step_100"]
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore(tmp_path, keep=0)


def test_saving_a_step_again_replaces_it_and_drops_the_abandoned_future(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        _save(store, step)
    store.save(2, {"model": {"w": torch.zeros(1)}}, {"again": True})
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state) == (2, {"again": True})
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2"]


@pytest.mark.parametrize("victim", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, victim: str, damage: str, caplog) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    _save(store, 2)
    path = tmp_path / "step_2" / victim
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:3] + bytes([data[3] ^ 0xFF]) + data[4:])
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    if (victim, damage) == ("manifest.json", "remove"):
        assert caplog.messages == []  # incomplete, not corrupt
    else:
        assert len(caplog.messages) == 1
        assert "step_2" in caplog.messages[0]
        assert victim in caplog.messages[0]


def test_tensors_changed_after_latest_are_refused_at_load(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    latest = store.latest()
    assert latest is not None
    (tmp_path / "step_1" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="corrupt"):
        latest.load("model")


def test_state_that_is_not_json_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    for state in ({"tensor": torch.zeros(1)}, {"loss": float("nan")}):
        with pytest.raises(CheckpointError, match="not JSON"):
            store.save(2, {}, state)
    assert os.listdir(tmp_path) == ["step_1"]


def test_file_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot name"):
        CheckpointStore(tmp_path).save(1, {"../model": {}}, {})


# One process loads torch once; for every line on stdin (seconds, steps) it forks a saver, kills it that long
# after it acknowledged so many steps, and prints the last step it had acknowledged.
_KILLS_SAVERS = """
import os, signal, sys, time, torch
from opd.storage.checkpoints import CheckpointStore
import opd.storage.tensors

def save_for_ever(acknowledge):
    store = CheckpointStore(sys.argv[1], keep=2)
    latest = store.latest()
    step = latest.step if latest else 0
    os.write(acknowledge, b"ready\\n")
    while True:
        step += 1
        tensors = {name: {"w": torch.full((20_000,), float(step))} for name in ("model", "optimizer")}
        store.save(step, tensors, {"step": step})
        os.write(acknowledge, b"%d\\n" % step)

for line in sys.stdin:
    seconds, count = line.split()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as acknowledged:
        assert acknowledged.readline() == "ready\\n"
        steps = [int(acknowledged.readline()) for _ in range(int(count))]
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)
        steps += [int(step) for step in acknowledged]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    print(steps[-1] if steps else 0, flush=True)
"""


def test_kill_9_in_the_middle_of_a_save_loses_nothing_acknowledged(tmp_path: Path, caplog) -> None:
    # The random times land the kills anywhere in a save: tensors, manifest, renames, removal of old steps.
    chooser = random.Random(0)
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    landed_inside = 0
    command = [sys.executable, "-c", _KILLS_SAVERS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        for _ in range(cases(40)):
            print(chooser.uniform(0.0, 0.08), chooser.randrange(3), file=killer.stdin, flush=True)
            acknowledged = int(killer.stdout.readline())
            landed_inside += folder.exists() and any(n.endswith(".tmp") for n in os.listdir(folder))
            _check_latest(store, acknowledged)
        killer.stdin.close()
    assert killer.returncode == 0
    assert caplog.messages == []
    assert landed_inside > 0 or not FULL  # a save is half of the time: of 40 kills one lands in it
    latest = store.latest()
    assert latest is not None
    _save(store, latest.step + 1)
    assert len([name for name in os.listdir(folder) if name.startswith("step_")]) == 2


def _check_latest(store: CheckpointStore, acknowledged: int) -> None:
    latest = store.latest()
    if latest is None:
        assert acknowledged == 0
        return
    assert latest.step >= acknowledged
    assert latest.state == {"step": latest.step}
    for name in ("model", "optimizer"):
        assert torch.equal(latest.load(name)["w"], torch.full((20_000,), float(latest.step)))


def test_what_the_disk_refuses_names_the_checkpoint_and_how_to_go_on(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": {"w": torch.zeros(10)}}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            store.save(2, {"model": {"w": torch.zeros(1 << 16)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"{tmp_path / 'step_2'}: ")
    assert "--resume" in str(caught.value)
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
