"""OpenEnv's environments by URL, over a real socket from a server with the messages of theirs."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial

import chatting
import pytest
from exact import check_exact
from test_agents import chat_engine, chat_prompt, chat_sampling
from test_episodes import episodes

from opd.config.environments import EnvironmentConfig
from opd.environments.openenv import MOST_MESSAGE, OpenEnv
from opd.environments.protocol import EPISODE, Action, Task
from opd.environments.world import World
from opd.errors import ConfigError, RolloutError

web = pytest.importorskip("aiohttp.web")


class Server:
    """Echoes what it is sent; three steps are an episode. `broken`: episodes that are cut at their second."""

    def __init__(self, broken: int = 0) -> None:
        self.broken, self.resets, self.closed, self.first = broken, [], 0, None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/ws", self._episode)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _episode(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        steps, seed = 0, 0
        async for message in socket:
            said = json.loads(message.data)
            if said["type"] == "close":
                self.closed += 1
                break
            if self.first is not None:
                await socket.send_str(self.first)
                continue
            if said["type"] == "reset":
                self.resets.append(said["data"])
                steps, seed = 0, said["data"]["seed"]
                told = {"observation": {"text": f"seed {seed}"}, "reward": None, "done": False}
            else:
                sent = said["data"]["say"]["text"]
                steps += 1
                if steps == 2 and self.broken:
                    self.broken -= 1
                    await socket.close()
                    break
                if not sent:
                    wrong = {
                        "code": "VALIDATION_ERROR",
                        "message": "Invalid message",
                        "errors": [{"msg": "empty"}],
                    }
                    await socket.send_str(json.dumps({"type": "error", "data": wrong}))
                    continue
                told = {"observation": {"text": f"{len(sent)} {seed}"}, "reward": 0.25, "done": steps == 3}
            await socket.send_str(json.dumps({"type": "observation", "data": told}))
        return socket


@pytest.fixture
def server(request):
    made = Server(**getattr(request, "param", {}))
    yield made
    made.close()


PARAMS = {"action": {"say": {"text": "{text}"}}, "reset": {"level": 2}}
CONFIG = EnvironmentConfig(type="openenv", params={"url": "http://127.0.0.1:1"}, attempts=2)


def acted(url: str, *texts: str, attempts: int = 2, show: list[str] | None = None, **metadata):
    config = CONFIG.model_copy(update={"attempts": attempts})
    task = Task("a/0", "", [], 11, metadata, 5)
    world = World(partial(OpenEnv, url=url, show=show, **PARAMS), task, config, "a")

    async def act():
        try:
            first = await world.reset()
            return first, [await world.step(Action(text, turn=n)) for n, text in enumerate(texts)]
        finally:
            await world.close()

    return asyncio.run(act())


def test_what_the_server_says_is_the_episode(server):
    first, steps = acted(server.url, "go", "", "north!", reset={"level": 3})
    assert first == "seed 11"
    assert [step.observation for step in steps] == ["2 11", "error: Invalid message (empty)", "6 11"]
    assert [step.reward for step in steps] == [0.25, 0.0, 0.25]
    assert [step.done for step in steps] == [False, False, True]
    assert server.resets == [{"level": 3, "seed": 11}]
    assert server.closed == 1


@pytest.mark.parametrize(
    ("show", "seen"),
    [(None, '{"a": 1, "b": "x", "c": []}'), (["b"], "x"), (["c", "none", "a"], '{"c": [], "a": 1}')],
)
def test_the_model_sees_what_show_names(server, show, seen):
    told = {"observation": {"a": 1, "b": "x", "c": []}, "reward": None, "done": False}
    server.first = json.dumps({"type": "observation", "data": told})
    assert acted(server.url, show=show)[0] == seen


@pytest.mark.parametrize("server", [{"broken": 1}], indirect=True)
def test_who_hangs_up_is_called_again_and_told_the_same(server):
    _, steps = acted(server.url, "a", "bb", "ccc")
    assert [step.observation for step in steps] == ["1 11", "2 11", "3 11"]
    assert len(server.resets) == 2


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("x" * (MOST_MESSAGE + 1), "message of more than"),
        ("[" * 100_000, "no message"),
        ("{}", "no message"),
        (json.dumps({"type": "observation", "data": {"reward": "much"}}), "no observation and reward"),
        (json.dumps({"type": "observation", "data": [1]}), "no observation and reward"),
        (
            json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}),
            "full .*environment.concurrent",
        ),
    ],
)
def test_what_is_no_answer_is_a_sentence(server, said, sentence):
    server.first = said
    with pytest.raises(RolloutError, match=rf"(?s)reset.*{sentence}"):
        acted(server.url, attempts=1)


def test_no_server_and_no_address_are_sentences():
    with pytest.raises(RolloutError, match="cannot be reached"):
        acted("http://127.0.0.1:9", attempts=1)
    with pytest.raises(ConfigError, match=r"no http\(s\):// or ws\(s\):// address"):
        OpenEnv("file:///etc/passwd")


def test_episodes_over_it_are_exact(server):
    tok, engine = chatting.tokenizer(), chat_engine()
    made = episodes("openenv", tok, params={"url": server.url, **PARAMS}, turn_tokens=8)
    (group,) = made(engine, [chat_prompt(tok)], 4, chat_sampling(), 3)
    check_exact([group], engine)
    assert len(server.resets) == 4
    assert all(sample.metadata[EPISODE]["reward"] > 0 for sample in group.samples)
