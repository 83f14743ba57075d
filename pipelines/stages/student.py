"""Build a stage's student: model, adapters, tokenizer, trainer, rollout engine, and their weight sync."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.config import BatchConfig, OptimConfig, Recipe
from opd.config.writing import MOST_KEPT
from opd.errors import CheckpointError, ModelError, add_path_note
from opd.models.adapters import AdaptedLM, MergingLM, save_adapted, target_layers
from opd.models.causal_lm import CausalLM, torch_dtype
from opd.models.checkpoint import MAX_SHARD_BYTES, save_checkpoint
from opd.models.frozen_bases import FrozenBases
from opd.models.generation import generation_of, not_followed
from opd.models.sharded import local_parts, open_empty, put_in_file, shard_model
from opd.models.token_ids import appended_ids, id_count
from opd.models.tokenizers import Stop, load_tokenizer, set_chat_template, stops_of, unreachable_stops
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.precision import WIDTH, cuts_engines, merges_adapters, model_dtype, shares_base
from opd.pipelines.stages.stage_rollout import KVFile, StageRollout, fault_tolerant, open_logs
from opd.progress import set_activity
from opd.protocols import Resident, SleepingEngine
from opd.ranks import Ranks
from opd.rollout.collect import (
    DomainSampling,
    EncodedPrompt,
    Generate,
    SamplingEngine,
    generate_groups,
    load_generate,
)
from opd.rollout.engine_pool import EnginePool
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.kv_cache import kv_budget
from opd.rollout.request_state import StopStrings
from opd.rollout.sharded import ModelSharing
from opd.rollout.shared_groups import WriterBarrier, write_shared
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.train.backend import Backend, TrainingSettings
from opd.train.backends import ModelLoader, open_backend
from opd.train.frozen import FrozenModel
from opd.train.plan import choose_tokens
from opd.train.terms import LossTerm
from opd.train.torch_backend import TorchBackend
from opd.types import SampleGroup, SamplingParams

if TYPE_CHECKING:
    from opd.environments.trajectory import TrajectoryLog

_log = logging.getLogger(__name__)
EXPORTED_BYTES = 1 << 30
"""Bytes in memory at a time of a model's file that several ranks write."""
CHUNK_SECONDS = 0.02
"""Tokens that are decoded within this time reach log and reader at once."""


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
    """Load the Hugging Face folder `path` in `dtype`, or the recipe's, on the recipe's device.

    `empty`: without weights if possible (`open_empty`). `bases`: open it as one of these shared bases, which
    nobody writes to. `trains`: adapters on it are trained. `tokenizer`: the tokenizer of its answers, by
    default the folder's own. Teachers get the student's because they may have more tokens, or no tokenizer.
    When the model is saved, its `generation_config.json` has the recipe's sampling and stop ids.
    """
    with set_activity(f"loading {path}"):
        where = {"dtype": dtype or model_dtype(recipe), "device": recipe.model.device}
        if bases is not None and not empty:
            model = bases.open(path, **where, trains=trains)
        else:
            model = (open_empty if empty else CausalLM.from_pretrained)(path, **where)
    tokenizer = tokenizer or tokenizer_of(recipe, path)
    model.vocabulary = min(id_count(tokenizer), model.vocab_size)
    model.module.generation_config = generation_of(tokenizer, sampling_params(recipe, tokenizer))
    return model


def load_trained(
    recipe: Recipe,
    path: Path,
    dtype: str | None = None,
    *,
    empty: bool = False,
    bases: FrozenBases | None = None,
) -> CausalLM:
    """`load_model`, ready to be trained. If there are adapters, `dtype` is theirs, not the base's."""
    lora = recipe.model.lora
    if lora is None:
        return load_model(recipe, path, dtype, empty=empty)
    base = load_model(recipe, path, empty=empty, bases=bases, trains=True)
    adapted = AdaptedLM(base, lora, path, recipe.seed)
    if dtype is not None:
        adapted.keep_adapters_in(torch_dtype(dtype))
    return adapted


