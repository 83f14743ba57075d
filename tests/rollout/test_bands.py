"""Slots in the order of what they hold: what is read of them, when they move, and that no token changes."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import FAMILIES
from test_kept_turns import Talk, first_turns, same

from opd.rollout import batch
from opd.rollout.batch import SAME, WORTH, bands_of, better_order
from opd.rollout.kv_cache import KVCache
from opd.rollout.torch_engine import TorchEngine
from opd.types import Chunk, RolloutRequest, SamplingParams

Fixture = Callable[..., Any]
HELD = st.lists(st.integers(1, 400), min_size=1, max_size=80).map(np.array)
BYTES = st.sampled_from([1, 512, 1 << 20])


@given(held=HELD, position_bytes=BYTES)
def test_every_slot_is_read_in_one_band_as_far_as_its_fullest(held: np.ndarray, position_bytes: int) -> None:
    found = bands_of(held, position_bytes)
    assert found[0].first == 0
    assert found[-1].stop == len(held)
    assert all(band.stop == after.first for band, after in pairwise(found))
    assert [band.longest for band in found] == [held[band.first : band.stop].max() for band in found]
    saved = (len(held) * held.max() - sum(band.position_count for band in found)) * position_bytes
    assert saved >= WORTH * (len(found) - 1)


@given(held=HELD, position_bytes=BYTES)
def test_an_order_is_a_permutation_that_reads_less_and_lasts(held: np.ndarray, position_bytes: int) -> None:
    source, target = better_order(held, position_bytes)
    assert sorted(source) == sorted(target)
    assert len(set(source.tolist())) == len(source)
    if not source.size:
        return
    after = held.copy()
    after[target] = held[source]
    before_bytes, after_bytes = (
        sum(b.position_count for b in bands_of(x, position_bytes)) for x in (held, after)
    )
    assert after_bytes < before_bytes
    assert not better_order(after, position_bytes)[0].size


def exponential(rows: int) -> np.ndarray:
    """[rows] held tokens of mean 1,024 and at most 4,096, in an order without meaning."""
    shares = (np.random.default_rng(0).permutation(rows) + 0.5) / rows
    return (-1024 * np.log(shares)).astype(np.int64).clip(1, 4096)


@pytest.mark.parametrize(
    ("held", "position_bytes"),
    [
        (np.random.default_rng(0).integers(16, 257, 320), 2048),
        (exponential(64), 1024),
        (exponential(512), 1024),
    ],
)
def test_sorted_slots_cost_little_more_than_they_hold(held: np.ndarray, position_bytes: int) -> None:
    source, target = better_order(held, position_bytes)
    before = sum(band.position_count for band in bands_of(held, position_bytes))
    held[target] = held[source]
    found = bands_of(held, position_bytes)
    assert 3 < len(found) <= batch.PARTS
    assert [band.longest for band in found] == sorted((band.longest for band in found), reverse=True)
    for band, after in pairwise(found):
        assert held[band.first : band.stop].min() >= after.longest - SAME
    assert sum(band.position_count for band in found) < 1.3 * held.sum() < 1.5 * held.sum() < before
    assert not better_order(np.full(320, 200), position_bytes)[0].size


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are read in bands, too, and slots move for any gain."""
    monkeypatch.setattr(batch, "WORTH", 1)
    monkeypatch.setattr(batch, "PARTS", 4)  # of more each slot would be a band of its own
    monkeypatch.setattr(batch, "AHEAD", 1000)
    monkeypatch.setattr(batch, "SAME", 1)


def ragged(number: int) -> list[RolloutRequest]:
    rng = np.random.default_rng(1)
    return [
        RolloutRequest(
            f"{i}",
            rng.integers(0, 11, rng.integers(1, 30)).astype(np.int32),
            SamplingParams(max_new_tokens=int(rng.integers(1, 30)), stop_ids=(3,)),
            0,
        )
        for i in range(number)
    ]


def asked(engine: TorchEngine, begun: list[RolloutRequest]) -> Iterator[Chunk]:
    """Conversations and ragged single answers."""
    yield from Talk(engine, begun).chunks()
    yield from engine.generate(ragged(60))


@pytest.mark.some(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_changes(
    family: str, build: Fixture, collect: Fixture, request: pytest.FixtureRequest
) -> None:
    model, _ = build(family)
    begun = first_turns(12)
    expected = collect(asked(TorchEngine(model, max_running=16), begun))
    request.getfixturevalue("everywhere")
    engine, swaps = TorchEngine(model, max_running=16), []
    move = KVCache.move_slots

    def watched(cache: KVCache, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        swaps.append(sorted(source) == sorted(target))
        move(cache, source, target, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "move_slots", watched)
        same(collect(asked(engine, begun)), expected)
    assert sum(swaps) > 10


def test_what_steps_read_is_counted(build: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests of 5 to 90 tokens, for a step each read as one and in bands."""
    model, _ = build("llama")
    held = np.array([90, 5, 60, 20, 5])
    sampling = SamplingParams(max_new_tokens=3)
    for worth, expected in ((batch.WORTH, 5 * 93), (1, 93 + 6 + 61 + 21 + 6)):
        monkeypatch.setattr(batch, "WORTH", worth)
        engine = TorchEngine(model)
        engine.submit([RolloutRequest(f"{i}", np.ones(n, np.int32), sampling) for i, n in enumerate(held)])
        engine.next_chunk()
        assert engine.position_counts == (0, 0)
        engine.next_chunk()
        assert engine.position_counts == (expected, int(held.sum()) + 5)
