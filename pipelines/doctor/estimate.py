"""How much memory and disk a run will take, from the shapes of its models."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from opd.config import BatchConfig, Recipe
from opd.config.recipe import WEIGHT_MERGES
from opd.foreign import machine_memory
from opd.pipelines.doctor.checks import Finding, existing_parent, unwritable
from opd.pipelines.doctor.engine import engine_parts, on_cuda, token_bytes
from opd.pipelines.doctor.models import Models, ModelShape
from opd.pipelines.doctor.phases import by_phase, handed_over, put_away
from opd.pipelines.records.stage_names import model_stage, specialist_stage
from opd.pipelines.stages.precision import (
    WIDTH,
    has_masters,
    is_cut,
    learning_width,
    lost_share,
    model_dtype,
    some_weights,
)
from opd.storage.object_store import folder_of

_ACTIVATIONS = 17
"""Values a decoder layer keeps per token and hidden unit for its backward pass, with fused attention
(Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4: 34 bytes in half precision)."""
_LIBRARIES = 290 << 20
"""Bytes that a process has for itself once it has loaded PyTorch and transformers, as measured on Linux."""
_TIGHT = 0.8
_MIB = 1 << 20
_WEIGHTS = "copies of teachers in object stores"
_WRITTEN = "a checkpoint being written"
_PLACES = {
    "published teachers": "published",
    "fetched teachers": "downloaded",
    "hidden states": "stages/merge/cache",
    _WEIGHTS: "weights_cache",
    "log of teachers' answers": "stages/merge/wal",
    "log of off_policy's answers": "stages/baseline-off_policy/wal",
}
"""Where parts of the disk that are written once lie in a run folder."""
_SMALLER = {_WEIGHTS: "lower runtime.weights_cache_mb", "hidden states": "lower storage.cache_mb"}
"""What makes room where one of these parts alone is too much."""

Parts = dict[str, int]
"""Bytes by what they are for."""


def memory_parts(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> Parts:
    """Bytes of each part of the stage that holds the most at once: the merge, what trains all weights of the
    base, or the specialists that train side by side. With `runtime.offload` of its largest phase.
    """
    offload, stages = recipe.runtime.offload, _stages(recipe, student, teachers)
    if not (offload.engine or offload.trainer):
        return max(stages, key=_total)
    return max((held for stage in stages for held in by_phase(recipe, stage).values()), key=_total)


def memory_by_phase(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]
) -> dict[str, Parts]:
    """By phase of a step what the stage holds whose largest phase is the largest."""
    stages = [by_phase(recipe, stage) for stage in _stages(recipe, student, teachers)]
    return max(stages, key=lambda phases: max(map(_total, phases.values())))


def told_by_phase(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]
) -> tuple[str, Parts]:
    """The phases in words, with `runtime.offload` too where that changes something; and their bytes."""
    sizes = {phase: _total(held) for phase, held in memory_by_phase(recipe, student, teachers).items()}
    told = ", ".join(f"{phase} {readable(size)}" for phase, size in sizes.items())
    other = handed_over(recipe)
    most = max(map(_total, memory_by_phase(other, student, teachers).values())) if other is not None else 0
    if other is not None and most < max(sizes.values()):
        told += f"; at most {readable(most)} with runtime.offload {_asked(other)}"
        sizes["with offload"] = most
    return told, sizes


def _asked(recipe: Recipe) -> str:
    given = recipe.runtime.offload.model_dump()
    return "{" + ", ".join(f"{name}: true" for name, value in given.items() if value) + "}"


def _stages(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> list[Parts]:
    width, lora = WIDTH[model_dtype(recipe)], recipe.model.lora is not None
    stages = [_training(recipe, student, recipe.distill.batch, lora) | _led(recipe, student, teachers)]
    if recipe.distill.prefixes == "student":
        stages[0] |= _frozen(recipe, student, kept=False)
    if recipe.distill.prefixes == "teacher":
        # One writes at a time, beside the student; what was written stays to the end.
        largest = max(teachers.get(name, student).parameters for name in recipe.taught())
        stages[0]["a teacher that writes"] = largest * width + stages[0]["KV cache"]
        stages[0]["teachers' answers"] = answers_held(recipe)[1]
    if recipe.base is not None:
        stages.append(_training(recipe, student, recipe.base.batch, lora=False))
    for domain, sft in recipe.demonstrated().items():
        stages.append(_training(recipe, student, sft.batch, lora and bool(domain)))
    return [*stages, *_grpo_stages(recipe, student, teachers)]


def _total(parts: Parts) -> int:
    return sum(parts.values())


def _grpo_stages(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> list[Parts]:
    """The specialists that train side by side, as large as they may be, and the baseline of all domains."""
    trained, lora = recipe.grpo_domains(), recipe.model.lora is not None
    demonstrated = [recipe.domains[name].sft for name in recipe.specialist_domains() if name not in trained]
    side = [_grpo(recipe.for_domain(name), student, teachers) for name in trained]
    side += [_training(recipe, student, sft.batch, lora) for sft in demonstrated if sft is not None]
    together: Parts = {}
    for parts in sorted(side, key=_total)[-recipe.runtime.workers :]:
        for name, size in parts.items():
            together[name] = together.get(name, 0) + size
    baseline = "mixed_grpo" in recipe.baselines.methods or recipe.baselines.mixed_grpo_all_tokens
    return [together] * bool(side) + [_grpo(recipe, student, teachers)] * baseline


def _grpo(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> Parts:
    """A GRPO stage with the `specialist` of this recipe."""
    config = recipe.specialist
    parts = _training(recipe, student, config.batch, recipe.model.lora is not None)
    if config.opd is not None:
        parts |= _led(recipe.following_teachers(), student, teachers)
    if config.advantage.type == "gae":
        parts["critics"] = _critic(recipe, student)
    parts |= _frozen(recipe, student, kept=bool(config.reference_kl.coef))
    if config.refill is not None:
        tokens = recipe.rollout.max_new_tokens if recipe.storage.trajectories == "memory" else 0
        parts["answers of a step"] = config.most_prompts * config.group_size * (_SAMPLE + _TOKEN * tokens)
    return parts


def _frozen(recipe: Recipe, student: ModelShape, kept: bool) -> Parts:
    """The model that a stage began as, once, where `evaluation.base_kl_every` or a reference (`kept`) needs
    it; of several ranks each has its share.
    """
    held = kept or recipe.evaluation.base_kl_every > 0
    size = student.parameters * WIDTH[model_dtype(recipe)] // (recipe.train.ranks or 1)
    return {"frozen copy of the start": size} if held else {}


_TOKEN, _SAMPLE = 13, 2000
"""Bytes of a response's token in memory (id, log-probability, version, mask), and of a sample beside them."""


