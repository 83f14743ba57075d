import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.teachers.unit_memory import ALIGNMENT, ByteRing, align_size


@given(
    capacity=st.integers(0, 20 * ALIGNMENT),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 21 * ALIGNMENT), st.integers(0, 99))),
)
def test_live_pieces_are_aligned_inside_and_disjoint(capacity, actions):
    ring = ByteRing(capacity)
    live: dict[int, int] = {}
    for take, size, which in actions:
        if take:
            start = ring.allocate_bytes(size)
            if start is None:
                assert live or size > ring.capacity
                continue
            assert start % ALIGNMENT == 0
            assert start + size <= ring.capacity
            assert all(start + align_size(size) <= a or a + align_size(n) <= start for a, n in live.items())
            live[start] = size
        elif live:
            start = list(live)[which % len(live)]
            ring.free_bytes(start)
            del live[start]
    for start in live:
        ring.free_bytes(start)
    assert len(ring) == 0
    assert ring.allocate_bytes(ring.capacity) == 0


def test_the_space_before_the_oldest_piece_is_used_again():
    ring = ByteRing(4 * ALIGNMENT)
    assert [ring.allocate_bytes(ALIGNMENT) for _ in range(4)] == [i * ALIGNMENT for i in range(4)]
    assert ring.allocate_bytes(1) is None
    ring.free_bytes(0)
    assert ring.allocate_bytes(1) == 0
    assert ring.allocate_bytes(1) is None


def test_a_piece_is_given_back_once():
    ring = ByteRing(4 * ALIGNMENT)
    first, second = ring.allocate_bytes(1), ring.allocate_bytes(1)
    ring.free_bytes(second)
    with pytest.raises(KeyError):
        ring.free_bytes(second)
    assert len(ring) == 2  # the older one still holds the space after it
    ring.free_bytes(first)
    assert len(ring) == 0
