"""Plans from metadata: every trajectory once, within the budget, balanced, teacher by teacher, repeatable."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.train.plan import (
    CostModel,
    DeviceBudget,
    MicroBatchPlan,
    PlanSettings,
    TrainingPlan,
    Workload,
    balance_ranks,
    make_plan,
    pack_shares,
)


def batches_of(plan: TrainingPlan, step: int, rank: int | None = None) -> list[MicroBatchPlan]:
    every = map(plan.__getitem__, range(len(plan)))
    return [m for m in every if m.mini_batch == step and rank in (None, m.rank)]


def rows_of(plan: TrainingPlan, step: int) -> np.ndarray:
    return np.concatenate([m.rows for m in batches_of(plan, step)])


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(0, 60))
    seed = draw(st.integers(0, 1000))
    chooser = np.random.default_rng(seed)
    longest = draw(st.sampled_from([1, 10, 5000]))
    lengths = chooser.integers(0, longest + 1, count)
    sizes = lengths * draw(st.sampled_from([0, 13, 5000])) + chooser.integers(0, 100, count)
    return Workload(lengths, chooser.integers(0, draw(st.integers(1, 4)), count), sizes)


settings = st.builds(
    PlanSettings, st.integers(1, 20), st.integers(1, 5), st.integers(0, 5), st.integers(0, 2)
)
costs = st.builds(
    CostModel,
    linear=st.sampled_from([1.0, 100.0]),
    quadratic=st.sampled_from([0.0, 0.1]),
    operations_per_second=st.sampled_from([1.0, 1e6]),
    bytes_per_second=st.sampled_from([math.inf, 1e3, 1e6]),
    overhead_seconds=st.sampled_from([0.0, 1e-3, 1.0]),
)
budgets = st.builds(
    DeviceBudget,
    max_bytes=st.sampled_from([1e3, 1e6, 1e9]),
    bytes_per_token=st.sampled_from([0.0, 1.0, 500.0]),
    max_tokens=st.sampled_from([None, 7, 4096]),
)


@given(workloads(), settings, costs, budgets)
def test_what_holds_of_every_plan(
    work: Workload, chosen: PlanSettings, cost: CostModel, budget: DeviceBudget
) -> None:
    plan = make_plan(work, chosen, cost, budget)
    assert sorted(plan.order.tolist()) == list(range(len(work)))
    assert plan.mini_batches == math.ceil(len(work) / chosen.mini_batch)
    micro = [plan[index] for index in range(len(plan))]
    places = [(m.mini_batch, m.rank, m.teacher) for m in micro]
    assert places == sorted(places)  # teachers are contiguous on a rank, in their order
    oversize = set(plan.oversize.tolist())
    for m in micro:
        assert set(work.teachers[m.rows].tolist()) == {m.teacher}
        tokens, size = int(work.lengths[m.rows].sum()), int(work.sizes[m.rows].sum())
        fits = 2 * size + budget.bytes_per_token * tokens <= budget.max_bytes * (1 + 1e-12)
        fits = fits and tokens <= (budget.max_tokens or math.inf)
        if oversize & set(m.rows.tolist()):
            assert len(m.rows) == 1
            assert not fits
        else:
            assert fits
    for step in range(plan.mini_batches):
        rows = rows_of(plan, step)
        assert len(rows) == min(chosen.mini_batch, len(work) - step * chosen.mini_batch)
        loads = np.array(
            [
                sum(cost.total_operations(work.lengths[m.rows]).sum() for m in batches_of(plan, step, rank))
                for rank in range(chosen.ranks)
            ]
        )
        largest = cost.total_operations(work.lengths[rows]).max()
        assert loads.max() <= loads.mean() + (1 - 1 / chosen.ranks) * largest * (1 + 1e-9)
        by_hand = [
            np.concatenate([[], *(m.rows for m in batches_of(plan, step, r))]) for r in range(chosen.ranks)
        ]
        assert np.array_equal(np.concatenate(by_hand), rows)
    again = make_plan(work, chosen, cost, budget)
    for name in TrainingPlan.__slots__:
        assert np.array_equal(getattr(again, name), getattr(plan, name))


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    work = Workload(np.full(100, 5), np.zeros(100, int), np.full(100, 9))
    budget = DeviceBudget(1e6)
    orders = {
        (seed, epoch): rows_of(make_plan(work, PlanSettings(10, 2, seed, epoch), CostModel(), budget), 0)
        for seed, epoch in itertools.product(range(2), range(2))
    }
    assert len({tuple(sorted(rows.tolist())) for rows in orders.values()}) == 4
    other = rows_of(make_plan(work, PlanSettings(10, 5, 0, 0), CostModel(), DeviceBudget(50.0)), 0)
    assert sorted(other.tolist()) == sorted(orders[0, 0].tolist())  # the same steps on other ranks


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_is_within_grahams_bound_of_the_best(costs: list[int], ranks: int) -> None:
    chosen = balance_ranks(np.array(costs), ranks)
    worst = max(sum(c for c, r in zip(costs, chosen, strict=True) if r == rank) for rank in range(ranks))
    best = min(
        max(sum(c for c, r in zip(costs, choice, strict=True) if r == rank) for rank in range(ranks))
        for choice in itertools.product(range(ranks), repeat=len(costs))
    )
    assert worst <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@given(st.lists(st.integers(1, 150), max_size=40))
def test_packing_fills_micro_batches(sizes: list[int]) -> None:
    packed = pack_shares(np.array(sizes) / 100)
    assert sorted(place for own in packed for place in own) == list(range(len(sizes)))
    fits = [own for own in packed if sum(sizes[place] for place in own) <= 100]
    assert all(len(own) == 1 for own in packed if own not in fits)
    # Of two micro-batches at most one is half empty, or they would be one.
    assert sum(sum(sizes[place] for place in own) <= 50 for own in fits) <= 1
    assert len(fits) <= 2 * sum(size for size in sizes if size <= 100) / 100 + 1


def _count(cost: CostModel, budget: DeviceBudget) -> int:
    work = Workload(np.full(64, 1000), np.zeros(64, int), np.full(64, 10_000))
    return len(make_plan(work, PlanSettings(64), cost, budget))


def test_the_number_of_micro_batches_trades_compute_against_reading() -> None:
    """64 trajectories: 64 s of compute, 64 s of reading at 1e4 bytes a second, or less where it is faster."""
    free = DeviceBudget(math.inf)
    nothing_to_read = CostModel(operations_per_second=1000.0, overhead_seconds=0.1)
    assert _count(nothing_to_read, free) == 1
    slow = CostModel(operations_per_second=1000.0, bytes_per_second=1e4, overhead_seconds=1.0)
    assert _count(slow, free) == 8  # sqrt(64 / 1)
    cheap = CostModel(operations_per_second=1000.0, bytes_per_second=1e4, overhead_seconds=0.0)
    assert _count(cheap, free) == 64
    tight = DeviceBudget(2 * 40_000.0)  # four at a time
    assert _count(nothing_to_read, tight) == 16
    assert _count(slow, DeviceBudget(math.inf, max_tokens=2000)) == 32


def test_the_chosen_number_is_the_best_of_all_for_equal_parts() -> None:
    work = Workload(np.full(64, 1000), np.zeros(64, int), np.full(64, 10_000))
    for overhead in (0.05, 0.4, 1.0, 5.0):
        cost = CostModel(operations_per_second=800.0, bytes_per_second=1e4, overhead_seconds=overhead)
        chosen = make_plan(work, PlanSettings(64), cost, DeviceBudget(math.inf)).rank_seconds(work, cost)[
            0, 0
        ]
        every = []
        for count in (1, 2, 4, 8, 16, 32, 64):
            budget = DeviceBudget(math.inf, max_tokens=64_000 // count)
            fixed = CostModel(operations_per_second=800.0)
            every.append(make_plan(work, PlanSettings(64), fixed, budget).rank_seconds(work, cost)[0, 0])
        assert chosen <= 1.05 * min(every)


def test_attention_counts_when_ranks_are_balanced() -> None:
    """One sequence of 1,000 tokens has the tokens of ten of 100, and the pairs of a hundred."""
    work = Workload(np.array([1000] + [100] * 10), np.zeros(11, int), np.zeros(11, int))
    plain = make_plan(work, PlanSettings(11, 2), CostModel(), DeviceBudget(1e9))
    assert sorted(len(list(plan.rows)) for plan in map(plain.__getitem__, range(len(plain)))) == [1, 10]
    two = Workload(np.array([1000, 1000] + [100] * 20), np.zeros(22, int), np.zeros(22, int))
    quadratic = CostModel(quadratic=1.0)
    plan = make_plan(two, PlanSettings(22, 3), quadratic, DeviceBudget(1e9))
    by_rank = [np.concatenate([m.rows for m in batches_of(plan, 0, rank)]).tolist() for rank in range(3)]
    assert sorted(map(len, by_rank)) == [1, 1, 20]


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


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="mini_batch and ranks"):
        PlanSettings(0)
    with pytest.raises(ValueError, match="must be positive"):
        DeviceBudget(0)
    with pytest.raises(ValueError, match="must be positive"):
        CostModel(linear=0)
    with pytest.raises(ValueError, match="one of each"):
        Workload(np.zeros(2), np.zeros(1), np.zeros(2))
