"""Cached attention against a float64 loop, and what moves and growth keep."""

import numpy as np
import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.models.attention import ScoreForm
from opd.rollout import batch
from opd.rollout.forward import DecodeAttention, Span
from opd.rollout.kv_cache import KVCache


def filled_cache(lengths: list[int], capacity: int, heads: int, size: int, seed: int) -> KVCache:
    """A cache with random contents in the first `len(lengths)` slots; the rest keeps leftovers of other
    calls.
    """
    cache = KVCache()
    generator = torch.Generator().manual_seed(seed)
    for used in (len(lengths) + 2, len(lengths)):
        cache.reset(len(lengths) + 2)
        cache.ensure_capacity(len(lengths) + 2, capacity, capacity, 0)
        layer = cache.get_layer(0, torch.zeros(1, heads, 1, size), torch.zeros(1, heads, 1, size + 1))
        layer.keys[:used] = torch.randn(layer.keys[:used].shape, generator=generator)
        layer.values[:used] = torch.randn(layer.values[:used].shape, generator=generator)
    return cache


def attend_slot(query: np.ndarray, keys: np.ndarray, values: np.ndarray, form: ScoreForm) -> np.ndarray:
    """`query` [H, d], `keys` [Hkv, n, d], `values` [Hkv, n, dv] of one slot -> [H, dv], float64."""
    group = len(query) // len(keys)
    first = 0 if form.window is None else max(0, keys.shape[1] - form.window)
    out = []
    for head, q in enumerate(query):
        k, v = keys[head // group, first:], values[head // group, first:]
        scores = form.scaling * (k @ q)
        if form.softcap is not None:
            scores = form.softcap * np.tanh(scores / form.softcap)
        sink = -np.inf if form.sinks is None else float(form.sinks[head])
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        out.append(weights / (weights.sum() + np.exp(sink - highest)) @ v)
    return np.stack(out)


@settings(max_examples=cases(60), deadline=None)
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 60).map(lambda n: [n] * 4)
    ),
    slack=st.integers(0, 40),
    groups=st.integers(1, 3),
    heads=st.integers(1, 2),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 1, 4, 30]),
    sinks=st.booleans(),
    span_of=st.sampled_from(["what is held", "in bands", "all"]),
    seed=st.integers(0, 1000),
)
def test_equals_a_loop_over_slots_and_heads(
    lengths: list[int],
    slack: int,
    groups: int,
    heads: int,
    softcap: float | None,
    window: int | None,
    sinks: bool,
    span_of: str,
    seed: int,
) -> None:
    rows, size = len(lengths), 8
    cache = filled_cache(lengths, max(lengths) + slack, heads, size, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(rows, heads * groups, size, generator=generator)
    key = torch.randn(rows, heads, size, generator=generator)
    value = torch.randn(rows, heads, size + 1, generator=generator)
    drawn = torch.randn(heads * groups, generator=generator) if sinks else None
    form = ScoreForm(0.4, softcap=softcap, window=window, sinks=drawn)
    layer = cache.layers[0]
    before = layer.keys.clone(), layer.values.clone()
    positions = np.array(lengths) - 1
    # As a CPU decodes, few requests and many, and as a step is captured: there the positions are the device's
    # alone.
    span = Span(rows, cache.capacity, cache.capacity)
    if span_of != "all":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch, "WORTH", 1 if span_of == "in bands" else batch.WORTH)
            span = Span.for_positions(positions, cache)
    attention = DecodeAttention(cache, torch.from_numpy(positions), span)
    ours = attention.attend(layer, query, key, value, form)
    for row, position in enumerate(positions):
        k, v = (x[row, :, : position + 1].double().numpy() for x in before)
        k[:, position], v[:, position] = key[row].numpy(), value[row].numpy()
        expected = attend_slot(query[row].double().numpy(), k, v, form)
        np.testing.assert_allclose(ours[row].numpy(), expected, atol=1e-5)
        assert torch.equal(layer.keys[row, :, position], key[row])
    assert torch.equal(layer.keys[rows:], before[0][rows:])
    for band in span.bands:
        assert band.longest == cache.window_length(max(lengths[band.first : band.stop]))


