"""Run by test_scoring_kills.py: kills a process that streams teachers and caches their rows, again and again.

    python scoring_kills.py FOLDER KILLS

A child of this process scores with the teachers `FOLDER/a/published` and `FOLDER/b/published` into the cache
`FOLDER/cache`, whose quota makes it evict, and is killed with SIGKILL at some moment. Then everything in the
cache must be right, and nothing else may be left: no file, no shared memory. Prints what it saw as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import tiny
import torch
from cached_rows import blobs, unfinished

from opd.storage.node_cache import NodeCache
from opd.teachers.kinds import Placement
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.streamed_teacher import StreamedTeacher, streamed_teachers
from opd.types import Sample

QUOTA = 20 * 4096
NAMES = ["a", "b"]


def samples(seed: int) -> list[Sample]:
    made = tiny.samples([(3, 5)] * 12, teachers=NAMES * 6, seed=seed % 5)
    for sample in made:
        sample.teacher = None
    return made


def opened(folder: Path) -> dict[str, StreamedTeacher]:
    urls = {name: str(folder / name / "published") for name in NAMES}
    return streamed_teachers(urls, Placement(max_tokens=16), prefetch_bytes=20_000)


def score_for_ever(folder: Path, seed: int, scored: int) -> None:
    """A mini-batch after the other; one byte to `scored` for each."""
    router = Router({name: {name: 1.0} for name in NAMES}, "one_hot")
    with NodeCache(folder / "cache", quota_bytes=QUOTA) as cache:
        schedule = TeacherSchedule(opened(folder), router, cache=CachedScores(cache))
        while True:
            mine = samples(seed)
            schedule.assign(mine)
            schedule.score(mine)
            for name in NAMES:
                schedule.teacher_views([sample for sample in mine if sample.teacher == name])
            schedule.release()
            os.write(scored, b"x")
            seed += 1


def killed_after(folder: Path, seed: int, seconds: float) -> str:
    """Let a child score, kill it `seconds` after its first mini-batch; returns its memory map."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            score_for_ever(folder, seed, writing)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    time.sleep(seconds)
    maps = Path(f"/proc/{child}/maps").read_text()
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(reading)
    return maps


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    chooser, evicting = random.Random(0), 0
    before = files(folder)
    for number in range(kills):
        maps = killed_after(folder, number, chooser.uniform(0.0, 0.05))
        assert "/dev/shm" not in maps
        assert "SYSV" not in maps
        with NodeCache(folder / "cache", quota_bytes=QUOTA) as cache:
            assert not unfinished(folder / "cache")
            evicting += cache.used_bytes() > QUOTA - 3 * 4096
    right = 0
    made = opened(folder)
    with NodeCache(folder / "cache", quota_bytes=QUOTA) as cache:
        scores, count = CachedScores(cache), len(blobs(folder / "cache"))
        for seed in range(5):
            for sample in samples(seed):
                rows = scores.find(made[sample.domain], sample)
                assert rows is None or torch.equal(rows, made[sample.domain].score([sample]).rows)
                right += rows is not None
        assert cache.counters.corrupt == 0
    made["a"].close()
    left = {path for path in files(folder) - before if path.parent.parent.name != "blobs"}
    print(json.dumps({"right": right, "blobs": count, "evicting": evicting}))
    assert {path.name for path in left} == {"index", "leases", "lock", "users"}, left


if __name__ == "__main__":
    main()
