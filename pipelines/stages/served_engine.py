"""Run the student on workers: `rollout.engine: {type: sglang}` or `vllm`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from opd.config import RayLaunch, Recipe
from opd.config.servers import Argument
from opd.config.teachers import ServedEngineConfig, ServedTeacherConfig, SGLangEngineConfig
from opd.config.train import LoRAConfig
from opd.errors import ConfigError, RolloutError
from opd.loop_thread import LoopThread
from opd.models.adapters import target_layers
from opd.models.architecture import empty_model
from opd.models.hf_folder import is_whole, read_config, read_object
from opd.models.stored_form import StoredForm
from opd.models.token_ids import id_count
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import sequence_limit
from opd.pipelines.stages.publishing import whole_model
from opd.pipelines.stages.student import model_dtype, tokenizer_of
from opd.progress import set_activity
from opd.protocols import Teacher
from opd.ranks import Ranks
from opd.retry import Retry
from opd.rollout.adapted_student import AdaptedStudent
from opd.rollout.adapter_workers import AdapterPush
from opd.rollout.delta_push import DeltaPush, Receiver
from opd.rollout.engine_pool import EnginePool, RetryPolicy
from opd.rollout.served_engine import ServedEngine, ServedModel, StudentForm, WorkerProgram, program_named
from opd.rollout.served_workers import RETRY, FolderPush, Push
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_client import PoolOptions, RefusedError, UnavailableError
from opd.served.http_pool import HTTPPool, check_distinct
from opd.teachers.served_teacher import pool_options

_log = logging.getLogger(__name__)

ENGINE = "rollout.engine.urls"
ONCE = RetryPolicy(Retry(attempts=1))
"""The engine's own patience with its workers is the recipe's, and the only one."""


class ServedHelpers:
    """Implements `StageHelpers`: the student generates on workers, teachers are not affected."""

    def __init__(self, context: StageContext, config: ServedEngineConfig, stack: ExitStack) -> None:
        self._context, self._config, self._stack = context, config, stack
        self._servers = context.servers
        self._others = context.helpers
        self._sync_mode = config.sync_of(context.recipe.launch.type)
        self._receivers: dict[str, Receiver] = {}
        """By the URL of a server that the run has started on a cluster."""

    def open_engines(self, model: Path, adapters: bool = False) -> EnginePool:
        """Return one engine over all workers, which all ranks share. It is empty before its first push
        (`Student.start`), so it always samples with the trainer's weights. Raises `RolloutError` if two URLs
        lead to one. `adapters`: it gets those, alone if it accepts them (`ServedEngine.adapters`).

        Of a quantised model workers get the numbers, and so they begin with a plain copy of it.
        """
        recipe, ranks = self._context.recipe, self._context.ranks
        config, model = self._config, self._plain_model(model)
        described = read_object(model / "config.json")
        text = described.get("text_config", described)
        merged = merged_because(recipe, lambda: empty_model(read_config(model), model))
        if config.servers is not None and self._servers is not None:
            arguments: dict[str, Argument] = {}
            if recipe.model.lora is not None and merged is None:
                arguments |= config.lora_arguments(recipe.model.lora)
            arguments |= self._worker_program.started_with(recipe)
            wanted = {"student": (config, model)}
            config = self._servers.serve_models(wanted, any_weights=True, arguments=arguments)["student"]
            if self._sync_mode == "delta":
                self._receivers = self._servers.mirrors_by_url(config)
        rows: int = text["vocab_size"]
        tokenizer = tokenizer_of(recipe, model)
        longest, _ = sequence_limit(recipe, tokenizer, recipe.rollout.max_sequence, "rollout.max_sequence")
        form = StoredForm(empty_model(read_config(model), model))
        files = form if form.differs else None
        served = ServedModel(min(id_count(tokenizer), rows), longest, rows, text, files)
        options = pool_options(config, ranks.rank, ranks.size)
        if self._servers is not None:
            options = replace(options, given_up=partial(self._servers.group_trouble, config.urls))
        check_distinct({ENGINE: options}, RolloutError)
        for teacher, entry in recipe.teachers.items():
            if isinstance(entry, ServedTeacherConfig) and entry.urls:
                check_distinct(
                    {ENGINE: options, f"teachers.{teacher}.urls": pool_options(entry)}, RolloutError
                )
        alone = adapters and self._sends_alone(options, merged)
        self._stack.callback(_remove_empty, self._weights_root())  # after the files in it
        engine = self._open_engine(options, served, model, alone)
        self._stack.callback(engine.close)
        return EnginePool([engine], ONCE)

    def open_teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        return None if self._others is None else self._others.open_teachers(names, vocabulary)

    def _plain_model(self, model: Path) -> Path:
        """Return `model`, of quantised weights a copy as numbers. All ranks call it together."""
        if is_whole(model):
            return model
        recipe, ranks = self._context.recipe, self._context.ranks
        out = self._context.folder.stage_folder(self._context.stage) / "plain"
        dtype, tokenizer = model_dtype(recipe), tokenizer_of(recipe, model)
        ranks.main_first(
            lambda: whole_model(model, out, tokenizer, dtype) if ranks.is_main else None, "the servers' model"
        )
        return out

    def _sends_alone(self, options: PoolOptions, reason: str | None) -> bool:
        """Return whether workers get adapters alone, if there is no `reason` to merge them. The result is the
        same on all ranks, which call it together.
        """
        lora, ranks = self._context.recipe.model.lora, self._context.ranks
        if reason is None and lora is not None and self._config.lora is None and ranks.is_main:
            reason = adapter_fault(options, self._config.program, lora)
        merged = ranks.any_rank(reason is not None, "what workers are sent of adapters")
        if merged:
            reason = reason or "the first rank's log says why"
            _log.info("adapters are sent merged into all weights: %s", reason)
        else:
            _log.info("adapters are sent alone")
        return not merged

    def _open_engine(
        self, options: PoolOptions, served: ServedModel, model: Path, alone: bool
    ) -> ServedEngine:
        recipe, program, push = self._context.recipe, self._worker_program, self._weight_push(model)
        if alone:
            assert recipe.model.lora is not None
            adapted = AdaptedStudent(model, recipe.model.lora, model_dtype(recipe))
            if self._context.ranks.is_main:  # which alone proves weights
                with set_activity(f"loading {model}, as servers are to hold it"):
                    assert adapted.base_tensors
            push = AdapterPush(self._weights_root(), adapted, push, program.loads)
            self._stack.callback(push.close)
        student = StudentForm(model, model_dtype(recipe), recipe.cuts_tokens)
        return program.open(options, served, push, student, self._ranks)

    @cached_property
    def _ranks(self) -> Ranks:
        """The ranks, in a group of their own."""
        return self._context.ranks.new_group(f"{self._context.stage}/servers")

    @property
    def _worker_program(self) -> WorkerProgram:
        return program_named(self._config.program)

    def _weight_push(self, model: Path) -> Push:
        config, launch, read = self._config, self._context.recipe.launch, self._worker_program.read
        if self._sync_mode == "tensors" and isinstance(config, SGLangEngineConfig):
            from opd.rollout.sglang_engine import TensorPush

            return TensorPush(config.host)
        if self._sync_mode != "delta" or not isinstance(launch, RayLaunch):
            folder = WeightFolder(self._weights_root(), model)
            self._stack.callback(folder.close)
            return FolderPush(folder, read)
        from opd.pipelines.launch.ray.server import put_weights

        return DeltaPush(self._receivers, put_weights, read, model, launch.bucket_mb << 20)

    def _weights_root(self) -> Path:
        """Return this rank's folder for new weights, of which the first rank's alone is used. Another run may
        have the same parent folder. So each run has its own in it, the same one when it resumes.
        """
        run, stage = self._context.folder, self._context.stage
        if self._config.folder is None:
            root = run.stage_folder(stage) / "weights"
        else:
            name = hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:12]
            root = Path(self._config.folder) / f"opd-{name}-{stage}"
        return root / f"rank-{self._context.ranks.rank}"


def merged_because(recipe: Recipe, module: Callable[[], Any]) -> str | None:
    """Return `Recipe.merged_because` for the student of `module`, which has no weights.

    Its layers tell which of them get adapters if the recipe does not. Raises `ConfigError` if the recipe
    wants adapters sent alone that servers do not apply.
    """
    engine, lora = recipe.rollout.engine, recipe.model.lora
    if lora is None or lora.targets or not isinstance(engine, ServedEngineConfig):
        return recipe.merged_because
    names = sorted({layer.rpartition(".")[2] for layer in target_layers(module())})
    reason = engine.merged_because(lora.model_copy(update={"targets": names}))
    if reason is not None and engine.lora == "adapters":
        raise ConfigError(f"rollout.engine.lora is adapters, but {reason}; set it to merged.")
    return recipe.merged_because or reason


def _remove_empty(root: Path) -> None:
    """Remove a rank's folder of weights, and that of all ranks once the last has left."""
    with suppress(OSError):
        root.rmdir()
        root.parent.rmdir()


