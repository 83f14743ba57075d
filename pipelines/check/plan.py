"""Estimate one epoch or step and print it, without touching heavy data: `opd plan`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from opd.config import Recipe
from opd.config.load import replace_at
from opd.config.teachers import TorchEngineConfig
from opd.errors import ConfigError, DataError
from opd.pipelines.check.checks import format_bytes, number_of
from opd.pipelines.check.memory import (
    MIB,
    format_phases,
    format_sizes,
    free_on_cuda,
    gpu_memory,
    memory_parts,
    merge_tokens,
    most_offload,
    on_cuda,
    teacher_answer_sizes,
    total_bytes,
)
from opd.pipelines.check.models import Models
from opd.pipelines.check.resources import answer_counts, disk_parts, recorded_line
from opd.pipelines.check.shapes import ModelShape, absent_dtype, has_weights
from opd.pipelines.stages.precision import ABSENT_GPU, WIDTH, model_dtype
from opd.storage.sample_lot import TOKEN_BYTES
from opd.storage.sample_store import SampleStore
from opd.train.plan import (
    CostModel,
    MicroBatchPlan,
    Workload,
    context_size,
    make_plan,
    rank_seconds,
    token_bytes,
)
from opd.types import Status

_BILLION = ModelShape(10**9, 2048, (None,) * 24, vocabulary=32_000, kv_width=2048)
"""The default student without a recipe: a decoder of a billion parameters."""
_ABSENT = "; not here, and reckoned from its config.json"
_SHOWN = 24
"""Maximum number of listed micro-batches."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The machine's figures from the command line."""

    store: Path | None = None
    ranks: int | None = None
    """Default: the recipe's ranks, or one."""
    mini_batch: int | None = None
    """Trajectories of a step. Default: the number that the recipe samples, or 64."""
    budget_mb: float = 16384.0
    """Memory of a device for activations and for the data of a micro-batch and the next (MiB)."""
    tflops: float = 1.0
    """Speed of a device (1e12 operations per second)."""
    gpu_gb: float = 80.0
    """Memory of a GPU that the recipe names and this machine does not have (GiB)."""
    simulate: Path | None = None
    """A cluster whose steps are simulated for the recipe, in place of a plan."""
    read_mb: float = 1000.0
    """Bandwidth of heavy data to a device (MiB per second)."""
    overhead_ms: float = 10.0
    """Fixed cost of a micro-batch."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A workload, with the names of its teachers in their order."""

    work: Workload
    teachers: list[str]
    source: str
    shapes: Mapping[str, ModelShape] = field(default_factory=dict)
    """Teachers that exist already, by name."""
    notes: Sequence[str] = ()
    """Lines about the plan: prompts that leave no tokens for their responses, answers of teachers."""
    run_lines: Sequence[str] = ()
    """Lines about the rest of the run: answers of specialists, memory of a process."""


class _Limits(NamedTuple):
    """Limits of a micro-batch."""

    tokens: int | None
    """Packed tokens of several trajectories, if a recipe says so."""
    memory: float
    """Bytes of a device for its activations, its data, and the next one's."""
    token_bytes: int
    """Bytes of a token's activations."""

    def packed_tokens(self, work: Workload) -> int:
        """Return the most tokens of a micro-batch. Without a recipe as many as the memory takes."""
        return self.tokens or max(1, int((self.memory - 2 * work.sizes.max()) / self.token_bytes))


