"""The interface of environments: an environment is reset to a task, answers actions, and rewards them.

An environment is a class of the user's own (`domains.NAME.environment: package.module:Class`) or a built-in
one. One object is made for each episode. Its methods may be `async` or plain (plain ones run in a thread).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from opd.types import Sample

EPISODE = "episode"
"""Key of a sample's metadata for the facts about its episode."""
Message = dict[str, Any]
"""`{"role": ..., "content": ...}` and other fields that the chat template reads."""
Observation = str | Sequence[Message] | None
"""Shown to the model next: a text, or messages of any role but the assistant's. Nothing for `None`."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of an episode."""

    uid: str
    """Uid of the sample: the same in a resumed run, and different for each sample of a group."""
    prompt: str
    """The prompt's text, or empty if it is messages."""
    messages: Sequence[Message]
    """The prompt's messages, or none if it is text."""
    label: Any
    """The prompt's label."""
    metadata: dict[str, Any]
    """Other columns of the prompt's row."""
    seed: int
    """In [0, 2**31): a function of the run's seed and the prompt, so that all episodes of a group share one
    world."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model."""

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
    """Return True if a scored response counts as right: an episode by its environment's rule, any other if
    its reward is above `above`.
    """
    episode = sample.metadata.get(EPISODE) or {}
    rule = episode.get("success", above)
    if isinstance(rule, str):
        return bool(episode["info"].get(rule.removeprefix("info.")))
    return (sample.reward or 0.0) > rule