def answers_held(recipe: Recipe) -> tuple[int, int]:
    """How many answers of teachers a merge with `prefixes: teacher` holds from before its first step, and
    their bytes, if all are as long as they may get.
    """
    config = recipe.distill
    counts = {
        name: recipe.for_domain(name).distill.prompts_per_domain * config.steps * config.samples_per_prompt
        for name in recipe.domains
    }
    sizes = [
        count * (_SAMPLE + _TOKEN * recipe.for_domain(name).rollout.max_new_tokens)
        for name, count in counts.items()
    ]
    return sum(counts.values()), sum(sizes)


def answers_asked(recipe: Recipe, domain: str) -> tuple[str, dict[str, float]]:
    """What the specialist of `domain` writes while it is trained, at most: a sentence, and its numbers."""
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
        again = config.replay.prompts(config.prompts_per_step)
        told += f"; up to {again:,} prompts of a step are asked again, in the place of others"
        numbers["replayed prompts"] = config.steps * again
    if config.difficulty is not None:
        count = min(config.difficulty.prompts, _prompts(recipe, domain)) * config.difficulty.samples
        told += f"; before the first step {count:,} answers measure the difficulty of prompts"
        told += f": {count * longest:,} tokens"
        numbers |= {"answers before": count, "tokens before": count * longest}
    return told, numbers


def _prompts(recipe: Recipe, domain: str) -> int:
    """Training prompts of a domain, as far as the recipe says it."""
    config = recipe.domains[domain]
    return 1 << 62 if config.is_file else config.prompts


def check_asked(recipe: Recipe) -> list[Finding]:
    """What specialists write that choose their prompts: one finding each."""
    findings = []
    for name in recipe.grpo_domains():
        config = recipe.for_domain(name).specialist
        if config.refill or config.replay or config.difficulty:
            told, numbers = answers_asked(recipe, name)
            findings.append(Finding("ok", f"answers of specialist {name}", told, numbers))
    return findings


