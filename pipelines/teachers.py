"""The teachers of a merge: published, streamed, and their hidden states kept within a quota."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from opd.config import Recipe, TopKKL
from opd.errors import ConfigError
from opd.monitor.progress import doing
from opd.pipelines.adapted import published_with_base, whole_model
from opd.pipelines.commands.publish import publish_checkpoint
from opd.pipelines.context import StageContext
from opd.pipelines.precision import model_dtype
from opd.protocols import Teacher
from opd.storage.hidden_cache import HiddenStateCache
from opd.teachers.lora_teacher import published_teachers
from opd.teachers.megatron_teacher import megatron_teachers
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.sglang_teacher import Asked, SGLangTeacher
from opd.teachers.streamed_teacher import Placement
from opd.teachers.torch_teacher import TorchTeacher
from opd.teachers.units import download, is_published

MIB = 1 << 20


@contextmanager
def open_schedule(
    context: StageContext, vocabulary: int, *, group: dist.ProcessGroup | None = None
) -> Iterator[TeacherSchedule]:
    """The schedule over every teacher of the recipe, cut to `vocabulary` tokens, while the block runs.

    With a `group`, its ranks read streamed teachers together, 1/N of every layer each. All of them open the
    schedule, and score, release and close it equally often, whichever samples each of them has.

    Raises `StorageError` or `CheckpointError` if a teacher cannot be published or read.
    """
    recipe = context.recipe
    router = Router.from_recipe(recipe)
    group = context.ranks.group if group is None else group
    with ExitStack() as stack:
        # The background threads of the teachers gather in a group of their own.
        reading = None if group is None else dist.new_group(dist.get_process_group_ranks(group))
        assert not isinstance(reading, int)  # what a process outside of the group would get
        served = {name: t for name, t in recipe.teachers.items() if name in router.teachers and t.server}
        local = [name for name in router.teachers if name not in served]
        helpers = context.helpers
        elsewhere = helpers.teachers(local, vocabulary) if helpers is not None and local else None
        if elsewhere is None and local:
            if not context.ranks.alone:
                context.ranks.main_first(lambda: _fetch(context, local))
            elsewhere = open_teachers(context, local, vocabulary, reading, stack)
        found = dict(elsewhere or {})
        for name in served:
            found[name] = teacher = open_served(context, name, vocabulary)
            stack.callback(teacher.close)
        teachers = {name: found[name] for name in router.teachers}
        cache = None
        if recipe.distill.teachers == "streamed" and recipe.storage.cache_mb:
            # What a power cut takes from the cache is computed again: it need not be flushed.
            files = HiddenStateCache(
                context.of_rank(context.folder.cache(context.stage)),
                quota_bytes=recipe.storage.cache_mb * MIB,
                durable=False,
                on_warning=context.note,
            )
            # Back ends round differently: what one has computed is not what another would.
            backend = "" if recipe.distill.backend == "torch" else f"/{recipe.distill.backend}"
            cache = CachedScores(stack.enter_context(files), variant=model_dtype(recipe) + backend)
        yield TeacherSchedule(teachers, router, cache=cache, group=group)


def _fetch(context: StageContext, names: list[str]) -> None:
    """What `open_teachers` publishes and downloads, which one rank does for all."""
    distill = context.recipe.distill
    whole = distill.teachers == "resident"
    for name in names:
        if not whole:
            streamed_source(context, name)
        elif distill.backend == "torch":
            whole_teacher(context, name)
        else:
            _whole_source(context, name)


def open_teachers(
    context: StageContext,
    names: list[str],
    vocabulary: int,
    group: dist.ProcessGroup | None,
    stack: ExitStack,
) -> Mapping[str, Teacher]:
    recipe = context.recipe
    batch = recipe.distill.batch
    placement = Placement(
        model_dtype(recipe), recipe.model.device, batch.max_tokens, vocabulary, batch.sequence_chunk
    )
    if recipe.distill.backend == "megatron":
        return stack.enter_context(_megatron_teachers(context, names, placement))
    if recipe.distill.teachers == "resident":
        return {
            name: TorchTeacher(
                name,
                whole_teacher(context, name),
                dtype=placement.dtype,
                device=placement.device,
                max_tokens=placement.max_tokens,
                vocabulary=vocabulary,
                sequence_chunk=placement.sequence_chunk,
            )
            for name in names
        }
    streamed = published_teachers(
        {name: streamed_source(context, name) for name in names},
        placement,
        prefetch_bytes=recipe.storage.prefetch_mb * MIB,
        group=group,
    )
    for teacher in streamed.values():
        stack.callback(teacher.close)
    return streamed


def _megatron_teachers(
    context: StageContext, names: list[str], placement: Placement
) -> AbstractContextManager[Mapping[str, Teacher]]:
    keep = context.recipe.distill.teachers == "resident"
    source = partial(_whole_source if keep else published_teacher, context)
    return megatron_teachers(
        {name: str(source(name)) for name in names},
        placement,
        tensor_parallel=context.recipe.distill.megatron.tensor_parallel,
        keep=keep,
    )


def open_served(context: StageContext, name: str, vocabulary: int) -> SGLangTeacher:
    """Teacher `name` of the recipe, which runs on servers; its head is read from what is published.

    Raises `ConfigError` if its signal does not fit the loss.
    """
    recipe = context.recipe
    server, loss = recipe.teachers[name].server, recipe.distill.loss
    assert server is not None
    check_signal(recipe, name)
    return SGLangTeacher(
        name,
        published_teacher(context, name),
        server,
        asked=Asked(recipe.rollout.temperature, loss.k if isinstance(loss, TopKKL) else 1),
        placement=Placement(model_dtype(recipe), recipe.model.device, vocabulary=vocabulary),
    )


def check_signal(recipe: Recipe, name: str) -> None:
    """`ConfigError` if the loss needs more than the servers of teacher `name` are asked for."""
    server, distill = recipe.teachers[name].server, recipe.distill
    if server is None or server.signal == "hidden":
        return
    enough = distill.loss.type in ("k1", "k2") or (distill.loss.type, server.signal) == ("topk", "topk")
    if not enough or distill.mixture == "geometric":
        what = f"distill.loss {distill.loss.type} with mixture {distill.mixture}"
        raise ConfigError(
            f"teachers.{name}.server.signal is {server.signal}, which is too little for {what}; set it to"
            " hidden, or choose another loss."
        )


def wait_shares(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """`teacher/NAME/wait_share` of a step that took `seconds`: how much of it was spent waiting for each."""
    ends = "/wait_seconds"
    waits = {
        name: value for name, value in metrics.items() if name.startswith("teacher/") and name.endswith(ends)
    }
    return {
        name.removesuffix(ends) + "/wait_share": value / max(seconds, 1e-9) for name, value in waits.items()
    }


def streamed_source(context: StageContext, name: str) -> str:
    """`published_teacher`; for a model that has kept its adapters those, their base published once."""
    return published_with_base(context, name) or published_teacher(context, name)


def published_teacher(context: StageContext, name: str) -> str:
    """URL of the published teacher `name`; a Hugging Face folder is published first, once."""
    source = context.teacher_source(name)
    if is_published(source):
        return source
    storage = context.recipe.storage
    root = storage.published or str(context.folder.published)
    with doing(f"publishing teacher {name}"):
        published = publish_checkpoint(
            _whole_source(context, name), f"{root.rstrip('/')}/{name}", shards=storage.shards
        )
    # The version by name: another run that publishes under the same URL must not change this one's teacher.
    return f"{root.rstrip('/')}/{name}/{published.manifest.version}"


def _whole_source(context: StageContext, name: str) -> str:
    """URL of a published teacher as it is, or a folder with all of its weights, of an adapter too."""
    source = context.teacher_source(name)
    if is_published(source):
        return source
    return str(whole_model(Path(source), context.folder.downloaded(name)))


def whole_teacher(context: StageContext, name: str) -> Path:
    """A Hugging Face folder of teacher `name`; a published one is fetched into the run folder.

    What was fetched before is kept while it is what was published, byte for byte.
    """
    source = context.teacher_source(name)
    if not is_published(source):
        return Path(source)
    with doing(f"fetching teacher {name}"):
        return download(source, context.folder.downloaded(name))
