"""How the distance between engine and trainer is measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.train.loss_weights import MismatchSums


def mismatch_metrics(rollout, recomputed, mask):
    sums = MismatchSums()
    sums.add(rollout, recomputed, mask)
    return sums.metrics()


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_against_the_formulas(seed, tokens):
    rng = np.random.default_rng(seed)
    rollout, recomputed = rng.normal(-2, 1, size=(2, tokens))
    mask = rng.random(tokens) < 0.8
    found = mismatch_metrics(rollout, recomputed, mask)
    difference = (recomputed - rollout)[mask]
    if mask.any():
        weights = np.exp(difference)
        assert found["mismatch/mean_abs"] == pytest.approx(np.abs(difference).mean())
        assert found["mismatch/max_abs"] == pytest.approx(np.abs(difference).max())
        ess = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
        assert found["mismatch/ess"] == pytest.approx(ess)
        assert 1 / len(weights) - 1e-9 <= found["mismatch/ess"] <= 1 + 1e-9


def test_equal_policies():
    logprobs = np.array([-1.0, -2.0], dtype=np.float32)
    found = mismatch_metrics(logprobs, logprobs, np.ones(2, dtype=bool))
    assert found == {"mismatch/mean_abs": 0.0, "mismatch/max_abs": 0.0, "mismatch/ess": 1.0}


def test_one_token_that_carries_everything():
    rollout = np.array([-1.0, -1.0, -1.0, -1000.0])
    found = mismatch_metrics(rollout, np.full(4, -1.0), np.ones(4, dtype=bool))
    assert found["mismatch/ess"] == pytest.approx(0.25)
    assert found["mismatch/max_abs"] == pytest.approx(999.0)


def test_no_tokens():
    nothing = np.zeros(0)
    assert mismatch_metrics(nothing, nothing, nothing)["mismatch/ess"] == 1.0
    assert mismatch_metrics(np.ones(2), np.zeros(2), np.zeros(2, dtype=bool))["mismatch/max_abs"] == 0.0


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9), max_size=6), st.sampled_from([1, 300]))
def test_sums_of_pieces_in_any_cut_are_those_of_the_whole(seed, pieces, spread):
    rng = np.random.default_rng(seed)
    rollout, recomputed = rng.normal(-2, spread, size=(2, sum(pieces)))
    mask = rng.random(sum(pieces)) < 0.6
    whole, cuts = MismatchSums(), np.cumsum(pieces)[:-1]
    for part in zip(*(np.split(x, cuts) for x in (rollout, recomputed, mask)), strict=True):
        own = MismatchSums()
        own.add(*part)
        whole.merge_from(own)
    assert whole.metrics() == pytest.approx(mismatch_metrics(rollout, recomputed, mask), rel=1e-9)
