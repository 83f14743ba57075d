"""Whether the domains' environments can be made, begin and answer."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from opd.config import Recipe
from opd.config.environments import EnvironmentConfig
from opd.errors import ConfigError
from opd.foreign import shown
from opd.own_code import calling
from opd.pipelines.doctor.checks import Finding, attempt
from opd.rollout.prompts import Domain
from opd.sandbox.containers import HOME

_SHOWN = 60
_MEND = {
    "container": "put it into the image, or take other params.tools",
    "process": "install it, or take other params.tools",
    "bubblewrap": "install it where the system's programs are, or take other params.tools",
}
"""Of a program that is not there, by the kind of substrate."""
_OWN = (HOME, "/tmp", "/proc", "/dev")
"""Folders that are a sandbox's own, but of the kind `process`."""


def check_environments(recipe: Recipe, domains: Mapping[str, Domain]) -> list[Finding]:
    """Each is made, reset to the domain's first prompt, and asked what it says of an empty action. One that
    raises or takes too long is an error.
    """
    findings: list[Finding] = []
    for name, domain in domains.items():
        config = recipe.domains[name].environment
        if config is None or not domain.train:
            continue
        found = attempt(f"environment {name}", partial(_tools, name, config))
        findings += found
        if all(finding.level != "error" for finding in found):
            findings += attempt(f"environment {name}", partial(_check, recipe, domain))
    for name, own in recipe.of_sets().domains.items():
        if own.environment is not None:
            findings += attempt(f"environment {name}", partial(_tools, name, own.environment))
    return findings


def _tools(domain: str, config: EnvironmentConfig) -> list[Finding]:
    """Where tools run, what that does not keep their commands from, and whether all they need is there."""
    if config.agent is not None:
        return []
    from opd.environments.kinds import environment_class
    from opd.environments.tools import MOST_CALLS, Tools
    from opd.sandbox.substrates import find_substrate

    made, title = environment_class(config, domain), f"tools {domain}"
    if not (inspect.isclass(made) and issubclass(made, Tools)):
        return []
    tools = made(**config.params)
    settings = tools.sandbox
    found = find_substrate(settings.substrate, settings.image)
    if lost := _reads(title, settings.reads, found.kind):
        return lost
    place = found.kind if found.container is None else f"{found.kind}: {found.container}"
    with calling(f"domains.{domain}.environment: {config.type}", ConfigError):
        missing = asyncio.run(tools.missing())
    findings = [
        Finding("error", title, f"{place} has no {program} for {' and '.join(of)}; {_MEND[found.kind]}")
        for program, of in missing.items()
    ]
    if (longest := MOST_CALLS * settings.seconds) >= config.seconds:
        detail = (
            f"a turn's {MOST_CALLS} commands may take {settings.seconds:g} s each, and a step of the"
            f" environment {config.seconds:g} s, so that commands that sleep would end the run; set"
            f" domains.{domain}.environment.seconds above {longest:g}, or params.sandbox.seconds lower"
        )
        findings.append(Finding("error", title, detail))
    if not found.open:
        return [*findings, Finding("ok", title, f"run in {place}")]
    detail = f"run in {place}, which does not keep them from all of: {', '.join(found.open)}"
    return [*findings, Finding("warning", title, detail)]


def _reads(title: str, reads: Sequence[str], kind: str) -> list[Finding]:
    """What commands are to read and cannot: a process would do without it, a container not begin."""
    findings = []
    for path in reads:
        there, place = os.path.exists(path), PurePath(os.path.normpath(path))
        own = [one for one in _OWN if kind != "process" and PurePath(one).is_relative_to(place)]
        if not there or not os.path.isabs(path):
            wrong = "is not an absolute path" if there else "is not there"
            detail = f"params.sandbox.reads has {shown(path)}, which {wrong}; mend the path, or take it out"
        elif own:
            detail = (
                f"params.sandbox.reads has {shown(path)}, where commands have a {own[0]} of their own; name"
                " the files and folders in it that they are to read"
            )
        else:
            continue
        findings.append(Finding("error", title, detail))
    return findings


def check_tools_shown(recipe: Recipe, domain: Domain, tokenizer: Any) -> list[Finding]:
    """Whether the chat template tells the model of the tools that it may call."""
    from opd.pipelines.stages.domains import template_arguments
    from opd.rollout.prompts import encode_prompt

    given = template_arguments(recipe, domain.name)
    prompt = next((one for one in [*domain.train, *domain.held_out] if one.messages is not None), None)
    if not given.get("tools") or prompt is None:
        return []
    without = {name: value for name, value in given.items() if name != "tools"}
    with_tools, alone = (encode_prompt(prompt, tokenizer, one).tolist() for one in (given, without))
    if with_tools != alone:
        return []
    detail = (
        "the chat template writes no tools, so the model is not told what it may call; set"
        " model.chat_template to one that does, or describe them in the prompts"
    )
    return [Finding("warning", f"tools {domain.name}", detail)]


def _check(recipe: Recipe, domain: Domain) -> list[Finding]:
    from opd.environments.kinds import environment_class
    from opd.environments.protocol import Action, Task
    from opd.environments.world import World

    config = recipe.domains[domain.name].environment
    assert config is not None
    if config.agent is not None:
        return [_agent(domain.name, config)]
    prompt, made = domain.train[0], environment_class(config, domain.name)
    task = Task(
        "doctor", prompt.text or "", prompt.messages or [], prompt.label, dict(prompt.metadata), recipe.seed
    )
    once = config.model_copy(update={"attempts": 1})
    world = World(partial(made, **config.params), task, once, domain.name)

    async def act() -> str:
        try:
            first = await world.reset()
            step = await world.step(Action(""))
        finally:
            await world.close()
        said = "" if first is None else f"begins with {str(first)[:_SHOWN]!r}, "
        over = ", which ends the episode" if step.done else ""
        return f"{said}answers an empty action with {str(step.observation)[:_SHOWN]!r}{over}"

    begin = time.monotonic()
    said = asyncio.run(act())
    detail = f"{config.type} {said} (reward {world.done[0][1].reward:g}, {time.monotonic() - begin:.2f} s)"
    return [Finding("ok", f"environment {domain.name}", detail)]


def _agent(domain: str, config: EnvironmentConfig) -> Finding:
    """An agent's function can be called as the recipe says, and what serves it is installed."""
    from opd.environments.gateway import require_server
    from opd.environments.kinds import agent_function

    require_server()
    agent_function(config, domain)
    return Finding("ok", f"environment {domain}", f"agent {config.agent} can be called")
