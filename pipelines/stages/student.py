"""The student of a stage: model, adapters, tokenizer, trainer, rollout engine, and their weight sync."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from opd.config import BatchConfig, OptimConfig, Recipe
from opd.errors import writing
from opd.models.adapters import AdaptedLM, MergingLM, save_adapted, target_layers
from opd.models.causal_lm import CausalLM, torch_dtype
from opd.models.checkpoint import MAX_SHARD_BYTES, save_checkpoint
from opd.models.frozen_bases import FrozenBases
from opd.models.generation import generation_of, not_followed
from opd.models.sharded import cut, open_empty, own_parts, put_in_file
from opd.models.token_ids import appended, id_count
from opd.models.tokenizers import Stop, load_tokenizer, set_chat_template, stops_of, unreachable_stops
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.precision import WIDTH, cuts_engines, merges_adapters, model_dtype, shares_base
from opd.pipelines.stages.stage_rollout import StageRollout, open_rollout
from opd.progress import doing
from opd.protocols import Resident, Sleeps
from opd.ranks import Ranks
from opd.rollout.collect import (
    EncodedPrompt,
    Generate,
    Generates,
    Way,
    WriterBarrier,
    load_generate,
    write,
    write_shared,
)
from opd.rollout.engine_pool import EnginePool
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.kv_cache import kv_budget
from opd.rollout.ledger import StopStrings
from opd.rollout.sharded import Sharing
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.train.backend import Backend, TorchBackend, Training
from opd.train.backends import Load, open_backend
from opd.train.frozen import Frozen
from opd.train.micro_batches import choose_tokens
from opd.train.terms import LossTerm
from opd.types import SampleGroup, SamplingParams

if TYPE_CHECKING:
    from opd.environments.trajectory import TrajectoryLog

_log = logging.getLogger(__name__)
EXPORTED_BYTES = 1 << 30
"""Of a file of a model that several ranks write: so much of it is in memory at a time."""
CHUNK_SECONDS = 0.02
"""Tokens that are decoded in less reach log and reader together."""


def load_model(
    recipe: Recipe,
    path: Path,
    dtype: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    empty: bool = False,
    bases: FrozenBases | None = None,
    trains: bool = False,
) -> CausalLM:
    """The Hugging Face folder `path` in `dtype`, or the recipe's, on the recipe's device; `empty`: without
    weights, where it can be (`open_empty`). `bases`: it is one of them, which nobody writes to, and `trains`
    adapters.

    It writes the tokens of `tokenizer`; `None` takes the folder's own. Teachers are given the student's: they
    may have more tokens, or no tokenizer. Where it is saved its `generation_config.json` says how the recipe
    samples and where responses end.
    """
    with doing(f"loading {path}"):
        where = {"dtype": dtype or model_dtype(recipe), "device": recipe.model.device}
        if bases is not None and not empty:
            model = bases.open(path, **where, trains=trains)
        else:
            model = (open_empty if empty else CausalLM.from_pretrained)(path, **where)
    tokenizer = tokenizer or tokenizer_of(recipe, path)
    model.vocabulary = min(id_count(tokenizer), model.vocab_size)
    model.module.generation_config = generation_of(tokenizer, sampling_params(recipe, tokenizer))
    return model


def _take_adapters(writers: EnginePool | None) -> bool:
    """Whether served engines are sent adapters alone."""
    if writers is None:
        return False
    from opd.rollout.served_engine import ServedEngine

    return any(isinstance(engine, ServedEngine) and engine.adapters for engine in writers.engines)


def load_trained(
    recipe: Recipe,
    path: Path,
    dtype: str | None = None,
    *,
    empty: bool = False,
    bases: FrozenBases | None = None,
) -> CausalLM:
    """`load_model` as it is trained. With adapters `dtype` is theirs: the base is that of the engines."""
    if recipe.model.lora is None:
        return load_model(recipe, path, dtype, empty=empty)
    base = load_model(recipe, path, empty=empty, bases=bases, trains=True)
    return adapted(recipe, base, path, dtype)


def tokenizer_of(recipe: Recipe, path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; the recipe may name another one for the base it starts from."""
    given, named = recipe.model.path, recipe.model.tokenizer
    tokenizer = load_tokenizer(named if named and given and Path(given) == path else path)
    if recipe.model.chat_template is not None:
        set_chat_template(tokenizer, recipe.model.chat_template)
    return tokenizer


