"""The prompt cursor: epochs, resume, and independence of how it was called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import DataError
from opd.rollout.prompts import Prompt, PromptCursor

PROMPTS = [Prompt.from_content(f"prompt {i}", i, "d") for i in range(13)]

PINNED = [1, 9, 8, 0, 4, 7, 12, 3, 2, 6, 5, 11, 10]


def _labels(cursor: PromptCursor, start: int, n: int) -> list[int]:
    return [prompt.label for prompt in cursor.next_prompts(start, n)]


def test_every_epoch_is_a_fresh_permutation() -> None:
    taken = _labels(PromptCursor(PROMPTS, 0, "d"), 0, 39)
    epochs = [taken[0:13], taken[13:26], taken[26:39]]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seed_and_name_change_the_order() -> None:
    orders = {
        tuple(_labels(PromptCursor(PROMPTS, seed, name), 0, 13)) for seed in range(3) for name in ("a", "b")
    }
    assert len(orders) == 6


def test_order_is_pinned() -> None:
    """A run resumed with another version of NumPy must see the same prompts."""
    assert _labels(PromptCursor(PROMPTS, 0, "d"), 0, 13) == PINNED


@given(start=st.integers(0, 10_000), n=st.integers(0, 40), cut=st.integers(0, 40))
def test_a_resumed_cursor_gives_what_an_undisturbed_one_gives(start: int, n: int, cut: int) -> None:
    cut = min(cut, n)
    whole = PromptCursor(PROMPTS, 3, "d").next_prompts(start, n)
    first = PromptCursor(PROMPTS, 3, "d").next_prompts(start, cut)
    resumed = PromptCursor(PROMPTS, 3, "d").next_prompts(start + cut, n - cut)
    assert first + resumed == whole


def test_no_prompts_and_negative_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="domain d has no training prompts"):
        PromptCursor([], 0, "d")
    with pytest.raises(ValueError, match="must not be negative"):
        PromptCursor(PROMPTS, 0, "d").next_prompts(-1, 2)
