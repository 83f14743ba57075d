"""Whether the servers of a recipe, its teachers' and its student's, are there and are the right ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.config.served import SGLangEngineConfig, TeacherServerConfig
from opd.errors import RolloutError, TeacherError
from opd.pipelines.doctor.checks import Finding, attempt, given_teachers

if TYPE_CHECKING:
    from opd.served.http_client import Server
    from opd.served.http_pool import HTTPPool
    from opd.teachers.sglang_identity import Expected

WORKERS = "rollout workers"


def check_served(recipe: Recipe) -> list[Finding]:
    """Every server of every served teacher that some domain uses: identity, settings, a few scored tokens."""
    findings: list[Finding] = []
    for name in given_teachers(recipe):
        server = recipe.teachers[name].server
        if server is not None:
            title = f"servers of {name}"
            findings += attempt(title, lambda n=name, s=server, t=title: _check_teacher(recipe, n, s, t))
    engine = recipe.rollout.engine
    if isinstance(engine, SGLangEngineConfig):
        findings += attempt(WORKERS, lambda: _check_workers(recipe, engine))
    return findings


def _check_workers(recipe: Recipe, config: SGLangEngineConfig) -> list[Finding]:
    """Each worker: is it there, and does it serve a model of the student's form?"""
    from opd.served.http_pool import HTTPPool, LoopThread
    from opd.teachers.sglang_teacher import pool_options
    from opd.teachers.units import small_files

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
    from opd.served.http_client import RefusedError, UnavailableError

    try:
        info = await pool.ask(server, "GET", "/model_info") or {}
    except (UnavailableError, RefusedError) as trouble:
        raise RolloutError(f"{pool.owner}: {trouble}; start the worker or correct its URL.") from None
    check_config(server.url, info, form.get("text_config", form))
    return Finding("ok", WORKERS, f"{server.url} serves {info.get('model_path')}")


def _check_teacher(recipe: Recipe, name: str, config: TeacherServerConfig, title: str) -> list[Finding]:
    from opd.pipelines.teachers import check_signal
    from opd.served.http_pool import HTTPPool, LoopThread
    from opd.teachers.sglang_teacher import check_temperature, pool_options

    check_signal(recipe, name)
    check_temperature(name, config.signal, recipe.rollout.temperature)
    pool = HTTPPool(f"teacher {name}", pool_options(config), TeacherError)
    expected = _expected(recipe.teachers[name].path, config)
    loop = LoopThread(f"doctor-{name}")
    try:
        findings = []
        for server in pool.servers:
            findings += attempt(title, lambda s=server: [loop.run(_visit(pool, s, expected, title))])
        return findings
    finally:
        loop.run(pool.close())
        loop.close()


async def _visit(pool: HTTPPool, server: Server, expected: Expected, title: str) -> Finding:
    from opd.served.http_client import RefusedError, UnavailableError
    from opd.teachers.sglang_identity import admit, checksum

    try:
        await admit(pool, server, expected)
        held = await checksum(pool, server)
    except UnavailableError as trouble:
        raise TeacherError(f"{pool.owner}: {trouble}; start the server or correct its URL.") from None
    except RefusedError as refusal:
        raise TeacherError(f"{pool.owner}: {refusal}; check its URL and key.") from None
    compared = "outputs match the published head" if expected.rebuild else "outputs as the first server's"
    detail = f"{server.url}: weight version {expected.weight_version}, checksum {held}, {compared}"
    return Finding("ok", title, detail)


def _expected(source: str, config: TeacherServerConfig) -> Expected:
    """What the servers must be, from the published model or the Hugging Face folder at `source`."""
    from opd.storage.published import PublishedModel
    from opd.teachers.sglang_identity import Expected, HeadShape, rebuild_with
    from opd.teachers.units import is_published, small_files

    if is_published(source):
        published = PublishedModel.open(source)
        head = published.manifest.head
        shape, described = HeadShape(head.vocabulary, head.hidden), published.manifest.config
        expected = Expected(described, shape, config.signal == "hidden", rebuild_with(published))
    else:
        with small_files(source) as folder:
            read: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        text = read.get("text_config", read)
        expected = Expected(
            read, HeadShape(text["vocab_size"], text["hidden_size"]), config.signal == "hidden"
        )
    return replace(expected, weight_version=config.weight_version, checksum=config.checksum)
