"""The doctor's checks of the recipe, the data, the file system and servers, without loading a model.

Importable without torch, so that an impossible run is refused within a second.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, ParamSpec

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opd.config import Recipe
from opd.config.base import check_slashes
from opd.config.teachers import ServerConfig
from opd.errors import ConfigError, MissingExtraError, StorageError, from_system
from opd.imports import import_function, optional_arguments
from opd.pipelines.commands.exit_status import one_line
from opd.pipelines.records.inputs import user_functions
from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder
from opd.progress import set_activity
from opd.redact import redact
from opd.retry import Retry
from opd.untrusted import machine_memory

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the doctor."""

    level: Literal["ok", "warning", "error"]
    title: str
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The detail in figures, for `opd doctor --json`."""

    def __post_init__(self) -> None:
        # Before a table cuts it into lines.
        object.__setattr__(self, "detail", redact(self.detail))


def run_check(
    title: str, check: Callable[P, list[Finding] | None], *args: P.args, **options: P.kwargs
) -> list[Finding]:
    """Return the findings of `check`. An `OpdError` or a system error becomes one of level `error`."""
    try:
        with set_activity(f"checking {title}"):
            return check(*args, **options) or []
    except Exception as error:
        understood = from_system(error)
        if understood is None:
            raise
        return [Finding("error", title, str(understood).removeprefix(f"{title}: "))]


def number_of(count: int, thing: str) -> str:
    """`1 error`, `2,000 errors`, `0 batches`."""
    plural = f"{thing}es" if thing.endswith(("ch", "s", "x")) else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"


def check_sampling(recipe: Recipe) -> list[Finding]:
    """Warn of cut distributions, which no importance weight corrects, unless masks are replayed."""
    rollout, cuts = recipe.rollout, []
    of_domains = {f"domains.{name}.rollout": config.rollout for name, config in recipe.domains.items()}
    for where, config in {"rollout": rollout, **of_domains}.items():
        if config is not None and config.top_p < 1:
            cuts.append(f"{where}.top_p = {config.top_p}")
        if config is not None and config.top_k:
            cuts.append(f"{where}.top_k = {config.top_k}")
    if cuts:
        detail = " and ".join(cuts)
        learnt = [recipe.for_domain(name) for name in recipe.grpo_domains()]
        cut = [one for one in learnt if one.rollout.most_kept]
        if single := [name for name in recipe.grpo_domains() if recipe.for_domain(name).rollout.top_k == 1]:
            detail += f": with top_k 1 all answers to a prompt of {single[0]} are the same"
            return [Finding("warning", "sampling", f"{detail}, and GRPO learns from their differences")]
        if cut and all(one.replays_masks for one in cut):
            most = 4 * max(one.rollout.most_kept for one in cut)
            detail += f": specialists learn over what it keeps (at most {most:,} bytes a token of the log)"
            return [Finding("ok", "sampling", f"{detail}, a merge over the whole vocabulary")]
        detail += ": tokens outside the cut are never seen, which biases every estimator"
        return [Finding("warning", "sampling", f"{detail}; use top_p 1 and top_k 0")]
    return [Finding("ok", "sampling", f"whole vocabulary at temperature {rollout.temperature:g}")]


def check_ranks(recipe: Recipe) -> list[Finding]:
    """Check that the recipe's ranks can do the work, and that no ranks are missing."""
    if (recipe.train.ranks or 1) > 1 or recipe.launch.type == "ray":
        from opd.pipelines.launch import local

        return run_check("train.ranks", local.check_ranks, recipe, recipe.train.ranks or 1)
    misfit = None if recipe.train.ranks else recipe.train.rank_count_fault(1)
    if misfit is None:
        return []
    return [Finding("warning", "train.ranks", f"unless torchrun starts more, {misfit}")]


