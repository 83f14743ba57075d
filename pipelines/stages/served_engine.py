"""The student on workers: what `rollout.engine: {type: sglang}` or `vllm` puts at a stage's disposal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from opd.config import Recipe
from opd.config.teachers import ServedEngineConfig, ServedTeacherConfig, SGLangEngineConfig
from opd.errors import RolloutError
from opd.models.hf_folder import read_object
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.student import model_dtype, tokenizer_of
from opd.protocols import Teacher
from opd.retry import Retry
from opd.rollout import vllm_workers
from opd.rollout.engine_pool import EnginePool, RetryPolicy
from opd.rollout.served_engine import ServedEngine, ServedModel
from opd.rollout.sglang_engine import SGLangEngine
from opd.rollout.sglang_workers import FolderPush, TensorPush
from opd.rollout.vllm_engine import Mode, VLLMEngine
from opd.rollout.vllm_workers import Outputs
from opd.rollout.weight_sync import WeightFolder
from opd.served.distinct import check_distinct
from opd.served.http_pool import PoolOptions
from opd.teachers.served_teacher import pool_options

ENGINE = "rollout.engine.urls"
ONCE = RetryPolicy(Retry(attempts=1))
"""The engine's own patience with its workers is all there is: it is the recipe's."""


class ServedWriters:
    """Implements `Helpers`: the student writes on workers, teachers stay where they would be without it."""

    def __init__(self, context: StageContext, config: ServedEngineConfig, stack: ExitStack) -> None:
        self._context, self._config, self._stack = context, config, stack
        self._servers = context.servers
        self._others = context.helpers

    def writers(self, model: Path, adapters: bool = False) -> EnginePool:
        """One engine over all workers, or over this rank's share of them where several ranks write. It holds
        nothing before its first push (`Student.start`), so that what it samples with is always what the
        trainer holds. Raises `ConfigError` if there are fewer workers than ranks, and `RolloutError` if two
        URLs lead to one. `adapters` come merged.
        """
        recipe, ranks = self._context.recipe, self._context.ranks
        config = self._config
        if config.servers is not None and self._servers is not None:
            wanted, told = {"student": (config, model)}, self._arguments()
            config = self._servers.at(wanted, any_weights=True, arguments=told)["student"]
        described = read_object(model / "config.json")
        text = described.get("text_config", described)
        rows: int = text["vocab_size"]
        limit = recipe.rollout.max_sequence
        longest = min(limit, text.get("max_position_embeddings") or limit)
        served = ServedModel(min(len(tokenizer_of(recipe, model)), rows), longest, rows, text)
        options = pool_options(config, ranks.rank, ranks.size)
        own = config.urls_of(ranks.rank, ranks.size)
        if self._servers is not None:
            options = replace(options, given_up=partial(self._servers.given_up, own))
        # All ranks' workers: two ranks must not control one server either.
        check_distinct({ENGINE: options}, RolloutError)
        for teacher, entry in recipe.teachers.items():
            if isinstance(entry, ServedTeacherConfig) and entry.urls:
                check_distinct(
                    {ENGINE: options, f"teachers.{teacher}.urls": pool_options(entry)}, RolloutError
                )
        engine = self._engine(replace(options, urls=own), served, model)
        self._stack.callback(engine.close)
        return EnginePool([engine], ONCE)

    def teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        """See `Helpers`."""
        return None if self._others is None else self._others.teachers(names, vocabulary)

    def _arguments(self) -> dict[str, bool | str]:
        """What servers of this recipe are told when they are started."""
        recipe = self._context.recipe
        if self._config.program == "vllm":
            return {"logprobs-mode": mode_of(recipe)}
        # Without it a server gives nothing back.
        return {"enable-memory-saver": True} if recipe.runtime.offload.engine else {}

    def _engine(self, options: PoolOptions, served: ServedModel, model: Path) -> ServedEngine:
        config = self._config
        if isinstance(config, SGLangEngineConfig):
            by_tensors = config.sync == "tensors"
            push = TensorPush(config.host) if by_tensors else FolderPush(self._folder(model))
            return SGLangEngine(options, served, push, version=-1)
        recipe = self._context.recipe
        push, outputs = vllm_workers.FolderPush(self._folder(model)), Outputs(model, model_dtype(recipe))
        return VLLMEngine(options, served, push, version=-1, mode=mode_of(recipe), outputs=outputs)

    def _folder(self, model: Path) -> WeightFolder:
        root = self._config.folder or self._context.folder.stage(self._context.stage) / "weights"
        folder = WeightFolder(Path(root) / f"rank-{self._context.ranks.rank}", model)
        self._stack.callback(folder.close)
        return folder


def mode_of(recipe: Recipe) -> Mode:
    """In which vLLM workers tell log-probabilities as a run needs them."""
    return "raw_logprobs" if recipe.cuts_tokens else "processed_logprobs"


@contextmanager
def with_engine(context: StageContext) -> Iterator[None]:
    """Let the stage of `context` write with the recipe's engine while the block runs."""
    config, before = context.recipe.rollout.engine, context.helpers
    if not isinstance(config, ServedEngineConfig):
        yield
        return
    with ExitStack() as stack:
        context.helpers = ServedWriters(context, config, stack)
        try:
            yield
        finally:
            context.helpers = before