def _training(recipe: Recipe, student: ModelShape, batch: BatchConfig, lora: bool) -> Parts:
    """A student that writes and learns, without what it learns from."""
    width, own = WIDTH[model_dtype(recipe)], learning_width(recipe)
    learns = student.adapters if lora else student.parameters
    # An engine that is sent adapters keeps the layers they belong to twice, as they were and merged.
    received = student.adapted + student.adapters if lora else 0
    weights, gradients, moments = _sharing(recipe)
    ranks, copy = recipe.train.ranks or 1, (student.parameters + received) * width
    engine = {"engine copy": copy, **engine_parts(recipe, student)}
    if is_cut(recipe, ranks, student.parameters * width):  # it is the trainer's, and has no other form
        of_its_own = 0 if recipe.train.backend == "torch" else copy // ranks
        engine = {"engine copy": of_its_own, "KV cache": engine["KV cache"]}
    return {
        "weights": (learns * own + (student.parameters * width if lora else 0)) // weights,
        f"copies in {model_dtype(recipe)}": _copies(recipe, student, learns, width),
        "gradients": learns * own // gradients,
        "AdamW": 2 * learns * own // moments,
        **engine,
        "activations": batch.max_tokens * student.layers * student.hidden_size * _ACTIVATIONS * width,
    }


def _sharing(recipe: Recipe) -> tuple[int, int, int]:
    """How many of `train.ranks` share what one has of weights, gradients and AdamW's moments."""
    train, ranks = recipe.train, recipe.train.ranks or 1
    if train.backend == "megatron":
        width = train.tensor_parallel * train.pipeline_parallel
        return width, width, width
    if train.backend == "deepspeed":
        return ranks if train.zero_stage == 3 else 1, ranks if train.zero_stage > 1 else 1, ranks
    return ranks, ranks, ranks


def _with_critic(recipe: Recipe) -> list[str]:
    """The domains whose specialist has a critic."""
    names = recipe.grpo_domains()
    return [name for name in names if recipe.for_domain(name).specialist.advantage.type == "gae"]


def _critic(recipe: Recipe, student: ModelShape) -> int:
    """Weights, gradients and moments of a critic, all of which is trained, whatever the student trains."""
    learns = student.parameters
    return 4 * learns * learning_width(recipe) + _copies(recipe, student, learns, WIDTH[model_dtype(recipe)])


