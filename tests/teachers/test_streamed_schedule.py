"""A schedule of streamed teachers: the step of loaded ones, counted loads, bounded memory, cached rows."""

import gc
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import tiny
import torch
from rank_processes import FREED_AT_ONCE
from tiny_published import publish

from opd.storage.node_cache import NodeCache
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.streamed_teacher import StreamedTeacher, streamed_teachers

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 9,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
"""A model of 33 MB."""
NAMES = [f"t{i}" for i in range(10)]
ROUTER = Router({name: {name: 1.0} for name in NAMES}, "one_hot")
DOMAINS = ["t3", "t0", "t9", "t3", "t5", "t1", "t0", "t8"]
USED = set(DOMAINS)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """name -> (checkpoint, published folder)."""
    folder = tmp_path_factory.mktemp("ten")
    return {name: publish(tiny.model(seed=i), folder / name, shards=2) for i, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def expected(teachers):
    """The gradient with all teachers loaded and the batch in its own order."""
    loaded = {name: LocalTeacher(name, folder, max_tokens=16) for name, (folder, _) in teachers.items()}
    schedule = TeacherSchedule(loaded, ROUTER)
    schedule.sort = lambda batch: batch
    grads = ranks.gradient(schedule, ranks.samples(DOMAINS))
    assert schedule.take_counters()["head_loads"] > len(USED)
    return grads


def streamed(teachers, **options):
    urls = {name: url for name, (_, url) in teachers.items()}
    return streamed_teachers(urls, Placement(max_tokens=16), **options)


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-4)


def test_ten_streamed_teachers_make_the_step_of_ten_loaded_ones(teachers, expected, monkeypatch):
    plain, ahead = StreamedTeacher.prefetch_head, []
    monkeypatch.setattr(
        StreamedTeacher, "prefetch_head", lambda self: (ahead.append(self.name), plain(self))[1]
    )
    made = streamed(teachers, prefetch_bytes=30_000)
    schedule = TeacherSchedule(made, ROUTER)
    opened = {name: teacher.bytes_read for name, teacher in made.items() if teacher.digest}
    for step in range(2):
        close(ranks.gradient(schedule, ranks.samples(DOMAINS)), expected)
        counters = schedule.take_counters()
        assert counters["head_loads"] == len(USED)
        assert (counters["resident_heads_peak"], counters["prefetched_heads_peak"]) == (1, 1)
        assert counters["teacher_tokens"] == sum(response for _, response in ranks.LENGTHS)
        assert counters["bytes_read"] > 0
        assert counters["stall_seconds"] >= 0
        for name, teacher in made.items():
            whole = teacher.published.manifest.nbytes
            read = teacher.bytes_read - opened[name]
            # Layers and head once a step; the first teacher's layers also ahead of the next one.
            slack = whole if name == "t0" else 0
            assert read == (step + 1) * whole * (name in USED) or (0 < read - (step + 1) * whole <= slack)
    assert Counter(ahead) == dict.fromkeys(USED, 4)  # in each of two steps ahead, and then to wait for it
    made["t0"].close()


def test_weights_in_memory_do_not_grow_with_the_number_of_teachers(teachers):
    window, peaks = 30_000, []
    for names in (["t0"], NAMES):
        made = streamed({name: teachers[name] for name in names}, prefetch_bytes=window)
        schedule = TeacherSchedule(made, Router({name: {name: 1.0} for name in names}, "one_hot"))
        schedule.take_counters()
        ranks.gradient(schedule, ranks.samples(names))
        gc.collect()
        peaks.append(schedule.take_counters()["weight_bytes_peak"])
        made["t0"].close()
    units = made["t0"].published.manifest.units
    largest, head = max(unit.nbytes for unit in units.values()), units["head"].nbytes
    one, ten = peaks
    assert largest < one
    assert ten <= one + head + window
    # The one in use, the one that is leaving while autograd still holds it, and the one read ahead.
    assert ten <= largest + window + 256 + 2 * head


def test_rows_of_the_cache_spare_the_teachers(teachers, expected, tmp_path):
    with NodeCache(tmp_path / "cache", quota_bytes=10**7) as cache:
        made = streamed(teachers, prefetch_bytes=30_000)
        schedule = TeacherSchedule(made, ROUTER, cache=CachedScores(cache))
        tokens = sum(response for _, response in ranks.LENGTHS)
        close(ranks.gradient(schedule, ranks.samples(DOMAINS)), expected)
        first = schedule.take_counters()
        assert (first["teacher_tokens"], first["cached_tokens"]) == (tokens, 0)
        made["t0"].close()

        again = streamed(teachers, prefetch_bytes=30_000)
        schedule = TeacherSchedule(again, ROUTER, cache=CachedScores(cache))
        close(ranks.gradient(schedule, ranks.samples(DOMAINS)), expected)
        second = schedule.take_counters()
        assert (second["teacher_tokens"], second["cached_tokens"]) == (0, tokens)
        assert second["head_loads"] == len(USED)
        assert again["t0"].stream.nbytes == 0  # no layer was read
        again["t0"].close()


