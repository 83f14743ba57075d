"""Teachers on a device: loaded, streamed by a thread, and their rows in the cache and back."""

import json
from pathlib import Path
from typing import Any

import gathering_rank
import numpy as np
import pretend_cuda
import pytest
import ranks
import tiny
import torch
import xxhash
from rank_processes import run_ranks

from opd.errors import TeacherError
from opd.storage.node_cache import NodeCache
from opd.storage.published import PublishedModel
from opd.teachers import unit_gather
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores, spare_bytes
from opd.teachers.streamed_teacher import streamed_teachers

SAMPLES = tiny.samples([(3, 4), (5, 6), (2, 0), (7, 12), (1, 1), (4, 9)])


def streamed(url: str, gpu: Any, **placement):
    place = Placement(device=str(gpu.device), **placement)
    return streamed_teachers({"t": url}, place, prefetch_bytes=4096)["t"]


@pytest.mark.some(1)
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


def test_routed_experts_give_what_they_give_on_a_cpu(gpu, published) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 1}
    checkpoint, url = published("m", shards=64, moe_intermediate_size=32, **experts)
    plain = LocalTeacher("m", checkpoint, max_tokens=6).score(SAMPLES[:1]).rows
    stream = streamed(url, gpu, max_tokens=6)
    for _ in range(2):
        before = stream.bytes_read
        found = stream.score(SAMPLES[:1]).rows
        torch.testing.assert_close(gpu.get(found), plain, rtol=1e-5, atol=1e-5)
        assert stream.bytes_read - before < 0.8 * stream.published.manifest.nbytes
    stream.close()
    assert stream.weight_bytes == 0


def test_reading_waits_in_its_own_thread(gpu, published) -> None:
    """Who computes does not wait for what it has asked of the device."""
    _, url = published("t", num_hidden_layers=3)
    teacher = streamed(url, gpu, max_tokens=16)
    teacher.score(SAMPLES)
    with gpu.counted() as seen:
        teacher.score(SAMPLES)
    assert not seen.waits, seen
    if isinstance(gpu, pretend_cuda.Gpu):
        units = [name for name in teacher.published.manifest.units if name != "head"]
        assert seen.stream_waits == len(units)
        reader = gpu.by_thread["layer-stream"]
        assert set(reader.copies) == {"to the device"}
        assert not reader.unpinned_bytes
        assert all("an event" in wait or "a stream" in wait for wait in reader.waits), reader
    teacher.close()


def whole_stream(url: str, gpu: Any, window: int) -> tuple[LayerStream, PublishedModel]:
    return LayerStream(prefetch_bytes=window, device=gpu.device), PublishedModel.open(url)


def test_a_unit_is_read_while_the_one_before_is_on_its_way(pretended, published, monkeypatch) -> None:
    """And a third may be, when the first has arrived: there are two pieces of pinned memory."""
    _, url = published("t", num_hidden_layers=4)
    stream, model = whole_stream(url, pretended, 1 << 20)
    units, left = list(model.manifest.units), []
    read = PublishedModel.read_part

    def noted(*args) -> None:
        left.append(stream.gather._stream.left)
        read(*args)

    monkeypatch.setattr(PublishedModel, "read_part", noted)
    asked = stream.request_pass(model, units)
    with stream._changed:
        assert stream._changed.wait_for(lambda: len(asked.ready) == len(units), 30)
    assert len(left) == len(units)
    assert min(left[1:]) == 1
    parts = sorted(model.part_bytes(unit, 1) for unit in units)
    assert stream.gather.staged_bytes <= 2 * parts[-1]
    for unit, flat in stream.iterate_pass(asked):
        entry = model.manifest.units[unit]
        assert xxhash.xxh3_128(pretended.get(flat).numpy()).hexdigest() == entry.checksum
    stream.close()
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 5_000, 40_000])
def test_memory_is_written_again_when_nothing_reads_it_any_more(pretended, published, window) -> None:
    """Copies from each unit that the device has not begun when the unit is given back."""
    urls = [published("a", num_hidden_layers=4)[1], published("b", hidden_size=16)[1]]
    stream, first = whole_stream(urls[0], pretended, window)
    second, found = PublishedModel.open(urls[1]), []
    for model in (first, second, second, first):
        for unit, flat in stream.iterate_pass(stream.request_pass(model, list(model.manifest.units))):
            into = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
            found.append((into.copy_(flat, non_blocking=True), model.manifest.units[unit]))
    torch.cuda.synchronize()
    for into, entry in found:
        assert xxhash.xxh3_128(into.numpy()).hexdigest() == entry.checksum
    stream.close()
    assert stream.nbytes == 0
    for model in (first, second):
        model.close()


