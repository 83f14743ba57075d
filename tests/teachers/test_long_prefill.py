"""Teachers that read long samples in pieces: the same rows, written to the cache as they come."""

import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import tiny
import torch
from cached_rows import blobs, unfinished
from transformers import GPT2Config, GPT2LMHeadModel

from opd.errors import TeacherError
from opd.storage.node_cache import CacheRecord, NodeCache, RowsWriter
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores, row_pieces
from opd.teachers.streamed_teacher import streamed_teachers

LENGTHS = [(3, 4), (5, 60), (2, 0), (20, 33), (4, 5)]
CHUNK = 16
ROUTES = Router({"t": {"t": 1.0}}, "one_hot")


def samples():
    return tiny.samples(LENGTHS, teachers=["t"] * len(LENGTHS))


def teacher_of(kind: str, family, chunk: int | None):
    checkpoint, url = family
    if kind == "torch":
        return LocalTeacher("t", checkpoint, max_tokens=40, sequence_chunk=chunk)
    return streamed_teachers({"t": url}, Placement(max_tokens=40, sequence_chunk=chunk))["t"]


def close(teacher) -> None:
    if hasattr(teacher, "close"):
        teacher.close()


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["torch", "streamed"])
def test_pieces_give_the_rows_of_the_whole(published_family, kind):
    whole, cut = (teacher_of(kind, published_family, chunk) for chunk in (None, CHUNK))
    expected = whole.score(samples()).rows
    torch.testing.assert_close(cut.score(samples()).rows, expected, atol=2e-5, rtol=1e-4)
    pieces = [(sample.uid, rows.clone()) for sample, rows in cut.score_pieces(samples())]
    assert max(len(rows) for _, rows in pieces) == CHUNK
    torch.testing.assert_close(torch.cat([r for _, r in pieces]), expected, atol=2e-5, rtol=1e-4)
    close(whole)
    close(cut)


def test_rows_of_packed_samples_are_those_that_predict_responses():
    chosen = samples()
    total = sum(c + r for c, r in LENGTHS)
    hidden = torch.arange(total)[:, None]
    expected, start = [], 0
    for prompt, response in LENGTHS:
        expected += range(start + prompt - 1, start + prompt + response - 1)
        start += prompt + response
    for chunk in (None, 1, 7):
        pieces = list(row_pieces(chosen, hidden, chunk))
        assert torch.cat([rows for _, rows in pieces])[:, 0].tolist() == expected
        assert all(len(rows) <= (chunk or total) for _, rows in pieces)


@pytest.fixture
def family(published):
    return published("t", seed=3)


def open_schedule(teacher, folder, quota: int = 1 << 20) -> TeacherSchedule:
    cache = CachedScores(NodeCache(folder, quota_bytes=quota))
    return TeacherSchedule({"t": teacher}, ROUTES, cache=cache)


def scored(schedule: TeacherSchedule) -> torch.Tensor:
    chosen = [s for s in samples() if len(s.response_ids)]
    schedule.assign(chosen)
    schedule.score(chosen)
    return schedule.hidden_rows("t", chosen)


@pytest.mark.parametrize("kind", ["torch", "streamed"])
def test_rows_go_to_the_cache_in_pieces_and_are_found_there(family, tmp_path, kind, monkeypatch):
    sizes: list[int] = []
    append = RowsWriter.append
    monkeypatch.setattr(RowsWriter, "append", lambda w, rows: sizes.append(len(rows)) or append(w, rows))
    teacher = teacher_of(kind, family, CHUNK)
    expected = teacher.score(samples()).rows
    schedule = open_schedule(teacher, tmp_path / "cache")
    assert torch.equal(scored(schedule), expected)
    assert sizes[:1] == [4]
    assert max(sizes) == CHUNK
    assert sum(sizes) == len(expected)
    schedule.release()
    other = open_schedule(teacher, tmp_path / "cache")
    assert torch.equal(scored(other), expected)
    assert (other.counters.teacher_tokens, other.counters.cached_tokens) == (0, len(expected))
    close(teacher)