@pytest.mark.slow
def test_few_rows_stay_in_memory_and_what_a_killed_step_wrote_is_found(teachers, expected, tmp_path):
    tokens, row = sum(response for _, response in ranks.LENGTHS), 4 * tiny.LLAMA["hidden_size"]
    few = 24 * row  # too few for the 16 of t3 beside those of t0 and t1
    for room in (1 << 20, few):
        with NodeCache(tmp_path / f"{room}", quota_bytes=10**7) as cache:
            made = streamed(teachers, prefetch_bytes=30_000)
            scores = CachedScores(cache, memory_bytes=room)
            schedule = TeacherSchedule(made, ROUTER, cache=scores)
            for _ in range(2):  # what stays in memory is let go with the step
                close(ranks.gradient(schedule, ranks.samples(DOMAINS)), expected)
            counted = schedule.take_counters()
            written = cache.take_counters()["bytes_written"]
            assert counted["teacher_tokens"] + counted["cached_tokens"] == 2 * tokens
            assert counted["cached_tokens"] == written / row
            assert written == (16 * row if room == few else 0)
            made["t0"].close()
    with NodeCache(tmp_path / f"{few}", quota_bytes=10**7) as cache:
        again = streamed(teachers, prefetch_bytes=30_000)
        schedule = TeacherSchedule(again, ROUTER, cache=CachedScores(cache, memory_bytes=1 << 20))
        close(ranks.gradient(schedule, ranks.samples(DOMAINS)), expected)
        assert schedule.take_counters()["cached_tokens"] == 16
        again["t0"].close()


def test_how_much_may_stay_is_asked_after_a_step_of_the_optimiser(teachers, tmp_path):
    """Not for samples that a critic alone learns from, of which the student's optimiser has no moments."""
    teacher, samples = LocalTeacher("t0", teachers["t0"][0]), tiny.samples([(3, 4), (2, 5)])
    rows, asked = list(teacher.score(samples).rows.split([4, 5])), []
    with NodeCache(tmp_path / "cache", quota_bytes=10**7) as cache:
        scores = CachedScores(cache, grows=lambda: asked.append(1) or 1 << 20)
        schedule = TeacherSchedule({"t0": teacher}, ROUTER, cache=scores)
        for learned, due in ((False, 0), (False, 0), (True, 0), (True, 1), (True, 1)):
            stored = scores.store(teacher, samples, rows)
            assert all(kept is own for kept, own in zip(stored, rows, strict=True)) == (len(asked) > 0)
            schedule.release(learned=learned)
            assert len(asked) == due


def test_another_teacher_dtype_or_response_is_no_hit(teachers, tmp_path):
    with NodeCache(tmp_path / "cache", quota_bytes=10**7) as cache:
        one, two = (LocalTeacher(name, teachers[name][0]) for name in ("t0", "t1"))
        samples = tiny.samples([(3, 4), (2, 5)])
        rows = list(one.score(samples).rows.split([4, 5]))
        scores = CachedScores(cache, variants={"t0": "float32", "t1": "float32"})
        kept = scores.store(one, samples, rows)
        assert all(torch.equal(a, b) for a, b in zip(kept, rows, strict=True))
        found = scores.find(one, samples[0])
        assert found is not None
        assert torch.equal(found, rows[0])
        scores.release()
        assert scores.find(two, samples[0]) is None
        assert CachedScores(cache, variants={"t0": "bfloat16"}).find(one, samples[0]) is None
        samples[0].response_ids = np.append(samples[0].response_ids, np.int32(1))
        assert scores.find(one, samples[0]) is None


def test_a_full_cache_changes_nothing(teachers, expected, tmp_path):
    with NodeCache(tmp_path / "cache", quota_bytes=4096) as cache:
        made = streamed(teachers)
        schedule = TeacherSchedule(made, ROUTER, cache=CachedScores(cache))
        close(ranks.gradient(schedule, ranks.samples(DOMAINS)), expected)
        made["t0"].close()


@pytest.mark.slow
def test_resident_memory_with_ten_teachers_is_that_with_one(tmp_path):
    """Ten teachers of 33 MB each, streamed: the process grows by less than two of them would take."""
    script = Path(__file__).with_name("resident_memory.py")
    for i in range(10):
        publish(tiny.model(seed=i, **SHAPE), tmp_path / f"t{i}")
    environment = os.environ | FREED_AT_ONCE
    growth = {}
    for count in (1, 10):
        command = [sys.executable, str(script), str(tmp_path), str(count)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr[-2000:]
        growth[count], window, head, model = (int(number) for number in done.stdout.split())
    assert growth[10] <= growth[1] + head + window
    assert growth[10] < 2 * model


def test_rows_that_are_let_go_give_their_memory_back(tmp_path):
    (sample,) = tiny.samples([(3, 2)])
    teacher = SimpleNamespace(name="t", digest="d" * 64)
    rows = torch.zeros(len(sample.response_ids), 8)
    with NodeCache(tmp_path, quota_bytes=10**7) as cache:
        scores = CachedScores(cache, memory_bytes=rows.nbytes)
        for _ in range(3):
            scores.store(teacher, [sample], [rows])
            assert scores.resident_bytes() == rows.nbytes
            assert scores.find(teacher, sample) is rows
            assert scores.find(teacher, replace(sample, response_ids=sample.response_ids + 1)) is None
            scores.release()
            assert scores.resident_bytes() == 0