def tokenizer_of(recipe: Recipe, path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. The recipe may name another one for its start model."""
    start, other = recipe.model.path, recipe.model.tokenizer
    tokenizer = load_tokenizer(other if other and start and Path(start) == path else path)
    if recipe.model.chat_template is not None:
        set_chat_template(tokenizer, recipe.model.chat_template)
    return tokenizer


def load_own_tokenizer(recipe: Recipe, path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `path` of teachers that have one of their own."""
    with naming_own_tokenizer(recipe, path):
        return load_tokenizer(path)


@contextmanager
def naming_own_tokenizer(recipe: Recipe, path: str) -> Iterator[None]:
    """Let errors of the block begin with the field that names the tokenizer in `path`."""
    try:
        yield
    except (ModelError, CheckpointError) as error:
        name = next(name for name in recipe.teachers if recipe.teacher_tokenizer(name) == path)
        raise type(error)(f"teachers.{name}.tokenizer: {error}") from error


def model_stops(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Stop]:
    """Return the run's stop ids: the recipe's, and the student's own if it uses them."""
    rollout, path = recipe.rollout, recipe.model.path
    if not rollout.model_stop_ids:
        return [
            stop for stop in stops_of(tokenizer, None, rollout.stop_ids) if stop.token_id in rollout.stop_ids
        ]
    return stops_of(tokenizer, None if path is None else Path(path), rollout.stop_ids)


def student_remarks(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return `model_remarks` of the recipe's student."""
    return model_remarks(None if recipe.model.path is None else Path(recipe.model.path), tokenizer)


def tell_remarks(recipe: Recipe) -> None:
    """Log `student_remarks`, once a run."""
    if recipe.model.path is not None:
        for remark in student_remarks(recipe, tokenizer_of(recipe, Path(recipe.model.path))):
            _log.warning("student: %s", remark)


def model_remarks(folder: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the ignored settings of the model in `folder` and of its tokenizer, a sentence each."""
    remarks, appended = [], appended_ids(tokenizer)
    if appended:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(appended)))
        remarks.append(
            f"its tokenizer puts {names} behind every text (add_eos_token, or its post-processor), and"
            " prompts of plain text are given without"
        )
    if folder is not None:
        unfollowed = not_followed(folder)
        remarks += [*unreachable_stops(tokenizer, folder), *([unfollowed] if unfollowed else [])]
    return remarks


def sampling_params(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    greedy: bool = False,
    teacher: Path | None = None,
) -> SamplingParams:
    """Return the recipe's sampling parameters. `greedy` retains only its limits. A generating `teacher` also
    uses the stop ids of its own folder.
    """
    rollout = recipe.rollout
    stop = tuple(stop.token_id for stop in model_stops(recipe, tokenizer))
    if teacher is not None and rollout.model_stop_ids:
        stop = tuple(dict.fromkeys((*stop, *(one.token_id for one in stops_of(tokenizer, teacher)))))
    if greedy:
        return SamplingParams(temperature=0.0, max_new_tokens=rollout.max_new_tokens, stop_ids=stop)
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, stop)


def ways_of(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    greedy: bool = False,
    teacher: Path | None = None,
    log: TrajectoryLog | None = None,
    masked: bool = False,
) -> dict[str, DomainSampling]:
    """Return the generation of each domain's responses. `greedy` and `teacher` are as in `sampling_params`,
    `masked` as in `load_generate`. Agents' commands are logged in `log`.
    """
    recipes = {name: recipe.for_domain(name) for name in recipe.domains}
    # Each once: domains that share a user's own rollout are generated by one call of it.
    paths = {one.rollout.generate for one in recipes.values()}
    loaded = {path: load_generate(path, masked) for path in paths}
    ways = {}
    for name, domain_recipe in recipes.items():
        config, arguments = recipe.domains[name].environment, recipe.model.chat_template_kwargs
        generate: Generate = loaded[domain_recipe.rollout.generate]
        if config is not None and config.agent_path is not None:
            from opd.environments.agents import Agents

            generate = Agents(config, name, tokenizer, arguments)
        elif config is not None:
            from opd.environments.episodes import Episodes

            generate = Episodes(config, name, tokenizer, arguments, log)
        ways[name] = DomainSampling(sampling_params(domain_recipe, tokenizer, greedy, teacher), generate)
    return ways


def make_engine(
    recipe: Recipe, model: CausalLM, sharing: ModelSharing | None = None, *, learns: bool = True
) -> TorchEngine:
    """Return an embedded engine around `model`, which it owns then. `sharing`: the ranks that shard it.
    `learns`: the student learns what its own weights write here, so that their choices of experts are kept.
    """
    rollout = recipe.rollout
    records = learns and rollout.replay_experts is not False
    engine = TorchEngine(
        model,
        max_running=rollout.max_running,
        max_sequence=rollout.max_sequence,
        vocab_size=model.vocabulary,
        settings=recipe.runtime.decode,
        sharing=sharing,
        lean=False if isinstance(model, AdaptedLM) else None,
        record_experts=records and _routes(model, sharing),
    )
    # Tokens after a stop string, which the engine does not know, are wasted. So are those after the end of a
    # step's last group, and their number would depend on the clock. With asynchronous weights it does anyway.
    one_by_one = rollout.over_sample > 1 and rollout.schedule != "async"
    engine.chunk_seconds = 0.0 if rollout.stop or one_by_one else CHUNK_SECONDS
    return engine


def _routes(model: CausalLM, sharing: ModelSharing | None) -> bool:
    """Return whether choices of experts can be recorded. The ranks of `sharing` call it together."""

    def find() -> Tensor:
        routes.append(model.routing is not None)
        return torch.zeros(())

    routes: list[bool] = []
    find() if sharing is None else sharing.root(find)
    return routes[0]


def stop_strings(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> StopStrings | None:
    """Return the recipe's strings that end a response, or `None`."""
    if not recipe.rollout.stop:
        return None
    return StopStrings(recipe.rollout.stop, lambda ids: str(tokenizer.decode(ids)))


Writer = TorchEngine | FaultTolerantRollout
"""An engine, or its wrapper that ends responses at stop strings."""


def make_writer(recipe: Recipe, model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """Return an embedded engine around `model` with the recipe's stop strings, to measure it."""
    return with_stop_strings(recipe, make_engine(recipe, model, learns=False), tokenizer)


def with_stop_strings(recipe: Recipe, engine: TorchEngine, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """Wrap `engine` with the recipe's stop strings."""
    stops = stop_strings(recipe, tokenizer)
    return engine if stops is None else FaultTolerantRollout([engine], stops=stops)


def open_engine(
    recipe: Recipe,
    path: Path,
    ranks: Ranks,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    learns: bool = False,
) -> TorchEngine:
    """Open an embedded engine around the model in `path`. All `ranks` call this together. Each rank has its
    own copy, or all share one sharded model (`cuts_engines`). `learns`: see `make_engine`.
    """
    if not cuts_engines(recipe, path, ranks):
        return make_engine(recipe, load_model(recipe, path, tokenizer=tokenizer), learns=learns)
    model = load_model(recipe, path, tokenizer=tokenizer, empty=True)
    root = shard_model(model, ranks, None, shared_experts(recipe))
    return make_engine(recipe, model, ModelSharing(root, ranks.new_group("engine")), learns=learns)


def embedded_pool(
    recipe: Recipe, path: Path, adapters: bool = True, bases: FrozenBases | None = None
) -> EnginePool:
    """Return one engine in this process, around a model of its own or one of `bases`. With `adapters` it
    merges or applies those that it gets, if the recipe trains some.
    """
    model, lora = load_model(recipe, path, bases=bases), recipe.model.lora
    if recipe.model.quantize is not None:  # as the trainer holds them before its first step
        from opd.models.converted_folder import FP8Weights

        whole = model if model.dtype == torch.float32 else load_model(recipe, path, "float32")
        model.load_weights(FP8Weights(whole.module.config).of_weights(whole.weights()))
    if adapters and lora is not None:
        layers = (model.module.get_submodule(name) for name in target_layers(model.module, lora.targets))
        if merges_adapters(recipe, sum(layer.weight.nbytes for layer in layers)):
            model = MergingLM(model, lora)
        else:
            model = AdaptedLM(model, lora, path, recipe.seed)
            model.module.requires_grad_(False)
    return EnginePool([make_engine(recipe, model)])


def open_frozen(context: StageContext, path: Path, batch: BatchConfig) -> FrozenModel:
    """Open the unchanged model in `path`. Each rank of the stage has its share."""
    ranks = context.ranks
    model = load_model(context.recipe, path, empty=not ranks.is_alone, bases=bases_of(context))
    return FrozenModel(model, batch, ranks, shared_experts(context.recipe))


def shared_experts(recipe: Recipe) -> int | Literal["auto"]:
    """Return how FSDP2's ranks share the experts of an untrained model. Megatron-Core has its own groups."""
    return "auto" if recipe.train.backend == "megatron" else recipe.train.expert_parallel


def bases_of(context: StageContext) -> FrozenBases | None:
    """Return the bases that a student of adapters shares with its engine and reference, or `None`."""
    return context.bases if shares_base(context.recipe, context.ranks.size) else None


EngineWeights = Literal["trained", "plain", "shared"]
"""What engines get after a step: the weights that are trained, of adapters these alone; plain weights, with
adapters merged; or nothing new, because ranks share one model that trains and generates."""


@dataclass(slots=True)
class Student:
    """A model that trains, and the engines that generate with its weights."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase

    backend: Backend
    load_untrained: ModelLoader
    """Loads the model that the training began with."""
    ranks: Ranks

    engine_pool: EnginePool
    engine_weights: EngineWeights
    ways: dict[str, DomainSampling]
    """The generation of each domain's responses."""
    evaluator: FaultTolerantRollout
    """The engines for measurements: nothing is logged."""
    rollouts: StageRollout | None
    """The engines for training, behind the stage's token log, after `open_rollouts`."""
    barrier: WriterBarrier
    """Where generation threads wait for each other. They have a process group of their own."""
    records_masks: bool = False
    """The engines give sampling masks; see `record_masks`."""

    @classmethod
    def open(
        cls,
        context: StageContext,
        path: Path,
        optim: OptimConfig,
        batch: BatchConfig,
        terms: Sequence[LossTerm],
    ) -> Student:
        """Load `path` for training. The engine, here or among the stage's helpers, has its own copy."""
        recipe, ranks = context.recipe, context.ranks
        tokenizer = tokenizer_of(recipe, path)
        load = partial(load_trained, recipe, path, bases=bases_of(context))
        training = TrainingSettings(
            optim,
            batch,
            recipe.rollout.temperature,
            terms,
            shelf=context.offload_buffer,
            balance_rate=recipe.train.balance_rate,
            balance_loss=recipe.train.balance_loss,
            router_z_loss=recipe.train.router_z_loss,
            quantize=recipe.model.quantize,
        )
        opened = open_backend(load, recipe.train, training, ranks, dtype=model_dtype(recipe))
        backend = context.closing.enter_context(opened)
        recorded = recipe.rollout.engine.type == "torch" or recipe.rollout.replay_experts is True
        backend.replay_experts(recipe.rollout.replay_experts if recorded else False)
        barrier = WriterBarrier(ranks.new_group(f"{context.stage}/rollouts"))
        engine_pool, engine_weights = _open_engines(context, path, backend)
        # The engines in this process may fill this much of the device with keys and values.
        budget = kv_budget(recipe.runtime.decode.kv_cache_mb, backend.device)
        positions = recipe.rollout.max_running * recipe.rollout.max_sequence
        models = [engine.model for engine in engine_pool.engines if isinstance(engine, TorchEngine)]
        kv_bytes = sum(min(budget, positions * one.kv_numbers * one.dtype.itemsize) for one in models)
        choose_tokens(backend, batch, ranks, width=WIDTH[model_dtype(recipe)], reserved=kv_bytes)
        backend.measured, backend.weights_shared = context.memory.sample, engine_weights == "shared"
        for owner in (backend, *engine_pool.engines):
            if isinstance(owner, Resident):
                context.memory.add_source(owner.resident)
        return cls(
            recipe=recipe,
            tokenizer=tokenizer,
            backend=backend,
            load_untrained=load,
            ranks=ranks,
            engine_pool=engine_pool,
            engine_weights=engine_weights,
            ways=ways_of(recipe, tokenizer),
            evaluator=FaultTolerantRollout(engine_pool, stops=stop_strings(recipe, tokenizer)),
            rollouts=None,
            barrier=barrier,
        )

    def open_rollouts(self, context: StageContext, stack: ExitStack) -> StageRollout:
        """Log every token of `rollout_engine` from now on, until `stack` is unwound."""
        logs = stack.enter_context(open_logs(context))
        path = context.rank_path(context.folder.stage_folder(context.stage) / "in_flight.safetensors")
        in_flight = None if logs is None else KVFile(path)
        stops = stop_strings(self.recipe, self.tokenizer)
        engine = fault_tolerant(context, self.engine_pool, logs, stops, in_flight)
        # Measurements have episodes of the same names, so `self.ways` log none.
        episodes = None if logs is None else logs.episodes
        ways = ways_of(self.recipe, self.tokenizer, log=episodes, masked=self.records_masks)
        self.rollouts = StageRollout(engine, logs, ways)
        return self.rollouts

    def record_masks(self) -> None:
        """Let embedded engines, here or on Ray, give tokens with their sampling masks, for the trainer."""
        self.records_masks = True
        for engine in self.engine_pool.engines:
            if (record := getattr(engine, "record_masks", None)) is not None:
                record(MOST_KEPT)

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a response, in any domain."""
        return list(
            dict.fromkeys(token for domain in self.ways.values() for token in domain.sampling.stop_ids)
        )

    @property
    def rollout_engine(self) -> FaultTolerantRollout:
        """The engine for sampling, and for new weights."""
        return self.evaluator if self.rollouts is None else self.rollouts.engine

    def sample_groups(
        self, prompts: Sequence[EncodedPrompt], group_size: int, engine: SamplingEngine, batch: int = 0
    ) -> list[SampleGroup]:
        """Sample this rank's share of `batch` through `engine`, a wrapper of the student's own."""
        ways = self.ways if self.rollouts is None else self.rollouts.ways
        seed = self.recipe.seed
        generate = partial(generate_groups, engine, group_size=group_size, settings=ways, seed=seed)
        if self.barrier.ranks.is_alone:
            return generate(prompts)
        return write_shared(self.barrier.ranks, prompts, generate, self.barrier, self.rollout_engine, batch)

    def start(self, step: int) -> None:
        """Sync weights before the first step of an attempt, if needed. After a resume the engine needs the
        restored weights, and a remote one may have none yet.
        """
        if step or self.rollout_engine.policy_version < 0:
            self.push_weights(step)
        self.backend.offload_state()

    def push_weights(self, version: int) -> None:
        """Push the trained weights: pause, flush, push, verify, resume. Then offload the trainer.

        Raises `RolloutError` if the engine does not hold the sent weights.
        """
        self.backend.offload_state(weights=False)
        if self.engine_weights == "shared" and isinstance(self.backend, TorchBackend):
            weights = local_parts(self.backend.model)
        elif self.engine_weights == "plain":
            weights = self.backend.plain_weights()
        else:
            weights = self.backend.weights()
        sync_weights(self.rollout_engine, weights, version)
        self.backend.measured()  # both have weights now
        self.backend.offload_state()

    def end_rollout(self) -> None:
        """End the generation of a batch. Until `push_weights` scoring and training have the device."""
        self.backend.measured()
        for engine in self.engine_pool.engines if self.recipe.runtime.offload.engine else ():
            if isinstance(engine, SleepingEngine):
                engine.sleep()

    def export_model(self, folder: Path, card: dict[str, Any]) -> str:
        """Write the Hugging Face folder on the first rank, and return the digest of its weights there. Of
        sharded weights one tensor at a time is complete, on its way into a file.
        """
        self.backend.reload_weights()
        quantize = self.backend.quantize
        if isinstance(self.backend, TorchBackend) and self.backend.root is None:
            # Its model is complete, and in the dtype of computation.
            return save_trained(self.backend.model, self.tokenizer, folder, card, quantize=quantize)
        if not self.ranks.is_main:
            for _ in self.backend.weights():
                pass  # all ranks gather them together
            return ""
        model = self.load_untrained(None, empty=True)
        if model.unread is not None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with add_path_note(folder):
                put_in_file(model, folder.parent, read=isinstance(model, AdaptedLM))  # the base's weights
        model.load_weights(self.backend.weights())
        return save_trained(model, self.tokenizer, folder, card, EXPORTED_BYTES, quantize)


def _open_engines(context: StageContext, path: Path, backend: Backend) -> tuple[EnginePool, EngineWeights]:
    """Return the stage's engines for the model in `path`, which `backend` trains, and what they get."""
    recipe, ranks, helpers = context.recipe, context.ranks, context.helpers
    embedded = recipe.rollout.engine.type == "torch"
    if helpers is not None:
        pool = helpers.open_engines(path, recipe.model.lora is not None)
        if embedded:
            return pool, "trained"
        from opd.rollout.served_engine import ServedEngine
        from opd.served.routed_experts import ServedRouting

        served = [engine for engine in pool.engines if isinstance(engine, ServedEngine)]
        if recipe.rollout.replay_experts is True and (routing := backend.routing) is not None:
            form = ServedRouting(routing.block_layers, routing.depth, routing.experts, routing.per_token)
            for engine in served:
                engine.record_experts(form)
        return pool, "trained" if any(engine.adapters for engine in served) else "plain"
    if not cuts_engines(recipe, path, ranks):
        return embedded_pool(recipe, path, bases=bases_of(context)), "trained" if embedded else "plain"
    if not isinstance(backend, TorchBackend) or backend.root is None:  # sharded otherwise than by FSDP2
        return EnginePool([open_engine(recipe, path, ranks, learns=True)]), "plain"
    sharing = ModelSharing(backend.root, ranks.new_group("engine"), exclusive=False)
    return EnginePool([make_engine(recipe, backend.model, sharing)]), "shared"


def save_trained(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: dict[str, Any],
    max_shard_bytes: int | None = None,
    quantize: Literal["fp8"] | None = None,
) -> str:
    """Write the Hugging Face folder, with adapters merged and also stored beside, or as `quantize` says.
    Returns the weights' digest. With `max_shard_bytes` files have that size, and merging needs little more
    memory than that.
    """
    if isinstance(model, AdaptedLM):
        return save_adapted(model, tokenizer, folder, card, max_shard_bytes)
    most = max_shard_bytes or MAX_SHARD_BYTES
    save_checkpoint(model, tokenizer, folder, card, max_shard_bytes=most, quantize=quantize)
    return model.digest()
