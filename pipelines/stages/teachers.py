"""Open the teachers that the merge or a specialist follows, and score a step's samples with them.

This module chooses their sources, the quotas of their hidden states' cache, and the scoring passes.
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

import torch
import torch.distributed as dist

from opd.config import Recipe, SampledTokenK1, SampledTokenK2
from opd.config.rl import CorrectionConfig, DistillLoss
from opd.config.teachers import Reads, ServedTeacherConfig
from opd.models.adapters import has_adapter, read_adapter
from opd.models.causal_lm import torch_device
from opd.models.token_ids import id_count
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.loop import StepContext, Update
from opd.pipelines.stages.policy_stream import FollowTerm, PolicyStream, PolicyTokens
from opd.pipelines.stages.precision import model_dtype
from opd.pipelines.stages.publishing import publish_checkpoint, whole_model
from opd.pipelines.stages.sample_source import StageRequest
from opd.pipelines.stages.samples import StepSamples, Terms
from opd.pipelines.stages.student import load_own_tokenizer, model_stops, naming_own_tokenizer
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
from opd.teachers.score_cache import HIDDEN_MB, CachedScores, spare_bytes
from opd.teachers.skeleton import download_model, is_published
from opd.train.packing import convert_batch
from opd.train.plan import scored_tokens
from opd.types import Chunk, RolloutBatch, RolloutRequest, Sample, TokenTerms

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from opd.models.token_alignment import TokenTranslator
    from opd.rollout.collect import EncodedPrompt, SamplingEngine

_log = logging.getLogger(__name__)
MIB = 1 << 20
SHARED_BASE = "adapted-base"
"""Name of the folder for adapters' bases, below the root of published teachers."""
_SCORED_TOKENS = 1 << 20
"""Tokens of samples on disk that teachers get at a time, about."""


