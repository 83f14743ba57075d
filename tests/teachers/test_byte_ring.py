import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.teachers.layer_stream import ALIGNMENT, ByteRing, aligned


@given(
    capacity=st.integers(0, 20 * ALIGNMENT),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 21 * ALIGNMENT), st.integers(0, 99))),
)
def test_live_pieces_are_aligned_inside_and_disjoint(capacity, actions):
    ring = ByteRing(capacity)
    live: dict[int, int] = {}
    for take, size, which in actions:
        if take:
            start = ring.take(size)
            if start is None:
                assert live or size > ring.capacity
                continue
            assert start % ALIGNMENT == 0
            assert start + size <= ring.capacity
            assert all(start + aligned(size) <= a or a + aligned(n) <= start for a, n in live.items())
            live[start] = size
        elif live:
            start = list(live)[which % len(live)]
            ring.give_back(start)
            del live[start]
    for start in live:
        ring.give_back(start)
    assert len(ring) == 0
    assert ring.take(ring.capacity) == 0


def test_the_space_before_the_oldest_piece_is_used_again():
    ring = ByteRing(4 * ALIGNMENT)
    assert [ring.take(ALIGNMENT) for _ in range(4)] == [i * ALIGNMENT for i in range(4)]
    assert ring.take(1) is None
    ring.give_back(0)
    assert ring.take(1) == 0
    assert ring.take(1) is None


def test_a_piece_is_given_back_once():
    ring = ByteRing(4 * ALIGNMENT)
    first, second = ring.take(1), ring.take(1)
    ring.give_back(second)
    with pytest.raises(KeyError):
        ring.give_back(second)
    assert len(ring) == 2  # the older one still holds the space after it
    ring.give_back(first)
    assert len(ring) == 0
