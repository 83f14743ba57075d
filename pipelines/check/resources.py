"""Estimate a run's disk space, and compare memory and disk with the free space."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opd.config import Recipe
from opd.config.recipe import WEIGHT_MERGES
from opd.models.hf_folder import is_whole
from opd.pipelines.check.checks import Finding, existing_parent, format_bytes, number_of, write_error
from opd.pipelines.check.memory import (
    MIB,
    Part,
    format_phases,
    format_sizes,
    free_on_cuda,
    memory_parts,
    merge_tokens,
    offloaded_bytes,
    on_cuda,
    sizes_of,
    stages_of,
    teacher_answer_sizes,
    token_bytes,
    total_bytes,
    with_critic,
)
from opd.pipelines.check.models import Models
from opd.pipelines.check.shapes import ModelShape
from opd.pipelines.records.stage_names import model_stage, specialist_stage
from opd.pipelines.stages.precision import (
    WIDTH,
    has_masters,
    learning_width,
    lost_share,
    model_dtype,
    some_weights,
)
from opd.storage.object_store import folder_of
from opd.untrusted import free_memory

_COPIES = "weights_cache"
"""Folder in a run for copies of teachers from object stores, if `runtime.weights_cache` is not set."""
_TIGHT = 0.8

_LIBRARIES = 290 << 20
"""Bytes of a process with PyTorch and transformers loaded, measured on Linux."""


@dataclass(frozen=True, slots=True)
class DiskPart(Part):
    """Bytes on disk that a run writes."""

    place: str = ""
    """The path in the run folder if it is written once. Empty if every stage has its own."""
    needed_by: tuple[str, ...] = ()
    """Stages that write or read it. Once all are done it is no longer written."""


def disk_parts(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> list[DiskPart]:
    """Return every model folder, retained checkpoint and published or fetched teacher of a run."""
    parts = _stage_parts(recipe, student) + _teacher_parts(recipe, student, teachers)
    if recipe.runtime.offload.trainer and not on_cuda(recipe.model.device):
        parts.append(DiskPart("what the trainer puts away", _offloaded_bytes(recipe, student, teachers)))
    logs = {"log of teachers' answers": "merge"} if recipe.distill.prefixes == "teacher" else {}
    if "off_policy" in recipe.baselines.methods:
        logs["log of off_policy's answers"] = model_stage("off_policy")
    for name, stage in logs.items() if recipe.rollout.log is not None else ():
        size = teacher_answer_sizes(recipe)[1]
        parts.append(DiskPart(name, size, place=f"stages/{stage}/wal", needed_by=(stage,)))
    return parts


def _stage_parts(recipe: Recipe, student: ModelShape) -> list[DiskPart]:
    """Return the output of each stage: its model, its checkpoints, and one checkpoint in progress."""
    width, own, lora = WIDTH[model_dtype(recipe)], learning_width(recipe), recipe.model.lora is not None
    learns, methods = student.adapters if lora else student.parameters, recipe.baselines.methods
    trained = sum(_model_stages(recipe).values())
    adapters = sum(map(recipe.is_started, recipe.specialist_domains())) + len(recipe.specialist_domains())
    adapters += recipe.baselines.mixed_grpo_all_tokens
    folders = adapters + 2 + len(methods)
    mixed = ("mixed_grpo" in methods) + recipe.baselines.mixed_grpo_all_tokens
    critics = len(with_critic(recipe)) + mixed * (recipe.specialist.advantage.type == "gae")
    # Trained weights, and two moments of each.
    values = (trained - recipe.trains_base) * learns + (recipe.trains_base + critics) * student.parameters
    checkpoints = 3 * own * values
    return [
        DiskPart("model folders", folders * student.parameters * width + adapters * lora * learns * own),
        DiskPart("checkpoints", recipe.runtime.keep_checkpoints * checkpoints),
        # Before the oldest checkpoint of the current stage goes.
        DiskPart("a checkpoint being written", checkpoints // max(1, trained)),
    ]


def _teacher_parts(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> list[DiskPart]:
    """Return the disk space of teachers: published, fetched, cached and copied."""
    width, own, lora = WIDTH[model_dtype(recipe)], learning_width(recipe), recipe.model.lora is not None
    weights, learns = student.parameters * width, student.adapters if lora else student.parameters
    parts: list[DiskPart] = []
    led = [specialist_stage(name) if name else model_stage("mixed_grpo") for name in recipe.opd_recipes()]
    led = ("merge", *led)
    used = {*recipe.used_teachers(), *teachers}
    streamed = {name for name in used if recipe.teacher_settings(name).streams_weights}
    ours = len(streamed - set(teachers))
    published = ((weights + ours * learns * own) if lora else ours * weights) * bool(ours) + sum(
        shape.stored for name, shape in teachers.items() if name in streamed and not shape.published
    )
    if streamed and recipe.storage.published is None:
        parts.append(DiskPart("published teachers", published, place="published", needed_by=led))
    reads_whole = {*recipe.baselines.methods} & {*WEIGHT_MERGES, "off_policy"}
    fetched = used if recipe.distill.prefixes == "teacher" or reads_whole else used - streamed
    if fetched:
        size = sum(shape.stored for name, shape in teachers.items() if name in fetched and shape.published)
        everybody = tuple(_model_stages(recipe))
        parts.append(DiskPart("fetched teachers", size, place="downloaded", needed_by=everybody))
    if streamed:
        size, mend = _cache_count(recipe) * recipe.storage.cache_mb * MIB, "lower storage.cache_mb"
        parts.append(DiskPart("hidden states", size, mend=mend, place="stages/merge/cache", needed_by=led))
    if kept := _cached_weights(recipe, teachers, published):
        name, mend = "copies of teachers in object stores", "lower runtime.weights_cache_mb"
        parts.append(DiskPart(name, kept, mend=mend, place=_COPIES, needed_by=led))
    return parts


def _cached_weights(recipe: Recipe, teachers: Mapping[str, ModelShape], published: int) -> int:
    """Return the bytes of weights that a node caches from object stores. `published`: bytes of the teachers
    that the run publishes.
    """
    ours, most = recipe.storage.published, recipe.runtime.weights_cache_mb
    found = {"": published if ours is not None and folder_of(ours) is None else 0}
    for name, shape in teachers.items():
        settings = recipe.teacher_settings(name)
        if shape.digest and settings.streams_weights:
            size = shape.stored
            if settings.elsewhere:  # only the head is read here
                size = size * shape.vocabulary * shape.hidden_size // max(shape.parameters, 1)
            found[shape.digest] = max(found.get(shape.digest, 0), size)
    size = sum(found.values())
    return size if most is None else min(size, most * MIB)


def _offloaded_bytes(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> int:
    """Return the maximum bytes of weights and moments offloaded during rollout."""
    return max(map(offloaded_bytes, stages_of(recipe, student, teachers)))


def _cache_count(recipe: Recipe) -> int:
    """Return the number of caches of hidden states at once. A stage's cache goes when the stage is done."""
    beside = min(recipe.runtime.workers, sum(map(bool, recipe.opd_recipes())))
    return max(beside, 1)


