"""Plans from metadata: every trajectory once, balanced, teacher by teacher, as training deals and packs."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.train.packing import Shares
from opd.train.plan import CostModel, Workload, deal_samples, make_plan, rank_seconds
from opd.types import Sample


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(0, 60))
    chooser = np.random.default_rng(draw(st.integers(0, 1000)))
    lengths = chooser.integers(1, draw(st.sampled_from([1, 10, 5000])) + 1, count)
    sizes = lengths * draw(st.sampled_from([0, 13, 5000])) + chooser.integers(0, 100, count)
    return Workload(lengths, chooser.integers(0, draw(st.integers(1, 4)), count), sizes)


costs = st.builds(
    CostModel,
    linear=st.sampled_from([1.0, 100.0]),
    quadratic=st.sampled_from([0.0, 0.1]),
    operations_per_second=st.sampled_from([1.0, 1e6]),
    overhead_seconds=st.sampled_from([0.0, 1e-3, 1.0]),
)


@given(
    workloads(), st.integers(1, 20), st.integers(1, 5), costs, st.sampled_from([1, 7, 4096]), st.booleans()
)
def test_a_plan_is_what_each_rank_trains(work, mini_batch, ranks, cost, most, by_teacher):
    plan = make_plan(work, mini_batch, ranks, cost, most, by_teacher=by_teacher)
    places = [(micro.mini_batch, micro.rank, teacher) for micro in plan for teacher in micro.teachers]
    assert places == sorted(places)  # teachers are contiguous on a rank, in their order
    assert all(len(micro.teachers) == 1 for micro in plan) or not by_teacher
    for step, start in enumerate(range(0, len(work), mini_batch)):
        rows = range(start, min(start + mini_batch, len(work)))
        samples = [
            Sample(
                f"{row:06}",
                "g",
                "d",
                np.zeros(0, np.int32),
                teacher=str(work.teachers[row]),
                response_ids=np.zeros(work.lengths[row], np.int32),
            )
            for row in sorted(rows, key=lambda row: work.teachers[row])
        ]
        planned = {rank: [] for rank in range(ranks)}
        for micro in plan:
            if micro.mini_batch == step:
                planned[micro.rank].append(micro.rows.tolist())
        trained = {}
        for rank in range(ranks):
            data: Any = SimpleNamespace(is_alone=ranks == 1, size=ranks, rank=rank)
            chunks = Shares(data, cost).in_step(samples, most, by_teacher=by_teacher)
            trained[rank] = [[int(samples[i].uid) for i in chunk] for chunk in chunks if chunk]
        assert planned == trained


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=7), st.integers(1, 3))
def test_a_teachers_balance_is_within_grahams_bound_of_the_best(dealt, ranks):
    """Graham 1969, "Bounds on Multiprocessing Timing Anomalies"."""
    costs, teachers = zip(*dealt, strict=True)
    owners = deal_samples(costs, teachers, ranks)
    for teacher in set(teachers):
        mine = [(c, r) for c, t, r in zip(costs, teachers, owners, strict=True) if t == teacher]
        worst = max(sum(c for c, r in mine if r == rank) for rank in range(ranks))
        best = min(
            max(sum(c for (c, _), r in zip(mine, choice, strict=True) if r == rank) for rank in range(ranks))
            for choice in itertools.product(range(ranks), repeat=len(mine))
        )
        assert worst <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_reading_hides_behind_computing():
    work = Workload(np.full(4, 1000), np.zeros(4, int), np.full(4, 10_000))
    cost = CostModel(operations_per_second=1000.0, bytes_per_second=1e4, overhead_seconds=0.5)
    assert rank_seconds(make_plan(work, 4, 1, cost, 1000), work, cost) == {(0, 0): 7.0}
    assert rank_seconds(make_plan(work, 4, 2, cost, 1000), work, cost) == {(0, 0): 4.0, (0, 1): 4.0}


def test_attention_counts_when_ranks_are_balanced():
    """One sequence of 1,000 tokens has the tokens of ten of 100, and the pairs of a hundred."""
    work = Workload(np.array([1000] + [100] * 10), np.zeros(11, int), np.zeros(11, int))
    plain = make_plan(work, 11, 2, CostModel(), 10**6)
    assert sorted(len(micro.rows) for micro in plain) == [1, 10]
    two = Workload(np.array([1000, 1000] + [100] * 20), np.zeros(22, int), np.zeros(22, int))
    assert sorted(len(m.rows) for m in make_plan(two, 22, 3, CostModel(quadratic=1.0), 10**6)) == [1, 1, 20]


@given(st.integers(1, 60), st.integers(1, 30))
def test_a_window_counts_the_pairs_that_it_shows(length: int, window: int) -> None:
    """The area under the window, which pairs of tokens fill up to their diagonal."""
    pairs = sum(min(place + 1, window) for place in range(length))
    cost = CostModel(windowed=0.5, window=window)
    assert pairs - min(length, window) / 2 == pytest.approx(
        float(cost.attention_operations(np.array([length]))[0])
    )
    full, cut = CostModel.of_model(7, 4, [None] * 3), CostModel.of_model(7, 4, [None, length, None])
    lengths = np.arange(length + 1)
    np.testing.assert_allclose(full.total_operations(lengths), cut.total_operations(lengths))


def test_a_cost_that_no_device_has_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        CostModel(linear=0)
