"""The samples of a merge's steps on disk: a trajectory store in the run folder, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from opd.config import Recipe
from opd.errors import ConfigError
from opd.models.causal_lm import CausalLM
from opd.pipelines.route_shares import route_shares
from opd.pipelines.stored_step import StoredSettings, StoredStep
from opd.storage.trajectories import TrajectoryStore, TrajectoryWriter, put_samples
from opd.teachers.routing import Router
from opd.teachers.schedule import TeacherSchedule
from opd.train.backend import Backend
from opd.train.plan_cost import CostModel, DeviceBudget
from opd.train.torch_backend import TorchBackend
from opd.types import Sample

_MIB = 1 << 20


class SampleFiles:
    """Where a step's samples wait for their micro-batch; gone when the step is done."""

    def __init__(self, folder: Path, writer: TrajectoryWriter) -> None:
        self._folder, self._writer = folder, writer

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[SampleFiles]:
        """A store in `folder`, emptied of what an interrupted attempt left: its batch is written again."""
        # A power cut may take what is here: the log of the rollouts has it.
        with TrajectoryWriter(folder, durable=False) as writer:
            writer.retire(writer.uids)
            yield cls(folder, writer)

    @contextmanager
    def holding(self, samples: Sequence[Sample]) -> Iterator[tuple[TrajectoryStore, np.ndarray]]:
        """Write `samples`; the store and their rows in it while the block runs, after which they are gone."""
        put_samples(self._writer, samples)
        uids = [sample.uid for sample in samples]
        try:
            with TrajectoryStore.open(self._folder) as store:
                found = {uid: row for row, uid in enumerate(store.table.uid)}
                yield store, np.array([found[uid] for uid in uids], np.int64)
        finally:
            self._writer.retire(uids)


class StoredSamples:
    """The gradient of a merge's steps from samples on disk."""

    def __init__(
        self, recipe: Recipe, files: SampleFiles, schedule: TeacherSchedule, backend: Backend
    ) -> None:
        assert isinstance(backend, TorchBackend)  # by `check_stored`
        self._recipe, self._files, self._schedule, self._backend = recipe, files, schedule, backend

    def accumulate(self, samples: list[Sample], number: int) -> dict[str, float]:
        """Scores and the gradient of step `number`; metrics. Empties `samples` when they are written.

        Raises what `StoredStep.train` raises, and `StorageError` if the disk is full.
        """
        shares = route_shares(self._recipe, samples)
        with self._files.holding(samples) as (store, rows):
            samples.clear()
            teachers = Router.from_recipe(self._recipe).teachers
            step = StoredStep(
                store, rows, teachers, stored_settings(self._recipe, self._backend.model, shares)
            )
            plan = step.plan(number)
            step.score(self._schedule, plan)
            return step.train(self._backend, self._schedule, plan)


def stored_settings(recipe: Recipe, model: CausalLM, shares: Mapping[str, float] | None) -> StoredSettings:
    """How a step of the recipe is planned; `shares` are the routes' of the loss."""
    config = model.config
    return StoredSettings(
        cost=CostModel.of_model(model.parameter_count, config.num_hidden_layers, config.hidden_size),
        budget=DeviceBudget(recipe.storage.trajectory_mb * _MIB, max_tokens=recipe.distill.batch.max_tokens),
        # A teacher's hidden state, taken to be as wide as the student's: teachers need not be open yet.
        hidden_bytes=config.hidden_size * model.dtype.itemsize,
        shares=shares,
        seed=recipe.seed,
    )


def check_stored(recipe: Recipe, policy_stream: bool, ranks: int) -> None:
    """`ConfigError` where samples on disk do not go with the rest of the recipe."""
    reasons = {
        "distill.loss k1 and distill.rl_coef need every sample's log-probabilities at once": policy_stream,
        "several ranks share the samples in memory": ranks > 1,
        f"train.backend {recipe.train.backend} takes a step's samples together": recipe.train.backend
        != "torch",
        "distill.to_batch is given the samples of a whole step": recipe.distill.to_batch is not None,
    }
    for reason, met in reasons.items():
        if met:
            raise ConfigError(
                f"storage.trajectories disk cannot be used here: {reason}; set it to memory, or change that."
            )
