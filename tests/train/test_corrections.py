"""Importance corrections: exact where they claim to be, rejected tokens out of the normaliser."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError
from whole_step import correct, policy_weights

from opd.config.rl import IcePop, MaskedIS, SequenceMaskedTIS, TruncatedIS

ALL = [TruncatedIS(), MaskedIS(), MaskedIS(level="sequence"), IcePop(), SequenceMaskedTIS()]


def one(config, log_ratio, mask=None):
    """`correct` for a single response with these log-ratios: (mask, weights)."""
    log_ratio = np.asarray(log_ratio, dtype=np.float64)
    mask = np.ones(len(log_ratio), dtype=bool) if mask is None else np.asarray(mask)
    done = correct(config, [np.full(len(log_ratio), -3.0)], [log_ratio - 3.0], [mask])
    return done.masks[0].tolist(), done.weights[0].tolist(), done.metrics


@pytest.mark.parametrize("config", ALL)
def test_equal_policies_change_nothing(config):
    kept, weights, metrics = one(config, [0.0, 0.0, 0.0], [True, False, True])
    assert kept == [True, False, True]
    assert weights == [1.0, 0.0, 1.0]
    assert metrics == {
        "correction/rejected": 0.0,
        "correction/truncated": 0.0,
        "correction/weight_mean": 1.0,
        "correction/ess": 1.0,
    }


def test_no_correction_is_the_mask():
    mask = np.array([True, False])
    done = correct(None, [np.zeros(2)], [np.ones(2)], [mask])
    assert done.masks[0] is mask
    assert done.weights[0].tolist() == [1.0, 0.0]
    assert done.metrics == {}


LOG = np.log([0.25, 1.5, 4.0])


def test_tis_truncates():
    kept, weights, metrics = one(TruncatedIS(lower=0.5, upper=2.0), LOG)
    assert kept == [True] * 3
    assert weights == pytest.approx([0.5, 1.5, 2.0])
    assert metrics["correction/truncated"] == pytest.approx(2 / 3)


def test_mis_rejects_tokens():
    kept, weights, metrics = one(MaskedIS(), LOG)
    assert kept == [False, True, False]
    assert weights == pytest.approx([0.0, 1.5, 0.0])
    assert metrics["correction/rejected"] == pytest.approx(2 / 3)
    assert metrics["correction/weight_mean"] == pytest.approx(1.5)
    assert metrics["correction/ess"] == pytest.approx(1 / 3)


def test_icepop_has_wider_bounds():
    assert one(IcePop(), LOG)[0] == [False, True, True]


def test_mis_of_sequences_uses_their_product():
    kept, weights, _ = one(MaskedIS(level="sequence"), LOG)
    assert kept == [True] * 3
    assert weights == pytest.approx([1.5] * 3)
    assert one(MaskedIS(level="sequence"), np.log([1.5, 1.5]))[0] == [False, False]


def test_seq_mask_tis_looks_at_the_geometric_mean():
    config = SequenceMaskedTIS(lower=0.5, upper=1.4, truncate=2.0)
    kept, weights, _ = one(config, LOG)
    assert kept == [True] * 3
    assert weights == pytest.approx([0.25, 1.5, 2.0])
    assert one(config, np.log([1.5] * 3))[0] == [False] * 3
    # Masked tokens are no part of the mean.
    assert one(config, np.log([1.0, 90.0]), [True, False])[0] == [True, False]


def test_a_rejected_token_leaves_the_normaliser():
    masks = correct(MaskedIS(), [np.zeros(3)], [LOG], [np.ones(3, dtype=bool)]).masks
    assert policy_weights(masks)[0].tolist() == [0.0, 1.0, 0.0]


ratios = arrays(np.float64, st.integers(0, 6), elements=st.floats(-1e4, 1e4))


@pytest.mark.parametrize("config", ALL)
@given(log_ratios=st.lists(ratios, max_size=4), data=st.data())
def test_weights_are_finite_and_within_bounds(config, log_ratios, data):
    masks = [data.draw(arrays(np.bool_, len(x))) for x in log_ratios]
    done = correct(config, [np.zeros(len(x)) for x in log_ratios], log_ratios, masks)
    for mask, kept, weight in zip(masks, done.masks, done.weights, strict=True):
        assert not (kept & ~mask).any()
        assert np.isfinite(weight).all()
        assert (weight[~kept] == 0).all()
        ceiling = config.truncate if isinstance(config, SequenceMaskedTIS) else config.upper
        assert (weight <= ceiling * (1 + 1e-6)).all()
    assert all(np.isfinite(v) for v in done.metrics.values())
    assert 0 <= done.metrics.get("correction/ess", 0.0) <= 1 + 1e-6


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.lists(st.floats(-3, 3), min_size=2, max_size=6))
def test_without_reached_bounds_the_expectation_is_the_trainers(own, drawn):
    size = min(len(own), len(drawn))
    own, drawn = (np.array(x[:size]) - np.logaddexp.reduce(x[:size]) for x in (own, drawn))
    values = np.arange(size) - 1.0
    wide = TruncatedIS(lower=0.0, upper=1e6)
    weights = [correct(wide, [drawn[[i]]], [own[[i]]], [np.ones(1, dtype=bool)]) for i in range(size)]
    corrected = sum(np.exp(drawn[i]) * weights[i].weights[0][0] * values[i] for i in range(size))
    assert corrected == pytest.approx(float((np.exp(own) * values).sum()), rel=1e-5, abs=1e-5)


def test_bounds_that_reject_everything_are_refused():
    with pytest.raises(ValidationError, match="widen them"):
        MaskedIS(lower=1.0, upper=1.0)
