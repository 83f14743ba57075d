"""Which server a request goes to, and when a pool gives up."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from opd.errors import RolloutError
from opd.served.http_pool import NEAR, HTTPPool, LoopThread, PoolOptions

URLS = ["http://127.0.0.1:9", "http://127.0.0.1:10"]


@pytest.fixture
def loop():
    pytest.importorskip("orjson", reason="needs the extra sglang")
    running = LoopThread("test")
    yield running
    running.close()


def test_the_preferred_server_is_taken_while_it_has_hardly_more_to_do(loop):
    async def leased() -> list[int]:
        pool = HTTPPool("pool", PoolOptions(URLS, max_in_flight_tokens=1000), RolloutError)
        home, found = pool.servers[1], []
        async with AsyncExitStack() as stack:
            for _ in range(8):
                server = await stack.enter_async_context(pool.lease(100, [], home))
                found.append(pool.servers.index(server))
        assert [server.in_flight for server in pool.servers] == [0, 0]
        return found

    found = loop.run(leased())
    ahead = int(NEAR * 1000 / 100) + 1
    assert found[:ahead] == [1] * ahead
    assert 0 in found[ahead:]


def test_a_request_that_waits_for_room_takes_what_is_freed(loop):
    async def leased() -> int:
        pool = HTTPPool("pool", PoolOptions(URLS[:1], max_in_flight_tokens=100), RolloutError)
        async with pool.lease(80, []):
            waiting = asyncio.ensure_future(pool._take(80, [], None))
            await asyncio.sleep(0)
            assert not waiting.done()
        return (await asyncio.wait_for(waiting, 60)).in_flight

    assert loop.run(leased()) == 80
