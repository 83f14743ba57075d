"""Environments of the library verifiers (0.4), by id: an agent that somebody else's program is.

The library asks a model with OpenAI's API, so it asks the gateway, and its tokens are learnt from as any
agent's. It lives in a process of its own, run by an interpreter that has it: what it needs is much, and in
other versions than a run has.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.environments.processes import Worker, WorkerError, shared_processes
from opd.environments.protocol import Task
from opd.errors import ConfigError
from opd.untrusted import safe_excerpt

STARTING = 600.0
"""Seconds that the library and its environment may take to be loaded."""
_SCRIPT = Path(__file__).with_name("verifiers_worker.py")


async def play(
    task: Task,
    base_url: str,
    api_key: str,
    id: str,
    python: str | None = None,
    env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Play one episode of the task whose number is the label. Raises `RuntimeError` if it fails.

    Args:
        task: Of the domain.
        base_url: Of the gateway.
        api_key: Of the episode.
        id: Of the task set, as the library finds it.
        python: An interpreter that has the library. By default the run's own.
        env: The library's settings of its environment, besides the task set's id.
    """
    if type(task.label) is not int:
        raise RuntimeError(
            f"label {safe_excerpt(task.label)} is no number of a task; write tasks by this module's command"
        )
    worker, episode = _shared_worker(id, python, env), next(_episodes)
    try:
        return await worker.call(episode, "play", [task.label, base_url, api_key], ends=False)
    except WorkerError as error:
        raise RuntimeError(str(error)) from error
    except asyncio.CancelledError:
        worker.send_call(episode, "cancel")
        raise


def prepare(
    where: str, id: str, python: str | None = None, env: Mapping[str, Any] | None = None
) -> int | None:
    """Load the environment and return its number of tasks, or None if it has no end. `where`: the recipe's
    key. Raises `ConfigError`.
    """
    return _call_worker(where, _shared_worker(id, python, env), "ready", None)


def _call_worker(where: str, worker: Worker, method: str, argument: Any) -> Any:
    try:
        return asyncio.run(asyncio.wait_for(worker.call(next(_episodes), method, argument), STARTING))
    except (WorkerError, TimeoutError) as error:
        worker.kill_process()
        message = str(error) or f"it took longer than {STARTING:g} s"
        raise ConfigError(
            f"{where}: the environment cannot be loaded ({safe_excerpt(message, 600)}); check params.id and"
            " params.env, and that params.python is an interpreter with verifiers 0.4."
        ) from error


_episodes = itertools.count()


def _shared_worker(id: str, python: str | None, env: Mapping[str, Any] | None) -> Worker:
    """Return the process with this environment, started if needed. Raises `ConfigError`."""
    interpreter, settings = python or sys.executable, json.dumps({"id": id, "env": dict(env or {})})
    try:
        # -P: its own folder holds a module of the library's name.
        return shared_processes([interpreter, "-P", str(_SCRIPT), settings], 1).assign_worker()
    except OSError as error:
        raise ConfigError(
            f"environment verifiers: {safe_excerpt(interpreter)} cannot be run ({error.strerror}); give"
            " params.python an interpreter with verifiers 0.4."
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m opd.environments.verifiers", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--id", required=True, help="of the task set")
    parser.add_argument("--tasks", type=int, default=200, help="at most")
    parser.add_argument("--python", help="an interpreter that has the library")
    parser.add_argument("--env", type=json.loads, default={}, help="params.env as JSON")
    options = parser.parse_args(arguments)
    worker = _shared_worker(options.id, options.python, options.env)
    prompts = _call_worker("verifiers", worker, "prompts", options.tasks)
    messages = [
        [{"role": "user", "content": text or f"Task {number}."}] for number, text in enumerate(prompts)
    ]
    rows = [json.dumps({"prompt": prompt, "label": number}) + "\n" for number, prompt in enumerate(messages)]
    options.file.write_text("".join(rows), "utf-8")


if __name__ == "__main__":
    main()
