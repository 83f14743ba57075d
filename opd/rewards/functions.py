"""The forms a reward function may have, brought to one.

1. `def reward(sample) -> float | dict` or `async def`, with `sample` a `RewardSample`.
2. TRL's form, `def reward(prompts, completions, **columns) -> list[float]` or `async def`, recognised by a
   parameter named `completions`. The columns are `completion_ids`, `label`, `domain`, the samples' metadata,
   and what else a `RewardSample` has, as lists.
3. A domain's own checker, `checker(completion, label) -> float`.

A dict is a reward in parts: its `reward` entry is the reward if there is one, else the sum of all entries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opd.data.prompts import Checker
from opd.errors import RewardError
from opd.imports import import_attribute
from opd.types import Status


@dataclass(frozen=True, slots=True)
class Turn:
    """A part of a response by one side, as text without the token that ended it."""

    role: Literal["assistant", "environment"]
    """`assistant`: the model wrote it; `environment`: what an agent's tools or environment answered."""
    text: str


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a reward function sees of a sample."""

    uid: str
    text: str
    """What the model wrote, without the tokens that ended its turns; several turns one after the other."""
    prompt: str
    label: Any
    domain: str
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: Sequence[Turn] = ()
    """The whole response in order: one turn of the model, or an agent's and its environment's."""
    status: Status = Status.COMPLETED
    """`COMPLETED`, or `TRUNCATED` where `max_new_tokens` ended it."""
    token_ids: Sequence[int] = ()
    """[R] the whole response, the environment's tokens and those that ended turns included."""
    loss_mask: Sequence[bool] = ()
    """[R] True where the model wrote the token."""

    @property
    def completion(self) -> str:
        """The same as `text`."""
        return self.text

    @property
    def length(self) -> int:
        """Tokens that the model wrote."""
        return sum(self.loss_mask)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """`length` if the response was cut off at `max_new_tokens`."""
        return "length" if self.status is Status.TRUNCATED else "stop"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation: the prompt's messages (a prompt of text is the user's) and all turns."""
        asked = self.metadata.get("messages") or [{"role": "user", "content": self.prompt}]
        return [*asked, *self.answers]

    @property
    def answers(self) -> list[dict[str, Any]]:
        """All turns as messages."""
        return [{"role": turn.role, "content": turn.text} for turn in self.turns]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function of any form, with what is needed to call it."""

    name: str
    call: Callable[..., Any]
    style: Literal["sample", "batch"]
    """One sample at a time, or all of a domain's samples at once."""
    is_async: bool

    def batch_arguments(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """Keyword arguments for a `batch` function: those of its parameters, or all columns for `**columns`.

        Samples whose metadata holds `messages` are given the way TRL gives conversations. Raises
        `RewardError` naming a parameter that no column fills.
        """
        columns = _columns(samples)
        parameters = inspect.signature(self.call).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            accepted = set(columns)
        else:
            accepted = {parameter.name for parameter in parameters}
        for parameter in parameters:
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if needed and parameter.name not in columns:
                raise RewardError(
                    f"reward function {self.name} needs the column {parameter.name!r}, which domain "
                    f"{samples[0].domain} does not have (it has {', '.join(sorted(columns))}); give that"
                    " parameter a default."
                )
        return {name: values for name, values in columns.items() if name in accepted}


_SHOWN = ("turns", "status", "finish_reason", "length", "loss_mask")
"""Attributes of a `RewardSample` that are columns, unless the data has columns of these names."""


def _columns(samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for sample in samples for name in sample.metadata)
    columns: dict[str, list[Any]] = {name: [getattr(s, name) for s in samples] for name in _SHOWN}
    columns |= {name: [s.metadata.get(name) for s in samples] for name in names}
    chat = bool(samples) and all("messages" in sample.metadata for sample in samples)
    columns["prompts"] = [s.metadata["messages"] if chat else s.prompt for s in samples]
    columns["completions"] = [s.answers if chat else s.text for s in samples]
    columns["completion_ids"] = [list(s.token_ids) for s in samples]
    columns["label"] = [sample.label for sample in samples]
    columns["domain"] = [sample.domain for sample in samples]
    return columns


def load_reward(dotted: str) -> RewardFunction:
    """The reward function at `package.module:function`.

    Raises `RewardError` if it cannot be imported, is not callable, or has none of the accepted forms.
    """
    return wrap_reward(import_attribute(dotted, "reward", RewardError), dotted)


def wrap_reward(call: Any, name: str) -> RewardFunction:
    """A function (or callable object) of form 1 or 2. Raises `RewardError` if it has neither form."""
    if inspect.isclass(call) or not callable(call):
        raise RewardError(f"reward {name} is a {type(call).__name__}, not a function; name a function.")
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except Exception as error:  # an object of the user's own may say anything of itself
        raise RewardError(f"reward {name} has no readable signature; wrap it in a plain function.") from error
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - asked whether it is async, not whether it exists
    )
    if any(parameter.name == "completions" for parameter in parameters):
        return RewardFunction(name, call, "batch", is_async)
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not positional or len(required) > 1:
        shown = ", ".join(parameter.name for parameter in parameters)
        raise RewardError(
            f"reward {name}({shown}) has none of the accepted forms: reward(sample), or "
            "reward(prompts, completions, **columns)."
        )
    return RewardFunction(name, call, "sample", is_async)


def checker_reward(checker: Checker, name: str) -> RewardFunction:
    """A domain's own checker as a reward function."""

    def reward(sample: RewardSample) -> float:
        return checker(sample.text, sample.label)

    return RewardFunction(name, reward, "sample", is_async=False)
