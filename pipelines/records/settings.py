"""What a recipe may say otherwise while its run goes on, and in which stages that counts.

How and where a run goes, and what watches it, may always change (`FREE`); so may where its inference servers
are and how they are started, asked and sent weights (`SettingChange.serves`), which prove what they are. With
`--accept-changed-settings` so may what every step reads anew and nothing was made of: rates, coefficients,
bounds, how often something is measured, how tokens are drawn, the numbers in which servers compute. Models,
domains, the order of prompts, seeds and shapes stay: what is on disk hangs on them. A change counts in stages
that are not done, from the checkpoint on that each goes on from.
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
from opd.config.hub_names import told
from opd.config.load import path_keys, replace_at
from opd.config.schema import change_at
from opd.config.servers import COMPUTED
from opd.config.teachers import ServerConfig
from opd.errors import RunFolderError
from opd.pipelines.records.stage_names import KINDS, kind_of, model_stage, specialist_stage
from opd.redact import redacted

FREE = ("runtime", "run_dir", "launch", "train", "watch")
"""Top-level keys that may change between attempts: they say how and where, not what; or when to stop."""
ACCEPT_SETTINGS = "--resume --accept-changed-settings"
"""How a command is told to go on with other settings than the run was started with."""

_REACHED = frozenset(ServerConfig.model_fields)
"""Where servers are and how patiently they are asked."""
_SENT = frozenset(("sync", "folder", "host"))
"""How the student's servers get its weights, to the last bit."""
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
"""In the place of a setting that one of two recipes does not have."""
Progress = Mapping[str, Mapping[str, Any] | None]
"""Stage -> what the checkpoint knows that it goes on from, empty before the first; `None` once it is done."""


def _told_to_compute(command: Any) -> list[str]:
    """The words of a server's command by which it computes other numbers."""
    found, telling = [], False
    for word in command if isinstance(command, list) else []:
        if word.startswith("--") or word == "-q":  # what vLLM calls quantization for short
            # A server takes the beginning of a name for the whole.
            flag = word.lstrip("-").partition("=")[0].replace("_", "-")
            telling = bool(flag) and any(name.startswith(flag) for name in COMPUTED)
        found += [word] if telling else []
    return found


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting that is not what it was."""

    path: tuple[str, ...]
    """Its keys, from the top of the recipe."""
    old: Any
    new: Any
    """As JSON, or `NOTHING`."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def free(self) -> bool:
        """Whether it may change without anybody's leave."""
        return self.path[0] in FREE or self.serves

    @property
    def serves(self) -> bool:
        """Whether it is about where servers are, and how they are started, asked and given weights: whatever
        it is, what they compute is proved before they are used.
        """
        match self.path:
            case ("servers", _, "arguments", name):
                return name not in COMPUTED
            case ("servers", _, "command"):
                return _told_to_compute(self.old) == _told_to_compute(self.new)
            case ("teachers", _, name):
                return name in _REACHED
            case ("rollout", "engine", name):
                return name in _REACHED | _SENT
        return self.path[0] == "servers"

    @property
    def recorded(self) -> bool:
        """Whether the run keeps that it was another before."""
        return not self.free or self.serves or self.path[0] == "watch"

    @property
    def what(self) -> str | None:
        """What of a run changes with it; see `Changes`. `None` if nothing may."""
        mark = change_at(self.path)
        return None if mark is None else mark.what

    def steers(self, recipe: Recipe) -> bool:
        """Whether the weights that are learnt from now on are others, with `recipe`: what was written since a
        checkpoint was then written, but for its first step, by weights that do not come again.
        """
        if self.path[0] != "watch":
            return not self.serves and self.what != "aside"
        rule = (recipe.watch or {}).get(self.path[1]) if len(self.path) > 1 else None
        said = json.dumps([side for side in (self.old, self.new) if side is not NOTHING])
        return "lower_rate" in said or (rule is not None and rule.action == "lower_rate")

    def sides(self) -> tuple[str, str]:
        """What it was and what it is, in words."""
        was, now = ("nothing" if side is NOTHING else json.dumps(side) for side in (self.old, self.new))
        return was, now


Stages = tuple[str, ...]
"""Names of stages, and kinds, which stand for all of a kind."""


