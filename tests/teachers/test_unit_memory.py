"""Heads in turn on the same memory, which nobody is given while a tensor is left on it."""

import gc
import threading

import torch

from opd.teachers.unit_memory import HeadPages


def filled(pages: HeadPages, value: int, nbytes: int = 5000) -> torch.Tensor:
    return pages.allocate_pages(nbytes).fill_(value)


def test_the_next_head_but_one_is_read_where_the_first_was() -> None:
    pages = HeadPages()
    first, ahead = filled(pages, 1), filled(pages, 2)
    places = [first.data_ptr(), ahead.data_ptr()]
    del first
    for value in range(3, 8):
        third = filled(pages, value)
        assert third.data_ptr() == places[value % 2 - 1]
        assert torch.equal(ahead, torch.full_like(ahead, value - 1))
        ahead = third


def test_a_tensor_on_it_keeps_it_from_the_next() -> None:
    pages = HeadPages()
    head, ahead = filled(pages, 1), filled(pages, 2)
    rows = head.view(torch.float32)[8:16]
    before, place = rows.clone(), head.data_ptr()
    del head
    other = filled(pages, 3)
    assert place not in (other.data_ptr(), ahead.data_ptr())
    assert torch.equal(rows, before)
    del rows, other
    gc.collect()
    assert pages._spare is not None


def test_the_last_head_takes_what_waits_with_it() -> None:
    pages = HeadPages()
    head, ahead = filled(pages, 1), filled(pages, 2)
    del head
    assert pages._spare is not None
    del ahead
    assert pages._spare is None
    alone = filled(pages, 3)
    del alone
    assert pages._spare is None


def test_heads_of_other_sizes_leave_what_waits_alone() -> None:
    pages = HeadPages()
    head, ahead = filled(pages, 1), filled(pages, 2)
    place = head.data_ptr()
    del head
    larger = filled(pages, 3, 9000)
    assert len(larger) == 9000
    assert pages._spare is not None
    again = filled(pages, 4)
    assert again.data_ptr() == place
    assert len(pages.allocate_pages(0)) == 0
    del ahead


def test_threads_never_share_pages() -> None:
    pages, wrong = HeadPages(), []

    def work(value: int) -> None:
        for _ in range(200):
            mine = filled(pages, value)
            if not bool((mine == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pages._used == 0
