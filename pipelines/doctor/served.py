"""What the kinds of a recipe's teachers say of them, and whether its student's servers are there."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.config.teachers import SGLangEngineConfig
from opd.errors import OpdError, RolloutError
from opd.pipelines.doctor.checks import Finding, attempt, used_teachers

if TYPE_CHECKING:
    from opd.served.http_pool import HTTPPool, Server

WORKERS = "rollout workers"


def check_kinds(recipe: Recipe) -> list[Finding]:
    """What the kind of each teacher that some domain uses has to say of it."""
    findings: list[Finding] = []
    for name in used_teachers(recipe):
        findings += attempt(f"{recipe.teacher(name).type} teacher {name}", partial(_check_kind, recipe, name))
    return findings


def _check_kind(recipe: Recipe, name: str) -> list[Finding]:
    from opd.teachers.kinds import kind_of

    settings = recipe.teacher(name)
    title = f"{settings.type} teacher {name}"
    findings = []
    try:
        for said in kind_of(settings).check(name, settings, recipe):
            findings.append(Finding("error" if isinstance(said, OpdError) else "ok", title, str(said)))
    except OpdError as error:
        findings.append(Finding("error", title, str(error)))
    return findings


def check_workers(recipe: Recipe) -> list[Finding]:
    """The servers that the student writes on, if it does."""
    engine = recipe.rollout.engine
    if not isinstance(engine, SGLangEngineConfig):
        return []
    return attempt(WORKERS, lambda: _check_workers(recipe, engine))


def _check_workers(recipe: Recipe, config: SGLangEngineConfig) -> list[Finding]:
    """Each worker: is it there, and does it serve a model of the student's form?"""
    from opd.served.http_pool import HTTPPool, LoopThread
    from opd.teachers.sglang_teacher import pool_options
    from opd.teachers.skeleton import small_files

    form: dict[str, Any] = dict(recipe.model.config or {})
    if recipe.model.path is not None:
        with small_files(recipe.model.path) as folder:
            file = folder / "config.json"
            form = json.loads(file.read_bytes()) if file.exists() else {}  # which `check_models` reports
    pool = HTTPPool("the rollout engine", pool_options(config), RolloutError)
    loop = LoopThread("doctor-workers")
    try:
        findings = []
        for server in pool.servers:
            findings += attempt(WORKERS, lambda s=server: [loop.run(_visit_worker(pool, s, form))])
        return findings
    finally:
        loop.run(pool.close())
        loop.close()


async def _visit_worker(pool: HTTPPool, server: Server, form: dict[str, Any]) -> Finding:
    from opd.rollout.sglang_proof import check_config
    from opd.served.http_pool import RefusedError, UnavailableError

    try:
        info = await pool.ask(server, "GET", "/model_info") or {}
    except (UnavailableError, RefusedError) as trouble:
        raise RolloutError(f"{pool.owner}: {trouble}; start the worker or correct its URL.") from None
    check_config(server.url, info, form.get("text_config", form))
    return Finding("ok", WORKERS, f"{server.url} serves {info.get('model_path')}")
