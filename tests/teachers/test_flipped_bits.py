"""A wrong bit in a shard, a head or a cached blob never reaches a gradient, wherever it is."""

import random
from pathlib import Path

import pytest
import ranks
import tiny
import torch
from cached_rows import blobs
from tiny_published import publish

from opd.errors import StorageError
from opd.storage.node_cache import NodeCache
from opd.teachers.kinds import Placement
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.streamed_teacher import streamed_teachers

NAMES = ["a", "b"]


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Two tiny teachers, each in two shards; the first one's head is its own."""
    folder = tmp_path_factory.mktemp("flipped")
    models = {name: tiny.model(seed=i, tie_word_embeddings=i > 0) for i, name in enumerate(NAMES)}
    return {name: publish(model, folder / name, shards=2)[1] for name, model in models.items()}


def gradient(urls: dict[str, str], cache: CachedScores | None = None) -> dict[str, torch.Tensor]:
    """One step with newly opened teachers."""
    made = streamed_teachers(urls, Placement(max_tokens=16), prefetch_bytes=20_000)
    schedule = TeacherSchedule(made, Router({n: {n: 1.0} for n in NAMES}, "one_hot"), cache=cache)
    try:
        return ranks.gradient(schedule, ranks.samples(NAMES))
    finally:
        for teacher in made.values():
            teacher.close()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def refusal(urls: dict[str, str], expected: dict[str, torch.Tensor]) -> str | None:
    """What stops the step; `None` if its gradient is right to the bit."""
    try:
        assert equal(gradient(urls), expected)
    except StorageError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 1])
def test_a_bit_of_a_shard(urls, shard):
    """Stops before the gradient, or lies between two units, where nobody reads."""
    expected, chooser, stopped = gradient(urls), random.Random(shard), 0
    path = sorted(Path(urls["b"]).rglob("shard-*"))[shard]
    data = bytearray(path.read_bytes())
    step = len(data) // 40
    offsets = [start + chooser.randrange(step) for start in range(0, 39 * step, step)]
    for at in offsets:
        bit = 1 << chooser.randrange(8)
        data[at] ^= bit
        path.write_bytes(data)
        problem = refusal(urls, expected)
        if problem is not None:
            assert f"{path} bytes" in problem
            assert "corrupt" in problem
            stopped += 1
        data[at] ^= bit
    path.write_bytes(data)
    assert stopped >= 0.9 * len(offsets)
    assert equal(gradient(urls), expected)


@pytest.mark.slow
def test_a_bit_of_a_head(urls):
    """The head's own bytes, every one of them: layers are read, and training has begun."""
    expected, chooser = gradient(urls), random.Random(2)
    made = streamed_teachers(urls, Placement())
    manifest = made["a"].published.manifest
    path = Path(urls["a"]) / manifest.shard_path(0)
    start = manifest.shard_offset("head", 0)
    made["a"].close()
    data = bytearray(path.read_bytes())
    for at in chooser.sample(range(start, len(data)), 30):
        data[at] ^= 16
        path.write_bytes(data)
        with pytest.raises(StorageError, match=r"\(head, block \d\) are corrupt"):
            gradient(urls)
        data[at] ^= 16
    path.write_bytes(data)
    assert equal(gradient(urls), expected)


@pytest.mark.slow
def test_a_bit_of_a_cached_blob(urls, tmp_path, caplog):
    """Is a miss: the teacher runs again."""
    expected, chooser = gradient(urls), random.Random(3)
    with NodeCache(tmp_path, quota_bytes=10**7) as cache:
        scores = CachedScores(cache)
        assert equal(gradient(urls, scores), expected)
        assert len(blobs(tmp_path)) == len(ranks.LENGTHS)
        for number in range(40):
            path = blobs(tmp_path)[number % len(ranks.LENGTHS)]
            data = bytearray(path.read_bytes())
            data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
            path.write_bytes(data)
            assert equal(gradient(urls, scores), expected)
            assert len(caplog.messages) == number + 1
            assert str(path) in caplog.messages[-1]