def test_growth_and_moves_keep_contents() -> None:
    cache = filled_cache([5, 5, 5, 5], 6, 2, 4, 0)
    keys, values = (x.clone() for x in (cache.layers[0].keys, cache.layers[0].values))
    cache.ensure_capacity(6, 7, 100, 4)
    assert 7 < cache.capacity < 100
    layer = cache.layers[0]
    assert torch.equal(layer.keys[:4, :, :6], keys[:4])
    assert torch.equal(layer.values[:4, :, :6], values[:4])
    cache.move_slots(np.array([3, 2]), np.array([0, 1]), np.array([5, 3]))
    for moved, before in ((layer.keys, keys), (layer.values, values)):
        assert torch.equal(moved[0, :, :5], before[3, :, :5])
        assert torch.equal(moved[1, :, :3], before[2, :, :3])


def test_slots_change_places() -> None:
    cache = filled_cache([5, 5, 5, 5], 6, 2, 4, 0)
    keys, values = (x.clone() for x in (cache.layers[0].keys, cache.layers[0].values))
    cache.move_slots(np.array([3, 0, 1]), np.array([0, 1, 3]), np.array([5, 3, 4]))
    for moved, before in ((cache.layers[0].keys, keys), (cache.layers[0].values, values)):
        assert torch.equal(moved[0, :, :5], before[3, :, :5])
        assert torch.equal(moved[1, :, :3], before[0, :, :3])
        assert torch.equal(moved[3, :, :4], before[1, :, :4])
        assert torch.equal(moved[2], before[2])


def test_growth_stops_at_the_limit() -> None:
    cache = filled_cache([5], 6, 1, 4, 0)
    cache.ensure_capacity(1, 20, 22, 1)
    assert cache.capacity == 22


def fill(cache: KVCache, rows: int) -> None:
    """Give a cache of one layer something to keep."""
    layer = cache.get_layer(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    layer.keys[:rows] = torch.arange(rows)[:, None, None, None].float() + 1


def test_slots_and_length_stay_within_the_budget() -> None:
    cache = KVCache(100)
    cache.reset(10)
    cache.ensure_capacity(4, 8, 30, 0)
    assert (cache.slots, cache.capacity) == (4, 24)
    fill(cache, 4)
    cache.ensure_capacity(2, 40, 60, 2)
    assert (cache.slots, cache.capacity) == (2, 50)
    assert cache.layers[0].keys[:2, 0, :24, 0].tolist() == [[1.0] * 24, [2.0] * 24]
    cache.ensure_capacity(5, 9, 20, 2)
    assert cache.slots >= 5
    assert cache.slots * cache.capacity <= 100
    assert cache.layers[0].keys[:2, 0, :9, 0].tolist() == [[1.0] * 9, [2.0] * 9]


def test_a_static_layout_outlives_a_call_and_reads_few_lengths() -> None:
    cache = KVCache(10_000, static=True)
    cache.reset(8)
    cache.ensure_capacity(3, 70, 90, 0)
    fill(cache, 3)
    assert (cache.slots, cache.capacity) == (8, 96)
    layout = cache.layout
    assert [cache.window_length(tokens) for tokens in (1, 64, 65, 96)] == [64, 64, 96, 96]
    cache.reset(5)
    cache.ensure_capacity(5, 20, 30, 0)
    fill(cache, 5)
    assert cache.layout is layout
    cache.reset(9)
    cache.ensure_capacity(9, 20, 30, 0)
    assert cache.layout is not layout


def test_memory_is_kept_between_calls() -> None:
    cache = filled_cache([5, 5], 40, 2, 4, 0)
    held = cache.nbytes
    cache.reset(3)
    cache.ensure_capacity(3, 10, 20, 0)
    cache.get_layer(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 5))
    assert cache.nbytes == held


def test_a_prompt_read_from_one_slot_can_be_written_to_others() -> None:
    cache = filled_cache([5, 5, 5], 8, 2, 4, 0)
    prompt = cache.read_slot(1, 5)
    cache.write_prompt(slice(2, 5), prompt)
    layer = cache.layers[0]
    for row in (2, 3, 4):
        assert torch.equal(layer.keys[row, :, :5], layer.keys[1, :, :5])
        assert torch.equal(layer.values[row, :, :5], layer.values[1, :, :5])


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_window_reads_across_small_gaps_only(tokens: int) -> None:
    cache = KVCache()
    cache.reset(1)
    cache.ensure_capacity(1, 1000, 1000, 0)
    assert cache.window_length(tokens) == tokens
    assert cache.window_length(990) == 1000
