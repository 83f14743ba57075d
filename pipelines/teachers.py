"""The teachers of a merge: published, streamed, and their hidden states kept within a quota."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from opd.pipelines.context import StageContext
from opd.pipelines.publish import publish_checkpoint
from opd.protocols import Teacher
from opd.storage.hidden_cache import HiddenStateCache
from opd.teachers.cached_scores import CachedScores
from opd.teachers.download import download, is_published
from opd.teachers.routing import Router
from opd.teachers.schedule import TeacherSchedule
from opd.teachers.streamed_teacher import Placement, streamed_teachers
from opd.teachers.torch_teacher import TorchTeacher

MIB = 1 << 20


@contextmanager
def open_schedule(context: StageContext, vocabulary: int) -> Iterator[TeacherSchedule]:
    """The schedule over every teacher of the recipe, cut to `vocabulary` tokens, while the block runs.

    Raises `StorageError` or `CheckpointError` if a teacher cannot be published or read.
    """
    recipe = context.recipe
    router = Router.from_recipe(recipe)
    with ExitStack() as stack:
        teachers = _open_teachers(context, router.teachers, vocabulary, stack)
        cache = None
        if recipe.distill.teachers == "streamed" and recipe.storage.cache_mb:
            # What a power cut takes from the cache is computed again: it need not be flushed.
            files = HiddenStateCache(
                context.folder.cache(context.stage),
                quota_bytes=recipe.storage.cache_mb * MIB,
                durable=False,
                on_warning=context.note,
            )
            cache = CachedScores(stack.enter_context(files), variant=recipe.model.dtype)
        yield TeacherSchedule(teachers, router, cache=cache)


def _open_teachers(
    context: StageContext, names: list[str], vocabulary: int, stack: ExitStack
) -> Mapping[str, Teacher]:
    recipe = context.recipe
    placement = Placement(
        recipe.model.dtype, recipe.model.device, recipe.distill.batch.max_tokens, vocabulary
    )
    if recipe.distill.teachers == "resident":
        return {
            name: TorchTeacher(
                name,
                whole_teacher(context, name),
                dtype=placement.dtype,
                device=placement.device,
                max_tokens=placement.max_tokens,
                vocabulary=vocabulary,
            )
            for name in names
        }
    streamed = streamed_teachers(
        {name: published_teacher(context, name) for name in names},
        placement,
        prefetch_bytes=recipe.storage.prefetch_mb * MIB,
    )
    for teacher in streamed.values():
        stack.callback(teacher.close)
    return streamed


def published_teacher(context: StageContext, name: str) -> str:
    """URL of the published teacher `name`; a Hugging Face folder is published first, once."""
    source = context.teacher_source(name)
    if is_published(source):
        return source
    storage = context.recipe.storage
    root = storage.published or str(context.folder.published)
    published = publish_checkpoint(source, f"{root.rstrip('/')}/{name}", shards=storage.shards)
    # The version by name: another run that publishes under the same URL must not change this one's teacher.
    return f"{root.rstrip('/')}/{name}/{published.manifest.version}"


def whole_teacher(context: StageContext, name: str) -> Path:
    """A Hugging Face folder of teacher `name`; a published one is downloaded into the run folder, once."""
    source = context.teacher_source(name)
    return download(source, context.folder.downloaded(name)) if is_published(source) else Path(source)
