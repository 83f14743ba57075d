"""Classes of a recipe's `domains.NAME.environment`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from opd.config.environments import BUILT_IN, EnvironmentConfig
from opd.environments.protocol import Environment
from opd.errors import ConfigError
from opd.imports import import_attribute
from opd.user_code import call_user_code


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
    """Import the environment's class. Raises `ConfigError` if it is no environment, or does not take the
    recipe's `params`.
    """
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
