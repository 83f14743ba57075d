"""Decide the changes of a recipe that a resumed run accepts, and the stages they affect.

Settings of place, process and alerts may always change (`FREE`). So may the place of its inference servers,
and how they are started, called and sent weights (`SettingChange.concerns_servers`). Their weights are
verified. With `--accept-changed-settings` settings may change that every step reads again and nothing was
made of. These are
rates, coefficients, bounds, the frequency of measurements, sampling, and the numerics of servers. Models,
domains, the order of prompts, seeds and shapes stay, because the files on disk depend on them. A change
affects unfinished stages, from their latest checkpoint.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opd.config import Recipe
from opd.config.distill import SharesConfig
from opd.config.hub_names import display_path
from opd.config.load import path_keys, replace_at
from opd.config.schema import change_at
from opd.config.servers import COMPUTED
from opd.config.teachers import ServerConfig
from opd.errors import RunFolderError
from opd.pipelines.records.stage_names import KINDS, kind_of, model_stage, specialist_stage, split_round
from opd.redact import redact_json

FREE = ("runtime", "run_dir", "launch", "train", "watch")
"""Top-level keys that may change between attempts. They set place and process, or when to stop."""
ACCEPT_SETTINGS = "--resume --accept-changed-settings"
"""The options that continue a run with changed settings."""

_REACHED = frozenset(ServerConfig.model_fields)
"""Keys of servers' addresses and of the patience with them."""
_SENT = frozenset(("sync", "folder", "host"))
"""Keys of the transfer of weights to the student's servers, to the last bit."""
_COMPUTES = rf"arguments\.({'|'.join(COMPUTED)})|command"

_JUDGED = re.compile(r"\.reward\.(unreadable|urls)$")

_NOW_SAID: dict[tuple[str, ...], tuple[int, str | None]] = {
    ("batch", "max_tokens"): (4096, "auto"),
    ("storage", "hidden_memory_mb"): (64, None),
}
"""By the end of a path: the default that an earlier version recorded, and the present one, which changes
nothing, or with which a stage that has begun keeps the number it began with.
"""
NOTHING = object()
"""The value of a setting that one of two recipes lacks."""
Progress = Mapping[str, Mapping[str, Any] | None]
"""Stage -> state of its latest checkpoint, empty before the first. `None` once it is done."""


def _numeric_arguments(command: Any) -> list[str]:
    """Return the arguments in a server's command that change its numerics."""
    arguments, telling = [], False
    for word in command if isinstance(command, list) else []:
        if word.startswith("--") or word == "-q":  # vLLM's short option for quantization
            # A server accepts a prefix of an option's name.
            flag = word.lstrip("-").partition("=")[0].replace("_", "-")
            telling = bool(flag) and any(name.startswith(flag) for name in COMPUTED)
        arguments += [word] if telling else []
    return arguments


