"""pass@k, maj@k and intervals over prompts, against enumeration and simulation."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.pipelines.evaluation.measure import maj_at, pass_at
from opd.pipelines.evaluation.statistics import (
    Count,
    contrast_interval,
    effective_answers,
    over_prompts,
    recovery_interval,
    retention_interval,
    wilson_interval,
)


@pytest.mark.parametrize("total", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(total):
    for correct in range(total + 1):
        answers = [number < correct for number in range(total)]
        for k in range(1, total + 1):
            subsets = list(combinations(answers, k))
            assert pass_at(total, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_the_formula_where_its_binomials_fit_no_float():
    total, correct, k = 10_000, 3, 5_000
    exact = 1 - math.comb(total - correct, k) / math.comb(total, k)
    assert pass_at(total, correct, k) == pytest.approx(exact, abs=1e-12)
    assert pass_at(total, 1, 1) == pytest.approx(1e-4)
    assert pass_at(total, 0, k) == 0
    assert pass_at(total, total, 1) == pass_at(total, total - k + 1, k) == 1


@pytest.mark.parametrize(("total", "correct", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_beyond_the_answers_is_refused(total, correct, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at(total, correct, k)


def test_the_commonest_answer_wins_and_a_tie_is_shared():
    assert maj_at(["7", "8", "7"], [True, False, True], 3) == 1
    assert maj_at(["8", "8", "7"], [False, False, True], 3) == 0
    assert maj_at(["7", "8"], [True, False], 2) == 0.5
    assert maj_at(["7", "8", "9"], [True, False, False], 3) == pytest.approx(1 / 3)
    # Two groups of two, and one answer that is left over.
    assert maj_at(["7", "7", "8", "8", "7"], [True, True, False, False, True], 2) == 0.5
    # Of one text that was scored both ways.
    assert maj_at(["7", "7", "8"], [True, False, False], 3) == 0.5
    with pytest.raises(ValueError, match="not defined"):
        maj_at(["7"], [True], 2)


@given(rights=st.lists(st.booleans(), min_size=1, max_size=12))
def test_maj_at_1_is_the_accuracy_and_of_different_answers_any_k_is(rights):
    assert maj_at(["a"] * len(rights), rights, 1) == pytest.approx(sum(rights) / len(rights))
    different = [str(number) for number in range(len(rights))]
    assert maj_at(different, rights, len(rights)) == pytest.approx(sum(rights) / len(rights))


def test_maj_at_k_is_in_expectation_that_of_all_orders():
    """Over draws of a model that is right 60 % of the time and otherwise says one of two wrong things."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(["r", "x", "y"], size=(4000, 6), p=[0.6, 0.3, 0.1])
    found = np.mean([maj_at(list(row), list(row == "r"), 3) for row in drawn])
    # r wins with two or three of three, and with one of three different by a third.
    exact = 0.6**3 + 3 * 0.6**2 * 0.4 + 6 * 0.6 * 0.3 * 0.1 / 3
    assert found == pytest.approx(exact, abs=0.015)


def test_one_answer_a_prompt_is_worth_one_and_alike_answers_are_worth_no_more():
    assert effective_answers([1.0, 0.0, 1.0, 1.0], 1) == 4
    assert effective_answers([1.0, 0.0, 1.0, 1.0], 8) == 4
    assert effective_answers([1.0] * 5, 8) == effective_answers([0.0] * 5, 8) == 5
    assert effective_answers([0.5] * 5, 8) == 40
    assert effective_answers([0.3], 8) == 1
    assert effective_answers([0.25, 0.75, 0.5, 0.5], 8) == pytest.approx(24)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30))
@settings(deadline=None)
def test_an_interval_over_prompts_is_between_one_of_prompts_and_one_of_answers(rights):
    means = [right / 4 for right in rights]
    assert len(means) <= effective_answers(means, 4) <= 4 * len(means)
    found = over_prompts(means, 4)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.high - found.low > 0


def test_intervals_over_prompts_hold_what_they_say_where_answers_to_a_prompt_are_alike():
    """Prompts of very different difficulty: the naive interval holds far too rarely."""
    rng = np.random.default_rng(1)
    covered = {"prompts": 0, "answers": 0}
    runs, prompts, each = 400, 60, 16
    for _ in range(runs):
        chances = rng.beta(0.4, 0.6, prompts)  # 0.4 in the mean
        rights = rng.binomial(each, chances)
        naive = Count(int(rights.sum()), prompts * each)
        whole = Count(naive.correct, naive.total, effective_answers((rights / each).tolist(), each))
        for name, count in {"prompts": whole, "answers": naive}.items():
            interval = wilson_interval(count)
            covered[name] += interval.low <= 0.4 <= interval.high
    assert 0.92 <= covered["prompts"] / runs <= 0.985
    assert covered["answers"] / runs < 0.6


def test_what_answers_are_worth_goes_into_every_number_made_of_them():
    few, many = (Count(60, 100, 30.0), Count(90, 100, 30.0)), (Count(60, 100), Count(90, 100))
    base = (Count(10, 100, 30.0), Count(10, 100))
    for of in (
        lambda pair, _: contrast_interval([(1.0, pair[1]), (-1.0, pair[0])]),
        lambda pair, _: retention_interval([pair]),
        lambda pair, start: recovery_interval(pair[0], start, pair[1]),
    ):
        wide, narrow = of(few, base[0]), of(many, base[1])
        assert wide is not None
        assert narrow is not None
        assert wide.value == narrow.value
        assert wide.high - wide.low > 1.3 * (narrow.high - narrow.low)
