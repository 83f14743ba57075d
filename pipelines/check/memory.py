"""Estimate the memory of a stage, by item and phase, from the shapes of its models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

from opd.config import BatchConfig, Recipe
from opd.config.teachers import ServedEngineConfig, TorchEngineConfig
from opd.config.train import OffloadConfig
from opd.pipelines.check.checks import format_bytes
from opd.pipelines.check.shapes import ModelShape
from opd.pipelines.stages.precision import (
    ABSENT_GPU,
    WIDTH,
    has_masters,
    is_cut,
    learning_width,
    merges_adapters,
    model_dtype,
    shares_base,
)
from opd.train.plan import PLAIN, fitting_tokens, logits_bytes, token_bytes

MIB = 1 << 20

PHASES = ("rollout", "score", "train", "sync")
"""The phases of a step, in their order."""
_ALWAYS, _WRITES, _LEARNS = frozenset(PHASES), frozenset({"rollout"}), frozenset({"train"})
_SYNC, _SCORED = frozenset({"sync"}), frozenset({"score", "train"})


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of memory or disk, by purpose."""

    name: str
    size: int
    owner: Literal["engine", "trainer"] | None = None
    """The key of `runtime.offload` that offloads it. Without an owner it comes and goes by itself."""
    phases: frozenset[str] = _ALWAYS
    """The phases that need it. While its owner stays, it is resident in the others too."""
    mend: str = ""
    """The fix if this item alone is too large."""


Parts = list[Part]


def total_bytes(parts: Iterable[Part]) -> int:
    return sum(part.size for part in parts)


def sizes_of(parts: Iterable[Part]) -> dict[str, int]:
    """Return the bytes by name."""
    return {part.name: part.size for part in parts}


def format_sizes(parts: Iterable[Part]) -> str:
    """Format the items that are not empty."""
    return ", ".join(f"{part.name} {format_bytes(part.size)}" for part in parts if part.size)


class PhaseSizes(NamedTuple):
    """The memory of the phases of a step."""

    text: str
    """The sizes as text, with `saving`."""
    sizes: dict[str, int]
    """Bytes by phase. `with offload` is the largest phase with everything offloaded."""
    saving: str
    """The setting that would make it less, as text. Empty if there is none."""


def memory_parts(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> Parts:
    """Return the memory of the largest stage. Stages are the merge, training of all weights of the base, and
    the specialists that train concurrently. With `runtime.offload` it is the largest phase.
    """
    offload, stages = recipe.runtime.offload, stages_of(recipe, student, teachers)
    if not (offload.engine or offload.trainer):
        return max(stages, key=total_bytes)
    phases = [parts for stage in stages for parts in _by_phase(stage, offload).values()]
    return max(phases, key=total_bytes)


def memory_by_phase(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]
) -> dict[str, Parts]:
    """Return the items by phase, for the stage with the largest phase."""
    stages = [_by_phase(stage, recipe.runtime.offload) for stage in stages_of(recipe, student, teachers)]
    return max(stages, key=lambda phases: max(map(total_bytes, phases.values())))


def _by_phase(parts: Parts, offload: OffloadConfig) -> dict[str, Parts]:
    """Return the items in memory by phase: those of the phase, and all whose owner stays."""
    stays = {"engine": not offload.engine, "trainer": not offload.trainer, None: False}
    return {phase: [part for part in parts if stays[part.owner] or phase in part.phases] for phase in PHASES}


def format_phases(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> PhaseSizes:
    """Return the bytes of the phases, and those with `runtime.offload` if that makes them less."""
    phases = memory_by_phase(recipe, student, teachers)
    sizes = {phase: total_bytes(parts) for phase, parts in phases.items()}
    text = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in sizes.items())
    most = most_offload(recipe)
    if recipe.rollout.schedule != "in_turn" or most == recipe.runtime.offload:
        return PhaseSizes(text, sizes, "")
    runtime = recipe.runtime.model_copy(update={"offload": most})
    offloaded = memory_by_phase(recipe.model_copy(update={"runtime": runtime}), student, teachers)
    largest = max(map(total_bytes, offloaded.values()))
    if largest >= max(sizes.values()):
        return PhaseSizes(text, sizes, "")
    switches = ", ".join(f"{name}: true" for name, value in most.model_dump().items() if value)
    saving = f"at most {format_bytes(largest)} with runtime.offload {{{switches}}}"
    return PhaseSizes(f"{text}; {saving}", sizes | {"with offload": largest}, saving)