def test_forgotten_samples_are_found_again(family, tmp_path):
    schedule = open_schedule(teacher_of("torch", family, CHUNK), tmp_path / "cache")
    expected = scored(schedule).clone()
    chosen = [s for s in samples() if len(s.response_ids)]
    schedule.drop_samples(chosen[:2])
    with pytest.raises(TeacherError, match="was not scored"):
        schedule.hidden_rows("t", chosen[:1])
    assert torch.equal(schedule.hidden_rows("t", chosen[2:]), expected[64:])
    assert torch.equal(scored(schedule), expected)


def test_a_full_disk_in_the_middle_of_a_sample_loses_no_row(family, tmp_path, monkeypatch):
    teacher = teacher_of("torch", family, CHUNK)
    expected = teacher.score(samples()).rows
    schedule = open_schedule(teacher, tmp_path / "cache")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    append, calls = RowsWriter.append, []

    def fill_the_disk(writer, rows):
        calls.append(len(rows))
        if len(calls) == 4:  # two pieces of the long sample are written
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        return append(writer, rows)

    monkeypatch.setattr(RowsWriter, "append", fill_the_disk)
    try:
        found = scored(schedule)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(found, expected)
    cache = schedule._cache.cache
    assert cache.counters.rejected >= 1
    record = CacheRecord("", "", 0)
    assert cache.put(bytes(32), np.zeros((1, 1), np.float32), record)  # there is room again
    assert not unfinished(tmp_path / "cache")


def test_a_cache_without_room_leaves_rows_in_memory(family, tmp_path):
    teacher = teacher_of("torch", family, CHUNK)
    schedule = open_schedule(teacher, tmp_path / "cache", quota=4096)
    assert torch.equal(scored(schedule), teacher.score(samples()).rows)


def test_rows_that_are_not_finite_are_refused_and_leave_nothing(family, tmp_path):
    teacher = teacher_of("torch", family, CHUNK)
    with torch.no_grad():
        teacher.model.module.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TeacherError, match="not finite"):
        scored(open_schedule(teacher, tmp_path / "cache"))
    assert not [*unfinished(tmp_path / "cache"), *blobs(tmp_path / "cache")]


_KILLED = """
import os, signal, sys
import numpy as np
from opd.storage.node_cache import CacheRecord, NodeCache
cache = NodeCache(sys.argv[1], quota_bytes=1 << 24)
rows = np.ones((1000, 64), np.float32)
writer = cache.open_rows(bytes(32), rows[:1], 10_000, CacheRecord("s", "t", 1))
for _ in range(int(sys.argv[2])):
    assert writer.append(rows)
if sys.argv[3] == "named":
    writer.finish()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("pieces", "end"), [(3, "killed"), (10, "killed"), (10, "named")])
def test_a_writer_killed_between_pieces_leaves_no_part_of_an_array(tmp_path, pieces, end):
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(pieces), end]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    with NodeCache(tmp_path, quota_bytes=1 << 24) as cache:
        lease = cache.get(bytes(32))
        assert (lease is not None) == (end == "named")
        if lease is not None:
            assert lease.rows.shape == (10_000, 64)
            assert (lease.rows == 1).all()
            lease.release()
        assert cache.used_bytes() <= (10_000 * 256 + 8192 if end == "named" else 0)


def test_more_tokens_than_positions_that_were_learnt_are_refused(tmp_path):
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=30)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    teacher = LocalTeacher("t", tmp_path)
    short, long = tiny.samples([(10, 20), (10, 21)], teachers=["t", "t"])
    assert len(teacher.score([short]).rows) == 20
    with pytest.raises(TeacherError, match=r"teacher t has learnt 30 positions, .* take 31 of its tokens"):
        teacher.score([short, long])