def _of_servers(recipe: Recipe) -> dict[tuple[str, ...], Stages]:
    """Who reads teachers' and servers' settings; the student writes in all stages."""
    places: dict[tuple[str, ...], Stages] = {}
    for teacher, config in recipe.teachers.items():
        learners = [
            specialist_stage(name)
            for name in recipe.domains
            if (opd := recipe.for_domain(name).specialist.opd) is not None and teacher in opd.weights
        ]
        places[("teachers", teacher)] = stages = ("merge", "baseline-off_policy", *learners)
        if isinstance(config, ServerConfig) and config.servers is not None:
            places[("servers", config.servers)] = stages
    engine = recipe.rollout.engine
    if isinstance(engine, ServerConfig) and engine.servers is not None:
        places[("servers", engine.servers)] = KINDS
    return places


def _readers(recipe: Recipe, path: tuple[str, ...]) -> Stages:
    """The stages that read a setting."""
    learners = tuple(
        specialist_stage(name) for name in recipe.domains if recipe.domains[name].specialist is None
    )
    places = _of_servers(recipe) | {
        ("specialist",): (*learners, "baseline-mixed_grpo", "baseline-mixed_grpo_all"),
        ("distill",): ("merge", "baseline-off_policy"),
        ("base",): ("base",),
        ("sft",): ("base",),
        ("rollout",): KINDS,
        ("evaluation",): ("specialist", "merge", "baseline"),
    }
    for name in recipe.domains:
        own = (specialist_stage(name),)
        answers = (*own, "merge", "baseline", "evaluate")
        places |= {
            ("domains", name): ("merge", "baseline-off_policy"),
            ("domains", name, "specialist"): own,
            ("domains", name, "sft"): (model_stage(f"sft:{name}"), *own),
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


def why_not(recipe: Recipe, change: SettingChange) -> str | None:
    """Why a setting cannot be another from now on, in words that follow its values; `None` if it can."""
    used = change.path[0] == "servers" and _readers(recipe, change.path)
    computes = used and re.fullmatch(_COMPUTES, ".".join(change.path[2:]))
    if change.what is None and not computes:
        return "which stays as it is for as long as a run goes on: what is on disk was made with it"
    if change.what == "stream" and not (change.old and change.new):
        return "and no stage can begin or cease to learn by it in its middle"
    return None


def hindrance(recipe: Recipe, change: SettingChange, progress: Progress) -> str | None:
    """Why a setting that can change cannot any more, or not from where the run is; `None` if it can."""
    read_by = [name for name in of_stages(recipe, change, progress) if kind_of(name) != "baseline"]
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
            and recipe.for_domain(stage.partition("-")[2]).specialist.difficulty
        )
        if change.what in ("drawn", "judged") and step and measured:
            return f"by which {stage} has measured the difficulty of its prompts"
    return None


