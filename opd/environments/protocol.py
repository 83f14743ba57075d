"""The interface of environments: an environment is reset to a task, answers actions, and rewards them.

An environment is a class of the user's own (`domains.NAME.environment: package.module:Class`) or a built-in
one. One object is made for each episode. Its methods may be `async` or plain (plain ones run in a thread).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, cast

from opd.config.environments import BUILT_IN, EnvironmentConfig
from opd.errors import ConfigError
from opd.imports import import_attribute
from opd.types import Sample
from opd.user_code import call_user_code

EPISODE = "episode"
"""Key of a sample's metadata for the facts about its episode."""
Message = dict[str, Any]
"""`{"role": ..., "content": ...}` and other fields that the chat template reads."""
Observation = str | Sequence[Message] | None
"""Shown to the model next: a text, or messages of any role but the assistant's. Nothing for `None`."""


@dataclass(frozen=True, slots=True)
class Task:
    uid: str
    """Uid of the sample: the same in a resumed run, and different for each sample of a group."""
    prompt: str
    """The prompt's text, or empty if it is messages."""
    messages: Sequence[Message]
    """The prompt's messages, or none if it is text."""
    label: Any
    metadata: dict[str, Any]
    """Other columns of the prompt's row."""
    seed: int
    """In [0, 2**31): from the run's seed and the prompt, so that episodes of a group share one world."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """The model's output in a turn."""

    text: str
    """Without the token that ended it. Other special tokens stay in the text."""
    calls: Sequence[ToolCall] = ()
    """The tool calls in it, by the domain's `tool_format`."""
    broken: Sequence[str] = ()
    """Errors of calls that cannot be read, one sentence each."""
    turn: int = 0
    """From 0."""
    cut: bool = False
    """True if the limit of a turn's tokens ended it."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to an action."""

    observation: Observation = None
    """Shown to the model before its next turn. Not shown if the episode is over."""
    reward: float = 0.0
    """For this turn. An episode's reward is the sum."""
    done: bool = False
    """True if the episode is over."""
    info: dict[str, Any] = field(default_factory=dict)
    """For people and reward functions, JSON-able: `sample.metadata["episode"]["info"]`."""


class Environment(Protocol):
    """One episode's world. Made with the recipe's `environment.params` as keyword arguments.

    It may have `close()`, called once the episode is over, whatever ended it.
    """

    tools: ClassVar[Sequence[dict[str, Any]]] = ()
    """JSON schemas of the functions that the model may call, as chat templates take them in `tools`."""

    def reset(self, task: Task) -> Any:
        """Begin, and return an `Observation`, which follows the prompt. May be `async`."""
        ...

    def step(self, action: Action) -> Any:
        """Answer `action` with a `Step`. May be `async`.

        The same actions after the same `reset` must give the same answers. A resumed run repeats them
        (without asking the model again), and so does an episode whose environment failed.
        """
        ...


def is_success(sample: Sample, above: float) -> bool:
    """Return True if a scored response is right: an episode by its own rule, any other above `above`."""
    episode = sample.metadata.get(EPISODE) or {}
    rule = episode.get("success", above)
    if isinstance(rule, str):
        return bool(episode["info"].get(rule.removeprefix("info.")))
    return (sample.reward or 0.0) > rule


def agent_function(config: EnvironmentConfig, domain: str) -> Callable[..., Any]:
    """Import the function of the recipe's agent, callable with its params. Raises `ConfigError`."""
    where, path = f"domains.{domain}.environment.params", str(config.agent_path)
    function: Any = import_attribute(path, f"{where}.run", ConfigError)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{where}.run: {path} is no function; name one as run(task, base_url, api_key).")
    params = {name: value for name, value in config.params.items() if name != "run"}
    with call_user_code(f"{where}.run: {path}", ConfigError):
        try:
            inspect.signature(function).bind(None, "", "", **params)
        except TypeError as error:
            raise ConfigError(
                f"{where} do not fit {path}{inspect.signature(function)}, which is called with task, base_url"
                f" and api_key besides ({error}); change them."
            ) from None
    if config.type == "verifiers":
        from opd.environments.verifiers import prepare

        prepare(f"domains.{domain}.environment", **params)
    return function


def environment_class(config: EnvironmentConfig, domain: str) -> Callable[..., Environment]:
    """Import the environment's class. Raises `ConfigError` if it is none, or does not take `params`."""
    where = f"domains.{domain}.environment"
    path = BUILT_IN.get(config.type, config.type)
    environment: Any = import_attribute(path, where, ConfigError)
    missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
    if missing or not inspect.isclass(environment):
        raise ConfigError(
            f"{where}: {config.type} is no class, or has no {' and no '.join(missing)}; name one with"
            " reset(task) and step(action)."
        )
    maker = cast("Callable[..., Environment]", environment)
    with call_user_code(f"{where}: {config.type}", ConfigError):
        try:
            inspect.signature(maker).bind(**config.params)
        except TypeError as error:
            raise ConfigError(
                f"{where}.params do not fit {config.type}{inspect.signature(maker)} ({error}); change them."
            ) from None
    return maker


def tools_of(config: EnvironmentConfig, domain: str) -> list[dict[str, Any]]:
    """JSON schemas of the functions that the model may call there. Most environments have none."""
    environment = environment_class(config, domain)
    schemas = getattr(environment, "schemas", None)
    tools = getattr(environment, "tools", ()) if schemas is None else schemas(**config.params)
    if not isinstance(tools, list | tuple) or not all(isinstance(one, dict) for one in tools):
        raise ConfigError(
            f"domains.{domain}.environment: tools of {config.type} is a {type(tools).__name__}; give a list"
            " of JSON schemas."
        )
    return [dict(one) for one in tools]
