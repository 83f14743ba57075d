"""A disk that fills in the middle of a run: one sentence, and with room again the same bits as without."""

import gc
import os
import shutil
import subprocess
from collections import namedtuple

import pytest
from damage import REWARDS, fingerprint
from damaged_runs import finish, make_recipe

from opd.pipelines.cli import main

KINDS = {
    "memory": {"storage": {"cache_mb": 1, "hidden_memory_mb": 0}},
    "disk": {"storage": {"cache_mb": 1, "trajectories": "disk"}},
}
SHARES = [0.04, 0.2, 0.4, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.97]
"""Of what a whole run takes; at the default one it is in its merge."""
CASES = [
    pytest.param(kind, share, marks=[] if (kind, share) == ("memory", 0.7) else pytest.mark.long)
    for kind in KINDS
    for share in SHARES
]
Free = namedtuple("Free", "total used free")


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """An empty file system of its own, which the check before a run believes to be large: another process
    fills it afterwards.
    """
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    (tmp_path / "damage_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Free(1 << 50, 0, 1 << 50))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def resize(disk, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share"), CASES)
def test_a_disk_that_fills_is_one_sentence_and_costs_nothing(disk, tmp_path, capsys, ends, kind, share):
    recipe, run = make_recipe(tmp_path / "recipe.yaml", **KINDS[kind]), disk / "run"
    finish(recipe, run)
    truth, taken = fingerprint(run), os.statvfs(disk)
    shutil.rmtree(run)
    gc.collect()  # models that are no longer used may still map their files, which then take the disk
    resize(disk, int((taken.f_blocks - taken.f_bfree) * taken.f_frsize * share) // 4096 * 4096)
    capsys.readouterr()
    said = ends(2, ["run", str(recipe), "--out", str(run)]).err.splitlines()
    (error,) = [line for line in said if line.startswith("opd: error: ")]
    assert str(run) in error
    assert ".tmp" not in error
    assert "--resume" in error
    assert "No space left on device" in error or "the disk is full" in error
    assert "Traceback" not in "".join(said)
    resize(disk, 1 << 28)
    assert main(["run", str(recipe), "--out", str(run), "--resume"]) == 0
    assert fingerprint(run) == truth