def of_stages(recipe: Recipe, change: SettingChange, stages: Iterable[str]) -> list[str]:
    """Those of `stages` that read a setting; all that are watched, of rules."""
    wanted: Stages = ("base", "sft", "specialist", "merge", "baseline")
    if change.path[0] != "watch":
        wanted = _readers(recipe, change.path)
    return [stage for stage in stages if stage in wanted or kind_of(stage) in wanted]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A change as a run keeps it."""

    time: str
    """UTC."""
    field: str
    old: Any
    new: Any
    """`None` also where there was nothing."""
    stages: dict[str, int]
    """Stages that go on with it, and how many steps each had taken."""
    done: list[str]
    """Stages that read it and were done before."""

    @property
    def measures_otherwise(self) -> bool:
        """Whether an evaluation would find other numbers with it."""
        draws = re.search(r"(^|\.)rollout\.(?!engine\.)", self.field) is not None
        computes = re.fullmatch(rf"servers\..+\.({_COMPUTES})", self.field) is not None
        if self.field.endswith(".command"):
            computes = computes and _told_to_compute(self.old) != _told_to_compute(self.new)
        return draws or computes or _JUDGED.search(self.field) is not None

    @classmethod
    def of(cls, recipe: Recipe, change: SettingChange, progress: Progress, time: str) -> Recorded:
        """`change` in a run that has come as far as `progress`."""
        read_by = {name: progress[name] for name in of_stages(recipe, change, progress)}
        steps = {name: int(state.get("step", 0)) for name, state in read_by.items() if state is not None}
        done = [name for name, state in read_by.items() if state is None]
        old, new = (None if side is NOTHING else side for side in (change.old, change.new))
        return cls(time, change.name, old, new, steps, done)

    def told(self) -> str:
        """`specialist.optim.lr 0.001 -> 0.0003 (specialist-a after step 6; done before: specialist-b)`."""
        goes_on = ", ".join(
            f"{name} after step {step}" if step else name for name, step in self.stages.items()
        )
        before = f"done before: {', '.join(self.done)}" if self.done else ""
        where = "; ".join(filter(None, (goes_on, before)))
        words = f"{self.field} {json.dumps(self.old)} -> {json.dumps(self.new)}"
        return words + (f" ({where})" if where else "")


def require(
    run: str, recipe: Recipe, change: SettingChange, accepted: bool, progress: Callable[[], Progress]
) -> None:
    """Raise `RunFolderError` unless a run can go on with `change`, and may; `run`: its place, and since when
    it has had the old one.
    """
    was, now = change.sides()
    why, way = why_not(recipe, change), ""
    if why is None and not accepted:
        way = f"go on with what it says now by {ACCEPT_SETTINGS}, "
    elif why is None:
        why = hindrance(recipe, change, progress())
        if why is None:
            return
    because = f", {why}" if accepted else ""
    raise RunFolderError(
        f"{run} with {change.name} = {was} and the recipe now says {now}{because};"
        f" resume with the same recipe, {way}or start a new run with --out"
    )


def changes(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[SettingChange]:
    """Every setting in which two resolved recipes differ."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after and _NOW_SAID.get(path[-2:]) != (before, after):
            yield SettingChange(path, before, after)
        return
    for key in dict.fromkeys([*after, *before]):
        own = (*path, str(key))
        if key in before and key in after:
            yield from changes(before[key], after[key], own)
        else:
            yield SettingChange(own, before.get(key, NOTHING), after.get(key, NOTHING))


def _exchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[SettingChange]:
    """What another group computes otherwise than the one that a teacher or the engine had before."""
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
        yield from (change for change in changes(old, new, ("servers", now)) if not change.serves)


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[SettingChange]:
    """Every setting in which two resolved recipes differ. What a domain or an evaluation set says of its own
    on one side alone is compared with what the other side says of all.
    """
    sides = [copy.deepcopy(dict(side)) for side in (before, after)]
    for name in _shared(sides, "domains"):
        own = [side["domains"][name] for side in sides]
        for group in ("specialist", "rollout"):
            _fill(sides, own, group)
        if own[0].get("distill") != own[1].get("distill"):
            for side, mine in zip(sides, own, strict=True):
                said = {key: value for key, value in (mine.get("distill") or {}).items() if value is not None}
                general = {key: side["distill"][key] for key in SharesConfig.model_fields}
                mine["distill"] = general | said
    sets = [side.get("evaluation", {}) for side in sides]
    for name in _shared(sets, "sets"):
        _fill(sides, [side["sets"][name] for side in sets], "rollout")
    found = (*_exchanged(sides[0], sides[1]), *changes(sides[0], sides[1]))
    return list({change.path: change for change in reversed(found)}.values())[::-1]


def _shared(sides: Iterable[Mapping[str, Any]], key: str) -> set[str]:
    """Names that both sides have under `key`."""
    return set.intersection(*(set(side.get(key, {})) for side in sides))


def _fill(sides: Iterable[Mapping[str, Any]], own: list[dict[str, Any]], group: str) -> None:
    """Where one of `own` says nothing of a group and the other does, it says what its side says of all."""
    given = [mine.get(group) for mine in own]
    for side, mine, here, there in zip(sides, own, given, reversed(given), strict=True):
        if here is None and there is not None:
            mine[group] = {key: side[group][key] for key in there if key in side.get(group, {})}


def written(recipe: Recipe) -> dict[str, Any]:
    """The recipe as it lies in the folder: its secrets are left out, and may change between attempts; what is
    from the Hub has its name there, with the commit, wherever this machine's cache is.
    """
    data = recipe.model_dump(mode="json")
    for key in path_keys(recipe):
        replace_at(data, key, lambda place: told(place) if place else place)
    return redacted(data)


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay as it is from attempt to attempt."""
    return {key: value for key, value in config.items() if key not in FREE}
