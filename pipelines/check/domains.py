"""The doctor's checks of domains: prompts, rewards of simple answers, sandbox, and environments.

It makes each environment, resets it and takes one step. Importable without torch, as `checks.py` is.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from opd.config import Recipe
from opd.config.environments import EnvironmentConfig
from opd.config.rewards import FunctionReward, PythonReward, ServedReward
from opd.errors import ConfigError, DataError, RewardError
from opd.pipelines.check.checks import Finding, run_check
from opd.sandbox.containers import HOME
from opd.untrusted import safe_excerpt
from opd.user_code import call_user_code

if TYPE_CHECKING:
    from opd.rollout.prompts import Domain, Prompt
    from opd.rollout.rewards import RewardSample, Scored

    Answer = tuple[Prompt, str]

_PEEK = 64
"""Prompts that a procedural source makes for a check, enough to show their form."""


def check_domains(recipe: Recipe, domains: dict[str, Domain]) -> list[Finding]:
    """Load a small sample of every domain into `domains`, and its reward function."""
    findings: list[Finding] = []
    for name in recipe.domains:
        title = f"domain {name}"
        scorer = run_check(title, check_scorer, recipe, name)
        source = run_check(title, _check_domain, recipe, name, domains)
        # One line for a sound domain, and all errors of another.
        findings += scorer + ([f for f in source if f.level != "ok"] if scorer else source)
    trained = recipe.specialist_domains()
    for name, config in recipe.domains.items():
        if config.specialist is not None and name not in trained:
            detail = (
                f"domains.{name}.specialist has no effect: this run trains no specialist of {name}; leave it"
                " out, or the path of the teacher in its place"
            )
            findings.append(Finding("warning", f"domain {name}", detail))
    return findings


def check_scorer(recipe: Recipe, name: str) -> None:
    """Raise if the reward of a domain is wrong, whatever its prompts are."""
    from opd.rewards.registry import own_reward, scorer_of

    config = recipe.domains[name]
    if config.is_file:
        scorer_of(config, name, None)
    else:
        own_reward(config)


def _check_domain(recipe: Recipe, name: str, domains: dict[str, Domain]) -> list[Finding]:
    from opd.data.load import load_domain
    from opd.rewards.registry import check_labels, scored_by

    config = recipe.domains[name]
    # Only smaller than the run's own settings, and no smaller than the recipe's number.
    small = config.model_copy(update={"prompts": min(config.prompts, _PEEK)})
    held_out = recipe.evaluation.prompts_per_domain
    if ":" in config.source:  # generated: a few show their form, but files are read completely
        held_out = min(8, held_out)
    domain = load_domain(name, small, seed=recipe.seed, held_out_prompts=held_out)
    domains[name] = domain
    prompts = [*domain.train, *domain.held_out]
    if recipe.storage.trajectories == "disk":
        for prompt in prompts:  # samples are stored as JSON
            for key, value in {"label": prompt.label, **prompt.metadata}.items():
                try:
                    json.dumps(value, allow_nan=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise DataError(
                        f"{prompt.where or f'domain {name}'}: {safe_excerpt(key)} holds what JSON cannot"
                        f" ({safe_excerpt(error)}); write it as text, or set storage.trajectories to memory."
                    ) from error
    if recipe.base is not None and domain.demonstrations is None:
        detail = (
            f"{config.source} has no demonstrations for the warm-up of `base`; give model.path and no `base`"
        )
        return [Finding("error", f"domain {name}", detail)]
    check_labels(config, name, prompts)
    return [Finding("ok", f"domain {name}", f"{config.source}, scored by {scored_by(config)}")]


def check_held_out(recipe: Recipe, domains: Mapping[str, Domain]) -> list[Finding]:
    """Warn if the evaluation has too few prompts to know accuracies."""
    from opd.pipelines.evaluation.statistics import FEW, Count, wilson_interval

    counts, most = {}, recipe.evaluation.prompts_per_domain
    for name, domain in domains.items():
        generated = ":" in recipe.domains[name].source  # the check made only a few of these
        counts[name] = most if generated else min(most, len(domain.held_out))
    few = {name: count for name, count in counts.items() if count < FEW}
    if not few:
        return []
    least, level = min(few.values()), recipe.evaluation.confidence
    interval = wilson_interval(Count(least // 2, least), level)
    half = 50 * (interval.high - interval.low)
    detail = (
        f"{', '.join(f'{name} {count}' for name, count in few.items())}: with {least} an accuracy of 50 % is"
        f" known to ± {half:.0f} points ({100 * level:g} % interval), and models that are closer cannot be"
        " told apart; raise evaluation.prompts_per_domain, or held_out where a file has no more"
    )
    return [Finding("warning", "held-out prompts", detail, {"points": half})]


def check_rewards(
    recipe: Recipe, domains: Mapping[str, Domain], written: Mapping[str, Sequence[Answer]] | None = None
) -> list[Finding]:
    """Score simple answers with each domain's reward: an empty answer, one of one token, and the label. With
    `written`, score the base's own answers instead, each to its own prompt. A reward that raises is an error.
    A reward that is the same for all, or that accepts garbage, is a warning.
    """
    findings: list[Finding] = []
    for name, domain in domains.items():
        config = recipe.domains[name]
        if config.environment is not None:
            continue  # a reward scores an episode here
        if domain.train and (config.reward is not None or domain.checker is not None):
            title = f"reward {name}" if written is None else f"reward {name}, the base"
            texts = None if written is None else written.get(name, ())
            findings += run_check(title, _check_reward, recipe, domain, title, texts)
    return findings


def _check_reward(
    recipe: Recipe, domain: Domain, title: str, written: Sequence[Answer] | None
) -> list[Finding]:
    first = domain.train[0]
    simple = {"an empty answer": "", _NULL: "0"}
    if isinstance(first.label, str | int | float):
        simple[_LABEL] = str(first.label)
    simple_answers = [(first, text) for text in simple.values()]
    answers = simple_answers if written is None else list(written)
    names = list(simple) if written is None else [repr(text[:20]) for _, text in answers]
    if not answers:
        return []
    reward = recipe.domains[domain.name].reward
    if isinstance(reward, ServedReward):  # the job would wait for a server until its patience ends
        from opd.rewards.endpoint import check_reachable

        check_reachable(reward)
    scored = _score_answers(recipe, domain, answers)
    _check_weights(recipe, domain.name, {part for one in scored for part in one.parts})
    scores = [one.reward for one in scored]
    text = ", ".join(f"{score:g} for {name}" for name, score in zip(names, scores, strict=True))
    if written is None and (garbage := _garbage_warning(recipe, domain)) is not None:
        return [Finding("warning", title, f"{text}; {garbage}")]
    if written is not None:
        scores += [one.reward for one in _score_answers(recipe, domain, simple_answers)]
    read = recipe.domains[domain.name].teacher_prompt
    if read is not None and "feedback" in read.group_columns and not any(one.feedback for one in scored):
        detail = (
            "it says nothing of these answers, but teacher_prompt names {feedback}; return a dict with it"
        )
        return [Finding("warning", title, f"{text}; {detail}")]
    if written is None or len(set(scores)) > 1:
        return [Finding("ok", title, text)]
    detail = (
        f"{text}, and the same for {', '.join(simple)}: where every answer is worth the same, GRPO has no"
        " signal; look whether the reward reads answers as the model writes them"
    )
    return [Finding("warning", title, detail)]


_GARBAGE = {"an empty answer": "", "'zxqv wkjy'": "zxqv wkjy", "'%%%'": "%%%"}
_ROWS = 3
"""Prompts that get them as answers."""
_LABEL, _NULL = "its label", "'0'"
_IS_RIGHT = 0.5
"""An answer with a higher reward is right."""
_ZERO = re.compile(r"(?<![\d.,])[-+]?0+(?:\.0*)?(?![\d.,]*\d)")


def _garbage_warning(recipe: Recipe, domain: Domain) -> str | None:
    """Describe the first row at which garbage is right, or 0 is right although the label differs. `None` if
    there is no such row. A server is not asked because each answer costs.
    """
    reward = recipe.domains[domain.name].reward
    if isinstance(reward, ServedReward):
        return None
    rows = []
    for prompt in domain.train[:_ROWS]:
        texts, label = dict(_GARBAGE), prompt.label
        if isinstance(label, str | int | float) and not isinstance(label, bool):
            texts[_LABEL] = str(label)
            if not _ZERO.search(str(label)):
                texts[_NULL] = "0"
        rows.append((prompt, texts))
    scored = iter(
        _score_answers(recipe, domain, [(row, text) for row, texts in rows for text in texts.values()])
    )
    for prompt, texts in rows:
        scores = {name: next(scored)[0] for name in texts}
        label = scores.get(_LABEL)
        wrong = list(_GARBAGE)
        # A label may be a pattern that matches 0, unless a function scores.
        by_function = reward is None or isinstance(reward, FunctionReward)
        if label is not None and (by_function or label > _IS_RIGHT):
            wrong.append(_NULL)
        bar = max(_IS_RIGHT, label or 0.0)
        right = [name for name in wrong if _IS_RIGHT < scores.get(name, 0.0) >= bar]
        if right:
            listed = ", ".join(f"{scores[name]:g} for {name}" for name in right)
            if label is not None:
                listed += f", {label:g} for its label {safe_excerpt(prompt.label, 40)}"
            mend = f"domains.{domain.name}.reward" if reward is not None else "the checker of its source"
            return (
                f"at {prompt.where or 'one of its prompts'} garbage is right ({listed}), and a model"
                f" would learn to write it; mend {mend}, or the labels that it reads"
            )
    return None


def _check_weights(recipe: Recipe, name: str, parts: set[str]) -> None:
    """Raise `RewardError` for a weight of a reward term outside `parts`, which has all answers' terms."""
    specialists = {}
    if name in recipe.grpo_domains():
        has_settings = recipe.domains[name].specialist is not None
        where = f"domains.{name}.specialist" if has_settings else "specialist"
        specialists[where] = recipe.for_domain(name).specialist
    mend = "return a dict with it, or leave the weight out"
    if "mixed_grpo" in recipe.baselines.methods or recipe.baselines.mixed_grpo_all_tokens:
        specialists["specialist"] = recipe.specialist
        mend += "; the baseline mixed_grpo weighs the rewards of all domains alike, and can be left out, too"
    for where, config in specialists.items():
        for part in config.shaping.weights:
            if part not in parts:
                raise RewardError(
                    f"{where}.shaping.weights names the part {part!r}, which the reward of domain {name}"
                    f" lacks (its parts: {', '.join(sorted(parts)) or 'none'}); {mend}."
                )


