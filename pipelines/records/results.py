"""Write results.json, a run's results in numbers. The report and any script read it."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import opd
from opd import installed_version
from opd.config import Recipe
from opd.config.environments import AGENT, LIBRARIES
from opd.config.hub_names import display_path
from opd.config.rewards import ServedReward
from opd.config.teachers import ServerConfig
from opd.pipelines.evaluation.evaluate import best_teachers, read_measurements
from opd.pipelines.evaluation.measure import side_by_side
from opd.pipelines.evaluation.statistics import Count, at_the_end, recovery_interval
from opd.pipelines.launch.machine import describe_hardware, git_state, kernel_implementation
from opd.pipelines.records.cards import Cards, made_models
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.stage_names import gain_stage, kind_of, model_stage, of_round, split_round
from opd.pipelines.stages.pipeline_plan import plan_stages
from opd.rewards.registry import reward_sandboxes

STAGE_KEYS = ("seconds", "student_tokens", "steps", "peak_rss_mb", "phases", "kernels")
"""The results of a stage. Only a stage with divergences has `kernels`."""


def write_results(recipe: Recipe, folder: RunFolder) -> Path:
    """Collect the finished stages of a run into results.json."""
    done = {name: folder.stage_done(name) for name in plan_stages(recipe)}
    finished = {name: result for name, result in done.items() if result is not None}
    measurements = read_measurements(folder)
    every: dict[str, dict[str, Any]] = measurements.get("models", {})
    by_round = sorted(every, key=lambda name: split_round(name)[1])
    by_round = [name for name in by_round if split_round(name)[1] <= recipe.rounds]
    latest = {split_round(name)[0]: name for name in by_round}
    measured = {name: every[full] for name, full in latest.items()}
    merge, several = of_round("merge", recipe.rounds), recipe.rounds > 1 or recipe.min_round_gain is not None
    models = {name: entry["domains"] for name, entry in measured.items()}
    used = {result["kernels"] for result in finished.values() if "kernels" in result}
    # Only a stage with divergences reports their rows.
    kernels = max(used, key=len) if used else kernel_implementation()
    difficulty: dict[str, Any] = {}
    for name, result in finished.items():
        if kind_of(name) == "specialist":
            difficulty |= result.get("difficulty", {})
    results = {
        "name": recipe.name,
        "seed": recipe.seed,
        "version": installed_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_hardware(),
        "versions": _package_versions(recipe, kernels),
        "extras": used_extras(recipe),
        "engine": recipe.rollout.engine.type,
        "kernels": kernels,
        "git": git_state(Path(opd.__file__).parents[1]),
        "domains": list(recipe.domains),
        "models": [
            _model_entry(latest[name], entry["domains"], finished)
            | {key: entry[key] for key in ("engine", "engine_why", "sets") if key in entry}
            for name, entry in measured.items()
        ],
        **({"rounds": _round_entries(recipe, folder, every, finished)} if several else {}),
        "stop_ids": finished.get(merge, {}).get("stop_ids", []),
        "recovery": _recovery_entries(recipe, models),
        "folders": _folder_entries(recipe, folder, finished),
        "answers": side_by_side(
            {name: entry.get("answers", {}) for name, entry in measured.items()},
            [*recipe.domains, *recipe.evaluation.sets],
            best_teachers(recipe, models),
        ),
        "contamination": measurements.get("contamination") or {},
        "stages": [
            {"name": name} | {key: result[key] for key in STAGE_KEYS if key in result}
            for name, result in finished.items()
        ],
        "teachers": _teacher_entries(folder, merge) if merge in finished else {},
        "counters": finished.get(merge, {}).get("counters", {}),
        **({"difficulty": difficulty} if difficulty else {}),
        "code_changes": folder.code_changes,
        "setting_changes": [asdict(change) for change in folder.setting_changes],
        "hub": folder.hub_record,
        "sandboxes": reward_sandboxes(recipe.domains | recipe.of_sets().domains),
    }
    folder.write_results(results, finished)
    return folder.results_path


def _package_versions(recipe: Recipe, kernels: str) -> dict[str, str]:
    """Return the versions of `opd`, its dependencies, and the packages of the recipe's extras. TileLang is
    included if it is among the `kernels`.
    """
    packages = ["opd", "torch", "transformers", "tokenizers", "safetensors", "numpy"]
    used = used_extras(recipe) + (["tilelang"] if "TileLang" in kernels else [])
    requirements: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        requirements = metadata.requires("opd") or []
    for line in requirements:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name is not None and extra is not None and extra[1] in used:
            packages.append(name[0])
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions | {"opd": installed_version(), "torch": torch.__version__}


def used_extras(recipe: Recipe) -> list[str]:
    """Return the extras of this package that a run of `recipe` needs."""
    scored = [*recipe.domains.values(), *recipe.of_sets().domains.values()]
    rewards = [config.reward for config in scored]
    sources = [config.source for config in scored]
    sources += [sft.source for sft in recipe.demonstration_settings().values()]
    teachers = [recipe.teacher_settings(name) for name in recipe.used_teachers()]
    kinds = {teacher.type for teacher in teachers}
    worlds = {config.environment.type for config in scored if config.environment is not None}
    urls = [recipe.storage.published or "", *recipe.given_teachers().values()]
    checkers = ("math", "json_schema", "python")
    is_needed = {
        "s3": any(url.startswith("s3://") for url in urls),
        "parquet": any(source.endswith(".parquet") for source in sources),
        "reasoning-gym": any(source.startswith("reasoning-gym:") for source in sources),
        "verifiers": any(getattr(reward, "type", "") in checkers for reward in rewards),
        "sglang": any(isinstance(one, ServerConfig) for one in (*teachers, recipe.rollout.engine))
        or any(isinstance(reward, ServedReward) for reward in rewards),
        "agents": bool({AGENT, "openenv", *LIBRARIES} & worlds),
        **{name: name in worlds for name in ("textworld", "gymnasium")},
        "megatron": "megatron" in (*kinds, recipe.train.backend),
        "deepspeed": recipe.train.backend == "deepspeed",
        "lora": recipe.model.lora is not None,
        "ray": recipe.launch.type == "ray",
        "tensorboard": recipe.runtime.tensorboard or "tensorboard" in recipe.runtime.sinks,
        **{name: name in recipe.runtime.sinks for name in ("wandb", "mlflow")},
        "tilelang": kernel_implementation() == "tilelang",
    }
    return [extra for extra, needed in is_needed.items() if needed]


def _model_entry(name: str, domains: dict[str, Any], finished: dict[str, Any]) -> dict[str, Any]:
    name, number = split_round(name)
    kind, _, teacher = name.partition(":")
    if kind not in ("base", "specialist", "teacher", "merged"):
        kind = "baseline"
    trained = model_stage(f"specialist:{teacher}" if kind == "teacher" else name)
    results = [finished.get(of_round(trained, one), {}) for one in range(1, number + 1)]
    return {
        "name": name,
        "kind": kind,
        "student_tokens": sum(result.get("student_tokens", 0) for result in results),
        "seconds": sum(result.get("seconds", 0.0) for result in results),
        "settings": results[-1].get("settings", {}),
        "domains": domains,
    }


def _round_entries(
    recipe: Recipe, folder: RunFolder, measured: dict[str, Any], finished: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return each round's measured models, with the sums of all rounds up to it, and its measured gain."""
    entries = []
    for number in range(1, recipe.rounds + 1):
        names = [f"specialist:{domain}" for domain in recipe.specialist_domains()]
        full = [of_round(name, number) for name in (*names, "merged")]
        models = [
            _model_entry(name, measured[name]["domains"], finished) for name in full if name in measured
        ]
        gain = (folder.stage_done(gain_stage(number)) or {}).get("gain")
        entries.append({"round": number, "models": models} | ({} if gain is None else {"gain": gain}))
    return entries