def test_a_pass_that_is_left_early_gives_its_memory_back_when_it_is_free(pretended, published) -> None:
    _, url = published("t", num_hidden_layers=4)
    stream, model = whole_stream(url, pretended, 20_000)
    units, found = list(model.manifest.units), []
    for stop in (1, 3, 0, len(units)):
        for count, (unit, flat) in enumerate(stream.iterate_pass(stream.request_pass(model, units))):
            into = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
            found.append((into.copy_(flat, non_blocking=True), model.manifest.units[unit]))
            if count == stop:
                break
    torch.cuda.synchronize()
    for into, entry in found:
        assert xxhash.xxh3_128(into.numpy()).hexdigest() == entry.checksum
    stream.close()
    model.close()


@pytest.mark.slow
def test_rows_of_the_cache_reach_the_device(gpu, published, tmp_path: Path, monkeypatch) -> None:
    """What was written comes back mapped, on the CPU, and is sent to the device through pinned memory."""
    urls = {name: published(name, seed=i)[1] for i, name in enumerate(("a", "b"))}
    router = Router({name: {name: 1.0} for name in urls}, "one_hot")
    asked = ranks.samples(["a", "b"])
    on_host = streamed_teachers(urls, Placement(max_tokens=16))
    expected = ranks.gradient(TeacherSchedule(on_host, router), asked)
    next(iter(on_host.values())).close()
    teachers = streamed_teachers(urls, Placement(max_tokens=16, device=str(gpu.device)))
    cache = CachedScores(NodeCache(tmp_path / "cache", quota_bytes=1 << 20))
    schedule = TeacherSchedule(teachers, router, cache=cache, device=gpu.device)
    for kept in (0, sum(len(s.response_ids) for s in asked)):
        gradient = ranks.gradient_of(gpu.model(tiny.model(seed=77)), schedule, asked)
        assert schedule.take_counters()["cached_tokens"] == kept
        for name, value in gradient.items():
            torch.testing.assert_close(gpu.get(value), expected[name], rtol=1e-4, atol=1e-6)
    schedule.score(asked)
    order = [asked[place] for place in schedule.teacher_order(asked)]
    alone = {s.uid: gpu.get(schedule.hidden_rows(s.teacher, [s])) for s in order}
    for most in (unit_gather.ROWS_BYTES, 200):  # all rows at once, one after another
        monkeypatch.setattr(unit_gather, "ROWS_BYTES", most)
        for name in urls:
            mine = [s for s in order if s.teacher == name]
            with gpu.counted() as seen:
                rows = schedule.hidden_rows(name, mine)
            assert torch.equal(gpu.get(rows), torch.cat([alone[s.uid] for s in mine]))
            assert not seen.unpinned_bytes
    next(iter(teachers.values())).close()


def test_a_disk_that_is_full_leaves_all_rows_on_the_device(
    gpu, published, tmp_path: Path, monkeypatch
) -> None:
    """Rows in pieces, the first of which are on the disk already."""
    _, url = published("t")
    teacher = streamed(url, gpu, max_tokens=16, sequence_chunk=4)
    long = tiny.samples([(3, 13)])
    expected = gpu.get(teacher.score(long).rows)
    cache = CachedScores(NodeCache(tmp_path / "cache", quota_bytes=1 << 20))
    from opd.storage import node_cache

    append, done = node_cache.RowsWriter.append, []

    def full(writer, rows: np.ndarray) -> bool:
        done.append(len(rows))
        return len(done) < 3 and append(writer, rows)

    monkeypatch.setattr(node_cache.RowsWriter, "append", full)
    kept = cache.store_pieces(teacher, teacher.score_pieces(long))
    assert len(done) == 3
    (rows,) = kept.values()
    assert rows.device == gpu.device
    torch.testing.assert_close(gpu.get(rows), expected)
    teacher.close()


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_gather_on_devices(published, tmp_path: Path) -> None:
    """Each unit is whole on both, and the next part was read while the one before was not gathered yet."""
    _, url = published("t", num_hidden_layers=3, hidden_size=48)
    tasks = [{"name": f"window-{window}", "url": url, "window": window} for window in (0, 200_000)]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(gathering_rank.__file__, 2, tmp_path)
    for task in tasks:
        for rank in range(2):
            found = json.loads((tmp_path / f"{task['name']}-{rank}.json").read_text())
            assert len(found["right"]) == 3 * 6
            assert all(found["right"])
            assert not task["window"] or max(found["left"]) > 0