def _score_answers(recipe: Recipe, domain: Domain, answers: Sequence[Answer]) -> list[Scored]:
    """Return the reward of each of `answers`, with its terms and its feedback."""
    from opd.rewards.registry import reward_of
    from opd.rollout.rewards import Job

    function = reward_of(recipe.domains[domain.name], domain)
    samples = [answer_to(repr(text[:20]), prompt, text) for prompt, text in answers]
    job = Job(function, samples, recipe.rollout.reward_timeout, "answer")
    job.start()
    return list(job.result())


def answer_to(uid: str, prompt: Prompt, text: str, context: str | None = None) -> RewardSample:
    """Return an answer to `prompt` as a reward function sees it. Its tokens are its characters. `context`:
    the prompt as the student reads it.
    """
    from opd.rollout.rewards import RewardSample, Turn  # it needs torch

    if context is None:
        context = prompt.text if prompt.text is not None else str(prompt.messages)
    original = {"messages": prompt.messages} if prompt.messages is not None else {"prompt": prompt.text}
    return RewardSample(
        uid=uid,
        text=text,
        prompt=context,
        label=prompt.label,
        domain=prompt.domain,
        metadata=prompt.metadata | original,
        turns=(Turn("assistant", text),),
        token_ids=tuple(map(ord, text)),
        loss_mask=(True,) * len(text),
    )


