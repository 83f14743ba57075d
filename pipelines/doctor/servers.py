"""What the doctor can tell of servers: those that a recipe starts, and the workers of its rollout.

Importable without torch, as `checks.py` is.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.config.servers import ServerGroupConfig
from opd.config.teachers import ServedEngineConfig
from opd.errors import ConfigError, RolloutError
from opd.pipelines.doctor.checks import Finding, attempt

if TYPE_CHECKING:
    from opd.served.http_pool import HTTPPool, Server


WORKERS = "rollout workers"


def check_servers(recipe: Recipe) -> list[Finding]:
    """What the run needs to start servers itself."""
    findings: list[Finding] = []
    for name, group in recipe.servers.items():
        if recipe.launch.type == "ray":  # what its nodes have cannot be seen from here
            findings.append(Finding("ok", f"servers {name}", f"{group.count} to be started on the cluster"))
            continue
        findings += attempt(f"servers {name}", partial(_check_servers, name, group))
    return findings


def _check_servers(name: str, group: ServerGroupConfig) -> list[Finding]:
    program = group.command[0] if group.command else sys.executable
    if shutil.which(program) is None:
        raise ConfigError(
            f"servers.{name}.command begins with {program}, which is no program here; give the interpreter of"
            f" an environment that has {group.type}."
        )
    if not group.command and importlib.util.find_spec(group.type) is None:
        raise ConfigError(
            f"servers.{name} needs {group.type}, which this environment lacks; give servers.{name}.command,"
            f" such as [/path/to/python, -m, {group.module}]."
        )
    return [Finding("ok", f"servers {name}", f"{group.count} to be started by {program}")]


def check_workers(recipe: Recipe) -> list[Finding]:
    """The servers that the student writes on, if it does and they are there already."""
    engine = recipe.rollout.engine
    if not isinstance(engine, ServedEngineConfig) or engine.servers is not None:
        return []
    return attempt(WORKERS, lambda: _check_workers(recipe, engine))


def _check_workers(recipe: Recipe, config: ServedEngineConfig) -> list[Finding]:
    """Each worker: is it there, and does it serve a model of the student's form?"""
    from opd.models.hf_folder import read_object
    from opd.served.http_pool import HTTPPool, LoopThread
    from opd.teachers.served_teacher import pool_options
    from opd.teachers.skeleton import small_files

    form: dict[str, Any] = dict(recipe.model.config or {})
    if recipe.model.path is not None:
        with small_files(recipe.model.path) as folder:
            file = folder / "config.json"
            form = read_object(file) if file.exists() else {}  # which `check_models` reports
    pool = HTTPPool("the rollout engine", pool_options(config), RolloutError)
    loop = LoopThread("doctor-workers")
    try:
        findings = []
        for server in pool.servers:
            visit = partial(_visit_vllm, recipe) if config.program == "vllm" else _visit_worker
            findings += attempt(WORKERS, lambda s=server, v=visit: [loop.run(v(pool, s, form))])
        return findings
    finally:
        loop.run(pool.close())
        loop.close()


async def _visit_worker(pool: HTTPPool, server: Server, form: dict[str, Any]) -> Finding:
    from opd.rollout.weight_proof import check_config
    from opd.served.http_pool import RefusedError, UnavailableError

    try:
        info = await pool.ask(server, "GET", "/model_info") or {}
    except (UnavailableError, RefusedError) as trouble:
        raise RolloutError(f"{pool.owner}: {trouble}; start the worker or correct its URL.") from None
    check_config(server.url, info, form.get("text_config", form))
    return Finding("ok", WORKERS, f"{server.url} serves {info.get('model_path')}")


async def _visit_vllm(recipe: Recipe, pool: HTTPPool, server: Server, form: dict[str, Any]) -> Finding:
    """As `_visit_worker`, and how it was started."""
    from opd.pipelines.stages.served_engine import mode_of
    from opd.rollout.served_engine import ServedModel
    from opd.rollout.vllm_workers import VLLMVerbs
    from opd.rollout.weight_proof import check_config
    from opd.served.http_pool import RefusedError, UnavailableError
    from opd.served.vllm_answers import model_of

    mode = mode_of(recipe)
    verbs = VLLMVerbs(ServedModel(0, recipe.rollout.max_sequence), mode)
    verbs.pool = pool
    try:
        await verbs.check_settings(server)
        path, _ = model_of(await pool.ask(server, "GET", "/v1/models"))
    except (UnavailableError, RefusedError) as trouble:
        raise RolloutError(f"{pool.owner}: {trouble}; start the worker or correct its URL.") from None
    check_config(server.url, {"model_path": path}, form.get("text_config", form))
    return Finding("ok", WORKERS, f"{server.url} serves {path}, with {mode}")
