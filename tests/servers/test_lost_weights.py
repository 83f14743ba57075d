"""What an answer looks like whose server holds no weights, and what only looks like it."""

import numpy as np
import pytest

from opd.served.scoring import is_uniform, says_nothing

WORDS = np.array([3, 4, 5, 5], dtype=np.int32)


def test_hidden_states_that_are_the_same_after_different_tokens_say_nothing():
    rows = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    same = np.broadcast_to(rows[0], (4, 8))
    assert not says_nothing(rows, WORDS)
    assert says_nothing(same, WORDS)
    assert says_nothing(np.zeros((4, 8), np.float32), WORDS)
    assert says_nothing(np.zeros((1, 8), np.float32), WORDS)
    assert says_nothing(np.zeros((2, 8), np.float32), WORDS)  # of two equal tokens, after others
    assert not says_nothing(same[:2], WORDS)
    assert not says_nothing(rows[:1], WORDS)
    assert not says_nothing(rows[:0], WORDS)


def test_a_model_that_reads_one_token_over_and_over_may_say_the_same():
    """What attention takes from equal values is that value, wherever it looks."""
    row = np.ones((1, 8), np.float32)
    assert not says_nothing(row.repeat(4, 0), np.full(4, 7, np.int32))


def test_a_padding_token_alone_may_be_zero():
    """Its embedding is, in many models."""
    assert not says_nothing(np.zeros((1, 8), np.float32), np.zeros(1, np.int32))
    assert not says_nothing(np.zeros((3, 8), np.float32), np.zeros(3, np.int32))


@pytest.mark.parametrize("rows", [2, 24, 151_936])
def test_equal_probabilities_of_all_tokens_are_found(rows):
    uniform = np.full(5, -np.log(rows), np.float32)
    assert is_uniform(uniform, rows)
    assert is_uniform(uniform.reshape(5, 1).repeat(3, 1), rows)
    nearly = uniform.copy()
    nearly[2] += 1e-3
    assert not is_uniform(nearly, rows)
    # One token may be as likely as that in any model.
    assert not is_uniform(uniform[:1], rows)
    assert not is_uniform(uniform[:0], rows)
