"""The built-in rewards, `domains.NAME.reward: TYPE`, and the scorer of each domain.

The settings of a kind are a class of `opd.config.rewards`. Its code is the `KINDS["TYPE"]` of
`opd/rewards/TYPE_reward.py`, or of a file that several share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from opd.config.recipe import DomainConfig
from opd.config.rewards import FunctionReward, PythonReward, ServedReward, VerifierSettings
from opd.data.file_kinds import rename_hint
from opd.errors import DataError, RewardError
from opd.rewards.verifier import Answered, Verifier, is_missing
from opd.rollout.prompts import Checker, Domain, Prompt
from opd.rollout.rewards import RewardFunction, RewardSample, checker_reward, load_reward

_SHARED = {
    **dict.fromkeys(("choice", "exact", "f1", "regex"), "text_rewards"),
    **dict.fromkeys(("judge", "scorer"), "served_rewards"),
}
"""Kinds whose code shares a file -> its name."""


def verifier_of(settings: VerifierSettings) -> Verifier:
    """Return the built-in reward of these settings."""
    file = _SHARED.get(settings.type, f"{settings.type}_reward")
    return import_module(f"opd.rewards.{file}").KINDS[settings.type]


def own_reward(config: DomainConfig) -> RewardFunction | None:
    """Return the recipe's reward of a domain, ready to use, or None if it has none.

    Raises `RewardError` for a function that cannot be loaded or a sandbox that does not work, and
    `MissingExtraError`.
    """
    settings = config.reward
    if settings is None:
        return None
    if isinstance(settings, FunctionReward):
        return load_reward(settings.path)
    verifier = verifier_of(settings)
    verifier.require(settings)

    def score(samples: Sequence[RewardSample]) -> list[float | dict[str, float]]:
        return verifier.score(settings, [_scored_answer(sample) for sample in samples])

    def answer(sample: RewardSample) -> str | None:
        return verifier.answer(settings, sample.text)

    return RewardFunction(settings.type, score, "samples", False, verifier.seconds(settings), answer)


def _scored_answer(sample: RewardSample) -> Answered:
    messages, prompt = sample.metadata.get("messages"), sample.metadata.get("prompt")
    if isinstance(messages, list) and messages:
        parts = [(str(one.get("role")), one.get("content")) for one in messages if isinstance(one, Mapping)]
        texts = [(role, c if isinstance(c, str) else json.dumps(c, ensure_ascii=False)) for role, c in parts]
        prompt = texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)
    return Answered(
        sample.text, sample.label, prompt if isinstance(prompt, str) else sample.prompt, sample.prompt
    )


def reward_of(config: DomainConfig, domain: Domain) -> RewardFunction:
    """Return the scorer of `domain`: the recipe's reward, or the source's own checker. Checks all labels.

    Raises `DataError` if there is neither, or if a built-in reward cannot use a label.
    """
    function = scorer_of(config, domain.name, domain.checker)
    check_labels(config, domain.name, [*domain.train, *domain.held_out])
    return function


def scorer_of(config: DomainConfig, name: str, checker: Checker | None) -> RewardFunction:
    """Return the scorer of domain `name`, whose source has a `checker`. Raises `DataError` if there is none,
    and as `own_reward`.
    """
    function = own_reward(config)
    if function is None and config.environment is not None:
        code = config.environment.user_code or config.environment.type
        return RewardFunction(code, episode_reward, "sample", is_async=False)
    if function is None and checker is not None:
        return checker_reward(checker, f"checker of domain {name}")
    if function is None:
        raise DataError(f"{config.source} has no checker of its own; set domains.{name}.reward.")
    return function


def episode_reward(sample: RewardSample) -> float:
    """Return the sum of the environment's rewards."""
    reward = sample.metadata["episode"]["reward"]
    if reward is None:
        raise RewardError(
            f"the agent of domain {sample.domain} returned no reward for {sample.uid}; return one, or set"
            f" domains.{sample.domain}.reward."
        )
    return float(reward)


def check_labels(config: DomainConfig, name: str, prompts: Iterable[Prompt]) -> None:
    """Raise `DataError` for the first label that the domain's built-in reward cannot use."""
    settings = config.reward
    if settings is None or isinstance(settings, FunctionReward):
        return
    verifier = verifier_of(settings)
    for prompt in prompts:
        fault = verifier.label_fault(settings, prompt.label)
        if fault is not None:
            hint = rename_hint(prompt.metadata, "label") if is_missing(prompt.label) else ""
            fault = f"is missing{hint}" if hint else fault
            where = prompt.where or f"domain {name}, prompt {prompt.key[:12]}"
            raise DataError(
                f"{where}: the label, which domains.{name}.reward {settings.type} needs, {fault}."
            )


def reward_sandboxes(domains: Mapping[str, DomainConfig]) -> dict[str, str]:
    """Domain -> the sandbox on this machine that runs the code of its answers, if it is run."""
    from opd.sandbox.answers import find_sandbox

    return {
        name: find_sandbox(config.reward.sandbox).name
        for name, config in domains.items()
        if isinstance(config.reward, PythonReward)
    }


def scored_by(config: DomainConfig) -> str:
    """For people: the path of a function, the kind of a built-in reward, or the source's own checker."""
    if config.reward is None:
        return "the source's own checker" if config.environment is None else "its environment"
    if isinstance(config.reward, FunctionReward):
        return config.reward.path
    served = isinstance(config.reward, ServedReward) and config.reward.model
    return f"{config.reward.type} {served}" if served else config.reward.type