def remaining_disk(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], run_dir: Path
) -> list[DiskPart]:
    """Return the `disk_parts` that a run in `run_dir` still has to write."""
    parts = disk_parts(recipe, student, teachers)
    if not (run_dir / "stages").is_dir():
        return parts
    done = {path.parent.name for path in run_dir.glob("stages/*/done.json")}
    stages = _model_stages(recipe)
    undone = [stage for stage in stages if stage not in done]
    trained = [stage for stage in undone if stages[stage]]
    folders, checkpoints, writing, *others = parts
    each = checkpoints.size // max(1, sum(stages.values()))
    there = sum(_folder_bytes(run_dir / "stages" / stage / "checkpoints") for stage in trained)
    left = {
        folders: folders.size * len(undone) // max(1, len(stages)),
        checkpoints: max(0, len(trained) * each - there),
        writing: writing.size * bool(trained),
    }
    for part in others:
        wanted = not part.place or any(stage in undone for stage in part.needed_by)
        there = _folder_bytes(run_dir / part.place) if part.place and wanted else 0
        left[part] = max(0, part.size - there) * wanted
    return [replace(part, size=size) for part, size in left.items()]


def _model_stages(recipe: Recipe) -> dict[str, bool]:
    """Return the stages that leave a model, and whether they have checkpoints."""
    methods = [*recipe.baselines.methods, *["mixed_grpo_all"] * recipe.baselines.mixed_grpo_all_tokens]
    path = recipe.model.path
    made_here = recipe.trains_base or path is None or not is_whole(Path(path))
    started = filter(recipe.is_started, recipe.specialist_domains())
    return {
        **({"base": recipe.trains_base} if made_here else {}),
        **{model_stage(f"sft:{domain}"): True for domain in started},
        **{specialist_stage(domain): True for domain in recipe.specialist_domains()},
        "merge": True,
        **{model_stage(method): method not in WEIGHT_MERGES for method in methods},
    }


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below `folder`, 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_precision(recipe: Recipe, models: Models) -> list[Finding]:
    """Check the precision of training, and estimate its cost."""
    dtype, student = model_dtype(recipe), models.student
    if student is None:
        return []
    if dtype == "float32" or has_masters(recipe):
        text = dtype if dtype == "float32" else f"layers in {dtype}, what learns in float32"
        if dtype == "float16" and recipe.train.backend != "deepspeed":
            detail = f"{text}; the loss is not scaled, so small gradients are lost: use bfloat16"
            return [Finding("warning", "precision", detail)]
        return [Finding("ok", "precision", text)]
    mixed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "mixed"})})
    saved = total_bytes(memory_parts(mixed, student, models.teachers))
    saved -= total_bytes(memory_parts(recipe, student, models.teachers))
    shares = [
        f"{_unmoved_share(recipe, lr):.0%} of the weights do not move at the lr {lr:g} of {stage}"
        for stage, lr in _learning_rates(recipe).items()
        if recipe.model.lora is None  # adapters begin at zero, with fine resolution
    ]
    detail = f"train.precision pure saves {format_bytes(max(saved, 0))} and rounds every update to {dtype}"
    return [Finding("warning", "precision", "; ".join([detail, *shares, "leave it at mixed"]))]


