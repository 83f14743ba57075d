"""The teachers of a merge: what they are read from, and their hidden states kept within a quota.

Responses go to their teachers when they end, while others are still being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from opd.config import Recipe
from opd.config.teachers import Reads
from opd.models.adapters import has_adapter, read_adapter
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import adapter_base, made_once
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.commands.publish import publish_checkpoint
from opd.pipelines.records.inputs import model_digests
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.precision import checkpoint_dtype, model_dtype
from opd.progress import doing
from opd.protocols import Teacher
from opd.rollout.ledger import Tokens, Transcript
from opd.rollout.streams import several
from opd.storage.files import digest_of
from opd.storage.hidden_cache import HiddenStateCache
from opd.teachers.kinds import Opening, Placement, open_kinds
from opd.teachers.published_adapter import publish_adapter
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.skeleton import download, is_published
from opd.types import Chunk, RolloutRequest, Sample

if TYPE_CHECKING:
    from opd.rollout.collect import EncodedPrompt, Generates

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
        local = [name for name in router.teachers if not recipe.teacher(name).elsewhere]
        helpers = context.helpers
        found = dict((helpers.teachers(local, vocabulary) if helpers is not None and local else None) or {})
        here = [name for name in router.teachers if name not in found]
        if not context.ranks.alone:
            # What teachers are read from is published and fetched by one rank for all.
            context.ranks.main_first(lambda: _sources(context, here))
        found |= open_teachers(context, here, vocabulary, reading, stack)
        teachers = {name: found[name] for name in router.teachers}
        cached = {name: cache_variant(recipe, name) for name in teachers if recipe.teacher(name).streams}
        cache = None
        if cached and recipe.storage.cache_mb:
            # What a power cut takes from the cache is computed again: it need not be flushed.
            files = HiddenStateCache(
                context.of_rank(context.folder.cache(context.stage)),
                quota_bytes=recipe.storage.cache_mb * MIB,
                durable=False,
            )
            cache = CachedScores(stack.enter_context(files), variants=cached)
        yield TeacherSchedule(teachers, router, cache=cache, group=group)


def open_teachers(
    context: StageContext,
    names: list[str],
    vocabulary: int,
    group: dist.ProcessGroup | None,
    stack: ExitStack,
) -> Mapping[str, Teacher]:
    """The recipe's teachers of these names in this process, each of its kind, until `stack` ends."""
    recipe = context.recipe
    batch = recipe.distill.batch
    placement = Placement(
        model_dtype(recipe), recipe.model.device, batch.max_tokens, vocabulary, batch.sequence_chunk
    )
    opening = Opening(recipe, placement, _sources(context, names), group)
    return stack.enter_context(open_kinds(names, opening))


def cache_variant(recipe: Recipe, name: str) -> str:
    """What the hidden states of a teacher depend on besides its weights: kinds round differently, so that
    what one has computed is not what another would.
    """
    kind = recipe.teacher(name).type
    return model_dtype(recipe) + ("" if kind == "streamed" else f"/{kind}")


def _sources(context: StageContext, names: Iterable[str]) -> dict[str, str]:
    """What each teacher is read from, published or fetched first where that is needed, once."""
    ways: dict[Reads, Callable[[StageContext, str], str | Path]] = {
        "folder": whole_teacher,
        "whole": _whole_source,
        "published": published_teacher,
        "adapted": streamed_source,
    }
    return {name: str(ways[context.recipe.teacher(name).reads](context, name)) for name in names}


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


def scoring_ahead(
    recipe: Recipe, engine: Generates, schedule: TeacherSchedule, prompts: Sequence[EncodedPrompt]
) -> Generates:
    """`engine`, telling the teachers what ends, where that helps: with served teachers and batches written in
    turn. Batches written ahead are written in another thread than the one that scores.
    """
    elsewhere = any(teacher.elsewhere for teacher in recipe.teachers.values())
    if elsewhere and recipe.rollout.schedule == "in_turn":
        return ScoreAhead(engine, schedule, prompts)
    return engine


class ScoreAhead:
    """Stands before an engine and changes nothing in what it writes.

    Only teachers that compute elsewhere are asked early. Should a response turn out otherwise in the end, it
    is asked about again: what was begun is known by its tokens. Everything happens in the caller's thread.

    Args:
        engine: What writes.
        schedule: Whose teachers are told.
        prompts: Domain and group of each request, whose uid begins with its prompt's.
    """

    def __init__(
        self, engine: Generates, schedule: TeacherSchedule, prompts: Sequence[EncodedPrompt]
    ) -> None:
        self._engine, self._schedule = engine, schedule
        self._prompts = {prompt.uid: prompt for prompt in prompts}

    def generate(self, requests: RolloutRequest | Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """The engine's chunks, as they come."""
        asked = {request.uid: request for request in several(requests)}
        transcript = Transcript({uid: Tokens.empty() for uid in asked})
        for step in self._engine.generate(requests):
            transcript.add(step)
            ended = [self._sample(asked[uid], transcript) for uid in step.finished if uid in asked]
            self._schedule.begin([sample for sample in ended if sample is not None])
            yield step

    def _sample(self, request: RolloutRequest, transcript: Transcript) -> Sample | None:
        group_uid = request.uid.rpartition("/")[0]
        prompt = self._prompts.get(group_uid)
        if prompt is None:
            return None  # a request of the recipe's own `generate`, named as it likes
        ids = transcript.tokens(request.uid).token_ids
        return Sample(request.uid, group_uid, prompt.domain, prompt.token_ids, response_ids=ids)


SHARED_BASE = "adapted-base"
"""Where, below the root of published teachers, the bases lie that adapters belong to."""


def whole_model(source: Path, out: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """`source`, or for an adapter of peft's the model it makes of its base, written to `out`.

    What was written there of the same adapter and base is kept, unless a byte of it has changed.
    """
    base = adapter_base(source)
    if base is None:
        return source

    def write() -> None:
        model = CausalLM.from_pretrained(source, dtype=checkpoint_dtype(base))
        card = {"base": str(base), "adapter": str(source)}
        save_checkpoint(model, tokenizer or load_tokenizer(source), out, card)

    return made_once(out, digest_of(model_digests(source)), write)


def published_with_base(context: StageContext, name: str) -> str | None:
    """URL of teacher `name` published as an adapter, and its base once beside it; `None` if it kept none.

    Raises `CheckpointError` or `StorageError` if either cannot be published.
    """
    source = context.teacher_source(name)
    if not has_adapter(source):
        return None
    storage = context.recipe.storage
    root = (storage.published or str(context.folder.published)).rstrip("/")
    published = publish_checkpoint(read_adapter(source).base, f"{root}/{SHARED_BASE}", shards=storage.shards)
    base = f"{root}/{SHARED_BASE}/{published.manifest.version}"
    return f"{root}/{name}/{publish_adapter(source, f'{root}/{name}', base)}"