def adapter_fault(options: PoolOptions, program: str, lora: LoRAConfig) -> str | None:
    """Return the reason why servers of kind `program` cannot get adapters alone. It is that of the first one
    that cannot. `None` if all answering servers can.
    """
    pool = HTTPPool("the rollout engine", options, RolloutError)
    loop = LoopThread("adapters")
    try:
        return loop.run(_find_fault(pool, program, lora))
    finally:
        loop.run(pool.close())
        loop.close()


async def _find_fault(pool: HTTPPool, program: str, lora: LoRAConfig) -> str | None:
    lacks = program_named(program).lacks
    questions = [partial(lacks, pool, server, lora) for server in pool.servers]
    calls = [RETRY.call_async(question, UnavailableError) for question in questions]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for server, flags in zip(pool.servers, answers, strict=True):
        if isinstance(flags, RefusedError):
            return str(flags)
        if isinstance(flags, BaseException) and not isinstance(flags, UnavailableError):
            raise flags
        if isinstance(flags, str):
            return f"{server.url} was not started with {flags}"
    return None  # a server that is away now is checked later


@contextmanager
def with_engine(context: StageContext) -> Iterator[None]:
    """Let the stage of `context` generate with the recipe's engine while the block runs."""
    config, helpers = context.recipe.rollout.engine, context.helpers
    if not isinstance(config, ServedEngineConfig):
        yield
        return
    with ExitStack() as stack:
        context.helpers = ServedHelpers(context, config, stack)
        try:
            yield
        finally:
            context.helpers = helpers