class StageTeachers:
    """The teachers of a stage while it runs, and the scoring of its samples.

    Args:
        context: The stage. Its recipe's domains select the teachers, its `distill` the loss and mixture.
    """

    def __init__(self, context: StageContext, schedule: TeacherSchedule) -> None:
        self._context, self.schedule = context, schedule
        recipe = context.recipe
        self._config = recipe.distill
        self.coefs = {name: recipe.for_domain(name).distill.kl_coef for name in recipe.domains}
        """Weight of the divergence in each domain."""

    def with_scoring(self, request: StageRequest) -> StageRequest:
        """Return `request` with each response passed to its teacher."""
        recipe = self._context.recipe

        def route(sample: Sample) -> str | None:
            return self.schedule.router.route_group(sample.domain, sample.group_uid).name or None

        # Finished responses are scored at once by served teachers. Not so in batches written ahead, because
        # they are in another thread, and where another rank may train this one's samples.
        elsewhere = any(teacher.elsewhere for teacher in recipe.teachers.values())
        in_turn = recipe.rollout.schedule == "in_turn" and recipe.storage.trajectories == "memory"
        whole = recipe.rollout.over_sample == 1  # else a response may be for a later step
        if not (elsewhere and in_turn and whole and self._context.ranks.is_alone):
            return replace(request, route=route)

        return replace(
            request, wrap_engine=lambda engine, some: ScoreAhead(engine, self.schedule, some), route=route
        )

    def score_samples(self, samples: StepSamples) -> None:
        """Send each sample to its teacher. From disk they go in batches, and cached results are released."""
        chosen = samples.samples
        self.schedule.assign(chosen)
        samples.deal_samples()
        # So many that they need several batches, which are then grouped by teacher.
        many = sum(len(s.prompt_ids) + len(s.response_ids) for s in chosen) > _SCORED_TOKENS
        if samples.on_disk and many:
            chosen = self.order_samples(chosen)
        for lot in samples.local_batches(chosen, _SCORED_TOKENS, by_teacher=many):
            self.schedule.score(lot)
            if samples.on_disk and self.schedule.caches_all:
                self.schedule.drop_samples(lot)

    def order_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return `samples` in the order of their teachers."""
        return [samples[index] for index in self.schedule.teacher_order(samples)]

    def add_advantages(self, stream: PolicyStream, samples: StepSamples) -> None:
        """Let the advantages of `stream` follow the teachers, if the loss is k1."""
        k1, mixture, temperature = self._config.loss, self._config.mixture, samples.backend.temperature
        if not isinstance(k1, SampledTokenK1):
            return
        coefs = {name: k1.coef * coef for name, coef in self.coefs.items()}
        against = FollowTerm(coefs, k1.baseline, k1.discount)
        taught = [sample for sample in self.order_samples(samples.samples) if sample.teacher is not None]

        def compute_logprobs(lot: Sequence[Sample]) -> list[np.ndarray]:
            if samples.on_disk:
                self.schedule.score(lot)
            logprobs = sampled_logprobs(self.schedule, lot, mixture, temperature)
            if samples.on_disk:
                self.schedule.drop_samples(lot)
            return logprobs

        stream.add_logprobs("teacher", taught, compute_logprobs, against, by_teacher=True)

    def build_update(
        self, samples: StepSamples, chosen: Sequence[Sample], terms: Terms, to_batch: str | None, key: str
    ) -> Update:
        """Return an update on `chosen`, some of the step's `samples`, teacher by teacher. `to_batch` is the
        recipe's function under `key`. Call `schedule.release` after the step's last update.
        """
        if to_batch is not None:
            batch = RolloutBatch(list(chosen), [terms(sample) for sample in chosen])
            return Update.from_batch(self.schedule.sort(convert_batch(batch, to_batch, key)))
        ordered = self.order_samples(chosen)
        read = samples.batch_reader(ordered, terms)
        if not samples.on_disk:
            return Update(ordered, read)
        taught = not isinstance(self._config.loss, SampledTokenK1)

        def read_scored(parts: Sequence[Sequence[int]]) -> Iterator[RolloutBatch]:
            for batch in read(parts):
                if taught:
                    self.schedule.score(batch.samples)
                yield batch
                self.schedule.drop_samples(batch.samples)

        return Update(ordered, read_scored)

    def take_counters(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Return the schedule's counters, whose totals survive a resume, and `teacher/NAME/wait_share`: the
        share of the step's time spent waiting for each. `metrics` are the step's.
        """
        counters = self.schedule.take_counters()
        if self._context.recipe.train.pipeline_parallel > 1:  # heads are loaded on the rank of the loss
            counters = self._context.ranks.gather_json(counters, "the counters of teachers")[-1]
        totals = step.counters
        for name, value in counters.items():
            total = totals.get(name, 0.0)
            totals[name] = max(total, value) if name.endswith("_peak") else total + value
        seconds = max(sum(step.timer.seconds.values()), 1e-9)
        shares = {
            name.removesuffix("/wait_seconds") + "/wait_share": value / seconds
            for name, value in (metrics | counters).items()
            if name.startswith("teacher/") and name.endswith("/wait_seconds")
        }
        return counters | shares


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
    context: StageContext, tokenizer: PreTrainedTokenizerBase, *, group: dist.ProcessGroup | None = None
) -> Iterator[TeacherSchedule]:
    """Open the schedule over every teacher of the recipe, for a student with `tokenizer`, while the block
    runs.

    With a `group`, its ranks read streamed teachers together, 1/N of every layer each. All of them open the
    schedule, and score, release and close it equally often, whichever samples each of them has. Raises
    `StorageError` or `CheckpointError` if a teacher cannot be published or read.
    """
    recipe, helpers, vocabulary = context.recipe, context.helpers, id_count(tokenizer)
    router = Router.from_recipe(recipe)
    group = context.ranks.group if group is None else group
    with ExitStack() as stack:
        # The background threads of the teachers gather in their own group.
        reading = None if group is None else dist.new_group(dist.get_process_group_ranks(group))
        assert not isinstance(reading, int)  # only for a process outside of the group
        settings = {name: recipe.teacher_settings(name) for name in router.teacher_names}
        local = [name for name, one in settings.items() if not (one.elsewhere or one.is_student)]
        opened: dict[str, Teacher] = {}
        if helpers is not None and local:
            opened |= helpers.open_teachers(local, vocabulary) or {}
        names = [name for name in router.teacher_names if name not in opened]
        if not context.ranks.is_alone:
            # One rank publishes and fetches the teachers' sources for all.
            context.ranks.main_first(lambda: _teacher_sources(context, names), "the teachers' sources")
        translators = open_translators(recipe, router.teacher_names, tokenizer)
        opened |= open_teachers(context, names, vocabulary, reading, stack, translators)
        teachers = {name: opened[name] for name in router.teacher_names}
        device = torch_device(recipe.model.device)
        cache = _open_score_cache(context, teachers, device, stack)
        # What the cache has in files is mapped, and so on the CPU.
        options = {"cache": cache, "device": device, "group": group}
        schedule = TeacherSchedule(teachers, router, **options, translators=translators)
        context.memory.add_source(schedule.resident)
        context.memory.add_source(context.bases.resident)
        yield schedule