@dataclass(frozen=True, slots=True)
class SettingChange:
    path: tuple[str, ...]
    """Its keys, from the top of the recipe."""
    old: Any
    new: Any
    """As JSON, or `NOTHING`."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_free(self) -> bool:
        """It may change without `--accept-changed-settings`."""
        return self.path[0] in FREE or self.concerns_servers

    @property
    def concerns_servers(self) -> bool:
        """It concerns the place, start, calls or weights of servers, whose computation is verified anyway."""
        match self.path:
            case ("servers", _, "arguments", name):
                return name not in COMPUTED
            case ("servers", _, "command"):
                return _numeric_arguments(self.old) == _numeric_arguments(self.new)
            case ("teachers", _, name):
                return name in _REACHED
            case ("rollout", "engine", name):
                return name in _REACHED | _SENT
        return self.path[0] == "servers"

    @property
    def is_recorded(self) -> bool:
        """The run records its former value."""
        return not self.is_free or self.concerns_servers or self.path[0] == "watch"

    @property
    def change_kind(self) -> str | None:
        """The part of a run that changes with it, see `Changes`. `None` if none may."""
        mark = change_at(self.path)
        return None if mark is None else mark.what

    def changes_weights(self, recipe: Recipe) -> bool:
        """Return whether it changes later weights of training with `recipe`. Then the responses since a
        checkpoint, except of its first step, come from weights that will not exist.
        """
        if self.path[0] != "watch":
            return not self.concerns_servers and self.change_kind != "aside"
        rule = (recipe.watch or {}).get(self.path[1]) if len(self.path) > 1 else None
        sides = json.dumps([side for side in (self.old, self.new) if side is not NOTHING])
        return "lower_rate" in sides or (rule is not None and rule.action == "lower_rate")


Stages = tuple[str, ...]
"""Names of stages, and kinds, which mean all stages of a kind."""


def _server_readers(recipe: Recipe) -> dict[tuple[str, ...], Stages]:
    """Return the stages that use teachers' and servers' settings. The student generates in all stages."""
    places: dict[tuple[str, ...], Stages] = {}
    for teacher, config in recipe.teachers.items():
        learners = [
            specialist_stage(name)
            for name in recipe.domains
            if (opd := recipe.for_domain(name).specialist.opd) is not None and teacher in opd.teacher_weights
        ]
        places[("teachers", teacher)] = stages = ("merge", "baseline-off_policy", *learners)
        if isinstance(config, ServerConfig) and config.servers is not None:
            places[("servers", config.servers)] = stages
    engine = recipe.rollout.engine
    if isinstance(engine, ServerConfig) and engine.servers is not None:
        places[("servers", engine.servers)] = KINDS
    return places


def _reading_stages(recipe: Recipe, path: tuple[str, ...]) -> Stages:
    learners = tuple(
        specialist_stage(name) for name in recipe.domains if recipe.domains[name].specialist is None
    )
    places = _server_readers(recipe) | {
        ("specialist",): (*learners, "baseline-mixed_grpo", "baseline-mixed_grpo_all"),
        ("distill",): ("merge", "baseline-off_policy"),
        ("base",): ("base",),
        ("sft",): ("base",),
        ("rollout",): KINDS,
        ("evaluation",): ("specialist", "merge", "baseline"),
    }
    for name in recipe.domains:
        specialist = (specialist_stage(name),)
        answers = (*specialist, "merge", "baseline", "evaluate")
        places |= {
            ("domains", name): ("merge", "baseline-off_policy"),
            ("domains", name, "specialist"): specialist,
            ("domains", name, "sft"): (model_stage(f"sft:{name}"), *specialist),
            ("domains", name, "rollout"): answers,
            ("domains", name, "distill"): ("merge",),
            ("domains", name, "reward"): answers,
        }
    for name in recipe.evaluation.sets:
        places |= {("evaluation", "sets", name, group): ("evaluate",) for group in ("rollout", "reward")}
    for length in range(len(path) - 1, 0, -1):
        if path[:length] in places:
            return places[path[:length]]
    return ()


def why_too_late(recipe: Recipe, change: SettingChange, progress: Progress) -> str | None:
    """Return the reason why a setting can no longer change at this point of the run. `None` if it can."""
    if change.path == ("rounds",) and change.old > change.new:
        return "which only grows while a run goes on"
    read_by = [name for name in affected_stages(recipe, change, progress) if kind_of(name) != "baseline"]
    states = {name: state for name in read_by if (state := progress[name]) is not None}
    if read_by and not states:
        return (
            f"which has no effect any more: {', '.join(read_by)} {'is' if len(read_by) == 1 else 'are'} done"
        )
    for stage, state in states.items():
        step = int(state.get("step", 0))
        if change.path[-1] == "steps" and not (change.old and change.new > step):
            return f"and {stage} has taken {step}" if change.old and change.new else "which is another stage"
        if change.path[-2:] == ("reference_kl", "coef") and "reference_kl/coef" in state.get("counters", {}):
            return f"and {stage} has adapted it to reference_kl.target since; change that one"
        measured = (
            kind_of(stage) == "specialist"
            and recipe.for_domain(split_round(stage)[0].partition("-")[2]).specialist.difficulty
        )
        if change.change_kind in ("drawn", "judged") and step and measured:
            return f"by which {stage} has measured the difficulty of its prompts"
    return None


def affected_stages(recipe: Recipe, change: SettingChange, stages: Iterable[str]) -> list[str]:
    """Return the ones of `stages` that read a setting. For rules these are all monitored stages."""
    wanted: Stages = ("base", "sft", "specialist", "merge", "baseline")
    if change.path[0] != "watch":
        wanted = _reading_stages(recipe, change.path)
    return [stage for stage in stages if split_round(stage)[0] in wanted or kind_of(stage) in wanted]


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """A change in a run's records."""

    time: str
    """UTC."""
    field: str
    old: Any
    new: Any
    """`None` also if there was nothing."""
    stages: dict[str, int]
    """Stages that continue with it -> their steps so far."""
    done: list[str]
    """Stages that read it and were done before."""

    @property
    def changes_measurement(self) -> bool:
        """An evaluation would have other results with it."""
        draws = re.search(r"(^|\.)rollout\.(?!engine\.)", self.field) is not None
        computes = re.fullmatch(rf"servers\..+\.({_COMPUTES})", self.field) is not None
        if self.field.endswith(".command"):
            computes = computes and _numeric_arguments(self.old) != _numeric_arguments(self.new)
        return draws or computes or _JUDGED.search(self.field) is not None

    @classmethod
    def from_change(
        cls, recipe: Recipe, change: SettingChange, progress: Progress, time: str
    ) -> RecordedChange:
        """Return `change` as recorded in a run at `progress`."""
        read_by = {name: progress[name] for name in affected_stages(recipe, change, progress)}
        steps = {name: int(state.get("step", 0)) for name, state in read_by.items() if state is not None}
        done = [name for name, state in read_by.items() if state is None]
        old, new = (None if side is NOTHING else side for side in (change.old, change.new))
        return cls(time, change.name, old, new, steps, done)

    def format_change(self) -> str:
        """Format as `specialist.optim.lr 0.001 -> 0.0003 (specialist-a after step 6; done before: merge)`."""
        goes_on = ", ".join(
            f"{name} after step {step}" if step else name for name, step in self.stages.items()
        )
        done = f"done before: {', '.join(self.done)}" if self.done else ""
        where = "; ".join(filter(None, (goes_on, done)))
        words = f"{self.field} {json.dumps(self.old)} -> {json.dumps(self.new)}"
        return words + (f" ({where})" if where else "")


