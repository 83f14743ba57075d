"""Open the teachers that the merge or a specialist follows, and score a step's samples with them.

This module chooses their sources, the cache of their hidden states within a quota, and the scoring passes.
Responses go to their teachers when they end, while others are still being generated.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from opd.config import Recipe, SampledTokenK1, SampledTokenK2
from opd.config.rl import CorrectionConfig, DistillLoss
from opd.config.teachers import Reads, ServedTeacherConfig
from opd.models.adapters import has_adapter, read_adapter
from opd.models.causal_lm import torch_device
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.loop import StepContext, Update
from opd.pipelines.stages.policy_stream import FollowTerm, PolicyStream, PolicyTokens
from opd.pipelines.stages.precision import model_dtype
from opd.pipelines.stages.publishing import publish_checkpoint, whole_model
from opd.pipelines.stages.sample_source import StageRequest
from opd.pipelines.stages.samples import StepSamples, Terms
from opd.progress import set_activity
from opd.protocols import Teacher
from opd.rollout.streams import More, as_list
from opd.storage.files import open_plain
from opd.storage.node_cache import NodeCache
from opd.storage.shard_cache import ShardCache
from opd.storage.transcript import Tokens, Transcript
from opd.teachers.kinds import Placement, TeacherOpening, open_kinds
from opd.teachers.published_adapter import publish_adapter
from opd.teachers.schedule import Router, TeacherSchedule, sampled_logprobs
from opd.teachers.score_cache import HIDDEN_MB, CachedScores, left_at_most
from opd.teachers.skeleton import download_model, is_published
from opd.train.micro_batches import scored_tokens
from opd.train.packing import convert_batch
from opd.types import Chunk, RolloutBatch, RolloutRequest, Sample, TokenTerms

if TYPE_CHECKING:
    import numpy as np

    from opd.rollout.collect import EncodedPrompt, SamplingEngine

_log = logging.getLogger(__name__)
MIB = 1 << 20
_SCORED_TOKENS = 1 << 20
"""Tokens of samples on disk that teachers get at a time, about."""


class StageTeachers:
    """The teachers of a stage while it runs, and the scoring of its samples.

    Args:
        context: The stage. Its recipe's domains select the teachers, its `distill` the loss and mixture.
        schedule: The teachers.
    """

    def __init__(self, context: StageContext, schedule: TeacherSchedule) -> None:
        self._context, self.schedule = context, schedule
        recipe = context.recipe
        self._config = recipe.distill
        self.coefs = {name: recipe.for_domain(name).distill.kl_coef for name in recipe.domains}
        """Weight of the divergence in each domain."""

    def with_scoring(self, asked: StageRequest) -> StageRequest:
        """Return `asked` with each response passed to its teacher."""
        router = Router.from_recipe(self._context.recipe)

        def route(sample: Sample) -> str | None:
            return router.route_group(sample.domain, sample.group_uid).name or None

        return replace(asked, before=self._wrap_engine, route=route)

    def _wrap_engine(self, engine: SamplingEngine, prompts: Sequence[EncodedPrompt]) -> SamplingEngine:
        if self._context.ranks.is_alone and self._context.recipe.storage.trajectories == "memory":
            return scoring_ahead(self._context.recipe, engine, self.schedule, prompts)
        return engine  # another rank may train this one's samples

    def score_samples(self, samples: StepSamples) -> None:
        """Send each sample to its teacher. From disk they go in batches, and cached results are released."""
        own = samples.samples
        self.schedule.assign(own)
        samples.deal_samples()
        # So many that they need several batches, which are then grouped by teacher.
        many = sum(len(s.prompt_ids) + len(s.response_ids) for s in own) > _SCORED_TOKENS
        chosen = self.order_samples(own) if samples.on_disk and many else own
        for lot in samples.local_batches(chosen, _SCORED_TOKENS, by_teacher=many):
            self.schedule.score(lot)
            if samples.on_disk and self.schedule.caches_all:
                self.schedule.drop_samples(lot)

    def order_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return `samples` in the order of their teachers."""
        return [samples[place] for place in self.schedule.teacher_order(samples)]

    def add_advantages(self, stream: PolicyStream, samples: StepSamples) -> None:
        """Let the advantages of `stream` follow the teachers, if the loss is k1."""
        k1 = self._config.loss
        if isinstance(k1, SampledTokenK1):
            coefs = {name: k1.coef * own for name, own in self.coefs.items()}
            against = FollowTerm(coefs, k1.baseline, k1.discount)
            taught = [sample for sample in self.order_samples(samples.samples) if sample.teacher is not None]
            stream.add_logprobs("teacher", taught, self._logprob_reader(samples), against, by_teacher=True)

    def _logprob_reader(self, samples: StepSamples) -> Callable[[Sequence[Sample]], list[np.ndarray]]:
        mixture, temperature = self._config.mixture, samples.backend.temperature

        def compute_logprobs(own: Sequence[Sample]) -> list[np.ndarray]:
            if samples.on_disk:
                self.schedule.score(own)
            found = sampled_logprobs(self.schedule, own, mixture, temperature)
            if samples.on_disk:
                self.schedule.drop_samples(own)
            return found

        return compute_logprobs

    def build_update(
        self, samples: StepSamples, own: Sequence[Sample], terms: Terms, to_batch: str | None, where: str
    ) -> Update:
        """Return an update on `own`, some of the step's `samples`, teacher by teacher. `to_batch` is the
        recipe's function under the key `where`. Call `release` after the step's last update.
        """
        if to_batch is None:
            ordered = self.order_samples(own)
            return Update(ordered, self._micro_batches(samples, ordered, terms))
        whole = RolloutBatch(list(own), [terms(sample) for sample in own])
        return Update.from_batch(self.schedule.sort(convert_batch(whole, to_batch, where)))

    def _micro_batches(
        self, samples: StepSamples, ordered: Sequence[Sample], terms: Terms
    ) -> Callable[[Sequence[Sequence[int]]], Iterator[RolloutBatch]]:
        """Return a reader of micro-batches, which loads and releases teachers' results for those on disk."""
        taught = not isinstance(self._config.loss, SampledTokenK1)

        def read(parts: Sequence[Sequence[int]]) -> Iterator[RolloutBatch]:
            for batch in samples.batch_reader(ordered, terms)(parts):
                if samples.on_disk and taught:
                    self.schedule.score(batch.samples)
                yield batch
                if samples.on_disk:
                    self.schedule.drop_samples(batch.samples)

        return read

    def take_counters(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Return the schedule's counters, whose totals survive a resume, and shares of waiting time.
        `metrics` are the step's.
        """
        counters = self.schedule.take_counters()
        if self._context.recipe.train.pipeline_parallel > 1:  # heads are loaded on the rank of the loss
            counters = self._context.ranks.gather_json(counters, "the counters of teachers")[-1]
        totals = step.counters
        for name, value in counters.items():
            before = totals.get(name, 0.0)
            totals[name] = max(before, value) if name.endswith("_peak") else before + value
        return counters | wait_shares(metrics | counters, sum(step.timer.seconds.values()))


def weigh_divergence(
    term: TokenTerms,
    loss: DistillLoss,
    correction: CorrectionConfig | None,
    policy: PolicyTokens,
    weights: np.ndarray,
    kept_weights: np.ndarray,
) -> None:
    """Set the divergence's weights of `term`.

    `weights` `[R]` are for the tokens of the mask, `kept_weights` `[R]` for those left by the `correction` of
    `policy`. A loss on sampled tokens is corrected. k2's gradient comes only from sampled tokens, so rejected
    tokens are dropped. The other losses keep at every token the part that does not depend on the sampler.
    """
    term.kl_weight = weights
    if loss.weighs_samples and correction is not None:
        term.importance = policy.weight
        if isinstance(loss, SampledTokenK2):
            term.kl_weight = kept_weights


@contextmanager
def open_schedule(
    context: StageContext, vocabulary: int, *, group: dist.ProcessGroup | None = None
) -> Iterator[TeacherSchedule]:
    """Open the schedule over every teacher of the recipe, cut to `vocabulary` tokens, while the block runs.

    With a `group`, its ranks read streamed teachers together, 1/N of every layer each. All of them open the
    schedule, and score, release and close it equally often, whichever samples each of them has. Raises
    `StorageError` or `CheckpointError` if a teacher cannot be published or read.
    """
    recipe = context.recipe
    router = Router.from_recipe(recipe)
    group = context.ranks.group if group is None else group
    with ExitStack() as stack:
        # The background threads of the teachers gather in their own group.
        reading = None if group is None else dist.new_group(dist.get_process_group_ranks(group))
        assert not isinstance(reading, int)  # only for a process outside of the group
        local = [name for name in router.teacher_names if not recipe.teacher_settings(name).elsewhere]
        helpers = context.helpers
        found = dict(
            (helpers.open_teachers(local, vocabulary) if helpers is not None and local else None) or {}
        )
        here = [name for name in router.teacher_names if name not in found]
        if not context.ranks.is_alone:
            # One rank publishes and fetches the teachers' sources for all.
            context.ranks.main_first(lambda: _teacher_sources(context, here))
        found |= open_teachers(context, here, vocabulary, reading, stack)
        teachers = {name: found[name] for name in router.teacher_names}
        cached = {
            name: cache_variant(recipe, name)
            for name in teachers
            if recipe.teacher_settings(name).streams_weights
        }
        cache, device = None, torch_device(recipe.model.device)
        if cached and recipe.storage.cache_mb:
            files = NodeCache(
                context.rank_path(context.folder.cache_folder(context.stage)),
                quota_bytes=recipe.storage.cache_mb * MIB,
            )
            asked = recipe.storage.hidden_memory_mb
            memory = (HIDDEN_MB if asked is None else asked) * MIB
            grows = partial(left_at_most, device) if asked is None and device.type == "cuda" else None
            stack.enter_context(files)
            cache = CachedScores(files, variants=cached, memory_bytes=memory, grows=grows)
        # What the cache has in files is mapped, and so on the CPU.
        schedule = TeacherSchedule(teachers, router, cache=cache, device=device, group=group)
        context.memory.add_source(schedule.resident)
        context.memory.add_source(context.bases.resident)
        yield schedule


def placement_of(recipe: Recipe, vocabulary: int, sequence_chunk: int | None = None) -> Placement:
    """Return the placement of the merge's teachers for a student with that many tokens."""
    tokens = scored_tokens(recipe.distill.batch.max_tokens, torch_device(recipe.model.device))
    return Placement(model_dtype(recipe), recipe.model.device, tokens, vocabulary, sequence_chunk)


def open_teachers(
    context: StageContext,
    names: list[str],
    vocabulary: int,
    group: dist.ProcessGroup | None,
    stack: ExitStack,
) -> Mapping[str, Teacher]:
    """Open the recipe's teachers of these names in this process, each of its kind, until `stack` ends."""
    recipe = context.recipe
    placement = placement_of(recipe, vocabulary, recipe.distill.batch.sequence_chunk)
    sources = _teacher_sources(context, names)
    cache, servers = _weights_cache(context, stack), context.servers
    check = context.preemption.check_waiting
    opening = TeacherOpening(
        _served_recipe(context, names), placement, sources, group, cache, bases=context.bases, check=check
    )
    if servers is not None:
        turns = {group: partial(servers.awake_group, group, check) for group in recipe.servers_in_turn}
        opening = replace(opening, given_up=servers.group_trouble, turns=turns)
    return stack.enter_context(open_kinds(names, opening))


def _served_recipe(context: StageContext, names: Iterable[str]) -> Recipe:
    """Return the stage's recipe, with the URLs of teachers' servers that the run starts itself."""
    recipe, wanted = context.recipe, {}
    for name in names:
        entry = recipe.teachers.get(name)
        if isinstance(entry, ServedTeacherConfig) and entry.servers is not None:
            folder = whole_model(whole_teacher(context, name), context.folder.downloaded_folder(name))
            wanted[name] = (entry, folder)
    if not wanted or context.servers is None:
        return recipe
    return recipe.model_copy(update={"teachers": {**recipe.teachers, **context.servers.serve_models(wanted)}})


def _weights_cache(context: StageContext, stack: ExitStack) -> ShardCache | None:
    """Open this node's cache of teachers from object stores, until `stack` ends."""
    most = context.recipe.runtime.weights_cache_mb
    if most == 0:
        return None
    folder = context.folder.weights_cache(context.recipe)
    if context.recipe.runtime.weights_cache is None and folder.parent.is_symlink():
        _log.warning(
            "%s is a link, where this run keeps copies of teachers' weights; remove it. Until then they are"
            " read from the store at every step",
            folder.parent,
        )
        return None
    cache = ShardCache(folder, None if most is None else most * MIB)
    stack.callback(cache.close)
    return cache


def cache_variant(recipe: Recipe, name: str) -> str:
    """Return the properties, beside its weights, that a teacher's hidden states depend on. Kinds round
    differently, so their results differ.
    """
    kind = recipe.teacher_settings(name).type
    return model_dtype(recipe) + ("" if kind == "streamed" else f"/{kind}")


def _teacher_sources(context: StageContext, names: Iterable[str]) -> dict[str, str]:
    """Return the source of each teacher, published or fetched first if needed, once."""
    ways: dict[Reads, Callable[[StageContext, str], str | Path]] = {
        "folder": whole_teacher,
        "whole": _whole_source,
        "published": published_teacher,
        "adapted": streamed_source,
    }
    with _serialise_publishing(context):
        return {
            name: str(ways[context.recipe.teacher_settings(name).weight_source](context, name))
            for name in names
        }


@contextmanager
def _serialise_publishing(context: StageContext) -> Iterator[None]:
    """Serialise the publishing and fetching of concurrent specialists that follow one teacher."""
    if context.recipe.specialist.opd is None or context.recipe.runtime.workers == 1:
        yield
        return
    with os.fdopen(open_plain(context.folder.path / "teachers.lock", os.O_RDWR | os.O_CREAT)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_shares(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return `teacher/NAME/wait_share` of a step of `seconds`: the share of time spent waiting for each."""
    ends = "/wait_seconds"
    waits = {
        name: value for name, value in metrics.items() if name.startswith("teacher/") and name.endswith(ends)
    }
    return {
        name.removesuffix(ends) + "/wait_share": value / max(seconds, 1e-9) for name, value in waits.items()
    }


def streamed_source(context: StageContext, name: str) -> str:
    """Return `published_teacher`, or the adapters of a model that stored them, with their base published."""
    return published_with_base(context, name) or published_teacher(context, name)


def published_teacher(context: StageContext, name: str) -> str:
    """Return the URL of the published teacher `name`. A Hugging Face folder is published first, once."""
    source = context.teacher_source(name)
    if is_published(source):
        return source
    storage = context.recipe.storage
    root = storage.published or str(context.folder.published_folder)
    with set_activity(f"publishing teacher {name}"):
        published = publish_checkpoint(
            _whole_source(context, name), f"{root.rstrip('/')}/{name}", shards=storage.shards
        )
    # The version by name, because another run that publishes under the same URL must not change this teacher.
    return f"{root.rstrip('/')}/{name}/{published.manifest.version_name}"


def _whole_source(context: StageContext, name: str) -> str:
    """Return the URL of a published teacher, or a folder with all of its weights, of an adapter too."""
    source = context.teacher_source(name)
    if is_published(source):
        return source
    return str(whole_model(Path(source), context.folder.downloaded_folder(name)))


def whole_teacher(context: StageContext, name: str) -> Path:
    """Return a Hugging Face folder of teacher `name`. A published one is fetched into the run folder.

    An earlier download is reused while it equals the published files, byte for byte.
    """
    source = context.teacher_source(name)
    if not is_published(source):
        return Path(source)
    with set_activity(f"fetching teacher {name}"):
        return download_model(source, context.folder.downloaded_folder(name))


def scoring_ahead(
    recipe: Recipe, engine: SamplingEngine, schedule: TeacherSchedule, prompts: Sequence[EncodedPrompt]
) -> SamplingEngine:
    """Wrap `engine` so that it passes finished responses to the teachers, if that helps. It does with served
    teachers and synchronous batches. Batches written ahead are in another thread than scoring.
    """
    elsewhere = any(teacher.elsewhere for teacher in recipe.teachers.values())
    if elsewhere and recipe.rollout.schedule == "in_turn":
        return ScoreAhead(engine, schedule, prompts)
    return engine


class ScoreAhead:
    """Passes an engine's finished responses to teachers, and does not change its output.

    Only remote teachers are called early. If a response is different in the end, it is scored again, because
    requests are keyed by their tokens. Everything happens in the caller's thread.

    Args:
        engine: The engine.
        schedule: The schedule of the teachers.
        prompts: Domain and group of each request, whose uid begins with its prompt's.
    """

    def __init__(
        self, engine: SamplingEngine, schedule: TeacherSchedule, prompts: Sequence[EncodedPrompt]
    ) -> None:
        self._engine, self._schedule = engine, schedule
        self._prompts = {prompt.uid: prompt for prompt in prompts}

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Iterator[Chunk]:
        """Yield the engine's chunks, as they come."""
        # The requests of `more` are turns of episodes. None of them is a response when it ends.
        asked = {request.uid: request for request in as_list(requests)}
        transcript = Transcript({uid: Tokens.empty() for uid in asked})
        for step in self._engine.generate(requests, more):
            known = [row for row, uid in enumerate(step.uids) if uid in asked]
            ended = {uid: status for uid, status in step.finished.items() if uid in asked}
            transcript.add_chunk(step if more is None else step.select_rows(known, ended))
            found = [self._finished_sample(asked[uid], transcript) for uid in ended]
            self._schedule.begin_scoring([sample for sample in found if sample is not None])
            yield step

    def _finished_sample(self, request: RolloutRequest, transcript: Transcript) -> Sample | None:
        group_uid = request.uid.rpartition("/")[0]
        prompt = self._prompts.get(group_uid)
        if prompt is None:
            return None  # a request of the recipe's own `generate`, with any name
        ids = transcript.request_tokens(request.uid).token_ids
        return Sample(request.uid, group_uid, prompt.domain, prompt.token_ids, response_ids=ids)


SHARED_BASE = "adapted-base"
"""Name of the folder for adapters' bases, below the root of published teachers."""


def published_with_base(context: StageContext, name: str) -> str | None:
    """Return the URL of teacher `name` published as an adapter, with its base once beside it.

    `None` if it stored none. Raises `CheckpointError` or `StorageError` if either cannot be published.
    """
    source = context.teacher_source(name)
    if not has_adapter(source):
        return None
    storage = context.recipe.storage
    root = (storage.published or str(context.folder.published_folder)).rstrip("/")
    published = publish_checkpoint(read_adapter(source).base, f"{root}/{SHARED_BASE}", shards=storage.shards)
    base = f"{root}/{SHARED_BASE}/{published.manifest.version_name}"
    return f"{root}/{name}/{publish_adapter(source, f'{root}/{name}', base)}"