def _open_score_cache(
    context: StageContext, names: Iterable[str], device: torch.device, stack: ExitStack
) -> CachedScores | None:
    """Open the cache of hidden states of the teachers `names`, within the recipe's quotas, until `stack`
    ends. `None` if the recipe has no quota, or no teacher computes hidden states here.
    """
    recipe, storage, variants = context.recipe, context.recipe.storage, {}
    for name in names:
        settings = recipe.teacher_settings(name)
        if settings.streams_weights:
            # Beside the weights, hidden states depend on the dtype and on the kind, because kinds round
            # differently.
            kind = "" if settings.type == "streamed" else f"/{settings.type}"
            variants[name] = model_dtype(recipe) + kind
    if not variants or not storage.cache_mb:
        return None
    folder = context.rank_path(context.folder.stage_folder(context.stage) / "cache")
    files = stack.enter_context(NodeCache(folder, quota_bytes=storage.cache_mb * MIB))
    wanted = storage.hidden_memory_mb
    memory = (HIDDEN_MB if wanted is None else wanted) * MIB
    grows = partial(spare_bytes, device) if wanted is None and device.type == "cuda" else None
    return CachedScores(files, variants=variants, memory_bytes=memory, grows=grows)


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
    translators: Mapping[str, TokenTranslator] | None = None,
) -> Mapping[str, Teacher]:
    """Open the recipe's teachers of these names in this process, each of its kind, until `stack` ends.
    `translators` know how many tokens those with a tokenizer of their own have.
    """
    recipe, servers = context.recipe, context.servers
    placement = placement_of(recipe, vocabulary, recipe.distill.batch.sequence_chunk)
    sources = _teacher_sources(context, names)
    cache, limit_mb = None, recipe.runtime.weights_cache_mb
    folder = context.folder.weights_cache(recipe)
    if limit_mb != 0 and recipe.runtime.weights_cache is None and folder.parent.is_symlink():
        _log.warning(
            "%s is a link, where this run keeps copies of teachers' weights; remove it. Until then they are"
            " read from the store at every step",
            folder.parent,
        )
    elif limit_mb != 0:  # this node's cache of teachers from object stores
        cache = ShardCache(folder, None if limit_mb is None else limit_mb * MIB)
        stack.callback(cache.close)
    # Teachers whose servers the run starts itself get their URLs.
    wanted = {}
    for name in names:
        entry = recipe.teachers.get(name)
        if isinstance(entry, ServedTeacherConfig) and entry.servers is not None:
            folder = whole_model(whole_teacher(context, name), context.folder.downloaded_folder(name))
            wanted[name] = (entry, folder)
    if wanted and servers is not None:
        teachers = {**recipe.teachers, **servers.serve_models(wanted)}
        recipe = recipe.model_copy(update={"teachers": teachers})
    check = context.preemption.check_waiting
    opening = TeacherOpening(recipe, placement, sources, group, cache, bases=context.bases, check=check)
    if servers is not None:
        turns = {group: partial(servers.awake_group, group, check) for group in recipe.servers_in_turn}
        opening = replace(opening, given_up=servers.group_trouble, turns=turns)
    by_tokenizer: dict[str | None, list[str]] = {}
    for name in names:
        by_tokenizer.setdefault(recipe.teacher_tokenizer(name), []).append(name)
    opened: dict[str, Teacher] = {}
    for path, some in by_tokenizer.items():
        if path is None:
            rows = vocabulary
        elif translators is not None:
            rows = translators[some[0]].teacher_count
        else:
            rows = id_count(load_own_tokenizer(recipe, path))
        placed = replace(opening, placement=replace(placement, vocabulary=rows))
        opened |= stack.enter_context(open_kinds(some, placed))
    return {name: opened[name] for name in names}


def open_translators(
    recipe: Recipe, names: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, TokenTranslator]:
    """Return the translator of each of the teachers `names` with a tokenizer of its own, for a student with
    `tokenizer`. Teachers with one tokenizer share it. Raises `ModelError` for one whose tokens cannot be
    aligned.
    """
    own = {name: path for name in names if (path := recipe.teacher_tokenizer(name)) is not None}
    translators = {path: open_translator(recipe, path, tokenizer) for path in dict.fromkeys(own.values())}
    return {name: translators[path] for name, path in own.items()}


