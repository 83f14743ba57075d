"""Which server a request goes to, and when a pool gives up."""

import asyncio
import contextlib
import http.server
import random
import sys
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from reward_server import reward_server

from opd.config.servers import ServerGroupConfig
from opd.config.teachers import SGLangTeacherConfig
from opd.errors import RolloutError
from opd.pipelines.launch import started_server
from opd.pipelines.launch.servers import StartedGroup
from opd.retry import Retry
from opd.served import http_pool
from opd.served.http_client import HTTPClient, Patience, PoolOptions, RefusedError, Server, UnavailableError
from opd.served.http_pool import NEAR, HTTPPool, UrlsFile, share_of

URLS = ["http://127.0.0.1:9", "http://127.0.0.1:10"]


async def test_the_preferred_server_is_taken_while_it_has_hardly_more_to_do():
    pool = HTTPPool("pool", PoolOptions(URLS, max_in_flight_tokens=1000), RolloutError)
    home, found = pool.servers[1], []
    async with AsyncExitStack() as stack:
        for _ in range(8):
            server = await stack.enter_async_context(pool.lease(100, [], home))
            found.append(pool.servers.index(server))
    assert [server.in_flight for server in pool.servers] == [0, 0]
    ahead = int(NEAR * 1000 / 100) + 1
    assert found[:ahead] == [1] * ahead
    assert 0 in found[ahead:]


async def test_what_a_server_frees_is_first_for_who_waits_for_its_cache():
    """Not for who waits longer; who leaves without it, or is cancelled, leaves it to the others."""

    pool = HTTPPool("pool", PoolOptions(URLS, max_in_flight_tokens=1000), RolloutError)
    order: list[tuple[str, int]] = []
    done = asyncio.Event()

    async def settle() -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def hold(name: str, home: Server | None) -> None:
        async with pool.lease(1000, [], home) as server:
            order.append((name, pool.servers.index(server)))
            await done.wait()

    first, second = [asyncio.create_task(hold("fills", None)) for _ in range(2)]
    await settle()
    tasks = [
        asyncio.create_task(hold(name, home))
        for name, home in (("any", None), ("cancelled", pool.servers[0]), ("home", pool.servers[0]))
    ]
    await settle()
    tasks[1].cancel()
    at = dict(zip((index for _, index in order), (first, second), strict=True))
    at[0].cancel()  # frees the first server
    await settle()
    assert order[2:] == [("home", 0)]
    tasks[2].cancel()
    await settle()
    assert order[3:] == [("any", 0)]
    done.set()
    await asyncio.gather(first, second, *tasks, return_exceptions=True)
    assert not +pool._awaited
    assert [server.in_flight for server in pool.servers] == [0, 0]


