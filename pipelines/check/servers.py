"""The doctor's checks of servers: those of the recipe, rollout workers, teachers and the Ray cluster.

Importable without torch, as `checks.py` is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import RayLaunch, Recipe
from opd.config.servers import ServerGroupConfig
from opd.config.teachers import ServedEngineConfig
from opd.errors import ConfigError, MissingExtraError, OpdError, RolloutError, TeacherError
from opd.pipelines.check.checks import Finding, existing_parent, run_check, write_error

if TYPE_CHECKING:
    from opd.served.http_client import Server
    from opd.served.http_pool import HTTPPool

WORKERS = "rollout workers"
_SCRIPTS = re.compile(r"(ba|da|z|k)?sh|python[\d.]*")
"""Programs whose first argument, if it is no option, is a file to run."""


def check_servers(recipe: Recipe) -> list[Finding]:
    """Check the programs and settings of servers that the run starts."""
    findings, engine = [], recipe.rollout.engine
    if isinstance(engine, ServedEngineConfig) and engine.folder is not None:  # new weights are written there
        parent = existing_parent(Path(engine.folder))
        wrong = write_error(parent) if parent.is_dir() else "it is a file"
        if wrong is not None:
            detail = f"rollout.engine.folder: {parent} cannot be written ({wrong}); choose another, or leave"
            findings.append(Finding("error", WORKERS, f"{detail} it out"))
    for name, group in recipe.servers.items():
        if errors := run_check(f"servers {name}", _check_room, recipe, name, group):
            findings += errors
            continue
        findings += _check_adapters(recipe, name, group) + _check_devices(recipe, name, group)
        if recipe.launch.type == "ray" and recipe.launch.address is not None:  # its nodes are elsewhere
            findings.append(Finding("ok", f"servers {name}", f"{group.count} to be started on the cluster"))
            continue
        findings += run_check(f"servers {name}", _check_servers, name, group)
    return findings


def _student_engine(recipe: Recipe, name: str) -> ServedEngineConfig | None:
    """Return the student's engine if its workers are the group `name`."""
    engine = recipe.rollout.engine
    return engine if isinstance(engine, ServedEngineConfig) and engine.servers == name else None


def _check_room(recipe: Recipe, name: str, group: ServerGroupConfig) -> None:
    """Raise `ConfigError` if the student's servers do not accept the maximum tokens of a request."""
    engine, argument = _student_engine(recipe, name), group.server_program.room
    limit = group.arguments.get(argument)
    if engine is None or limit is None:
        return
    longest = _longest_request(recipe, _student_config(recipe))
    if str(limit).isdigit() and int(str(limit)) < longest + engine.kept:
        reserved = f" beside {engine.kept} that the server keeps" if engine.kept else ""
        raise ConfigError(
            f"servers.{name}.arguments.{argument} is {limit}, and responses may need {longest} tokens with"
            f" their prompts{reserved}; raise it, or lower rollout.max_sequence."
        )


def _check_adapters(recipe: Recipe, name: str, group: ServerGroupConfig) -> list[Finding]:
    """Check that the student's servers accept adapters, if they are sent adapters alone."""
    engine, lora = _student_engine(recipe, name), recipe.model.lora
    if engine is None or lora is None or recipe.merged_because is not None:
        return []
    wrong, most = None, str(group.arguments.get("max-lora-rank", lora.rank))
    if group.arguments.get("enable-lora") is False:
        wrong = "enable-lora is false"
    elif most.isdigit() and int(most) < lora.rank:
        wrong = f"max-lora-rank is {most}, below model.lora.rank {lora.rank}"
    if wrong is None:
        return []
    level = "error" if engine.lora == "adapters" else "warning"
    detail = f"servers.{name}.arguments.{wrong}, so its servers take no adapters alone; leave it out, or set"
    return [Finding(level, f"servers {name}", f"{detail} rollout.engine.lora to merged")]


