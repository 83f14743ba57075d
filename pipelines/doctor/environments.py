"""Whether the domains' environments can be made, begin and answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from opd.config import Recipe
from opd.config.environments import EnvironmentConfig
from opd.pipelines.doctor.checks import Finding, attempt
from opd.rollout.prompts import Domain

_SHOWN = 60


def check_environments(recipe: Recipe, domains: Mapping[str, Domain]) -> list[Finding]:
    """Each is made, reset to the domain's first prompt, and asked what it says of an empty action. One that
    raises or takes too long is an error.
    """
    findings: list[Finding] = []
    for name, domain in domains.items():
        if recipe.domains[name].environment is not None and domain.train:
            findings += attempt(f"environment {name}", partial(_check, recipe, domain))
    return findings


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