def _copies(recipe: Recipe, student: ModelShape, learns: int, width: int) -> int:
    """What master weights are rounded to while layers compute: everything, or with FSDP2 the embedding and
    the head for a whole pass, and of the layers the one that computes and the next.
    """
    if not has_masters(recipe):
        return 0
    if recipe.train.backend != "torch":
        return learns * width
    outside = min(student.vocabulary * student.hidden_size, student.parameters)
    return (outside + 2 * (student.parameters - outside) // max(student.layers, 1)) * width


def _led(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> Parts:
    """What following its teachers takes beside training, in a stage with this recipe."""
    return {
        "teachers": _teachers(recipe, student, teachers, WIDTH[model_dtype(recipe)]),
        "logits of a chunk": 3 * _chunk(recipe) * student.vocabulary * 4,
    }


def _chunk(recipe: Recipe) -> int:
    """Tokens whose logits exist at a time, at most."""
    from opd.kernels.projection import CHUNK, CHUNK_DEVICE

    return recipe.distill.batch.kl_chunk or (CHUNK_DEVICE if on_cuda(recipe.model.device) else CHUNK)


def _teachers(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], width: int) -> int:
    shapes = {name: teachers.get(name, student) for name in recipe.taught()}
    sizes = {name: shape.parameters * width for name, shape in shapes.items()}
    streamed = [name for name in sizes if recipe.teacher(name).streams]
    kept = sum(size for name, size in sizes.items() if name not in streamed)
    if not streamed:
        return kept
    # Layers in a buffer of at most one teacher, and heads: the one in use and the next.
    head = width * max(shape.vocabulary * shape.hidden_size for shape in (student, *shapes.values()))
    buffer = min(recipe.storage.prefetch_mb * _MIB + head, max(sizes[name] for name in streamed))
    return kept + buffer + min(2, len(streamed)) * head


def disk_parts(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> Parts:
    """Bytes of every model folder, every kept checkpoint and every published or fetched teacher of a run."""
    width, own, lora = WIDTH[model_dtype(recipe)], learning_width(recipe), recipe.model.lora is not None
    weights, learns = student.parameters * width, student.adapters if lora else student.parameters
    specialists, methods = len(recipe.specialist_domains()), recipe.baselines.methods
    started = sum(map(recipe.is_started, recipe.specialist_domains()))
    trained = specialists + started + 1 + recipe.baselines.mixed_grpo_all_tokens
    trained += sum(method in ("mixed_grpo", "off_policy") for method in methods)
    folders = specialists + started + 2 + len(methods) + recipe.baselines.mixed_grpo_all_tokens
    # Weights as they are learnt, and two moments of each.
    checkpoints = 3 * own * (trained * learns + recipe.trains_base * student.parameters)
    mixed = ("mixed_grpo" in methods) + recipe.baselines.mixed_grpo_all_tokens
    critics = len(_with_critic(recipe)) + mixed * (recipe.specialist.advantage.type == "gae")
    checkpoints += 3 * own * critics * student.parameters
    parts = {
        "model folders": folders * weights + (folders - 2 - len(methods)) * lora * learns * own,
        "checkpoints": recipe.runtime.keep_checkpoints * checkpoints,
        # Before the oldest one goes, of the stage that is at work.
        _WRITTEN: checkpoints // max(1, trained + recipe.trains_base),
    }
    used = {*recipe.used_teachers(), *teachers}
    streamed = {name for name in used if recipe.teacher(name).streams}
    ours = len(streamed - set(teachers))
    published = ((weights + ours * learns * own) if lora else ours * weights) * bool(ours) + sum(
        shape.stored for name, shape in teachers.items() if name in streamed and not shape.published
    )
    if streamed and recipe.storage.published is None:
        parts["published teachers"] = published
    whole = recipe.distill.prefixes == "teacher" or {*methods} & {*WEIGHT_MERGES, "off_policy"}
    fetched = used if whole else used - streamed
    if fetched:
        parts["fetched teachers"] = sum(
            shape.stored for name, shape in teachers.items() if name in fetched and shape.published
        )
    if streamed:
        parts["hidden states"] = _caches(recipe) * recipe.storage.cache_mb * _MIB
    if kept := _kept_weights(recipe, teachers, published):
        parts[_WEIGHTS] = kept
    if recipe.runtime.offload.trainer and not on_cuda(recipe.model.device):
        parts["what the trainer puts away"] = _put_away(recipe, student, teachers)
    if recipe.distill.prefixes == "teacher" and recipe.rollout.log is not None:
        parts["log of teachers' answers"] = answers_held(recipe)[1]
    if "off_policy" in methods and recipe.rollout.log is not None:
        parts["log of off_policy's answers"] = answers_held(recipe)[1]
    return parts


def _kept_weights(recipe: Recipe, teachers: Mapping[str, ModelShape], published: int) -> int:
    """Bytes of weights that a node keeps of what it reads in object stores; `published`: of the teachers that
    the run publishes.
    """
    ours, most = recipe.storage.published, recipe.runtime.weights_cache_mb
    found = {"": published if ours is not None and folder_of(ours) is None else 0}
    for name, shape in teachers.items():
        settings = recipe.teacher(name)
        if shape.digest and settings.streams:
            size = shape.stored
            if settings.elsewhere:  # the head alone is read here
                size = size * shape.vocabulary * shape.hidden_size // max(shape.parameters, 1)
            found[shape.digest] = max(found.get(shape.digest, 0), size)
    total = sum(found.values())
    return total if most is None else min(total, most * _MIB)


def _put_away(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> int:
    """Bytes of weights and moments that are elsewhere while the student writes, at most."""
    return max(
        sum(stage.get(name, 0) for name in put_away(stage)) for stage in _stages(recipe, student, teachers)
    )


def _caches(recipe: Recipe) -> int:
    """How many caches of hidden states there are at once: each stage's goes when it is done."""
    beside = min(recipe.runtime.workers, sum(map(bool, recipe.following())))
    return max(beside, 1)


def disk_left(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], run_dir: Path
) -> Parts:
    """`disk_parts` of what a run in `run_dir` still writes, without what is there or done."""
    parts = disk_parts(recipe, student, teachers)
    if not (run_dir / "stages").is_dir():
        return parts
    done = {path.parent.name for path in run_dir.glob("stages/*/done.json")}
    stages = _writers(recipe)
    undone = [stage for stage in stages if stage not in done]
    trained = [stage for stage in undone if stages[stage]]
    each = parts["checkpoints"] // max(1, sum(stages.values()))
    parts["model folders"] = parts["model folders"] * len(undone) // max(1, len(stages))
    there = sum(_size(run_dir / "stages" / stage / "checkpoints") for stage in trained)
    parts["checkpoints"] = max(0, len(trained) * each - there)
    parts[_WRITTEN] *= bool(trained)
    followers = [
        specialist_stage(domain) if domain else model_stage("mixed_grpo") for domain in recipe.following()
    ]
    led = ["merge", *followers]
    needed_by = {part: ["merge"] for part in _PLACES} | {"fetched teachers": [*stages]}
    needed_by["log of off_policy's answers"] = [model_stage("off_policy")]
    needed_by |= {"published teachers": led, "hidden states": led, _WEIGHTS: led}
    for part, place in _PLACES.items():
        if part in parts:
            wanted = any(stage in undone for stage in needed_by[part])
            parts[part] = max(0, parts[part] - _size(run_dir / place)) if wanted else 0
    return parts


def _writers(recipe: Recipe) -> dict[str, bool]:
    """The stages that leave a model, and whether they keep checkpoints."""
    methods = [*recipe.baselines.methods, *["mixed_grpo_all"] * recipe.baselines.mixed_grpo_all_tokens]
    made_here = recipe.trains_base or recipe.model.config is not None
    started = filter(recipe.is_started, recipe.specialist_domains())
    return {
        **({"base": recipe.trains_base} if made_here else {}),
        **{model_stage(f"sft:{domain}"): True for domain in started},
        **{specialist_stage(domain): True for domain in recipe.specialist_domains()},
        "merge": True,
        **{model_stage(method): method not in WEIGHT_MERGES for method in methods},
    }


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`, 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_precision(recipe: Recipe, models: Models) -> list[Finding]:
    """What weights learn in, and what that costs."""
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
    saved = sum(memory_parts(mixed, student, models.teachers).values())
    saved -= sum(memory_parts(recipe, student, models.teachers).values())
    shares = [
        f"{_lost(recipe, lr):.0%} of the weights do not move at the lr {lr:g} of {stage}"
        for stage, lr in _learning_rates(recipe).items()
        if recipe.model.lora is None  # adapters begin at zero, where every number is near
    ]
    detail = f"train.precision pure saves {readable(max(saved, 0))} and rounds every update to {dtype}"
    return [Finding("warning", "precision", "; ".join([detail, *shares, "leave it at mixed"]))]


def _learning_rates(recipe: Recipe) -> dict[str, float]:
    """The peak of every stage that trains."""
    found = {"the warm-up": recipe.base.optim.lr} if recipe.base is not None else {}
    found |= {f"sft of {domain or 'the base'}": sft.optim.lr for domain, sft in recipe.demonstrated().items()}
    for name in recipe.grpo_domains():
        own = recipe.domains[name].specialist
        title = "the specialists" if own is None else f"the specialist of {name}"
        found[title] = recipe.for_domain(name).specialist.optim.lr
    return found | {"the merge": recipe.distill.optim.lr}


def _lost(recipe: Recipe, lr: float) -> float:
    """Share of the base's weights that an update of `lr` does not move; of new ones as they are drawn."""
    import torch

    if recipe.model.path is not None:
        return lost_share(some_weights(Path(recipe.model.path)), model_dtype(recipe), lr)
    drawn = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    spread = (recipe.model.config or {}).get("initializer_range", 0.02)
    return lost_share([drawn * spread], model_dtype(recipe), lr)


def check_resources(recipe: Recipe, models: Models, run_dir: Path) -> list[Finding]:
    """Compares the estimates with what the machine has left."""
    if models.student is None:
        return []
    memory = memory_parts(recipe, models.student, models.teachers)
    disk = disk_left(recipe, models.student, models.teachers, run_dir)
    apart = [] if recipe.runtime.weights_cache is None else [_check_copies(recipe, disk.pop(_WEIGHTS, 0))]
    free, ranks = available_memory(recipe.model.device), recipe.train.ranks or 1
    shared = not on_cuda(recipe.model.device)  # each rank has a GPU of its own
    limit, libraries = _own_limit(), 0
    if shared:
        # What is free is what one process, that has its libraries already, and its limit leave.
        libraries = _LIBRARIES if ranks > 1 or limit < free else 0
        free = min(free // ranks, limit)
    memory["libraries"] = libraries
    told, sizes = told_by_phase(recipe, models.student, models.teachers)
    fits = sizes.get("with offload", free + 1) <= free - libraries
    room = told.rpartition("; ")[2] if fits else None
    return [
        *_check_cache(recipe, models.student),
        _compare("memory" if ranks == 1 else "memory of a rank", memory, free, room),
        Finding("ok", "memory by phase", told, dict(sizes)),
        *_check_host(recipe, models),
        _compare("disk", disk, shutil.disk_usage(existing_parent(run_dir)).free),
        *apart,
    ]


def _check_host(recipe: Recipe, models: Models) -> list[Finding]:
    """Whether the host has room for what leaves GPUs."""
    if models.student is None:
        return []
    parts: Parts = {}
    if recipe.runtime.offload.trainer and on_cuda(recipe.model.device):
        away = _put_away(recipe, models.student, models.teachers)
        parts["what the trainer puts away"] = away * (recipe.train.ranks or 1)
    if sleeping := _sleeping(recipe, models.student, models.teachers):
        parts["weights of servers that sleep"] = sleeping
    return [_compare("memory of the host", parts, available_memory("cpu"))] if parts else []


def _sleeping(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> int:
    """What teachers' servers leave in the host's memory while all of them sleep, as they do while the student
    learns: each server the whole of its model.
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
    """Whether the embedded engine has room for the keys and values of a response."""
    given, name = recipe.runtime.decode.kv_cache_mb, "runtime.decode.kv_cache_mb"
    if given is None or recipe.rollout.engine.type != "torch":
        return []
    needed = recipe.longest_response() * token_bytes(recipe, student)
    if needed <= given * _MIB:
        return []
    text = f"a response takes up to {readable(needed)} of keys and values beside its prompt; set it to more"
    return [Finding("error", name, f"{given} MiB: {text}")]


def _check_copies(recipe: Recipe, size: int) -> Finding:
    """Whether the folder that the recipe names for copies of teachers can take so many bytes."""
    title, given = "runtime.weights_cache", str(recipe.runtime.weights_cache)
    if "://" in given:
        return Finding("error", title, f"{given} is no folder; give one on each node's own disk")
    folder = Path(given).expanduser()
    parent = existing_parent(folder)
    wrong = unwritable(parent)
    if wrong is not None:
        detail = f"{parent} cannot be written ({wrong}), so nothing is kept there; choose another place"
        return Finding("warning", title, detail)
    return _compare(title, {_WEIGHTS: max(0, size - _size(folder))}, shutil.disk_usage(parent).free)


def available_memory(device: str) -> int:
    """Bytes free on the device the recipe trains on; on a CPU, within the limit of the process's group."""
    import torch

    if on_cuda(device):
        return torch.cuda.mem_get_info(None if device in ("auto", "cuda") else torch.device(device))[0]
    free = _meminfo()
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, max(0, limit - int((group / "memory.current").read_text())))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free


def _own_limit() -> int:
    """Bytes that a process may have."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=sys.maxsize)


def _meminfo() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return machine_memory()


def _compare(title: str, parts: Parts, free: int, room: str | None = None) -> Finding:
    """`room`: what would make it fit, where somebody knows."""
    needed = sum(parts.values())
    listed = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
    text = f"about {readable(needed)} of {readable(free)} free ({listed})"
    numbers = {"needed": needed, "free": free, **parts}
    if needed > free:
        enough = [name for name in _SMALLER if needed - parts.get(name, 0) <= free]
        smaller = _SMALLER[enough[0]] if enough else "use a smaller model or batch"
        smaller = f"but {room}" if room else smaller
        text = f"{text}; this does not fit, {smaller}, or free some"
        return Finding("error", title, text, numbers)
    return Finding("warning" if needed > _TIGHT * free else "ok", title, text, numbers)


def readable(size: float) -> str:
    """`1536` is `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
