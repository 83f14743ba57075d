"""Threads in which plain methods of environments run."""

import asyncio
import os
import threading

import pytest

from opd.environments.world import in_thread


async def test_one_call_after_another_is_served_by_one_thread_and_one_that_hangs_is_not_waited_for():
    hang, started = threading.Event(), threading.Event()

    def hangs() -> None:
        started.set()
        hang.wait()

    found = {await in_thread(threading.current_thread, (), "test") for _ in range(30)}
    waiting = in_thread(hangs, (), "test")
    started.wait(60)
    other = await in_thread(threading.current_thread, (), "test")
    hang.set()
    await waiting
    assert len(found) == 1
    assert other not in found


async def test_what_it_raises_arrives_and_the_thread_serves_on():
    def fails() -> None:
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        await in_thread(fails, (), "test")
    found = await in_thread(lambda: 3, (), "test")
    assert found == 3


async def test_what_comes_after_nobody_waits_any_more_is_dropped_in_silence(monkeypatch):
    loop, came, told = asyncio.get_running_loop(), threading.Event(), []
    hand_over = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (hand_over(*call), came.set()))
    loop.set_exception_handler(lambda loop, context: told.append(context))
    left = in_thread(lambda: 3, (), "test")
    came.wait(60)
    left.cancel()
    await asyncio.sleep(0)
    assert not told


def test_a_process_that_was_forked_has_threads_of_its_own():
    async def call() -> int:
        return await asyncio.wait_for(in_thread(lambda: 3, (), "test"), 60)

    asyncio.run(call())
    process = os.fork()
    if process == 0:
        os._exit(asyncio.run(call()))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 3