def _check_devices(recipe: Recipe, name: str, group: ServerGroupConfig) -> list[Finding]:
    """Warn if servers fill a GPU on which a rank trains."""
    from opd.pipelines.check.memory import on_cuda

    device, share, offload = recipe.model.device, group.server_program.share, recipe.runtime.offload
    sleeps = (offload.engine and _student_engine(recipe, name) is not None) or name in recipe.servers_in_turn
    if recipe.launch.type == "ray" or sleeps or share in group.arguments or not on_cuda(device):
        return []
    number = device.partition(":")[2]
    of_ranks = {int(number)} if number else set(range(recipe.train.ranks or 1))
    served = range(group.tensor_parallel) if group.devices is None else group.devices
    if not (both := sorted(of_ranks.intersection(served))):
        return []
    detail = (
        f"its servers take nearly all memory of GPU {', '.join(map(str, both))}, where the student trains;"
        f" set servers.{name}.devices to others, or servers.{name}.arguments.{share} to their part of it"
    )
    return [Finding("warning", f"servers {name}", detail)]


def _student_config(recipe: Recipe) -> dict[str, Any]:
    """Return the student's Hugging Face configuration."""
    if recipe.model.path is None:
        return dict(recipe.model.config or {})
    from opd.models.hf_folder import read_object
    from opd.teachers.skeleton import small_files

    with small_files(recipe.model.path) as folder:
        file = folder / "config.json"
        return read_object(file) if file.exists() else {}  # `check_models` reports it


def _longest_request(recipe: Recipe, form: dict[str, Any]) -> int:
    """Return the maximum of prompt plus response tokens of a request."""
    from opd.models.hf_folder import config_of
    from opd.pipelines.stages.domains import sequence_positions

    try:
        return sequence_positions(config_of(form), recipe, recipe.rollout.max_sequence)
    except Exception:  # a library's constructor; `check_models` reports it
        return recipe.rollout.max_sequence


def _check_servers(name: str, group: ServerGroupConfig) -> list[Finding]:
    program = group.command[0] if group.command else sys.executable
    if shutil.which(program) is None:
        raise ConfigError(
            f"servers.{name}.command begins with {program}, which is no program here; give the interpreter of"
            f" an environment that has {group.type}."
        )
    script = group.command[1] if len(group.command) > 1 else "-"
    runs_script = _SCRIPTS.fullmatch(Path(program).name) is not None and not script.startswith("-")
    if runs_script and not Path(script).is_file():
        raise ConfigError(
            f"servers.{name}.command runs {script}, and there is no such file below {Path.cwd()}; begin there"
            " from where it is, or give its whole path."
        )
    if not group.command and importlib.util.find_spec(group.type) is None:
        raise ConfigError(
            f"servers.{name} needs {group.type}, which this environment lacks; give servers.{name}.command,"
            f" such as [/path/to/python, -m, {group.server_program.module}]."
        )
    return [Finding("ok", f"servers {name}", f"{group.count} to be started by {program}")]


def check_shared(recipe: Recipe) -> list[Finding]:
    """Return an error if two URLs of teachers or of the student lead to one server."""
    from opd.config.teachers import ServedTeacherConfig

    engine, options = recipe.rollout.engine, {}
    settings = {name: recipe.teacher_settings(name) for name in recipe.used_teachers()}
    teachers = {
        name: config
        for name, config in settings.items()
        if isinstance(config, ServedTeacherConfig) and config.urls
    }
    student = isinstance(engine, ServedEngineConfig) and bool(engine.urls)
    if not teachers and not student:
        return []
    from opd.teachers.served_teacher import check_own_servers, pool_options

    try:
        if isinstance(engine, ServedEngineConfig) and student:
            options["rollout.engine.urls"] = pool_options(engine)
        check_own_servers(teachers, options)
    except TeacherError as error:
        return [Finding("error", "servers", str(error))]
    except (ConfigError, MissingExtraError):
        return []  # the visit of each server reports it
    return []


def check_workers(recipe: Recipe) -> list[Finding]:
    """Check that each of the student's servers that exist already answers and serves a model of its form."""
    engine = recipe.rollout.engine
    if not isinstance(engine, ServedEngineConfig) or engine.servers is not None:
        return []

    def visit_workers() -> list[Finding]:
        from opd.loop_thread import LoopThread
        from opd.served.http_pool import HTTPPool
        from opd.teachers.served_teacher import pool_options

        form = _student_config(recipe)
        pool = HTTPPool("the rollout engine", pool_options(engine), RolloutError)
        loop = LoopThread("doctor-workers")
        try:
            findings = []
            for server in pool.servers:
                visit = _visit_worker(recipe, engine, pool, server, form)
                findings += run_check(WORKERS, lambda v=visit: loop.run(v))
            return findings
        finally:
            loop.run(pool.close())
            loop.close()

    return run_check(WORKERS, visit_workers)


