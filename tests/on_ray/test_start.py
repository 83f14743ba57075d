"""A run that is told to stop while its cluster or its actors start leaves no process and no file behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_runs import Run, ended, write_recipe

from opd.pipelines.launch.ray.cluster import LOCK, TEMPORARY, YOUNG, descendant_processes, own_folder
from opd.storage.files import FileLock


def folders(process: int) -> list[Path]:
    """The folders that `process` has made for a cluster."""
    found = []
    for lock in TEMPORARY.glob(f"opd-ray-*/{LOCK}"):
        try:
            owner = lock.read_text().strip()
        except FileNotFoundError:
            continue
        if owner == str(process):
            found.append(lock.parent)
    return found


def cluster_starts(run: Run) -> bool:
    return bool(folders(run.process.pid) and descendant_processes(run.process.pid))


def actors_start(run: Run) -> bool:
    return bool(run.all_pids())


@pytest.mark.slow
@pytest.mark.parametrize("moment", [cluster_starts, pytest.param(actors_start, marks=pytest.mark.long)])
def test_told_to_stop_while_it_starts(tmp_path, moment):
    pytest.importorskip("ray")
    recipe = write_recipe(tmp_path)
    with Run(recipe, tmp_path / "run", "--launch.type", "ray") as run:
        run.until(lambda: moment(run))
        made, family = folders(run.process.pid), descendant_processes(run.process.pid)
        assert len(made) == 1
        assert family
        run.process.send_signal(signal.SIGTERM)
        status, said = run.finish(240)
        assert status == 143, said
    assert "Traceback" not in said
    words = [line for line in said.splitlines() if line.startswith("opd: ") and " s so far" not in line]
    assert [line for line in words if not line.startswith("opd: warning: ")] == [
        "opd: the run was asked to stop and did; every token written so far is in its log, continue with"
        " --resume."
    ]
    assert ended([*family, *run.all_pids()])
    assert not made[0].exists()


def test_folder_is_removed_whatever_happens(tmp_path):
    def fail() -> None:
        with own_folder("a-", tmp_path) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())


def test_folder_of_a_killed_process_is_removed_by_the_next(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom opd.pipelines.launch.ray.cluster import own_folder\n"
        "with own_folder('a-', Path(sys.argv[1])) as folder:\n    print(folder, flush=True)\n    input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        long_ago = time.time() - 2 * YOUNG
        os.utime(left / LOCK, (long_ago, long_ago))
        with own_folder("a-", tmp_path) as own:
            assert left.is_dir(), "its owner lives"
            assert own != left
        process.kill()
        process.wait()
    with own_folder("a-", tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]


def test_folder_that_is_not_locked_yet_is_left_alone(tmp_path):
    young = tmp_path / "a-young"
    with FileLock(young / LOCK):
        pass
    (tmp_path / "a-unlocked").mkdir()
    with own_folder("a-", tmp_path) as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, tmp_path / "a-unlocked", young])
