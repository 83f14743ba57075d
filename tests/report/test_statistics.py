"""Intervals against published figures, exact coverage and limits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import DataError
from opd.pipelines.evaluation.statistics import (
    Count,
    accuracy_difference,
    contrast_interval,
    mean_accuracy,
    mean_difference,
    paired_interval,
    recovery_interval,
    retention_interval,
    wilson_interval,
)

counts = st.integers(1, 2000).flatmap(lambda n: st.builds(Count, st.integers(0, n), st.just(n)))
levels = st.sampled_from([0.8, 0.9, 0.95, 0.99])


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_published_intervals(correct: int, total: int, low: float, high: float) -> None:
    interval = wilson_interval(Count(correct, total))
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


@pytest.mark.parametrize(
    ("a", "b", "low", "high"),
    # Newcombe (1998), "Interval estimation for the difference between independent proportions",
    # table II, method 10.
    [
        (Count(56, 70), Count(48, 80), 0.0524, 0.3339),
        (Count(9, 10), Count(3, 10), 0.1705, 0.8090),
        (Count(10, 10), Count(0, 20), 0.6791, 1.0),
    ],
)
def test_difference_matches_published_intervals(a: Count, b: Count, low: float, high: float) -> None:
    interval = accuracy_difference(a, b)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


@given(counts, levels)
def test_wilson_holds_the_estimate_and_is_symmetric(count: Count, level: float) -> None:
    value, low, high = wilson_interval(count, level)
    assert 0 <= low <= value <= high <= 1
    assert high > low
    mirrored = wilson_interval(Count(count.total - count.correct, count.total), level)
    assert mirrored.low == pytest.approx(1 - high, abs=1e-12)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=6), levels)
def test_swapping_the_models_mirrors_the_difference(pairs: list[tuple[Count, Count]], level: float) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    forward, backward = mean_difference(a, b, level), mean_difference(b, a, level)
    assert forward.low <= forward.value <= forward.high
    assert forward.value == pytest.approx(-backward.value, abs=1e-12)
    assert forward.low == pytest.approx(-backward.high, abs=1e-12)


@given(counts, levels)
def test_mean_of_one_domain_is_its_wilson_interval(count: Count, level: float) -> None:
    assert mean_accuracy([count], level) == pytest.approx(wilson_interval(count, level), abs=1e-12)


@given(counts, st.integers(2, 6))
def test_a_mean_over_domains_is_narrower_by_the_square_root(count: Count, domains: int) -> None:
    one, mean = wilson_interval(count), mean_accuracy([count] * domains)
    assert mean.high - mean.value == pytest.approx((one.high - one.value) / math.sqrt(domains), rel=1e-9)


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.5), (0.9, 0.7), (0.97, 0.95)])
def test_difference_covers_at_its_level(p: float, q: float) -> None:
    """Exact enumeration over both binomials: coverage at n = 40, conservative near the edges."""
    n = 40
    covered = 0.0
    for x in range(n + 1):
        for y in range(n + 1):
            interval = accuracy_difference(Count(x, n), Count(y, n))
            if interval.low <= p - q <= interval.high:
                covered += _binomial(x, n, p) * _binomial(y, n, q)
    assert 0.93 < covered < 0.995


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 150), st.integers(150, 250), st.integers(350, 500))
def test_recovery_is_the_normalised_gain(base: int, student: int, teacher: int) -> None:
    found = recovery_interval(Count(student, 500), Count(base, 500), Count(teacher, 500))
    assert found is not None
    assert found.value == pytest.approx((student - base) / (teacher - base))
    assert found.low < found.value < found.high


def test_recovery_interval_agrees_with_the_delta_method() -> None:
    student, base, teacher = Count(3800, 5000), Count(1000, 5000), Count(4500, 5000)
    found = recovery_interval(student, base, teacher)
    assert found is not None
    gain = teacher.accuracy - base.accuracy
    variance = {c: c.accuracy * (1 - c.accuracy) / c.total for c in (student, base, teacher)}
    slope = {student: 1 / gain, teacher: -found.value / gain, base: (found.value - 1) / gain}
    half = 1.96 * math.sqrt(sum(variance[c] * slope[c] ** 2 for c in variance))
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.03)


def test_recovery_needs_a_teacher_above_the_base() -> None:
    assert recovery_interval(Count(50, 100), Count(50, 100), Count(52, 100)) is None
    assert recovery_interval(Count(50, 100), Count(50, 100), Count(20, 100)) is None
    perfect = recovery_interval(Count(500, 500), Count(100, 500), Count(500, 500))
    assert perfect is not None
    assert perfect.value == 1
    assert perfect.low < 1 < perfect.high


def test_retention_averages_the_domains_and_repeats_by_seed() -> None:
    pairs = [(Count(450, 500), Count(500, 500)), (Count(400, 500), Count(400, 500))]
    found = retention_interval(pairs)
    assert found is not None
    assert found.value == pytest.approx(0.95)
    assert found.low < 0.95 < found.high
    assert retention_interval(pairs) == found
    assert retention_interval(pairs, seed=1) != found
    assert retention_interval([(Count(1, 2), Count(0, 2))]) is None
    assert retention_interval([]) is None


def test_answers_count_for_what_they_are_worth() -> None:
    """An accuracy of many answers that are worth few is known as well as from those few."""
    many = [Count(n, 500, worth=50.0) for n in (400, 100, 450)]
    few = [Count(n, 50) for n in (40, 10, 45)]
    for found, expected in (
        (wilson_interval(many[0]), wilson_interval(few[0])),
        (
            contrast_interval([(1, many[0]), (-0.5, many[1])]),
            contrast_interval([(1, few[0]), (-0.5, few[1])]),
        ),
        (recovery_interval(*many), recovery_interval(*few)),
        (retention_interval([(many[0], many[2])]), retention_interval([(few[0], few[2])])),
    ):
        assert found is not None
        assert found == pytest.approx(expected)


def test_contrast_of_mixed_signs() -> None:
    a, b, c = Count(90, 100), Count(60, 100), Count(30, 100)
    assert contrast_interval([(1, a), (-0.5, b), (-0.5, c)]).value == pytest.approx(0.45)


@pytest.mark.parametrize(("correct", "total"), [(0, 0), (-1, 5), (6, 5)])
def test_impossible_counts_are_refused(correct: int, total: int) -> None:
    with pytest.raises(DataError, match=f"{correct} right answers out of {total}"):
        Count(correct, total)


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, float("nan")])
def test_a_level_outside_0_1_is_refused(level: float) -> None:
    with pytest.raises(DataError, match=r"evaluation\.confidence"):
        wilson_interval(Count(1, 2), level)


def _binomial(k: int, n: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def test_beta_draws_match_the_wilson_interval_away_from_the_edges() -> None:
    """The bootstrap behind retention and recovery agrees with the closed form where both are good."""
    found = retention_interval([(Count(300, 500), Count(10**6, 10**6))])
    assert found is not None
    np.testing.assert_allclose((found.low, found.high), wilson_interval(Count(300, 500))[1:], atol=3e-3)


@pytest.mark.parametrize(
    ("seeds", "confidence", "t"),
    # Quantiles of Student's distribution as in any table, for 1, 2, 3, 9 and 10 degrees of freedom.
    [(2, 0.95, 12.7062), (3, 0.95, 4.3027), (4, 0.99, 5.8409), (10, 0.95, 2.2622), (11, 0.9, 1.8125)],
)
def test_paired_differences_have_students_interval(seeds: int, confidence: float, t: float) -> None:
    values = [0.1 * (-1) ** i + 0.01 * i for i in range(seeds)]
    found = paired_interval(values, confidence)
    error = np.std(values, ddof=1) / math.sqrt(seeds)
    assert found.value == pytest.approx(np.mean(values))
    assert [found.value - found.low, found.high - found.value] == pytest.approx([t * error] * 2, rel=1e-4)


def test_one_seed_bounds_nothing() -> None:
    assert paired_interval([0.05]) == (0.05, -math.inf, math.inf)
    with pytest.raises(DataError, match="strictly between 0 and 1"):
        paired_interval([0.1, 0.2], 1.0)