@pytest.mark.parametrize("seed", range(20))
async def test_no_request_waits_beside_a_server_that_is_free_for_it(seed):
    """Of random requests, some of which are cancelled or fail; and all leases end."""
    draw = random.Random(seed)
    patience = Patience(retry=Retry(attempts=2, pause=0.0))

    pool = HTTPPool("pool", PoolOptions(URLS, max_in_flight_tokens=100, patience=patience), RolloutError)
    held: dict[int, tuple[Server, int]] = {}
    waiting: dict[int, tuple[Server | None, int]] = {}
    ends: dict[int, asyncio.Event] = {}
    tasks: dict[int, asyncio.Task] = {}

    async def hold(number: int, tokens: int, home: Server | None, fails: bool) -> None:
        waiting[number] = home, tokens
        try:
            async with pool.lease(tokens, [], home) as server:
                held[number] = server, waiting.pop(number)[1]
                await ends[number].wait()
                if fails:
                    raise UnavailableError("gone", answered=False)
        except UnavailableError:
            pass
        finally:
            waiting.pop(number, None)
            held.pop(number, None)

    async def check() -> None:
        for _ in range(60):
            await asyncio.sleep(0)
        for server in pool.servers:
            mine = [tokens for at, tokens in held.values() if at is server]
            assert server.in_flight == sum(mine)
            assert len(mine) < 2 or sum(mine) <= 100
            for home, tokens in waiting.values():
                others = any(one is server for one, _ in waiting.values())
                assert not pool._has_capacity(server, tokens) or (home is not server and others)

    for number in range(120):
        what = draw.random()
        if held and what < 0.4:
            ends[draw.choice([*held])].set()
        elif (held or waiting) and what < 0.5:
            tasks[draw.choice([*held, *waiting])].cancel()
        ends[number] = asyncio.Event()
        home, tokens = draw.choice([None, *pool.servers]), draw.choice([10, 30, 60, 100, 150])
        tasks[number] = asyncio.create_task(hold(number, tokens, home, draw.random() < 0.2))
        await check()
    while held:
        ends[draw.choice([*held])].set()
        await check()
    assert not waiting
    assert not +pool._awaited
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_a_request_that_is_cancelled_as_a_server_is_freed_takes_none():
    for ticks in range(4):
        pool = HTTPPool("pool", PoolOptions(URLS[:1], max_in_flight_tokens=100), RolloutError)
        pool.servers[0].in_flight = 100
        pool.servers.append(Server(URLS[1], resting_until=time.monotonic() + 3600))
        task = asyncio.create_task(pool._choose_server(100, [], None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pool.servers[0].in_flight = 0
        pool._signal_freed()
        for _ in range(ticks):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.servers[0].in_flight == 0


@pytest.mark.parametrize("way", ["ask", "fetch", "stream"])
def test_nothing_is_sent_where_a_redirect_leads(loop, way):
    async def asked(client: HTTPClient, server: Server) -> None:
        if way == "ask":
            await client.request_json(server, "POST", "/generate", {})
        elif way == "fetch":
            await client.request_bytes(server, "POST", "/generate", {}, 100)
        else:
            async with client.stream_lines(server, "/generate", {}, 100, 10) as lines:
                assert not [line async for line in lines]

    with reward_server(lambda path, body: {}) as other, reward_server(lambda path, body: {}) as server:
        server.faults = [f"elsewhere {other.url}/generate"]
        client = HTTPClient("teacher", PoolOptions([server.url]))
        with pytest.raises(RefusedError, match=f"answered 307, a redirect to {other.url}"):
            loop.run(asked(client, Server(server.url)))
        loop.run(client.close())
        assert (len(server.asked), len(other.asked)) == (1, 0)


async def test_servers_are_given_up_together_and_not_for_one_that_answers_badly():
    patience = Patience(retry=Retry(attempts=2, pause=0.0))
    options = PoolOptions(URLS, max_in_flight_tokens=1000, patience=patience)

    pool = HTTPPool("pool", options, RolloutError)
    bad, good = pool.servers

    async def attempt(server) -> str:
        if server in (bad, *others):
            raise UnavailableError("nonsense", answered=True)
        return server.url

    others, good.in_flight = [], 1  # so the bad one is asked first
    assert {await pool.call_server(10, attempt) for _ in range(5)} == {good.url}
    assert bad.bad_answers == 5
    others.append(good)
    with pytest.raises(RolloutError, match=r"no usable answer from .*:9, .*:10 in"):
        await pool.call_server(10, attempt)
    found = pool.counters.retries
    assert found == 6


async def test_a_server_that_answers_again_is_asked_by_several_at_once():
    patience = Patience(retry=Retry(attempts=2, pause=0.0))
    options = PoolOptions(URLS[:1], max_in_flight_tokens=1000, patience=patience)

    pool = HTTPPool("pool", options, RolloutError)
    with contextlib.suppress(UnavailableError):
        async with pool.lease(10, []):
            raise UnavailableError("gone", answered=False)
    async with pool.lease(10, []):  # its trial, for which others wait
        waiting = asyncio.ensure_future(pool._choose_server(10, [], None))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 60)
    async with pool.lease(10, []):
        found = (await asyncio.wait_for(pool._choose_server(10, [], None), 60)).in_flight
    assert found == 30


async def test_a_request_that_waits_for_room_takes_what_is_freed():
    pool = HTTPPool("pool", PoolOptions(URLS[:1], max_in_flight_tokens=100), RolloutError)
    async with pool.lease(80, []):
        waiting = asyncio.ensure_future(pool._choose_server(80, [], None))
        await asyncio.sleep(0)
        assert not waiting.done()
    found = (await asyncio.wait_for(waiting, 60)).in_flight
    assert found == 80


LITTLE = [sys.executable, str(Path(__file__).with_name("little_server.py"))]


def test_servers_that_come_while_others_work_are_used_once_they_were_checked(loop, tmp_path, monkeypatch):
    monkeypatch.setattr(http_pool, "LOOK", 0.0)
    monkeypatch.setattr(started_server, "GRACE", 0.5)
    config = ServerGroupConfig(count=2, command=LITTLE, start_seconds=60)
    group = StartedGroup.start_servers("own", config, Path("model"), tmp_path / "logs")
    file, checked = tmp_path / "urls", []

    async def admit(server) -> None:
        checked.append(server.url)

    async def asked(pool) -> set[str]:
        """Where two requests at once go."""
        async with pool.lease(10, []) as server, pool.lease(10, [server]) as other:
            return {server.url, other.url}

    try:
        group.wait()
        first, second = group.urls
        more = UrlsFile(file, [first]).new_urls
        pool = HTTPPool("pool", PoolOptions([first], more=more), RolloutError, admit)
        assert loop.run(asked(pool)) == {first}
        file.write_text(f"# more\n{first}/\nnonsense\n{second}")
        assert loop.run(asked(pool)) == {first}  # the last line is not whole yet
        file.write_text(file.read_text() + "\n")
        assert loop.run(asked(pool)) == {first, second}
        assert sorted(checked) == sorted(group.urls)
        loop.run(pool.close())
    finally:
        group.close()


def test_what_comes_is_given_once(tmp_path, monkeypatch):
    monkeypatch.setattr(http_pool, "LOOK", 0.0)
    file = tmp_path / "urls"
    assert UrlsFile(file).new_urls() == []
    file.write_text("".join(f"http://h:{port}\n" for port in range(1, 6)))
    more = UrlsFile(file, ["http://h:2/"])
    assert more.new_urls() == [f"http://h:{port}" for port in (1, 3, 4, 5)]
    assert more.new_urls() == []


@pytest.mark.parametrize("servers", range(1, 9))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_ranks_divide_servers_into_equal_parts(servers, ranks):
    """Each server is given out whole and each rank has as much; few ranks meet at a server."""
    parts = [[share_of(number, servers, rank, ranks) for number in range(servers)] for rank in range(ranks)]
    assert {sum(row) for row in parts} == {servers}
    assert {sum(column) for column in zip(*parts, strict=True)} == {ranks}
    met = max(sum(part > 0 for part in column) for column in zip(*parts, strict=True))
    assert met <= -(-ranks // servers) + (ranks % servers > 0)
    assert servers % ranks or met == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_keep_a_servers_limit_and_use_others_servers_when_theirs_are_away(loop, ranks):
    options = PoolOptions(URLS, max_in_flight_tokens=1200)

    async def taken(rank: int, away: int | None = None) -> list[int]:
        """Tokens at each server once this rank can send no more."""
        pool = HTTPPool("pool", replace(options, rank=rank, ranks=ranks), RolloutError)
        if away is not None:
            pool.servers[away].resting_until, pool.servers[away].failures = time.monotonic() + 60, 1
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(pool._choose_server(100, [], None), 0.01)
        return [server.in_flight for server in pool.servers]

    found = [loop.run(taken(rank)) for rank in range(ranks)]
    assert [sum(column) for column in zip(*found, strict=True)] == [1200, 1200]
    alone = loop.run(taken(0, away=0))
    assert alone == [0, 1200 // ranks]


def test_a_file_of_urls_that_is_none_is_said_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(http_pool, "LOOK", 0.0)
    monkeypatch.setattr(http_pool, "MOST_LINES", 3)
    file = UrlsFile(tmp_path)
    assert file.new_urls() == file.new_urls() == []
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: no server is taken from it, it cannot be read (Is a directory)"
    ]
    (tmp_path / "urls").write_text("http://h:1\n" * 4)
    assert UrlsFile(tmp_path / "urls").new_urls() == []
    assert "more than 3 lines" in caplog.text


def test_a_file_of_urls_comes_beside_those_that_are_there():
    with pytest.raises(ValueError, match="give urls, those that are there, too"):
        SGLangTeacherConfig(path="x", servers="own", urls_file="urls")
    assert SGLangTeacherConfig(path="x", urls=["http://h:1"], urls_file="urls").urls_file == "urls"


class Dripping(http.server.BaseHTTPRequestHandler):
    """Streams a message, and then single bytes for as long as somebody reads them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"data: 1\n\n")
            while True:
                self.wfile.write(b" \n" if self.path == "/blank" else b" ")
                self.wfile.flush()
                time.sleep(0.02)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("path", ["/bytes", "/blank"])
def test_a_stream_that_says_nothing_any_more_is_left_though_bytes_come(loop, path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = PoolOptions([f"http://127.0.0.1:{server.server_port}"], patience=Patience(timeout=0.5))
    pool = HTTPPool("a test", options, RolloutError)

    found = []

    async def read():
        async with pool.stream_lines(pool.servers[0], path, {}, 1 << 10, 1 << 20) as arriving:
            async for line in arriving:
                found.extend([line] if line.strip() else [])

    try:
        with pytest.raises(UnavailableError, match=r"no message for 0\.5 s"):
            loop.run(asyncio.wait_for(read(), 60))
        assert found == [b"data: 1"]
    finally:
        loop.run(pool.close())
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", ["away", "refused", "wrong"])
async def test_looks_at_a_server_use_up_no_patience(kind):
    """Nobody waits for a look: a request after many has all of its attempts."""
    errors = {
        "away": UnavailableError("answered 503", answered=True),
        "refused": RefusedError("answered 404", 404),
        "wrong": RolloutError("holds other weights"),
    }

    async def admit(server: Server) -> None:
        raise errors[kind]

    async def is_right(server: Server) -> bool:
        return True

    pool = HTTPPool("pool", PoolOptions(URLS[:1]), RolloutError, admit)
    server = pool.servers[0]
    for _ in range(40):
        server.resting_until = 0.0
        await pool.keep_server(server, is_right)
    assert str(errors[kind]) in server.last_error
    found = server.failures + server.bad_answers, server.admitted, server.last_error
    assert found[:2] == (0, False)
    server.resting_until = float("inf")
    await pool.keep_server(server, is_right)
    assert server.resting_until == float("inf")  # a look does not put the next one off
