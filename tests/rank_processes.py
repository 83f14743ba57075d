"""Several processes of one group, for tests of what ranks do together."""

import ctypes
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from opd.errors import OpdError

FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""With these glibc gives freed blocks back at once, so that a process's peak is that of what is in use."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""


def run_ranks(script: str, world: int, folder: Path, seconds: float = 400) -> None:
    """Run `script RANK WORLD FOLDER` for every rank until all have ended well. What it imports is imported
    once: the ranks are forks of a process that has done nothing else.

    As soon as one fails, or time is up, the others are killed and what the ranks said is raised.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    said, results = folder / "ranks.log", folder / "ranks.json"
    results.unlink(missing_ok=True)
    command = [sys.executable, __file__, script, str(world), str(folder), str(seconds)]
    with said.open("wb") as file:
        leader = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            leader.wait(seconds + 120)
        finally:
            leader.kill()  # and with it its forks
            leader.wait()
    assert results.exists(), said.read_text()[-2000:]
    codes = json.loads(results.read_text())
    logs = [_log(folder, rank) for rank in range(world)]
    lines = [f"{log.name} ({code}): {log.read_text()[-2000:]}" for log, code in zip(logs, codes, strict=True)]
    assert codes == [0] * world, "\n".join(lines)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _lead(script: str, world: int, folder: Path, seconds: float) -> int | None:
    """Fork the ranks, and write their exit codes, `None` for one that was killed because another failed.
    Returns in a rank, too: its number.
    """
    gc.disable()  # while it imports: hundreds of thousands of objects, of which all stay
    runpy.run_path(script, run_name="imported")
    assert len(os.listdir("/proc/self/task")) == 1, f"importing {script} starts threads, which no fork has"
    gc.freeze()  # a rank that looks for what is held does not look at what was imported
    gc.enable()
    ranks: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, folder)
            sys.argv = [script, str(rank), str(world), str(folder)]
            return rank
        ranks[pid] = rank
    codes: list[int | None] = [None] * world
    deadline = time.monotonic() + seconds
    while ranks and time.monotonic() < deadline and not any(codes):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif pid == 0:
            time.sleep(0.02)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (folder / "ranks.json").write_text(json.dumps(codes))
    return None


def _be_rank(rank: int, folder: Path) -> None:
    """Say everything to a log of its own, and die with the leader."""
    assert ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL) == 0
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


@contextmanager
def joined(seconds: float) -> Iterator[tuple[int, Path]]:
    """In a process that `run_ranks` started: its rank in a gloo group of all of them, and the folder.

    A rank waits at most `seconds` for another.
    """
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    yield rank, folder
    dist.destroy_process_group()


def do_tasks(one_task: Callable[[int, dict, Path], dict], seconds: float) -> None:
    """Do the tasks of `FOLDER/tasks.json` in turn; `FOLDER/NAME-RANK.json` says how each went."""
    with joined(seconds) as (rank, folder):
        for task in json.loads((folder / "tasks.json").read_text()):
            try:
                result = one_task(rank, task, folder)
            except OpdError as error:
                result = {"error": type(error).__name__, "message": str(error)}
            (folder / f"{task['name']}-{rank}.json").write_text(json.dumps(result))


def main() -> None:
    script, world, folder, seconds = sys.argv[1:]
    if _lead(script, int(world), Path(folder), float(seconds)) is not None:
        runpy.run_path(script, run_name="__main__")  # ends as any program does


if __name__ == "__main__":
    main()
