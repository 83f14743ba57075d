"""Give a running stage its recipe, its place in the run folder, its reports, and helpers.

Helpers compute for it in other processes: rollout engines and teachers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from opd.config import Recipe
from opd.errors import CheckpointError
from opd.metrics import MemoryMeter, MetricsWriter, NoMetrics
from opd.models.frozen_bases import FrozenBases
from opd.pipelines.records.cards import Cards
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.stage_names import kind_of, model_stage, of_round, split_round, stage_model
from opd.protocols import Teacher
from opd.ranks import Ranks, path_of_rank
from opd.rollout.engine_pool import EnginePool
from opd.rollout.preemption import Preemption
from opd.storage.checkpoints import CheckpointStore
from opd.train.offload import OffloadBuffer

if TYPE_CHECKING:
    from opd.pipelines.launch.servers import Servers


class StageHelpers(Protocol):
    """The engines and teachers that `launch` gives a stage."""

    def open_engines(self, model: Path, adapters: bool = False) -> EnginePool:
        """Return engines with the Hugging Face folder `model` as version 0, or without weights as version -1.

        `adapters`: engines that merge adapters themselves are to get the recipe's.
        """
        ...

    def open_teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        """Return these teachers, cut to `vocabulary` tokens. `None`: they run in this process."""
        ...


@dataclass(slots=True)
class StageContext:
    recipe: Recipe
    folder: RunFolder
    stage: str
    """Name of the stage. It prefixes the uid of every sample that the stage generates."""
    metrics: MetricsWriter
    checkpoints: CheckpointStore
    progress: Callable[[int, int, str], None]
    """`progress(done, total, headline)`."""
    preemption: Preemption
    """The requests to the run: to stop, to free memory, or none."""
    helpers: StageHelpers | None = None
    """Engines and teachers in other processes, if the recipe's `launch` has some."""
    servers: Servers | None = None
    """The inference servers that the run starts itself."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run this stage."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Resources that are closed when the stage ends."""
    memory: MemoryMeter = field(default_factory=MemoryMeter)
    """Who holds how much in this process."""
    bases: FrozenBases = field(default_factory=FrozenBases)
    """What is frozen here and computed with by several."""

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        folder: RunFolder,
        stage: str,
        progress: Callable[[int, int, str], None],
        preemption: Preemption | None = None,
        helpers: StageHelpers | None = None,
        ranks: Ranks | None = None,
        servers: Servers | None = None,
    ) -> StageContext:
        """Open the stage's own folder under `stages/`. Of several ranks the first writes metrics."""
        ranks = ranks or Ranks()
        path = folder.stage_folder(stage)
        return cls(
            recipe,
            folder,
            stage,
            MetricsWriter(path, recipe.runtime.tensorboard, recipe.runtime.sinks, recipe.name)
            if ranks.is_main
            else NoMetrics(),
            CheckpointStore(
                folder.checkpoints_folder(stage), recipe.runtime.keep_checkpoints, folder.owner_id(stage)
            ),
            progress,
            preemption or Preemption(recipe.runtime.grace_seconds),
            helpers,
            servers,
            ranks,
        )

    def rank_path(self, path: Path) -> Path:
        """Return this rank's path for the first rank's `path`."""
        return path_of_rank(path, self.ranks.rank)

    @property
    def offload_buffer(self) -> OffloadBuffer | None:
        """The offload buffer of trained weights while others use the device, if the recipe has one."""
        if not self.recipe.runtime.offload.trainer:
            return None
        return OffloadBuffer(self.folder.stage_folder(self.stage))

    def model_path(self, name: str) -> Path:
        """Return the folder of a model of the run. See `RunFolder.model_folder`."""
        return self.folder.model_folder(self.recipe, name)

    def stage_card(self, result: Mapping[str, object]) -> dict[str, Any]:
        """Return the card of the model that this stage has made, before its evaluation."""
        cards = Cards.from_run(self.recipe, self.folder)
        return cards.card_sections(stage_model(self.stage), result, {})

    @property
    def round(self) -> int:
        """The round of the stage. Baselines and evaluations are of the last one."""
        name, number = split_round(self.stage)
        is_last = name == self.stage and kind_of(name) in ("baseline", "evaluate")
        return self.recipe.rounds if is_last else number

    def start_model(self) -> Path:
        """Return the model that the stage starts from: the base, the merged student of the round before, or
        for the merge the one of `distill.start`.
        """
        start, before = self.recipe.distill.start, self.round - 1
        if self.stage == "merge" and start != "base":
            return self.checked_model(start)
        return self.checked_model(of_round("merged", before) if before else "base")

    def checked_model(self, name: str) -> Path:
        """Return `model_path`, after a comparison of the files with their stage's record."""
        self.folder.stage_done(model_stage(name))
        return self.model_path(name)

    def teacher_source(self, name: str) -> str:
        """Return the folder or URL of a teacher: the recipe's own, or the specialist of that domain."""
        ours = of_round(f"specialist:{name}", self.round)
        return self.recipe.given_teachers().get(name) or str(self.checked_model(ours))


def damaged_memory(stage: str, part: str) -> CheckpointError:
    """Return the error for an impossible `part` of `StepContext.memory` in a checkpoint."""
    return CheckpointError(
        f"the checkpoint of {stage} holds what no step has left there of its {part}; delete it, to go on"
        " from the one before."
    )