def model_stops(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Stop]:
    """Where every response of the run ends: the recipe's ids, and the student's own if it lets them count."""
    rollout, path = recipe.rollout, recipe.model.path
    if not rollout.model_stop_ids:
        return [
            stop for stop in stops_of(tokenizer, None, rollout.stop_ids) if stop.token_id in rollout.stop_ids
        ]
    return stops_of(tokenizer, None if path is None else Path(path), rollout.stop_ids)


def student_remarks(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """`model_remarks` of the recipe's student."""
    return model_remarks(None if recipe.model.path is None else Path(recipe.model.path), tokenizer)


def tell_remarks(recipe: Recipe) -> None:
    """Log `student_remarks`, once a run."""
    if recipe.model.path is not None:
        for remark in student_remarks(recipe, tokenizer_of(recipe, Path(recipe.model.path))):
            _log.warning("student: %s", remark)


def model_remarks(folder: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the model in `folder` and its tokenizer say that is not done here, a sentence each."""
    found, behind = [], appended(tokenizer)
    if behind:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(behind)))
        found.append(
            f"its tokenizer puts {names} behind every text (add_eos_token, or its post-processor), and"
            " prompts of plain text are given without"
        )
    if folder is not None:
        unfollowed = not_followed(folder)
        found += [*unreachable_stops(tokenizer, folder), *([unfollowed] if unfollowed else [])]
    return found


def sampling_params(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    greedy: bool = False,
    teacher: Path | None = None,
) -> SamplingParams:
    """How the recipe samples; `greedy` keeps only its limits. A `teacher` that writes also ends its responses
    where its own folder says.
    """
    rollout = recipe.rollout
    stop = tuple(stop.token_id for stop in model_stops(recipe, tokenizer))
    if teacher is not None and rollout.model_stop_ids:
        own = (found.token_id for found in stops_of(tokenizer, teacher))
        stop = tuple(dict.fromkeys((*stop, *own)))
    if greedy:
        return SamplingParams(temperature=0.0, max_new_tokens=rollout.max_new_tokens, stop_ids=stop)
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, stop)


def ways_of(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    greedy: bool = False,
    teacher: Path | None = None,
    log: TrajectoryLog | None = None,
) -> dict[str, Way]:
    """How the responses of each domain are written; `greedy` and `teacher` as in `sampling_params`. What
    agents do is logged in `log`.
    """
    of_domains = {name: recipe.for_domain(name) for name in recipe.domains}
    # Each once: domains that share a rollout of the user's own are written by one call of it.
    loaded = {path: load_generate(path) for path in {own.rollout.generate for own in of_domains.values()}}
    return {
        name: Way(
            sampling_params(own, tokenizer, greedy, teacher),
            episodes_of(recipe, name, tokenizer, log) or loaded[own.rollout.generate],
        )
        for name, own in of_domains.items()
    }


def episodes_of(
    recipe: Recipe, domain: str, tokenizer: PreTrainedTokenizerBase, log: TrajectoryLog | None = None
) -> Generate | None:
    """What writes the episodes of a domain with an environment; `None` for one without."""
    config = recipe.domains[domain].environment
    if config is None:
        return None
    if config.agent is not None:
        from opd.environments.agents import Agents

        return Agents(config, domain, tokenizer, recipe.model.chat_template_kwargs)
    from opd.environments.episodes import Episodes

    return Episodes(config, domain, tokenizer, recipe.model.chat_template_kwargs, log)


def make_engine(recipe: Recipe, model: CausalLM, sharing: Sharing | None = None) -> TorchEngine:
    """An embedded engine around `model`, which it owns from then on; `sharing`: over whom that is cut."""
    rollout = recipe.rollout
    engine = TorchEngine(
        model,
        max_running=rollout.max_running,
        max_sequence=rollout.max_sequence,
        vocab_size=model.vocabulary,
        settings=recipe.runtime.decode,
        sharing=sharing,
        lean=False if isinstance(model, AdaptedLM) else None,
    )
    # What is decoded after a stop string, which the engine does not know, is decoded in vain.
    engine.chunk_seconds = 0.0 if rollout.stop else CHUNK_SECONDS
    return engine


def cache_bytes(recipe: Recipe, device: torch.device, writers: EnginePool) -> int:
    """Bytes on `device` that keys and values of the engines in this process may grow to."""
    rollout, budget = recipe.rollout, kv_budget(recipe.runtime.decode.kv_cache_mb, device)
    own = [engine.model for engine in writers.engines if isinstance(engine, TorchEngine)]
    positions = rollout.max_running * rollout.max_sequence
    return sum(min(budget, positions * model.kv_numbers * model.dtype.itemsize) for model in own)


def stop_strings(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> StopStrings | None:
    """The recipe's strings that end a response; `None` if it has none."""
    if not recipe.rollout.stop:
        return None
    return StopStrings(recipe.rollout.stop, lambda ids: str(tokenizer.decode(ids)))


Writer = TorchEngine | FaultTolerantRollout
"""An engine, or what ends responses at stop strings before it."""


def make_writer(recipe: Recipe, model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """An embedded engine around `model` that also knows the recipe's stop strings."""
    return behind_stops(recipe, make_engine(recipe, model), tokenizer)


def behind_stops(recipe: Recipe, engine: TorchEngine, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """`engine`, and before it what knows the recipe's stop strings."""
    stops = stop_strings(recipe, tokenizer)
    return engine if stops is None else FaultTolerantRollout([engine], stops=stops)


def open_engine(
    recipe: Recipe, path: Path, ranks: Ranks, tokenizer: PreTrainedTokenizerBase | None = None
) -> TorchEngine:
    """An embedded engine around the model in `path`, which all `ranks` open together: each around a copy of
    its own, or around one that is cut over them (`cuts_engines`).
    """
    if not cuts_engines(recipe, path, ranks):
        return make_engine(recipe, load_model(recipe, path, tokenizer=tokenizer))
    model = load_model(recipe, path, tokenizer=tokenizer, empty=True)
    return make_engine(recipe, model, Sharing(cut(model, ranks), ranks.new_group("engine")))


def embedded(
    recipe: Recipe, path: Path, adapters: bool = True, bases: FrozenBases | None = None
) -> EnginePool:
    """One engine in this process, around a model of its own or one of `bases`; `adapters`: which it is sent
    those of the recipe for, where it has some.
    """
    model = load_model(recipe, path, bases=bases)
    return EnginePool([make_engine(recipe, receiving(recipe, model, path) if adapters else model)])


def open_frozen(context: StageContext, path: Path, batch: BatchConfig) -> Frozen:
    """The model in `path` as it is, of which each rank of the stage holds its share."""
    ranks = context.ranks
    model = load_model(context.recipe, path, empty=not ranks.alone, bases=bases_of(context))
    return Frozen(model, batch, ranks)


def bases_of(context: StageContext) -> FrozenBases | None:
    """Where a student of adapters, its engine and its reference have their base; `None`: apart."""
    return context.bases if shares_base(context.recipe, context.ranks.size) else None


@dataclass(slots=True)
class Student:
    """A model that writes and learns."""

    tokenizer: PreTrainedTokenizerBase
    backend: Backend
    writers: EnginePool
    evaluator: FaultTolerantRollout
    """The engines for responses that are measured, not learnt from: nothing is logged."""
    ways: dict[str, Way]
    """How the responses of each domain are written."""
    seed: int
    load: Load
    """The model as it was before training."""
    ranks: Ranks
    writing: Ranks
    """The same ranks for the thread that writes, which may not be the one that learns."""
    barrier: WriterBarrier
    """Where their writers wait for each other."""
    stops: StopStrings | None = None
    rollouts: StageRollout | None = None
    """The engine behind the stage's token log, once `open_rollouts` was called."""
    plain: bool = False
    """Whether the engine knows of no adapters, and is given the weights they are merged into."""
    sleeps: bool = False
    """Whether the engine gives its memory back while there is nothing to write."""
    logged: dict[str, Way] | None = None
    """`ways`, for responses of that engine."""
    shared: bool = False
    """Whether the engine writes with the very weights that are trained, of which each rank has its share."""

    @classmethod
    def open(
        cls,
        context: StageContext,
        path: Path,
        optim: OptimConfig,
        batch: BatchConfig,
        terms: Sequence[LossTerm],
    ) -> Student:
        """Load `path` to train; the engine, here or among the stage's helpers, holds a copy of its own."""
        recipe, ranks, helpers = context.recipe, context.ranks, context.helpers
        tokenizer = tokenizer_of(recipe, path)
        bases = bases_of(context)
        load = partial(load_trained, recipe, path, bases=bases)
        training = Training(optim, batch, recipe.rollout.temperature, terms, context.shelf)
        opened = open_backend(load, recipe.train, training, ranks, dtype=model_dtype(recipe))
        backend = context.closing.enter_context(opened)
        writing = ranks.new_group(f"{context.stage}/rollouts")
        adapters = recipe.model.lora is not None
        shared = False
        writers = None if helpers is None else helpers.writers(path, adapters)
        plain = recipe.rollout.engine.type != "torch" and not _take_adapters(writers)
        if writers is None and cuts_engines(recipe, path, ranks):
            engine, shared = _on_shares(recipe, path, backend, ranks)
            writers, plain = EnginePool([engine]), not shared
        writers = writers or embedded(recipe, path, bases=bases)
        beside = cache_bytes(recipe, backend.device, writers)
        choose_tokens(backend, batch, ranks, width=WIDTH[model_dtype(recipe)], beside=beside)
        backend.measured, backend.lent = context.memory.sample, shared
        for held in (backend, *writers.engines):
            if isinstance(held, Resident):
                context.memory.watch(held.resident)
        stops = stop_strings(recipe, tokenizer)
        ways = ways_of(recipe, tokenizer)
        return cls(
            tokenizer,
            backend,
            writers,
            FaultTolerantRollout(writers, stops=stops),
            ways,
            recipe.seed,
            load,
            ranks,
            writing,
            WriterBarrier(writing),
            stops,
            sleeps=recipe.runtime.offload.engine,
            plain=plain,
            shared=shared,
        )

    def open_rollouts(self, context: StageContext, stack: ExitStack) -> StageRollout:
        """Log every token of `rollout` from now on, until `stack` is unwound."""
        self.rollouts = stack.enter_context(open_rollout(context, self.writers, self.stops))
        # Others measure beside it, whose episodes have the same names: they log nothing.
        self.logged = ways_of(context.recipe, self.tokenizer, log=self.rollouts.episodes)
        return self.rollouts

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a response, in whatever domain."""
        return list(dict.fromkeys(token for way in self.ways.values() for token in way.sampling.stop_ids))

    @property
    def writer(self) -> FaultTolerantRollout:
        """What responses are sampled with, and what weights are pushed to."""
        return self.evaluator if self.rollouts is None else self.rollouts.engine

    def rollout(
        self, prompts: Sequence[EncodedPrompt], group_size: int, engine: Generates
    ) -> list[SampleGroup]:
        """Sample responses through `engine`, which stands before the student's own; each rank its share."""
        return write_shared(
            self.writing,
            prompts,
            lambda mine: write(engine, mine, group_size, self.logged or self.ways, self.seed),
            self.barrier,
            self.writer,
        )

    def start(self, step: int) -> None:
        """Before the first step of an attempt: after a resume the engine needs the restored weights, and one
        that is elsewhere may hold none yet.
        """
        if step or self.writer.policy_version < 0:
            self.sync(step)
        self.backend.rest()

    def sync(self, version: int) -> None:
        """Push the trained weights: pause, flush, push, verify, resume. Then the trainer leaves the device.

        Raises `RolloutError` if the engine does not hold what was sent.
        """
        self.backend.rest(weights=False)
        if self.shared and isinstance(self.backend, TorchBackend):
            weights = own_parts(self.backend.model)
        else:
            weights = self.backend.plain_weights() if self.plain else self.backend.weights()
        sync_weights(self.writer, weights, version)
        self.backend.measured()  # both have weights now
        self.backend.rest()

    def written(self) -> None:
        """A batch is there: until `sync` the engine leaves the device to those who read and learn it."""
        self.backend.measured()
        for engine in self.writers.engines if self.sleeps else ():
            if isinstance(engine, Sleeps):
                engine.sleep()

    def export(self, folder: Path, card: dict[str, Any]) -> str:
        """Write the Hugging Face folder, on the first rank, and return the digest of its weights there. Of
        weights that ranks share one tensor at a time is whole, on its way into a file.
        """
        self.backend.wake()
        if isinstance(self.backend, TorchBackend) and self.backend.root is None:
            # Its model is whole, and in the dtype it computes in.
            return save_trained(self.backend.model, self.tokenizer, folder, card)
        if not self.ranks.main:
            for _ in self.backend.weights():
                pass  # all ranks gather them together
            return ""
        model = self.load(None, empty=True)
        if model.unread is not None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with writing(folder):
                put_in_file(model, folder.parent, read=isinstance(model, AdaptedLM))  # of its base
        model.load_weights(self.backend.weights())
        return save_trained(model, self.tokenizer, folder, card, EXPORTED_BYTES)


def _on_shares(recipe: Recipe, path: Path, backend: Backend, ranks: Ranks) -> tuple[TorchEngine, bool]:
    """An engine around a student that is cut over `ranks`, and whether it is the very one that `backend`
    trains: of one that is cut otherwise than by FSDP2 it is a copy.
    """
    if not isinstance(backend, TorchBackend) or backend.root is None:
        return open_engine(recipe, path, ranks), False
    sharing = Sharing(backend.root, ranks.new_group("engine"), own=False)
    return make_engine(recipe, backend.model, sharing), True


def adapted(recipe: Recipe, model: CausalLM, path: Path, dtype: str | None = None) -> CausalLM:
    """`model`, read from `path`, as it is trained: with the adapters of `model.lora`, if the recipe has it.

    `dtype`: what adapters are kept in, if it is not that of `model`.
    """
    lora = recipe.model.lora
    if lora is None:
        return model
    found = AdaptedLM(model, lora, path, recipe.seed)
    if dtype is not None:
        found.keep_adapters_in(torch_dtype(dtype))
    return found


def receiving(recipe: Recipe, model: CausalLM, path: Path) -> CausalLM:
    """`model`, read from `path`, as an engine holds it: one that merges the adapters it is sent, or applies
    them, if the recipe trains some.
    """
    lora = recipe.model.lora
    if lora is None:
        return model
    layers = (model.module.get_submodule(name) for name in target_layers(model.module, lora.targets))
    if merges_adapters(recipe, sum(layer.weight.nbytes for layer in layers)):
        return MergingLM(model, lora)
    applying = AdaptedLM(model, lora, path, recipe.seed)
    applying.module.requires_grad_(False)
    return applying


def save_trained(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: dict[str, Any],
    max_shard_bytes: int | None = None,
) -> str:
    """Write the Hugging Face folder, adapters merged and kept beside; returns the digest of its weights. With
    `max_shard_bytes` in files of so many, and of what adapters are merged into not much more is in memory.
    """
    if isinstance(model, AdaptedLM):
        return save_adapted(model, tokenizer, folder, card, max_shard_bytes)
    save_checkpoint(model, tokenizer, folder, card, max_shard_bytes=max_shard_bytes or MAX_SHARD_BYTES)
    return model.digest()
