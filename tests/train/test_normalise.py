"""Loss-stream weights: what they sum to, and what they make equal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_step import per_teacher_weights, policy_weights

from opd.errors import ConfigError
from opd.train.loss_weights import per_teacher_scales, policy_scales, token_weights, turn_shares, turns_of

masks = st.lists(
    st.lists(st.booleans(), max_size=9).map(lambda bits: np.array(bits, dtype=bool)), min_size=1, max_size=8
)


def total(weights):
    return float(sum(w.sum(dtype=np.float64) for w in weights))


def check_shape(weights, masks):
    for weight, mask in zip(weights, masks, strict=True):
        assert weight.dtype == np.float32
        assert weight.shape == mask.shape
        assert not weight[~mask].any()


@given(masks)
def test_token_weights_are_equal_and_sum_to_one(masks):
    weights = policy_weights(masks)
    check_shape(weights, masks)
    count = sum(mask.sum() for mask in masks)
    assert total(weights) == pytest.approx(1.0 if count else 0.0, abs=1e-5)
    used = np.concatenate([w[m] for w, m in zip(weights, masks, strict=True)])
    assert len(set(used.tolist())) <= 1


@given(masks)
def test_sequence_weights_give_every_response_the_same(masks):
    weights = policy_weights(masks, "sequence")
    check_shape(weights, masks)
    sums = [float(w.sum(dtype=np.float64)) for w, m in zip(weights, masks, strict=True) if m.any()]
    np.testing.assert_allclose(sums, 1 / max(len(sums), 1), rtol=1e-5)


@given(masks, st.integers(9, 64))
def test_constant_weights_do_not_depend_on_the_lengths(masks, limit):
    weights = policy_weights(masks, "constant", limit)
    check_shape(weights, masks)
    mean_length = np.mean([mask.sum() for mask in masks])
    assert total(weights) == pytest.approx(mean_length / limit, rel=1e-4)


@given(masks, st.data())
def test_each_teachers_tokens_sum_to_its_share(masks, data):
    names = data.draw(
        st.lists(st.sampled_from(["a", "b", "c", None]), min_size=len(masks), max_size=len(masks))
    )
    shares = data.draw(
        st.none() | st.fixed_dictionaries({name: st.floats(0.1, 5.0) for name in ("a", "b", "c")})
    )
    weights = per_teacher_weights(masks, names, shares)
    check_shape(weights, masks)
    present = {name for name, mask in zip(names, masks, strict=True) if name is not None and mask.any()}
    scale = sum((shares or dict.fromkeys(present, 1.0))[name] for name in present)
    for name in present:
        own = [w for w, n in zip(weights, names, strict=True) if n == name]
        expected = (shares[name] if shares else 1.0) / scale
        assert total(own) == pytest.approx(expected, rel=1e-4)
    assert total([w for w, n in zip(weights, names, strict=True) if n is None]) == 0.0
    assert total(weights) == pytest.approx(1.0 if present else 0.0, abs=1e-5)


def test_a_token_mean_gives_short_answers_almost_nothing_and_per_teacher_weights_mend_it():
    masks = [np.ones(200, dtype=bool)] * 4 + [np.ones(2, dtype=bool)]
    names = ["maths"] * 4 + ["instructions"]
    assert policy_weights(masks)[4].sum() < 0.01
    assert per_teacher_weights(masks, names)[4].sum() == pytest.approx(0.5)


def test_global_weights_are_not_a_mean_of_micro_batch_means():
    masks = [np.ones(1, dtype=bool), np.ones(9, dtype=bool)]
    values = [np.array([10.0]), np.zeros(9)]
    whole = sum(float((w * v).sum()) for w, v in zip(policy_weights(masks), values, strict=True))
    assert whole == pytest.approx(1.0)
    assert np.mean([value.mean() for value in values]) == pytest.approx(5.0)


def test_policy_weights_follow_the_recipe():
    masks = [np.ones(2, dtype=bool), np.ones(4, dtype=bool)]
    assert [w[0] for w in policy_weights(masks, "token", 8)] == pytest.approx([1 / 6, 1 / 6])
    assert [w[0] for w in policy_weights(masks, "sequence", 8)] == pytest.approx([1 / 4, 1 / 8])
    assert [w[0] for w in policy_weights(masks, "constant", 8)] == pytest.approx([1 / 16, 1 / 16])


def test_a_teacher_without_a_share_is_named():
    masks = [np.ones(2, dtype=bool)]
    with pytest.raises(ConfigError, match="teacher 'b' has tokens"):
        per_teacher_weights(masks, ["b"], {"a": 1.0})
    assert per_teacher_weights([np.zeros(2, dtype=bool)], ["b"], {"a": 1.0})[0].tolist() == [0.0, 0.0]


def test_no_samples():
    found = [policy_weights([], aggregation, 4) for aggregation in ("token", "sequence", "constant")]
    assert [*found, policy_weights([]), per_teacher_weights([], [])] == [[]] * 5


def runs(mask) -> list[list[int]]:
    """Places of the tokens of each turn."""
    found: list[list[int]] = []
    for place, own in enumerate(mask):
        if own and place and mask[place - 1]:
            found[-1].append(place)
        elif own:
            found.append([place])
    return found


@given(masks, st.data())
def test_every_turn_of_the_step_weighs_the_same(masks, data):
    """By enumeration in float64, with tokens that a correction has rejected."""
    kept = [mask & np.array(data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask))), bool)
            for mask in masks]  # fmt: skip
    pairs = list(zip(masks, kept, strict=True))
    left = [[[i for i in turn if own[i]] for turn in runs(mask)] for mask, own in pairs]
    left = [[turn for turn in turns if turn] for turns in left]
    turns = [turns_of(*pair) for pair in pairs]
    assert turns == [len(own) for own in left]
    counts = [int(own.sum()) for own in kept]
    scales = policy_scales(counts, "turn", turns=turns)
    for mask, own, scale, of_sample in zip(masks, kept, scales, left, strict=True):
        expected = np.zeros(len(mask))
        for turn in of_sample:
            expected[turn] = 1.0 / (sum(turns) * len(turn))
        shares = turn_shares(mask, own)
        assert shares.sum() == pytest.approx(own.sum())
        np.testing.assert_allclose(scale * shares, expected, rtol=1e-12)
        assert token_weights(own, scale, shares).tolist() == (scale * shares).astype(np.float32).tolist()


@given(masks, st.data())
@pytest.mark.parametrize("kind", ["episode", "turn"])
def test_within_a_teachers_share_episodes_or_turns_weigh_the_same(kind, masks, data):
    drawn = st.lists(st.sampled_from(["a", "b", None]), min_size=len(masks), max_size=len(masks))
    names, shares = data.draw(drawn), {"a": 0.25, "b": 0.75}
    turns = [turns_of(mask) for mask in masks]
    counts = [int(mask.sum()) for mask in masks]
    units = [1] * len(masks) if kind == "episode" else turns
    scales = per_teacher_scales(counts, names, shares, units)
    present = {name for name, count in zip(names, counts, strict=True) if name is not None and count}
    whole = sum(shares[name] for name in present)
    for mask, name, scale in zip(masks, names, scales, strict=True):
        expected = np.zeros(len(mask))
        if name is not None and mask.any():
            mates = [m for m, n in zip(masks, names, strict=True) if n == name]
            if kind == "episode":
                expected[mask] = shares[name] / whole / sum(m.any() for m in mates) / mask.sum()
            else:
                for turn in runs(mask):
                    expected[turn] = shares[name] / whole / sum(len(runs(m)) for m in mates) / len(turn)
        own = np.ones(len(mask)) if kind == "episode" else turn_shares(mask)
        np.testing.assert_allclose(np.where(mask, scale * own, 0), expected, rtol=1e-12)


def test_a_response_of_one_turn_is_an_episode():
    masks = [np.ones(3, dtype=bool), np.ones(7, dtype=bool)]
    assert turn_shares(masks[0]).tolist() == [1.0, 1.0, 1.0]
    assert policy_scales([3, 7], "turn", turns=[1, 1]) == policy_scales([3, 7], "sequence")
    assert turn_shares(np.zeros(0, dtype=bool)).tolist() == []
    assert policy_scales([], "turn", turns=[]) == []
