"""The noise is numpy's Philox stream of each request, reached at any position."""

import numpy as np
import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.rollout.sampling import BLOCK, NoiseTable, philox, uid_keys


def stream(seed: int, uid: str, length: int) -> np.ndarray:
    key = np.array([seed, uid_keys([uid])[0]], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(length)


def table_of(requests: list[tuple[int, str]]) -> NoiseTable:
    table = NoiseTable(len(requests))
    seeds = np.array([seed for seed, _ in requests], dtype=np.uint64)
    table.assign_slots(slice(0, len(requests)), seeds, uid_keys(uid for _, uid in requests))
    return table


@settings(max_examples=cases(60), deadline=None)
@given(seed=st.integers(0, 2**64 - 1), uid=st.text(max_size=20), start=st.integers(0, 70))
def test_equals_numpys_stream_from_any_start(seed: int, uid: str, start: int) -> None:
    table = table_of([(seed, uid)])
    drawn = [table.uniforms_at(np.array([position]))[0] for position in range(start, start + 2 * BLOCK)]
    np.testing.assert_array_equal(drawn, stream(seed, uid, start + 2 * BLOCK)[start:])


@given(counter=st.integers(0, 2**64 - 2), key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)))
def test_philox_equals_numpys_words_at_any_counter(counter: int, key: tuple[int, int]) -> None:
    ours = philox(np.array([counter + 1], dtype=np.uint64), np.array(key, dtype=np.uint64)[:, None])[0]
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=[counter, 0, 0, 0])
    np.testing.assert_array_equal(ours, generator.random_raw(4))


def test_a_late_position_costs_one_block() -> None:
    position = 10**6 + 3
    drawn = table_of([(5, "late")]).uniforms_at(np.array([position]))[0]
    assert drawn == stream(5, "late", position + 1)[-1]


def test_rows_keep_their_stream_when_they_move_and_are_reassigned() -> None:
    table = table_of([(1, "a"), (1, "b"), (1, "c"), (1, "d")])
    table.uniforms_at(np.array([3, 3, 3, 3]))
    table.move_slots(np.array([3]), np.array([1]))
    np.testing.assert_array_equal(
        table.uniforms_at(np.array([4, 20, 4])),
        [stream(1, u, 21)[p] for u, p in (("a", 4), ("d", 20), ("c", 4))],
    )
    table.assign_slots(slice(0, 1), np.array([2], dtype=np.uint64), uid_keys(["e"]))
    assert table.uniforms_at(np.array([4]))[0] == stream(2, "e", 5)[4]


@pytest.mark.parametrize("axis", ["uid", "position", "seed"])
def test_uniforms_along_each_axis_are_uniform_and_uncorrelated(axis: str) -> None:
    n = 4096
    requests = {
        "uid": [(0, f"group-{i}/0") for i in range(n)],
        "seed": [(i, "same") for i in range(n)],
        "position": [(0, "same")] * n,
    }[axis]
    positions = np.arange(n) if axis == "position" else np.zeros(n, dtype=np.int64)
    u = table_of(requests).uniforms_at(positions)
    # 99.9 % quantile of chi-square with 63 degrees of freedom.
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 103.4
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(n)