def check_schedule(recipe: Recipe) -> list[Finding]:
    """Warn if tokens of older weights are trained on as if they were new."""
    from opd.pipelines.stages.distill import needs_policy_stream, policy_loss

    schedule, distill = recipe.rollout.schedule, recipe.distill
    if recipe.rollout.over_sample > 1:
        schedule += " and over_sample"
    if schedule == "in_turn":
        return []
    uncorrected = []
    for name in recipe.grpo_domains():
        if recipe.for_domain(name).specialist.policy_loss.correction is None:
            has_settings = recipe.domains[name].specialist is not None
            key = f"{f'domains.{name}.' if has_settings else ''}specialist.policy_loss.correction"
            if key not in uncorrected:
                uncorrected.append(key)
    sampled = needs_policy_stream(distill) or distill.weighs_samples
    if sampled and policy_loss(distill).correction is None:
        where = "loss.loss" if distill.loss.type == "k1" else "policy_loss"
        uncorrected.append(f"distill.{where}.correction")
    if not uncorrected:
        return [Finding("ok", "schedule", f"{schedule}, corrected for the age of tokens")]
    detail = f"with rollout.schedule {schedule} tokens of older weights count as if they were new"
    return [Finding("warning", "schedule", f"{detail}; set {' and '.join(uncorrected)} to {{type: tis}}")]


def check_paths(recipe: Recipe) -> list[Finding]:
    """Check that the user's own functions, named by dotted path, can be loaded."""

    def check_path(where: str, path: str, takes: Sequence[str]) -> list[Finding]:
        if where.endswith("advantage.path"):
            from opd.train.advantages import UserAdvantage

            UserAdvantage(path, where)
        else:
            function = import_function(path, where, ConfigError, takes)
            if recipe.train.context_parallel != 1 and optional_arguments(function, takes):
                from opd.train.terms import shared_responses

                raise ConfigError(shared_responses(where, path))
        return [Finding("ok", where, path)]

    findings: list[Finding] = []
    for where, (path, takes) in user_functions(recipe).items():
        findings += run_check(where, check_path, where, path, takes)
    return findings


def check_sinks(recipe: Recipe) -> list[Finding]:
    """Return an error for each metrics tracker that is not installed."""
    from opd.sinks import require_package

    findings: list[Finding] = []
    for name in recipe.runtime.sinks:
        findings += run_check(f"sink {name}", require_package, name)
    return findings


def check_extras(recipe: Recipe) -> list[Finding]:
    """Return an error for each extra that the run needs and this machine lacks, before hours are spent."""
    on_ray = recipe.launch.type == "ray"  # the nodes' packages cannot be seen from here
    backend, served = recipe.train.backend, [recipe.teacher_settings(name) for name in recipe.used_teachers()]
    asks = any(isinstance(config, ServerConfig) for config in (recipe.rollout.engine, *served))
    needed = {
        ("model.lora", "lora", "peft"): recipe.model.lora is not None,
        ("a served model", "sglang", "aiohttp"): asks,
        ("a served model", "sglang", "orjson"): asks,
        ("train.backend deepspeed", "deepspeed", "deepspeed"): backend == "deepspeed",
        ("train.backend megatron", "megatron", "megatron"): backend == "megatron",
    }
    needed = {key: wanted and not on_ray for key, wanted in needed.items()}
    needed["launch: ray", "ray", "ray"] = on_ray
    lacks = {key[:2] for key, wanted in needed.items() if wanted and find_spec(key[2]) is None}
    return [
        Finding("error", f"extra {extra}", str(MissingExtraError(user, extra)))
        for user, extra in sorted(lacks)
    ]


def check_run_dir(path: Path, recipe: Recipe, resume: bool, accepted: AcceptedChanges) -> list[Finding]:
    """Check that the run folder can be made or, with `resume`, continued."""
    RunFolder.check(path, recipe, resume=resume, accepted=accepted)
    parent = existing_parent(path)
    wrong = write_error(parent)
    if wrong is not None:
        return [
            Finding("error", "run folder", f"{parent} cannot be written ({wrong}); choose another with --out")
        ]
    return [Finding("ok", "run folder", str(path))]


