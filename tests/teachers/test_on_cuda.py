"""Teachers on a device: loaded, streamed by a thread, and their rows in the cache and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import ranks
import tiny
import torch

from opd.storage.hidden_cache import HiddenStateCache
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.streamed_teacher import streamed_teachers

SAMPLES = tiny.samples([(3, 4), (5, 6), (2, 0), (7, 12), (1, 1), (4, 9)])


def streamed(url: str, gpu: Any, **placement):
    place = Placement(device=str(gpu.device), **placement)
    return streamed_teachers({"t": url}, place, prefetch_bytes=4096)["t"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_and_streamed_give_what_they_give_on_a_cpu(gpu, published, dtype) -> None:
    checkpoint, url = published("t", num_hidden_layers=3)
    plain = LocalTeacher("t", checkpoint, max_tokens=16, dtype=dtype)
    rows, logits = plain.score(SAMPLES).rows, plain.load_head().logits(plain.score(SAMPLES).rows)
    exact = 1e-5 if dtype == "float32" else 2e-2
    loaded = LocalTeacher("t", checkpoint, max_tokens=16, dtype=dtype, device=str(gpu.device))
    stream = streamed(url, gpu, max_tokens=16, dtype=dtype)
    for teacher in (loaded, stream):
        found, head = teacher.score(SAMPLES).rows, teacher.load_head()
        assert found.device == head.weight.device == gpu.device
        torch.testing.assert_close(gpu.get(found), rows, rtol=exact, atol=exact)
        torch.testing.assert_close(gpu.get(head.logits(found)), logits, rtol=exact, atol=exact)
    stream.close()


def test_reading_waits_in_its_own_thread(gpu, published) -> None:
    """Who computes waits once a unit, until its memory may be written again, and for nothing in a layer."""
    _, url = published("t", num_hidden_layers=3)
    teacher = streamed(url, gpu, max_tokens=16)
    teacher.score(SAMPLES)
    with gpu.counted() as seen:
        teacher.score(SAMPLES)
    units = [name for name in teacher.published.manifest.units if name != "head"]
    assert len(seen.waits) <= len(units), seen
    if isinstance(gpu, pretend_cuda.Gpu):
        assert set(gpu.by_thread["layer-stream"].copies) == {"to the device"}
    teacher.close()


def test_rows_of_the_cache_reach_the_device(gpu, published, tmp_path: Path) -> None:
    """What was written comes back mapped, on the CPU, and is sent to the student's device."""
    urls = {name: published(name, seed=i)[1] for i, name in enumerate(("a", "b"))}
    router = Router({name: {name: 1.0} for name in urls}, "one_hot")
    asked = ranks.samples(["a", "b"])
    expected = ranks.gradient(
        TeacherSchedule(streamed_teachers(urls, Placement(max_tokens=16)), router), asked
    )
    teachers = streamed_teachers(urls, Placement(max_tokens=16, device=str(gpu.device)))
    cache = CachedScores(HiddenStateCache(tmp_path / "cache", quota_bytes=1 << 20))
    schedule = TeacherSchedule(teachers, router, cache=cache, device=gpu.device)
    for kept in (0, sum(len(s.response_ids) for s in asked)):
        gradient = ranks.gradient_of(gpu.model(tiny.model(seed=77)), schedule, asked)
        assert schedule.take_counters()["cached_tokens"] == kept
        for name, value in gradient.items():
            torch.testing.assert_close(gpu.get(value), expected[name], rtol=1e-4, atol=1e-6)
    next(iter(teachers.values())).close()


def test_a_disk_that_is_full_leaves_all_rows_on_the_device(
    gpu, published, tmp_path: Path, monkeypatch
) -> None:
    """Rows in pieces, the first of which are on the disk already."""
    _, url = published("t")
    teacher = streamed(url, gpu, max_tokens=16, sequence_chunk=4)
    long = tiny.samples([(3, 13)])
    expected = gpu.get(teacher.score(long).rows)
    cache = CachedScores(HiddenStateCache(tmp_path / "cache", quota_bytes=1 << 20))
    from opd.storage import hidden_cache

    append, done = hidden_cache.RowsWriter.append, []

    def full(writer, rows: np.ndarray) -> bool:
        done.append(len(rows))
        return len(done) < 3 and append(writer, rows)

    monkeypatch.setattr(hidden_cache.RowsWriter, "append", full)
    kept = cache.store_pieces(teacher, teacher.score_pieces(long))
    assert len(done) == 3
    (rows,) = kept.values()
    assert rows.device == gpu.device
    torch.testing.assert_close(gpu.get(rows), expected)
    teacher.close()
