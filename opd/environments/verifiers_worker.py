"""The process that holds one environment of the library verifiers, and plays its episodes concurrently.

The interpreter that has the library runs it, so it uses nothing of `opd` but `child.py`. A call is `[number,
episode, method, arguments]`, and its answer `[number, value, error]`. `ready` returns the number of tasks,
and `prompts` the texts of some. `play` returns the result of an episode, whose model is at an address with
OpenAI's API. `cancel` ends an episode without an answer.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ENDING = 10.0
"""Seconds in which the library may end its own processes, once the parent has gone."""


class VerifiersWorld:
    """The environment. Raises any error of the library, or of the code that it loads."""

    def __init__(self, taskset: str, settings: Mapping[str, object]) -> None:
        self._vf: Any = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self.env = self._vf.load_environment(self._resolve_config(taskset, settings, loaders))
        self._remaining, self._tasks = iter(self.env.taskset), list[Any]()

    def _resolve_config(self, taskset: str, settings: Mapping[str, Any], loaders: Any) -> Any:
        """Return the settings of one agent's environment, whose program runs here unless they say where."""
        env_settings = json.loads(json.dumps(settings))
        form = loaders.env_config_type(taskset, env_settings.get("id") or "")
        agent_form = self._vf.AgentConfig
        seats = [name for name, field in form.model_fields.items() if isinstance(field.default, agent_form)]
        if len(seats) != 1:
            raise ValueError(
                f"{form.__name__} has {len(seats)} agents ({', '.join(seats)}): all that they write would be"
                " learnt from with one reward; give the id of an environment with one agent"
            )
        env_settings.setdefault("taskset", {})["id"] = taskset
        env_settings.setdefault("interception", {"type": "server"})
        seat = env_settings.setdefault(seats[0], {})
        seat.setdefault("runtime", {"type": "subprocess"})
        config = self._vf.resolve_env_config(env_settings)
        agent = getattr(config, seats[0])
        envs = importlib.import_module("verifiers.v1.configs.env")
        harness = loaders.load_harness(agent.harness or envs.default_agent_harness(taskset))
        if harness.EXECUTES_CODE and agent.runtime.type == "subprocess":
            raise ValueError(
                f"its harness {harness.config.id} would run what the model writes on this machine, in no"
                f" sandbox; set {seats[0]}.runtime.type to docker, or {seats[0]}.harness.id to one that runs"
                " nothing, such as null"
            )
        return config

    def get_task(self, index: int) -> Any:
        """Return task number `index` of the task set. Raises `LookupError`."""
        self._tasks += itertools.islice(self._remaining, max(0, index + 1 - len(self._tasks)))
        if not 0 <= index < len(self._tasks):
            raise LookupError(f"there is no task {index}: its task set has {len(self._tasks)}")
        return self._tasks[index]

    def count_tasks(self) -> int | None:
        """Return the number of tasks, or None if there is no end. Checks that at least one can be made."""
        self.get_task(0)
        if not self.env.taskset.bounded:
            return None
        self._tasks += self._remaining
        return len(self._tasks)

    def task_prompts(self, count: int) -> list[str]:
        """Return the prompts of the first `count` tasks, or of all if there are fewer."""
        prompts = []
        for index in range(count):
            try:
                data = self.get_task(index).data
            except LookupError:
                break
            prompts.append("\n\n".join(filter(None, [data.system_prompt, data.prompt_text])))
        return prompts

    async def play(self, episode: int, index: int, url: str, key: str) -> dict[str, Any]:
        """Play one episode of task number `index`. Raises `RuntimeError` if it did not reach its end."""
        name = f"OPD_GATEWAY_API_KEY_{episode}"  # the suffix keeps it from the agent's own processes
        client = self._vf.EvalClientConfig(base_url=url, api_key_var=name)
        context = self._vf.ModelContext(client=client, model="student", sampling=self._vf.SamplingConfig())
        env = copy.copy(self.env)  # its servers and the client with the key end with the episode
        os.environ[name] = key
        try:
            async with env.serving():
                result = await env.run_episode(self.get_task(index), context)
        finally:
            del os.environ[name]
        errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
        if not result.ok or len(result.traces) != 1:
            message = f"{len(result.traces)} runs of an agent"
            if errors:
                message = f"{errors[-1].type}: {errors[-1].message}"
            raise RuntimeError(message[:2000])
        (trace,) = result.traces
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return {"reward": float(trace.reward), "rewards": rewards, "metrics": dict(trace.metrics)}


class CallServer:
    """Answers calls until the parent has gone."""

    def __init__(self, settings: Mapping[str, Any], channel: Any) -> None:
        self._settings, self._channel = settings, channel
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._calls: asyncio.Queue[bytes] = asyncio.Queue()
        self._world: VerifiersWorld | None = None

    async def run(self, listen: Any) -> None:
        """Answer calls until the other end of the channel is closed."""
        loop = asyncio.get_running_loop()

        def on_call(call: bytes) -> None:
            loop.call_soon_threadsafe(self._calls.put_nowait, call)

        def on_close() -> None:
            on_call(b"")
            time.sleep(_ENDING)
            os._exit(1)

        listen(self._channel, on_call, on_close)
        while call := await self._calls.get():
            number, episode, method, arguments = json.loads(call)
            if method == "cancel":
                if episode in self._playing:
                    self._playing[episode].cancel()
                continue
            self._playing[episode] = task = asyncio.create_task(
                self._answer_call(number, episode, method, arguments)
            )
            task.add_done_callback(lambda _, episode=episode: self._playing.pop(episode, None))

    async def _answer_call(self, number: int, episode: int, method: str, arguments: Any) -> None:
        try:
            if self._world is None:
                self._world = VerifiersWorld(self._settings["id"], self._settings["env"])
            if method == "play":
                value = await self._world.play(episode, *arguments)
            elif method == "ready":
                value = self._world.count_tasks()
            else:
                value = self._world.task_prompts(arguments)
            self._channel.send_message([number, value, None], allow_nan=False)
        except (Exception, SystemExit) as error:  # sent to the caller
            message = " ".join(f"{type(error).__name__}: {error}".split())
            self._channel.send_message([number, None, message[:4000]])


def main() -> None:
    """Serve the environment that the one argument describes."""
    spec: Any = importlib.util.spec_from_file_location("opd_child", Path(__file__).parents[1] / "child.py")
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    asyncio.run(CallServer(json.loads(sys.argv[1]), child.parent_channel()).run(child.listen))


if __name__ == "__main__":
    main()
