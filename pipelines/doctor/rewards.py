"""What the doctor can tell of rewards: each is asked, and told where code of answers would run.

Importable without torch, as `checks.py` is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.config.rewards import FunctionReward, PythonReward, ServedReward
from opd.errors import RewardError
from opd.foreign import shown
from opd.pipelines.doctor.checks import Finding, attempt

if TYPE_CHECKING:
    from opd.rollout.prompts import Domain, Prompt

    Answer = tuple[Prompt, str]
    """A prompt, and what was written to it."""


def check_rewards(
    recipe: Recipe, domains: Mapping[str, Domain], written: Mapping[str, Sequence[Answer]] | None = None
) -> list[Finding]:
    """What each domain's reward says of an empty answer, one of one token and the label; or else of what was
    `written` by the base, each to its own prompt. A reward that raises is an error, one that says the same of
    all these, or that takes garbage for right, a warning.
    """
    findings: list[Finding] = []
    for name, domain in domains.items():
        config = recipe.domains[name]
        if config.environment is not None:
            continue  # what is scored is an episode
        if domain.train and (config.reward is not None or domain.checker is not None):
            title = f"reward {name}" if written is None else f"reward {name}, the base"
            texts = None if written is None else written.get(name, ())
            findings += attempt(title, lambda d=domain, t=title, w=texts: _check_reward(recipe, d, t, w))
    return findings


def _simple_answers(domain: Domain) -> dict[str, str]:
    label = domain.train[0].label
    own = {_LABEL: str(label)} if isinstance(label, str | int | float) else {}
    return {"an empty answer": "", _NULL: "0"} | own


def _check_reward(
    recipe: Recipe, domain: Domain, title: str, written: Sequence[Answer] | None
) -> list[Finding]:
    simple = _simple_answers(domain)
    asked = [(domain.train[0], text) for text in simple.values()]
    answers = asked if written is None else list(written)
    names = list(simple) if written is None else [repr(text[:20]) for _, text in answers]
    if not answers:
        return []
    _reach(recipe.domains[domain.name].reward)
    scored = _scores(recipe, domain, answers)
    _check_weights(recipe, domain.name, {part for _, parts in scored for part in parts})
    scores = [score for score, _ in scored]
    said = ", ".join(f"{score:g} for {name}" for name, score in zip(names, scores, strict=True))
    if written is None and (garbage := _garbage(recipe, domain)) is not None:
        return [Finding("warning", title, f"{said}; {garbage}")]
    if written is None or len({*scores, *(score for score, _ in _scores(recipe, domain, asked))}) > 1:
        return [Finding("ok", title, said)]
    detail = (
        f"{said}, and the same for {', '.join(simple)}: where every answer is worth the same, GRPO has no"
        " signal; look whether the reward reads answers as the model writes them"
    )
    return [Finding("warning", title, detail)]


_GARBAGE = {"an empty answer": "", "'zxqv wkjy'": "zxqv wkjy", "'%%%'": "%%%"}
"""Answers that nobody means."""
_ROWS = 3
"""Prompts that are answered with them."""
_IS_RIGHT = 0.5
"""An answer that is worth more is right."""
_ZERO = re.compile(r"(?<![\d.,])[-+]?0+(?:\.0*)?(?![\d.,]*\d)")


def _garbage(recipe: Recipe, domain: Domain) -> str | None:
    """Say of the first row at which garbage is right, or 0 where the label is another, what it gets; `None`
    where there is none. A server is not asked: each answer costs.
    """
    reward = recipe.domains[domain.name].reward
    if isinstance(reward, ServedReward):
        return None
    is_own = reward is None or isinstance(reward, FunctionReward)
    rows = [(prompt, _texts_for(prompt)) for prompt in domain.train[:_ROWS]]
    scored = iter(_scores(recipe, domain, [(row, text) for row, texts in rows for text in texts.values()]))
    for prompt, texts in rows:
        scores = {name: next(scored)[0] for name in texts}
        right = _right_garbage(scores, is_own)
        if right:
            said = ", ".join(f"{scores[name]:g} for {name}" for name in right)
            own = scores.get(_LABEL)
            label = "" if own is None else f", {own:g} for its label {shown(prompt.label, 40)}"
            mend = f"domains.{domain.name}.reward" if reward is not None else "the checker of its source"
            return (
                f"at {prompt.where or 'one of its prompts'} garbage is right ({said}{label}), and a model"
                f" would learn to write it; mend {mend}, or the labels that it reads"
            )
    return None


def _right_garbage(scores: Mapping[str, float], is_own: bool) -> list[str]:
    """The answers among `scores` that are right, as good as the label, and cannot be meant. `is_own`: whether
    a function scores, for which a label is no pattern that 0 may fit.
    """
    label = scores.get(_LABEL)
    bar = max(_IS_RIGHT, label or 0.0)
    named = [*_GARBAGE, _NULL] if label is not None and (is_own or label > _IS_RIGHT) else _GARBAGE
    return [name for name in named if _IS_RIGHT < scores.get(name, 0.0) >= bar]


_LABEL, _NULL = "its label", "'0'"


def _texts_for(prompt: Prompt) -> dict[str, str]:
    """Garbage by name, and where the label is a text or a number the label, and 0 if it is another."""
    label = prompt.label
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return dict(_GARBAGE)
    null = {} if _ZERO.search(str(label)) else {_NULL: "0"}
    return {**_GARBAGE, _LABEL: str(label), **null}


def _reach(reward: object) -> None:
    """Raise `RewardError` where nobody listens: the run would wait for the server as long as its patience."""
    if isinstance(reward, ServedReward):
        from opd.rewards.endpoint import reach

        reach(reward)


def _check_weights(recipe: Recipe, name: str, parts: set[str]) -> None:
    """Raise `RewardError` for a weight of a part that no answer's reward had, `parts` being all they had."""
    own = recipe.domains[name].specialist is not None
    met = {f"domains.{name}.specialist" if own else "specialist": recipe.for_domain(name).specialist}
    met = met if name in recipe.grpo_domains() else {}
    way = "return a dict with it, or leave the weight out"
    if "mixed_grpo" in recipe.baselines.methods or recipe.baselines.mixed_grpo_all_tokens:
        met["specialist"] = recipe.specialist
        way += "; the baseline mixed_grpo weighs the rewards of all domains alike, and can be left out, too"
    for where, config in met.items():
        for part in config.shaping.weights:
            if part not in parts:
                raise RewardError(
                    f"{where}.shaping.weights names the part {part!r}, which the reward of domain {name}"
                    f" lacks (its parts: {', '.join(sorted(parts)) or 'none'}); {way}."
                )