def require_allowed(
    run: str, recipe: Recipe, change: SettingChange, accepted: bool, progress: Callable[[], Progress]
) -> None:
    """Raise `RunFolderError` unless a run can continue with `change`, and may. `run`: its folder, and the
    time since which it has the former value.
    """
    used = change.path[0] == "servers" and _reading_stages(recipe, change.path)
    computes = used and re.fullmatch(_COMPUTES, ".".join(change.path[2:]))
    why, offer = None, ""
    if change.change_kind is None and not computes:
        why = "which stays as it is for as long as a run goes on: what is on disk was made with it"
    elif change.change_kind == "stream" and not (change.old and change.new):
        why = "and no stage can begin or cease to learn by it in its middle"
    elif not accepted:
        offer = f"go on with what it says now by {ACCEPT_SETTINGS}, "
    else:
        why = why_too_late(recipe, change, progress())
        if why is None:
            return
    because = f", {why}" if accepted else ""
    was, now = ("nothing" if side is NOTHING else json.dumps(side) for side in (change.old, change.new))
    raise RunFolderError(
        f"{run} with {change.name} = {was} and the recipe now says {now}{because};"
        f" resume with the same recipe, {offer}or start a new run with --out"
    )


def iterate_changes(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[SettingChange]:
    """Yield every setting in which two resolved recipes differ."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after and _NOW_SAID.get(path[-2:]) != (before, after):
            yield SettingChange(path, before, after)
        return
    for key in dict.fromkeys([*after, *before]):
        key_path = (*path, str(key))
        if key in before and key in after:
            yield from iterate_changes(before[key], after[key], key_path)
        else:
            yield SettingChange(key_path, before.get(key, NOTHING), after.get(key, NOTHING))


def _group_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[SettingChange]:
    """Yield changes of the numerics if a teacher or the engine uses another group of servers."""
    ends = [
        {**side.get("teachers", {}), "": side.get("rollout", {}).get("engine", {})}
        for side in (before, after)
    ]
    for name in ends[0].keys() & ends[1].keys():
        was, now = (end[name].get("servers") for end in ends)
        if was is None or now is None or was == now:
            continue
        old, new = (
            {key: side.get("servers", {}).get(group, {}).get(key) for key in ("arguments", "command")}
            for side, group in ((before, was), (after, now))
        )
        yield from (
            change for change in iterate_changes(old, new, ("servers", now)) if not change.concerns_servers
        )


def compare_recipes(before: dict[str, Any], after: dict[str, Any]) -> list[SettingChange]:
    """Return every setting in which two resolved recipes differ. If only one side has a domain's or set's own
    values, they are compared with the other side's general ones.
    """
    sides = [copy.deepcopy(dict(side)) for side in (before, after)]
    for name in _shared_names(sides, "domains"):
        domains = [side["domains"][name] for side in sides]
        for group in ("specialist", "rollout"):
            _fill_group(sides, domains, group)
        if domains[0].get("distill") != domains[1].get("distill"):
            for side, domain in zip(sides, domains, strict=True):
                values = domain.get("distill") or {}
                values = {key: value for key, value in values.items() if value is not None}
                general = {key: side["distill"][key] for key in SharesConfig.model_fields}
                domain["distill"] = general | values
    sets = [side.get("evaluation", {}) for side in sides]
    for name in _shared_names(sets, "sets"):
        _fill_group(sides, [side["sets"][name] for side in sets], "rollout")
    changes = (*_group_changes(sides[0], sides[1]), *iterate_changes(sides[0], sides[1]))
    return list({change.path: change for change in reversed(changes)}.values())[::-1]


def _shared_names(sides: Iterable[Mapping[str, Any]], key: str) -> set[str]:
    """Return the names that both sides have under `key`."""
    return set.intersection(*(set(side.get(key, {})) for side in sides))


def _fill_group(sides: Iterable[Mapping[str, Any]], parts: list[dict[str, Any]], group: str) -> None:
    """Fill a missing group of one of `parts` with its side's general values, if the other one has it."""
    values = [part.get(group) for part in parts]
    for side, part, value, other in zip(sides, parts, values, reversed(values), strict=True):
        if value is None and other is not None:
            part[group] = {key: side[group][key] for key in other if key in side.get(group, {})}


def recorded_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe in the format of the run folder. Secrets are left out, and may change between
    attempts. Inputs from the Hub have their names there, with the commit, wherever this machine's cache is.
    """
    data = recipe.model_dump(mode="json")
    for key in path_keys(recipe):
        replace_at(data, key, lambda path: display_path(path) if path else path)
    return redact_json(data)


def fixed_settings(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings that must stay between attempts."""
    return {key: value for key, value in config.items() if key not in FREE}