async def _visit_worker(
    recipe: Recipe, engine: ServedEngineConfig, pool: HTTPPool, server: Server, form: dict[str, Any]
) -> list[Finding]:
    """Check a worker's settings, its model, and the transfer of the recipe's adapters to it. Raises
    `RolloutError` if it serves another model, cannot be reached, or was not started for adapters alone when
    the recipe wants that.
    """
    from opd.rollout.served_engine import ServedModel, program_named
    from opd.rollout.weight_proof import check_config
    from opd.served.http_client import RefusedError, UnavailableError

    program, lora, transfer = program_named(engine.program), recipe.model.lora, ""
    verbs = program.verbs(ServedModel(0, _longest_request(recipe, form)), recipe.cuts_tokens)
    verbs.use_pool(pool)
    try:
        await verbs.check_settings(server)
        info = await verbs.model_info(server)
        if lora is not None:
            reason = recipe.merged_because
            if reason is None and (flags := await program.lacks(pool, server, lora)) is not None:
                reason = f"it was not started with {flags}"
                if engine.lora == "adapters":
                    raise RolloutError(
                        f"{server.url} takes no adapters: {reason}; set rollout.engine.lora to merged."
                    )
            transfer = ", with adapters "
            transfer += "alone" if reason is None else f"merged into all weights: {reason}"
        check_config(server.url, info, form.get("text_config", form))
    except (UnavailableError, RefusedError) as trouble:
        raise RolloutError(f"{pool.owner}: {trouble}; start the worker or correct its URL.") from None
    detail = f"{server.url} serves {info.get('model_path')}{verbs.requirement}{transfer}"
    return [Finding("ok", WORKERS, detail)]


def check_cluster(recipe: Recipe) -> list[Finding]:
    """Check address, port and GPUs of a run on Ray. Without Ray `check_extras` reports it."""
    launch, title = recipe.launch, "launch"
    if not isinstance(launch, RayLaunch) or find_spec("ray") is None:
        return []
    from opd.pipelines.launch.ray.cluster import (
        BundleLayout,
        check_head,
        needed_launch,
        require_free,
        require_gpus_asked,
        resolve_address,
    )

    def check_running() -> list[Finding]:
        if launch.address == "auto" and not os.environ.get("RAY_ADDRESS"):  # a job's own is visible inside
            detail = "launch.address is auto, and RAY_ADDRESS is not set here; a Ray job has it"
            return [Finding("warning", title, detail)]
        address = resolve_address(launch)
        check_head(address)
        return [Finding("ok", title, f"the Ray cluster at {address} answers")]

    def check_started() -> list[Finding]:
        from torch.cuda import device_count

        if launch.port is not None:
            require_free(launch.port)
        gpus = device_count()  # the run's own cluster has no others
        require_gpus_asked(recipe, gpus)
        layout = BundleLayout.from_launch(needed_launch(recipe), recipe.train.ranks or 1, recipe.servers)
        requested = layout.total_resources.get("GPU", 0.0)
        if requested > gpus:
            raise ConfigError(
                f"launch asks for {requested:g} GPUs in all, and this machine, where the run starts its"
                f" cluster, has {gpus}; lower launch.ROLE.gpus or servers.NAME.count, or give launch.address."
            )
        return [Finding("ok", title, "a Ray cluster of its own, on this machine")]

    return run_check(title, check_started if launch.address is None else check_running)


def check_kinds(recipe: Recipe) -> list[Finding]:
    """Return the findings of each teacher's kind, for the merge and for specialists."""
    findings: list[Finding] = []
    for taught in (recipe, *recipe.opd_recipes().values()):
        for name in taught.teacher_domains():
            title = f"{recipe.teacher_settings(name).type} teacher {name}"
            of_kind = run_check(title, _check_kind, taught, name)
            findings += [finding for finding in of_kind if finding not in findings]
    return findings


def _check_kind(recipe: Recipe, name: str) -> list[Finding]:
    from opd.teachers.kinds import kind_of

    settings = recipe.teacher_settings(name)
    title = f"{settings.type} teacher {name}"
    findings = []
    try:
        for message in kind_of(settings).check(name, settings, recipe):
            findings.append(Finding("error" if isinstance(message, OpdError) else "ok", title, str(message)))
    except OpdError as error:
        findings.append(Finding("error", title, str(error)))
    return findings
