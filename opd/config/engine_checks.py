"""Rules across the fields of a recipe that concern its engines, devices and servers.

As in `cross_field_checks`: one function a rule, each raises `ValueError` with its sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.config.servers import shared_devices
from opd.config.teachers import (
    COLDEST,
    SPECULATES,
    ServedEngineConfig,
    ServerConfig,
    TorchEngineConfig,
    VLLMEngineConfig,
)
from opd.config.writing import MOST_KEPT

if TYPE_CHECKING:
    from opd.config.recipe import Recipe


def _one_stage_for_the_workers(recipe: Recipe) -> None:
    engine = recipe.rollout.engine
    if isinstance(engine, ServedEngineConfig) and recipe.runtime.workers > 1:
        raise ValueError(
            f"rollout.engine {engine.type} gives its workers one student's weights, so stages cannot run side"
            " by side; set runtime.workers to 1"
        )


def _vllm_tells_what_it_draws(recipe: Recipe) -> None:
    """vLLM's log-probabilities are at the temperature and after cuts, or at 1 and before them."""
    engine = recipe.rollout.engine
    if not isinstance(engine, VLLMEngineConfig):
        return
    if engine.servers in recipe.servers and "speculative-config" in recipe.servers[engine.servers].arguments:
        raise ValueError(
            f"servers.{engine.servers}.arguments has speculative-config: {SPECULATES}; leave it out"
        )
    if recipe.rollout.replay_experts is True:
        raise ValueError(
            "rollout.replay_experts is true, and vLLM's streams have no expert choices; take rollout.engine"
            " sglang or torch, or set it to auto or false"
        )
    for where, rollout in recipe.rollout_settings().items():
        temperature = rollout.temperature
        if temperature < COLDEST:
            raise ValueError(
                f"{where}.temperature is {temperature:g}, in place of which vLLM takes {COLDEST}; raise it,"
                " or take rollout.engine sglang or torch"
            )
        if recipe.cuts_tokens and temperature != 1:
            raise ValueError(
                f"{where}.temperature is {temperature:g} in a recipe with a top_p or top_k, and vLLM tells"
                " log-probabilities at a temperature or before these cut, not both; set every temperature to"
                " 1, leave top_p and top_k out, or take rollout.engine sglang or torch"
            )


def _masks_are_there_to_replay(recipe: Recipe) -> None:
    for of_domain in (recipe, *map(recipe.for_domain, recipe.domains)):
        if of_domain.rollout.replay_masks is not True:
            continue
        if (cause := of_domain.unmasked_because) is not None:
            raise ValueError(
                f"rollout.replay_masks is true, and {cause}, or set replay_masks to auto or false"
            )
        if of_domain.rollout.top_k > MOST_KEPT:
            raise ValueError(
                f"rollout.replay_masks is true, and top_k is {of_domain.rollout.top_k}, but masks have at"
                f" most {MOST_KEPT} tokens; lower it, or set replay_masks to auto or false"
            )


def _ranks_share_what_is_here(recipe: Recipe) -> None:
    engine = recipe.rollout.engine
    if isinstance(engine, TorchEngineConfig) and engine.sharded and recipe.launch.type == "ray":
        raise ValueError(
            "rollout.engine.sharded is about engines in the ranks' own processes, and launch ray has them"
            " elsewhere, each with a copy of its own; leave it out, or set launch to local"
        )


def _the_device_is_handed_over(recipe: Recipe) -> None:
    engine = recipe.rollout.engine
    if isinstance(engine, ServedEngineConfig) and not engine.sleeps and recipe.runtime.offload.engine:
        raise ValueError(
            f"runtime.offload.engine puts engines to sleep, which {engine.type} workers are not told; leave"
            " it out, or take rollout.engine sglang or torch"
        )
    ends = engine.type == "torch" or engine.servers is not None
    recipe.runtime.offload.check(recipe.rollout.schedule, recipe.train, ends=ends)


def _changes_have_somebody_to_take_them(recipe: Recipe) -> None:
    engine, setting = recipe.rollout.engine, "rollout.engine.sync is delta"
    if not isinstance(engine, ServedEngineConfig) or engine.sync != "delta":
        return
    if engine.servers is None:
        raise ValueError(
            f"{setting}, which needs servers that the run starts on Ray, and rollout.engine.urls are others';"
            " leave sync out"
        )
    if recipe.launch.type != "ray":
        raise ValueError(
            f"{setting}, which goes through a Ray cluster, but launch is {recipe.launch.type}; leave sync"
            " out, or set launch to ray"
        )
    if engine.folder is not None and (recipe.model.lora is None or recipe.merged_because is not None):
        raise ValueError(
            f"{setting}, which needs no shared folder, but rollout.engine.folder is {engine.folder}; leave"
            " one of them out"
        )


