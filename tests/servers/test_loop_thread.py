"""The loop thread ends, whatever runs in it."""

import asyncio
import threading

import pytest

from opd.loop_thread import LoopThread


async def stubborn(seen: list[int], begun: threading.Event) -> None:
    """Loses its first cancellation, as one that meets a time-out does."""
    begun.set()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        seen.append(1)
    await asyncio.sleep(60)


def test_a_lost_cancellation_does_not_keep_it_open():
    loop, seen, begun = LoopThread("test"), [], threading.Event()
    future = loop.start(stubborn(seen, begun))
    assert begun.wait(10)
    loop.close()
    assert seen == [1]
    assert future.cancelled()
    loop.close()


def test_nothing_begins_after_its_end():
    loop = LoopThread("test")
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(asyncio.sleep(0))


def test_a_loop_that_is_held_up_is_left_behind():
    loop, held, go_on = LoopThread("test"), threading.Event(), threading.Event()

    async def holds_up() -> None:
        held.set()
        go_on.wait(60)

    loop.start(holds_up())
    assert held.wait(60)
    closing = loop.begin_close(0.0)
    assert not loop.end_close(closing, 0.05)
    go_on.set()
    assert loop.end_close(closing, 60)
