"""Several processes of one group, for tests of what ranks do together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def run_ranks(script: str, world: int, folder: Path, seconds: float = 240) -> None:
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