def check_sandbox(recipe: Recipe) -> list[Finding]:
    """Find the sandbox for the student's code, for domains whose reward is `python`."""
    from opd.sandbox.answers import find_sandbox

    def check_isolation(title: str, reward: PythonReward) -> list[Finding]:
        sandbox = find_sandbox(reward.sandbox)
        if not sandbox.allowed_attempts:
            detail = f"{sandbox.name}: no other process, no network, nothing read or written elsewhere"
            return [Finding("ok", title, detail)]
        detail = (
            f"{sandbox.name}, which does not keep answers' code from"
            f" {' and '.join(sandbox.allowed_attempts)}; install opd[verifiers] where user namespaces work,"
            " or run where nothing is worth stealing"
        )
        return [Finding("warning", title, detail)]

    findings: list[Finding] = []
    for name, config in recipe.domains.items():
        if isinstance(config.reward, PythonReward):
            title = f"sandbox {name}"
            findings += run_check(title, check_isolation, title, config.reward)
    return findings


_EXCERPT = 60
"""Characters of an environment's answer in a finding."""
_MEND = {
    "container": "put it into the image, or take other params.tools",
    "process": "install it, or take other params.tools",
    "bubblewrap": "install it where the system's programs are, or take other params.tools",
}
"""The fix for a missing program, by the kind of substrate."""
_PRIVATE = (HOME, "/tmp", "/proc", "/dev")
"""Private folders of a sandbox, except of the kind `process`."""