def _learning_rates(recipe: Recipe) -> dict[str, float]:
    """Return the peak learning rate of every stage that trains."""
    found = {"the warm-up": recipe.base.optim.lr} if recipe.base is not None else {}
    found |= {
        f"sft of {domain or 'the base'}": sft.optim.lr
        for domain, sft in recipe.demonstration_settings().items()
    }
    for name in recipe.grpo_domains():
        own = recipe.domains[name].specialist
        title = "the specialists" if own is None else f"the specialist of {name}"
        found[title] = recipe.for_domain(name).specialist.optim.lr
    return found | {"the merge": recipe.distill.optim.lr}


def _unmoved_share(recipe: Recipe, lr: float) -> float:
    """Return the share of the base's weights that an update of `lr` does not move. New weights are drawn."""
    import torch

    if recipe.model.path is not None:
        return lost_share(some_weights(Path(recipe.model.path)), model_dtype(recipe), lr)
    drawn = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    spread = (recipe.model.config or {}).get("initializer_range", 0.02)
    return lost_share([drawn * spread], model_dtype(recipe), lr)


def check_resources(recipe: Recipe, models: Models, run_dir: Path) -> list[Finding]:
    """Compare the estimates with the machine's free space."""
    if models.student is None:
        return []
    memory = memory_parts(recipe, models.student, models.teachers)
    disk, apart = remaining_disk(recipe, models.student, models.teachers, run_dir), []
    if recipe.runtime.weights_cache is not None:
        apart.append(_check_copies(recipe, [part for part in disk if part.place == _COPIES]))
        disk = [part for part in disk if part.place != _COPIES]
    free, ranks = available_memory(recipe.model.device), recipe.train.ranks or 1
    shared = not on_cuda(recipe.model.device)  # each rank has its own GPU
    limit, libraries = _own_limit(), 0
    if shared:
        # The free memory counts one process, which has its libraries already.
        libraries = _LIBRARIES if ranks > 1 or limit < free else 0
        free = min(free // ranks, limit)
    memory = [*memory, Part("libraries", libraries)]
    told, sizes, room = format_phases(recipe, models.student, models.teachers)
    fits = sizes.get("with offload", free + 1) <= free - libraries
    return [
        *_check_cache(recipe, models.student),
        _compare_sizes("memory" if ranks == 1 else "memory of a rank", memory, free, room if fits else ""),
        Finding("ok", "memory by phase", told, dict(sizes)),
        *_check_packing(recipe, models),
        *_check_host(recipe, models),
        _compare_sizes("disk", disk, shutil.disk_usage(existing_parent(run_dir)).free),
        *apart,
    ]


def _check_packing(recipe: Recipe, models: Models) -> list[Finding]:
    """Report the tokens of a micro-batch of the merge, if the recipe leaves them open."""
    if models.student is None or recipe.distill.batch.max_tokens != "auto":
        return []
    tokens = merge_tokens(recipe, models.student, models.teachers)
    return [Finding("ok", "micro-batches", f"up to {number_of(tokens, 'token')}", {"tokens": tokens})]


def _check_host(recipe: Recipe, models: Models) -> list[Finding]:
    """Check that the host has memory for offloaded GPU data."""
    if models.student is None:
        return []
    parts: list[Part] = []
    if recipe.runtime.offload.trainer and on_cuda(recipe.model.device):
        away = _offloaded_bytes(recipe, models.student, models.teachers)
        parts.append(Part("what the trainer puts away", away * (recipe.train.ranks or 1)))
    if sleeping := _sleeping_bytes(recipe, models.student, models.teachers):
        parts.append(Part("weights of servers that sleep", sleeping))
    return [_compare_sizes("memory of the host", parts, available_memory("cpu"))] if parts else []


def _sleeping_bytes(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> int:
    """Return the host memory of teachers' servers while all of them sleep. They sleep while the student
    trains. Each server leaves its full model there.
    """
    total, in_turn = 0, recipe.servers_in_turn
    for name, entry in recipe.teachers.items():
        if (own := getattr(entry, "servers", None)) not in in_turn:
            continue
        group, shape = recipe.servers[own], teachers.get(name, student)
        if group.arguments.get("enable-memory-saver") is not False:  # without it weights stay where they are
            total += group.count * (shape.stored or shape.parameters * WIDTH[model_dtype(recipe)])
    return total


def _check_cache(recipe: Recipe, student: ModelShape) -> list[Finding]:
    """Check that the embedded engine has memory for the keys and values of a response."""
    given, name = recipe.runtime.decode.kv_cache_mb, "runtime.decode.kv_cache_mb"
    if given is None or recipe.rollout.engine.type != "torch":
        return []
    needed = recipe.longest_response() * token_bytes(recipe, student)
    if needed <= given * MIB:
        return []
    text = (
        f"a response takes up to {format_bytes(needed)} of keys and values beside its prompt; set it to more"
    )
    return [Finding("error", name, f"{given} MiB: {text}")]


def _check_copies(recipe: Recipe, copies: Sequence[DiskPart]) -> Finding:
    """Check that the recipe's folder for copies of teachers can take them."""
    title, given = "runtime.weights_cache", str(recipe.runtime.weights_cache)
    if "://" in given:
        return Finding("error", title, f"{given} is no folder; give one on each node's own disk")
    folder = Path(given).expanduser()
    parent = existing_parent(folder)
    wrong = write_error(parent)
    if wrong is not None:
        detail = f"{parent} cannot be written ({wrong}), so nothing is kept there; choose another place"
        return Finding("warning", title, detail)
    left = [replace(part, size=max(0, part.size - _folder_bytes(folder))) for part in copies]
    return _compare_sizes(title, left, shutil.disk_usage(parent).free)


def available_memory(device: str) -> int:
    """Return the free bytes on the recipe's device. On a CPU the limit of the process's group counts."""
    free = free_on_cuda(device) if on_cuda(device) else None
    return free_memory() if free is None else free


def _own_limit() -> int:
    """Return the byte limit of this process."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=sys.maxsize)


def _compare_sizes(title: str, parts: Sequence[Part], free: int, room: str = "") -> Finding:
    """Compare the needed bytes with `free`. `room`: a setting that would make them fit, if known."""
    needed = total_bytes(parts)
    text = f"about {format_bytes(needed)} of {format_bytes(free)} free ({format_sizes(parts)})"
    numbers = {"needed": needed, "free": free, **sizes_of(parts)}
    if needed > free:
        enough = [part.mend for part in parts if part.mend and needed - part.size <= free]
        smaller = f"but {room}" if room else [*enough, "use a smaller model or batch"][0]
        return Finding("error", title, f"{text}; this does not fit, {smaller}, or free some", numbers)
    return Finding("warning" if needed > _TIGHT * free else "ok", title, text, numbers)


def answer_counts(recipe: Recipe, domain: str) -> tuple[str, dict[str, float]]:
    """Return the maximum answers that the specialist of `domain` samples, as a sentence and numbers."""
    own = recipe.for_domain(domain)
    config, longest = own.specialist, own.rollout.max_new_tokens
    answers = config.steps * config.prompts_per_step * config.group_size
    told = (
        f"{config.steps:,} steps of {config.prompts_per_step:,} prompts x {config.group_size:,} answers of at"
        f" most {longest:,} tokens: {answers * longest:,} tokens"
    )
    numbers: dict[str, float] = {"answers": answers, "tokens": answers * longest}
    if config.refill is not None:
        most = config.steps * config.most_prompts * config.group_size
        told += f"; refill takes up to {config.refill.limit} times as many: {most * longest:,}"
        numbers |= {"answers": most, "tokens": most * longest}
    if config.replay is not None:
        again = config.replay.replay_count(config.prompts_per_step)
        told += f"; up to {again:,} prompts of a step are asked again, in the place of others"
        numbers["replayed prompts"] = config.steps * again
    if config.difficulty is not None:
        count = min(config.difficulty.prompts, _prompt_count(recipe, domain)) * config.difficulty.samples
        told += f"; before the first step {count:,} answers measure the difficulty of prompts"
        told += f": {count * longest:,} tokens"
        numbers |= {"answers before": count, "tokens before": count * longest}
    return told, numbers


def _prompt_count(recipe: Recipe, domain: str) -> int:
    """Return the training prompts of a domain, as far as the recipe gives them."""
    config = recipe.domains[domain]
    return 1 << 62 if config.is_file else config.prompts


def check_answers(recipe: Recipe) -> list[Finding]:
    """Report the answers of specialists that choose their prompts: one finding each."""
    findings = []
    for name in recipe.grpo_domains():
        config = recipe.for_domain(name).specialist
        if config.refill or config.replay or config.difficulty:
            told, numbers = answer_counts(recipe, name)
            findings.append(Finding("ok", f"answers of specialist {name}", told, numbers))
    return findings