@pytest.mark.parametrize("room", [0, -1], ids=["as much as they are", "a byte less"])
def test_rows_below_the_bound_never_leave_the_device(gpu, published, tmp_path, room) -> None:
    """Nothing of them is copied to the host, or from there, nor written, from the third step on, when what
    may stay is known: what is handed out lies where it was computed.
    """
    _, url = published("t", num_hidden_layers=3)
    shapes, asked = [(3, 4), (5, 6), (4, 12)], []
    steps = [tiny.samples(shapes, seed=seed) for seed in (1, 2, 3)]
    nbytes = sum(response for _, response in shapes) * 4 * tiny.LLAMA["hidden_size"]
    with NodeCache(tmp_path / "cache", quota_bytes=10**7) as cache:
        scores = CachedScores(cache, grows=lambda: asked.append(room) or nbytes + room)
        teacher = streamed(url, gpu, max_tokens=64)
        router = Router({sample.domain: {"t": 1.0} for sample in steps[0]}, "one_hot")
        schedule = TeacherSchedule({"t": teacher}, router, cache=scores, device=gpu.device)
        for number, samples in enumerate(steps):
            stays = number == 2 and room == 0
            schedule.assign(samples)
            schedule.score(samples)
            with gpu.counted() as seen:
                found = schedule.hidden_rows("t", samples)
            assert cache.take_counters()["bytes_written"] == (0 if stays else nbytes)
            assert (not seen.copies) == stays
            assert torch.equal(gpu.get(found), gpu.get(teacher.score(samples).rows))
            assert all((rows.device == gpu.device) == stays for rows in schedule._rows.values())
            schedule.release()
            assert asked == [room] * (number > 0)  # once, after a step of the optimiser
        teacher.close()


def test_a_long_sample_that_fits_stays_on_the_device(gpu, published, tmp_path) -> None:
    checkpoint, _ = published("t", num_hidden_layers=3)
    samples = tiny.samples([(30, 20), (3, 4)])
    teacher = LocalTeacher("t", checkpoint, device=str(gpu.device), max_tokens=64, sequence_chunk=8)
    nbytes = 24 * 4 * tiny.LLAMA["hidden_size"]
    whole = gpu.get(teacher.score(samples).rows)
    with NodeCache(tmp_path / "cache", quota_bytes=10**7) as cache:
        scores = CachedScores(cache, memory_bytes=nbytes)
        kept = scores.store_pieces(teacher, teacher.score_pieces(samples))
        assert cache.take_counters()["bytes_written"] == 0
        assert scores.resident_bytes() == nbytes
        assert all(rows.device == gpu.device for rows in kept.values())
        assert torch.equal(torch.cat([gpu.get(kept[sample.uid]) for sample in samples]), whole)
        assert scores.find(teacher, samples[0]) is kept[samples[0].uid]
        scores.release()
        with pytest.raises(TeacherError, match="returned 3 hidden states for the 4 response tokens"):
            scores.store_pieces(teacher, iter([(samples[1], kept[samples[1].uid][:3])]))


def test_half_of_what_the_largest_moment_left_may_stay(monkeypatch) -> None:
    device = torch.device("cuda", 0)
    free = {"mem_get_info": (30, 100), "memory_reserved": 60, "max_memory_allocated": 50}
    for name, value in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda where, v=value: v)
    assert spare_bytes(device) == 20
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda where: 91)
    assert spare_bytes(device) == 0