def check_environments(recipe: Recipe, domains: Mapping[str, Domain]) -> list[Finding]:
    """Make each environment, reset it to the domain's first prompt, and take an empty action. An environment
    that raises or takes too long is an error.
    """
    findings: list[Finding] = []
    for name, domain in domains.items():
        config = recipe.domains[name].environment
        if config is None or not domain.train:
            continue
        tool_findings = run_check(f"environment {name}", _check_tools, name, config)
        findings += tool_findings
        if all(finding.level != "error" for finding in tool_findings):
            findings += run_check(f"environment {name}", _check_environment, recipe, domain)
    for name, config in recipe.of_sets().domains.items():
        if config.environment is not None:
            findings += run_check(f"environment {name}", _check_tools, name, config.environment)
    return findings


def _check_tools(domain: str, config: EnvironmentConfig) -> list[Finding]:
    """Check where tools run, how far they are isolated, and that their programs exist."""
    if config.agent_path is not None:
        return []
    from opd.environments.protocol import environment_class
    from opd.environments.tools import MOST_CALLS, Tools
    from opd.sandbox.substrates import find_substrate

    type_, title = environment_class(config, domain), f"tools {domain}"
    if not (inspect.isclass(type_) and issubclass(type_, Tools)):
        return []
    tools = type_(**config.params)
    settings = tools.sandbox
    substrate = find_substrate(settings.substrate, settings.image)
    if lost := _check_reads(title, settings.reads, substrate.kind):
        return lost
    location = substrate.kind if substrate.container is None else f"{substrate.kind}: {substrate.container}"
    with call_user_code(f"domains.{domain}.environment: {config.type}", ConfigError):
        missing = asyncio.run(tools.missing_programs())
    mend = _MEND[substrate.kind]
    findings = [
        Finding("error", title, f"{location} has no {program} for {' and '.join(of)}; {mend}")
        for program, of in missing.items()
    ]
    if (longest := MOST_CALLS * settings.seconds) >= config.seconds:
        detail = (
            f"a turn's {MOST_CALLS} commands may take {settings.seconds:g} s each, and a step of the"
            f" environment {config.seconds:g} s, so that commands that sleep would end the run; set"
            f" domains.{domain}.environment.seconds above {longest:g}, or params.sandbox.seconds lower"
        )
        findings.append(Finding("error", title, detail))
    if not substrate.allowed_attempts:
        return [*findings, Finding("ok", title, f"run in {location}")]
    attempts = ", ".join(substrate.allowed_attempts)
    detail = f"run in {location}, which does not keep them from all of: {attempts}"
    return [*findings, Finding("warning", title, detail)]


def _check_reads(title: str, reads: Sequence[str], kind: str) -> list[Finding]:
    """Check commands' paths. Without them a process would run, but a container would not start."""
    findings = []
    for path in reads:
        exists, folder = os.path.exists(path), PurePath(os.path.normpath(path))
        private = [one for one in _PRIVATE if kind != "process" and PurePath(one).is_relative_to(folder)]
        if not exists or not os.path.isabs(path):
            wrong = "is not an absolute path" if exists else "is not there"
            detail = (
                f"params.sandbox.reads has {safe_excerpt(path)}, which {wrong}; mend the path, or take it out"
            )
        elif private:
            detail = (
                f"params.sandbox.reads has {safe_excerpt(path)}, where commands have a {private[0]} of their"
                " own; name the files and folders in it that they are to read"
            )
        else:
            continue
        findings.append(Finding("error", title, detail))
    return findings


def _check_environment(recipe: Recipe, domain: Domain) -> list[Finding]:
    from opd.environments.protocol import Action, Task, agent_function, environment_class
    from opd.environments.world import World

    config = recipe.domains[domain.name].environment
    assert config is not None
    if config.agent_path is not None:
        from opd.environments.gateway import require_server

        require_server()
        agent_function(config, domain.name)
        return [Finding("ok", f"environment {domain.name}", f"agent {config.agent_path} can be called")]
    prompt, make = domain.train[0], environment_class(config, domain.name)
    task = Task(
        "doctor", prompt.text or "", prompt.messages or [], prompt.label, dict(prompt.metadata), recipe.seed
    )
    once = config.model_copy(update={"attempts": 1})
    world = World(partial(make, **config.params), task, once, domain.name)

    async def try_episode() -> str:
        try:
            first = await world.reset()
            step = await world.step(Action(""))
        finally:
            await world.close()
        greeting = "" if first is None else f"begins with {str(first)[:_EXCERPT]!r}, "
        over = ", which ends the episode" if step.done else ""
        return f"{greeting}answers an empty action with {str(step.observation)[:_EXCERPT]!r}{over}"

    start = time.monotonic()
    episode = asyncio.run(try_episode())
    detail = f"{config.type} {episode} (reward {world.done[0][1].reward:g}, {time.monotonic() - start:.2f} s)"
    return [Finding("ok", f"environment {domain.name}", detail)]
