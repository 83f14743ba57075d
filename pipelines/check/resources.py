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
    average_bytes,
    cached_bytes,
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
    total_bytes,
    with_critic,
)
from opd.pipelines.check.models import Models
from opd.pipelines.check.shapes import ModelShape
from opd.pipelines.records.stage_names import model_stage, of_round, specialist_stage
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

    path: str = ""
    """The path in the run folder if it is written once. Empty if every stage has its own."""
    needed_by: tuple[str, ...] = ()
    """Stages that write or read it. Once all are done it is no longer written."""


def disk_parts(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> list[DiskPart]:
    """Return every model folder, retained checkpoint and published or fetched teacher of a run."""
    parts = _stage_parts(recipe, student) + _teacher_parts(recipe, student, teachers)
    if recipe.runtime.offload.trainer and not on_cuda(recipe.model.device):
        away = max(map(offloaded_bytes, stages_of(recipe, student, teachers)))
        parts.append(DiskPart("what the trainer puts away", away))
    distill = recipe.distill
    logs = {"log of teachers' answers": ("merge", distill.taught_steps)} if distill.teachers_write else {}
    if "off_policy" in recipe.baselines.methods:
        logs["log of off_policy's answers"] = (model_stage("off_policy"), distill.steps)
    for name, (stage, steps) in logs.items() if recipe.rollout.log is not None else ():
        size = teacher_answer_sizes(recipe, steps)[1]
        parts.append(DiskPart(name, size, path=f"stages/{stage}/wal", needed_by=(stage,)))
    return parts


def _stage_parts(recipe: Recipe, student: ModelShape) -> list[DiskPart]:
    """Return the output of each stage: its model, its checkpoints, and one checkpoint in progress."""
    width, learnt, lora = WIDTH[model_dtype(recipe)], learning_width(recipe), recipe.model.lora is not None
    learns, methods = student.adapters if lora else student.parameters, recipe.baseline_methods
    trained = sum(_model_stages(recipe).values())
    adapters = sum(map(recipe.is_started, recipe.specialist_domains()))
    adapters += len(recipe.specialist_domains()) * recipe.rounds
    adapters += recipe.baselines.mixed_grpo_all_tokens
    folders = adapters + 1 + recipe.rounds + len(methods)
    mixed = ("mixed_grpo" in methods) + recipe.baselines.mixed_grpo_all_tokens
    critics = len(with_critic(recipe)) * recipe.rounds + mixed * (recipe.specialist.advantage.type == "gae")
    # Trained weights, and two moments of each.
    values = (trained - recipe.trains_base) * learns + (recipe.trains_base + critics) * student.parameters
    averages = average_bytes(recipe, student)
    averages += sum(average_bytes(one, student) for one in recipe.opd_recipes().values())
    checkpoints = 3 * learnt * values + averages
    return [
        DiskPart("model folders", folders * student.parameters * width + adapters * lora * learns * learnt),
        DiskPart("checkpoints", recipe.runtime.keep_checkpoints * checkpoints),
        # Before the oldest checkpoint of the current stage goes.
        DiskPart("a checkpoint being written", checkpoints // max(1, trained)),
    ]


def _teacher_parts(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> list[DiskPart]:
    """Return the disk space of teachers: published, fetched, cached and copied."""
    weights = student.parameters * WIDTH[model_dtype(recipe)]
    parts: list[DiskPart] = []
    followers = recipe.opd_recipes()
    led = (
        of_round("merge", recipe.rounds),
        *(specialist_stage(name) if name else model_stage("mixed_grpo") for name in followers),
    )
    used = {*recipe.used_teachers(), *teachers}
    streamed = {name for name in used if recipe.teacher_settings(name).streams_weights}
    ours = len(streamed - set(teachers))
    published = sum(
        shape.stored for name, shape in teachers.items() if name in streamed and not shape.published
    )
    if recipe.model.lora is None:
        published += ours * weights * recipe.rounds
    elif ours:  # adapters share one base
        published += (weights + ours * student.adapters * learning_width(recipe)) * recipe.rounds
    if streamed and recipe.storage.published is None:
        parts.append(DiskPart("published teachers", published, path="published", needed_by=led))
    reads_whole = {*recipe.baseline_methods} & {*WEIGHT_MERGES, "off_policy"}
    fetched = used if recipe.distill.teachers_write or reads_whole else used - streamed
    if fetched:
        size = sum(shape.stored for name, shape in teachers.items() if name in fetched and shape.published)
        everybody = tuple(_model_stages(recipe))
        parts.append(DiskPart("fetched teachers", size, path="downloaded", needed_by=everybody))
    if streamed:
        # A stage's cache goes when the stage is done.
        caches = max(1, min(recipe.runtime.workers, sum(map(bool, followers))))
        size, mend = caches * recipe.storage.cache_mb * MIB, "lower storage.cache_mb"
        parts.append(DiskPart("hidden states", size, mend=mend, path="stages/merge/cache", needed_by=led))
    if cached := _cached_weights(recipe, teachers, published):
        name, mend = "copies of teachers in object stores", "lower runtime.weights_cache_mb"
        parts.append(DiskPart(name, cached, mend=mend, path=_COPIES, needed_by=led))
    return parts


def _cached_weights(recipe: Recipe, teachers: Mapping[str, ModelShape], published: int) -> int:
    """Return the bytes of weights that a node caches from object stores. `published`: those of the run."""
    ours, most = recipe.storage.published, recipe.runtime.weights_cache_mb
    sizes = {"": published if ours is not None and folder_of(ours) is None else 0}
    for name, shape in teachers.items():
        settings = recipe.teacher_settings(name)
        if shape.digest and settings.streams_weights:
            size = shape.stored
            if settings.elsewhere:  # only the head is read here
                size = size * shape.vocabulary * shape.hidden_size // max(shape.parameters, 1)
            sizes[shape.digest] = max(sizes.get(shape.digest, 0), size)
    size = sum(sizes.values())
    return size if most is None else min(size, most * MIB)


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
    written = sum(_folder_bytes(run_dir / "stages" / stage / "checkpoints") for stage in trained)
    sizes = {
        folders: folders.size * len(undone) // max(1, len(stages)),
        checkpoints: max(0, len(trained) * each - written),
        writing: writing.size * bool(trained),
    }
    for part in others:
        needed = not part.path or any(stage in undone for stage in part.needed_by)
        written = _folder_bytes(run_dir / part.path) if part.path and needed else 0
        sizes[part] = max(0, part.size - written) * needed
    return [replace(part, size=size) for part, size in sizes.items()]


def _model_stages(recipe: Recipe) -> dict[str, bool]:
    """Return the stages that leave a model, and whether they have checkpoints."""
    methods = recipe.baseline_methods
    path = recipe.model.path
    made_here = recipe.trains_base or path is None or not is_whole(Path(path))
    started = filter(recipe.is_started, recipe.specialist_domains())
    learners = [specialist_stage(domain) for domain in recipe.specialist_domains()]
    return {
        **({"base": recipe.trains_base} if made_here else {}),
        **{model_stage(f"sft:{domain}"): True for domain in started},
        **{
            of_round(stage, number): True
            for number in range(1, recipe.rounds + 1)
            for stage in (*learners, "merge")
        },
        **{model_stage(method): method not in WEIGHT_MERGES for method in methods},
    }


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below `folder`, 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_precision(recipe: Recipe, models: Models) -> list[Finding]:
    """Check the precision of training, and estimate its cost."""
    import torch

    from opd.models.converted_folder import FP8Weights

    dtype, student = model_dtype(recipe), models.student
    if student is None:
        return []
    if learning_width(recipe) < 4 and average_bytes(recipe, student):
        detail = f"a moving average of weights that learn in {dtype} would stand still; set it to mixed"
        return [Finding("error", "train.precision", detail)]
    if dtype == "float32" or has_masters(recipe):
        text = dtype if dtype == "float32" else f"layers in {dtype}, what learns in float32"
        if recipe.model.quantize is not None:
            count = len(FP8Weights(models.config).names)
            text += f"; {count} matrices of layers are rounded to {recipe.model.quantize.upper()}"
        if dtype == "float16" and recipe.train.backend != "deepspeed":
            detail = f"{text}; the loss is not scaled, so small gradients are lost: use bfloat16"
            return [Finding("warning", "precision", detail)]
        return [Finding("ok", "precision", text)]
    mixed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "mixed"})})
    saved = total_bytes(memory_parts(mixed, student, models.teachers))
    saved -= total_bytes(memory_parts(recipe, student, models.teachers))
    rates = {"the warm-up": recipe.base.optim.lr} if recipe.base is not None else {}
    for domain, sft in recipe.demonstration_settings().items():
        rates[f"sft of {domain or 'the base'}"] = sft.optim.lr
    for name in recipe.grpo_domains():
        has_settings = recipe.domains[name].specialist is not None
        stage = f"the specialist of {name}" if has_settings else "the specialists"
        rates[stage] = recipe.for_domain(name).specialist.optim.lr
    rates["the merge"] = recipe.distill.optim.lr
    if recipe.model.lora is not None:
        rates = {}  # adapters begin at zero, with fine resolution
    sentences = [
        f"train.precision pure saves {format_bytes(max(saved, 0))} and rounds every update to {dtype}"
    ]
    for stage, lr in rates.items():
        if recipe.model.path is not None:
            weights = some_weights(Path(recipe.model.path))
        else:  # as new weights are drawn
            spread = (recipe.model.config or {}).get("initializer_range", 0.02)
            weights = [torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * spread]
        share = lost_share(weights, dtype, lr)
        sentences.append(f"{share:.0%} of the weights do not move at the lr {lr:g} of {stage}")
    return [Finding("warning", "precision", "; ".join([*sentences, "leave it at mixed"]))]