def _adapters_are_sent_as_asked(recipe: Recipe) -> None:
    engine = recipe.rollout.engine
    if engine.lora is None:
        return
    if recipe.model.lora is None:
        raise ValueError(
            f"rollout.engine.lora is {engine.lora}, but no adapters are trained; set model.lora, or leave it"
            " out"
        )
    if isinstance(engine, TorchEngineConfig) and engine.sharded and engine.lora == "merged":
        raise ValueError(
            "rollout.engine.lora is merged, and ranks that share the trained model (sharded) merge nothing;"
            " leave one of them out"
        )
    if engine.lora == "adapters" and recipe.merged_because is not None:
        raise ValueError(
            f"rollout.engine.lora is adapters, but {recipe.merged_because}; set it to merged, or change that"
        )


def _servers_that_take_turns(recipe: Recipe) -> None:
    if not recipe.runtime.offload.teachers:
        return
    key = "runtime.offload.teachers"
    if not recipe.servers_in_turn:
        raise ValueError(
            f"{key} is about teachers of type sglang whose servers the run starts, and there are none; give"
            " one `servers: NAME`, or leave it out"
        )
    if recipe.launch.type == "ray":
        raise ValueError(
            f"{key} lets servers share devices, but with launch ray each has GPUs of its own; leave it out"
        )
    if recipe.storage.trajectories == "disk":
        raise ValueError(
            f"{key} would wake and prove servers for every micro-batch of samples on disk; leave it out, or"
            " set storage.trajectories to memory"
        )


def _users_of_servers(recipe: Recipe) -> dict[str, ServerConfig]:
    """Map the key of each teacher and engine with servers to its settings."""
    teachers = {f"teachers.{name}": entry for name, entry in recipe.teachers.items()}
    users = {**teachers, "rollout.engine": recipe.rollout.engine}
    return {where: config for where, config in users.items() if isinstance(config, ServerConfig)}


def _each_group_of_servers_has_one_user(recipe: Recipe) -> None:
    users: dict[str, str] = {}
    for where, config in _users_of_servers(recipe).items():
        name = config.servers
        if name is None:
            continue
        if name not in recipe.servers:
            names = ", ".join(recipe.servers) or "nothing"
            raise ValueError(f"{where}.servers names {name!r}, but `servers` has {names}")
        if name in users:
            raise ValueError(
                f"{where} and {users[name]} both name the servers {name}, which hold one model; give each"
                " a group of its own"
            )
        users[name] = where
    for name, group in recipe.servers.items():
        if name not in users:
            raise ValueError(
                f"servers.{name} has no effect: no teacher and not rollout.engine names it; add `servers:"
                f" {name}` there, or leave the group out"
            )
        user = users[name].removeprefix("teachers.")
        if recipe.runtime.workers > 1 and user in recipe.opd_teachers():
            raise ValueError(
                f"with runtime.workers {recipe.runtime.workers} stages side by side, which follow {user},"
                f" would each start the servers {name}; set runtime.workers to 1"
            )
        if recipe.launch.type == "ray" and group.devices is not None:
            raise ValueError(
                f"servers.{name}.devices numbers the GPUs of one machine, but with launch ray the cluster"
                " hands them out; leave it out, and set launch.server.gpus"
            )
        needed = group.count * group.tensor_parallel
        if group.devices is not None and len(set(group.devices)) != needed:
            raise ValueError(
                f"servers.{name}.devices names {len(set(group.devices))} devices, but {group.count}"
                f" servers of {group.tensor_parallel} each need {needed}; name as many, each once"
            )


def _groups_of_servers_leave_each_other_room(recipe: Recipe) -> None:
    if (both := shared_devices(recipe.servers, recipe.servers_in_turn)) is not None:
        raise ValueError(
            f"servers.{both[0]} and servers.{both[1]} share device {both[2]}, which both would fill: they"
            " stay until the run ends; give them other devices, or each an argument mem-fraction-static"
            " (vLLM: gpu-memory-utilization), together at most 1 (of teachers that take turns,"
            " runtime.offload.teachers, the largest counts)"
        )


def _groups_run_what_their_users_ask(recipe: Recipe) -> None:
    for where, config in _users_of_servers(recipe).items():
        group = recipe.servers.get(config.servers or "")
        if group is not None and group.type != config.program:
            raise ValueError(
                f"{where} needs {config.program} servers, but servers.{config.servers}.type is"
                f" {group.type}; set it to {config.program}"
            )


ENGINE_RULES = (
    _one_stage_for_the_workers,
    _vllm_tells_what_it_draws,
    _masks_are_there_to_replay,
    _ranks_share_what_is_here,
    _the_device_is_handed_over,
    _adapters_are_sent_as_asked,
    _changes_have_somebody_to_take_them,
    _each_group_of_servers_has_one_user,
    _servers_that_take_turns,
    _groups_of_servers_leave_each_other_room,
    _groups_run_what_their_users_ask,
)
