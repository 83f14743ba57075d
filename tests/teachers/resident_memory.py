"""How far a process grows while it streams several teachers; run by test_streamed_schedule.py.

    python resident_memory.py FOLDER COUNT

Lets a schedule score samples with the teachers `FOLDER/t0/published`, `FOLDER/t1/published`, ... and load
their heads, and prints bytes: growth of the peak resident set, prefetch window, head, model.
"""

import sys
from pathlib import Path

import tiny
import torch
from watched import own_bytes

from opd.teachers.kinds import Placement
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.streamed_teacher import streamed_teachers

WINDOW = 2 * 2**20


def main() -> None:
    """Measure and print."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    names = [f"t{i}" for i in range(count)]
    urls = {name: str(folder / name / "published") for name in names}
    teachers = streamed_teachers(urls, Placement(max_tokens=64), prefetch_bytes=WINDOW)
    schedule = TeacherSchedule(teachers, Router({name: {name: 1.0} for name in names}, "one_hot"))
    samples = tiny.samples([(8, 8)] * 2 * count, teachers=names * 2)
    for teacher in teachers.values():
        assert teacher.skeleton.layers  # code and configuration are not what is measured
    before = own_bytes()
    for _ in range(2):
        schedule.assign(samples)
        schedule.score(samples)
        for name in names:
            schedule.teacher_views([sample for sample in samples if sample.teacher == name])
        schedule.release()
    manifest = teachers["t0"].published.manifest
    print(own_bytes() - before, WINDOW, manifest.units["head"].nbytes, manifest.nbytes)
    teachers["t0"].close()


if __name__ == "__main__":
    main()
