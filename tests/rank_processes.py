"""Several processes of one group, for tests of what ranks do together."""

from __future__ import annotations

import json
import os
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


def run_ranks(script: str, world: int, folder: Path, seconds: float = 400) -> None:
    """Run `script RANK WORLD FOLDER` for every rank until all have ended well.

    As soon as one fails, or time is up, the others are killed and what the ranks said is raised.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [folder / f"rank-{rank}.log" for rank in range(world)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, script, str(rank), str(world), str(folder)]
            with log.open("wb") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = [f"{log.name} ({code}): {log.read_text()[-2000:]}" for log, code in zip(logs, codes, strict=True)]
    assert codes == [0] * world, "\n".join(said)


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