def print_plan(recipe: Recipe | None, options: PlanOptions) -> int:
    """Plan an epoch or a step, print it and return the exit status.

    It plans an epoch over the trajectories of `options.store`, or else one step of the recipe's merge with
    responses of maximum length. Raises `ConfigError` if there is neither, `DataError` if there is nothing to
    train on, and the errors of recipe or store.
    """
    if recipe is None and options.store is None:
        raise ConfigError("opd plan needs a recipe, or --store with a folder of trajectories; give one")
    ABSENT_GPU.set(int(options.gpu_gb * 2**30))
    shape, ranks = _BILLION, options.ranks or 1
    task = None
    if recipe is not None:
        ranks = options.ranks or recipe.train.ranks or recipe.train.ranks_per_student
        if misfit := recipe.train.rank_count_fault(ranks):
            raise ConfigError(f"{misfit}.")
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"ranks": ranks})})
        recipe = _with_dtype(recipe)
        shape, task = _of_recipe(recipe, needs_work=options.store is None)
        if options.simulate is not None:
            assert task is not None  # there is no store
            from opd.pipelines.check.cluster import recipe_values
            from opd.pipelines.check.simulate import print_simulation

            prompt = max(1.0, float(task.work.lengths.mean()) - recipe.longest_response())
            return print_simulation(options.simulate, recipe_values(recipe, shape, task.shapes, prompt))
    if options.store is not None:
        task = _of_store(options.store, recipe)
    assert task is not None
    if not len(task.work):
        raise DataError(f"{task.source} has no completed or truncated trajectory; there is nothing to plan")
    count = options.mini_batch or 64
    if recipe is not None and options.mini_batch is None:
        prompts = sum(recipe.for_domain(name).distill.prompts_per_domain for name in recipe.domains)
        count = prompts * recipe.distill.samples_per_prompt
    cost, limits = _machine_figures(recipe, shape, options)
    most = limits.packed_tokens(task.work)
    per_trajectory = _ranks_together(recipe, ranks, task.work, most)
    one_teacher = recipe is not None and recipe.train.balance_loss > 0  # as in training
    plan = make_plan(task.work, count, ranks // per_trajectory, cost, most, by_teacher=one_teacher)
    steps, where = number_of(plan[-1].mini_batch + 1, "mini-batch"), number_of(ranks, "rank")
    where += f", {per_trajectory} of them for each trajectory" if per_trajectory > 1 else ""
    if recipe is not None and recipe.train.context_parallel == "auto":
        where += (
            f" (train.context_parallel auto: the longest has {number_of(task.work.lengths.max(), 'token')})"
        )
    print(f"plan      {task.source}: {steps} of {count} on {where}")
    planned = format_plan(task, plan, ranks // per_trajectory, cost, limits)
    for line in [*task.notes, *planned, *task.run_lines]:
        print(line)
    return 0


def _machine_figures(
    recipe: Recipe | None, shape: ModelShape, options: PlanOptions
) -> tuple[CostModel, _Limits]:
    """Return the cost of the student's samples, and the limits of a micro-batch."""
    width = 2 if recipe is None else WIDTH[model_dtype(recipe)]
    recompute = recipe is not None and recipe.distill.batch.recompute_layers
    cost = CostModel.of_model(
        shape.used,
        shape.hidden_size,
        shape.windows,
        operations_per_second=options.tflops * 1e12,
        bytes_per_second=options.read_mb * MIB,
        overhead_seconds=options.overhead_ms / 1e3,
    )
    return cost, _Limits(
        None if recipe is None else merge_tokens(recipe, shape),
        options.budget_mb * MIB,
        token_bytes(shape.layer_count, shape.hidden_size, width, recompute=recompute),
    )


def _with_dtype(recipe: Recipe) -> Recipe:
    """Return `recipe` with the dtype that config.json names, if it has none and no weights are here."""
    from opd.models.hf_folder import read_config

    path = Path(recipe.model.path or "")
    if recipe.model.dtype is not None or has_weights(path) or not (path / "config.json").is_file():
        return recipe
    model = recipe.model.model_copy(update={"dtype": absent_dtype(read_config(path))})
    return recipe.model_copy(update={"model": model})


def _ranks_together(recipe: Recipe | None, ranks: int, work: Workload, max_tokens: int) -> int:
    """Return the number of ranks that share each trajectory. If steps choose it, return the largest."""
    if recipe is None or recipe.train.context_parallel != "auto":
        return 1 if recipe is None else recipe.train.ranks_per_student
    return context_size(int(work.lengths.max()), ranks, max_tokens)


def _of_store(folder: Path, recipe: Recipe | None) -> _Task:
    """Return the trainable trajectories of a store."""
    listed: list[str] = []
    if recipe is not None:
        from opd.teachers.schedule import Router  # it needs torch

        listed = Router.from_recipe(recipe).teacher_names
    store = SampleStore.open([folder])
    records = store.records
    rows = [i for i, one in enumerate(records) if one.status in (Status.COMPLETED, Status.TRUNCATED)]
    names = [*listed, *sorted({record.teacher for record in records} - set(listed))]
    teachers = np.array([names.index(records[row].teacher) for row in rows], np.int64)
    tokens = np.array([records[row].token_count for row in rows], np.int64)
    work = Workload(tokens, teachers, store.heavy_bytes()[rows])
    return _Task(work, names, f"{len(rows):,} trajectories in {folder}")


def _of_recipe(recipe: Recipe, needs_work: bool) -> tuple[ModelShape, _Task | None]:
    """Return the student's shape and the merge's first step. Reads prompts, configurations and tokenizer."""
    from opd.pipelines.check.domains import check_domains
    from opd.pipelines.check.models import check_models
    from opd.pipelines.stages.domains import DomainSet
    from opd.rollout.prompts import Domain
    from opd.teachers.schedule import Router

    domains: dict[str, Domain] = {}
    models = Models(may_lack_weights=True)
    for finding in [*check_domains(recipe, domains), *check_models(recipe, domains, models)]:
        if finding.level == "error":
            raise ConfigError(f"{finding.title}: {finding.detail}")
    shape = models.student
    assert shape is not None
    if not needs_work:
        return shape, None
    router, config = Router.from_recipe(recipe), recipe.distill
    lengths, teachers, sizes, names = [], [], [], router.teacher_names
    row_bytes = TOKEN_BYTES + shape.hidden_size * WIDTH[model_dtype(recipe)]
    assert models.tokenizer is not None
    data = DomainSet.open(recipe, models.tokenizer, domains)  # as the run does
    notes = [f"prompts   {name}: {sentence}" for name, sentence in data.long.items()]
    for name in domains:
        of_domain = recipe.for_domain(name)
        count = of_domain.distill.prompts_per_domain
        for number, prompt in enumerate(data.next_prompts(name, 0, count, "plan")):
            length = len(prompt.token_ids) + of_domain.rollout.max_new_tokens
            route = router.route_group(name, f"{name}/{number}").name or f"no teacher of {name}"
            names = names if route in names else [*names, route]
            for _ in range(config.samples_per_prompt):
                lengths.append(min(length, recipe.rollout.max_sequence))
                teachers.append(names.index(route))
                sizes.append(lengths[-1] * row_bytes)
    columns = [np.array(column, np.int64) for column in (lengths, teachers, sizes)]
    source = f"one step of {recipe.name}, responses of {recipe.longest_response()} tokens"
    if config.teachers_write:
        answers, size = teacher_answer_sizes(recipe, config.taught_steps)
        which = f"all {answers:,} of the {config.steps} steps are written by the teachers before the first"
        if config.warm_up is not None:
            which = f"up to {answers:,} of {config.taught_steps} steps are written by foreign teachers"
        notes.append(f"answers   {which}, and held in memory: at most {format_bytes(size)}")
    lines = _run_lines(recipe, shape, models)
    return shape, _Task(Workload(*columns), names, source, models.teachers, notes, lines)


def _run_lines(recipe: Recipe, shape: ModelShape, models: Models) -> list[str]:
    """Return lines about the rest of the run: answers of specialists, memory of the largest stage, disk."""
    rounds = []
    if recipe.rounds > 1:
        least = recipe.min_round_gain
        ends = "" if least is None else f"; one that gains less than {least:g} is the last"
        rounds = [f"rounds    {recipe.rounds} of specialists and merge, each from the student before{ends}"]
    packed = number_of(merge_tokens(recipe, shape, models.teachers), "token")
    chosen = " (distill.batch.max_tokens auto)" if recipe.distill.batch.max_tokens == "auto" else ""
    lines = [*rounds, f"packing   micro-batches of the merge have up to {packed}{chosen}"]
    if on_cuda(recipe.model.device) and free_on_cuda(recipe.model.device) is None:
        size = format_bytes(ABSENT_GPU.get())
        lines.append(f"device    {recipe.model.device} is not here; reckoned as one of {size} (--gpu-gb)")
    if shape.absent:
        lines.append(f"weights   student: {shape.size_text}{_ABSENT}")
    for name in recipe.grpo_domains():
        each = " in each round" if recipe.rounds > 1 else ""
        lines.append(f"answers   specialist {name}{each}: {answer_counts(recipe, name)[0]}")
        if recorded := recorded_line(recipe.for_domain(name), shape):
            lines.append(f"recorded  specialist {name}: {recorded}")
    for name, teacher in models.teachers.items():
        if teacher.form or teacher.absent:
            text = f"{teacher.size_text}, {format_bytes(teacher.stored)}, computed in {model_dtype(recipe)}"
            lines.append(f"weights   teacher {name}: {text}{_ABSENT if teacher.absent else ''}")
    stage = "a stage" if recipe.train.ranks == 1 else "a rank of a stage"
    for label, parts, of in (
        ("memory", memory_parts(recipe, shape, models.teachers), stage),
        ("disk", disk_parts(recipe, shape, models.teachers), "the run"),
    ):
        lines.append(f"{label:10}at most {format_bytes(total_bytes(parts))} of {of} ({format_sizes(parts)})")
    lines.insert(-1, f"phases    {format_phases(recipe, shape, models.teachers).text}")
    fit = _fit_line(recipe, shape, models.teachers)
    return lines if fit is None else [*lines, fit]


_SAVINGS = {
    "recompute": ("distill.batch.recompute_layers", "specialist.batch.recompute_layers"),
    "offload": ("runtime.offload.engine", "runtime.offload.trainer"),
    "cache": ("runtime.decode.kv_cache_mb",),
}
"""What is tried, in all combinations, before more ranks are."""
_MOST_RANKS = 4096
_CACHE_PART = 8
"""A smaller cache of keys and values has one part of so many of the GPU's memory."""


def _fit_line(recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape]) -> str | None:
    """Return a line of what would make the largest stage fit on a GPU; `None` if it fits, or on a CPU."""
    if not on_cuda(recipe.model.device):
        return None
    memory, now = gpu_memory(recipe.model.device), recipe.train.ranks or 1
    if total_bytes(memory_parts(recipe, student, teachers)) <= memory:
        return None
    most = most_offload(recipe)
    values: dict[str, Sequence[int]] = {
        "recompute": (True, True),
        "offload": (most.engine, most.trainer),
        "cache": (memory // _CACHE_PART // MIB,),
    }
    text = f"fit       this does not fit in {format_bytes(memory)}"
    counts = [now << power for power in range(_MOST_RANKS.bit_length()) if now << power <= _MOST_RANKS] or [
        now
    ]
    for ranks, *chosen in itertools.product(counts, *[(False, True)] * len(_SAVINGS)):
        changes = {"train.ranks": ranks} if ranks > now else {}
        for name in itertools.compress(_SAVINGS, chosen):
            changes |= zip(_SAVINGS[name], values[name], strict=True)
        data = recipe.model_dump()
        for key, value in changes.items():
            replace_at(data, tuple(key.split(".")), lambda _, value=value: value)
        try:
            other = Recipe.model_validate(data)
        except ValueError:  # two settings that exclude each other
            continue
        size = total_bytes(memory_parts(other, student, teachers))
        if size <= memory:
            settings = ", ".join(f"{key} {str(value).lower()}" for key, value in changes.items())
            return f"{text}; it would with {settings} (at most {format_bytes(size)})"
    embedded = isinstance(recipe.rollout.engine, TorchEngineConfig)
    servers = ", or let servers write (rollout.engine)" if embedded else ""
    return f"{text}, nor with {counts[-1]} ranks; take a smaller model{servers}"


def format_plan(
    task: _Task, plan: Sequence[MicroBatchPlan], ranks: int, cost: CostModel, limits: _Limits
) -> list[str]:
    work, teachers = task.work, task.teachers
    operations = cost.total_operations(work.lengths)
    attention = cost.attention_operations(work.lengths).sum() / max(operations.sum(), 1.0)
    counts = np.bincount(work.teachers, minlength=len(teachers))
    tokens, sizes, costs = (
        np.array([values[micro.rows].sum() for micro in plan])
        for values in (work.lengths, work.sizes, operations)
    )
    steps = [micro.mini_batch for micro in plan]
    loads = np.zeros((steps[-1] + 1, ranks))
    np.add.at(loads, (steps, [micro.rank for micro in plan]), costs)
    balance = loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1.0)
    memory = (limits.token_bytes * tokens + 2 * sizes).max()
    room = "within" if memory <= limits.memory else "which is more than"
    lines = [
        f"tokens    {work.lengths.sum():,}; trajectories of {work.lengths.min():,} to"
        f" {work.lengths.max():,}, mean {work.lengths.mean():,.0f}",
        "teachers  "
        + ", ".join(f"{t or '(none)'} {n:,}" for t, n in zip(teachers, counts, strict=True) if n),
        f"cost      {operations.sum():.3g} operations, {100 * attention:.1f} % of them attention",
        f"balance   slowest rank over mean: {balance.mean():.3f} on average, {balance.max():.3f} at worst",
        f"micro     {number_of(len(plan), 'micro-batch')} of at most {number_of(tokens.max(), 'token')} and"
        f" {format_bytes(sizes.max())} of data; with activations {format_bytes(memory)}, {room}"
        f" {format_bytes(limits.memory)}",
    ]
    if cost.operations_per_second != CostModel.operations_per_second:
        seconds = np.zeros(loads.shape)
        for place, value in rank_seconds(plan, work, cost).items():
            seconds[place] = value
        slowest = seconds.max(axis=1)
        lines.append(
            f"time      {slowest.sum():.3g} s by the model of opd/train/plan.py,"
            f" {slowest.max():.3g} s the longest mini-batch; every micro-batch costs"
            f" {1e3 * cost.overhead_seconds:g} ms of it however small it is (--overhead-ms)"
        )
    if line := _oversize_line(work, limits):
        lines.append(line)
    lines.append("first     " + _plan_row("rank", "teachers", "trajectories", "tokens", "data"))
    first = [micro for micro in plan if micro.mini_batch == 0]
    for micro, count, size in zip(first[:_SHOWN], tokens.tolist(), sizes.tolist(), strict=False):
        names = [teachers[teacher] or "(none)" for teacher in micro.teachers]
        cells = (micro.rank, ", ".join(names), len(micro.rows), f"{count:,}")
        lines.append("          " + _plan_row(*cells, format_bytes(size)))
    if len(first) > _SHOWN:
        lines.append(f"          and {number_of(len(first) - _SHOWN, 'more micro-batch')}")
    return lines


def _oversize_line(work: Workload, limits: _Limits) -> str | None:
    """Return a line of trajectories that do not fit even alone, `None` if there are none."""
    needed = limits.token_bytes * work.lengths + 2 * work.sizes
    most = limits.tokens or work.lengths.max()
    oversize = (needed > limits.memory) | (work.lengths > most)
    if not oversize.any():
        return None
    subject = "no trajectory fits" if oversize.all() else f"{oversize.sum():,} of {len(work):,} do not fit"
    enough = f"--budget-mb {math.ceil(needed[oversize].max() / MIB * 1.001)}"
    longest = int(work.lengths[oversize].max())
    if longest > most:
        enough += f" and --distill.batch.max_tokens {longest}"
    enough += ", or read them in pieces (distill.batch.sequence_chunk)"
    return f"oversize  {subject} the budget even alone: give {enough}"


def _plan_row(rank: object, teacher: object, count: object, tokens: object, data: object) -> str:
    return f"{rank!s:>4}  {teacher!s:20} {count!s:>12} {tokens!s:>14} {data!s:>14}"