def check_resources(recipe: Recipe, models: Models, run_dir: Path) -> list[Finding]:
    """Compare the estimates with the machine's free space."""
    student, teachers = models.student, models.teachers
    if student is None:
        return []
    disk, apart = remaining_disk(recipe, student, teachers, run_dir), []
    if recipe.runtime.weights_cache is not None:
        apart.append(_check_copies(recipe, [part for part in disk if part.path == _COPIES]))
        disk = [part for part in disk if part.path != _COPIES]
    free, ranks = available_memory(recipe.model.device), recipe.train.ranks or 1
    cuda, libraries = on_cuda(recipe.model.device), 0
    if not cuda:  # on CUDA each rank has its own GPU
        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
        limit = min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=sys.maxsize)
        # The free memory counts one process, which has its libraries already.
        libraries = _LIBRARIES if ranks > 1 or limit < free else 0
        free = min(free // ranks, limit)
    memory = [*memory_parts(recipe, student, teachers), Part("libraries", libraries)]
    phases = format_phases(recipe, student, teachers)
    fits = phases.sizes.get("with offload", free + 1) <= free - libraries
    title, findings = "memory" if ranks == 1 else "memory of a rank", []
    kv_cache, response = recipe.runtime.decode.kv_cache_mb, recipe.longest_response()
    needed = response * cached_bytes(recipe, student)
    if kv_cache is not None and recipe.rollout.engine.type == "torch" and needed > kv_cache * MIB:
        detail = (
            f"{kv_cache} MiB: a response takes up to {format_bytes(needed)} of keys and values beside its"
            " prompt; set it to more"
        )
        findings.append(Finding("error", "runtime.decode.kv_cache_mb", detail))
    findings.append(_compare_sizes(title, memory, free, f"but {phases.saving}" if fits else _LESS))
    findings.append(Finding("ok", "memory by phase", phases.text, dict(phases.sizes)))
    if recipe.distill.batch.max_tokens == "auto":
        tokens = merge_tokens(recipe, student, teachers)
        detail = f"up to {number_of(tokens, 'token')}"
        findings.append(Finding("ok", "micro-batches", detail, {"tokens": tokens}))
    host: list[Part] = []
    if recipe.runtime.offload.trainer and cuda:
        away = max(map(offloaded_bytes, stages_of(recipe, student, teachers)))
        host.append(Part("what the trainer puts away", away * ranks))
    if sleeping := _sleeping_bytes(recipe, student, teachers):
        host.append(Part("weights of servers that sleep", sleeping))
    if host:
        findings.append(_compare_sizes("memory of the host", host, available_memory("cpu")))
    free_disk = shutil.disk_usage(existing_parent(run_dir)).free
    return [*findings, _compare_sizes("disk", disk, free_disk), *apart]


def _sleeping_bytes(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> int:
    """Return the host memory of teachers' servers while all of them sleep. They sleep while the student
    trains. Each server leaves its full model there.
    """
    total, in_turn = 0, recipe.servers_in_turn
    for name, entry in recipe.teachers.items():
        servers = getattr(entry, "servers", None)
        if servers not in in_turn:
            continue
        group, shape = recipe.servers[servers], teachers.get(name, student)
        if group.arguments.get("enable-memory-saver") is not False:  # without it weights stay where they are
            total += group.count * (shape.stored or shape.parameters * WIDTH[model_dtype(recipe)])
    return total


def _check_copies(recipe: Recipe, copies: Sequence[DiskPart]) -> Finding:
    """Check that the recipe's folder for copies of teachers can take them."""
    title, path = "runtime.weights_cache", str(recipe.runtime.weights_cache)
    if "://" in path:
        return Finding("error", title, f"{path} is no folder; give one on each node's own disk")
    folder = Path(path).expanduser()
    parent = existing_parent(folder)
    wrong = write_error(parent)
    if wrong is not None:
        detail = f"{parent} cannot be written ({wrong}), so nothing is kept there; choose another place"
        return Finding("warning", title, detail)
    remaining = [replace(part, size=max(0, part.size - _folder_bytes(folder))) for part in copies]
    return _compare_sizes(title, remaining, shutil.disk_usage(parent).free)


def available_memory(device: str) -> int:
    """Return the free bytes on the recipe's device. On a CPU the limit of the process's group counts."""
    free = free_on_cuda(device) if on_cuda(device) else None
    return free_memory() if free is None else free


_LESS = "lower batch.max_tokens or runtime.decode.kv_cache_mb, set model.lora or take a smaller model"


def _compare_sizes(title: str, parts: Sequence[Part], free: int, saving: str = "") -> Finding:
    """Compare the needed bytes with `free`. `saving`: settings that would take less, if known."""
    needed = total_bytes(parts)
    text = f"about {format_bytes(needed)} of {format_bytes(free)} free ({format_sizes(parts)})"
    numbers = {"needed": needed, "free": free, **sizes_of(parts)}
    if needed > free:
        enough = [part.mend for part in parts if part.mend and needed - part.size <= free]
        smaller = saving or [*enough, "use a smaller model or batch"][0]
        return Finding("error", title, f"{text}; this does not fit, {smaller}, or free some", numbers)
    return Finding("warning" if needed > _TIGHT * free else "ok", title, text, numbers)


def answer_counts(recipe: Recipe, domain: str) -> tuple[str, dict[str, float]]:
    """Return the maximum answers that the specialist of `domain` samples, as a sentence and numbers."""
    of_domain = recipe.for_domain(domain)
    config, longest = of_domain.specialist, of_domain.rollout.max_new_tokens
    answers = config.steps * config.prompts_per_step * config.group_size
    sentence = (
        f"{config.steps:,} steps of {config.prompts_per_step:,} prompts x {config.group_size:,} answers of at"
        f" most {longest:,} tokens: {answers * longest:,} tokens"
    )
    numbers: dict[str, float] = {"answers": answers, "tokens": answers * longest}
    if config.refill is not None:
        most = config.steps * config.most_prompts * config.group_size
        sentence += f"; refill takes up to {config.refill.limit} times as many: {most * longest:,}"
        numbers |= {"answers": most, "tokens": most * longest}
    if config.replay is not None:
        again = config.replay.replay_count(config.prompts_per_step)
        sentence += f"; up to {again:,} prompts of a step are asked again, in the place of others"
        numbers["replayed prompts"] = config.steps * again
    if config.difficulty is not None:
        prompts = config.difficulty.prompts
        if not recipe.domains[domain].is_file:  # a file's number is not in the recipe
            prompts = min(prompts, recipe.domains[domain].prompts)
        count = prompts * config.difficulty.samples
        sentence += f"; before the first step {count:,} answers measure the difficulty of prompts"
        sentence += f": {count * longest:,} tokens"
        numbers |= {"answers before": count, "tokens before": count * longest}
    return sentence, numbers


def recorded_line(recipe: Recipe, student: ModelShape) -> str:
    """Return what an engine records beside the tokens of a specialist's step with this recipe's settings, and
    where, as a sentence; empty if it records nothing. Responses are as long as they may get.
    """
    config, rollout = recipe.specialist, recipe.rollout
    kept = min(rollout.most_kept, student.vocabulary) * recipe.replays_masks
    choices = rollout.replay_experts is True or (rollout.replay_experts and rollout.engine.type == "torch")
    parts = [
        Part("sampling masks", 4 * (kept + 1) * rollout.max_new_tokens if kept else 0),
        Part("choices of experts", student.choice_bytes * rollout.max_sequence if choices else 0),
    ]
    parts = [
        replace(part, size=part.size * config.most_prompts * config.group_size) for part in parts if part.size
    ]
    places = [f"in {recipe.storage.trajectories.replace('disk', 'samples on disk')} for a step"]
    if rollout.log is not None:
        steps = min(config.steps, config.checkpoint_every)
        places.append(f"in the log at most {format_bytes(steps * total_bytes(parts))} between checkpoints")
    return f"at most {format_sizes(parts)} {', '.join(places)}" if parts else ""


def check_answers(recipe: Recipe) -> list[Finding]:
    """Report the answers of specialists that choose their prompts: one finding each."""
    findings = []
    for name in recipe.grpo_domains():
        config = recipe.for_domain(name).specialist
        if config.refill or config.replay or config.difficulty:
            sentence, numbers = answer_counts(recipe, name)
            findings.append(Finding("ok", f"answers of specialist {name}", sentence, numbers))
    return findings