def write_error(folder: Path) -> str | None:
    """Return the reason why no file can be made in `folder`, or `None`. Leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def existing_parent(path: Path) -> Path:
    """Return `path` or the nearest existing folder above it."""
    path = path.absolute()
    try:
        return next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as error:  # a name that is too long, a folder without permission
        raise from_system(error) or error from None


def given_teachers(recipe: Recipe) -> Mapping[str, str]:
    """Return folders or URLs of teachers that the merge or a specialist uses and this run does not train."""
    sources = recipe.given_teachers()
    return {name: sources[name] for name in recipe.used_teachers() if name in sources}


_DRAWS = 50_000_000
"""Strings that a generated source may try for its prompts, which takes minutes."""
_RESPONSES = 10_000_000
"""Responses of one step or one evaluation."""
_TOKEN_BYTES = 33
"""Bytes a response keeps of a token in memory: ids, log-probabilities, versions, masks and terms."""
_PROMPT_BYTES = 1000
_BEYOND = 4
"""Multiple of the machine's memory above which a size is a mistake. Longest responses are rare."""


def check_sizes(recipe: Recipe) -> list[Finding]:
    """Return an error for each setting beyond any machine, or beyond this one."""
    cores = os.cpu_count() or 1
    most = max(64, 8 * cores)
    wrong: list[str] = []
    local = recipe.launch.type == "local"
    counts = {
        "train.ranks": (recipe.train.ranks or 1) if local else 1,
        "runtime.workers": recipe.runtime.workers if local else 1,
        "runtime.threads": recipe.runtime.threads or 1,
    }
    for key, count in counts.items():
        if count > most:
            wrong.append(f"{key} is {count}, and this machine has {cores} cores; give {most} at most")
    for key, responses in _response_counts(recipe).items():
        if responses > _RESPONSES:
            wrong.append(f"{key} makes {responses:,} responses at once; give {_RESPONSES:,} at most")
    for name, config in recipe.domains.items():
        held_out = recipe.evaluation.prompts_per_domain
        draws = max(config.prompts / (1 - config.held_out), held_out / config.held_out)
        if config.source.partition(":")[0] in ("procedural", "reasoning-gym") and draws > _DRAWS:
            wrong.append(
                f"domains.{name}: {config.prompts:,} training prompts and {held_out:,} held-out ones with"
                f" held_out {config.held_out:g} are found among some {draws:,.0f}; ask for fewer, or for a"
                " held_out nearer to 0.1"
            )
    for name, config in recipe.of_sets().domains.items():
        draws = recipe.evaluation.sets[name].prompts / config.held_out
        if draws > _DRAWS:
            wrong.append(
                f"evaluation.sets.{name}: its prompts are found among some {draws:,.0f}, of which the domains"
                f" hold out {config.held_out:g}; ask for fewer, or for domains with a larger held_out"
            )
    if not wrong:
        memory = machine_memory()
        length = min(recipe.longest_response(), recipe.rollout.max_sequence)
        sizes = {}
        if recipe.storage.trajectories == "memory":
            for key, responses in _response_counts(recipe).items():
                sizes[f"{key} of {length:,} tokens"] = responses * length * _TOKEN_BYTES
        prompts = sum(config.prompts for config in recipe.domains.values() if ":" in config.source)
        sizes["domains.*.prompts"] = prompts * _PROMPT_BYTES
        wrong = [
            f"{key} take up to {size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}; lower one"
            " of them"
            for key, size in sizes.items()
            if size > _BEYOND * memory
        ]
    return [Finding("error", "sizes", sentence) for sentence in wrong]


def _response_counts(recipe: Recipe) -> dict[str, int]:
    """Return the responses that are made at once, by the settings whose product they are."""
    distill, evaluation = recipe.distill, recipe.evaluation
    counts: dict[str, int] = {}
    for name in ("", *recipe.grpo_domains()):  # the recipe's own are the baseline's, too
        specialist = recipe.domains[name].specialist if name else recipe.specialist
        if specialist is not None:
            where = f"domains.{name}.specialist" if name else "specialist"
            key = f"{where}.prompts_per_step x group_size" + " x refill.limit" * bool(specialist.refill)
            counts[key] = specialist.most_prompts * specialist.group_size
            if specialist.difficulty is not None:
                key = f"{where}.prompts_per_step x difficulty.samples"
                counts[key] = specialist.prompts_per_step * specialist.difficulty.samples
    prompts = sum(recipe.for_domain(name).distill.prompts_per_domain for name in recipe.domains)
    key = "distill.prompts_per_domain x samples_per_prompt x domains"
    counts[key] = distill.samples_per_prompt * prompts
    key = "evaluation.prompts_per_domain x samples_per_prompt"
    counts[key] = evaluation.prompts_per_domain * evaluation.samples_per_prompt
    for name, config in evaluation.sets.items():
        key = f"evaluation.sets.{name}.prompts x samples_per_prompt"
        counts[key] = config.prompts * config.samples_per_prompt
    return counts