def open_translator(recipe: Recipe, path: str, tokenizer: PreTrainedTokenizerBase) -> TokenTranslator:
    """Return what writes responses of a student with `tokenizer` for teachers with that of the folder `path`.
    Raises `ModelError` if their tokens cannot be aligned.
    """
    from opd.models.token_alignment import TokenTranslator

    stops = [stop.token_id for stop in model_stops(recipe, tokenizer)]
    theirs = load_own_tokenizer(recipe, path)  # not that of prompts, which other threads may be writing
    with naming_own_tokenizer(recipe, path):
        return TokenTranslator(tokenizer, theirs, stops, recipe.model.chat_template_kwargs)


def _teacher_sources(context: StageContext, names: Iterable[str]) -> dict[str, str]:
    """Return the source of each teacher, published or fetched first if needed, once."""
    sources: dict[Reads, Callable[[StageContext, str], str | Path]] = {
        "nothing": lambda context, name: "",
        "folder": whole_teacher,
        "whole": _whole_source,
        "published": published_teacher,
        "adapted": streamed_source,
    }
    with ExitStack() as stack:
        # Concurrent specialists that follow one teacher publish and fetch it one after the other.
        if context.recipe.specialist.opd is not None and context.recipe.runtime.workers != 1:
            lock = open_plain(context.folder.path / "teachers.lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(stack.enter_context(os.fdopen(lock)), fcntl.LOCK_EX)
        settings = {name: context.recipe.teacher_settings(name) for name in names}
        return {name: str(sources[one.weight_source](context, name)) for name, one in settings.items()}


def streamed_source(context: StageContext, name: str) -> str:
    """Return the URL of teacher `name`, published as an adapter with its base once beside it. Without an
    adapter it is `published_teacher`.

    Raises `CheckpointError` or `StorageError` if either cannot be published.
    """
    source = context.teacher_source(name)
    if not has_adapter(source):
        return published_teacher(context, name)
    storage = context.recipe.storage
    root = (storage.published or str(context.folder.published_folder)).rstrip("/")
    published = publish_checkpoint(read_adapter(source).base, f"{root}/{SHARED_BASE}", shards=storage.shards)
    base = f"{root}/{SHARED_BASE}/{published.manifest.version_name}"
    return f"{root}/{name}/{publish_adapter(source, f'{root}/{name}', base)}"


def published_teacher(context: StageContext, name: str) -> str:
    """Return the URL of the published teacher `name`. A Hugging Face folder is published first, once."""
    source = context.teacher_source(name)
    if is_published(source):
        return source
    storage = context.recipe.storage
    root = (storage.published or str(context.folder.published_folder)).rstrip("/")
    with set_activity(f"publishing teacher {name}"):
        published = publish_checkpoint(_whole_source(context, name), f"{root}/{name}", shards=storage.shards)
    # The version by name, because another run that publishes under the same URL must not change this teacher.
    return f"{root}/{name}/{published.manifest.version_name}"


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


class ScoreAhead:
    """Passes an engine's finished responses to teachers, and does not change its output.

    Only remote teachers are called early. If a response is different in the end, it is scored again, because
    requests are keyed by their tokens. Everything happens in the caller's thread.

    Args:
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
        by_uid = {request.uid: request for request in as_list(requests)}
        transcript = Transcript({uid: Tokens.empty() for uid in by_uid})
        for chunk in self._engine.generate(requests, more):
            rows = [row for row, uid in enumerate(chunk.uids) if uid in by_uid]
            ended = {uid: status for uid, status in chunk.finished.items() if uid in by_uid}
            transcript.add_chunk(chunk if more is None else chunk.select_rows(rows, ended))
            samples = []
            for uid in ended:
                group_uid = uid.rpartition("/")[0]
                prompt = self._prompts.get(group_uid)
                if prompt is not None:  # else a request of the recipe's own `generate`, with any name
                    ids = transcript.request_tokens(uid).token_ids
                    sample = prompt.empty_sample(0)
                    sample.uid, sample.response_ids = uid, ids
                    samples.append(sample)
            self._schedule.begin_scoring(samples)
            yield chunk