def _folder_entries(recipe: Recipe, folder: RunFolder, finished: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the folder of each model of the run, its digest, prompt format and loading code."""
    cards = Cards.from_run(recipe, folder)
    entries = {}
    for name, stage in made_models(recipe, folder).items():
        if stage in finished:
            bare, number = split_round(name)
            domain = bare.partition(":")[2]
            used = cards.usage_sections(
                folder.model_folder(recipe, name), [domain] if domain else list(recipe.domains)
            )
            earlier = number < recipe.rounds and kind_of(stage) in ("specialist", "merge")
            shown = f"{bare}+{number}" if earlier else bare
            entries[shown] = {"folder": str(folder.model_folder(recipe, name).absolute()), **used}
            entries[shown] |= {"digest": finished[stage]["digest"]} if "digest" in finished[stage] else {}
    for name, path in recipe.given_teachers().items():
        entries[f"teacher:{name}"] = {"folder": display_path(path)}
    return entries


def _recovery_entries(recipe: Recipe, models: dict[str, Any]) -> dict[str, Any]:
    """Return the recovery of every model but base and teachers, on every domain where it is defined."""
    entries: dict[str, Any] = {}
    teachers = best_teachers(recipe, models)
    for name, rows in models.items():
        if name == "base" or ":" in name:
            continue
        entries[name] = {}
        for domain in recipe.domains:
            trio = (rows, models.get("base"), models.get(teachers.get(domain, "")))
            sampled = [row[domain]["sampled"] for row in trio if row is not None]
            if len(sampled) < len(trio):
                continue
            counts = [Count(one["correct"], one["total"], one.get("worth")) for one in sampled]
            interval = recovery_interval(*counts, confidence=recipe.evaluation.confidence, seed=recipe.seed)
            if interval is not None:
                entries[name][domain] = interval._asdict()
    return entries


def _teacher_entries(folder: RunFolder, merge: str) -> dict[str, Any]:
    """Return each teacher's KL at the end of the merge, and its mean share of tokens and gradient."""
    rows = folder.read_metrics(merge)
    columns = {key: [row[key] for row in rows if key in row] for key in {k for row in rows for k in row}}
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("token_share/"))
    teachers = {}
    for name in (key.removeprefix("token_share/") for key in names):
        kl, steps = at_the_end(columns.get(f"kl/{name}") or columns["kl/mean"])
        teachers[name] = {"kl": kl, "kl_steps": steps}
        for kind in ("token_share", "grad_share"):
            values = columns.get(f"{kind}/{name}", [])
            if values:
                teachers[name][kind] = sum(values) / len(values)
    return teachers