def _scores(
    recipe: Recipe, domain: Domain, answers: Sequence[Answer]
) -> list[tuple[float, Mapping[str, float]]]:
    """The reward of each of `answers`, and its parts."""
    from opd.rewards.kinds import reward_of
    from opd.rollout.rewards import Job

    function = reward_of(recipe.domains[domain.name], domain)
    samples = [answer_to(repr(text[:20]), prompt, text) for prompt, text in answers]
    job = Job(function, samples, recipe.rollout.reward_timeout, "answer")
    job.start()
    return list(job.result())


def answer_to(uid: str, prompt: Prompt, text: str, context: str | None = None) -> Any:
    """An answer to `prompt` as a reward function sees it; its tokens are its characters. `context`: what the
    student reads of the prompt.
    """
    from opd.rollout.rewards import RewardSample, Turn

    said = context if context is not None else prompt.text
    said = said if said is not None else str(prompt.messages)
    own = {"messages": prompt.messages} if prompt.messages is not None else {"prompt": prompt.text}
    return RewardSample(
        uid=uid,
        text=text,
        prompt=said,
        label=prompt.label,
        domain=prompt.domain,
        metadata=prompt.metadata | own,
        turns=(Turn("assistant", text),),
        token_ids=tuple(map(ord, text)),
        loss_mask=(True,) * len(text),
    )


def check_sandbox(recipe: Recipe) -> list[Finding]:
    """Where code that the student writes will run, for the domains whose reward is `python`."""
    findings: list[Finding] = []
    for name, config in recipe.domains.items():
        if isinstance(config.reward, PythonReward):
            findings += attempt(f"sandbox {name}", partial(_check_sandbox, name, config.reward))
    return findings


def _check_sandbox(name: str, reward: PythonReward) -> list[Finding]:
    from opd.sandbox.answers import find_sandbox

    found = find_sandbox(reward.sandbox)
    if not found.open:
        detail = f"{found.name}: no other process, no network, nothing read or written elsewhere"
        return [Finding("ok", f"sandbox {name}", detail)]
    detail = (
        f"{found.name}, which does not keep answers' code from {' and '.join(found.open)}; install"
        " opd[verifiers] where user namespaces work, or run where nothing is worth stealing"
    )
    return [Finding("warning", f"sandbox {name}", detail)]