def most_offload(recipe: Recipe) -> OffloadConfig:
    """Return the `runtime.offload` that offloads all that can leave the device."""
    embedded = recipe.rollout.engine.type == "torch" and recipe.launch.type == "local"
    return OffloadConfig(engine=embedded, trainer=not recipe.train.offloads_itself)


def offloaded_bytes(parts: Parts) -> int:
    """Return the bytes that leave with the trainer during rollout."""
    return total_bytes(part for part in parts if part.owner == "trainer" and part.phases != _ALWAYS)


def stages_of(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> list[Parts]:
    """Return the memory of each training stage: the merge, full training of the base, specialists."""
    lora = recipe.model.lora is not None
    teaching = _teacher_memory(recipe, student, teachers, merge_answers(recipe))
    merge = _training_memory(recipe, student, recipe.distill.batch, lora, total_bytes(teaching)) + teaching
    if recipe.distill.prefixes == "student":
        merge += _frozen_copy(recipe, student, is_reference=False)
    if recipe.distill.teachers_write:
        # One teacher generates at a time, beside the student. Its answers stay to the end, or to that of the
        # warm-up.
        largest = max(teachers.get(name, student).parameters for name in recipe.teacher_domains())
        writer = largest * WIDTH[model_dtype(recipe)] + _cache_bytes(recipe, student)
        merge.append(Part("a teacher that writes", writer, phases=_WRITES))
        merge.append(Part("teachers' answers", teacher_answer_sizes(recipe, recipe.distill.taught_steps)[1]))
    stages = [merge]
    if recipe.base is not None:
        stages.append(_training_memory(recipe, student, recipe.base.batch, lora=False))
    for domain, sft in recipe.demonstration_settings().items():
        stages.append(_training_memory(recipe, student, sft.batch, lora and bool(domain)))
    # The largest specialists that can train concurrently, and the baseline of all domains.
    trained = recipe.grpo_domains()
    specialists = [_grpo_memory(recipe.for_domain(name), student, teachers) for name in trained]
    for name in recipe.specialist_domains():
        sft = recipe.domains[name].sft
        if name not in trained and sft is not None:
            specialists.append(_training_memory(recipe, student, sft.batch, lora))
    sums: dict[str, Part] = {}
    for part in chain.from_iterable(sorted(specialists, key=total_bytes)[-recipe.runtime.workers :]):
        other = sums[part.name].size if part.name in sums else 0
        sums[part.name] = replace(part, size=part.size + other)
    if specialists:
        stages.append([*sums.values()])
    if "mixed_grpo" in recipe.baselines.methods or recipe.baselines.mixed_grpo_all_tokens:
        stages.append(_grpo_memory(recipe, student, teachers))
    return stages


def _grpo_memory(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> Parts:
    """Return the memory of a GRPO stage with this recipe's `specialist`."""
    config = recipe.specialist
    parts = _training_memory(recipe, student, config.batch, recipe.model.lora is not None)
    if config.opd is not None:
        answers = {next(iter(recipe.domains)): config.most_prompts * config.group_size}
        parts += _teacher_memory(recipe.following_teachers(recipe.domains), student, teachers, answers)
    if config.advantage.type == "gae":
        learns = student.parameters  # all of it, with adapters too: weights, gradients and moments
        copies = _copy_bytes(recipe, student, learns, WIDTH[model_dtype(recipe)])
        critic = 4 * learns * learning_width(recipe) + copies
        parts.append(Part("critics", critic, "trainer", _LEARNS))
    parts += _frozen_copy(recipe, student, is_reference=bool(config.reference_kl.coef))
    if config.refill is not None:
        tokens = recipe.rollout.max_new_tokens if recipe.storage.trajectories == "memory" else 0
        answers = config.most_prompts * config.group_size
        parts.append(Part("answers of a step", answers * (_SAMPLE + _TOKEN * tokens)))
    return parts


def _frozen_copy(recipe: Recipe, student: ModelShape, is_reference: bool) -> Parts:
    """Return the model that a stage began as, once, if `evaluation.base_kl_every` or a reference needs it. It
    is not there if it is the base that adapters are trained on. Each of several ranks has its share.
    """
    if not (is_reference or recipe.evaluation.base_kl_every > 0) or _one_base(recipe):
        return []
    size = student.parameters * WIDTH[model_dtype(recipe)] // (recipe.train.ranks or 1)
    return [Part("frozen copy of the start", size)]


_TOKEN, _SAMPLE = 13, 2000
"""Bytes of a response's token in memory (id, log-probability, version, mask), and of a sample beside them."""


def teacher_answer_sizes(recipe: Recipe, steps: int) -> tuple[int, int]:
    """Return the number and the bytes of teachers' answers to the prompts of `steps` of the merge, which
    holds them from before the first of these. The bytes assume the maximum length.
    """
    counts = {name: count * steps for name, count in merge_answers(recipe).items()}
    sizes = [
        count * (_SAMPLE + _TOKEN * recipe.for_domain(name).rollout.max_new_tokens)
        for name, count in counts.items()
    ]
    return sum(counts.values()), sum(sizes)


def merge_tokens(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape] | None = None
) -> int:
    """Packed tokens of a micro-batch of the merge, about: `choose_tokens` asks when the stage starts."""
    teaching = total_bytes(_teacher_memory(recipe, student, teachers or {}, merge_answers(recipe)))
    resident = _resident_in_training(recipe, student, recipe.model.lora is not None)
    return _micro_batch_tokens(recipe, student, recipe.distill.batch, teaching + total_bytes(resident))


def _micro_batch_tokens(recipe: Recipe, student: ModelShape, batch: BatchConfig, used: int) -> int:
    """Return `batch.max_tokens`. For `auto`, fit it to a device of which others use `used` bytes."""
    if batch.max_tokens != "auto":
        return batch.max_tokens
    if not on_cuda(recipe.model.device):
        return PLAIN
    return fitting_tokens(gpu_memory(recipe.model.device) - used, trained_bytes(recipe, student, batch))


def trained_bytes(recipe: Recipe, student: ModelShape, batch: BatchConfig) -> int:
    """Return the bytes that a token of a micro-batch takes until its backward pass."""
    width = WIDTH[model_dtype(recipe)]
    return token_bytes(student.layer_count, student.hidden_size, width, recompute=batch.recompute_layers)


def _training_memory(
    recipe: Recipe, student: ModelShape, batch: BatchConfig, lora: bool, used: int = 0
) -> Parts:
    """Return the memory of a training student. Its sources of learning take `used` bytes more."""
    resident = _resident_in_training(recipe, student, lora)
    tokens = _micro_batch_tokens(recipe, student, batch, used + total_bytes(resident))
    activations = tokens * trained_bytes(recipe, student, batch)
    return [*resident, Part("activations", activations, phases=_LEARNS)]


def _resident_in_training(recipe: Recipe, student: ModelShape, lora: bool) -> Parts:
    """Return `_training_memory` without the activations."""
    width, learnt_width = WIDTH[model_dtype(recipe)], learning_width(recipe)
    whole = student.parameters
    if recipe.train.backend == "megatron":  # of the others' experts a rank has nothing
        whole -= student.experts - student.experts // sharing_ranks(recipe, student)
    learns, base = (student.adapters, whole) if lora else (whole, 0)
    one_base, merges = lora and _one_base(recipe), False
    if lora and on_cuda(recipe.model.device) and free_on_cuda(recipe.model.device) is None:
        engine = recipe.rollout.engine  # on a GPU that is not here it merges only if it is told to
        merges = isinstance(engine, TorchEngineConfig) and engine.lora == "merged"
    elif lora:
        merges = merges_adapters(recipe, student.adapted * width)
    # An engine that is sent adapters may keep the layers they belong to twice, as they were and merged.
    received = student.adapters * lora + student.adapted * merges
    train, ranks = recipe.train, recipe.train.ranks or 1
    weights = gradients = moments = ranks  # how many ranks share each
    if train.backend == "megatron":
        weights = gradients = moments = train.tensor_parallel * train.pipeline_parallel
        moments = ranks if train.distributes_optimizer(on_cuda(recipe.model.device)) else moments
    elif train.backend == "deepspeed":
        weights = ranks if train.zero_stage == 3 else 1
        gradients = ranks if train.zero_stage > 1 else 1
    copy = (received + student.parameters * (not one_base)) * width
    is_shared = is_cut(recipe, ranks, student.parameters * width)
    if is_shared:  # it is the trainer's, in the same form
        copy = 0 if train.backend == "torch" else copy // ranks
    is_served = isinstance(recipe.rollout.engine, ServedEngineConfig)
    if is_served and on_cuda(recipe.model.device):  # the copy that is pushed is in the host's memory
        copy = 0
    is_pushed = recipe.model.lora is None  # a base that nobody pushes stays
    resident = (learns * learnt_width + base * width * (not one_base)) // weights
    copies = _copy_bytes(recipe, student, learns, width)
    decoded = student if merges or not lora else replace(student, fused=0, linear=0)  # by its own code
    return [
        *([Part("base", base * width)] if one_base else []),
        # They stay where the engine writes with them.
        Part("weights", resident, "trainer", _LEARNS | _SYNC if copy else _ALWAYS),
        Part(f"copies in {model_dtype(recipe)}", copies, phases=_LEARNS),
        Part("gradients", learns * learnt_width // gradients, phases=_LEARNS),
        Part("AdamW", 2 * learns * learnt_width // moments, "trainer", _LEARNS),
        Part("engine copy", copy, "engine", _WRITES | _SYNC if is_pushed else _ALWAYS),
        Part("KV cache", 0 if is_served else _cache_bytes(recipe, student), "engine", _WRITES),
        Part("states", 0 if is_served else _fitting_slots(recipe, student)[1], "engine", _WRITES),
        *([] if is_shared or is_served else _decode_memory(recipe, decoded)),
    ]


def sharing_ranks(recipe: Recipe, student: ModelShape) -> int:
    """Return how many ranks share the experts of a layer. 1: each has or gathers all."""
    train, count = recipe.train, student.expert_count
    if not count or train.backend == "deepspeed":
        return 1
    if train.expert_parallel != "auto":
        return train.expert_parallel
    copies = max(1, (train.ranks or 1) // (train.tensor_parallel * train.pipeline_parallel))
    if train.backend == "megatron":
        return math.gcd(count, copies)
    return 1 if count % copies else copies


def _one_base(recipe: Recipe) -> bool:
    """Return whether a student of adapters has its base together with all that compute with it."""
    return shares_base(recipe, recipe.train.ranks or 1)


def with_critic(recipe: Recipe) -> list[str]:
    """Return the domains whose specialist has a critic."""
    names = recipe.grpo_domains()
    return [name for name in names if recipe.for_domain(name).specialist.advantage.type == "gae"]


def _copy_bytes(recipe: Recipe, student: ModelShape, learns: int, width: int) -> int:
    """Return the bytes of master weights rounded to the compute type. In one process they are everything,
    with gradients. FSDP2 rounds the embedding and the head for a full pass, and of the layers the current and
    the next. A rank rounds its shared experts of all layers, and keeps them for the backward. With
    `model.quantize` it also holds its share as rounded to that, in float32.
    """
    ranks, quantized = recipe.train.ranks or 1, recipe.model.quantize is not None
    rounded = 4 * learns // ranks if quantized else 0
    if ranks > 1 and not has_masters(recipe):
        return rounded
    if not has_masters(recipe) and not quantized:
        return 0
    if recipe.train.backend != "torch":
        of_one = recipe.train.tensor_parallel * recipe.train.pipeline_parallel
        return learns * width // of_one
    if ranks == 1:
        return 2 * learns * width
    outside = min(student.vocabulary * student.hidden_size, student.parameters)
    experts = student.experts
    if learns < student.parameters or sharing_ranks(recipe, student) == 1:
        experts = 0  # they are not rounded, or gathered with their layers
    layers = 2 * (student.parameters - outside - experts) // max(student.layer_count, 1)
    return (outside + layers + experts // ranks) * width + rounded


def _teacher_memory(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], answers: Mapping[str, int]
) -> Parts:
    """Return the memory of following teachers, beside training. `answers`: a step's responses by domain."""
    from opd.kernels.projection import CHUNK, CHUNK_DEVICE

    width = WIDTH[model_dtype(recipe)]
    shapes = {name: teachers.get(name, student) for name in recipe.teacher_domains()}
    sizes = {name: shape.parameters * width for name, shape in shapes.items()}
    sizes |= _on_bases(recipe, student, teachers, width)
    sizes |= _of_students(recipe, student)
    streamed = [name for name in sizes if recipe.teacher_settings(name).streams_weights]
    size = sum(size for name, size in sizes.items() if name not in streamed)
    # Of streamed teachers: a buffer that is read into, of at most one of them, and besides the part of a
    # layer that is converted, and its experts put together.
    buffer = extra = 0
    for shape in [shapes[name] for name in streamed]:
        read = shape.stored / shape.parameters if shape.stored else width
        largest = shape.largest or shape.vocabulary * shape.hidden_size
        window = recipe.storage.prefetch_mb * MIB + int(largest * read)
        buffer = max(buffer, min(window, int(shape.parameters * read)))
        converted = largest if round(read) != width else 0
        extra = max(extra, (converted + shape.split_experts) * width)
    if streamed:
        head = width * max(shape.vocabulary * shape.hidden_size for shape in (student, *shapes.values()))
        size += buffer + extra + min(2, len(streamed)) * head  # heads are the current and the next
    rows = recipe.distill.batch.kl_chunk or (CHUNK_DEVICE if on_cuda(recipe.model.device) else CHUNK)
    return [
        Part("teachers", size),
        Part("hidden states", _hidden(recipe, student, teachers, answers), phases=_SCORED),
        Part("logits of a chunk", logits_bytes(rows, student.vocabulary), phases=_LEARNS),
    ]


def _hidden(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], answers: Mapping[str, int]
) -> int:
    """Bytes of a step's hidden states that a rank has in memory, if all responses are as long as they may
    get: of teachers that are streamed those that a recipe lets stay there. On a GPU more may stay.
    """
    from opd.teachers.score_cache import HIDDEN_MB

    limit, resident, streamed = recipe.storage.hidden_memory_mb, 0, 0
    longest = {name: recipe.for_domain(name).rollout.max_new_tokens for name in answers}
    for name, domains in recipe.teacher_domains().items():
        settings = recipe.teacher_settings(name)
        if getattr(settings, "signal", "hidden") != "hidden":
            continue
        row = teachers.get(name, student).hidden_size * WIDTH[model_dtype(recipe)]
        size = row * sum(answers[one] * longest[one] for one in domains if one in answers)
        if settings.streams_weights and recipe.storage.cache_mb:
            streamed += size
        else:
            resident += size
    ranks = recipe.train.ranks or 1
    return resident // ranks + min(streamed // ranks, (HIDDEN_MB if limit is None else limit) * MIB)


def average_bytes(recipe: Recipe, student: ModelShape) -> int:
    """Return the bytes of the student's moving average that teachers ask for, on all ranks together."""
    students = recipe.student_teachers()
    if not any(students[name].decay is not None for name in recipe.teacher_domains() if name in students):
        return 0
    learns = student.parameters if recipe.model.lora is None else student.adapters
    return learns * learning_width(recipe)


def _of_students(recipe: Recipe, student: ModelShape) -> dict[str, int]:
    """Return the bytes of the teachers that are the student itself, on a rank: the average, and the head, of
    which several ranks, an average and a specialist's updates need a copy.
    """
    students, ranks = recipe.student_teachers(), recipe.train.ranks or 1
    names = [name for name in recipe.teacher_domains() if name in students]
    head = student.vocabulary * student.hidden_size * WIDTH[model_dtype(recipe)]
    several = ranks > 1 or recipe.specialist.opd is not None
    sizes = {name: head if several or students[name].decay is not None else 0 for name in names}
    if names:
        sizes[names[0]] += average_bytes(recipe, student) // ranks
    return sizes


def merge_answers(recipe: Recipe) -> dict[str, int]:
    """Responses of a step of the merge, by domain."""
    each = recipe.distill.samples_per_prompt
    return {name: recipe.for_domain(name).distill.prompts_per_domain * each for name in recipe.domains}


def _on_bases(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], width: int
) -> dict[str, int]:
    """Bytes of the local teachers that are adapters on a base which others have, too: the first of those
    whose base no student has tells of it. A merged model of another dtype than that of computation is
    rounded otherwise than base and adapters, and so whole.
    """
    bases, sizes = [student.origin] if _one_base(recipe) else [], {}
    trained = replace(student, delta=student.adapters * learning_width(recipe), on=student.origin)
    adapters: dict[str, ModelShape] = {}
    for name in recipe.teacher_domains():
        shape = teachers.get(name, trained)
        if recipe.teacher_settings(name).type == "local" and shape.delta:
            adapters[name] = shape
    for name, shape in adapters.items():
        if shape.merged_dtype not in ("", model_dtype(recipe)):
            continue
        is_shared = any(shape.on & marks for marks in bases)
        if is_shared or len(adapters) > 1:
            sizes[name] = shape.delta + (0 if is_shared else shape.parameters * width)
            bases.append(shape.on)
    return sizes


_DRAWN = 28
"""Bytes of a logit while a token is drawn, about. They hold the logits, their logarithms, probabilities, the
sorted values and order for a cut, and sums in float64."""
_LAYER = 24
"""Numbers of a layer of a captured step per hidden dimension and request, about."""
_SCORE = 8
"""Bytes of a score, its weight and its mask, about."""


def on_cuda(device: str) -> bool:
    """Return whether `model.device` means CUDA here."""
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def free_on_cuda(device: str) -> int | None:
    """Return the bytes free on the GPU that `model.device` names, or `None` if it is not here."""
    import torch

    where = torch.device("cuda" if device == "auto" else device)
    if (where.index or 0) >= torch.cuda.device_count():
        return None
    return torch.cuda.mem_get_info(None if where.index is None else where)[0]


def gpu_memory(device: str) -> int:
    """Return the bytes free on the GPU that `model.device` names, or those of one that is not here."""
    free = free_on_cuda(device)
    return ABSENT_GPU.get() if free is None else free


def _cache_window(recipe: Recipe) -> tuple[int, int]:
    """Return the maximum tokens of keys and values of a request, and the tokens read of it."""
    from opd.rollout.kv_cache import LEAST_WINDOW, WINDOW_PARTS, bucket_size

    length = min(recipe.rollout.max_sequence, 2 * recipe.longest_response())
    return length, bucket_size(length, LEAST_WINDOW, WINDOW_PARTS) if on_cuda(recipe.model.device) else length


def _cache_bytes(recipe: Recipe, student: ModelShape) -> int:
    """Return the bytes of the keys and values of the embedded engine."""
    from opd.rollout.pages import PAGE

    length, read = _cache_window(recipe)
    if on_cuda(recipe.model.device) and model_dtype(recipe) in ("bfloat16", "float16"):
        read = max(read, -(-length // PAGE) * PAGE)
    slots, states = _fitting_slots(recipe, student)
    return min(slots * read * cached_bytes(recipe, student), _cache_limit(recipe) - states)


def _fitting_slots(recipe: Recipe, student: ModelShape) -> tuple[int, int]:
    """Return how many requests the embedded engine decodes together, and the bytes of their states."""
    from opd.rollout.kv_cache import fit_states

    return fit_states(_cache_limit(recipe), recipe.rollout.max_running, student.state_bytes)


def _decode_memory(recipe: Recipe, student: ModelShape) -> Parts:
    """Return the memory of weights laid out for decode, and on CUDA of buffers of captured steps."""
    from opd.kernels.projection import onednn_packs, widens
    from opd.models.causal_lm import torch_dtype

    dtype, cuda = model_dtype(recipe), on_cuda(recipe.model.device)
    width, head = WIDTH[dtype], student.vocabulary * student.hidden_size
    # Fused weights are copied. On a CPU others are, too, if another layout or float32 is faster.
    if cuda:
        copied = student.fused * width
    elif dtype == "float32":
        copied = (student.fused + student.linear * onednn_packs()) * width
    elif widens(torch_dtype(dtype)):
        copied = (student.fused + student.linear + head) * 4
    else:
        copied = student.fused * width + head * 4
    laid_out = Part("weights laid out for decode", copied, "engine", _WRITES | _SYNC)
    if not cuda:
        return [laid_out]
    most, limit, (length, read) = recipe.rollout.max_running, _cache_limit(recipe), _cache_window(recipe)
    rows = min(most, max(1, limit // (length * cached_bytes(recipe, student))))
    heads = -(-student.hidden_size // 64)
    layer = student.hidden_size * _LAYER * width + heads * read * _SCORE
    row = student.hidden_size * width + 9 * 8 + max(layer, student.vocabulary * _DRAWN)
    return [laid_out, Part("decode buffers and graphs", rows * row, "engine", _WRITES)]


def cached_bytes(recipe: Recipe, student: ModelShape) -> int:
    """Return the bytes of a token's keys and values."""
    attending = student.layer_count - student.recurrent
    return attending * student.kv_width * 2 * WIDTH[model_dtype(recipe)]


def _cache_limit(recipe: Recipe) -> int:
    """Return the byte limit of keys and values."""
    import torch

    from opd.rollout.kv_cache import kv_budget

    limit, cuda = recipe.runtime.decode.kv_cache_mb, on_cuda(recipe.model.device)
    name = "cpu" if not cuda else "cuda" if recipe.model.device == "auto" else recipe.model.device
    device = torch.device(name)
    if limit is None and cuda and (device.index or 0) >= torch.cuda.device_count():
        return ABSENT_GPU.get() // 2  # as `kv_budget`
    return kv_budget(limit, device)