def refuse_place(url: str, models: Iterable[str]) -> None:
    """Raise `StorageError` if nothing can be published at `url`. It may not be empty, end with this process,
    or be a file. It may not be the folder of a run or of a model (or lie below one of `models`), whose files
    would mix with the published ones.
    """
    if not url.strip():
        raise StorageError("the place to publish is empty; give a folder, or s3://BUCKET/PREFIX.")
    try:
        check_slashes(url)
    except ValueError as error:
        raise StorageError(f"{error}.") from None
    protocol, separator, path = url.partition("://")
    if separator and protocol == "memory":
        raise StorageError(
            f"{url} is the memory of this process, where nobody else can read; give a folder, or"
            " s3://BUCKET/PREFIX."
        )
    if separator and protocol != "file":
        return
    target = Path(path if separator else url).expanduser().absolute().resolve()
    if not existing_parent(target).is_dir():
        raise StorageError(f"{existing_parent(target)} is a file; give a folder to publish in.")
    if (target / "config.json").exists():
        raise StorageError(f"{url} is the folder of a model or a run; publish into one of its own.")
    for model in models:
        folder = Path(model).absolute().resolve()
        if "://" not in model and folder.is_dir() and target.is_relative_to(folder):
            raise StorageError(f"{url} is in the model's own folder {model}; publish it elsewhere.")


def check_publishing(recipe: Recipe) -> list[Finding]:
    """Check that `storage.published` can be written. An object store gets one empty object for a moment."""
    title, url = "storage.published", recipe.storage.published
    if url is None or not any(
        recipe.teacher_settings(name).streams_weights for name in recipe.used_teachers()
    ):
        return []
    models = [recipe.model.path, *given_teachers(recipe).values()]
    refuse_place(url, [model for model in models if model is not None])
    protocol, separator, path = url.partition("://")
    if not separator or protocol == "file":
        parent = existing_parent(Path(path if separator else url).expanduser())
        wrong = write_error(parent)
        if wrong is not None:
            return [Finding("error", title, f"{parent} cannot be written ({wrong}); choose another place")]
        return [Finding("ok", title, url)]
    from opd.storage.object_store import ObjectStore, StoreOptions

    name = f".opd-probe-{secrets.token_hex(4)}"
    with ObjectStore.open(url, options=StoreOptions(retry=Retry(attempts=2, pause=0.1))) as store:
        store.put(name, b"")
        store.delete(name)
    return [Finding("ok", title, f"{url}, which can be written")]


_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def print_findings(
    title: str, findings: list[Finding], console: Console | None = None, *, as_json: bool = False
) -> int:
    """Print `findings` as `print_diagnosis` does, and return its status."""
    console = console or Console()
    if as_json:
        lines = [
            json.dumps({"level": f.level, "check": f.title, "finding": f.detail, "numbers": dict(f.numbers)})
            for f in findings
        ]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    elif console.is_terminal:
        # Texts, not markup: they hold names, answers and servers' messages.
        table = Table(title=Text(one_line(title)), title_justify="left", show_lines=False)
        for column in ("", "check", "finding"):
            table.add_column(column, overflow="fold")
        for f in findings:
            table.add_row(_MARKS[f.level], Text(one_line(f.title)), Text(one_line(f.detail)))
        console.print(table, markup=True)
    else:
        lines = [f"{f.level:<8} {one_line(f'{f.title}: {f.detail}')}" for f in findings]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    errors, warnings = (sum(f.level == level for f in findings) for level in ("error", "warning"))
    if not as_json:
        console.print(f"{number_of(errors, 'error')}, {number_of(warnings, 'warning')}", highlight=False)
    return 2 if errors else 0


def format_bytes(size: float) -> str:
    """`1536` is `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
